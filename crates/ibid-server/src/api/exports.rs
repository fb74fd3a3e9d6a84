//! The routes under `/exports`.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, RawQuery, State as Shared};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::{LOCATION, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::export::{Problem as ExportProblem, Revocation, State, Waiting};
use ibid::ids::JobId;
use ibid::json::Json as StrictJson;
use ibid::key::IdempotencyKey;
use ibid::ledger::{Created, Cursor, Downloads, Found, Role};
use ibid::link::percent_decode;
use ibid::scope::{Format, Request as ExportRequest, Scope};
use ibid::time::Time;
use serde::Serialize;
use utoipa::ToSchema;

use super::App;
use super::auth::caller;
use super::body::{Taken, read_body};
use super::openapi::schemas;
use super::problem::Problem;

const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// `POST /exports`. The checks stand in the order that is promised to clients.
pub async fn create(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let user = caller(&app, &headers, Role::User).await?;
    let body = read_body(&headers, body, &Taken::JSON).await?;
    let key = idempotency_key(&headers)?;
    let request = export_request(&body)?;
    let created = app.exporter.request(user, key, request).await?;
    let (export, replayed) = match created {
        Created::New(export) => (export, false),
        Created::Replayed(export) => (export, true),
    };
    let now = app.exporter.ledger.now().await?;
    let mut response = Json(Asked {
        job_id: export.job_id,
        state: export.state_at(now),
        replayed,
    })
    .into_response();
    let location = app.url(&format!("/exports/{}", export.job_id));
    if let Ok(location) = HeaderValue::from_str(&location) {
        response.headers_mut().insert(LOCATION, location);
    }
    if replayed {
        let replayed = HeaderValue::from_static("true");
        response.headers_mut().insert(IDEMPOTENT_REPLAYED, replayed);
    } else {
        *response.status_mut() = StatusCode::ACCEPTED;
    }
    Ok(response)
}

/// What asking for an export came to.
#[derive(Serialize, ToSchema)]
pub(super) struct Asked {
    #[schema(value_type = schemas::JobId)]
    job_id: JobId,
    #[schema(value_type = schemas::State)]
    state: State,
    /// Whether an earlier request with this key had made the job already.
    replayed: bool,
}

fn idempotency_key(headers: &HeaderMap) -> Result<IdempotencyKey, Problem> {
    let mut values = headers.get_all("idempotency-key").iter();
    match (values.next(), values.next()) {
        (None, _) => Err(Problem::key_missing()),
        (Some(_), Some(_)) => Err(Problem::key_invalid("there is more than one header line")),
        (Some(value), None) => {
            IdempotencyKey::parse(value.as_bytes()).map_err(Problem::key_invalid)
        }
    }
}

/// Reads `{"scope", "format"}`. Other members are refused, so that a typing error never
/// silently exports something else.
fn export_request(body: &[u8]) -> Result<ExportRequest, Problem> {
    let (mut scope, mut format) = (None, None);
    for (name, value) in json_object(body)? {
        let slot = match name.as_str() {
            "scope" => &mut scope,
            "format" => &mut format,
            _ => return Err(unknown_member(&name, "scope and format")),
        };
        *slot = Some(member_text(&name, value)?);
    }
    let scope = scope.ok_or_else(|| {
        Problem::request_invalid("The member \"scope\" is missing; send \"all\" or \"conv:<id>\".")
    })?;
    let scope = Scope::parse(&scope).map_err(|reason| {
        Problem::scope_invalid(format!(
            "The scope cannot be used: {reason}; send \"all\" or \"conv:<id>\"."
        ))
    })?;
    let format = match format {
        None => Format::default(),
        Some(format) => Format::parse(&format).ok_or_else(|| {
            Problem::request_invalid("The format is not one that is made here; send \"jsonl.gz\".")
        })?,
    };
    Ok(ExportRequest { scope, format })
}

/// The members of a body that is one JSON object.
pub(super) fn json_object(body: &[u8]) -> Result<Vec<(String, StrictJson)>, Problem> {
    match StrictJson::parse(body) {
        Ok(StrictJson::Object(members)) => Ok(members),
        Ok(other) => Err(Problem::request_invalid(format!(
            "The body must be a JSON object, not {}.",
            other.kind()
        ))),
        Err(reason) => Err(Problem::request_invalid(format!(
            "The body cannot be read: {reason}; send one JSON object."
        ))),
    }
}

pub(super) fn member_text(name: &str, value: StrictJson) -> Result<String, Problem> {
    match value {
        StrictJson::Text(text) => Ok(text),
        other => Err(Problem::request_invalid(format!(
            "The member {name:?} must be a string, not {}.",
            other.kind()
        ))),
    }
}

pub(super) fn unknown_member(name: &str, known: &str) -> Problem {
    let shown: String = name.chars().take(64).collect();
    Problem::request_invalid(format!(
        "The member {shown:?} is not known here; known are {known}."
    ))
}

/// `GET /exports/{id}`.
pub async fn status(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<Response, Problem> {
    let user = caller(&app, &headers, Role::User).await?;
    let job = job_id(id)?;
    let found = app.exporter.find(&user, job).await?;
    let found = found.ok_or_else(Problem::no_such_export)?;
    let now = app.exporter.ledger.now().await?;
    let document = Document::new(&app, &found, now);
    let is_final = document.state.is_final();
    let mut response = Json(document).into_response();
    if !is_final {
        let seconds = HeaderValue::from(app.poll.as_secs().max(1));
        response.headers_mut().insert(RETRY_AFTER, seconds);
    }
    Ok(response)
}

/// `DELETE /exports/{id}`: the owner withdraws the export, in any state and as often as it pleases.
pub async fn withdraw(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    id: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<Response, Problem> {
    let user = caller(&app, &headers, Role::User).await?;
    let withdrawn = app.exporter.withdraw(&user, job_id(id)?).await?;
    withdrawn.ok_or_else(Problem::no_such_export)?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// The job that a path names; one that cannot be an id is one that does not exist.
pub(super) fn job_id(
    id: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<JobId, Problem> {
    id.ok()
        .and_then(|Path(id)| JobId::parse(&id))
        .ok_or_else(Problem::no_such_export)
}

const DEFAULT_LIMIT: u32 = 50;
const MAX_LIMIT: u32 = 200;

/// `GET /exports?limit=&cursor=`.
pub async fn list(
    Shared(app): Shared<Arc<App>>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let user = caller(&app, &headers, Role::User).await?;
    let (limit, before) = page_of(query.as_deref().unwrap_or(""))?;
    // One more than asked for tells whether there is a next page.
    let mut list = app.exporter.list(&user, before, limit + 1).await?;
    let more = list.len() > limit as usize;
    list.truncate(limit as usize);
    let next = list.last().filter(|_| more).map(|found| {
        let export = &found.export;
        let cursor = format!("{}.{}", export.created_at.micros(), export.job_id);
        URL_SAFE_NO_PAD.encode(cursor)
    });
    let now = app.exporter.ledger.now().await?;
    let exports = list.iter().map(|found| Document::new(&app, found, now));
    let exports = exports.collect();
    Ok(Json(Page { exports, next }).into_response())
}

/// Some of the caller's exports, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct Page {
    exports: Vec<Document>,
    /// The cursor of the next page; null on the last one.
    #[schema(required)]
    next: Option<String>,
}

fn page_of(query: &str) -> Result<(u32, Option<Cursor>), Problem> {
    let (mut limit, mut before) = (None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let slot = match name {
            "limit" => &mut limit,
            "cursor" => &mut before,
            _ => {
                return Err(Problem::request_invalid(
                    "Only the parameters limit and cursor are known here.",
                ));
            }
        };
        let value = percent_decode(value)
            .ok_or_else(|| Problem::request_invalid("A parameter is not percent-encoded UTF-8."))?;
        if slot.replace(value).is_some() {
            return Err(Problem::request_invalid(
                "The parameters limit and cursor may stand once each.",
            ));
        }
    }
    let given = |value: Option<String>| value.filter(|value| !value.is_empty());
    let limit = match given(limit) {
        None => DEFAULT_LIMIT,
        Some(limit) => limit
            .parse()
            .ok()
            .filter(|limit| (1..=MAX_LIMIT).contains(limit))
            .ok_or_else(|| Problem::request_invalid("The limit must be a number from 1 to 200."))?,
    };
    let before = match given(before) {
        None => None,
        Some(text) => Some(cursor(&text).ok_or_else(|| {
            Problem::request_invalid(
                "The cursor must be the \"next\" of an earlier answer, unchanged.",
            )
        })?),
    };
    Ok((limit, before))
}

fn cursor(text: &str) -> Option<Cursor> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
    let (created_at, job_id) = text.split_once('.')?;
    Some(Cursor {
        created_at: Time::from_micros(created_at.parse().ok()?),
        job_id: JobId::parse(job_id)?,
    })
}

/// An export as its owner sees it.
#[derive(Serialize, ToSchema)]
#[schema(as = Export)]
pub(super) struct Document {
    #[schema(value_type = schemas::JobId)]
    job_id: JobId,
    #[schema(value_type = schemas::State)]
    pub(super) state: State,
    #[schema(value_type = schemas::Scope)]
    scope: String,
    #[schema(value_type = schemas::Format)]
    format: Format,
    /// Which version of the format the file has.
    format_version: u32,
    /// When the export was asked for, which is the moment that it shows.
    #[schema(value_type = schemas::Time)]
    created_at: Time,
    /// When a worker first took it; null before.
    #[schema(value_type = Option<schemas::Time>, required)]
    started_at: Option<Time>,
    /// When it was done or failed; null before.
    #[schema(value_type = Option<schemas::Time>, required)]
    finished_at: Option<Time>,
    /// Until when its file is kept; null as long as there is none.
    #[schema(value_type = Option<schemas::Time>, required)]
    expires_at: Option<Time>,
    /// How often a worker took it.
    attempts: u32,
    progress: Progress,
    // What the schema has of it is put in where the schemas are put together: utoipa would
    // demand its members in every state.
    #[serde(flatten)]
    #[schema(ignore)]
    done: Option<Done>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schemas::Failure>, nullable = false)]
    error: Option<ExportProblem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schemas::Waiting>, nullable = false)]
    waiting: Option<Waiting>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schemas::Revocation>, nullable = false)]
    revoked: Option<Revocation>,
}

/// How far the work on an export is.
#[derive(Serialize, ToSchema)]
pub(super) struct Progress {
    /// How many parts of the file are made.
    parts_done: u64,
    /// How many parts there will be; null until that is known.
    #[schema(required)]
    parts_total: Option<u64>,
    /// How many messages are in the parts that are made.
    messages_done: u64,
    /// How many messages the file will hold.
    messages_total: u64,
}

/// What is known of an export that is done.
#[derive(Serialize, ToSchema)]
pub(super) struct Done {
    #[schema(value_type = schemas::Sha256)]
    sha256: String,
    /// The length of the file in bytes.
    bytes: u64,
    /// How many messages the file holds.
    messages: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    download: Option<Link>,
    #[schema(value_type = schemas::Downloads)]
    downloads: Downloads,
}

/// A link to the file, made afresh for every answer and good for a short time.
#[derive(Serialize, ToSchema)]
pub(super) struct Link {
    /// An address on this server: absolute where the server knows how the world reaches it, else
    /// a path.
    #[schema(value_type = String, format = "uri-reference")]
    url: String,
    /// When a download by this link can no longer begin.
    #[schema(value_type = schemas::Time)]
    expires_at: Time,
}

impl Document {
    /// The document for the job's owner, with a fresh link if there is something to fetch.
    pub(super) fn new(app: &App, found: &Found, now: Time) -> Document {
        let ring = app.keys.ring();
        let (query, expires_at) = app.exporter.link(&ring, &found.export, now);
        let path = format!("/download/{}?{query}", found.export.job_id);
        let link = Link {
            url: app.url(&path),
            expires_at,
        };
        Document::with_link(found, now, Some(link))
    }

    /// The document for anybody else, who must never have a link.
    pub(super) fn without_link(found: &Found, now: Time) -> Document {
        Document::with_link(found, now, None)
    }

    /// What is the same as long as nothing has happened to the job.
    pub(super) fn for_version(found: &Found, now: Time) -> Document {
        let mut document = Document::without_link(found, now);
        if let Some(done) = &mut document.done {
            done.downloads = Downloads::default();
        }
        document
    }

    fn with_link(found: &Found, now: Time, link: Option<Link>) -> Document {
        let export = &found.export;
        let state = export.state_at(now);
        let artefact = export.artefact.as_ref().filter(|_| state == State::Done);
        Document {
            job_id: export.job_id,
            state,
            scope: export.scope.to_string(),
            format: export.recipe.format,
            format_version: export.recipe.format_version,
            created_at: export.created_at,
            started_at: export.started_at,
            finished_at: export.finished_at,
            expires_at: export.expires_at,
            attempts: export.attempts,
            progress: Progress {
                parts_done: found.parts_done,
                parts_total: export.artefact.as_ref().map(|artefact| artefact.parts),
                messages_done: found.messages_done,
                messages_total: export.messages_total,
            },
            done: artefact.map(|artefact| Done {
                sha256: hex::encode(artefact.sha256),
                bytes: artefact.bytes,
                messages: artefact.messages,
                download: link,
                downloads: found.downloads,
            }),
            error: export.problem.clone().filter(|_| state == State::Failed),
            // A finished one waits for its file to be put right.
            waiting: export
                .waiting
                .clone()
                .filter(|_| !state.is_final() || state == State::Done),
            revoked: export.revocation.clone(),
        }
    }
}
