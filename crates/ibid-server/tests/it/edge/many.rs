//! Many connections, and what they cost a real process.

use std::cell::Cell;
use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::long_chat;
use crate::process::{Place, Served, is_done, until};

/// Lets this process, and those that it starts, have so many files open; or says that it cannot.
fn files(needed: u64, what: &str) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < needed) {
        println!(
            "SKIPPED: {what}: {needed} open files are more than {:?}",
            limit.maximum
        );
        return false;
    }
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).expect("the soft limit may be raised");
    true
}

/// The memory of a process, in KiB.
fn resident_kib(served: &Served) -> u64 {
    let status = format!("/proc/{}/status", served.process.child.id());
    let status = fs::read_to_string(status).expect("a status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number
        .and_then(|number| number.parse().ok())
        .expect("a number")
}

/// `count` connections to a server, each of which has sent `request` and has an answer's first
/// bytes.
async fn connections(served: &Served, count: usize, request: &str) -> Vec<TcpStream> {
    let host = served.base.trim_start_matches("http://");
    let mut streams = Vec::with_capacity(count);
    for _ in 0..count {
        let mut stream = TcpStream::connect(host).await.expect("connected");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut begun = [0; 15];
        stream.read_exact(&mut begun).await.expect("an answer");
        assert_eq!(&begun, b"HTTP/1.1 200 OK");
        streams.push(stream);
    }
    streams
}

const IDLE: usize = 5_000;

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_idle_connections_cost_little_and_are_in_nobodys_way() {
    if !files(2 * IDLE as u64 + 1_000, "idle connections") {
        return;
    }
    let place = Place::new();
    let served = place.serve(&["--workers", "0"]);
    let request = "GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n";
    drop(connections(&served, 10, request).await);
    let before = resident_kib(&served);
    let idle = connections(&served, IDLE, request).await;
    let grown = resident_kib(&served) - before;
    println!(
        "{grown} KiB for {IDLE} idle connections, {} bytes each",
        grown * 1024 / IDLE as u64
    );
    assert!(grown < 40 * IDLE as u64, "{grown} KiB");
    let token = place.token("alice");
    assert_eq!(served.get(&token, "/exports").await.status, 200);
    drop(idle);
}

const READERS: usize = 200;

#[tokio::test(flavor = "multi_thread")]
async fn readers_who_take_nothing_hold_little() {
    if !files(4 * READERS as u64 + 1_000, "readers who take nothing") {
        return;
    }
    let place = Place::new();
    place.import("chat.jsonl", &long_chat());
    let served = place.serve(&[]);
    let token = place.token("alice");
    let made = served.post(&token, "k", &json!({"scope": "all"})).await;
    let done = served.wait(&token, &made.text("job_id"), is_done).await;
    let url = done["download"]["url"].as_str().expect("a link");
    let request = format!("GET {url} HTTP/1.1\r\nHost: h\r\n\r\n");
    drop(connections(&served, 10, &request).await);
    let before = resident_kib(&served);
    let readers = connections(&served, READERS, &request).await;
    let grown = || resident_kib(&served).saturating_sub(before);
    let last = Cell::new(u64::MAX);
    until("the sockets are full", async || {
        let now = grown();
        last.replace(now) == now
    })
    .await;
    let last = last.get();
    println!(
        "{last} KiB for {READERS} readers, {} bytes each",
        last * 1024 / READERS as u64
    );
    assert!(last < 400 * READERS as u64, "{last} KiB");
    drop(readers);
}
