//! What is no request: every answer is a problem, and none of ours is touched.

use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;

use super::{connect, first, is_farewell, long, only, rest, said_to, server};
use crate::harness::Setup;

#[tokio::test]
async fn what_is_no_request_is_answered_with_a_problem() {
    let server = server().await;
    let hello = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" as &[u8],
        &[7; 500],
    ]
    .concat();
    for bytes in [
        b"\x00\x01\x02\x03\xff\xfe\r\n\r\n" as &[u8],
        b"hello?\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.2\r\n\r\n",
        b"GET / HTTP/3.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nno preface",
        b"GET / HTTP/1.1\r\nHost: h\r\nbad name: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nx: a\rb\r\n\r\n",
        b"POST /exports HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /exports HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"POST /exports HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n",
        &hello,
    ] {
        let said = said_to(&server, bytes).await;
        is_farewell(&only(&said), 400, "malformed");
    }
}

#[tokio::test]
async fn a_request_names_one_host() {
    let server = server().await;
    for headers in ["", "Host: a\r\nHost: a\r\n"] {
        let request = format!("GET /healthz HTTP/1.1\r\n{headers}Connection: close\r\n\r\n");
        let said = said_to(&server, request.as_bytes()).await;
        only(&said).is_problem(400, "malformed");
    }
    let old = said_to(&server, b"GET /healthz HTTP/1.0\r\n\r\n").await;
    assert_eq!(only(&old).status, 200);
}

#[tokio::test]
async fn heads_that_are_too_long_are_refused_with_the_reason() {
    let server = server().await;
    let long = "x".repeat(100_000);
    let many = |count: usize| "a: b\r\n".repeat(count);
    for (request, status, name) in [
        (
            format!("GET / HTTP/1.1\r\nHost: h\r\nx: {long}\r\n\r\n"),
            431,
            "headers-too-large",
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: h\r\nx: {long}"),
            431,
            "headers-too-large",
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", many(100)),
            431,
            "headers-too-large",
        ),
        (
            format!("GET / HTTP/1.1\r\n{long}: x\r\n\r\n"),
            431,
            "headers-too-large",
        ),
        (
            format!("GET /{long} HTTP/1.1\r\nHost: h\r\n\r\n"),
            414,
            "uri-too-long",
        ),
        (
            format!("GET /healthz?{long} HTTP/1.1\r\nHost: h\r\n\r\n"),
            414,
            "uri-too-long",
        ),
        // As long as a line is not whole, nobody knows better.
        (long.clone(), 414, "uri-too-long"),
    ] {
        let said = said_to(&server, request.as_bytes()).await;
        is_farewell(&only(&said), status, name);
    }
    let headers = format!("Host: h\r\nConnection: close\r\n{}", many(98));
    let enough = format!("GET /healthz HTTP/1.1\r\n{headers}\r\n");
    assert_eq!(only(&said_to(&server, enough.as_bytes()).await).status, 200);
    let path = "y".repeat(60_000);
    let enough = format!("GET /{path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    only(&said_to(&server, enough.as_bytes()).await).is_problem(404, "not-found");
}

#[tokio::test]
async fn garbage_behind_requests_is_answered_after_them() {
    let server = server().await;
    let one = "GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n";
    let said = said_to(&server, format!("{one}{one}\x01\x02\r\n\r\n").as_bytes()).await;
    let (healthy, said) = first(&said);
    assert_eq!(
        (healthy.status, healthy.body["status"].as_str()),
        (200, Some("ok"))
    );
    let (healthy, said) = first(said);
    assert_eq!(healthy.status, 200);
    is_farewell(&only(said), 400, "malformed");
    // Nothing of an own answer's form is touched: this one is empty and 304, that one a 404.
    let not_found = "GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    only(&said_to(&server, not_found.as_bytes()).await).is_problem(404, "not-found");
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_behind_a_download_leaves_the_download_whole() {
    let ready = long(Setup::default()).await;
    let mut stream = connect(&ready.server).await;
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: h\r\n\r\n\x01\x02\r\n\r\n",
        ready.url
    );
    stream.write_all(request.as_bytes()).await.expect("sent");
    let said = rest(&mut stream).await;
    let (whole, behind) = first(&said);
    assert_eq!(hex::encode(Sha256::digest(&whole.bytes)), ready.sha256());
    is_farewell(&only(behind), 400, "malformed");
}
