//! `GET /exports/{id}/events`: how a job gets on, as server-sent events (WHATWG HTML, section
//! 9.2).

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State as Shared};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse as _, Response, Sse};
use futures::stream;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::ids::JobId;
use ibid::ledger::{Found, Role};
use ibid::time::Time;
use sha2::{Digest as _, Sha256};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::App;
use super::auth::caller;
use super::exports::{Document, job_id};
use super::problem::Problem;

/// The most streams of this process; whoever comes then asks for the status now and then.
pub const STREAMS: usize = 1000;

/// When a stream ends by itself: the client comes back with the version that it has, and is
/// authorised as everybody who comes.
const LIFE: Duration = Duration::from_secs(900);

/// How often something is sent where nothing happens, so that nobody on the way takes the
/// connection for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// When a client whose stream broke should come back.
const COME_BACK: Duration = Duration::from_secs(2);

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// What nginx reads: an answer that is sent bit by bit must not wait in its buffers.
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Sends the document of the job whenever it has changed, `id` its version, until its state is
/// final. One that is final already, and known to the client by `Last-Event-ID`, is a 204, at
/// which an `EventSource` stops asking.
pub async fn events(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, Problem> {
    let user = caller(&app, &headers, Role::User).await?;
    let job = job_id(id)?;
    let found = app.exporter.find(&user, job).await?;
    let found = found.ok_or_else(Problem::no_such_export)?;
    let now = app.exporter.ledger.now().await?;
    let sent = headers.get(LAST_EVENT_ID);
    let sent = sent.and_then(|id| id.to_str().ok()).map(str::to_owned);
    if found.export.state_at(now).is_final() && sent == Some(version(&found, now)) {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let place = Arc::clone(&app.streams).try_acquire_owned();
    let place = place.map_err(|_| {
        Problem::unavailable("Too many clients wait for events; ask for the status instead.")
    })?;
    let watch = Watch {
        app,
        headers,
        job,
        sent,
        end: Instant::now() + LIFE,
        ended: false,
        _place: place,
    };
    let mut first = true;
    let events = stream::unfold(watch, async |mut watch| {
        let event = watch.next().await?;
        Some((event, watch))
    });
    let events = futures::StreamExt::map(events, move |event| {
        let event = if std::mem::take(&mut first) {
            event.retry(COME_BACK)
        } else {
            event
        };
        Ok::<Event, Infallible>(event)
    });
    let mut response = Sse::new(events)
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response();
    let no = HeaderValue::from_static("no");
    let headers = response.headers_mut();
    headers.insert(X_ACCEL_BUFFERING, no);
    // Less is said by the library that writes the events.
    headers.remove(http::header::CACHE_CONTROL);
    Ok(response)
}

/// One stream.
struct Watch {
    app: Arc<App>,
    /// By which its client is authorised, at every look.
    headers: HeaderMap,
    job: JobId,
    /// The version that the client has.
    sent: Option<String>,
    end: Instant,
    ended: bool,
    _place: OwnedSemaphorePermit,
}

impl Watch {
    /// The next document that the client does not have; `None` at the end.
    async fn next(&mut self) -> Option<Event> {
        while !self.ended && Instant::now() < self.end {
            match self.look().await {
                Ok(Some(event)) => return Some(event),
                Ok(None) => {}
                // Whoever has no right any more hears nothing more. A database that is away for
                // a moment is no reason to send everybody to it again at once.
                Err(problem) if problem.is_passing() => {}
                Err(_) => return None,
            }
            tokio::select! {
                () = tokio::time::sleep(self.app.poll) => {}
                () = self.app.stopping.cancelled() => return None,
            }
        }
        None
    }

    async fn look(&mut self) -> Result<Option<Event>, Problem> {
        let user = caller(&self.app, &self.headers, Role::User).await?;
        let found = self.app.exporter.find(&user, self.job).await?;
        let found = found.ok_or_else(Problem::no_such_export)?;
        let now = self.app.exporter.ledger.now().await?;
        self.ended = found.export.state_at(now).is_final();
        let version = version(&found, now);
        if self.sent.as_ref() == Some(&version) {
            return Ok(None);
        }
        let document = Document::new(&self.app, &found, now);
        let event = Event::default().event("export").id(&version);
        // Strings and numbers can always be written.
        let event = event.json_data(document).unwrap_or_default();
        self.sent = Some(version);
        Ok(Some(event))
    }
}

/// What changes whenever the document does. The link in it, which is always a fresh one, and the
/// count of downloads do not matter.
fn version(found: &Found, now: Time) -> String {
    let document = serde_json::to_vec(&Document::for_version(found, now));
    let mut digest = hex::encode(Sha256::digest(document.unwrap_or_default()));
    digest.truncate(16);
    digest
}
