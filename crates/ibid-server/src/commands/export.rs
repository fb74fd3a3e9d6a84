//! `ibid export`: the client of the API. Asks for an export, waits, fetches, checks.

mod sidecar;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Mutex;

use clap::Args;
use ibid::client::{Artefact, Client, ClientError, Fetch, Link, Status, files};
use ibid::key::IdempotencyKey;
use ibid::scope::Scope;
use serde_json::json;

use super::fetching::{self, Secret, client_failure};
use super::{Failure, MESSAGES, bar, complain, say};
use crate::config::{Environment, escape};
use sidecar::{Remembered, Sidecar};

/// Ask a server for an export, wait for it, download and verify it
///
/// The idempotency key of the request is kept in FILE.ibid-key until FILE is there, and what is
/// downloaded in FILE.part, so the same command continues the same export after an interruption,
/// where it was. FILE appears whole and verified or not at all.
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
    /// Connections at the same time for the download, 1 to 32
    #[arg(long, value_name = "N", default_value = "1", value_parser = fetching::connections)]
    connections: NonZeroU32,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
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
    let client = Client::new(&server, &token).map_err(client_failure)?;
    if client.is_exposed() {
        complain("ibid: warning: the token travels unencrypted; use an https address");
    }
    files::refuse_taken(&args.output, args.force).map_err(client_failure)?;
    let sidecar = Sidecar::open(
        &args.output,
        client.server(),
        &args.scope.to_string(),
        args.key.as_ref(),
    )?;
    let fetched = fetch(&client, &args, sidecar.remembered()).await;
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
    /// How many bytes of the file an earlier run had downloaded.
    resumed: u64,
}

impl Done {
    fn say(&self, args: &ExportArgs) {
        let file = args.output.display().to_string();
        let Artefact {
            messages, bytes, ..
        } = self.artefact;
        let sha256 = hex::encode(self.artefact.sha256);
        if args.json {
            let line = json!({
                "job_id": self.job_id,
                "file": file,
                "messages": messages,
                "bytes": bytes,
                "sha256": sha256,
                "replayed": self.replayed,
                "resumed": self.resumed,
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

async fn fetch(client: &Client, args: &ExportArgs, request: &Remembered) -> Result<Done, Ended> {
    let key = request.key()?;
    let created = client.create(&key, &args.scope).await.map_err(|error| {
        // Else it may have been created although no answer came.
        let undone = error.is_undone();
        let failure = client_failure(error);
        if undone {
            Ended::NotCreated(failure)
        } else {
            Ended::ForNow(failure)
        }
    })?;
    let artefact = wait(client, created.job_id).await?;
    let fetch = Fetch {
        connections: args.connections,
        replace: args.force,
        expected: Some(artefact.expected()),
        ..Fetch::default()
    };
    let link = Link::of_job(client, created.job_id, &artefact).map_err(ending)?;
    let fetched = fetching::fetch(&fetch, link, &args.output, Some(artefact.bytes)).await;
    let fetched = fetched.map_err(Ended::ForNow)?;
    Ok(Done {
        job_id: created.job_id.to_string(),
        replayed: created.replayed,
        artefact,
        resumed: fetched.resumed,
    })
}

/// Asks how far the job is until it is done, and shows it.
async fn wait(client: &Client, job: ibid::ids::JobId) -> Result<Artefact, Ended> {
    let bar = bar(0, "exporting", MESSAGES);
    let told = Mutex::new(None);
    let show = |status: &Status| {
        if let Some(total) = status.progress.messages_total {
            bar.set_length(total);
        }
        bar.set_position(status.progress.messages_done);
        let waiting = status.waiting.as_ref();
        let waiting = waiting.map(|waiting| waiting.detail.clone());
        let Ok(mut told) = told.lock() else {
            return;
        };
        // Also where there is no terminal, once.
        if let Some(detail) = &waiting
            && *told != waiting
        {
            bar.suspend(|| complain(&format!("the export waits: {detail}")));
        }
        *told = waiting;
    };
    let waited = client.wait(job, &show).await;
    bar.finish_and_clear();
    waited.map_err(ending)
}

/// How the wait for an export ended.
fn ending(error: ClientError) -> Ended {
    let over = matches!(error, ClientError::Ended(_));
    let mut failure = client_failure(error);
    if !over {
        return Ended::ForNow(failure);
    }
    failure.message = format!(
        "{}; the same command (with another --key, if you gave one) asks for a new one",
        failure.message.trim_end_matches('.')
    );
    Ended::ForGood(failure)
}
