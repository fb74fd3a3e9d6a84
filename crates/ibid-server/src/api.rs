//! The HTTP API: routes, who is asking, and what every answer carries.

mod admin;
mod auth;
mod body;
mod cors;
mod download;
mod events;
mod exports;
mod log;
pub mod openapi;
pub mod problem;
mod service;

pub use cors::Cors;
pub use download::Peer;
pub use service::Watched;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post, put};
use http::header::ALLOW;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};
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
    let routes = metrics
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
        .route("/download/{id}", get(download::download))
        .route("/admin/exports/{id}/revoke", post(admin::revoke))
        .route("/admin/exports/{id}/restore", post(admin::restore))
        .route("/admin/exports/{id}/retry", post(admin::retry))
        .route("/admin/accounts/{user}", put(admin::set_account))
        .fallback(nothing_here)
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .with_state(Arc::clone(&app));
    answering(routes, &app.metrics)
}

/// What a process is watched by, on a port of its own.
pub fn watching_router(watched: Watched) -> Router {
    let metrics = Arc::clone(&watched.metrics);
    let routes = Router::new()
        .route("/healthz", get(service::healthz))
        .route("/readyz", get(service::readyz))
        .route("/metrics", get(service::metrics))
        .fallback(nothing_here)
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .with_state(watched);
    answering(routes, &metrics)
}

/// `routes`, with what every answer carries. Around them as a whole: a layer of their own sees no
/// Allow header, which is added behind it.
fn answering(routes: Router, metrics: &Arc<Metrics>) -> Router {
    let layer = middleware::from_fn_with_state(Arc::clone(metrics), every_answer);
    Router::new().fallback_service(routes).layer(layer)
}

async fn nothing_here() -> Problem {
    Problem::not_found("There is nothing at this address.")
}

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Gives the request an id, writes problems out with it, and adds what every answer of a route
/// carries, whoever made the answer.
///
/// No answer is 406: where an answer has two forms, Accept chooses, and one that names neither
/// gets JSON.
async fn every_answer(
    State(metrics): State<Arc<Metrics>>,
    request: Request,
    next: Next,
) -> Response {
    let id = match RequestId::random() {
        Ok(id) => id.to_string(),
        Err(error) => {
            tracing::error!(%error, "the system gives no random numbers");
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
    };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let is_download = path.starts_with("/download/");
    let mut response = if has_its_host(&request) {
        next.run(request).await
    } else {
        Problem::malformed("Send one Host header, as HTTP/1.1 demands.").into_response()
    };
    if response.status() == StatusCode::METHOD_NOT_ALLOWED {
        response = allow_options(response, &method);
    }
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        *response.body_mut() = problem.write(response.headers_mut(), &id).into();
    }
    let status = response.status().as_u16();
    let headers = response.headers_mut();
    if is_download {
        metrics.download(status);
        download::protect(headers);
    }
    carry(headers, &id);
    // The path holds ids only; the query, which may hold a signature, is never logged.
    tracing::debug!(%method, path, status = response.status().as_u16(), request_id = id, "answered");
    response
}

/// What every answer carries, whoever made it.
pub fn carry(headers: &mut HeaderMap, id: &str) {
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(X_REQUEST_ID, id);
    }
    headers.insert(
        http::header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers
        .entry(http::header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("private, no-store"));
}

/// Whether a request has the one Host header of RFC 9112 section 3.2. HTTP/1.0 need not have it,
/// and HTTP/2 has `:authority`.
fn has_its_host(request: &Request) -> bool {
    let mut hosts = request.headers().get_all(http::header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (_, Some(_)) => false,
        (None, _) => request.version() != Version::HTTP_11,
        (Some(_), None) => true,
    }
}

/// Every route has OPTIONS beside what it is made of: it says what else there is.
fn allow_options(mut refused: Response, method: &Method) -> Response {
    let Some(allowed) = refused.headers().get(ALLOW) else {
        return refused;
    };
    let methods = allowed.to_str().unwrap_or_default().split(',');
    let allowed: String = methods.map(|method| format!("{method}, ")).collect();
    let Ok(allowed) = HeaderValue::try_from(allowed + "OPTIONS") else {
        return refused;
    };
    if method == Method::OPTIONS {
        return (StatusCode::NO_CONTENT, [(ALLOW, allowed)]).into_response();
    }
    refused.headers_mut().insert(ALLOW, allowed);
    refused
}
