//! A server in this process on a real port, with a clock that tests move and a socket that
//! tests can cut.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use ibid::cut::CutRule;
use ibid::export::Terms;
use ibid::exporter::{Database, Databases, ExportTerms, Exporter};
use ibid::ids::UserId;
use ibid::import::Manner;
use ibid::ledger::{NewToken, Role};
use ibid::limits::Limits;
use ibid::time::{Clock, Time};
use ibid::token::FreshToken;
use ibid::vault::Vault;
use ibid::worker::{Worker, WorkerTerms};
use ibid_server::api::App;
use ibid_server::edge::Edge;
use ibid_server::keys::KeyStore;
use ibid_server::lifecycle;
use ibid_server::port::Port;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::described;

/// What a server is started with.
pub struct Setup {
    pub limits: Limits,
    pub part_messages: u64,
    pub public_url: Option<String>,
    /// An object store, which then sends the downloads, too.
    pub store: Option<Vault>,
    pub edge: Edge,
    pub drain: Duration,
    /// What the client trusts beside the authorities that it knows.
    pub trusted: Option<reqwest::Certificate>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            limits: Limits {
                unfinished_per_user: 3,
                exports_per_user_per_day: 20,
            },
            part_messages: 200,
            public_url: None,
            store: None,
            edge: Edge::default(),
            drain: Duration::ZERO,
            trusted: None,
        }
    }
}

pub struct Server {
    pub base: String,
    pub clock: Clock,
    pub exporter: Exporter,
    pub client: reqwest::Client,
    pub cut: Cut,
    pub folder: tempfile::TempDir,
    stop: CancellationToken,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Noon of some day, at which the clock of a test server stands.
pub const NOON: Time = Time::from_seconds(1_800_014_400);

impl Server {
    /// A server whose clock stands and that does no work by itself.
    pub async fn start(setup: Setup) -> Server {
        let folder = tempfile::tempdir().expect("a folder");
        let clock = Clock::frozen_at(NOON);
        let terms = ExportTerms {
            limits: setup.limits,
            cut: CutRule {
                part_bytes: 1 << 20,
                part_messages: setup.part_messages,
            },
            link_life: Duration::from_secs(300),
        };
        let database = Database::Sqlite(folder.path().join("ibid.db"));
        let databases = Databases::open(&database, None, clock.clone()).await;
        let offload = setup.store.is_some();
        let vault = setup.store.unwrap_or_else(|| {
            Vault::in_folder(&folder.path().join("artifacts")).expect("a vault")
        });
        let databases = databases.expect("a database");
        let exporter = Exporter::on(databases, vault, terms).offloading(offload);
        let keys = KeyStore::open_or_create(&folder.path().join("keys"), clock.now())
            .expect("signing keys");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let cut = Cut::default();
        let cutting = cut.clone();
        let port = Port::new(listener, move |stream| {
            cutting.open.fetch_add(1, Ordering::SeqCst);
            CutStream {
                stream,
                cut: cutting.clone(),
                state: Mutex::default(),
            }
        });
        let app = App::new(
            exporter.clone(),
            Arc::new(keys),
            setup.public_url,
            Duration::from_secs(90 * 86_400),
            Duration::from_secs(1),
        );
        let (scheme, host) = match setup.edge.tls {
            // What the certificate is made for.
            Some(_) => ("https", format!("localhost:{}", address.port())),
            None => ("http", address.to_string()),
        };
        let mut client = ibid_server::commands::http_client().expect("a client");
        if let Some(trusted) = setup.trusted {
            let trusting = reqwest::Client::builder().tls_certs_only([trusted]);
            client = trusting.build().expect("a client");
        }
        let stop = CancellationToken::new();
        let ended = stop.clone();
        tokio::spawn(async move {
            lifecycle::run(port, setup.edge, app, None, None, ended, setup.drain).await;
        });
        Server {
            base: format!("{scheme}://{host}"),
            clock,
            exporter,
            client,
            cut,
            folder,
            stop,
        }
    }

    /// Asks it to stop, as a signal does.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Host and port.
    pub fn host(&self) -> &str {
        let (_, host) = self.base.split_once("://").expect("a URL");
        host
    }

    /// Takes events into the log.
    pub async fn import(&self, lines: &[String]) {
        use std::io::Write as _;
        let mut file = tempfile::tempfile().expect("a file");
        for line in lines {
            writeln!(file, "{line}").expect("written");
        }
        ibid::import::import(
            self.exporter.source.as_ref(),
            &mut file,
            Manner::default(),
            &mut |_| {},
        )
        .await
        .expect("imported");
    }

    /// A token for `user`.
    pub async fn token(&self, user: &str, role: Role) -> String {
        let fresh = FreshToken::generate().expect("a token");
        let token = NewToken {
            sha256: fresh.sha256,
            token_id: fresh.token_id.clone(),
            user: UserId::parse(user).expect("an id"),
            role,
            ttl: None,
        };
        self.exporter.ledger.add_token(token).await.expect("stored");
        fresh.text
    }

    /// Does all the work there is.
    pub async fn work(&self) {
        let terms = WorkerTerms {
            workers: 1,
            lease: Duration::from_secs(30),
            poll: Duration::from_millis(10),
            terms: Terms {
                max_attempts: 5,
                retention: Duration::from_secs(7 * 86_400),
            },
            running_per_user: 0,
            until_idle: true,
        };
        let workshop = self.exporter.workshop(2, None);
        Worker::new(workshop, terms, Arc::default(), |_| {})
            .run(&CancellationToken::new())
            .await
            .expect("the ledger answers");
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    pub fn get(&self, path: &str) -> reqwest::RequestBuilder {
        self.client.get(self.url(path))
    }

    /// `POST /exports`.
    pub async fn post(&self, token: &str, key: &str, body: &str) -> Answer {
        let request = self
            .client
            .post(self.url("/exports"))
            .bearer_auth(token)
            .header("Idempotency-Key", key)
            .header("Content-Type", "application/json")
            .body(body.to_owned());
        answer(request).await
    }

    pub async fn status(&self, token: &str, job: &str) -> Answer {
        answer(self.get(&format!("/exports/{job}")).bearer_auth(token)).await
    }

    /// Asks for everything that `token`'s user can see and waits until it is done; gives the
    /// job's document.
    pub async fn export(&self, token: &str, key: &str) -> Value {
        let made = self.post(token, key, r#"{"scope":"all"}"#).await;
        assert_eq!(made.status, 202, "{:?}", made.body);
        self.work().await;
        let done = self.status(token, &made.text("job_id")).await;
        assert_eq!(done.body["state"], "done", "{:?}", done.body);
        done.body
    }

    /// Asks something of the admin API.
    pub async fn admin(&self, method: &str, path: &str, token: &str, body: Value) -> Answer {
        let method = method.parse().expect("a method");
        let request = self
            .client
            .request(method, self.url(path))
            .bearer_auth(token)
            .header("Content-Type", "application/json")
            .body(body.to_string());
        answer(request).await
    }
}

/// An answer, read whole.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub bytes: Vec<u8>,
    pub body: Value,
}

impl Answer {
    pub fn text(&self, member: &str) -> String {
        self.body[member].as_str().unwrap_or_default().to_owned()
    }

    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).map(|value| value.to_str());
        value.unwrap_or(Ok("")).expect("ASCII")
    }

    /// Asserts that this is the problem `name`, with everything that a problem has.
    pub fn is_problem(&self, status: u16, name: &str) {
        assert_eq!(
            (self.status, self.text("type").as_str()),
            (status, format!("/problems/{name}").as_str()),
            "{}",
            String::from_utf8_lossy(&self.bytes)
        );
        assert_eq!(self.header("content-type"), "application/problem+json");
        assert_eq!(self.body["status"], status);
        assert_eq!(self.text("request_id"), self.header("x-request-id"));
        assert!(self.text("detail").ends_with('.'), "{:?}", self.body);
        assert!(!self.text("title").is_empty());
    }
}

/// The answer of the API, which must be one that its description has.
pub async fn answer(request: reqwest::RequestBuilder) -> Answer {
    let (client, request) = request.build_split();
    let request = request.expect("a request");
    let (method, url) = (request.method().clone(), request.url().clone());
    let request = reqwest::RequestBuilder::from_parts(client, request);
    let answer = answer_of_others(request).await;
    if let Err(reason) = described::check(method.as_str(), url.path(), &answer) {
        let body = String::from_utf8_lossy(&answer.bytes);
        let (status, headers) = (answer.status, &answer.headers);
        panic!("{method} {url}: {reason}\n{status} {headers:?}\n{body}");
    }
    answer
}

/// The answer of something that is not the API.
pub async fn answer_of_others(request: reqwest::RequestBuilder) -> Answer {
    let response = request.send().await.expect("an answer");
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let bytes = response.bytes().await.expect("a whole body").to_vec();
    Answer {
        status,
        headers,
        body: serde_json::from_slice(&bytes).unwrap_or_default(),
        bytes,
    }
}

/// Cuts the connection of the next answer after so many bytes of its body.
#[derive(Clone, Default)]
pub struct Cut {
    /// 0 is not armed; else one more than the bytes that may pass.
    armed: Arc<AtomicU64>,
    open: Arc<AtomicU64>,
}

impl Cut {
    /// How many connections the server has.
    pub fn open(&self) -> u64 {
        self.open.load(Ordering::SeqCst)
    }

    pub fn after(&self, bytes: u64) {
        self.armed.store(bytes + 1, Ordering::SeqCst);
    }
}

struct CutStream {
    stream: TcpStream,
    cut: Cut,
    state: Mutex<CutState>,
}

impl Drop for CutStream {
    fn drop(&mut self) {
        self.cut.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What has passed of the answer that is being cut.
#[derive(Default)]
struct CutState {
    head: Vec<u8>,
    body_left: Option<u64>,
}

impl AsyncRead for CutStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for CutStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let armed = self.cut.armed.load(Ordering::SeqCst);
        let may_pass = {
            let mut state = self.state.lock().expect("not poisoned");
            match (armed, state.body_left) {
                (0, None) => bytes.len(),
                (_, Some(0)) => {
                    self.cut.armed.store(0, Ordering::SeqCst);
                    return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
                }
                (_, Some(left)) => bytes.len().min(left as usize),
                (armed, None) => {
                    // Byte by byte until the head ends: slow, and simple.
                    if state.head.ends_with(b"\r\n\r\n") {
                        state.body_left = Some(armed - 1);
                        bytes.len().min((armed - 1) as usize)
                    } else {
                        1
                    }
                }
            }
        };
        let written = Pin::new(&mut self.stream).poll_write(cx, &bytes[..may_pass]);
        if let Poll::Ready(Ok(count)) = written {
            let mut state = self.state.lock().expect("not poisoned");
            match &mut state.body_left {
                Some(left) => *left -= count as u64,
                None if armed > 0 => state.head.extend_from_slice(&bytes[..count]),
                None => {}
            }
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// An event with a time.
pub fn event(mut event: Value) -> String {
    event["ts"] = json!("2026-01-05T09:30:00Z");
    event.to_string()
}

pub fn join(conv: &str, user: &str) -> String {
    event(json!({"kind": "join", "conv": conv, "user": user}))
}

pub fn leave(conv: &str, user: &str) -> String {
    event(json!({"kind": "leave", "conv": conv, "user": user}))
}

pub fn message(conv: &str, body: &str) -> String {
    event(json!({"kind": "message", "conv": conv, "user": "bob", "body": body}))
}

pub fn recall(conv: &str, seq: u64) -> String {
    event(json!({"kind": "recall", "conv": conv, "seq": seq}))
}

/// The sample: alice sees 51-550 of c-team and 1-430 of c-big; 60 of c-team is recalled.
pub fn sample() -> Vec<String> {
    let text = |conv: &str, seq: u32| message(conv, &format!("message {seq} of {conv}"));
    let mut events = vec![join("c-team", "bob"), join("c-private", "bob")];
    events.extend((1..=50).map(|seq| text("c-team", seq)));
    events.extend([join("c-team", "alice"), join("c-big", "alice")]);
    events.extend((51..=550).map(|seq| text("c-team", seq)));
    events.extend((1..=430).map(|seq| text("c-big", seq)));
    events.push(leave("c-big", "alice"));
    events.extend((431..=440).map(|seq| text("c-big", seq)));
    events.extend((1..=30).map(|seq| text("c-private", seq)));
    events.push(recall("c-team", 60));
    events
}

/// What happens to the sample after the export was created.
pub fn sample_later() -> Vec<String> {
    vec![recall("c-team", 70), message("c-team", "one more")]
}

/// The lines of an artefact.
pub fn lines(artefact: &[u8]) -> Vec<Value> {
    let text = ibid::segment::inflate_artefact(artefact).expect("one whole gzip member");
    let text = String::from_utf8(text).expect("UTF-8");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}
