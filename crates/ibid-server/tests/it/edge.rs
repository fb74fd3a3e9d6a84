//! The edge of the server, over raw sockets: what is no request, who is slow, who is many, and
//! HTTP/2 and TLS.

mod automatic;
mod http2;
mod many;
mod methods;
mod slow;
mod stopping;
mod tls;
mod too_much;

use std::time::Duration;

use ibid_server::edge::{Edge, Patience};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::crash::Random;
use crate::download::{Ready, of_chat};
use crate::harness::{Answer, Server, Setup, join, message};

/// A server that waits as it does.
async fn server() -> Server {
    Server::start(Setup::default()).await
}

/// What a server is started with that is as patient as `change` makes it.
fn patient(change: impl FnOnce(&mut Patience)) -> Setup {
    let mut patience = Patience::default();
    change(&mut patience);
    Setup {
        edge: Edge {
            patience,
            ..Edge::default()
        },
        ..Setup::default()
    }
}

/// alice's chat, whose export is longer than what sockets hold of one who does not read.
fn long_chat() -> Vec<String> {
    let mut noise = Random::of_seed(11);
    let mut events = vec![join("c", "alice")];
    events.extend((0..80).map(|_| {
        // Half of it is left when it is compressed.
        let words = (0..12_500).map(|_| format!("{:016x}", noise.below(u64::MAX)));
        message("c", &words.collect::<String>())
    }));
    events
}

/// A server with an export of it.
async fn long(setup: Setup) -> Ready {
    of_chat(setup, &long_chat()).await
}

/// Not long, and longer than a request of a test takes.
const SOON: Duration = Duration::from_millis(500);

async fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.host()).await;
    stream.expect("connected")
}

/// Does not wait for ever where a server should have done something.
async fn in_time<T>(what: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(Duration::from_secs(60), what).await;
    done.expect("it comes to an end")
}

/// Everything that comes until the other end closes, in order or not.
async fn rest(stream: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = in_time(stream.read_to_end(&mut bytes)).await;
    bytes
}

/// What comes after `request`, until the server closes.
async fn said_to(server: &Server, request: &[u8]) -> Vec<u8> {
    let mut stream = connect(server).await;
    stream.write_all(request).await.expect("sent");
    rest(&mut stream).await
}

/// The first answer of HTTP/1 in `bytes`, and what is behind it.
fn first(bytes: &[u8]) -> (Answer, &[u8]) {
    let end = bytes.windows(4).position(|end| end == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head: {:?}", String::from_utf8_lossy(bytes)));
    let (head, behind) = bytes.split_at(end + 4);
    let mut lines = std::str::from_utf8(head)
        .expect("a head")
        .trim_end()
        .split("\r\n");
    let status = lines.next().expect("a line").split(' ').nth(1);
    let mut headers = HeaderMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").expect("a header");
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
        headers.append(name, HeaderValue::from_str(value).expect("a value"));
    }
    let length = headers
        .get("content-length")
        .map_or("0", |n| n.to_str().expect("a number"));
    let length: usize = length.parse().expect("a number");
    let (bytes, behind) = behind.split_at(length);
    let answer = Answer {
        status: status.expect("a status").parse().expect("a number"),
        headers,
        body: serde_json::from_slice(bytes).unwrap_or_default(),
        bytes: bytes.to_vec(),
    };
    (answer, behind)
}

/// The one answer in `bytes`.
fn only(bytes: &[u8]) -> Answer {
    let (answer, behind) = first(bytes);
    assert!(behind.is_empty(), "{:?}", String::from_utf8_lossy(behind));
    answer
}

/// Asserts that this is what is said before the connection is closed on a client.
fn is_farewell(answer: &Answer, status: u16, name: &str) {
    answer.is_problem(status, name);
    for (name, value) in [
        ("connection", "close"),
        ("cache-control", "private, no-store"),
        ("x-content-type-options", "nosniff"),
    ] {
        assert_eq!(answer.header(name), value, "{name}: {:?}", answer.headers);
    }
    assert!(
        answer.header("date").ends_with(" GMT"),
        "{:?}",
        answer.headers
    );
}
