//! The HTTP API: routes, who is asking, and what every answer carries.

mod admin;
mod auth;
mod body;
mod download;
mod events;
mod exports;
mod log;
pub mod openapi;
pub mod problem;
mod service;

pub use download::Peer;
pub use service::Watched;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post, put};
use http::{HeaderName, HeaderValue};
use ibid::exporter::Exporter;
use ibid::ids::RequestId;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::keys::KeyStore;
use crate::metrics::Metrics;
use problem::Problem;

/// What the handlers share.
pub struct App {
    pub exporter: Exporter,
    pub keys: Arc<KeyStore>,
    /// How the world reaches this server, without a slash at its end.
    pub public_url: Option<String>,
    /// How long a job's record and its idempotency key are kept.
    pub record: Duration,
    /// How often a client should ask for the state of a job that is not final.
    pub poll: Duration,
    pub metrics: Arc<Metrics>,
    downloads: mpsc::Sender<ibid::ledger::Download>,
    /// Places for the bodies of `POST /log`.
    bodies: Semaphore,
    /// Places for streams of events.
    streams: Arc<Semaphore>,
    /// Cancelled when the process is told to stop: what would go on and on ends then.
    pub stopping: CancellationToken,
}

/// How many downloads may wait to be counted before one is left out of the count.
const DOWNLOADS_TO_COUNT: usize = 4096;

impl App {
    /// Puts the pieces together and starts counting downloads beside the requests, so that a
    /// download does not wait for a write to the ledger.
    pub fn new(
        exporter: Exporter,
        keys: Arc<KeyStore>,
        public_url: Option<String>,
        record: Duration,
        poll: Duration,
    ) -> Arc<App> {
        let (downloads, mut begun) = mpsc::channel(DOWNLOADS_TO_COUNT);
        let ledger = Arc::clone(&exporter.ledger);
        tokio::spawn(async move {
            let mut batch = Vec::new();
            while begun.recv_many(&mut batch, DOWNLOADS_TO_COUNT).await > 0 {
                if let Err(error) = ledger.note_downloads(std::mem::take(&mut batch)).await {
                    tracing::warn!(%error, "downloads could not be counted");
                }
            }
        });
        Arc::new(App {
            exporter,
            keys,
            public_url,
            record,
            poll,
            downloads,
            bodies: Semaphore::new(log::BODIES),
            streams: Arc::new(Semaphore::new(events::STREAMS)),
            stopping: CancellationToken::new(),
            metrics: Arc::default(),
        })
    }

    /// Counts a download that has begun.
    fn count_download(&self, job_id: ibid::ids::JobId, source: String) {
        let download = ibid::ledger::Download { job_id, source };
        if self.downloads.try_send(download).is_err() {
            tracing::warn!("too many downloads at once; one was not counted");
        }
    }

    /// The address of `path` on this server as the world sees it.
    fn url(&self, path: &str) -> String {
        match &self.public_url {
            Some(base) => format!("{base}{path}"),
            None => path.to_owned(),
        }
    }
}

/// All routes of the API; without the metrics where they are told on a port of their own.
pub fn router(app: Arc<App>, metrics_elsewhere: bool) -> Router {
    let metrics = match metrics_elsewhere {
        true => Router::new(),
        false => Router::new().route("/metrics", get(service::metrics)),
    };
    metrics
        .route("/", get(service::about))
        .route("/healthz", get(service::healthz))
        .route("/readyz", get(service::readyz))
        .route(openapi::PATH, openapi::route(&app, !metrics_elsewhere))
        .route("/problems/{name}", get(problem::page))
        .route("/exports", post(exports::create).get(exports::list))
        .route("/log", post(log::take))
        .route(
            "/exports/{id}",
            get(exports::status).delete(exports::withdraw),
        )
        .route("/exports/{id}/events", get(events::events))
        .route(
            "/download/{id}",
            get(download::download).options(download::options),
        )
        .route("/admin/exports/{id}/revoke", post(admin::revoke))
        .route("/admin/exports/{id}/restore", post(admin::restore))
        .route("/admin/exports/{id}/retry", post(admin::retry))
        .route("/admin/accounts/{user}", put(admin::set_account))
        .fallback(nothing_here)
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .layer(middleware::from_fn_with_state(
            Arc::clone(&app.metrics),
            every_answer,
        ))
        .with_state(app)
}

/// What a process is watched by, on a port of its own.
pub fn watching_router(watched: Watched) -> Router {
    Router::new()
        .route("/healthz", get(service::healthz))
        .route("/readyz", get(service::readyz))
        .route("/metrics", get(service::metrics))
        .fallback(nothing_here)
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .layer(middleware::from_fn_with_state(
            Arc::clone(&watched.metrics),
            every_answer,
        ))
        .with_state(watched)
}

async fn nothing_here() -> Problem {
    Problem::not_found("There is nothing at this address.")
}

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Gives the request an id, writes problems out with it, and adds what every answer of a route
/// carries, whoever made the answer.
async fn every_answer(
    State(metrics): State<Arc<Metrics>>,
    request: Request,
    next: Next,
) -> Response {
    let id = match RequestId::random() {
        Ok(id) => id.to_string(),
        Err(error) => {
            tracing::error!(%error, "the system gives no random numbers");
            return http::StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
    };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let is_download = path.starts_with("/download/");
    let mut response = next.run(request).await;
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        problem.write(&mut response, &id);
    }
    let status = response.status().as_u16();
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(X_REQUEST_ID, id);
    }
    headers.insert(
        http::header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    if is_download {
        metrics.download(status);
        download::protect(headers);
    } else {
        headers
            .entry(http::header::CACHE_CONTROL)
            .or_insert(HeaderValue::from_static("private, no-store"));
    }
    // The path holds ids only; the query, which may hold a signature, is never logged.
    tracing::debug!(%method, path, status = response.status().as_u16(), request_id = id, "answered");
    response
}
