//! A small server that answers as a test says, byte for byte.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A file of 200 kB; another one for another number.
pub fn file(version: u64) -> Vec<u8> {
    noise(version, 200_000)
}

/// One that is fetched in several pieces.
pub fn large(version: u64) -> Vec<u8> {
    noise(version, 14_000_000)
}

/// Made once, and its digest too: a server that is slow to answer is another test.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    static MADE: Mutex<BTreeMap<(u64, usize), Vec<u8>>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap();
    let bytes = made.entry((seed, length));
    bytes.or_insert_with(|| make_noise(seed, length)).clone()
}

fn make_noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// What a client asked.
#[derive(Clone, Debug)]
pub struct Request {
    /// How many there were before it.
    pub number: usize,
    pub method: String,
    pub head: String,
    pub range: Option<Range<u64>>,
    pub if_range: Option<String>,
}

impl Request {
    pub fn start(&self) -> u64 {
        self.range.as_ref().map_or(0, |range| range.start)
    }

    fn parse(number: usize, head: String) -> Request {
        let field = |name: &str| {
            let line = head.lines().find(|line| {
                let given = line.split(':').next().unwrap();
                given.eq_ignore_ascii_case(name)
            })?;
            Some(line.split_once(':').unwrap().1.trim().to_owned())
        };
        let range = field("range").map(|range| {
            let range = range.strip_prefix("bytes=").unwrap();
            let (first, last) = range.split_once('-').unwrap();
            first.parse().unwrap()..last.parse::<u64>().unwrap() + 1
        });
        Request {
            number,
            method: head.split(' ').next().unwrap().to_owned(),
            range,
            if_range: field("if-range"),
            head,
        }
    }
}

/// How a body is sent.
#[derive(Clone, Copy, Debug)]
pub enum Body {
    Whole,
    /// None, as for HEAD.
    Head,
    /// So many bytes, then the connection ends.
    Cut(usize),
    /// So many bytes, then nothing more.
    Stalls(usize),
    /// Not even a head.
    Silent,
    /// Something else than HTTP.
    Garbage,
}

#[derive(Clone, Debug)]
pub struct Answer {
    status: u16,
    fields: Vec<(String, String)>,
    pub body: Vec<u8>,
    how: Body,
}

impl Answer {
    pub fn status(status: u16) -> Answer {
        Answer {
            status,
            fields: Vec::new(),
            body: Vec::new(),
            how: Body::Whole,
        }
    }

    pub fn problem(status: u16, name: &str, detail: &str) -> Answer {
        let mut answer = Answer::status(status);
        let body = format!(r#"{{"type":"/problems/{name}","detail":"{detail}"}}"#);
        answer.body = body.into_bytes();
        let length = answer.body.len().to_string();
        let answer = answer.with("Content-Type", "application/problem+json");
        answer.with("Content-Length", &length)
    }

    /// All of `file`, as one should send it.
    pub fn whole(file: &[u8]) -> Answer {
        let mut answer = Answer::status(200);
        answer.body = file.to_vec();
        let sha256 = STANDARD.encode(Sha256::digest(file));
        answer
            .with("Content-Length", &file.len().to_string())
            .with("ETag", &tag(file))
            .with("Repr-Digest", &format!("sha-256=:{sha256}:"))
    }

    /// What was asked for, of `file`.
    pub fn honest(request: &Request, file: &[u8]) -> Answer {
        if request.if_range.as_ref().is_some_and(|it| *it != tag(file)) {
            return Answer::whole(file);
        }
        Answer::careless(request, file)
    }

    /// As [`Answer::honest`], but whatever the condition says.
    pub fn careless(request: &Request, file: &[u8]) -> Answer {
        let mut answer = Answer::whole(file);
        let Some(range) = &request.range else {
            return answer;
        };
        let end = range.end.min(file.len() as u64);
        answer.status = 206;
        answer.body = file[range.start as usize..end as usize].to_vec();
        let length = answer.body.len().to_string();
        let of = format!("bytes {}-{}/{}", range.start, end - 1, file.len());
        answer
            .with("Content-Length", &length)
            .with("Content-Range", &of)
    }

    pub fn with(self, name: &str, value: &str) -> Answer {
        self.without(name).and(name, value)
    }

    pub fn and(mut self, name: &str, value: &str) -> Answer {
        self.fields.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn field(&self, name: &str) -> String {
        let field = self.fields.iter().find(|(given, _)| given == name);
        field.unwrap().1.clone()
    }

    pub fn without(mut self, name: &str) -> Answer {
        self.fields.retain(|(given, _)| given != name);
        self
    }

    pub fn cut_after(self, bytes: usize) -> Answer {
        self.that_is(Body::Cut(bytes))
    }

    pub fn that_is(mut self, how: Body) -> Answer {
        self.how = how;
        self
    }
}

fn tag(file: &[u8]) -> String {
    format!("\"{}\"", hex::encode(Sha256::digest(file)))
}

type Behaviour = dyn Fn(&Request) -> Answer + Send + Sync;

pub struct Hostile {
    port: u16,
    seen: Arc<Seen>,
    accepting: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Seen {
    requests: Mutex<Vec<Request>>,
    /// How many are answered now, and were at most.
    at_once: Mutex<(usize, usize)>,
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Hostile {
    pub async fn start(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Hostile {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::<Seen>::default();
        let answer: Arc<Behaviour> = Arc::new(answer);
        let shared = Arc::clone(&seen);
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, seen) = (Arc::clone(&answer), Arc::clone(&shared));
                tokio::spawn(async move {
                    // A client that goes away is none of our business.
                    let _ = serve(stream, &*answer, &seen).await;
                });
            }
        });
        Hostile {
            port,
            seen,
            accepting,
        }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/download/x?sig=secret", self.port)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.seen.requests.lock().unwrap().clone()
    }

    pub fn most_at_once(&self) -> usize {
        self.seen.at_once.lock().unwrap().1
    }
}

/// One request a connection.
async fn serve(mut stream: TcpStream, answer: &Behaviour, seen: &Seen) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let request = {
        let mut requests = seen.requests.lock().unwrap();
        let head = String::from_utf8(head).unwrap();
        let request = Request::parse(requests.len(), head);
        requests.push(request.clone());
        request
    };
    {
        let mut at_once = seen.at_once.lock().unwrap();
        at_once.0 += 1;
        at_once.1 = at_once.1.max(at_once.0);
    }
    let answer = answer(&request);
    let sent = send(&mut stream, &answer).await;
    seen.at_once.lock().unwrap().0 -= 1;
    sent
}

async fn send(stream: &mut TcpStream, answer: &Answer) -> std::io::Result<()> {
    let mut head = format!(
        "HTTP/1.1 {} Whatever\r\nConnection: close\r\n",
        answer.status
    );
    for (name, value) in &answer.fields {
        head += &format!("{name}: {value}\r\n");
    }
    if answer.body.is_empty() {
        head += "Content-Length: 0\r\n";
    }
    head += "\r\n";
    let part = |bytes: usize| &answer.body[..bytes.min(answer.body.len())];
    let body = match answer.how {
        Body::Whole => &answer.body[..],
        Body::Head => &[],
        Body::Cut(bytes) | Body::Stalls(bytes) => part(bytes),
        Body::Silent => return wait_for_the_end(stream).await,
        Body::Garbage => {
            stream.write_all(b"220 mail.example ESMTP\r\n").await?;
            return wait_for_the_end(stream).await;
        }
    };
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    match answer.how {
        Body::Stalls(_) => wait_for_the_end(stream).await,
        _ => stream.shutdown().await,
    }
}

/// Until the client goes away.
async fn wait_for_the_end(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.read_u8().await.map(|_| ())
}
