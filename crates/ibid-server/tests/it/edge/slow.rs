//! Clients that are slow to ask or to take.

use std::time::Duration;

use ibid::ledger::Role;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{SOON, connect, first, is_farewell, long, only, patient, rest};
use crate::harness::{Server, sample};
use crate::process::until;

/// Sends `bytes` one at a time until the server has enough; what it says then.
async fn trickle(stream: TcpStream, bytes: &[u8]) -> Vec<u8> {
    let (mut reading, mut writing) = stream.into_split();
    let bytes = bytes.to_vec();
    let sending = tokio::spawn(async move {
        for byte in bytes {
            if writing.write_all(&[byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        writing
    });
    let said = rest(&mut reading).await;
    sending.abort();
    said
}

#[tokio::test]
async fn a_head_that_comes_a_byte_at_a_time_is_cut_off_with_a_problem() {
    let server = Server::start(patient(|patience| patience.head = SOON)).await;
    let endless = format!("GET / HTTP/1.1\r\nHost: h\r\nx: {}", "y".repeat(10_000));
    let said = trickle(connect(&server).await, endless.as_bytes()).await;
    is_farewell(&only(&said), 408, "request-timeout");
    // One that stands still, be it where HTTP/2 would begin the same; and one behind a request.
    for begun in ["G", "PRI * HTTP/2.0\r\n\r\nSM"] {
        let mut stream = connect(&server).await;
        stream.write_all(begun.as_bytes()).await.expect("sent");
        is_farewell(&only(&rest(&mut stream).await), 408, "request-timeout");
    }
    let mut stream = connect(&server).await;
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
        .await
        .expect("sent");
    let mut head = [0; 15];
    stream.read_exact(&mut head).await.expect("an answer");
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    stream.write_all(b"GET /he").await.expect("sent");
    let said = rest(&mut stream).await;
    let said = [&head[..], &said[..]].concat();
    let (healthy, behind) = first(&said);
    assert_eq!(healthy.status, 200);
    is_farewell(&only(behind), 408, "request-timeout");
}

#[tokio::test]
async fn who_asks_for_nothing_is_let_go_without_a_word() {
    let server = Server::start(patient(|patience| {
        patience.idle = SOON;
        patience.head = SOON;
    }))
    .await;
    assert_eq!(rest(&mut connect(&server).await).await, b"");
    let mut stream = connect(&server).await;
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
        .await
        .expect("sent");
    assert_eq!(only(&rest(&mut stream).await).status, 200);
    // Also with the beginning of a next request behind the first: both came in one piece, so
    // only that nothing more comes can be noticed.
    let mut stream = connect(&server).await;
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\nGET")
        .await
        .expect("sent");
    assert_eq!(first(&rest(&mut stream).await).0.status, 200);
    until("nothing is left", async || server.cut.open() == 0).await;
}

/// The head of a `POST` of so many bytes.
fn post(path: &str, token: &str, kind: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {token}\r\nContent-Type: {kind}\r\n\
         Idempotency-Key: k\r\nContent-Length: {length}\r\n\r\n"
    )
}

const SCOPE: &str = r#"{"scope":"all"}"#;

#[tokio::test]
async fn a_body_that_stands_still_is_cut_off_with_a_problem() {
    let server = Server::start(patient(|patience| patience.body_gap = SOON)).await;
    server.import(&sample()).await;
    let alice = server.token("alice", Role::User).await;
    let writer = server.token("app", Role::Writer).await;
    for (path, token, kind) in [
        ("/exports", &alice, "application/json"),
        ("/log", &writer, "application/x-ndjson"),
    ] {
        let mut stream = connect(&server).await;
        let request = post(path, token, kind, 100) + "{";
        stream.write_all(request.as_bytes()).await.expect("sent");
        is_farewell(&only(&rest(&mut stream).await), 408, "request-timeout");
    }
    // The key was not consumed by what was never asked.
    assert_eq!(server.post(&alice, "k", SCOPE).await.status, 202);
}

#[tokio::test]
async fn a_body_that_trickles_is_cut_off_and_one_that_is_only_slow_is_not() {
    let server = Server::start(patient(|patience| {
        patience.body = SOON;
        patience.body_bytes_per_second = u32::MAX;
    }))
    .await;
    server.import(&sample()).await;
    let alice = server.token("alice", Role::User).await;
    let blanks = format!("{}{SCOPE}", " ".repeat(5_000));
    let request = post("/exports", &alice, "application/json", blanks.len());
    let mut stream = connect(&server).await;
    stream.write_all(request.as_bytes()).await.expect("sent");
    let said = trickle(stream, blanks.as_bytes()).await;
    is_farewell(&only(&said), 408, "request-timeout");

    // Here a byte earns a second.
    let server = Server::start(patient(|patience| {
        patience.idle = SOON;
        patience.body = SOON;
        patience.body_bytes_per_second = 1;
    }))
    .await;
    server.import(&sample()).await;
    let alice = server.token("alice", Role::User).await;
    let blanks = format!("{}{SCOPE}", " ".repeat(50));
    let request = post("/exports", &alice, "application/json", blanks.len());
    let mut stream = connect(&server).await;
    stream.write_all(request.as_bytes()).await.expect("sent");
    let said = trickle(stream, blanks.as_bytes()).await;
    assert_eq!(only(&said).status, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_takes_nothing_is_cut_and_one_that_is_slow_is_not() {
    let ready = long(patient(|patience| patience.write = 4 * SOON)).await;
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        ready.url
    );
    // Those of the client that made the export.
    let others = ready.server.cut.open();
    let mut still = connect(&ready.server).await;
    still.write_all(request.as_bytes()).await.expect("sent");
    until("it is served", async || ready.server.cut.open() > others).await;
    until("it is cut", async || ready.server.cut.open() <= others).await;
    let got = rest(&mut still).await;
    assert!(
        (got.len() as u64) < ready.bytes,
        "{} of {}",
        got.len(),
        ready.bytes
    );

    let mut slow = connect(&ready.server).await;
    slow.write_all(request.as_bytes()).await.expect("sent");
    let mut got = Vec::new();
    // Longer than the patience in all, and never as long at a time.
    for _ in 0..20 {
        let mut some = vec![0; 100_000];
        let read = slow.read(&mut some).await.expect("some");
        got.extend_from_slice(&some[..read]);
        tokio::time::sleep(SOON / 4).await;
    }
    got.extend(rest(&mut slow).await);
    assert_eq!(only(&got).bytes.len() as u64, ready.bytes);
}
