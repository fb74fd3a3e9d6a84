//! What `ibid doctor` looks at where artefacts are kept.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ibid::contents::Contents;

use super::{Findings, existing, look};
use crate::commands::vault;
use crate::config::{Artifacts, Database, Settings};

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

pub(super) fn object_store(findings: &mut Findings, url: &str, store: &Artifacts) {
    const CHECK: &str = "storage";
    let vault = match vault(store) {
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
}

/// Whether bytes that were written and flushed into `folder` can be read again.
fn write_and_read(folder: &Path) -> std::io::Result<bool> {
    let written: Vec<u8> = (0..=u8::MAX).cycle().take(64 * 1024).collect();
    // Has no name, or loses it when this ends.
    let mut file = tempfile::Builder::new()
        .prefix(".ibid-doctor-")
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
