//! What `ibid doctor` looks at where artefacts are kept.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use ibid::contents::Contents;
use ibid::ids::{ClaimId, JobId};
use ibid::vault::{Asked, Key, Vault};

use super::{Findings, existing, look};
use crate::commands::vault;
use crate::config::{Database, Offload, Settings};

/// Below this a disk will soon be full.
const LITTLE_FREE_BYTES: u64 = 1024 * 1024 * 1024;

pub(super) fn lost_artefacts(findings: &mut Findings, contents: Option<&Contents>, folder: &Path) {
    let kept = contents.map_or(0, |contents| contents.kept);
    if kept > 0 && !folder.exists() {
        findings.failure(
            "artefacts",
            format!(
                "{kept} finished exports are kept, but {} is not there; restore it from the \
                 backup that the database is from",
                folder.display()
            ),
        );
    }
}

pub(super) fn storage(findings: &mut Findings, folder: &Path) {
    const CHECK: &str = "storage";
    if look(findings, CHECK, folder).is_none() {
        return;
    }
    let shown = folder.display();
    match write_and_read(folder) {
        Ok(true) => findings.ok(CHECK, format!("{shown} gives back what is written to it")),
        Ok(false) => findings.failure(
            CHECK,
            format!("{shown} gives back other bytes than were written; replace the disk"),
        ),
        Err(error) => findings.failure(
            CHECK,
            format!("{shown} cannot be used: {error}; make it writable, or name another folder with --artifacts"),
        ),
    }
}

pub(super) fn object_store(findings: &mut Findings, url: &str, settings: &Settings) {
    const CHECK: &str = "storage";
    let vault = match vault(&settings.artifacts) {
        Ok(vault) => vault,
        Err(failure) => {
            findings.failure(CHECK, failure.message());
            return;
        }
    };
    // The doctor works on a thread that may block.
    match tokio::runtime::Handle::current().block_on(vault.probe()) {
        Ok(true) => findings.ok(
            CHECK,
            format!(
                "{url} gives back what is written to it; let a lifecycle rule of the bucket end \
                 unfinished uploads after some days, since nobody can list those of a ledger that \
                 is gone"
            ),
        ),
        Ok(false) => findings.failure(
            CHECK,
            format!("{url} gives back other bytes than were written; find out why"),
        ),
        Err(error) => findings.failure(
            CHECK,
            format!(
                "{url} cannot be used: {error}; look at its address, its keys and their rights \
                 (list, get, put, delete)"
            ),
        ),
    }
    if settings.offload == Offload::Presigned {
        offload(findings, &vault);
    }
}

/// Whether addresses of the store can be signed to which downloads are sent on.
fn offload(findings: &mut Findings, vault: &Vault) {
    const CHECK: &str = "offload";
    let nothing = Key::Artefact {
        job: JobId::from_bytes([0; 16]),
        claim: ClaimId::from_bytes([0; 16]),
    };
    let signing = vault.presign(nothing, Asked::Head, Duration::from_secs(1));
    // The doctor works on a thread that may block.
    match tokio::runtime::Handle::current().block_on(signing) {
        Ok(Some(address)) => {
            let place = address.split(['?', '#']).next().unwrap_or_default();
            let host = place.split('/').take(3).collect::<Vec<_>>().join("/");
            findings.ok(
                CHECK,
                format!(
                    "downloads are sent on to {host}, which the users must be able to reach; a \
                     revocation stops those that begin from then on, and an address that was \
                     given before for a minute no more"
                ),
            );
        }
        Ok(None) => findings.failure(CHECK, "a folder serves no downloads; set offload to none"),
        Err(error) => findings.failure(
            CHECK,
            format!(
                "no address of the store can be signed: {error}; give ibid keys that may sign, or \
                 set offload to none"
            ),
        ),
    }
}

/// Whether bytes that were written and flushed into `folder` can be read again.
fn write_and_read(folder: &Path) -> std::io::Result<bool> {
    let written: Vec<u8> = (0..=u8::MAX).cycle().take(64 * 1024).collect();
    // Loses its name when this ends; if it is killed, the next long sweep takes it away.
    let mut file = tempfile::Builder::new()
        .prefix(ibid::vault::PROBE_PREFIX)
        .tempfile_in(folder)?;
    file.write_all(&written)?;
    file.as_file().sync_all()?;
    File::open(folder)?.sync_all()?;
    let mut read = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut read)?;
    file.close()?;
    Ok(read == written)
}

pub(super) fn free_space(findings: &mut Findings, settings: &Settings) {
    const CHECK: &str = "free space";
    let mut devices = Vec::new();
    let files = settings.databases().filter_map(|database| match database {
        Database::Sqlite(path) => Some(path.as_path()),
        Database::Postgres(_) => None,
    });
    for path in settings.artifacts.folder().into_iter().chain(files) {
        let Some(place) = existing(path) else {
            continue;
        };
        let device = place.metadata().map_or(0, |metadata| metadata.dev());
        if devices.contains(&device) {
            continue;
        }
        devices.push(device);
        let shown = place.display();
        let free = match rustix::fs::statvfs(&place) {
            Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
            Err(error) => {
                findings.warning(CHECK, format!("it cannot be told at {shown}: {error}"));
                continue;
            }
        };
        let text = format!("{} MiB at {shown}", free / (1024 * 1024));
        if free < settings.min_free {
            findings.failure(
                CHECK,
                format!("only {text}, below min_free_bytes, so jobs wait; free some"),
            );
        } else if free < LITTLE_FREE_BYTES {
            findings.warning(CHECK, format!("only {text}; free some soon"));
        } else {
            findings.ok(CHECK, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_is_tried_without_a_trace() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_and_read(folder.path()).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(write_and_read(&folder.path().join("missing")).is_err());
    }
}
