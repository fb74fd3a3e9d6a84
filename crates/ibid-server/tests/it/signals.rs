//! Processes that are told to stop, or stand still.

use std::fs::File;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::crash::Random;
use crate::harness::{join, message, sample};
use crate::pg_server::PgServer;
use crate::process::{Place, Running, Served, on_thread, until};

fn is_done(status: &Value) -> bool {
    status["state"] == "done"
}

/// The row of a user is locked by whoever claims a job of his.
#[tokio::test(flavor = "multi_thread")]
async fn one_who_stands_still_in_a_transaction_is_in_nobody_s_way_for_long_and_then_goes_on() {
    let Some(server) = PgServer::start("one who stands still in a transaction") else {
        return;
    };
    let place = Place::new();
    let url = server.url("postgres");
    let on = ["--database", &url];
    let served = place.serve(&[&["--migrate", "--workers", "0"], &on[..]].concat());
    let chat = place.write("chat.jsonl", &sample());
    place.run(&[&["import", &chat], &on[..]].concat());
    let token = place.run(&[&["token", "create", "--user", "alice"], &on[..]].concat());
    let token = token.out.trim();
    let body = json!({"scope": "all"});
    let first = served.post(token, "k1", &body).await.text("job_id");

    let worker = [&["worker", "--json"], &on[..]].concat();
    let point = "claim.locked:0:stands-still";
    let mut standing = place.command(&worker);
    standing
        .env("IBID_TEST_FAILPOINT", point)
        .stderr(Stdio::null());
    let mut standing = Running::start(&mut standing);
    until("it stands still", async || standing.stands_still()).await;
    let other = place.start(&worker);
    served.wait(token, &first, is_done).await;
    assert_eq!(other.terminate().0, Some(0));

    // It finds that its claim did not come about, and takes the next job.
    standing.signal(Signal::CONT);
    let second = served.post(token, "k2", &body).await.text("job_id");
    served.wait(token, &second, is_done).await;
    let report: Value = serde_json::from_str(&standing.line()).expect("a report");
    assert_eq!(report["job_id"], second);
    assert_eq!(standing.terminate(), (Some(0), String::new()));
}

/// A worker that holds two parts of the sample's five and stands in the third, with a log of what it
/// says.
struct Held {
    place: Place,
    served: Served,
    token: String,
    job: String,
    worker: Running,
    said: std::path::PathBuf,
}

async fn held(drain_seconds: &str) -> Held {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let served = place.serve(&["--workers", "0", "--part-messages", "200"]);
    let token = place.token("alice");
    let job = served.post(&token, "k", &json!({"scope": "all"})).await;
    let job = job.text("job_id");
    let said = place.folder.path().join("said");
    let mut worker = place.command(&[
        "worker",
        "--hold-after-parts",
        "2",
        "--lease-seconds",
        "1",
        "--drain-seconds",
        drain_seconds,
    ]);
    worker.stderr(File::create(&said).expect("a file"));
    let worker = Running::start(&mut worker);
    let two = |status: &Value| status["progress"]["parts_done"] == 2;
    served.wait(&token, &job, two).await;
    Held {
        place,
        served,
        token,
        job,
        worker,
        said,
    }
}

/// The exit code of a process that ends, given `signal` again and again.
async fn ended(process: &mut Running, signal: Option<Signal>) -> Option<i32> {
    let ending = async {
        loop {
            if let Some(status) = process.child.try_wait().expect("it is ours") {
                return status.code();
            }
            if let Some(signal) = signal {
                process.signal(signal);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ending = tokio::time::timeout(Duration::from_secs(60), ending).await;
    ending.expect("it ends")
}

impl Held {
    async fn heartbeat(&self) -> Value {
        let mut list = self.place.command(&["admin", "list", "--json"]);
        let listed = on_thread(move || list.output().expect("it runs")).await;
        let listed: Value = serde_json::from_slice(&listed.stdout).expect("one export");
        listed["heartbeat_at"].clone()
    }

    /// The lease of the one that has ended is over some time, and nothing is lost.
    async fn goes_on_elsewhere(&self) {
        let worker = self.place.start(&["worker", "--json"]);
        self.served.wait(&self.token, &self.job, is_done).await;
        let (code, out) = on_thread(|| worker.terminate()).await;
        assert_eq!(code, Some(0), "{out}");
        let report: Value = serde_json::from_str(&out).expect("one report");
        assert_eq!(report["parts_kept"], 2, "{out}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_told_to_stop_keeps_its_lease_for_what_is_in_hand_and_a_second_signal_ends_it()
 {
    let mut held = held("3600").await;
    held.worker.signal(Signal::TERM);
    for _ in 0..3 {
        let before = held.heartbeat().await;
        assert!(before.is_string(), "{before}");
        until("the lease is renewed", async || {
            held.heartbeat().await != before
        })
        .await;
    }
    // Two signals in a row may come as one.
    assert_eq!(ended(&mut held.worker, Some(Signal::TERM)).await, Some(1));
    held.goes_on_elsewhere().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_told_to_stop_does_not_wait_longer_than_it_may() {
    for drain_seconds in ["0", "1"] {
        let mut held = held(drain_seconds).await;
        held.worker.signal(Signal::TERM);
        assert_eq!(ended(&mut held.worker, None).await, Some(1));
        let said = std::fs::read_to_string(&held.said).expect("what it said");
        assert!(said.contains("--drain-seconds"), "{said}");
        held.goes_on_elsewhere().await;
    }
}

/// More than the buffers between a server and one who does not read.
const LONG: usize = 24_000_000;

/// A download of which one byte is read, of a server that may wait so long for its end.
async fn downloading(place: &Place, drain_seconds: &str) -> (Served, TcpStream, Value) {
    // Half of it is left when it is compressed.
    let mut noise = Random::of_seed(7);
    let digit = |noise: &mut Random| char::from(b"0123456789abcdef"[noise.below(16) as usize]);
    let body = |noise: &mut Random| (0..200_000).map(|_| digit(noise)).collect::<String>();
    let mut chat = vec![join("c", "alice")];
    chat.extend((0..LONG / 200_000).map(|_| message("c", &body(&mut noise))));
    place.import("chat.jsonl", &chat);
    let served = place.serve(&["--drain-seconds", drain_seconds]);
    let token = place.token("alice");
    let job = served.post(&token, "k", &json!({"scope": "all"})).await;
    let done = served.wait(&token, &job.text("job_id"), is_done).await;
    let path = done["download"]["url"].as_str().expect("a link");
    let host = served.base.trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&host).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("a head"));
    }
    assert!(head.starts_with(b"HTTP/1.1 200"), "{head:?}");
    (served, stream, done)
}

async fn takes_nobody(served: &Served) {
    let host = served.base.trim_start_matches("http://").to_owned();
    until("nobody is taken any more", async || {
        TcpStream::connect(&host).await.is_err()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_to_stop_ends_a_download_that_goes_on_and_takes_no_other() {
    let place = Place::new();
    let (mut served, mut stream, done) = downloading(&place, "3600").await;
    served.process.signal(Signal::TERM);
    takes_nobody(&served).await;
    let mut file = Vec::new();
    stream.read_to_end(&mut file).await.expect("all of it");
    assert_eq!(file.len() as u64, done["bytes"].as_u64().expect("a length"));
    assert_eq!(hex::encode(Sha256::digest(&file)), done["sha256"]);
    assert_eq!(ended(&mut served.process, None).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_told_to_stop_cuts_a_download_that_takes_longer_than_it_may() {
    let place = Place::new();
    let (mut served, mut stream, done) = downloading(&place, "1").await;
    served.process.signal(Signal::TERM);
    assert_eq!(ended(&mut served.process, None).await, Some(0));
    let mut file = Vec::new();
    // Whether it ends or breaks off, it is told from a whole one by its length.
    let _ = stream.read_to_end(&mut file).await;
    assert!((file.len() as u64) < done["bytes"].as_u64().expect("a length"));
}
