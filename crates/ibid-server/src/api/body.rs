//! The bodies of requests, within limits.

use axum::body::Body;
use bytes::Bytes;
use http::HeaderMap;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

use super::problem::Problem;
use crate::edge::is_timeout;

/// What a route takes as its body.
pub struct Taken {
    media_type: &'static str,
    /// The most bytes.
    bytes: usize,
    /// The same for people.
    shown: &'static str,
}

impl Taken {
    /// A small JSON document.
    pub const JSON: Taken = Taken {
        media_type: "application/json",
        bytes: 16 * 1024,
        shown: "16 KiB",
    };

    /// Events, one a line.
    pub const EVENTS: Taken = Taken {
        media_type: "application/x-ndjson",
        bytes: 16 * 1024 * 1024,
        shown: "16 MiB",
    };
}

/// The body of a request.
///
/// # Errors
/// 415: it is of another type. 413: it is longer. 408: it did not come in time. 400: it ended
/// before it was whole.
pub async fn read_body(headers: &HeaderMap, body: Body, taken: &Taken) -> Result<Bytes, Problem> {
    let media_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .map(str::trim);
    if !media_type.is_some_and(|given| given.eq_ignore_ascii_case(taken.media_type)) {
        return Err(Problem::unsupported_media_type(taken.media_type));
    }
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<u64>().ok());
    if announced.is_some_and(|bytes| bytes > taken.bytes as u64) {
        return Err(Problem::too_large(taken.shown));
    }
    match Limited::new(body, taken.bytes).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Problem::too_large(taken.shown)),
        Err(error) if is_timeout(error.as_ref()) => Err(Problem::request_timeout()),
        Err(_) => Err(Problem::request_invalid(
            "The body ended before it was whole; send the request again.",
        )),
    }
}
