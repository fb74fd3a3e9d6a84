//! A server that is asked to stop, seen by its connections.

use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::http2::{asking, connect as connect2, read};
use super::{connect, long, only, patient, rest};
use crate::harness::{Server, Setup};
use crate::process::until;

/// A server that may take its time to stop, and does not; and that lets nobody go before.
fn unhurried() -> Setup {
    let hour = Duration::from_secs(3600);
    Setup {
        drain: hour,
        ..patient(|patience| patience.idle = hour)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_are_closed_at_once() {
    let server = Server::start(unhurried()).await;
    let mut fresh = connect(&server).await;
    let mut used = connect(&server).await;
    used.write_all(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
        .await
        .expect("sent");
    let mut begun = [0; 15];
    used.read_exact(&mut begun).await.expect("an answer");
    let (mut requests, connection) = connect2(&server).await;
    let ended = tokio::spawn(connection);
    let response = requests
        .send_request(asking("GET", "/healthz", &[]), true)
        .expect("sent")
        .0;
    assert_eq!(response.await.expect("an answer").status(), 200);
    until("all are there", async || server.cut.open() == 3).await;

    server.stop();
    assert_eq!(rest(&mut fresh).await, b"");
    let said = [begun.to_vec(), rest(&mut used).await].concat();
    assert_eq!(only(&said).status, 200);
    // GOAWAY without an error.
    super::in_time(ended)
        .await
        .expect("no panic")
        .expect("an orderly end");
    until("nobody is served", async || server.cut.open() == 0).await;
    assert!(tokio::net::TcpStream::connect(server.host()).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn downloads_in_hand_go_on_and_are_the_last() {
    let ready = long(unhurried()).await;
    let mut old = connect(&ready.server).await;
    let request = format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", ready.url);
    old.write_all(request.as_bytes()).await.expect("sent");
    let mut begun = vec![0; 15];
    old.read_exact(&mut begun).await.expect("an answer");
    let (mut requests, connection) = connect2(&ready.server).await;
    let ended = tokio::spawn(connection);
    let sent = requests.send_request(asking("GET", &ready.url, &[]), true);
    let response = sent.expect("sent").0.await.expect("an answer");

    ready.server.stop();
    let nobody = async || {
        tokio::net::TcpStream::connect(ready.server.host())
            .await
            .is_err()
    };
    until("nobody is taken any more", nobody).await;
    let digest = |bytes: &[u8]| hex::encode(Sha256::digest(bytes));
    let bytes: Bytes = read(response.into_body()).await.expect("all of it");
    assert_eq!(digest(&bytes), ready.sha256());
    super::in_time(ended)
        .await
        .expect("no panic")
        .expect("an orderly end");
    begun.extend(rest(&mut old).await);
    assert_eq!(digest(&only(&begun).bytes), ready.sha256());
    until("nobody is served", async || ready.server.cut.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_longer_than_it_may_is_cut() {
    let ready = long(Setup::default()).await;
    let mut still = connect(&ready.server).await;
    let request = format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", ready.url);
    still.write_all(request.as_bytes()).await.expect("sent");
    let mut begun = vec![0; 15];
    still.read_exact(&mut begun).await.expect("an answer");
    ready.server.stop();
    until("it is cut", async || ready.server.cut.open() == 0).await;
    assert!((rest(&mut still).await.len() as u64) < ready.bytes);
}
