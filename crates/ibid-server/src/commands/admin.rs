//! `ibid admin`: an operator at work, on the database and not over HTTP.

use clap::{Args, Subcommand, ValueEnum};
use ibid::export::{RevokedBy, State};
use ibid::exporter::Exporter;
use ibid::ids::{JobId, UserId};
use ibid::ledger::{Cursor, Filter, Found, LedgerError};
use ibid::postgres::Pg;
use ibid::source::SourceError;
use ibid::time::Time;
use serde_json::json;

use super::{
    Failure, job_id, ledger_failure, load, migrate, open, open_existing, say, unavailable,
};
use crate::config::{Database, Settings, StoreFlags, escape};

/// The longest reason for a revocation, in characters.
const MAX_REASON_CHARS: usize = 1000;

/// How many jobs are read in one transaction.
const PAGE: u32 = 500;

/// Revoke, restore and list exports; disable and enable accounts
///
/// Works on the database itself, also while a server runs, which heeds it at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid admin list --user alice --state done
  ibid admin revoke aaaqeayeaudaocajbifqydiob4 --reason 'asked for by legal'
  ibid admin disable alice")]
pub struct AdminArgs {
    #[command(subcommand)]
    command: AdminCommand,
}

#[derive(Debug, Subcommand)]
enum AdminCommand {
    /// Take an export back: work on it stops, downloads are refused
    ///
    /// Its bytes stay until the retention ends, so that it can be restored. Copies that were
    /// downloaded cannot be recalled.
    Revoke {
        /// Id of the export
        #[arg(value_name = "JOB", value_parser = job_id)]
        job: JobId,
        /// Why; its owner sees this
        #[arg(long, value_parser = reason)]
        reason: String,
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Delete what nobody needs: expired artefacts, what killed workers left, old records
    ///
    /// Servers and workers do the same by themselves, all of it once an hour.
    Sweep {
        /// Print the counts as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Let a failed export be tried again, from what is recorded
    ///
    /// Also one that is done if its bytes are lost or damaged: they are made again, and only the
    /// same file is accepted.
    Retry {
        /// Id of the export
        #[arg(value_name = "JOB", value_parser = job_id)]
        job: JobId,
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Let exports be created although an import into the empty log was given up
    ///
    /// While the first import is not finished, no export can be created, because it would not be
    /// whole. If that import will never be finished, this ends the wait.
    EndLoad {
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Bring the database's schema up to date
    ///
    /// Nodes that run meanwhile go on. SQLite is brought up to date by every command that opens
    /// it, PostgreSQL by this one (and by `serve --migrate`) only.
    Migrate {
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Take a restored, copied or upgraded PostgreSQL database for the one that goes on
    ///
    /// In a database that is not the one that ibid has worked in, it creates no exports, works on
    /// none and deletes nothing. Once nobody uses the other one any more, this makes this one
    /// (--database, and --source where that is another) ibid's own. Exports that were created
    /// before stay as they are.
    ///
    /// The store of artefacts goes with it: from then on, what this database does not name is
    /// deleted there. If the other one goes on too, as with a copy for tests, first give this one a
    /// store of its own with --artifacts; in a shared one each would delete the other's files.
    Adopt {
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Take the revocation of a finished export back
    Restore {
        /// Id of the export
        #[arg(value_name = "JOB", value_parser = job_id)]
        job: JobId,
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Disable an account: its requests and downloads are refused
    Disable {
        /// User whose account it is
        #[arg(value_parser = user_id)]
        user: UserId,
        #[command(flatten)]
        store: StoreFlags,
    },
    /// Enable an account again
    Enable {
        /// User whose account it is
        #[arg(value_parser = user_id)]
        user: UserId,
        #[command(flatten)]
        store: StoreFlags,
    },
    /// List exports, newest first
    List(ListArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Only those of this user
    #[arg(long, value_parser = user_id)]
    user: Option<UserId>,
    /// Only those in this state
    #[arg(long, value_enum)]
    state: Option<StateName>,
    /// Print a JSON line for each export
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreFlags,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StateName {
    Queued,
    Running,
    Done,
    Failed,
    Revoked,
    Expired,
}

impl From<StateName> for State {
    fn from(name: StateName) -> State {
        match name {
            StateName::Queued => State::Queued,
            StateName::Running => State::Running,
            StateName::Done => State::Done,
            StateName::Failed => State::Failed,
            StateName::Revoked => State::Revoked,
            StateName::Expired => State::Expired,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// What was asked for cannot be done, and why.
pub async fn run(args: AdminArgs) -> Result<(), Failure> {
    match args.command {
        AdminCommand::Revoke { job, reason, store } => {
            revoke(&existing(&store).await?, job, reason).await
        }
        AdminCommand::Restore { job, store } => restore(&existing(&store).await?, job).await,
        AdminCommand::Disable { user, store } => {
            set_account(&existing(&store).await?, &user, false).await
        }
        AdminCommand::Enable { user, store } => {
            set_account(&existing(&store).await?, &user, true).await
        }
        AdminCommand::Sweep { json, store } => sweep(&load(&store.flags())?.settings, json).await,
        AdminCommand::Retry { job, store } => retry(&existing(&store).await?, job).await,
        AdminCommand::List(args) => list(&existing(&args.store).await?, args).await,
        AdminCommand::EndLoad { store } => end_load(&existing(&store).await?).await,
        AdminCommand::Migrate { store } => migrate_all(&store).await,
        AdminCommand::Adopt { store } => adopt(&store).await,
    }
}

async fn existing(store: &StoreFlags) -> Result<Exporter, Failure> {
    open_existing(&load(&store.flags())?.settings).await
}

async fn sweep(settings: &Settings, json: bool) -> Result<(), Failure> {
    let janitor = open_existing(settings).await?.janitor(settings.record);
    let swept = janitor.sweep_all().await;
    let swept = swept.map_err(|error| Failure::failed(error.to_string()))?;
    if json {
        say(&json!(swept).to_string());
        return Ok(());
    }
    say(&format!(
        "{} exports expired, {} objects and {} unfinished uploads deleted, {} old records and {} \
         pins removed",
        swept.expired, swept.objects, swept.uploads, swept.records, swept.pins
    ));
    Ok(())
}

async fn retry(exporter: &Exporter, job: JobId) -> Result<(), Failure> {
    let retried = exporter.retry(job).await;
    retried.map_err(|error| match error {
        LedgerError::Refused(State::Done) => Failure::failed(format!(
            "the export {job} is done and its bytes are whole, so there is nothing to be made again"
        )),
        error => ledger_failure(&error, job),
    })?;
    say(&format!("{job} is queued again."));
    Ok(())
}

async fn end_load(exporter: &Exporter) -> Result<(), Failure> {
    let ended = exporter.source.end_load().await;
    ended.map_err(|error| unavailable(&error))?;
    say("The first load counts as finished; exports can be created.");
    Ok(())
}

async fn adopt(store: &StoreFlags) -> Result<(), Failure> {
    let settings = load(&store.flags())?.settings;
    let urls = settings.databases().filter_map(|database| match database {
        Database::Postgres(url) => Some(url),
        Database::Sqlite(_) => None,
    });
    let urls: Vec<_> = urls.collect();
    if urls.is_empty() {
        return Err(Failure::usage(
            "only a database in PostgreSQL needs to be adopted; name it with --database, or with \
             --source if only the log is there",
        ));
    }
    for url in urls {
        let adopting = async { Pg::connect(url).await?.adopt().await };
        adopting.await.map_err(|e| Failure::failed(e.to_string()))?;
    }
    say("This database is ibid's own now; exports can be created and are worked on.");
    say(
        "So is the store of artefacts: what this database does not name is deleted there. If the \
         other database is still used, stop this one and give it a store of its own (--artifacts).",
    );
    Ok(())
}

async fn migrate_all(store: &StoreFlags) -> Result<(), Failure> {
    let config = load(&store.flags())?;
    let mut applied = 0;
    for database in config.settings.databases() {
        applied += migrate(database).await?;
    }
    // Opening a file brings it up to date, and shows that all is.
    open(&config.settings).await?;
    say(&match applied {
        0 => "The schema was up to date already.".to_owned(),
        1 => "The schema is up to date: 1 migration applied.".to_owned(),
        count => format!("The schema is up to date: {count} migrations applied."),
    });
    Ok(())
}

fn user_id(text: &str) -> Result<UserId, String> {
    UserId::parse(text).map_err(|reason| format!("it {reason}"))
}

fn reason(text: &str) -> Result<String, String> {
    if text.trim().is_empty() || text.chars().count() > MAX_REASON_CHARS {
        return Err(format!("it must be 1 to {MAX_REASON_CHARS} characters"));
    }
    Ok(text.to_owned())
}

async fn revoke(exporter: &Exporter, job: JobId, reason: String) -> Result<(), Failure> {
    let export = exporter
        .revoke(job, reason)
        .await
        .map_err(|error| ledger_failure(&error, job))?;
    match &export.revocation {
        Some(revocation) => {
            let by = revocation.by.as_str();
            let reason = escape(&revocation.reason);
            say(&format!(
                "{job} is revoked (by {by} at {}: {reason})",
                revocation.at
            ));
        }
        None => say(&format!(
            "{job} is {} already; it cannot be downloaded any more",
            export.state.as_str()
        )),
    }
    Ok(())
}

async fn restore(exporter: &Exporter, job: JobId) -> Result<(), Failure> {
    match exporter.restore(job).await {
        Ok(export) => {
            let now = exporter.ledger.now().await.map_err(|e| unavailable(&e))?;
            match (export.state_at(now), export.expires_at) {
                (State::Done, Some(until)) => {
                    say(&format!("{job} is done again, until {until}"));
                }
                (state, _) => say(&format!("{job} is {} now", state.as_str())),
            }
            Ok(())
        }
        Err(LedgerError::Refused(state)) => Err(not_restorable(exporter, job, state).await),
        Err(error) => Err(ledger_failure(&error, job)),
    }
}

/// Why an export that is there cannot be restored.
async fn not_restorable(exporter: &Exporter, job: JobId, state: State) -> Failure {
    let found = exporter.ledger.find(job).await.ok().flatten();
    let export = found.map(|found| found.export);
    let revoked_by = export
        .as_ref()
        .and_then(|export| export.revocation.as_ref())
        .map(|revocation| revocation.by);
    let why = match revoked_by {
        None => format!("it is {} and not revoked", state.as_str()),
        Some(RevokedBy::Admin) => {
            "it was not finished when it was revoked, or its bytes are deleted; its owner can ask \
             for a new export"
                .to_owned()
        }
        Some(by @ (RevokedBy::Owner | RevokedBy::Erasure)) => format!(
            "it was withdrawn by {} and its bytes are deleted; its owner can ask for a new export",
            by.as_str()
        ),
    };
    Failure::failed(format!("{job} cannot be restored: {why}"))
}

async fn set_account(exporter: &Exporter, user: &UserId, enabled: bool) -> Result<(), Failure> {
    exporter
        .source
        .set_account(user, enabled)
        .await
        .map_err(|error| match error {
            SourceError::Refused(why) => Failure::failed(why),
            other => unavailable(&other),
        })?;
    say(&if enabled {
        format!("the account {user} is enabled")
    } else {
        format!("the account {user} is disabled; its requests and downloads are refused")
    });
    Ok(())
}

async fn list(exporter: &Exporter, args: ListArgs) -> Result<(), Failure> {
    let filter = Filter {
        user: args.user,
        state: args.state.map(State::from),
    };
    let mut before = None;
    if !args.json {
        say(&row(&[
            "JOB",
            "STATE",
            "CREATED",
            "ATTEMPTS",
            "MESSAGES",
            "DOWNLOADS",
            "USER",
            "SCOPE",
        ]));
    }
    loop {
        let now = exporter.ledger.now().await.map_err(|e| unavailable(&e))?;
        let page = exporter
            .ledger
            .search(filter.clone(), before, PAGE)
            .await
            .map_err(|e| unavailable(&e))?;
        let Some(last) = page.last() else {
            return Ok(());
        };
        before = Some(Cursor {
            created_at: last.export.created_at,
            job_id: last.export.job_id,
        });
        for found in &page {
            if args.json {
                say(&document(found, now).to_string());
            } else {
                say(&line(found, now));
            }
        }
    }
}

fn line(found: &Found, now: Time) -> String {
    let export = &found.export;
    row(&[
        &export.job_id.to_string(),
        export.state_at(now).as_str(),
        &export.created_at.to_string(),
        &export.attempts.to_string(),
        &format!("{}/{}", found.messages_done, export.messages_total),
        &found.downloads.count.to_string(),
        export.user.as_str(),
        &export.scope.to_string(),
    ])
}

fn row(cells: &[&str; 8]) -> String {
    let [
        job,
        state,
        created,
        attempts,
        messages,
        downloads,
        user,
        scope,
    ] = cells;
    let line = format!(
        "{job:26}  {state:7}  {created:27}  {attempts:>8}  {messages:>15}  {downloads:>5}  \
         {user:16}  {scope}"
    );
    line
}

fn document(found: &Found, now: Time) -> serde_json::Value {
    let export = &found.export;
    let artefact = export.artefact.as_ref();
    json!({
        "job_id": export.job_id,
        "user": export.user,
        "scope": export.scope.to_string(),
        "state": export.state_at(now),
        "created_at": export.created_at,
        "started_at": export.started_at,
        "finished_at": export.finished_at,
        "expires_at": export.expires_at,
        "attempts": export.attempts,
        "heartbeat_at": export.lease.as_ref().map(|lease| lease.renewed_at),
        "parts_done": found.parts_done,
        "messages_done": found.messages_done,
        "messages_total": export.messages_total,
        "bytes": artefact.map(|artefact| artefact.bytes),
        "sha256": artefact.map(|artefact| hex::encode(artefact.sha256)),
        "downloads": found.downloads,
        "error": export.problem,
        "waiting": export.waiting,
        "revoked": export.revocation,
    })
}
