//! What the service says of itself.

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRef, State};
use axum::response::{IntoResponse as _, Response};
use http::header::{CONTENT_TYPE, VARY};
use ibid::exporter::Exporter;
use serde_json::json;

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
    let about = Json(json!({
        "name": "ibid",
        "version": env!("CARGO_PKG_VERSION"),
        "idempotency_key": {
            "required": true,
            "max_characters": ibid::key::MAX_KEY_CHARS,
            "scope": "user",
            "kept_days": app.record.as_secs() / 86_400,
        },
        "link_seconds": app.exporter.terms().link_life.as_secs(),
    }));
    ([(VARY, "Accept")], about).into_response()
}

/// `GET /healthz`: the process answers.
pub async fn healthz() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

/// `GET /readyz`: its database and its store answer too.
pub async fn readyz(State(watched): State<Watched>) -> Result<Response, Problem> {
    match watched.exporter.ready().await {
        Ok(()) => Ok(Json(json!({"status": "ready"})).into_response()),
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
