//! Errors as `application/problem+json` (RFC 9457), and the one place where errors of the
//! library become answers.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderName, HeaderValue, StatusCode};
use ibid::export::RevokedBy;
use ibid::exporter::DownloadError;
use ibid::ledger::{CreateError, LedgerError};
use ibid::limits::LimitReached;
use ibid::source::SourceError;
use serde::Serialize;

/// An answer that says what went wrong and what to do.
#[derive(Clone, Debug)]
pub struct Problem {
    status: StatusCode,
    /// The stable name: the last part of `type`.
    name: &'static str,
    title: &'static str,
    /// A full sentence that says what to do.
    detail: String,
    headers: Vec<(HeaderName, HeaderValue)>,
}

/// When to try again if nobody can know.
const SOON: Duration = Duration::from_secs(5);

impl Problem {
    pub fn new(
        status: StatusCode,
        name: &'static str,
        title: &'static str,
        detail: impl Into<String>,
    ) -> Problem {
        Problem {
            status,
            name,
            title,
            detail: detail.into(),
            headers: Vec::new(),
        }
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
        Problem::new(
            StatusCode::UNAUTHORIZED,
            "unauthorized",
            "Who is asking is not known",
            detail,
        )
        .with_header(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
    }

    pub fn role_insufficient(needed: &str) -> Problem {
        Problem::new(
            StatusCode::FORBIDDEN,
            "role-insufficient",
            "The token's role does not allow this",
            format!("Use a token with the role {needed}."),
        )
    }

    pub fn account_disabled() -> Problem {
        Problem::new(
            StatusCode::FORBIDDEN,
            "account-disabled",
            "The account is disabled",
            "This account is disabled; ask an administrator to enable it.",
        )
    }

    pub fn not_found(detail: &str) -> Problem {
        Problem::new(StatusCode::NOT_FOUND, "not-found", "Not found", detail)
    }

    /// One answer for a job that does not exist and for one of another user.
    pub fn no_such_export() -> Problem {
        Problem::not_found("You have no export with this id; GET /exports lists those you have.")
    }

    pub fn method_not_allowed() -> Problem {
        Problem::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method-not-allowed",
            "The method is not allowed here",
            "Use one of the methods that the Allow header names.",
        )
    }

    pub fn method_not_allowed_but(allowed: &'static str) -> Problem {
        Problem::method_not_allowed().with_header(ALLOW, HeaderValue::from_static(allowed))
    }

    pub fn request_invalid(detail: impl Into<String>) -> Problem {
        Problem::new(
            StatusCode::BAD_REQUEST,
            "request-invalid",
            "The request is not valid",
            detail,
        )
    }

    pub fn scope_invalid(detail: impl Into<String>) -> Problem {
        Problem::new(
            StatusCode::BAD_REQUEST,
            "scope-invalid",
            "The scope is not valid",
            detail,
        )
    }

    pub fn key_missing() -> Problem {
        Problem::new(
            StatusCode::BAD_REQUEST,
            "idempotency-key-missing",
            "The request has no idempotency key",
            "Send an Idempotency-Key header: a value that you make once for this export and \
             send again with every repetition of the request, such as a UUID.",
        )
    }

    pub fn key_invalid(reason: &str) -> Problem {
        Problem::new(
            StatusCode::BAD_REQUEST,
            "idempotency-key-invalid",
            "The idempotency key is not valid",
            format!(
                "The Idempotency-Key cannot be used: {reason}. Send one key of 1 to 255 visible \
                 ASCII characters."
            ),
        )
    }

    pub fn unsupported_media_type() -> Problem {
        Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported-media-type",
            "The body is of a type that is not taken here",
            "Send the body as application/json.",
        )
    }

    pub fn too_large(limit: &str) -> Problem {
        Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body-too-large",
            "The body is too large",
            format!("Send a body of at most {limit}."),
        )
    }

    pub fn not_restorable() -> Problem {
        Problem::new(
            StatusCode::CONFLICT,
            "not-restorable",
            "The export cannot be restored",
            "Only a finished export that an admin revoked, and whose file is still there, can be \
             restored; ask the user to make a new export.",
        )
    }

    pub fn unavailable(detail: &str) -> Problem {
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable",
            "The service cannot answer now",
            detail,
        )
        .retry_after(SOON)
    }

    fn internal(what: &dyn std::fmt::Display) -> Problem {
        tracing::error!(error = %what, "a request could not be answered");
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "Something went wrong here",
            "This is a fault of the server; give its operator the request_id of this answer.",
        )
    }

    /// Writes the problem into `response` as its body, with the request's id.
    pub fn write(self, response: &mut Response, request_id: &str) {
        let body = Members {
            kind: format!("/problems/{}", self.name),
            title: self.title,
            status: self.status.as_u16(),
            detail: &self.detail,
            request_id,
        };
        // Strings and a number can always be written.
        let body = serde_json::to_string(&body).unwrap_or_default();
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        *response.body_mut() = Body::from(body);
    }
}

/// The members of RFC 9457 section 3.1, and the request's id.
#[derive(Serialize)]
struct Members<'a> {
    #[serde(rename = "type")]
    kind: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    request_id: &'a str,
}

impl IntoResponse for Problem {
    /// The body is written at the edge, where the request's id is known.
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
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
                StatusCode::CONFLICT,
                "state-conflict",
                "The export's state does not allow this",
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
                StatusCode::UNPROCESSABLE_ENTITY,
                "idempotency-key-reused",
                "The idempotency key was used for another request",
                "This Idempotency-Key has made an export with another body; repeat that request \
                 unchanged, or send this one with a new key.",
            ),
            CreateError::ScopeInvalid => Problem::scope_invalid(
                "You were never in a conversation with this id; use \"all\" or the id of a \
                 conversation you were in.",
            ),
            CreateError::Limit(limit) => too_many_exports(limit),
            CreateError::SourceLoading => Problem::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "source-loading",
                "The log is still being loaded",
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
    Problem::new(
        StatusCode::TOO_MANY_REQUESTS,
        "too-many-exports",
        "A limit on exports is reached",
        detail,
    )
    .retry_after(retry_after)
}

impl From<DownloadError> for Problem {
    fn from(error: DownloadError) -> Problem {
        let forbidden =
            |name, title, detail: &str| Problem::new(StatusCode::FORBIDDEN, name, title, detail);
        let gone = |name, title, detail: &str| Problem::new(StatusCode::GONE, name, title, detail);
        match error {
            DownloadError::LinkInvalid => forbidden(
                "link-invalid",
                "The link is not valid",
                "This is not a link that the service made for this export; get a fresh one from \
                 the export's status.",
            ),
            DownloadError::LinkExpired => forbidden(
                "link-expired",
                "The link has expired",
                "Get a fresh link from the export's status; a download that has begun goes on \
                 with it.",
            ),
            DownloadError::AccountDisabled => Problem::account_disabled(),
            DownloadError::Revoked(RevokedBy::Erasure) => gone(
                "export-erased",
                "The export's data was erased",
                "Data in this export was erased, so it can no longer be fetched; make a new \
                 export.",
            ),
            DownloadError::Revoked(RevokedBy::Owner | RevokedBy::Admin) => gone(
                "export-revoked",
                "The export was revoked",
                "This export was taken back and can no longer be fetched; its status says by \
                 whom and why.",
            ),
            DownloadError::Expired => gone(
                "export-expired",
                "The export has expired",
                "The time for which this export was kept has passed; make a new export.",
            ),
            DownloadError::NotReady => Problem::new(
                StatusCode::CONFLICT,
                "export-not-ready",
                "The export is not ready",
                "The export is not finished; ask for its status until its state is \"done\".",
            ),
            DownloadError::ArtefactUnavailable(what) => {
                tracing::error!(error = what, "an artefact cannot be read");
                Problem::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "artefact-unavailable",
                    "The file cannot be read now",
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
