//! HTTP/2 in clear text, by prior knowledge, on the port of HTTP/1.

use bytes::{Bytes, BytesMut};
use h2::client::{Connection, SendRequest};
use h2::{Reason, RecvStream};
use http::{Request, StatusCode};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{SOON, in_time, long, patient, server};
use crate::download::ready_at;
use crate::harness::{Server, Setup};
use crate::process::until;

/// A request without a body.
pub fn asking(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder()
        .method(method)
        .uri(format!("http://h{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request")
}

/// A connection whose windows are wide for all requests together and narrow for each.
pub async fn over<Io>(io: Io) -> (SendRequest<Bytes>, Connection<Io>)
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let mut client = h2::client::Builder::new();
    client.initial_connection_window_size(100_000_000);
    client.handshake(io).await.expect("shaken hands")
}

pub async fn connect(server: &Server) -> (SendRequest<Bytes>, Connection<TcpStream>) {
    over(super::connect(server).await).await
}

/// A whole body.
pub async fn read(mut body: RecvStream) -> Result<Bytes, h2::Error> {
    let mut bytes = BytesMut::new();
    while let Some(data) = in_time(body.data()).await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

pub async fn ask(
    requests: &mut SendRequest<Bytes>,
    request: Request<()>,
) -> (http::response::Parts, Bytes) {
    let (response, _) = requests.send_request(request, true).expect("sent");
    let (head, body) = in_time(response).await.expect("an answer").into_parts();
    (head, read(body).await.expect("a body"))
}

#[tokio::test(flavor = "multi_thread")]
async fn downloads_and_ranges_are_the_same_as_on_http1() {
    let ready = ready_at(Setup::default()).await;
    let (mut requests, connection) = connect(&ready.server).await;
    tokio::spawn(connection);
    for headers in [
        vec![],
        vec![("range", "bytes=10-99")],
        vec![("range", "bytes=-1000")],
        vec![("range", "bytes=0-0,100-199")],
        vec![("range", "bytes=99999999-")],
    ] {
        let (head, body) = ask(&mut requests, asking("GET", &ready.url, &headers)).await;
        let old = ready.get(&headers).await;
        assert_eq!(head.status, old.status, "{headers:?}");
        for (name, value) in &old.headers {
            let differs = ["date", "x-request-id", "content-type"].contains(&name.as_str());
            assert!(
                differs || head.headers.get(name) == Some(value),
                "{name}: {head:?}"
            );
        }
        if !headers.iter().any(|(_, range)| range.contains(',')) && head.status != 416 {
            assert_eq!(body, old.bytes, "{headers:?}");
        }
        assert_eq!(body.len(), old.bytes.len(), "{headers:?}");
    }
    let (head, body) = ask(&mut requests, asking("HEAD", &ready.url, &[])).await;
    assert_eq!((head.status, body.len()), (StatusCode::OK, 0));
    assert_eq!(
        head.headers["content-length"],
        ready.bytes.to_string().as_str()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_takes_a_hundred_requests_at_a_time_and_no_tunnels() {
    let server = server().await;
    let (mut requests, mut connection) = connect(&server).await;
    let mut first = requests.clone();
    let (head, _) = tokio::select! {
        answer = ask(&mut first, asking("GET", "/healthz", &[])) => answer,
        _ = &mut connection => panic!("the connection ended"),
    };
    assert_eq!(head.status, 200);
    assert_eq!(connection.max_concurrent_send_streams(), 100);
    assert!(!requests.is_extended_connect_protocol_enabled());
    tokio::spawn(connection);
    let long = "x".repeat(70_000);
    let (head, _) = ask(&mut requests, asking("GET", "/healthz", &[("x", &long)])).await;
    assert_eq!(head.status, 431);
    let (head, body) = ask(&mut requests, asking("GET", "/nothing", &[])).await;
    assert_eq!(head.headers["content-type"], "application/problem+json");
    assert!(
        body.starts_with(b"{\"type\":\"/problems/not-found\""),
        "{body:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_nobody_reads_is_reset_and_no_other() {
    let ready = long(patient(|patience| patience.write = SOON)).await;
    let (mut requests, connection) = connect(&ready.server).await;
    tokio::spawn(connection);
    let sent = requests.send_request(asking("GET", &ready.url, &[]), true);
    let mut still = in_time(sent.expect("sent").0)
        .await
        .expect("an answer")
        .into_body();
    // Taken and never let go of, so the stream's window closes.
    let mut got = 0;
    let error = loop {
        match in_time(still.data()).await {
            Some(Ok(data)) => got += data.len(),
            Some(Err(error)) => break error,
            None => panic!(
                "{got} of {} bytes were ended as if they were all",
                ready.bytes
            ),
        }
    };
    assert_eq!(error.reason(), Some(Reason::CANCEL), "{error:?}");
    let (head, body) = ask(&mut requests, asking("GET", &ready.url, &[])).await;
    assert_eq!(head.status, 200);
    assert_eq!(hex::encode(Sha256::digest(&body)), ready.sha256());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_on_which_nothing_happens_is_let_go() {
    let server = Server::start(patient(|patience| patience.idle = SOON)).await;
    let (mut requests, connection) = connect(&server).await;
    let ended = tokio::spawn(connection);
    let (head, _) = ask(&mut requests, asking("GET", "/healthz", &[])).await;
    assert_eq!(head.status, 200);
    in_time(ended)
        .await
        .expect("no panic")
        .expect("an orderly end");
    until("it is gone", async || server.cut.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_an_answer_that_is_never_taken_does_not_keep_a_connection() {
    let ready = ready_at(patient(|patience| {
        patience.idle = SOON;
        patience.head = SOON;
    }))
    .await;
    let mut client = h2::client::Builder::new();
    client.initial_window_size(1_000);
    let stream = super::connect(&ready.server).await;
    let (mut requests, connection) = client.handshake::<_, Bytes>(stream).await.expect("shaken");
    // It goes on answering pings.
    let ended = tokio::spawn(connection);
    // Short enough to be handed over whole, and longer than what is taken of it.
    let request = asking("GET", &ready.url, &[("range", "bytes=0-4999")]);
    let (response, _) = requests.send_request(request, true).expect("sent");
    let response = in_time(response).await.expect("an answer");
    assert_eq!(response.status(), StatusCode::PARTIAL_CONTENT);
    let _ = in_time(ended).await.expect("no panic");
    until("it is gone", async || ready.server.cut.open() == 0).await;
}

#[tokio::test]
async fn frames_that_are_none_end_the_connection() {
    let server = server().await;
    let mut stream = super::connect(&server).await;
    let garbage = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" as &[u8], &[0xff; 200]].concat();
    stream.write_all(&garbage).await.expect("sent");
    let mut said = Vec::new();
    let _ = in_time(stream.read_to_end(&mut said)).await;
    // SETTINGS, and GOAWAY of some kind; no answer of HTTP/1.
    assert!(
        !said.windows(7).any(|bytes| bytes == b"HTTP/1."),
        "{said:?}"
    );
    until("it is gone", async || server.cut.open() == 0).await;
}
