//! The routes under `/admin`. They answer 200 with the resource as it is then.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State as Shared};
use axum::response::{IntoResponse as _, Response};
use http::HeaderMap;
use ibid::ids::{JobId, UserId};
use ibid::json::Json as StrictJson;
use ibid::ledger::{LedgerError, Role};
use serde::Serialize;
use utoipa::ToSchema;

use super::App;
use super::auth::caller;
use super::body::{Taken, read_body};
use super::exports::{Document, job_id, json_object, member_text, unknown_member};
use super::openapi::schemas;
use super::problem::Problem;

/// The longest reason for a revocation, in characters.
pub(super) const MAX_REASON_CHARS: usize = 1000;

/// `POST /admin/exports/{id}/revoke {"reason"}`.
pub async fn revoke(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
    body: Body,
) -> Result<Response, Problem> {
    caller(&app, &headers, Role::Admin).await?;
    let body = read_body(&headers, body, &Taken::JSON).await?;
    let mut reason = None;
    for (name, value) in json_object(&body)? {
        match name.as_str() {
            "reason" => reason = Some(member_text(&name, value)?),
            _ => return Err(unknown_member(&name, "reason")),
        }
    }
    let reason = reason
        .filter(|reason| !reason.trim().is_empty() && reason.chars().count() <= MAX_REASON_CHARS)
        .ok_or_else(|| {
            Problem::request_invalid(
                "Send a \"reason\" of 1 to 1000 characters; the owner sees it.",
            )
        })?;
    let job = job_id(id).map_err(|_| no_such_export())?;
    app.exporter
        .revoke(job, reason)
        .await
        .map_err(admin_error)?;
    resource(&app, job).await
}

/// `POST /admin/exports/{id}/restore`.
pub async fn restore(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, Problem> {
    caller(&app, &headers, Role::Admin).await?;
    let job = job_id(id).map_err(|_| no_such_export())?;
    match app.exporter.restore(job).await {
        Ok(_) => resource(&app, job).await,
        Err(LedgerError::Refused(_)) => Err(Problem::not_restorable()),
        Err(error) => Err(admin_error(error)),
    }
}

/// `POST /admin/exports/{id}/retry`, of a failed one.
pub async fn retry(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, Problem> {
    caller(&app, &headers, Role::Admin).await?;
    let job = job_id(id).map_err(|_| no_such_export())?;
    app.exporter.retry(job).await.map_err(admin_error)?;
    resource(&app, job).await
}

/// `PUT /admin/accounts/{user} {"enabled"}`.
pub async fn set_account(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    user: Result<Path<String>, PathRejection>,
    body: Body,
) -> Result<Response, Problem> {
    caller(&app, &headers, Role::Admin).await?;
    let body = read_body(&headers, body, &Taken::JSON).await?;
    let mut enabled = None;
    for (name, value) in json_object(&body)? {
        match (name.as_str(), value) {
            ("enabled", StrictJson::Bool(value)) => enabled = Some(value),
            ("enabled", _) => {
                return Err(Problem::request_invalid(
                    "The member \"enabled\" must be true or false.",
                ));
            }
            _ => return Err(unknown_member(&name, "enabled")),
        }
    }
    let enabled = enabled.ok_or_else(|| {
        Problem::request_invalid("The member \"enabled\" is missing; send true or false.")
    })?;
    let user = user
        .ok()
        .and_then(|Path(user)| UserId::parse(user).ok())
        .ok_or_else(|| {
            Problem::request_invalid(
                "A user's id is 1 to 200 bytes of UTF-8 without control characters.",
            )
        })?;
    app.exporter.source.set_account(&user, enabled).await?;
    Ok(Json(Account { user, enabled }).into_response())
}

/// An account as it is now.
#[derive(Serialize, ToSchema)]
pub(super) struct Account {
    #[schema(value_type = schemas::UserId)]
    user: UserId,
    enabled: bool,
}

/// The job as an admin sees it: whose it is, and never a link to its bytes.
async fn resource(app: &App, job: JobId) -> Result<Response, Problem> {
    let found = app.exporter.ledger.find(job).await?;
    let found = found.ok_or_else(no_such_export)?;
    let now = app.exporter.ledger.now().await?;
    Ok(Json(Owned {
        document: Document::without_link(&found, now),
        user: found.export.user,
    })
    .into_response())
}

/// An export with its owner.
#[derive(Serialize, ToSchema)]
#[schema(as = OwnedExport)]
pub(super) struct Owned {
    #[serde(flatten)]
    document: Document,
    #[schema(value_type = schemas::UserId)]
    user: UserId,
}

fn admin_error(error: LedgerError) -> Problem {
    match error {
        LedgerError::NotFound => no_such_export(),
        other => other.into(),
    }
}

fn no_such_export() -> Problem {
    Problem::not_found("There is no export with this id.")
}
