//! `ibid doctor`: what keeps the installation from working, and what to do about it. It looks
//! and leaves nothing behind.

mod databases;
mod storage;

use std::fs::{File, Metadata};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use ibid::contents::Contents;
use ibid::time::{Clock, Time};
use rustix::fs::{Access, FlockOperation};
use serde_json::json;

use super::{Failure, say};
use crate::config::{
    Artifacts, Config, Environment, Flags, ServeFlags, Settings, StoreFlags, WorkFlags, escape,
};
use crate::keys;
use crate::tls::Certificate;
use databases::{log, look_into, pins};
use storage::{free_space, lost_artefacts, object_store, storage};

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
        Artifacts::Store { url, .. } => object_store(findings, url, settings),
    }
    free_space(findings, settings);
    clock(findings, contents.as_ref(), Clock::system().now());
    signing_keys(findings, &settings.signing_keys);
    if let (Some(cert), Some(key)) = (&settings.tls_cert, &settings.tls_key) {
        certificate(findings, cert, key);
    }
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

fn certificate(findings: &mut Findings, cert: &Path, key: &Path) {
    const CHECK: &str = "certificate";
    match Certificate::open(cert, key) {
        Ok(_) => findings.ok(CHECK, format!("{} and its key", cert.display())),
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
