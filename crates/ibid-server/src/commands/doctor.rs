//! `ibid doctor`: what keeps the installation from working, and what to do about it. It looks
//! and leaves nothing behind.

use std::fs::{File, Metadata};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use ibid::contents::Contents;
use ibid::postgres::{OwnTables, Pg};
use ibid::sqlite::inspect;
use ibid::time::{Clock, Time};
use rustix::fs::{Access, FlockOperation};
use serde_json::json;

use super::{Failure, say, vault};
use crate::config::{
    Artifacts, Config, Database, Environment, Flags, ServeFlags, Settings, StoreFlags, WorkFlags,
    escape,
};
use crate::keys;

/// Below this a disk will soon be full.
const LITTLE_FREE_BYTES: u64 = 1024 * 1024 * 1024;

/// 2025 and 2100: a clock outside was never set.
const SANE: std::ops::Range<Time> =
    Time::from_seconds(1_735_689_600)..Time::from_seconds(4_102_444_800);

/// How far a recorded time may lie ahead, since nodes' clocks differ a little.
const LEEWAY: Duration = Duration::from_secs(5);

/// Look for what keeps ibid from working
///
/// Prints a line for each check: ok, warning or failure, and what to do. The exit code is 1 if
/// any failed. Leaves nothing behind.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid doctor --data /srv/ibid
  ibid doctor --json")]
pub struct DoctorArgs {
    /// Print a JSON line for each check: {"result", "check", "text"}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreFlags,
    #[command(flatten)]
    work: WorkFlags,
    #[command(flatten)]
    serve: ServeFlags,
}

/// Checks everything.
///
/// # Errors
/// At least one check failed.
pub async fn run(args: DoctorArgs) -> Result<(), Failure> {
    let flags = args.store.flags().merge(args.work.flags());
    let mut findings = Findings {
        json: args.json,
        failures: 0,
    };
    if let Some(config) = configuration(&mut findings, &flags.merge(args.serve.flags())) {
        let settings = config.settings;
        // Files are read here and the database is checked, which takes its time.
        let checking = tokio::task::spawn_blocking(move || {
            examine(&mut findings, &settings);
            findings
        });
        findings = checking
            .await
            .map_err(|e| Failure::failed(format!("the checks broke off: {e}")))?;
    }
    match findings.failures {
        0 => Ok(()),
        1 => Err(Failure::failed("1 check failed; do what its line says")),
        many => Err(Failure::failed(format!(
            "{many} checks failed; do what their lines say"
        ))),
    }
}

/// Says what each check found, as it is found.
struct Findings {
    json: bool,
    failures: u32,
}

impl Findings {
    fn ok(&mut self, check: &str, text: impl AsRef<str>) {
        self.say("ok", check, text.as_ref());
    }

    fn warning(&mut self, check: &str, text: impl AsRef<str>) {
        self.say("warning", check, text.as_ref());
    }

    fn failure(&mut self, check: &str, text: impl AsRef<str>) {
        self.failures += 1;
        self.say("failure", check, text.as_ref());
    }

    fn say(&self, result: &str, check: &str, text: &str) {
        if self.json {
            say(&json!({"result": result, "check": check, "text": text}).to_string());
        } else {
            say(&format!("{result:7}  {check}: {}", escape(text)));
        }
    }
}

fn configuration(findings: &mut Findings, flags: &Flags) -> Option<Config> {
    const CHECK: &str = "configuration";
    let resolved =
        Environment::from_process().and_then(|environment| Config::resolve(flags, &environment));
    match resolved {
        Ok(config) => {
            for warning in config.warnings() {
                findings.warning(CHECK, warning);
            }
            findings.ok(CHECK, "every setting can work");
            Some(config)
        }
        Err(error) => {
            for problem in error.problems() {
                findings.failure(CHECK, problem);
            }
            None
        }
    }
}

fn examine(findings: &mut Findings, settings: &Settings) {
    data_folder(findings, &settings.data);
    let contents = look_into(findings, "database", &settings.database);
    let elsewhere = settings
        .log_elsewhere()
        .map(|source| look_into(findings, "source", source));
    let in_log = elsewhere.as_ref().unwrap_or(&contents);
    if let (Some(in_ledger), Some(in_log)) = (&contents, in_log) {
        log(findings, in_log, in_ledger.exports);
        pins(findings, in_ledger, in_log);
    }
    match &settings.artifacts {
        Artifacts::Folder(folder) => {
            lost_artefacts(findings, contents.as_ref(), folder);
            storage(findings, folder);
        }
        store @ Artifacts::Store { url, .. } => object_store(findings, url, store),
    }
    free_space(findings, settings);
    clock(findings, contents.as_ref(), Clock::system().now());
    signing_keys(findings, &settings.signing_keys);
    if settings.public_url.is_none() {
        findings.warning(
            "public_url",
            "it is not set, so download links are paths without a host; set public_url to how \
             the world reaches the API",
        );
    }
    server(findings, &settings.data);
}

fn data_folder(findings: &mut Findings, folder: &Path) {
    const CHECK: &str = "data folder";
    let shown = folder.display();
    let Some(metadata) = look(findings, CHECK, folder) else {
        return;
    };
    if !metadata.is_dir() {
        findings.failure(
            CHECK,
            format!("{shown} is not a folder; name another with --data"),
        );
        return;
    }
    if !writable(folder) {
        findings.failure(CHECK, format!("make {shown} writable for this user"));
        return;
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        findings.warning(
            CHECK,
            format!("others on this machine can look into it; run `chmod 700 {shown}`"),
        );
        return;
    }
    findings.ok(CHECK, format!("{shown} is there, for its owner only"));
}

/// What is at `path`; if nothing is, whether it can be created is said.
fn look(findings: &mut Findings, check: &str, path: &Path) -> Option<Metadata> {
    let shown = path.display();
    match path.metadata() {
        Ok(metadata) => return Some(metadata),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if existing(path).is_some_and(|folder| folder.is_dir() && writable(&folder)) {
                findings.warning(
                    check,
                    format!(
                        "{shown} is not there yet and is created when it is needed; if it should \
                         be there, correct --data"
                    ),
                );
            } else {
                findings.failure(
                    check,
                    format!("{shown} cannot be created; make the folder above it writable"),
                );
            }
        }
        Err(error) => findings.failure(
            check,
            format!("{shown} cannot be looked at: {error}; give this user the right to"),
        ),
    }
    None
}

/// The nearest of `path` and the folders above it that exists.
fn existing(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    path.ancestors()
        .find(|path| path.symlink_metadata().is_ok())
        .map(Path::to_owned)
}

fn writable(folder: &Path) -> bool {
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// Checks a database, and gives what is in it if it is sound.
fn look_into(findings: &mut Findings, check: &str, database: &Database) -> Option<Contents> {
    match database {
        Database::Sqlite(path) => sqlite(findings, check, path),
        Database::Postgres(url) => postgres(findings, check, url),
    }
}

fn sqlite(findings: &mut Findings, check: &str, path: &Path) -> Option<Contents> {
    look(findings, check, path)?;
    let shown = path.display();
    let found = match inspect(path, Clock::system().now()) {
        Ok(found) => found,
        Err(error) => {
            findings.failure(check, error.to_string());
            return None;
        }
    };
    if !found.damage.is_empty() {
        findings.failure(
            check,
            format!(
                "{shown} is damaged ({}); stop everything that uses it, keep a copy, and go back \
                 to a backup",
                found.damage.join("; ")
            ),
        );
        return None;
    }
    let (schema, known) = (found.schema, found.known_schema);
    if schema > known {
        findings.failure(
            check,
            format!(
                "{shown} was written by a newer ibid (schema {schema}, this one knows {known}); \
                 use that version"
            ),
        );
        return None;
    }
    if schema < known {
        findings.warning(
            check,
            format!(
                "{shown} has schema {schema}; the next command that opens it brings it to {known}"
            ),
        );
        return None;
    }
    if found.journal_mode != "wal" {
        findings.warning(
            check,
            format!(
                "its journal mode is {} instead of wal; the next command that opens it sets it",
                found.journal_mode
            ),
        );
    }
    findings.ok(check, format!("{shown} is sound, schema {schema}"));
    found.contents
}

fn postgres(findings: &mut Findings, check: &str, url: &str) -> Option<Contents> {
    let looking = async { Pg::connect(url).await?.inspect().await };
    // The doctor works on a thread that may block.
    let found = match tokio::runtime::Handle::current().block_on(looking) {
        Ok(found) => found,
        Err(error) => {
            findings.failure(check, error.to_string());
            return None;
        }
    };
    if found.standby {
        findings.failure(check, "it is a standby; connect ibid to the primary");
    } else if !found.anchored {
        findings.failure(
            check,
            "it is not the one that ibid has worked in (it was restored, copied or upgraded), so \
             no export is created or worked on and nothing is deleted; run `ibid admin adopt` once \
             nobody uses the other one",
        );
    } else {
        findings.ok(check, "PostgreSQL answers, and its schema is up to date");
    }
    if !found.fsync {
        findings.warning(
            check,
            "fsync is off, so a power cut can lose what was answered; turn it on",
        );
    }
    if found.asynchronous {
        findings.warning(
            check,
            "its standbys follow asynchronously, so a failover can undo the last seconds, an \
             accepted export or a revocation among them; set synchronous_standby_names if that \
             must not be",
        );
    }
    if found.changes > 0 {
        findings.warning(
            check,
            format!(
                "{} rows of messages or revisions were updated or deleted, which ibid never does; \
                 exports that held them fail; find out who did",
                found.changes
            ),
        );
    }
    match &found.own_tables {
        Some(own) => {
            own_tables(findings, own);
            // Where it cannot be read, what is in it cannot be told.
            own.readable.then_some(found.contents)
        }
        None => Some(found.contents),
    }
}

fn own_tables(findings: &mut Findings, found: &OwnTables) {
    const CHECK: &str = "own tables";
    if !found.views.is_empty() {
        findings.ok(
            CHECK,
            format!(
                "{} are views over {}, which the application writes; docs/own-tables.md says what \
                 it must keep to besides what is checked",
                found.views.join(", "),
                found.tables.join(", ")
            ),
        );
    }
    for failure in &found.failures {
        findings.failure(CHECK, failure);
    }
    for warning in &found.warnings {
        findings.warning(CHECK, warning);
    }
}

fn log(findings: &mut Findings, contents: &Contents, exports: u64) {
    const CHECK: &str = "log";
    let Contents {
        conversations,
        messages,
        ..
    } = contents;
    if contents.loading {
        findings.warning(
            CHECK,
            "a first load is not finished and no export can be created; run the same `ibid \
             import` again, or give it up with `ibid admin end-load`",
        );
    } else if *conversations == 0 {
        findings.warning(CHECK, "there is nothing in it; fill it with `ibid import`");
    } else {
        findings.ok(
            CHECK,
            format!("{messages} messages in {conversations} conversations; {exports} exports"),
        );
    }
}

/// Whether the log knows of the exports for which it may still have to be read.
fn pins(findings: &mut Findings, in_ledger: &Contents, in_log: &Contents) {
    const CHECK: &str = "pins";
    let lost = in_ledger.pins.lost(&in_log.pins);
    match lost.first() {
        None => findings.ok(
            CHECK,
            format!(
                "the log knows of all {} exports that are not done",
                in_ledger.pins.needed.len()
            ),
        ),
        Some(first) => findings.failure(
            CHECK,
            format!(
                "the log does not know of {} exports that are not done ({first} is one): it was \
                 put back to an older state, or it is not the log from which they were created; \
                 correct --source, or if it is right, let their users ask anew",
                lost.len()
            ),
        ),
    }
}

fn lost_artefacts(findings: &mut Findings, contents: Option<&Contents>, folder: &Path) {
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

fn storage(findings: &mut Findings, folder: &Path) {
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

fn object_store(findings: &mut Findings, url: &str, store: &Artifacts) {
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

fn free_space(findings: &mut Findings, settings: &Settings) {
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

fn clock(findings: &mut Findings, contents: Option<&Contents>, now: Time) {
    const CHECK: &str = "clock";
    if !SANE.contains(&now) {
        findings.failure(CHECK, format!("it says {now}; set this machine's clock"));
        return;
    }
    match contents.and_then(|contents| contents.latest) {
        Some(latest) if latest > now.plus(LEEWAY) => findings.failure(
            CHECK,
            format!(
                "it says {now}, but the ledger has recorded {latest}; set this machine's clock, \
                 by which leases, links and retention are judged"
            ),
        ),
        _ => findings.ok(CHECK, format!("it says {now}")),
    }
}

fn signing_keys(findings: &mut Findings, path: &Path) {
    const CHECK: &str = "signing keys";
    match keys::check(path) {
        Ok(Some(ring)) => findings.ok(CHECK, format!("{} in {}", ring.len(), path.display())),
        Ok(None) => findings.ok(CHECK, "there are none yet; `ibid serve` makes them"),
        Err(error) => findings.failure(CHECK, error.to_string()),
    }
}

fn server(findings: &mut Findings, data: &Path) {
    const CHECK: &str = "server";
    let path = data.join("serve.lock");
    // No lock file, no server. Should it start right now, it finds its lock taken only for as
    // long as the next lines take.
    let held = File::open(&path).ok().and_then(|mut file| {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => None,
            Err(_) => {
                let mut process = String::new();
                let _ = file.read_to_string(&mut process);
                Some(process.trim().to_owned())
            }
        }
    });
    findings.ok(
        CHECK,
        match held.as_deref() {
            None => "no `ibid serve` runs on this data folder".to_owned(),
            Some("") => "`ibid serve` runs on this data folder".to_owned(),
            Some(process) => format!("`ibid serve` (process {process}) runs on this data folder"),
        },
    );
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

    #[test]
    fn the_nearest_folder_above_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        assert_eq!(existing(&path.join("a/b/c")), Some(path.clone()));
        assert_eq!(existing(&path), Some(path));
    }

    #[test]
    fn a_clock_behind_the_ledger_is_a_failure() {
        let now = Time::from_seconds(1_800_000_000);
        let failures = |latest: Option<Time>, now: Time| {
            let mut findings = Findings {
                json: false,
                failures: 0,
            };
            let contents = Contents {
                conversations: 0,
                messages: 0,
                kept: 0,
                exports: 0,
                loading: false,
                latest,
                pins: ibid::contents::Pins::default(),
            };
            clock(&mut findings, Some(&contents), now);
            findings.failures
        };
        assert_eq!(failures(None, now), 0);
        assert_eq!(failures(Some(now.plus(Duration::from_secs(4))), now), 0);
        assert_eq!(failures(Some(now.plus(Duration::from_secs(6))), now), 1);
        assert_eq!(failures(None, Time::from_seconds(0)), 1);
    }
}
