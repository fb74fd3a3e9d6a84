//! `offload = "presigned"`: downloads that are checked here and sent by a real S3 server.

use std::time::Duration;

use ibid::ledger::Role;
use reqwest::{Method, Url};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::harness::{Answer, Server, Setup, answer, answer_of_others, sample};
use crate::process::Place;
use crate::s3_server::S3Server;

struct Sent {
    store: S3Server,
    server: Server,
    token: String,
    document: Value,
    url: String,
}

/// An export that is done, in a store that sends the downloads.
async fn sent() -> Sent {
    let store = S3Server::start().await;
    let server = Server::start(Setup {
        store: Some(store.vault("a/prefix")),
        ..Setup::default()
    })
    .await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    let document = server.export(&token, "k").await;
    Sent {
        url: document["download"]["url"]
            .as_str()
            .expect("a link")
            .to_owned(),
        store,
        server,
        token,
        document,
    }
}

impl Sent {
    async fn ask(&self, method: Method, headers: &[(&str, &str)]) -> Answer {
        let url = self.server.url(&self.url);
        let mut request = self.server.client.request(method, url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request).await
    }

    /// The address that the link leads to now.
    async fn address(&self) -> Url {
        let answer = self.ask(Method::GET, &[]).await;
        assert_eq!(answer.status, 307, "{answer:?}");
        Url::parse(answer.header("location")).expect("an absolute address")
    }

    /// For how many seconds the address that the link leads to lives.
    async fn seconds(&self) -> u64 {
        let address = self.address().await;
        let mut query = address.query_pairs();
        let (_, life) = query
            .find(|(name, _)| name == "X-Amz-Expires")
            .expect("one");
        life.parse().expect("a number")
    }

    /// Asks the store as somebody who knows nothing but the address.
    async fn at_store(&self, method: Method, address: Url, headers: &[(&str, &str)]) -> Answer {
        let mut request = reqwest::Client::new().request(method, address);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer_of_others(request).await
    }

    fn is_whole(&self, bytes: &[u8]) -> bool {
        hex::encode(Sha256::digest(bytes)) == self.document["sha256"].as_str().expect("a digest")
    }
}

#[tokio::test]
async fn a_download_is_sent_on_to_the_store_which_gives_the_file_whole_and_in_ranges() {
    let sent = sent().await;
    let answer = sent.ask(Method::GET, &[]).await;
    assert_eq!((answer.status, answer.bytes.len()), (307, 0));
    use base64::Engine as _;
    let digest = hex::decode(sent.document["sha256"].as_str().expect("hex")).expect("hex");
    let digest = base64::engine::general_purpose::STANDARD.encode(digest);
    for (name, value) in [
        ("cache-control", "private, no-store"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("content-security-policy", "default-src 'none'"),
        ("repr-digest", &format!("sha-256=:{digest}:")),
        // The store has its own.
        ("etag", ""),
        ("set-cookie", ""),
    ] {
        assert_eq!(answer.header(name), value, "{name}");
    }
    let address = Url::parse(answer.header("location")).expect("an absolute address");
    assert_eq!(answer.header("x-request-id").len(), 26);

    let whole = sent.at_store(Method::GET, address.clone(), &[]).await;
    assert_eq!(whole.status, 200, "{whole:?}");
    assert!(sent.is_whole(&whole.bytes));
    assert_eq!(crate::harness::lines(&whole.bytes).len(), 930);
    let job = sent.document["job_id"].as_str().expect("an id");
    let name = format!("attachment; filename=\"export-{job}.jsonl.gz\"");
    assert_eq!(whole.header("content-disposition"), name);
    assert_eq!(whole.header("content-type"), "application/gzip");
    assert_eq!(whole.header("content-encoding"), "");

    let etag = whole.header("etag").to_owned();
    let range = [("Range", "bytes=100-199"), ("If-Range", &*etag)];
    let part = sent.at_store(Method::GET, address.clone(), &range).await;
    assert_eq!(part.status, 206);
    assert_eq!(part.bytes, whole.bytes[100..200]);

    // Signed for its method alone.
    let head = sent.ask(Method::HEAD, &[]).await;
    assert_eq!(head.status, 307);
    let place = Url::parse(head.header("location")).expect("an absolute address");
    let head = sent.at_store(Method::HEAD, place.clone(), &[]).await;
    assert_eq!(head.status, 200);
    assert_eq!(head.header("content-length"), whole.bytes.len().to_string());
    let refused = sent.at_store(Method::GET, place, &[]).await;
    assert_eq!(refused.status, 403);
    for method in [Method::HEAD, Method::PUT, Method::DELETE] {
        let refused = sent.at_store(method.clone(), address.clone(), &[]).await;
        assert_eq!(refused.status, 403, "{method}");
    }
    // And for its object alone.
    let mut other = address;
    other.set_path("/vault/a/prefix/ledger");
    let refused = sent.at_store(Method::GET, other, &[]).await;
    assert_eq!(refused.status, 403);
}

#[tokio::test]
async fn ranges_and_preconditions_are_left_to_the_store() {
    let sent = sent().await;
    let etag = format!("\"{}\"", sent.document["sha256"].as_str().expect("hex"));
    for header in [
        ("Range", "bytes=0-9"),
        ("Range", "bytes=99999999-"),
        ("If-Match", "\"of-the-store\""),
        ("If-None-Match", &*etag),
        ("If-Unmodified-Since", "Thu, 01 Jan 1970 00:00:00 GMT"),
    ] {
        let answer = sent.ask(Method::GET, &[header]).await;
        assert_eq!(answer.status, 307, "{header:?}");
        assert_eq!(answer.header("content-range"), "");
    }
}

#[tokio::test]
async fn who_is_refused_is_not_sent_anywhere() {
    let sent = sent().await;
    let admin = sent.server.token("root", Role::Admin).await;
    let job = sent.document["job_id"].as_str().expect("an id");
    let refused = async |status: u16, name: &str| {
        for method in [Method::GET, Method::HEAD] {
            let answer = sent.ask(method, &[]).await;
            assert_eq!(
                (answer.status, answer.header("location")),
                (status, ""),
                "{name}"
            );
        }
        let answer = sent.ask(Method::GET, &[]).await;
        answer.is_problem(status, name);
    };
    let account = json!({"enabled": false});
    let path = "/admin/accounts/alice";
    let disabled = sent.server.admin("PUT", path, &admin, account).await;
    assert_eq!(disabled.status, 200);
    refused(403, "account-disabled").await;
    let account = json!({"enabled": true});
    sent.server.admin("PUT", path, &admin, account).await;
    assert_eq!(sent.ask(Method::GET, &[]).await.status, 307);

    let path = format!("/admin/exports/{job}/revoke");
    let reason = json!({"reason": "r"});
    let revoked = sent.server.admin("POST", &path, &admin, reason).await;
    assert_eq!(revoked.status, 200);
    refused(410, "export-revoked").await;
    let path = format!("/admin/exports/{job}/restore");
    sent.server.admin("POST", &path, &admin, json!({})).await;
    assert_eq!(sent.ask(Method::GET, &[]).await.status, 307);

    // Bytes that are lost are noticed here.
    sent.store
        .faults()
        .set(100, crate::s3_server::Fault::Denied);
    refused(503, "artefact-unavailable").await;
    sent.store.faults().set(0, crate::s3_server::Fault::Denied);
    sent.server.clock.advance(Duration::from_secs(301));
    refused(403, "link-expired").await;
}

#[tokio::test]
async fn an_address_lives_for_a_minute_and_never_longer_than_the_link_or_the_export() {
    let sent = sent().await;
    assert_eq!(sent.seconds().await, 60);
    sent.server.clock.advance(Duration::from_secs(290));
    assert_eq!(sent.seconds().await, 10);
    sent.server.clock.advance(Duration::from_millis(8_500));
    assert_eq!(sent.seconds().await, 1, "of one and a half");
    // For less than can be signed it is served here, with all that belongs to it.
    sent.server.clock.advance(Duration::from_millis(1_000));
    let last = sent.ask(Method::GET, &[("Range", "bytes=0-99")]).await;
    assert_eq!((last.status, last.bytes.len()), (206, 100));

    let left = Duration::from_secs(7 * 86_400 - 20) - Duration::from_millis(299_500);
    sent.server.clock.advance(left);
    let job = sent.document["job_id"].as_str().expect("an id");
    let document = sent.server.status(&sent.token, job).await.body;
    let url = document["download"]["url"].as_str().expect("a link");
    let sent = Sent {
        url: url.to_owned(),
        ..sent
    };
    assert_eq!(sent.seconds().await, 20);
}

#[tokio::test]
async fn the_store_refuses_an_address_whose_time_is_over() {
    let sent = sent().await;
    sent.server.clock.advance(Duration::from_secs(299));
    let address = sent.address().await;
    // The store goes by the clock of the world.
    let refused = async {
        loop {
            let answer = sent.at_store(Method::GET, address.clone(), &[]).await;
            if answer.status == 403 {
                return answer;
            }
            assert!(sent.is_whole(&answer.bytes));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let refused = tokio::time::timeout(Duration::from_secs(30), refused).await;
    let refused = String::from_utf8(refused.expect("it ends").bytes).expect("text");
    assert!(refused.contains("expired"), "{refused}");
}

#[tokio::test]
async fn downloads_that_are_sent_on_are_counted_and_heads_are_not() {
    let sent = sent().await;
    for method in [Method::GET, Method::HEAD, Method::GET] {
        assert_eq!(sent.ask(method, &[]).await.status, 307);
    }
    let metrics = answer(sent.server.get("/metrics")).await;
    let metrics = String::from_utf8(metrics.bytes).expect("text");
    let line = "ibid_downloads_total{status=\"307\"} 3";
    assert!(metrics.lines().any(|l| l == line), "{metrics}");
    let job = sent.document["job_id"].as_str().expect("an id");
    let counted = async {
        loop {
            let document = sent.server.status(&sent.token, job).await.body;
            if document["downloads"]["count"] == 2 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let counted = tokio::time::timeout(Duration::from_secs(30), counted).await;
    counted.expect("they are counted");
}

/// The program on a place whose artefacts are in `store`, which sends the downloads.
fn command(place: &Place, store: &S3Server, arguments: &[&str]) -> std::process::Command {
    let mut command = place.command(arguments);
    command
        .envs(store.variables())
        .env("IBID_ARTIFACTS", store.url("p"))
        .env("IBID_OFFLOAD", "presigned");
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_follows_to_the_store_with_nothing_but_the_address_and_no_log_shows_it() {
    use std::io::BufRead as _;
    let store = S3Server::start().await;
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let token = place.token("alice");
    let log = place.folder.path().join("log");
    let serve = ["serve", "--listen", "127.0.0.1:0"];
    let mut server = command(&place, &store, &serve)
        .env("IBID_LOG", "trace")
        .stderr(std::fs::File::create(&log).expect("a log"))
        .spawn()
        .expect("it runs");
    let mut out = std::io::BufReader::new(server.stdout.take().expect("a pipe"));
    let mut line = String::new();
    let read = tokio::task::block_in_place(|| out.read_line(&mut line));
    read.expect("a line");
    let base = &line[line.find("http://").expect("an address")..].trim();

    let target = place.folder.path().join("mine.jsonl.gz");
    let arguments = ["export", "--server", base, "-o", "mine.jsonl.gz", "--json"];
    let mut client = place.command(&arguments);
    client.env("IBID_TOKEN", &token).env("IBID_LOG", "trace");
    let ran = tokio::task::block_in_place(|| client.output()).expect("it runs");
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(ran.status.code(), Some(0), "{said}");
    let told: Value = serde_json::from_slice(&ran.stdout).expect("JSON");
    let file = std::fs::read(&target).expect("a file");
    assert_eq!(told["sha256"], hex::encode(Sha256::digest(&file)));
    assert_eq!(crate::harness::lines(&file).len(), 930);
    let heads = store.presigned();
    assert_eq!(heads.len(), 1);
    for name in ["authorization", "cookie", "referer", "idempotency-key"] {
        assert!(!heads[0].contains_key(name), "{name}");
    }

    server.kill().expect("killed");
    server.wait().expect("gone");
    let log = std::fs::read_to_string(&log).expect("a log");
    assert!(log.contains("status=307"), "the answer is not logged");
    for secret in ["X-Amz-Signature", "X-Amz-Credential", &token] {
        assert!(
            !log.contains(secret),
            "{secret} is in the log of the server"
        );
    }
    assert!(!said.contains("X-Amz-Signature"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_says_what_a_store_that_sends_downloads_needs() {
    let store = S3Server::start().await;
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let mut doctor = command(&place, &store, &["doctor"]);
    let ran = tokio::task::block_in_place(|| doctor.output()).expect("it runs");
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert_eq!(ran.status.code(), Some(0), "{said}");
    let line = |check: &str| {
        let line = said.lines().find(|line| line.contains(check));
        line.unwrap_or_else(|| panic!("no {check:?} in {said}"))
    };
    assert!(line("ok       storage:").contains("lifecycle rule of the bucket"));
    let [(_, endpoint), ..] = store.variables();
    assert!(line("ok       offload:").contains(&endpoint), "{said}");
    assert!(!said.contains("X-Amz"), "{said}");
    // What is tried leaves nothing.
    assert_eq!(store.objects("p"), [""; 0]);

    // A store without keys can be read and written where everybody may, and not signed for.
    let mut doctor = command(&place, &store, &["doctor"]);
    doctor
        .env("IBID_ARTIFACTS", "az://container/p")
        .env("AZURE_STORAGE_ACCOUNT_NAME", "a")
        .env("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9")
        .env("AZURE_ALLOW_HTTP", "true")
        .env("AZURE_SKIP_SIGNATURE", "true");
    let ran = tokio::task::block_in_place(|| doctor.output()).expect("it runs");
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert_eq!(ran.status.code(), Some(1), "{said}");
    assert!(said.contains("failure  offload: no address"), "{said}");
}

#[test]
fn a_folder_that_is_to_send_downloads_is_refused_at_start() {
    let place = Place::new();
    let ran = place.run(&["serve", "--offload", "presigned"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.err.contains("only an object store"), "{ran:?}");
    assert!(!place.data().exists(), "nothing was made");
}
