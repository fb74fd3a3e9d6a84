//! `ibid export`: the client of the API. Asks for an export, waits, fetches, checks.

mod api;
mod file;
mod sidecar;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ibid::export::State;
use ibid::key::IdempotencyKey;
use ibid::scope::Scope;
use indicatif::ProgressBar;
use serde_json::json;
use tokio::time::Instant;

use super::{BYTES, Exit, Failure, MESSAGES, bar, complain, say};
use crate::config::{Environment, escape};
use api::{Api, Artefact, Refusal, Status};
use file::PartFile;
use sidecar::{Remembered, Sidecar};

/// How long a server may be gone while an export is waited for: it may be starting anew.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait between two looks when the server does not say.
const POLL: Duration = Duration::from_secs(1);

/// Ask a server for an export, wait for it, download and verify it
///
/// The idempotency key of the request is kept in FILE.ibid-key until FILE is there, so the same
/// command continues the same export after an interruption. FILE appears whole and verified or
/// not at all.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  export IBID_TOKEN=ibid_...
  ibid export --server https://chat.example -o alice.jsonl.gz
  ibid export --server http://127.0.0.1:8787 --scope conv:c-team -o team.jsonl.gz")]
pub struct ExportArgs {
    /// Address of the API, an http or https URL [default: IBID_SERVER]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// Token of the user [default: IBID_TOKEN, which other users of this machine cannot see]
    #[arg(long)]
    token: Option<Secret>,
    /// What to export: all, or conv:ID
    #[arg(long, default_value = "all", value_parser = Scope::parse)]
    scope: Scope,
    /// Idempotency key of the request [default: a random one]
    #[arg(long, value_parser = |key: &str| IdempotencyKey::parse(key.as_bytes()))]
    key: Option<IdempotencyKey>,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace FILE if it is there
    #[arg(long)]
    force: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// A token on the command line, which nothing shows.
#[derive(Clone)]
struct Secret(String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Secret {
        Secret(text)
    }
}

/// Makes and fetches one export.
///
/// # Errors
/// The server refuses or does not answer, the export ended without a file, or the file cannot
/// be written.
pub async fn run(args: ExportArgs) -> Result<(), Failure> {
    let environment = Environment::from_process()?;
    let given = |flag: &Option<String>, variable: &str| {
        flag.clone()
            .or_else(|| environment.get(variable).map(str::to_owned))
    };
    let server = given(&args.server, "IBID_SERVER").ok_or_else(|| {
        Failure::usage("which server to ask is not said; give --server or set IBID_SERVER")
    })?;
    let token = given(
        &args.token.as_ref().map(|token| token.0.clone()),
        "IBID_TOKEN",
    )
    .ok_or_else(|| Failure::usage("who is asking is not said; set IBID_TOKEN or give --token"))?;
    let api = Api::new(&server, &token)?;
    if api.is_exposed() {
        complain("ibid: warning: the token travels unencrypted; use an https address");
    }
    file::refuse_taken(&args.output, args.force)?;
    let sidecar = Sidecar::open(
        &args.output,
        api.base(),
        &args.scope.to_string(),
        args.key.as_ref(),
    )?;
    let fetched = fetch(&api, &args, sidecar.remembered()).await;
    match &fetched {
        Ok(_) | Err(Ended::ForGood(_)) => sidecar.remove(),
        // Nothing was created that this command could continue.
        Err(Ended::NotCreated(_)) if sidecar.is_fresh() => sidecar.remove(),
        Err(Ended::NotCreated(_) | Ended::ForNow(_)) => {}
    }
    match fetched {
        Ok(done) => {
            done.say(&args);
            Ok(())
        }
        Err(Ended::NotCreated(failure) | Ended::ForNow(failure) | Ended::ForGood(failure)) => {
            Err(failure)
        }
    }
}

/// How a run ended without a file, by what the same command would do next time.
enum Ended {
    /// The request was refused or never sent: it would ask again.
    NotCreated(Failure),
    /// It would go on with the same export.
    ForNow(Failure),
    /// The export has come to an end; there is nothing to go on with.
    ForGood(Failure),
}

/// An export that has become a file.
struct Done {
    job_id: String,
    replayed: bool,
    artefact: Artefact,
}

impl Done {
    fn say(&self, args: &ExportArgs) {
        let file = args.output.display().to_string();
        let Artefact {
            messages,
            bytes,
            sha256,
            ..
        } = &self.artefact;
        if args.json {
            let line = json!({
                "job_id": self.job_id,
                "file": file,
                "messages": messages,
                "bytes": bytes,
                "sha256": sha256,
                "replayed": self.replayed,
            });
            say(&line.to_string());
        } else {
            say(&format!(
                "{}: {messages} messages, {bytes} bytes, sha256 {sha256}",
                escape(&file)
            ));
        }
    }
}

async fn fetch(api: &Api, args: &ExportArgs, request: &Remembered) -> Result<Done, Ended> {
    let created = api.create(request).await.map_err(|refusal| {
        // Else it may have been created although no answer came.
        if refusal.undone {
            Ended::NotCreated(refusal.failure)
        } else {
            Ended::ForNow(refusal.failure)
        }
    })?;
    let artefact = wait(api, &created.job_id).await?;
    download(api, args, &artefact)
        .await
        .map_err(Ended::ForNow)?;
    Ok(Done {
        job_id: created.job_id,
        replayed: created.replayed,
        artefact,
    })
}

/// Asks how far the job is until it is done.
async fn wait(api: &Api, job: &str) -> Result<Artefact, Ended> {
    let bar = bar(0, "exporting", MESSAGES);
    let result = poll(api, job, &bar).await;
    bar.finish_and_clear();
    result
}

async fn poll(api: &Api, job: &str, bar: &ProgressBar) -> Result<Artefact, Ended> {
    let mut answered = Instant::now();
    let mut told = None;
    loop {
        let pause = match api.status(job).await {
            Ok((status, pause)) => {
                answered = Instant::now();
                if let Some(artefact) = ended(&status)? {
                    return Ok(artefact);
                }
                show(&status, bar, &mut told);
                pause
            }
            Err(Refusal {
                passing: true,
                retry_after,
                failure,
                ..
            }) if answered.elapsed() < PATIENCE => {
                bar.set_message(format!("waiting: {}", escape(&failure.message)));
                retry_after
            }
            Err(refusal) => return Err(Ended::ForNow(refusal.failure)),
        };
        tokio::time::sleep(pause.unwrap_or(POLL)).await;
    }
}

/// The artefact, if the job is done; an error if it has ended otherwise.
fn ended(status: &Status) -> Result<Option<Artefact>, Ended> {
    let failure = match status.state {
        State::Queued | State::Running => return Ok(None),
        State::Done => {
            let artefact = status.artefact().ok_or_else(|| {
                Ended::ForNow(Failure::failed(
                    "the server says that the export is done but not where it is; its version \
                     may be another one than this command's",
                ))
            })?;
            return Ok(Some(artefact));
        }
        State::Failed => {
            let detail = status.error.as_ref().map(|error| error.detail.as_str());
            format!("the export failed: {}", detail.unwrap_or("no reason given"))
        }
        State::Revoked => match &status.revoked {
            Some(revoked) => format!(
                "the export was revoked by {}: {}",
                revoked.by, revoked.reason
            ),
            None => "the export was revoked".to_owned(),
        },
        State::Expired => "the export has expired and its file is deleted".to_owned(),
    };
    Err(Ended::ForGood(Failure::failed(format!(
        "{}; the same command (with another --key, if you gave one) asks for a new one",
        failure.trim_end_matches('.')
    ))))
}

/// Shows how far it is; why it waits also where there is no terminal, once.
fn show(status: &Status, bar: &ProgressBar, told: &mut Option<String>) {
    if let Some(total) = status.progress.messages_total {
        bar.set_length(total);
    }
    bar.set_position(status.progress.messages_done);
    let waiting = status
        .waiting
        .as_ref()
        .map(|waiting| waiting.detail.clone());
    if let Some(detail) = &waiting
        && *told != waiting
    {
        bar.suspend(|| complain(&format!("the export waits: {detail}")));
    }
    *told = waiting;
}

/// Fetches the artefact in one request into the part file, checks it, and lets it become the
/// file.
async fn download(api: &Api, args: &ExportArgs, artefact: &Artefact) -> Result<(), Failure> {
    let mut response = api.download(artefact).await?;
    let mut part = PartFile::create(&args.output)?;
    let bar = bar(artefact.bytes, "downloading", BYTES);
    let result = async {
        while let Some(chunk) = response.chunk().await.map_err(|e| {
            Failure::new(
                Exit::Unreachable,
                format!(
                    "the download broke off after {} of {} bytes ({}); the same command begins it \
                     again",
                    part.bytes(),
                    artefact.bytes,
                    api::cause(&e)
                ),
            )
        })? {
            part.write(&chunk)?;
            bar.set_position(part.bytes());
        }
        part.finish(artefact, args.force)
    }
    .await;
    bar.finish_and_clear();
    result
}
