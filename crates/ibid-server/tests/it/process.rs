//! Real processes: workers that are killed, servers that are stopped, the demo.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::{Value, json};

use crate::harness::{Answer, answer, sample, sample_later};

/// A data folder and the program on it.
pub struct Place {
    pub folder: tempfile::TempDir,
}

/// What a command came to.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Place {
    pub fn new() -> Place {
        Place {
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    pub fn data(&self) -> std::path::PathBuf {
        self.folder.path().join("data")
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ibid"));
        command
            .args(arguments)
            .env_clear()
            .env("IBID_DATA", self.data())
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Ran {
        let output = self.command(arguments).output().expect("it runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Ran {
            code: output.status.code(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    pub fn write(&self, name: &str, lines: &[String]) -> String {
        let path = self.folder.path().join(name);
        std::fs::write(&path, lines.join("\n") + "\n").expect("written");
        path.display().to_string()
    }

    pub fn import(&self, name: &str, lines: &[String]) {
        let ran = self.run(&["import", &self.write(name, lines)]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }

    pub fn token(&self, user: &str) -> String {
        let ran = self.run(&["token", "create", "--user", user]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.out.trim().to_owned()
    }

    pub fn start(&self, arguments: &[&str]) -> Running {
        Running::start(self.command(arguments).stderr(Stdio::null()))
    }

    /// A server on a port of its own choice.
    pub fn serve(&self, arguments: &[&str]) -> Served {
        self.serve_at("127.0.0.1:0", arguments, &[])
    }

    /// As [`Place::serve`], on the port of this address and with variables in its environment.
    pub fn serve_at(
        &self,
        address: &str,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Served {
        let all = [&["serve", "--listen", address], arguments].concat();
        let mut process = Running::start(
            self.command(&all)
                .envs(variables.iter().copied())
                .stderr(Stdio::null()),
        );
        let line = process.line();
        let at = line
            .find("http")
            .unwrap_or_else(|| panic!("no address in {line:?}"));
        Served {
            base: line[at..].trim().to_owned(),
            client: ibid_server::commands::http_client().expect("a client"),
            process,
        }
    }
}

/// A process that is killed when the test ends.
pub struct Running {
    pub child: Child,
    out: BufReader<ChildStdout>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    pub fn start(command: &mut Command) -> Running {
        let mut child = command.spawn().expect("it runs");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        Running { child, out }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("told");
    }

    /// Whether a signal has stopped it for now.
    pub fn stands_still(&self) -> bool {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(Pid::from_child(&self.child)), options);
        status.is_ok_and(|status| status.is_some_and(|status| status.stopped()))
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).expect("a line");
        line
    }

    /// SIGKILL.
    pub fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    /// SIGTERM; gives the exit code and what was printed until the end.
    pub fn terminate(self) -> (Option<i32>, String) {
        self.end(&[Signal::TERM])
    }

    /// As [`Running::terminate`], with these signals, the last of which ends it.
    pub fn end(mut self, signals: &[Signal]) -> (Option<i32>, String) {
        for signal in signals {
            self.signal(*signal);
        }
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).expect("output");
        let status = self.child.wait().expect("it ends");
        (status.code(), rest)
    }
}

pub struct Served {
    pub base: String,
    pub client: reqwest::Client,
    pub process: Running,
}

impl Served {
    pub async fn post(&self, token: &str, key: &str, body: &Value) -> Answer {
        let request = self
            .client
            .post(format!("{}/exports", self.base))
            .bearer_auth(token)
            .header("Idempotency-Key", key)
            .header("Content-Type", "application/json")
            .body(body.to_string());
        answer(request).await
    }

    pub async fn get(&self, token: &str, path: &str) -> Answer {
        answer(
            self.client
                .get(format!("{}{path}", self.base))
                .bearer_auth(token),
        )
        .await
    }

    /// Asks for a job's status until it is as wanted.
    pub async fn wait(&self, token: &str, job: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let asking = async {
            loop {
                let status = self.get(token, &format!("/exports/{job}")).await.body;
                if wanted(&status) {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), asking)
            .await
            .expect("it goes on")
    }
}

/// Does something that takes its time on a thread that may wait.
pub async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let done = tokio::task::spawn_blocking(work).await;
    done.expect("it does not panic")
}

/// Asks again and again until the answer is yes.
pub async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let asking = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let asked = tokio::time::timeout(Duration::from_secs(60), asking).await;
    asked.unwrap_or_else(|_| panic!("it never came to that: {what}"));
}

pub fn all() -> Value {
    json!({"scope": "all"})
}

pub fn is_done(status: &Value) -> bool {
    status["state"] == "done"
}

/// The job of alice on the sample, in a folder of its own, worked on by nobody yet.
async fn asked(place: &Place) -> (Served, String, String) {
    place.import("chat.jsonl", &sample());
    let served = place.serve(&["--workers", "0", "--part-messages", "200"]);
    let token = place.token("alice");
    let job = served.post(&token, "k", &all()).await.text("job_id");
    place.import("later.jsonl", &sample_later());
    (served, token, job)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_half_way_and_run_again_makes_the_same_bytes() {
    let (one, other) = (Place::new(), Place::new());
    let (served, token, job) = asked(&one).await;
    let killed = one.start(&["worker", "--hold-after-parts", "2", "--lease-seconds", "1"]);
    let held = served
        .wait(&token, &job, |status| status["progress"]["parts_done"] == 2)
        .await;
    assert_eq!(
        (&held["state"], &held["attempts"]),
        (&json!("running"), &json!(1))
    );
    killed.kill();

    let mut worker = one.start(&["worker", "--json", "--lease-seconds", "1"]);
    let done = served.wait(&token, &job, is_done).await;
    let attempt: Value = serde_json::from_str(&worker.line()).expect("a report");
    assert_eq!(
        (&attempt["parts_kept"], &attempt["parts_written"]),
        (&json!(2), &json!(3))
    );
    assert_eq!(attempt["sha256"], done["sha256"]);
    assert_eq!(done["progress"]["parts_total"], 5);
    assert_eq!(worker.terminate().0, Some(0));

    let (undisturbed, token, job) = asked(&other).await;
    let worker = other.start(&["worker", "--json"]);
    let whole = undisturbed.wait(&token, &job, is_done).await;
    assert_eq!(worker.terminate().0, Some(0));
    assert_eq!(whole["sha256"], done["sha256"]);
    assert_eq!(whole["messages"], 930);

    // Nothing is left of the parts, nor of the attempt that was killed.
    let files = files(&one.data().join("artifacts"));
    assert_eq!(files.len(), 1, "{files:?}");
}

fn files(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path.display().to_string());
        }
    }
    found
}

/// A job of 1,200 parts, so that whoever works on it can be stopped in the middle.
async fn long_job(place: &Place) -> (String, Vec<&'static str>) {
    let chat: Vec<String> = (0..60_000)
        .map(|n| crate::harness::message("c", &format!("message {n} with some words in it")))
        .collect();
    place.import("join.jsonl", &[crate::harness::join("c", "alice")]);
    place.import("chat.jsonl", &chat);
    (place.token("alice"), vec!["--part-messages", "50"])
}

/// The job was given back in the middle: it is queued, and the next worker needs not wait.
async fn goes_on_elsewhere(place: &Place, served: &Served, token: &str, job: &str) {
    let stopped = served.get(token, &format!("/exports/{job}")).await.body;
    assert_eq!(stopped["state"], "queued", "{stopped}");
    assert_eq!(stopped["attempts"], 1);
    let kept = stopped["progress"]["parts_done"].as_u64().expect("a count");
    assert!(kept > 3 && kept < 1200, "{kept}");
    let ran = place.run(&["worker", "--until-idle", "--json"]);
    let attempt: Value = serde_json::from_str(&ran.out).expect("one report");
    assert_eq!(attempt["parts_kept"], kept);
    assert_eq!(attempt["parts_written"], 1200 - kept);
    let verified = place.run(&["verify", job, "--json"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
    let verified: Value = serde_json::from_str(&verified.out).expect("a verification");
    assert_eq!(verified["parts_equal"], 1200);
    assert_eq!(verified["stored_equal"], true);
}

fn at_work(status: &Value) -> bool {
    status["progress"]["parts_done"].as_u64() > Some(3)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_told_to_stop_gives_its_lease_back() {
    let place = Place::new();
    let (token, mut arguments) = long_job(&place).await;
    arguments.extend(["--workers", "0"]);
    let served = place.serve(&arguments);
    let job = served.post(&token, "k", &all()).await.text("job_id");
    let worker = place.start(&["worker", "--json"]);
    served.wait(&token, &job, at_work).await;
    let (code, out) = worker.terminate();
    assert_eq!(code, Some(0), "{out}");
    let report: Value = serde_json::from_str(&out).expect("one report");
    assert_eq!(report["state"], "queued");
    goes_on_elsewhere(&place, &served, &token, &job).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_to_stop_ends_in_order_and_its_job_goes_on_elsewhere() {
    let place = Place::new();
    let (token, mut arguments) = long_job(&place).await;
    let served = place.serve(&arguments);
    let job = served.post(&token, "k", &all()).await.text("job_id");
    served.wait(&token, &job, at_work).await;
    let (code, _) = served.process.terminate();
    assert_eq!(code, Some(0));
    arguments.extend(["--workers", "0"]);
    let served = place.serve(&arguments);
    goes_on_elsewhere(&place, &served, &token, &job).await;
}

#[test]
fn the_demo_plays_through() {
    let place = Place::new();
    let ran = place.run(&["demo", "--json"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let steps: Vec<Value> = ran
        .out
        .lines()
        .map(|line| serde_json::from_str(line).expect("a step"))
        .collect();
    assert!(steps.len() >= 20, "{}", ran.out);
    assert!(steps.iter().all(|step| step["ok"] == true), "{}", ran.out);
    let table = place.run(&["demo"]);
    assert_eq!(table.code, Some(0), "{table:?}");
    assert_eq!(table.out.lines().count(), steps.len() + 2, "{}", table.out);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_exports_to_a_file_and_goes_on_with_the_same_export() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let served = place.serve(&[]);
    let token = place.token("alice");
    let out = place.folder.path().join("mine.jsonl.gz");
    let target = out.display().to_string();
    let arguments = [
        "export",
        "--server",
        &served.base,
        "--token",
        &token,
        "-o",
        &target,
    ];
    let ran = place.run(&arguments);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let file = std::fs::read(&out).expect("a file");
    assert_eq!(crate::harness::lines(&file).len(), 930);
    let beside: Vec<_> = std::fs::read_dir(place.folder.path())
        .expect("a folder")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        })
        .filter(|name| name.starts_with("mine"))
        .collect();
    assert_eq!(beside, ["mine.jsonl.gz"]);

    // An existing file is not overwritten; a bad token is refused by the server; nobody there.
    let again = place.run(&arguments);
    assert_ne!(again.code, Some(0), "{again:?}");
    assert_eq!(std::fs::read(&out).expect("a file"), file);
    let refused = place.run(&[
        "export",
        "--server",
        &served.base,
        "--token",
        "ibid_x",
        "-o",
        "other.gz",
    ]);
    assert_eq!(refused.code, Some(3), "{refused:?}");
    let nobody = place.run(&[
        "export",
        "--server",
        "http://127.0.0.1:9",
        "--token",
        &token,
        "-o",
        "other.gz",
    ]);
    assert_eq!(nobody.code, Some(4), "{nobody:?}");
    assert!(!place.folder.path().join("other.gz").exists());
}
