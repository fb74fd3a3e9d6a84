//! `ibid demo`: the whole story on a generated chat, over a real port, with real processes.

mod chat;
mod stage;

use std::time::Duration;

use clap::Args;
use ibid::postgres::Pg;
use reqwest::header::{CONTENT_RANGE, ETAG, IF_RANGE, RANGE};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::Failure;
use stage::{Answer, Stage};

/// Play the whole story on a generated chat
///
/// In a temporary folder, over a real port, with real processes: one request and its
/// repetitions, a worker that is killed half way, a download that is cut and resumed, links that
/// are refused. Every step is checked; exits with 1 if one does not come out as it must.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid demo
  ibid demo --json
  ibid demo --database postgres://ibid@localhost/empty

With --database, the last step is played on SQLite: the bytes are the same.")]
pub struct DemoArgs {
    /// Print a JSON line for each step instead of a table
    #[arg(long)]
    json: bool,
    /// Keep log and ledger in this PostgreSQL database, which must have no log yet
    #[arg(long, value_name = "URL")]
    database: Option<String>,
    /// Keep the temporary folder and say where it is
    #[arg(long)]
    keep: bool,
}

/// Plays the story; every step is checked.
///
/// # Errors
/// A step did not come out as it must; the table says which.
pub async fn run(args: DemoArgs) -> Result<(), Failure> {
    let folder = tempfile::Builder::new()
        .prefix("ibid-demo-")
        .tempdir()
        .map_err(|e| Failure::failed(format!("no temporary folder: {e}; set TMPDIR")))?;
    let mut steps = Steps::new(args.json);
    let played = story(folder.path(), args.database.as_deref(), &mut steps).await;
    let path = folder.path().display().to_string();
    if args.keep {
        let _ = folder.keep();
        eprintln!("The folder {path} is kept.");
    }
    played?;
    steps.end()
}

/// Steps as they are printed, and how many were wrong.
struct Steps {
    json: bool,
    count: u32,
    wrong: u32,
}

impl Steps {
    fn new(json: bool) -> Steps {
        if !json {
            super::say(
                "     step                                            expected                    came out",
            );
        }
        Steps {
            json,
            count: 0,
            wrong: 0,
        }
    }

    /// Prints a step: what was done, what must come out, what did.
    fn step(&mut self, what: &str, expected: impl ToString, came_out: impl ToString) {
        let (expected, came_out) = (expected.to_string(), came_out.to_string());
        let good = expected == came_out;
        self.count += 1;
        self.wrong += u32::from(!good);
        if self.json {
            let line = json!({
                "step": self.count, "what": what, "expected": expected, "came_out": came_out,
                "ok": good,
            });
            super::say(&line.to_string());
        } else {
            let mark = if good { "ok" } else { "NO" };
            let number = self.count;
            super::say(&format!(
                "{mark} {number:>2}  {what:<46}  {expected:<26}  {came_out}"
            ));
        }
    }

    fn end(&self) -> Result<(), Failure> {
        if self.wrong > 0 {
            return Err(Failure::failed(format!(
                "{} of {} steps did not come out as they must; please report this",
                self.wrong, self.count
            )));
        }
        if !self.json {
            super::say(&format!("All {} steps came out as they must.", self.count));
        }
        Ok(())
    }
}

/// The demo fills the log, which it cannot where that is an application's own.
///
/// # Errors
/// It is, or the database does not answer.
async fn log_of_ibid(url: &str) -> Result<(), Failure> {
    let looking = async { Pg::connect(url).await?.inspect().await };
    let found = looking.await.map_err(|e| Failure::failed(e.to_string()))?;
    match found.own_tables {
        None => Ok(()),
        Some(_) => Err(Failure::failed(
            "the log of this database is the application's own, to which the demo cannot append; \
             give it an empty database",
        )),
    }
}

async fn story(
    folder: &std::path::Path,
    database: Option<&str>,
    steps: &mut Steps,
) -> Result<(), Failure> {
    let first = folder.join("first");
    let mut stage = Stage::new(&first, database)?;
    if let Some(url) = database {
        stage.admin(&["migrate"]).await?;
        log_of_ibid(url).await?;
    }

    // A log, a server without workers, a user with a token.
    let accepted = stage.import("chat.jsonl", &chat::before()).await?;
    if database.is_some() && accepted != chat::before().len() as u64 {
        return Err(Failure::failed(
            "the database has a log already; give the demo an empty one",
        ));
    }
    steps.step(
        "import the chat: events taken",
        chat::before().len(),
        accepted,
    );
    stage.serve().await?;
    let token = stage.token("alice").await?;

    // Promise 1: one request, one job.
    let all = json!({"scope": "all"});
    let made = stage.post(&token, "demo-1", &all).await?;
    steps.step("POST /exports, scope all", 202, made.status);
    let again = stage.post(&token, "demo-1", &all).await?;
    steps.step("the same POST again", 200, again.status);
    let job = made.text("job_id");
    let same = again.text("job_id") == job && again.body["replayed"] == true;
    steps.step("  is a replay of the same job", true, same);
    let other = stage
        .post(&token, "demo-1", &json!({"scope": "conv:c-big"}))
        .await?;
    steps.step("the same key, another scope", 422, other.status);
    let private = stage
        .post(&token, "demo-2", &json!({"scope": "conv:c-private"}))
        .await?;
    steps.step("a conversation she was never in", 400, private.status);

    // Promise 2: what happens later changes nothing.
    let later = stage.import("later.jsonl", &chat::after()).await?;
    steps.step(
        "later: a recall and a new message",
        chat::after().len(),
        later,
    );

    // Promise 3: killed at any instant, and run again.
    let mut killed = stage.worker(&["--hold-after-parts", "2"])?;
    let held = stage
        .wait(&token, &job, |status| status["progress"]["parts_done"] == 2)
        .await?;
    steps.step("a worker: parts done", 2, &held["progress"]["parts_done"]);
    killed.kill().await.map_err(stage::lost)?;
    steps.step(
        "  killed with SIGKILL; the job is",
        "running",
        stage.status(&token, &job).await?.text("state"),
    );
    let mut second = stage.worker(&["--json"])?;
    let done = stage
        .wait(&token, &job, |status| status["state"] == "done")
        .await?;
    let attempt = stage::first_line(&mut second).await?;
    stage::stop(second).await?;
    steps.step(
        "another worker: parts kept + written",
        "2 + 3",
        format!("{} + {}", attempt["parts_kept"], attempt["parts_written"]),
    );
    steps.step("  messages in the export", 930, &done["messages"]);

    // Promise 4: a download that broke goes on.
    let url = done["download"]["url"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let bytes = done["bytes"].as_u64().unwrap_or_default();
    let (mut file, etag) = cut_download(&stage, &url, 1_000).await?;
    steps.step("a download cut after so many bytes", 1_000, file.len());
    let rest = stage
        .get(&url)
        .header(RANGE, "bytes=1000-")
        .header(IF_RANGE, &etag)
        .send()
        .await
        .map_err(stage::unreachable)?;
    steps.step("  resumed with If-Range", 206, rest.status().as_u16());
    let range = header(&rest, CONTENT_RANGE.as_str());
    steps.step(
        "  Content-Range",
        format!("bytes 1000-{}/{bytes}", bytes.saturating_sub(1)),
        range,
    );
    file.extend_from_slice(&rest.bytes().await.map_err(stage::unreachable)?);
    let sha256 = done["sha256"].as_str().unwrap_or_default();
    steps.step(
        "  joined: the job's sha256",
        short(sha256),
        short(&hex::encode(Sha256::digest(&file))),
    );
    check_lines(steps, &file)?;
    let beyond = stage
        .get(&url)
        .header(RANGE, format!("bytes={bytes}-"))
        .send()
        .await
        .map_err(stage::unreachable)?;
    steps.step("a range from the end on", 416, beyond.status().as_u16());
    steps.step(
        "  Content-Range",
        format!("bytes */{bytes}"),
        header(&beyond, CONTENT_RANGE.as_str()),
    );

    // Promise 5: a link is bound, short-lived, and no authorisation.
    for (what, bad) in [
        (
            "the link for another user",
            url.replace("u=alice", "u=mallory"),
        ),
        ("the link with a longer life", url.replace("exp=", "exp=1")),
    ] {
        let answer = stage.get(&bad).send().await.map_err(stage::unreachable)?;
        steps.step(what, 403, answer.status().as_u16());
    }
    stage.admin(&["disable", "alice"]).await?;
    let refused = stage.get(&url).send().await.map_err(stage::unreachable)?;
    steps.step(
        "the same link, her account disabled",
        403,
        refused.status().as_u16(),
    );
    stage.admin(&["enable", "alice"]).await?;
    let whole = stage.get(&url).send().await.map_err(stage::unreachable)?;
    steps.step("  and enabled again", 200, whole.status().as_u16());
    let revoke = ["revoke", &job, "--reason", "demo"];
    stage.admin(&revoke).await?;
    let gone = stage.get(&url).send().await.map_err(stage::unreachable)?;
    steps.step("the export revoked", 410, gone.status().as_u16());

    // Promise 3 once more: another machine, undisturbed.
    let mut elsewhere = Stage::new(&folder.join("second"), None)?;
    elsewhere.import("chat.jsonl", &chat::before()).await?;
    elsewhere.serve().await?;
    let token = elsewhere.token("alice").await?;
    let undisturbed: Answer = elsewhere.post(&token, "demo-1", &all).await?;
    let worker = elsewhere.worker(&[])?;
    let job = undisturbed.text("job_id");
    let done = elsewhere
        .wait(&token, &job, |status| status["state"] == "done")
        .await?;
    stage::stop(worker).await?;
    steps.step(
        "the same log elsewhere, undisturbed: sha256",
        short(sha256),
        short(done["sha256"].as_str().unwrap_or_default()),
    );
    elsewhere.end().await?;
    stage.end().await
}

/// Begins a download and drops the connection after `keep` bytes; gives them and the ETag.
async fn cut_download(stage: &Stage, url: &str, keep: usize) -> Result<(Vec<u8>, String), Failure> {
    let mut response = stage.get(url).send().await.map_err(stage::unreachable)?;
    let etag = header(&response, ETAG.as_str());
    let mut file = Vec::new();
    while file.len() < keep {
        match response.chunk().await.map_err(stage::unreachable)? {
            Some(chunk) => file.extend_from_slice(&chunk),
            None => break,
        }
    }
    file.truncate(keep);
    Ok((file, etag))
}

/// Looks into the file: what is there, and what the recalls made of it.
fn check_lines(steps: &mut Steps, file: &[u8]) -> Result<(), Failure> {
    let lines = stage::gunzip(file)?;
    let messages: Vec<Value> = lines
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let seqs = |conv: &str| {
        let seqs: Vec<u64> = messages
            .iter()
            .filter(|message| message["conv"] == conv)
            .filter_map(|message| message["seq"].as_u64())
            .collect();
        match (seqs.first(), seqs.last()) {
            (Some(first), Some(last)) => format!("{first}-{last} ({})", seqs.len()),
            _ => "none".to_owned(),
        }
    };
    steps.step("c-team, joined after 50", "51-550 (500)", seqs("c-team"));
    steps.step("c-big, left after 430", "1-430 (430)", seqs("c-big"));
    steps.step("c-private, never joined", "none", seqs("c-private"));
    let recalled = |seq: u64| {
        let message = messages
            .iter()
            .find(|message| message["conv"] == "c-team" && message["seq"] == seq);
        let empty = message.is_some_and(|message| message["body"] == "");
        let flag = message.is_some_and(|message| message["recalled"] == 1);
        format!("empty {empty}, flag {flag}")
    };
    steps.step(
        "message 60, recalled before",
        "empty true, flag true",
        recalled(60),
    );
    steps.step(
        "message 70, recalled afterwards",
        "empty false, flag false",
        recalled(70),
    );
    Ok(())
}

fn header(response: &reqwest::Response, name: &str) -> String {
    let value = response.headers().get(name);
    value
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_owned()
}

fn short(sha256: &str) -> String {
    sha256.chars().take(16).collect()
}

/// How long the demo waits for something that takes a second.
const PATIENCE: Duration = Duration::from_secs(60);
