//! The client's downloads from servers that misbehave: a file that is right, or none.

pub mod hostile;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use ibid::client::{ClientError, Expected, Fetch, FetchEvent, Fetched, Link};
use sha2::{Digest as _, Sha256};

use self::hostile::{Answer, Body, Hostile, Request, file};

/// What one fetch is about.
struct Case {
    folder: tempfile::TempDir,
    fetch: Fetch,
}

impl Case {
    fn new() -> Case {
        let fetch = Fetch {
            patience: Duration::from_millis(1500),
            silence: Duration::from_millis(800),
            ..Fetch::default()
        };
        Case {
            folder: tempfile::tempdir().unwrap(),
            fetch,
        }
    }

    fn with(connections: u32) -> Case {
        let mut case = Case::new();
        case.fetch.connections = NonZeroU32::new(connections).unwrap();
        case
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("out.gz")
    }

    async fn fetch(&self, server: &Hostile) -> Result<Fetched, ClientError> {
        let link = Link::of_url(&server.url()).unwrap();
        self.fetch.into_file(link, &self.output(), &|_| {}).await
    }

    /// Fetches, and sees that there is the whole file and nothing else.
    async fn gets(&self, server: &Hostile, what: &[u8]) -> Fetched {
        let fetched = self.fetch(server).await.unwrap();
        assert!(std::fs::read(self.output()).unwrap() == what);
        assert_eq!(fetched.bytes, what.len() as u64);
        assert_eq!(names(self.folder.path()), ["out.gz"]);
        fetched
    }

    /// Fetches, and sees that there is no file.
    async fn fails(&self, server: &Hostile) -> ClientError {
        let error = self.fetch(server).await.unwrap_err();
        assert!(!self.output().exists(), "{error}");
        assert!(!error.to_string().contains("secret"), "{error}");
        error
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// The first answers break off after so many bytes of their body.
fn breaks(times: usize, after: usize) -> impl Fn(&Request) -> Answer {
    move |request| {
        let answer = Answer::honest(request, &file(1));
        if request.number < times {
            answer.cut_after(after)
        } else {
            answer
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_goes_on_where_it_broke() {
    let server = Hostile::start(breaks(3, 50_000)).await;
    let case = Case::new();
    let fetched = case.gets(&server, &file(1)).await;
    assert_eq!(fetched.resumed, 0);
    let ranges: Vec<_> = server.requests().into_iter().map(|it| it.range).collect();
    assert_eq!(ranges.len(), 4);
    let starts: Vec<_> = ranges.iter().flatten().map(|range| range.start).collect();
    assert!(starts.is_sorted() && starts[0] > 0, "{starts:?}");
    // Every request after the first says of which file it wants a part.
    let guards = server.requests().into_iter().map(|it| it.if_range);
    assert_eq!(guards.flatten().count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_run_goes_on_where_one_gave_up() {
    let server = Hostile::start(breaks(usize::MAX, 60_000)).await;
    let mut case = Case::new();
    case.fetch.patience = Duration::ZERO;
    let error = case.fails(&server).await;
    assert!(error.is_passing(), "{error}");
    assert_eq!(
        names(case.folder.path()),
        ["out.gz.part", "out.gz.part.json"]
    );
    let server = Hostile::start(breaks(0, 0)).await;
    let fetched = case.gets(&server, &file(1)).await;
    assert!(fetched.resumed > 0, "{fetched:?}");
    assert!(server.requests()[0].range.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changed_is_fetched_whole() {
    // Broken off, then another file: the server honours If-Range.
    let server = Hostile::start(|request| match request.number {
        0 => Answer::honest(request, &file(1)).cut_after(50_000),
        _ => Answer::honest(request, &file(2)),
    });
    let case = Case::new();
    case.gets(&server.await, &file(2)).await;
    // It does not, and sends a part of the other file, which has another tag.
    let server = Hostile::start(|request| match request.number {
        0 => Answer::honest(request, &file(1)).cut_after(50_000),
        _ => Answer::careless(request, &file(2)),
    });
    let case = Case::new();
    case.gets(&server.await, &file(2)).await;
    // It does not even say that it is another one.
    let server = Hostile::start(|request| {
        let tag = "\"always the same\"";
        match request.number {
            0 => Answer::honest(request, &file(1))
                .with("ETag", tag)
                .cut_after(50_000),
            _ => Answer::careless(request, &file(2)).with("ETag", tag),
        }
    });
    let case = Case::new();
    case.gets(&server.await, &file(2)).await;
    // In the middle of parts by several connections.
    let server = Hostile::start(|request| match request.number {
        0..3 => Answer::honest(request, &hostile::large(1)),
        _ => Answer::honest(request, &hostile::large(2)),
    });
    let case = Case::with(4);
    case.gets(&server.await, &hostile::large(2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_always_changes_is_given_up() {
    let server = Hostile::start(|request| {
        let version = request.number as u64;
        Answer::honest(request, &file(version)).cut_after(50_000)
    });
    let server = server.await;
    let case = Case::new();
    let error = case.fails(&server).await;
    assert!(matches!(error, ClientError::Strange(_)), "{error}");
    assert!(server.requests().len() < 20, "{}", server.requests().len());
}

#[tokio::test(flavor = "multi_thread")]
async fn several_connections_put_the_file_together() {
    let server = Hostile::start(|request| {
        let answer = Answer::honest(request, &hostile::large(1));
        match request.number % 3 {
            1 => answer.cut_after(900_000),
            _ => answer,
        }
    });
    let server = server.await;
    let case = Case::with(4);
    case.gets(&server, &hostile::large(1)).await;
    assert!(server.most_at_once() > 1);
    // What they have fetched is there for one that goes on.
    let server = Hostile::start(|request| {
        let answer = Answer::honest(request, &hostile::large(1));
        match request.number {
            0..3 => answer,
            _ => answer.cut_after(0),
        }
    });
    let mut case = Case::with(3);
    case.fetch.patience = Duration::ZERO;
    case.fails(&server.await).await;
    case.fetch.connections = NonZeroU32::MIN;
    let server = Hostile::start(|request| Answer::honest(request, &hostile::large(1))).await;
    let fetched = case.gets(&server, &hostile::large(1)).await;
    assert!(fetched.resumed > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_ranges_is_asked_for_the_whole() {
    for connections in [1, 4] {
        let server = Hostile::start(|request| {
            let answer = Answer::whole(&file(1));
            match request.number {
                0 => answer.cut_after(100_000),
                _ => answer,
            }
        });
        let server = server.await;
        Case::with(connections).gets(&server, &file(1)).await;
    }
}

/// A way to answer, and its name.
type Named = (&'static str, fn(&Request) -> Answer);

/// Answers to a request for a part that no client may believe.
fn lies() -> Vec<Named> {
    fn part(request: &Request) -> Answer {
        Answer::honest(request, &file(1))
    }
    vec![
        ("another part than was asked for", |request| {
            let mut early = request.clone();
            early.range = Some(0..file(1).len() as u64);
            part(&early)
        }),
        ("the bytes of another part", |request| {
            let mut answer = part(request);
            answer.body.rotate_left(1);
            answer
        }),
        ("another length of the whole", |request| {
            let range = format!("bytes {}-{}/999999", request.start(), file(1).len() - 1);
            part(request).with("Content-Range", &range)
        }),
        ("no length of the whole", |request| {
            let range = format!("bytes {}-{}/*", request.start(), file(1).len() - 1);
            part(request).with("Content-Range", &range)
        }),
        ("a part without saying which", |request| {
            part(request).without("Content-Range")
        }),
        ("a part of several", |request| {
            part(request).with("Content-Type", "multipart/byteranges; boundary=x")
        }),
        ("a part of a file with another tag", |request| {
            part(request).with("ETag", "\"another\"")
        }),
        ("a part that is encoded", |request| {
            part(request).with("Content-Encoding", "gzip")
        }),
        ("that there is no such part", |_| {
            Answer::status(416).with("Content-Range", "bytes */10")
        }),
        ("that there is nothing", |_| Answer::status(204)),
        ("that nothing has changed", |_| Answer::status(304)),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_lies_about_parts_is_asked_for_the_whole() {
    for (lie, answer) in lies() {
        let server = Hostile::start(move |request| {
            if request.range.is_some() {
                return answer(request);
            }
            let whole = Answer::honest(request, &file(1));
            match request.number {
                0 => whole.cut_after(100_000),
                _ => whole,
            }
        });
        let server = server.await;
        let case = Case::new();
        let fetched = case.fetch(&server).await;
        // Those that are no answer to such a request end it, and nothing is lost.
        if let Err(error) = fetched {
            assert!(matches!(error, ClientError::Refused(_)), "{lie}: {error}");
            assert!(!case.output().exists(), "{lie}");
            assert_eq!(names(case.folder.path()).len(), 2, "{lie}");
            continue;
        }
        assert!(std::fs::read(case.output()).unwrap() == file(1), "{lie}");
    }
}

/// Answers of which no file comes.
fn useless() -> Vec<Named> {
    fn honest(request: &Request) -> Answer {
        Answer::honest(request, &file(1))
    }
    vec![
        ("a short file with its own length", |request| {
            let mut answer = honest(request);
            answer.body.truncate(1000);
            answer.with("Content-Length", "1000")
        }),
        ("other bytes", |request| {
            let mut answer = honest(request);
            answer.body[77] ^= 1;
            answer
        }),
        ("no length", |request| {
            honest(request).without("Content-Length")
        }),
        ("two lengths", |request| {
            honest(request).and("Content-Length", "7")
        }),
        ("an encoded file", |request| {
            honest(request).with("Content-Encoding", "gzip")
        }),
        ("no digest", |request| {
            honest(request).without("Repr-Digest")
        }),
        ("a digest that is none", |request| {
            honest(request).with("Repr-Digest", "sha-256=:AAAA:")
        }),
        ("to go elsewhere without end", |_| {
            Answer::status(307).with("Location", "/again?sig=secret")
        }),
        ("to go nowhere", |_| Answer::status(307)),
        ("to read a file", |_| {
            Answer::status(302).with("Location", "file:///etc/passwd")
        }),
        ("a page", |_| {
            let mut page = Answer::status(200).with("Content-Type", "text/html");
            page.body = b"<html>sign in".to_vec();
            page.with("Content-Length", "13")
        }),
        ("that it cannot be found", |_| Answer::status(404)),
        ("that something is wrong", |_| Answer::status(500)),
        ("that it is busy", |_| {
            Answer::status(503).with("Retry-After", "0")
        }),
        ("a part that nobody asked for", |request| {
            let mut request = request.clone();
            request.range = Some(0..1000);
            honest(&request)
        }),
        ("nothing at all", |request| {
            honest(request).that_is(Body::Silent)
        }),
        ("no HTTP", |request| honest(request).that_is(Body::Garbage)),
        ("always half a file", |request| {
            honest(request).without("ETag").cut_after(100_000)
        }),
        ("half a file, and stays on the line", |request| {
            honest(request)
                .without("ETag")
                .that_is(Body::Stalls(100_000))
        }),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_has_no_file_leads_to_none_that_is_wrong() {
    // All at once, as most of them take as long as a client is patient.
    let mut cases = tokio::task::JoinSet::new();
    for connections in [1, 4] {
        for (what, answer) in useless() {
            cases.spawn(leads_to_no_wrong_file(what, answer, connections));
        }
    }
    cases.join_all().await;
}

async fn leads_to_no_wrong_file(
    what: &'static str,
    answer: fn(&Request) -> Answer,
    connections: u32,
) {
    let server = Hostile::start(answer).await;
    let case = Case::with(connections);
    if case.fetch(&server).await.is_ok() {
        // Of some the parts are of use.
        assert!(connections > 1, "{what}");
        assert!(std::fs::read(case.output()).unwrap() == file(1), "{what}");
        return;
    }
    // The next run does no better.
    let error = case.fails(&server).await;
    assert!(server.requests().len() < 60, "{what}: {error}");
    let litter = names(case.folder.path());
    let keeps = matches!(error, ClientError::Unreachable { .. });
    assert!(litter.is_empty() || keeps, "{what}: {litter:?}, {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_busy_or_silent_for_a_while_is_waited_for() {
    let server = Hostile::start(|request| match request.number {
        0 => Answer::status(503).with("Retry-After", "0"),
        1 => Answer::honest(request, &file(1)).that_is(Body::Silent),
        2 => Answer::honest(request, &file(1)).that_is(Body::Stalls(40_000)),
        3 => Answer::status(429),
        _ => Answer::honest(request, &file(1)),
    });
    let mut case = Case::new();
    case.fetch.patience = Duration::from_secs(30);
    case.gets(&server.await, &file(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_are_followed_and_the_digest_comes_from_where_they_began() {
    let store = Hostile::start(|request| {
        let answer = Answer::honest(request, &file(1)).without("Repr-Digest");
        match request.number {
            0 => answer.cut_after(80_000),
            _ => answer,
        }
    });
    let store = store.await;
    let to = store.url();
    let answer = Answer::whole(&file(1)).that_is(Body::Head);
    let digest = answer.field("Repr-Digest");
    let server = Hostile::start(move |_| {
        let answer = Answer::status(307).with("Location", &to);
        answer.with("Repr-Digest", &digest)
    });
    Case::new().gets(&server.await, &file(1)).await;
    // Or from where one asks for the head alone.
    let to = store.url();
    let server = Hostile::start(move |request| {
        if request.method == "HEAD" {
            return Answer::honest(request, &file(1)).that_is(Body::Head);
        }
        Answer::status(307).with("Location", &to)
    });
    Case::new().gets(&server.await, &file(1)).await;
    for request in store.requests() {
        assert!(
            !request.head.to_lowercase().contains("referer"),
            "{}",
            request.head
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_expired_is_continued_with_a_fresh_one() {
    let server = Hostile::start(|request| match request.number {
        0 => Answer::honest(request, &file(1)).cut_after(80_000),
        _ => Answer::problem(403, "link-expired", "The link has expired."),
    });
    let case = Case::new();
    let error = case.fails(&server.await).await;
    let ClientError::Refused(refusal) = &error else {
        panic!("{error}");
    };
    assert_eq!(refusal.problem.as_deref(), Some("link-expired"));
    assert_eq!(error.to_string(), "the server says: The link has expired.");
    let server = Hostile::start(|request| Answer::honest(request, &file(1))).await;
    let fetched = case.gets(&server, &file(1)).await;
    assert!(fetched.resumed > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_file_than_the_expected_one_is_not_taken() {
    let server = Hostile::start(|request| Answer::honest(request, &file(2))).await;
    let mut case = Case::new();
    let sha256 = Sha256::digest(file(1)).into();
    case.fetch.expected = Some(Expected {
        sha256,
        bytes: None,
    });
    let error = case.fails(&server).await;
    assert!(matches!(error, ClientError::Strange(_)), "{error}");
    // A digest that one has makes up for one that the server does not say.
    let server = Hostile::start(|request| Answer::honest(request, &file(1)).without("Repr-Digest"));
    case.gets(&server.await, &file(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_is_told_with_numbers_that_grow() {
    let server = Hostile::start(breaks(2, 70_000)).await;
    let case = Case::new();
    let told = Mutex::new((Vec::new(), 0, 0));
    let observe = |event: FetchEvent<'_>| {
        let mut told = told.lock().unwrap();
        match event {
            FetchEvent::There { bytes, of } => {
                assert_eq!(of, file(1).len() as u64);
                told.0.push(bytes);
            }
            FetchEvent::Waiting(_) => told.1 += 1,
            FetchEvent::Anew(why) => panic!("{why}"),
            FetchEvent::Verifying => told.2 += 1,
        }
    };
    let link = Link::of_url(&server.url()).unwrap();
    let fetched = case.fetch.into_file(link, &case.output(), &observe).await;
    fetched.unwrap();
    let (bytes, waits, verified) = told.into_inner().unwrap();
    assert!(bytes.is_sorted());
    assert_eq!(bytes.last(), Some(&(file(1).len() as u64)));
    assert_eq!((waits, verified), (1, 1));
}
