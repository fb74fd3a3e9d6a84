//! The commands, and what they share: how they fail, speak, and open the store.

pub mod admin;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod download;
mod duration;
pub mod export;
mod fetching;
mod http;
pub mod import;
pub mod serve;
pub mod token;
pub mod verify;
pub mod worker;

use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use ibid::cut::CutRule;
use ibid::exporter::{Databases, ExportTerms, Exporter};
use ibid::ids::JobId;
use ibid::ledger::LedgerError;
use ibid::limits::Limits;
use ibid::postgres::Pg;
use ibid::time::Clock;
use ibid::vault::Vault;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::net::{TcpListener, TcpSocket};

use crate::config::{
    Artifacts, Config, ConfigError, Database, Environment, Flags, Offload, Settings, escape,
};

pub use http::http_client;

/// How a command ends that was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It failed.
    Failed = 1,
    /// The command line or the configuration cannot work.
    Usage = 2,
    /// The server refuses (4xx).
    Refused = 3,
    /// The server does not answer.
    Unreachable = 4,
}

/// Why a command was not done: a sentence that says what to do next, and the exit code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub exit: Exit,
    /// Usually one sentence; a line for each where there are several.
    pub message: String,
}

impl Failure {
    pub fn failed(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Failed, message)
    }

    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Usage, message)
    }

    pub fn new(exit: Exit, message: impl Into<String>) -> Failure {
        Failure {
            exit,
            message: message.into(),
        }
    }

    /// What is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Says on standard error what is wrong, and gives the exit code.
    pub fn report(&self) -> ExitCode {
        for line in self.message.lines() {
            complain(&format!("ibid: {line}"));
        }
        ExitCode::from(self.exit as u8)
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        Failure::usage(error.to_string())
    }
}

/// Whether a line could not be written to standard output, other than because nobody reads it.
static UNSAID: AtomicBool = AtomicBool::new(false);

/// Writes a line to standard output. When nobody reads it any more (`ibid ... | head`) the
/// command goes on all the same; a disk that is full is told at its end, by [`all_said`].
pub fn say(line: &str) {
    let written = writeln!(std::io::stdout(), "{line}");
    if written.is_err_and(|error| error.kind() != ErrorKind::BrokenPipe) {
        UNSAID.store(true, Ordering::Relaxed);
    }
}

/// Whether everything that was said could be written.
///
/// # Errors
/// Something is missing in the output.
pub fn all_said() -> Result<(), Failure> {
    if UNSAID.load(Ordering::Relaxed) {
        return Err(Failure::failed(
            "the output could not be written whole; look at where it goes",
        ));
    }
    Ok(())
}

/// Writes a line to standard error, without what could steer a terminal: it may hold the words
/// of a file or of a server.
pub fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", escape(line));
}

/// The effective configuration; what is odd in it is logged.
///
/// # Errors
/// What cannot work, with [`Exit::Usage`].
pub fn load(flags: &Flags) -> Result<Config, Failure> {
    let environment = Environment::from_process()?;
    #[cfg(feature = "failpoints")]
    if let Some(point) = environment.get("IBID_TEST_FAILPOINT") {
        ibid::failpoint::arm(point).map_err(Failure::usage)?;
    }
    #[cfg(feature = "next-release")]
    if environment.get("IBID_TEST_RELEASE") == Some("next") {
        ibid::next_release::begin();
    }
    let config = Config::resolve(flags, &environment)?;
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    Ok(config)
}

/// Opens the store that the settings name; what is missing of it is created.
///
/// # Errors
/// It cannot be opened, and what to do about that.
pub async fn open(settings: &Settings) -> Result<Exporter, Failure> {
    let limit = |limit: Option<std::num::NonZeroU32>| limit.map_or(0, |n| u64::from(n.get()));
    let terms = ExportTerms {
        limits: Limits {
            unfinished_per_user: limit(settings.unfinished_per_user),
            exports_per_user_per_day: limit(settings.exports_per_user_per_day),
        },
        cut: CutRule {
            part_bytes: settings.part_bytes,
            part_messages: limit(settings.part_messages),
        },
        link_life: settings.link,
    };
    let log = settings.log_elsewhere();
    let databases = Databases::open(&settings.database, log, Clock::system()).await;
    let databases = databases.map_err(|e| Failure::failed(e.to_string()))?;
    let vault = vault(&settings.artifacts)?.leaving_free(settings.min_free);
    let offload = settings.offload == Offload::Presigned;
    Ok(Exporter::on(databases, vault, terms).offloading(offload))
}

/// A port to listen on at `address`, which `flag` gives, and the address that it has then: port 0
/// is whichever is free.
///
/// # Errors
/// It cannot be had, and what to do about that.
fn bind(address: SocketAddr, flag: &str) -> Result<(TcpListener, SocketAddr), Failure> {
    let listener = listen(address).map_err(|e| {
        Failure::failed(format!(
            "cannot listen on {address}: {e}; stop what uses it, or give another address with \
             {flag}"
        ))
    })?;
    let address = listener
        .local_addr()
        .map_err(|e| Failure::failed(format!("the address is not known: {e}; try again")))?;
    Ok((listener, address))
}

/// How many connections may wait to be accepted, if the system lets so many. In a longer burst a
/// client's attempt is dropped and made again a second later.
const BACKLOG: u32 = 4096;

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Connections of a server before this one do not keep the port.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// A port for those who watch the process, if the settings name one, and what is said of it.
fn bind_metrics(settings: &Settings) -> Result<Option<(TcpListener, String)>, Failure> {
    let Some(address) = settings.metrics_listen else {
        return Ok(None);
    };
    let (listener, address) = bind(address, "--metrics-listen")?;
    let text = format!("metrics are on http://{address}/metrics");
    Ok(Some((listener, text)))
}

/// The store of artefacts that the settings name.
fn vault(artifacts: &Artifacts) -> Result<Vault, Failure> {
    match artifacts {
        Artifacts::Folder(folder) => Vault::in_folder(folder).map_err(|e| {
            Failure::failed(format!(
                "cannot use the folder of artefacts {}: {e}; make it writable, or name another \
                 with --artifacts",
                folder.display()
            ))
        }),
        Artifacts::Store { url, options } => Vault::at_url(url, options.iter()).map_err(|e| {
            Failure::usage(format!(
                "cannot use the store of artefacts {url}: {e}; correct --artifacts or the \
                 variables of its provider, as AWS_REGION"
            ))
        }),
    }
}

/// Brings the schema of a PostgreSQL database up to date and gives how many migrations that took;
/// an SQLite file is brought up to date whenever it is opened.
///
/// # Errors
/// It cannot be, and what to do about that.
async fn migrate(database: &Database) -> Result<usize, Failure> {
    let Database::Postgres(url) = database else {
        return Ok(0);
    };
    let migrating = async { Pg::connect(url).await?.migrate().await };
    migrating.await.map_err(|e| Failure::failed(e.to_string()))
}

/// As [`open`], for commands that are about something that must be there already: a slip in
/// `--data` must not make a new and empty store.
async fn open_existing(settings: &Settings) -> Result<Exporter, Failure> {
    for database in settings.databases() {
        if let Database::Sqlite(path) = database
            && !path.exists()
        {
            return Err(Failure::failed(format!(
                "there is no database {}; name the data folder with --data",
                path.display()
            )));
        }
    }
    open(settings).await
}

/// Creates the data folder, for its owner only, where it is missing.
fn create_folder(folder: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt as _;
    let created = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder);
    created.map_err(|e| {
        Failure::failed(format!(
            "cannot create the folder {}: {e}; make its parent writable, or name another folder \
             with --data",
            folder.display()
        ))
    })
}

/// A job on the command line.
fn job_id(text: &str) -> Result<JobId, &'static str> {
    JobId::parse(text).ok_or("a job is named by its id of 26 lower-case letters and digits")
}

/// What the ledger's error means to the one who typed `job`.
fn ledger_failure(error: &LedgerError, job: JobId) -> Failure {
    match error {
        LedgerError::NotFound => Failure::failed(format!(
            "there is no export {job}; `ibid admin list` shows those that are"
        )),
        LedgerError::Refused(state) => Failure::failed(format!(
            "this cannot be done to the export {job}, which is {}",
            state.as_str()
        )),
        LedgerError::LeaseLost
        | LedgerError::OtherDigest { .. }
        | LedgerError::Unavailable(_)
        | LedgerError::Unusable(_)
        | LedgerError::Unreadable(_) => unavailable(error),
    }
}

/// A database that does not do what it should.
fn unavailable(error: &dyn std::error::Error) -> Failure {
    Failure::failed(format!("{error}; run `ibid doctor` to look closer"))
}

/// A bar on standard error, shown only on a terminal. `unit` is a template of indicatif for how
/// far it is.
fn bar(total: u64, what: &str, unit: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    let template = format!("{{msg}} {{wide_bar}} {unit} {{eta}}");
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// How far a bar is in messages.
const MESSAGES: &str = "{human_pos}/{human_len} messages";
/// How far a bar is in bytes.
const BYTES: &str = "{bytes}/{total_bytes}";
