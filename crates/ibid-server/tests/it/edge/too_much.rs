//! More than anybody should send.

use ibid::ledger::Role;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::{connect, first, is_farewell, only, rest, said_to, server};
use crate::download::ready_at;
use crate::harness::{Server, Setup};

const GIGABYTE: usize = 1_000_000_000;

/// As many bytes of a body as the server takes, in writes of `piece`; how many that were, and
/// what was said.
async fn flood(stream: TcpStream, head: String, piece: Vec<u8>) -> (usize, Vec<u8>) {
    let (mut reading, mut writing) = stream.into_split();
    let sending = tokio::spawn(async move {
        let mut sent = 0;
        if writing.write_all(head.as_bytes()).await.is_err() {
            return sent;
        }
        while sent < GIGABYTE && writing.write_all(&piece).await.is_ok() {
            sent += piece.len();
        }
        sent
    });
    let said = rest(&mut reading).await;
    drop(reading);
    (sending.await.expect("sent"), said)
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_without_end_are_refused_and_not_read() {
    let server = server().await;
    let alice = server.token("alice", Role::User).await;
    let writer = server.token("app", Role::Writer).await;
    for (path, token, kind) in [
        ("/exports", &alice, "application/json"),
        ("/log", &writer, "application/x-ndjson"),
    ] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {token}\r\n\
             Content-Type: {kind}\r\nIdempotency-Key: k\r\n"
        );
        let announced = format!("{head}Content-Length: {GIGABYTE}\r\n\r\n");
        let in_chunks = format!("{head}Transfer-Encoding: chunked\r\n\r\n");
        let chunk = [b"10000\r\n" as &[u8], &[b' '; 0x10000], b"\r\n"].concat();
        for (head, piece) in [(announced, vec![b' '; 0x10000]), (in_chunks, chunk)] {
            let (sent, said) = flood(connect(&server).await, head, piece).await;
            is_farewell(&only(&said), 413, "body-too-large");
            // What it lingers for, the longest body that is read, and what sockets hold.
            assert!(sent < 100_000_000, "{path}: {sent} bytes were taken");
        }
        // Who asks first is not told to go on.
        let expecting = format!("{head}Expect: 100-continue\r\nContent-Length: {GIGABYTE}\r\n\r\n");
        let said = said_to(&server, expecting.as_bytes()).await;
        is_farewell(&only(&said), 413, "body-too-large");
    }
}

#[tokio::test]
async fn one_who_sends_all_before_reading_hears_why_it_was_refused() {
    let server = server().await;
    let alice = server.token("alice", Role::User).await;
    // More than sockets hold, so some of it is sent after the answer.
    let body = vec![b' '; 20_000_000];
    let head = format!(
        "POST /exports HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {alice}\r\n\
         Content-Type: application/json\r\nIdempotency-Key: k\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = connect(&server).await;
    stream.write_all(head.as_bytes()).await.expect("sent");
    stream.write_all(&body).await.expect("taken, to be dropped");
    is_farewell(&only(&rest(&mut stream).await), 413, "body-too-large");
}

#[tokio::test]
async fn thousands_of_ranges_get_the_whole_file_or_are_too_many_headers() {
    let ready = ready_at(Setup::default()).await;
    let ranges = |count: usize| -> String {
        (0..count)
            .map(|n| format!("{}-{},", n % 10_000, n % 10_000))
            .collect()
    };
    let request = |ranges: &str| {
        let headers = format!("Host: h\r\nConnection: close\r\nRange: bytes={ranges}0-0\r\n");
        format!("GET {} HTTP/1.1\r\n{headers}\r\n", ready.url)
    };
    let some = request(&ranges(6_000));
    assert!(some.len() < 60_000);
    let (whole, _) = {
        let said = said_to(&ready.server, some.as_bytes()).await;
        let (answer, behind) = first(&said);
        (answer, behind.len())
    };
    assert_eq!((whole.status, whole.bytes.len() as u64), (200, ready.bytes));
    let many = request(&ranges(10_000));
    let said = said_to(&ready.server, many.as_bytes()).await;
    is_farewell(&only(&said), 431, "headers-too-large");
}

#[tokio::test]
async fn who_finds_no_place_waits_for_one() {
    let mut setup = Setup::default();
    setup.edge.connections = 2;
    let server = Server::start(setup).await;
    let (first, second) = (connect(&server).await, connect(&server).await);
    crate::process::until("both are taken", async || server.cut.open() == 2).await;
    let mut third = connect(&server).await;
    let request = b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    third.write_all(request).await.expect("sent");
    // A place that becomes free is the third's; until then only two are taken.
    assert_eq!(server.cut.open(), 2);
    drop(first);
    assert_eq!(only(&rest(&mut third).await).status, 200);
    drop(second);
}
