//! What the service says of itself.

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRef, State};
use axum::response::{IntoResponse as _, Response};
use http::header::{CONTENT_TYPE, VARY};
use ibid::exporter::Exporter;
use serde::Serialize;
use utoipa::ToSchema;

use super::App;
use super::problem::Problem;
use crate::metrics::{MEDIA_TYPE, Metrics};

/// What can be watched of a process, with or without the API.
#[derive(Clone)]
pub struct Watched {
    pub exporter: Exporter,
    pub metrics: Arc<Metrics>,
}

impl FromRef<Arc<App>> for Watched {
    fn from_ref(app: &Arc<App>) -> Watched {
        Watched {
            exporter: app.exporter.clone(),
            metrics: Arc::clone(&app.metrics),
        }
    }
}

/// `GET /`: name, version and the published policies.
pub async fn about(State(app): State<Arc<App>>) -> Response {
    let about = Json(About {
        name: "ibid",
        version: env!("CARGO_PKG_VERSION"),
        description: super::openapi::PATH,
        idempotency_key: KeyPolicy {
            required: true,
            max_characters: ibid::key::MAX_KEY_CHARS,
            scope: "user",
            kept_days: app.record.as_secs() / 86_400,
        },
        link_seconds: app.exporter.terms().link_life.as_secs(),
    });
    ([(VARY, "Accept")], about).into_response()
}

/// The service and its published policies.
#[derive(Serialize, ToSchema)]
pub(super) struct About {
    name: &'static str,
    version: &'static str,
    /// Where the OpenAPI description of this service is.
    #[schema(value_type = String, format = "uri-reference")]
    description: &'static str,
    idempotency_key: KeyPolicy,
    /// For how many seconds a link to a file is good.
    link_seconds: u64,
}

/// What is promised of idempotency keys.
#[derive(Serialize, ToSchema)]
pub(super) struct KeyPolicy {
    /// Whether a request for an export must have one.
    required: bool,
    max_characters: usize,
    /// Whose keys are told apart: those of different users never meet.
    scope: &'static str,
    /// For how many days, counted from its first use, a key is remembered.
    kept_days: u64,
}

/// `GET /healthz`: the process answers.
pub async fn healthz() -> Response {
    Json(Health { status: "ok" }).into_response()
}

/// How the process is.
#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    status: &'static str,
}

/// `GET /readyz`: its database and its store answer too.
pub async fn readyz(State(watched): State<Watched>) -> Result<Response, Problem> {
    match watched.exporter.ready().await {
        Ok(()) => Ok(Json(Health { status: "ready" }).into_response()),
        Err(what) => {
            tracing::warn!(error = what, "not ready");
            Err(Problem::unavailable(
                "The database or the store of files does not answer; the log of the server says \
                 which.",
            ))
        }
    }
}

/// `GET /metrics`: the numbers of this process, and of the queue.
pub async fn metrics(State(watched): State<Watched>) -> Result<Response, Problem> {
    let ledger = &watched.exporter.ledger;
    let (queue, now) = (ledger.queue().await?, ledger.now().await?);
    let text = watched.metrics.text(&queue, now).map_err(|error| {
        tracing::error!(%error, "the metrics cannot be written");
        Problem::unavailable("The metrics cannot be written; the log of the server says why.")
    })?;
    Ok(([(CONTENT_TYPE, MEDIA_TYPE)], text).into_response())
}
