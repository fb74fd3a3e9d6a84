//! Bodies, as they pass the edge: those of requests within the time for them, those of answers
//! in small pieces.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::Patience;
use super::streams::Flow;
use super::wire::{InHand, Talk};

/// A body of which no byte came in the time for it.
#[derive(Debug, thiserror::Error)]
#[error("the body did not come in time")]
pub struct BodyTimeout;

/// Whether it is why `error` is.
pub fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<BodyTimeout>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// What a client sends.
pub struct RequestBody {
    body: Incoming,
    talk: Arc<Talk>,
    patience: Patience,
    /// Since somebody waits for it.
    begun: Option<Instant>,
    came_bytes: u64,
    late: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    pub fn new(body: Incoming, talk: Arc<Talk>, patience: Patience) -> RequestBody {
        RequestBody {
            body,
            talk,
            patience,
            begun: None,
            came_bytes: 0,
            late: None,
        }
    }

    /// When the next bytes must have come.
    fn deadline(&mut self) -> Instant {
        let Patience {
            body,
            body_gap,
            body_bytes_per_second,
            ..
        } = self.patience;
        let earned_s = self.came_bytes / u64::from(body_bytes_per_second.max(1));
        let now = Instant::now();
        let begun = *self.begun.get_or_insert(now);
        (begun + body + Duration::from_secs(earned_s)).min(now + body_gap)
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.late = None;
            let frame = frame.transpose()?;
            let bytes = frame
                .as_ref()
                .and_then(Frame::data_ref)
                .map_or(0, Bytes::len);
            this.came_bytes += bytes as u64;
            if frame.is_none() || this.body.is_end_stream() {
                this.talk.was_read();
            }
            return Poll::Ready(frame.map(Ok));
        }
        let deadline = this.deadline();
        let late = this
            .late
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        ready!(late.as_mut().poll(cx));
        Poll::Ready(Some(Err(BodyTimeout.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What is sent at a time. hyper copies each piece behind what it has not yet written, and on
/// HTTP/2 keeps it until the client has opened the window for it: a piece is what the client must
/// take in the time for it.
const PIECE_BYTES: usize = 64 * 1024;
const FRAME_BYTES: usize = 16 * 1024;

/// What a client is sent. The request is in hand until this ends.
pub struct AnswerBody {
    body: Body,
    in_hand: InHand,
    flow: Option<Arc<Flow>>,
    piece_bytes: usize,
    /// What has not been given of the last piece of the body.
    rest: Bytes,
}

impl AnswerBody {
    /// `in_frames` on HTTP/2.
    pub fn new(body: Body, in_hand: InHand, in_frames: bool) -> AnswerBody {
        AnswerBody {
            body,
            in_hand,
            flow: Flow::of_this_task(),
            piece_bytes: if in_frames { FRAME_BYTES } else { PIECE_BYTES },
            rest: Bytes::new(),
        }
    }

    fn piece(&mut self) -> Frame<Bytes> {
        let bytes = self.rest.len().min(self.piece_bytes);
        let piece = self.rest.split_to(bytes);
        self.in_hand.sent(&piece);
        Frame::data(piece)
    }
}

impl HttpBody for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        if let Some(flow) = &this.flow {
            flow.asked();
        }
        if this.rest.is_empty() {
            let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => this.rest = data,
                Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        let piece = this.piece();
        if let Some(flow) = &this.flow {
            flow.given();
        }
        Poll::Ready(Some(Ok(piece)))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, body) = (self.rest.len() as u64, self.body.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(body.lower() + rest);
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}
