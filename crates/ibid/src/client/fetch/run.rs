//! One fetch from its first request to its file.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use reqwest::header::{ACCEPT_ENCODING, IF_RANGE, LOCATION, RANGE};
use reqwest::{Response, StatusCode, Url};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::{Fetch, FetchEvent, Fetched, Link, Observer};
use crate::client::answer::{About, Follows, read, repr_digest};
use crate::client::http::unreachable;
use crate::client::part_file::{PartFile, SAVE};
use crate::client::{ClientError, Refusal};

/// What one of several connections fetches at a time, in bytes.
const PIECE: u64 = 4 << 20;
/// How often a fetch begins with the first byte again before it is given up.
const MAX_BEGINNINGS: u32 = 4;
/// How many redirects are followed one after the other.
const MAX_REDIRECTS: u32 = 5;
/// Chunks between the connections and the disk.
const QUEUE: usize = 32;
/// The pauses between two tries: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// Why a request did not do.
enum Fault {
    /// Another try may do.
    Passing(ClientError),
    /// The server has another file now.
    Changed,
    /// Parts cannot be had from this server, and why.
    NoParts(&'static str),
    Final(ClientError),
}

/// What became of the part file.
enum Outcome {
    /// Every byte is there. `in_one` says that they are of one answer.
    Whole { in_one: bool },
    /// Some are there, and the others can be asked for.
    Begun,
    /// What is there is of no use, and why; `parts` says whether it is worth asking for parts.
    Useless { why: &'static str, parts: bool },
}

impl Fault {
    fn refused(error: ClientError) -> Fault {
        if error.is_passing() {
            Fault::Passing(error)
        } else {
            Fault::Final(error)
        }
    }

    fn outcome(self) -> Result<Outcome, ClientError> {
        match self {
            Fault::Changed => Ok(Outcome::Useless {
                why: "the server has another file now",
                parts: true,
            }),
            Fault::NoParts(why) => Ok(Outcome::Useless { why, parts: false }),
            Fault::Passing(error) | Fault::Final(error) => Err(error),
        }
    }
}

type Queue = mpsc::Sender<(u64, Bytes)>;

pub(super) struct Run<'a> {
    terms: &'a Fetch,
    link: &'a Link<'a>,
    observe: Observer<'a>,
    /// How many bytes are there, and of how many.
    there: AtomicU64,
    length: AtomicU64,
    /// Whether the server has answered at all.
    answered: AtomicBool,
}

impl<'a> Run<'a> {
    pub(super) fn new(terms: &'a Fetch, link: &'a Link<'a>, observe: Observer<'a>) -> Run<'a> {
        Run {
            terms,
            link,
            observe,
            there: AtomicU64::new(0),
            length: AtomicU64::new(0),
            answered: AtomicBool::new(false),
        }
    }

    pub(super) async fn all(&self, mut part: PartFile) -> Result<Fetched, ClientError> {
        let mut resumed = self.usable(&part).map_or(0, |(_, there)| there);
        // Parts are not asked for where the server has shown that it cannot give them.
        let mut parts = true;
        let mut beginnings = 0;
        loop {
            let outcome;
            let known = self.usable(&part).filter(|_| parts);
            (part, outcome) = match known.map(|(about, there)| (about.clone(), there)) {
                Some((about, there)) => {
                    self.there.store(there, Ordering::Relaxed);
                    self.length.store(about.length, Ordering::Relaxed);
                    self.go_on(part, &about).await?
                }
                None => self.begin(part, parts).await?,
            };
            let why = match outcome {
                Outcome::Begun => continue,
                Outcome::Useless { why, parts: may } => {
                    parts = may;
                    why
                }
                Outcome::Whole { in_one } => {
                    let (whole, fetched) = self.verify(part, resumed).await?;
                    match (fetched, whole) {
                        (Ok(fetched), whole) => {
                            blocking(move || whole.finish()).await?;
                            return Ok(fetched);
                        }
                        (Err(error), mut whole) if in_one => {
                            whole.forget();
                            return Err(error);
                        }
                        (Err(_), whole) => part = whole,
                    }
                    parts = false;
                    "what was put together is not the file"
                }
            };
            part.forget();
            resumed = 0;
            beginnings += 1;
            if beginnings == MAX_BEGINNINGS {
                return Err(ClientError::Strange(format!(
                    "the download was begun {beginnings} times without a file ({why}); try again \
                     later"
                )));
            }
            (self.observe)(FetchEvent::Anew(why));
        }
    }

    /// What an earlier run or answer has left, if it is of the file that is expected and the
    /// server can be asked for the rest of exactly that.
    fn usable<'p>(&self, part: &'p PartFile) -> Option<(&'p About, u64)> {
        part.known().filter(|(about, _)| {
            about.validator.is_some()
                && self.is_expected(about)
                && (self.terms.expected.is_some() || about.sha256.is_some())
        })
    }

    fn is_expected(&self, about: &About) -> bool {
        self.terms.expected.is_none_or(|expected| {
            expected.bytes.is_none_or(|bytes| bytes == about.length)
                && about.sha256.is_none_or(|sha256| sha256 == expected.sha256)
        })
    }

    /// Fetches from the first byte on.
    async fn begin(
        &self,
        mut part: PartFile,
        parts: bool,
    ) -> Result<(PartFile, Outcome), ClientError> {
        let in_pieces = parts && self.terms.connections > NonZeroU32::MIN;
        let asked = in_pieces.then_some(0..PIECE);
        let mut tries = Tries::new(self);
        let mut most = 0;
        loop {
            let (response, follows) = match self.ask(asked.as_ref(), None).await {
                Ok(answer) => answer,
                Err(Fault::Passing(error)) => {
                    tries.pause(error).await?;
                    continue;
                }
                Err(fault) => return Ok((part, fault.outcome()?)),
            };
            let (span, mut about) = match follows {
                Follows::Whole(about) => (0..about.length, about),
                Follows::Part(span, about) => (span, about),
            };
            if !self.is_expected(&about) {
                return Err(ClientError::Strange(format!(
                    "the server offers another file than the one that is wanted, of {} bytes",
                    about.length
                )));
            }
            if self.terms.expected.is_none() && about.sha256.is_none() {
                about.sha256 = Some(self.digest_that_head_says().await?);
            }
            let in_one = span.end == about.length;
            let goes_on = parts && about.validator.is_some();
            self.there.store(0, Ordering::Relaxed);
            self.length.store(about.length, Ordering::Relaxed);
            part = blocking(move || {
                part.begin(about)?;
                Ok(part)
            })
            .await?;
            let mut at = 0;
            let length = span.end;
            let taken;
            (part, taken) = writing(part, async |queue| {
                self.take(response, &mut at, length, queue).await
            })
            .await?;
            let error = match taken {
                Ok(()) if in_one => return Ok((part, Outcome::Whole { in_one })),
                Ok(()) => return Ok((part, Outcome::Begun)),
                Err(Fault::Passing(_)) if goes_on && at > 0 => return Ok((part, Outcome::Begun)),
                Err(Fault::Passing(error)) => error,
                Err(fault) => return Ok((part, fault.outcome()?)),
            };
            if at > most {
                most = at;
                tries.progressed();
            }
            tries.pause(error).await?;
        }
    }

    /// Fetches what is missing of the file that `about` is about.
    async fn go_on(
        &self,
        part: PartFile,
        about: &About,
    ) -> Result<(PartFile, Outcome), ClientError> {
        let connections = self.terms.connections.get() as usize;
        let piece = if connections > 1 { PIECE } else { u64::MAX };
        let pieces = cut(part.missing(), piece);
        let (part, fetched) = writing(part, async |queue| {
            futures::stream::iter(pieces)
                .map(|piece| self.span(piece, about, queue))
                .buffer_unordered(connections)
                .try_collect::<()>()
                .await
        })
        .await?;
        let outcome = match fetched {
            Ok(()) => Outcome::Whole { in_one: false },
            Err(fault) => fault.outcome()?,
        };
        Ok((part, outcome))
    }

    /// Fetches these bytes, however often the connection breaks.
    async fn span(&self, span: Range<u64>, about: &About, queue: &Queue) -> Result<(), Fault> {
        let mut at = span.start;
        let mut tries = Tries::new(self);
        while at < span.end {
            let before = at;
            let asked = at..span.end;
            let fetched = async {
                let (response, follows) = self.ask(Some(&asked), Some(about)).await?;
                match follows {
                    Follows::Whole(now) if now.agrees_with(about) => Err(Fault::NoParts(
                        "the server sends the whole where a part is asked for",
                    )),
                    Follows::Whole(_) => Err(Fault::Changed),
                    Follows::Part(_, now) if !now.agrees_with(about) => {
                        Err(Fault::NoParts("the server sends a part of another file"))
                    }
                    Follows::Part(part, _) => self.take(response, &mut at, part.end, queue).await,
                }
            };
            match fetched.await {
                Ok(()) => {}
                Err(Fault::Passing(error)) => {
                    if at > before {
                        tries.progressed();
                    }
                    tries.pause(error).await.map_err(Fault::Final)?;
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    /// Takes the body of an answer, which begins at the byte `at` and ends before `end`.
    async fn take(
        &self,
        mut response: Response,
        at: &mut u64,
        end: u64,
        queue: &Queue,
    ) -> Result<(), Fault> {
        let broken = |why: String| Fault::Passing(ClientError::Unreachable { why, undone: false });
        let silence = self.terms.silence;
        let of = self.length.load(Ordering::Relaxed);
        while *at < end {
            let chunk = match timeout(silence, response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => return Err(broken("the answer ended too early".to_owned())),
                Ok(Err(error)) => return Err(Fault::Passing(unreachable(&error))),
                Err(_) => {
                    return Err(broken(format!("nothing came for {silence:?}")));
                }
            };
            let length = chunk.len() as u64;
            if length > end - *at {
                return Err(Fault::NoParts("the server sends more than it says"));
            }
            if queue.send((*at, chunk)).await.is_err() {
                // The writer has ended, and says why when it is waited for.
                return Err(broken("the disk does not take it".to_owned()));
            }
            *at += length;
            let bytes = self.there.fetch_add(length, Ordering::Relaxed) + length;
            (self.observe)(FetchEvent::There { bytes, of });
        }
        Ok(())
    }

    /// Sends one request for the file, or for a part of the one that `about` is about, and
    /// follows redirects.
    async fn ask(
        &self,
        asked: Option<&Range<u64>>,
        about: Option<&About>,
    ) -> Result<(Response, Follows), Fault> {
        let mut link = self.link.now().await;
        let mut renewed = false;
        'renewed: loop {
            let mut url = link.clone();
            // A store that the server sends to does not know the digest; the server does.
            let mut digest = None;
            for redirects in 0..=MAX_REDIRECTS {
                let mut request = self.link.http.get(&url).header(ACCEPT_ENCODING, "identity");
                if let Some(Range { start, end }) = asked {
                    request = request.header(RANGE, format!("bytes={start}-{}", end - 1));
                }
                if let Some(validator) = about.and_then(|about| about.validator.as_ref()) {
                    request = request.header(IF_RANGE, validator);
                }
                let response = self.send(request).await?;
                let status = response.status();
                match status {
                    StatusCode::OK | StatusCode::PARTIAL_CONTENT => {
                        let is_partial = status == StatusCode::PARTIAL_CONTENT;
                        return match read(is_partial, response.headers(), asked) {
                            Ok(mut follows) => {
                                let about = follows.about_mut();
                                about.sha256 = about.sha256.or(digest);
                                Ok((response, follows))
                            }
                            Err(why) => Err(Fault::NoParts(why)),
                        };
                    }
                    StatusCode::RANGE_NOT_SATISFIABLE if asked.is_some() => {
                        return Err(Fault::NoParts("the server says that there is no such part"));
                    }
                    StatusCode::MOVED_PERMANENTLY
                    | StatusCode::FOUND
                    | StatusCode::SEE_OTHER
                    | StatusCode::TEMPORARY_REDIRECT
                    | StatusCode::PERMANENT_REDIRECT
                        if redirects < MAX_REDIRECTS =>
                    {
                        digest = digest.or(repr_digest(response.headers()));
                        url = elsewhere(&url, &response).map_err(Fault::Final)?;
                    }
                    StatusCode::FORBIDDEN if !renewed => {
                        renewed = true;
                        let refusal = Refusal::read(response).await;
                        match self.link.another(&link).await.map_err(Fault::refused)? {
                            Some(another) => link = another,
                            None => return Err(Fault::Final(ClientError::Refused(refusal))),
                        }
                        continue 'renewed;
                    }
                    _ => {
                        let refusal = Refusal::read(response).await;
                        return Err(Fault::refused(ClientError::Refused(refusal)));
                    }
                }
            }
            return Err(Fault::Final(ClientError::Strange(
                "the server sends from one place to another without end".to_owned(),
            )));
        }
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Response, Fault> {
        let silence = self.terms.silence;
        let response = match timeout(silence, request.send()).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(Fault::Passing(unreachable(&error))),
            Err(_) => {
                return Err(Fault::Passing(ClientError::Unreachable {
                    why: format!("no answer for {silence:?}"),
                    undone: false,
                }));
            }
        };
        self.answered.store(true, Ordering::Relaxed);
        Ok(response)
    }

    /// The SHA-256 that the server says in answer to a HEAD of the link itself: an object store,
    /// to which a GET may be redirected, does not know it.
    async fn digest_that_head_says(&self) -> Result<[u8; 32], ClientError> {
        let url = self.link.now().await;
        let head = self.send(self.link.http.head(&url)).await;
        let digest = match head {
            Ok(response) if response.status() == StatusCode::OK => repr_digest(response.headers()),
            Ok(_) => None,
            Err(Fault::Passing(error) | Fault::Final(error)) => return Err(error),
            Err(Fault::Changed | Fault::NoParts(_)) => None,
        };
        digest.ok_or_else(|| {
            ClientError::Strange(
                "the server does not say the file's SHA-256 (Repr-Digest), so it could not be \
                 checked; say which it must have"
                    .to_owned(),
            )
        })
    }

    /// Reads what is there, and judges it.
    async fn verify(
        &self,
        mut part: PartFile,
        resumed: u64,
    ) -> Result<(PartFile, Result<Fetched, ClientError>), ClientError> {
        (self.observe)(FetchEvent::Verifying);
        let said = part.about().and_then(|about| about.sha256);
        let bytes = part.about().map_or(0, |about| about.length);
        let (part, sha256) = blocking(move || {
            let sha256 = part.sha256()?;
            Ok((part, sha256))
        })
        .await?;
        let wanted = self.terms.expected.map(|expected| expected.sha256).or(said);
        if wanted == Some(sha256) {
            let fetched = Fetched {
                bytes,
                sha256,
                resumed,
            };
            return Ok((part, Ok(fetched)));
        }
        let wrong = format!(
            "what was downloaded is not the file: its {bytes} bytes have the SHA-256 {} instead \
             of {}; nothing of it is kept",
            hex::encode(sha256),
            wanted.map_or_else(|| "one that is known".to_owned(), hex::encode),
        );
        Ok((part, Err(ClientError::WrongBytes(wrong))))
    }
}

/// Waits between tries, longer and longer, and not for ever.
struct Tries<'a> {
    run: &'a Run<'a>,
    /// When the last byte came.
    since: Instant,
    pause: Duration,
}

impl<'a> Tries<'a> {
    fn new(run: &'a Run<'a>) -> Tries<'a> {
        Tries {
            run,
            since: Instant::now(),
            pause: PAUSES.0,
        }
    }

    fn progressed(&mut self) {
        self.since = Instant::now();
        self.pause = PAUSES.0;
    }

    async fn pause(&mut self, error: ClientError) -> Result<(), ClientError> {
        // A server that was never there is more likely a slip in its name than a fault that passes.
        let never = !self.run.answered.load(Ordering::Relaxed)
            && matches!(error, ClientError::Unreachable { undone: true, .. });
        if never || self.since.elapsed() >= self.run.terms.patience {
            return Err(error);
        }
        (self.run.observe)(FetchEvent::Waiting(&error));
        let pause = error.retry_after().unwrap_or_else(|| {
            // Many clients of a server that restarts must not come back at one moment.
            let share = f64::from(getrandom::u32().unwrap_or_default()) / f64::from(u32::MAX);
            self.pause.mul_f64(0.5 + share / 2.0)
        });
        self.pause = (self.pause * 2).min(PAUSES.1);
        sleep(pause).await;
        Ok(())
    }
}

/// Where a redirect leads; never from an encrypted connection to an open one.
fn elsewhere(from: &Url, response: &Response) -> Result<Url, ClientError> {
    let location = response.headers().get(LOCATION);
    let location = location.and_then(|location| location.to_str().ok());
    let to = location.and_then(|location| from.join(location).ok());
    let to = to
        .filter(|to| to.scheme() == "https" || (to.scheme() == "http" && from.scheme() == "http"));
    to.ok_or_else(|| {
        ClientError::Strange("the server sends to where this program does not go".to_owned())
    })
}

/// Cuts ranges into pieces of at most `length`, in order.
fn cut(ranges: Vec<Range<u64>>, length: u64) -> Vec<Range<u64>> {
    let mut pieces = Vec::new();
    for Range { mut start, end } in ranges {
        while start < end {
            let next = end.min(start.saturating_add(length));
            pieces.push(start..next);
            start = next;
        }
    }
    pieces
}

/// Writes what `fetch` puts into the queue, on a thread that may wait for the disk.
async fn writing<F>(
    mut part: PartFile,
    fetch: F,
) -> Result<(PartFile, Result<(), Fault>), ClientError>
where
    F: AsyncFnOnce(&Queue) -> Result<(), Fault>,
{
    let (queue, mut chunks) = mpsc::channel::<(u64, Bytes)>(QUEUE);
    let writer = blocking(move || {
        while let Some((offset, bytes)) = chunks.blocking_recv() {
            part.write(offset, &bytes)?;
        }
        part.save()?;
        Ok(part)
    });
    let fetching = async {
        let fetched = tokio::select! {
            fetched = fetch(&queue) => fetched,
            // So that what came before a silence is written down in it.
            never = remind(&queue) => never,
        };
        drop(queue);
        fetched
    };
    tokio::pin!(writer);
    tokio::select! {
        biased;
        fetched = fetching => Ok((writer.await?, fetched)),
        // It ends before all is fetched only if the disk does not take it: no reason to go on.
        written = &mut writer => match written {
            Err(error) => Err(error),
            Ok(part) => Ok((part, Err(Fault::NoParts("the writer ended too early")))),
        },
    }
}

/// Sends nothing again and again, and does not end.
async fn remind<T>(queue: &Queue) -> T {
    loop {
        sleep(SAVE).await;
        // A writer that has ended says why when it is waited for.
        let _ = queue.send((0, Bytes::new())).await;
    }
}

/// Does `work` on a thread that may wait for the disk.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ClientError> + Send + 'static,
) -> Result<T, ClientError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(ClientError::Strange(
                "the program ends while a file is written".to_owned(),
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_ranges() {
        assert_eq!(cut(vec![0..3, 5..10], 4), [0..3, 5..9, 9..10]);
        assert_eq!(cut(vec![2..7, 9..9], u64::MAX), vec![2..7; 1]);
    }
}
