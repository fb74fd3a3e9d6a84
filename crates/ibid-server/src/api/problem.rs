//! Errors as `application/problem+json` (RFC 9457), and the one place where errors of the
//! library become answers.

pub mod kinds;
pub(super) mod page;

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::export::RevokedBy;
use ibid::exporter::DownloadError;
use ibid::ledger::{CreateError, LedgerError};
use ibid::limits::LimitReached;
use ibid::source::SourceError;
use serde::Serialize;
use utoipa::ToSchema;

use super::openapi::schemas;
pub use kinds::Kind;
pub use page::page;

/// An answer that says what went wrong and what to do.
#[derive(Clone, Debug)]
pub struct Problem {
    kind: &'static Kind,
    /// A full sentence that says what to do.
    detail: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    errors: Vec<LineError>,
}

/// What is wrong with a line of the body.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct LineError {
    /// Its number, from 1.
    #[schema(minimum = 1)]
    pub line: u64,
    /// The member at fault, unless it is the line as a whole.
    #[schema(required)]
    pub field: Option<String>,
    /// What is wrong, without the head and end of a sentence.
    pub reason: String,
}

/// When to try again if nobody can know.
const SOON: Duration = Duration::from_secs(5);

impl Problem {
    pub fn new(kind: &'static Kind, detail: impl Into<String>) -> Problem {
        Problem {
            kind,
            detail: detail.into(),
            headers: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Names the lines that are at fault.
    pub fn with_errors(mut self, errors: Vec<LineError>) -> Problem {
        self.errors = errors;
        self
    }

    /// Whether it may be otherwise soon, whatever the client does.
    pub fn is_passing(&self) -> bool {
        self.kind.status == http::StatusCode::SERVICE_UNAVAILABLE
    }

    fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Problem {
        self.headers.push((name, value));
        self
    }

    /// Says after how many seconds, rounded up, it is worth asking again.
    fn retry_after(self, span: Duration) -> Problem {
        let seconds = span.as_secs() + u64::from(span.subsec_nanos() > 0);
        self.with_header(RETRY_AFTER, HeaderValue::from(seconds.max(1)))
    }

    pub fn unauthorized(detail: &str) -> Problem {
        Problem::new(&kinds::UNAUTHORIZED, detail)
            .with_header(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
    }

    pub fn role_insufficient(needed: &str) -> Problem {
        Problem::new(
            &kinds::ROLE_INSUFFICIENT,
            format!("Use a token with the role {needed}."),
        )
    }

    pub fn account_disabled() -> Problem {
        Problem::new(
            &kinds::ACCOUNT_DISABLED,
            "This account is disabled; ask an administrator to enable it.",
        )
    }

    pub fn not_found(detail: &str) -> Problem {
        Problem::new(&kinds::NOT_FOUND, detail)
    }

    /// One answer for a job that does not exist and for one of another user.
    pub fn no_such_export() -> Problem {
        Problem::not_found("You have no export with this id; GET /exports lists those you have.")
    }

    pub fn method_not_allowed() -> Problem {
        Problem::new(
            &kinds::METHOD_NOT_ALLOWED,
            "Use one of the methods that the Allow header names.",
        )
    }

    pub fn method_not_allowed_but(allowed: &'static str) -> Problem {
        Problem::method_not_allowed().with_header(ALLOW, HeaderValue::from_static(allowed))
    }

    pub fn request_invalid(detail: impl Into<String>) -> Problem {
        Problem::new(&kinds::REQUEST_INVALID, detail)
    }

    pub fn scope_invalid(detail: impl Into<String>) -> Problem {
        Problem::new(&kinds::SCOPE_INVALID, detail)
    }

    pub fn key_missing() -> Problem {
        Problem::new(
            &kinds::IDEMPOTENCY_KEY_MISSING,
            "Send an Idempotency-Key header: a value that you make once for this export and \
             send again with every repetition of the request, such as a UUID.",
        )
    }

    pub fn key_invalid(reason: &str) -> Problem {
        Problem::new(
            &kinds::IDEMPOTENCY_KEY_INVALID,
            format!(
                "The Idempotency-Key cannot be used: {reason}. Send one key of 1 to 255 visible \
                 ASCII characters."
            ),
        )
    }

    pub fn unsupported_media_type(taken: &str) -> Problem {
        Problem::new(
            &kinds::UNSUPPORTED_MEDIA_TYPE,
            format!("Send the body as {taken}."),
        )
    }

    /// What came is no request.
    pub fn malformed(detail: &str) -> Problem {
        Problem::new(&kinds::MALFORMED, detail)
    }

    pub fn request_timeout() -> Problem {
        Problem::new(
            &kinds::REQUEST_TIMEOUT,
            "The request did not come in time; send it again, on a new connection.",
        )
    }

    pub fn too_large(limit: &str) -> Problem {
        Problem::new(
            &kinds::BODY_TOO_LARGE,
            format!("Send a body of at most {limit}."),
        )
    }

    pub fn not_restorable() -> Problem {
        Problem::new(
            &kinds::NOT_RESTORABLE,
            "Only a finished export that an admin revoked, and whose file is still there, can be \
             restored; ask the user to make a new export.",
        )
    }

    pub fn unavailable(detail: &str) -> Problem {
        Problem::new(&kinds::UNAVAILABLE, detail).retry_after(SOON)
    }

    fn internal(what: &dyn std::fmt::Display) -> Problem {
        tracing::error!(error = %what, "a request could not be answered");
        Problem::new(
            &kinds::INTERNAL,
            "This is a fault of the server; give its operator the request_id of this answer.",
        )
    }

    pub fn status(&self) -> StatusCode {
        self.kind.status
    }

    /// The problem as a body, with the request's id; `headers` are told of it.
    pub fn write(&self, headers: &mut HeaderMap, request_id: &str) -> String {
        let body = Members {
            kind: format!("/problems/{}", self.kind.name),
            title: self.kind.title,
            status: self.kind.status.as_u16(),
            detail: &self.detail,
            request_id,
            errors: &self.errors,
        };
        // Strings and a number can always be written.
        let body = serde_json::to_string(&body).unwrap_or_default();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        body
    }
}

/// What went wrong (RFC 9457), and what to do.
#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct Members<'a> {
    /// The stable name of the kind of problem, as a path on this server that describes it.
    #[serde(rename = "type")]
    #[schema(value_type = String, format = "uri-reference", pattern = "^/problems/[a-z-]+$")]
    kind: String,
    /// What this kind of problem is called.
    title: &'a str,
    /// The status of the answer.
    #[schema(minimum = 400, maximum = 599)]
    status: u16,
    /// A full sentence that says what to do.
    detail: &'a str,
    /// The id of the request, by which the log of the server knows it.
    #[schema(value_type = schemas::RequestId)]
    request_id: &'a str,
    /// The lines of the body that are at fault, where it is about lines.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    errors: &'a [LineError],
}

impl IntoResponse for Problem {
    /// The body is written at the edge, where the request's id is known.
    fn into_response(self) -> Response {
        let mut response = self.kind.status.into_response();
        for (name, value) in &self.headers {
            response.headers_mut().insert(name, value.clone());
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<LedgerError> for Problem {
    fn from(error: LedgerError) -> Problem {
        match error {
            LedgerError::NotFound => Problem::no_such_export(),
            LedgerError::Refused(state) => Problem::new(
                &kinds::STATE_CONFLICT,
                format!(
                    "This cannot be done to an export that is {}.",
                    state.as_str()
                ),
            ),
            LedgerError::Unavailable(what) => {
                tracing::error!(error = what, "the database does not answer");
                Problem::unavailable("The database does not answer; try again in a few seconds.")
            }
            LedgerError::Unusable(what) => {
                tracing::error!(error = what, "the database must not be used");
                Problem::unavailable(&sentence(&what))
            }
            LedgerError::LeaseLost
            | LedgerError::OtherDigest { .. }
            | LedgerError::Unreadable(_) => Problem::internal(&error),
        }
    }
}

impl From<SourceError> for Problem {
    fn from(error: SourceError) -> Problem {
        match error {
            SourceError::Unavailable(what) => {
                tracing::error!(error = what, "the log does not answer");
                Problem::unavailable("The database does not answer; try again in a few seconds.")
            }
            SourceError::Refused(what) => {
                tracing::error!(error = what, "the log must not be used");
                Problem::unavailable(&sentence(&what))
            }
            SourceError::Invalid { .. }
            | SourceError::LogChanged(_)
            | SourceError::ImportElsewhere => Problem::internal(&error),
        }
    }
}

impl From<CreateError> for Problem {
    fn from(error: CreateError) -> Problem {
        match error {
            CreateError::KeyReused => Problem::new(
                &kinds::IDEMPOTENCY_KEY_REUSED,
                "This Idempotency-Key has made an export with another body; repeat that request \
                 unchanged, or send this one with a new key.",
            ),
            CreateError::ScopeInvalid => Problem::scope_invalid(
                "You were never in a conversation with this id; use \"all\" or the id of a \
                 conversation you were in.",
            ),
            CreateError::Limit(limit) => too_many_exports(limit),
            CreateError::SourceLoading => Problem::new(
                &kinds::SOURCE_LOADING,
                "The first import of the log is not finished, so an export would not be whole; \
                 try again when it is.",
            )
            .retry_after(Duration::from_secs(30)),
            CreateError::Ledger(error) => error.into(),
        }
    }
}

/// An error's text, which is a sentence without its head and end, as one.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => format!("{}{}.", first.to_uppercase(), chars.as_str()),
        None => String::new(),
    }
}

fn too_many_exports(limit: LimitReached) -> Problem {
    let (detail, retry_after) = match limit {
        LimitReached::Unfinished { limit, retry_after } => (
            format!(
                "You have {limit} unfinished exports, which is the limit; it ends when one of \
                 them is finished."
            ),
            retry_after,
        ),
        LimitReached::PerDay {
            limit,
            until,
            retry_after,
        } => (
            format!(
                "You have made {limit} exports in the last 24 hours, which is the limit; it ends \
                 at {until}."
            ),
            retry_after,
        ),
    };
    Problem::new(&kinds::TOO_MANY_EXPORTS, detail).retry_after(retry_after)
}

impl From<DownloadError> for Problem {
    fn from(error: DownloadError) -> Problem {
        match error {
            DownloadError::LinkInvalid => Problem::new(
                &kinds::LINK_INVALID,
                "This is not a link that the service made for this export; get a fresh one from \
                 the export's status.",
            ),
            DownloadError::LinkExpired => Problem::new(
                &kinds::LINK_EXPIRED,
                "Get a fresh link from the export's status; a download that has begun goes on \
                 with it.",
            ),
            DownloadError::AccountDisabled => Problem::account_disabled(),
            DownloadError::Revoked(RevokedBy::Erasure) => Problem::new(
                &kinds::EXPORT_ERASED,
                "Data in this export was erased, so it can no longer be fetched; make a new \
                 export.",
            ),
            DownloadError::Revoked(RevokedBy::Owner | RevokedBy::Admin) => Problem::new(
                &kinds::EXPORT_REVOKED,
                "This export was taken back and can no longer be fetched; its status says by \
                 whom and why.",
            ),
            DownloadError::Expired => Problem::new(
                &kinds::EXPORT_EXPIRED,
                "The time for which this export was kept has passed; make a new export.",
            ),
            DownloadError::NotReady => Problem::new(
                &kinds::EXPORT_NOT_READY,
                "The export is not finished; ask for its status until its state is \"done\".",
            ),
            DownloadError::ArtefactUnavailable(what) => {
                tracing::error!(error = what, "an artefact cannot be read");
                Problem::new(
                    &kinds::ARTEFACT_UNAVAILABLE,
                    "The store of files does not give this export's file; try again, and tell \
                     the operator if it lasts.",
                )
                .retry_after(SOON)
            }
            DownloadError::Ledger(error) => error.into(),
            DownloadError::Source(error) => error.into(),
        }
    }
}
