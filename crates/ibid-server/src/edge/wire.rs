//! What hyper reads and writes through: a connection that does not wait for ever, and whose last
//! words are ours.
//!
//! hyper answers what is no request of HTTP/1 by itself, with a status and nothing else, and ends
//! a connection without a word when a head takes too long. Here the first is replaced by a
//! problem, and the second is preceded by one. Problems of HTTP/2 frames are told by the
//! protocol's own means (GOAWAY, RST_STREAM; a status 431 without a body for too many headers)
//! and pass unchanged.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::Patience;
use super::automatic::{self, Automatic};

/// What HTTP/2 begins with (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The most that is read of what nobody will look at: twice the longest body of any route.
const LINGER_BYTES: usize = 32 * 1024 * 1024;

/// Longer writes on HTTP/2 are more than pings and window updates.
const SMALL_TALK_BYTES: usize = 64;

/// What the wire of a connection and its requests know of each other. All of it is read and
/// written by tasks that wake each other, so no order beyond that is needed.
#[derive(Default)]
pub struct Talk {
    /// Requests whose answer has not ended.
    in_hand: AtomicUsize,
    /// Requests that ever came.
    taken: AtomicU64,
    /// Counts what happens.
    moves: AtomicU64,
    /// Whether there may be more of the last request's body.
    unread: AtomicBool,
    /// The last four bytes of the last answer's body.
    tail: AtomicU32,
}

impl Talk {
    /// Takes a request, which is in hand until what this gives is dropped.
    pub fn take(self: &Arc<Self>, has_body: bool) -> InHand {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.moves.fetch_add(1, Ordering::Relaxed);
        self.in_hand.fetch_add(1, Ordering::Relaxed);
        self.unread.store(has_body, Ordering::Relaxed);
        self.tail.store(0, Ordering::Relaxed);
        InHand(Arc::clone(self))
    }

    /// The last request's body was read to its end.
    pub fn was_read(&self) {
        self.unread.store(false, Ordering::Relaxed);
    }

    /// Waits until no request was in hand and nothing happened for `limit`, or up to twice that.
    pub async fn falls_silent(&self, limit: Duration) {
        let mut seen = self.moves.load(Ordering::Relaxed);
        loop {
            tokio::time::sleep(limit).await;
            let moves = self.moves.load(Ordering::Relaxed);
            if moves == seen && !self.is_busy() {
                return;
            }
            seen = moves;
        }
    }

    fn is_busy(&self) -> bool {
        self.in_hand.load(Ordering::Relaxed) > 0
    }

    /// Whether a body that we sent ends as a head does. What follows it in the same write cannot
    /// be told from it for certain.
    fn ends_like_a_head(&self) -> bool {
        self.tail.load(Ordering::Relaxed).to_be_bytes() == *b"\r\n\r\n"
    }
}

/// A request that is being answered.
pub struct InHand(Arc<Talk>);

impl InHand {
    /// `bytes` are the next of the answer's body.
    pub fn sent(&self, bytes: &[u8]) {
        let last = &bytes[bytes.len().saturating_sub(4)..];
        let tail = &self.0.tail;
        let known = tail.load(Ordering::Relaxed);
        let shifted = last
            .iter()
            .fold(known, |known, byte| known << 8 | u32::from(*byte));
        tail.store(shifted, Ordering::Relaxed);
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.0.in_hand.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection as hyper sees it.
pub struct Wire<Io> {
    io: Io,
    talk: Arc<Talk>,
    patience: Patience,
    protocol: Protocol,
    /// The head that is coming, on HTTP/1.
    head: Option<Head>,
    /// Runs while bytes wait that the other end does not take.
    stalled: Option<Pin<Box<Sleep>>>,
    last: Option<Last>,
}

enum Protocol {
    /// As many bytes of the preface of HTTP/2 have come.
    Unknown(usize),
    Http1,
    Http2,
}

/// A request's head of which at least a byte has come.
struct Head {
    /// Requests before it.
    taken: u64,
    begun: Instant,
    /// Whether its first line is whole.
    has_line: bool,
    late: Option<Pin<Box<Sleep>>>,
}

/// The end of a connection: what is said, and how far that is.
struct Last {
    words: Vec<u8>,
    said: usize,
    stage: Stage,
}

enum Stage {
    Saying,
    Closing,
    /// Reading and dropping what still comes: closing a socket with bytes that were not read
    /// resets the connection, and the client may lose what it was told.
    Lingering {
        over: Pin<Box<Sleep>>,
        bytes: usize,
    },
    Done,
}

impl Last {
    fn saying(words: Vec<u8>) -> Last {
        let (said, stage) = (0, Stage::Saying);
        Last { words, said, stage }
    }
}

impl<Io: AsyncRead + AsyncWrite + Unpin> Wire<Io> {
    pub fn new(io: Io, talk: Arc<Talk>, patience: Patience) -> Wire<Io> {
        Wire {
            io,
            talk,
            patience,
            protocol: Protocol::Unknown(0),
            head: None,
            stalled: None,
            last: None,
        }
    }

    /// Notes what has come.
    fn hear(&mut self, bytes: &[u8]) {
        if let Protocol::Unknown(matched) = &mut self.protocol {
            let more = bytes.len().min(PREFACE.len() - *matched);
            if PREFACE[*matched..*matched + more] != bytes[..more] {
                self.protocol = Protocol::Http1;
            } else if *matched + more == PREFACE.len() {
                self.protocol = Protocol::Http2;
                self.head = None;
            } else {
                *matched += more;
            }
        }
        if matches!(self.protocol, Protocol::Http2) || bytes.is_empty() || self.talk.is_busy() {
            return;
        }
        let taken = self.talk.taken.load(Ordering::Relaxed);
        if self.head.as_ref().is_none_or(|head| head.taken != taken) {
            self.head = Some(Head {
                taken,
                begun: Instant::now(),
                has_line: false,
                late: None,
            });
        }
        if let Some(head) = &mut self.head {
            head.has_line |= bytes.contains(&b'\n');
        }
    }

    /// Whether a head has begun and not come in time.
    fn is_late(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(head) = &mut self.head else {
            return false;
        };
        if self.talk.is_busy() || head.taken != self.talk.taken.load(Ordering::Relaxed) {
            self.head = None;
            return false;
        }
        let deadline = head.begun + self.patience.head;
        let late = head
            .late
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        late.as_mut().poll(cx).is_ready()
    }

    /// What is said to a client whose head is late: nothing if there may be bytes of an earlier
    /// answer before it, or if what has come may be the rest of an earlier request's body.
    fn reproach(&self) -> Vec<u8> {
        if self.stalled.is_some() || self.talk.unread.load(Ordering::Relaxed) {
            return Vec::new();
        }
        automatic::words(Automatic::Late)
    }

    /// hyper's own answer, if `written` ends with one: where it begins, and what it says.
    fn automatic(&self, written: &[u8]) -> Option<(usize, Automatic)> {
        if matches!(self.protocol, Protocol::Http2) || self.talk.ends_like_a_head() {
            return None;
        }
        let (at, what) = automatic::at_end_of(written)?;
        let has_line = self.head.as_ref().is_none_or(|head| head.has_line);
        match what {
            // What fills the buffer before its first line has ended is an address.
            Automatic::HeadersTooLarge if !has_line => Some((at, Automatic::UriTooLong)),
            what => Some((at, what)),
        }
    }

    /// Lets `poll` wait for the other end to take bytes, but not for ever.
    fn patiently<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stalled = None;
            return poll;
        }
        let write = self.patience.write;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(write)));
        ready!(stalled.as_mut().poll(cx));
        tracing::debug!("a connection was cut whose reader took nothing");
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }

    fn count(&self, written: &Poll<io::Result<usize>>) {
        let least = match self.protocol {
            Protocol::Http2 => SMALL_TALK_BYTES,
            Protocol::Http1 | Protocol::Unknown(_) => 0,
        };
        if matches!(written, Poll::Ready(Ok(bytes)) if *bytes > least) {
            self.talk.moves.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Says the last words.
    fn poll_said(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(Last {
            words,
            said,
            stage: stage @ Stage::Saying,
        }) = &mut self.last
        {
            if *said == words.len() {
                let flushed = Pin::new(&mut self.io).poll_flush(cx);
                *stage = match &flushed {
                    Poll::Ready(Ok(())) => Stage::Closing,
                    Poll::Ready(Err(_)) => Stage::Done,
                    Poll::Pending => return self.patiently(cx, flushed),
                };
                continue;
            }
            let written = Pin::new(&mut self.io).poll_write(cx, &words[*said..]);
            match &written {
                Poll::Ready(Ok(0) | Err(_)) => *stage = Stage::Done,
                Poll::Ready(Ok(bytes)) => *said += bytes,
                Poll::Pending => {}
            }
            ready!(self.patiently(cx, written))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Says the last words, closes, and lingers as long as the client does not close, too.
    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_said(cx))?;
        loop {
            let Some(last) = &mut self.last else {
                return Poll::Ready(Ok(()));
            };
            match &mut last.stage {
                Stage::Saying | Stage::Closing => {
                    let closed = Pin::new(&mut self.io).poll_shutdown(cx);
                    let linger = self.patience.linger;
                    last.stage = match &closed {
                        Poll::Ready(Ok(())) => Stage::Lingering {
                            over: Box::pin(sleep(linger)),
                            bytes: 0,
                        },
                        Poll::Ready(Err(_)) => Stage::Done,
                        Poll::Pending => Stage::Closing,
                    };
                    ready!(self.patiently(cx, closed))?;
                }
                Stage::Lingering { over, bytes } => {
                    let mut dropped = [0; 8 * 1024];
                    let mut buffer = ReadBuf::new(&mut dropped);
                    let read = Pin::new(&mut self.io).poll_read(cx, &mut buffer);
                    let count = buffer.filled().len();
                    *bytes += count;
                    let ends = match read {
                        Poll::Ready(Ok(())) => count == 0 || *bytes > LINGER_BYTES,
                        Poll::Ready(Err(_)) => true,
                        Poll::Pending => {
                            ready!(over.as_mut().poll(cx));
                            true
                        }
                    };
                    if ends {
                        last.stage = Stage::Done;
                    }
                }
                Stage::Done => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl<Io: AsyncRead + AsyncWrite + Unpin> AsyncRead for Wire<Io> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.last.is_none() {
            let before = buffer.filled().len();
            let read = Pin::new(&mut this.io).poll_read(cx, buffer);
            if read.is_ready() {
                this.hear(&buffer.filled()[before..]);
                return read;
            }
            if !this.is_late(cx) {
                return Poll::Pending;
            }
            tracing::debug!("a request's head did not come in time");
            this.last = Some(Last::saying(this.reproach()));
        }
        // hyper takes the end of what is read for the client's.
        this.poll_over(cx)
    }
}

impl<Io: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Wire<Io> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.last.is_some() {
            return Poll::Ready(Ok(bytes.len()));
        }
        let ours = match this.automatic(bytes) {
            Some((0, what)) => {
                this.last = Some(Last::saying(automatic::words(what)));
                return Poll::Ready(Ok(bytes.len()));
            }
            Some((at, _)) => &bytes[..at],
            None => bytes,
        };
        let written = Pin::new(&mut this.io).poll_write(cx, ours);
        this.count(&written);
        this.patiently(cx, written)
    }

    /// Of HTTP/2 alone, since hyper is told to write HTTP/1 in one piece.
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write_vectored(cx, slices);
        this.count(&written);
        this.patiently(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.last.is_some() {
            return this.poll_said(cx);
        }
        let flushed = Pin::new(&mut this.io).poll_flush(cx);
        // A socket has nothing to flush, so this says nothing of whether bytes are taken.
        match flushed {
            Poll::Pending => this.patiently(cx, flushed),
            flushed => flushed,
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let is_http2 = matches!(this.protocol, Protocol::Http2);
        if this.last.is_none() && !is_http2 && this.talk.unread.load(Ordering::Relaxed) {
            this.last = Some(Last::saying(Vec::new()));
        }
        if this.last.is_some() {
            return this.poll_over(cx);
        }
        let closed = Pin::new(&mut this.io).poll_shutdown(cx);
        this.patiently(cx, closed)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const OWN: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";

    /// What arrives of `written`, after a request whose answer's body ended with `body`.
    async fn arrives(body: &[u8], written: &[u8]) -> Vec<u8> {
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let talk = Arc::<Talk>::default();
        let mut wire = Wire::new(near, Arc::clone(&talk), Patience::default());
        // In pieces, since it counts how the last ones end together.
        let in_hand = talk.take(false);
        body.chunks(3).for_each(|piece| in_hand.sent(piece));
        drop(in_hand);
        wire.write_all(written).await.unwrap();
        wire.flush().await.unwrap();
        drop(wire);
        let mut arrived = Vec::new();
        far.read_to_end(&mut arrived).await.unwrap();
        arrived
    }

    #[tokio::test]
    async fn a_body_that_ends_like_an_answer_of_hypers_own_is_not_touched() {
        let body = [b"some bytes" as &[u8], OWN].concat();
        assert_eq!(arrives(&body, &body).await, body);
        let replaced = arrives(b"some bytes", &body).await;
        assert!(replaced.starts_with(b"some bytesHTTP/1.1 400 Bad Request\r\n"));
        let told = String::from_utf8(replaced).unwrap();
        assert!(told.contains("/problems/malformed"), "{told}");
        assert!(!told.contains("content-length: 0"), "{told}");
    }
}
