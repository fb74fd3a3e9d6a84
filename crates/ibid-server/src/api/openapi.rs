//! `GET /openapi.json`: the description of the API, as OpenAPI 3.1 has it.
//!
//! Schemas of answers are made from the types that are written (`utoipa`), problems from their
//! kinds. What cannot be made from the code is checked against it: the tests hold every answer
//! that they get against the description, and its routes against those of the router.

mod answers;
mod operations;
mod parameters;
pub(super) mod schemas;

use std::sync::Arc;

use axum::response::IntoResponse as _;
use axum::routing::{MethodRouter, get};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use serde_json::{Map, Value, json};

use super::App;

/// Where it is served.
pub const PATH: &str = "/openapi.json";

/// What the description says of the server at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// For how many days a job's record and its idempotency key are kept.
    pub record_days: u64,
    /// For how many seconds a link is good.
    pub link_seconds: u64,
    /// Whether the metrics are told here, and not on a port of their own.
    pub metrics: bool,
}

/// The route of the description.
pub fn route(app: &App, metrics: bool) -> MethodRouter<Arc<App>> {
    let text = document(&Facts {
        record_days: app.record.as_secs() / 86_400,
        link_seconds: app.exporter.terms().link_life.as_secs(),
        metrics,
    });
    let text = Bytes::from(format!("{text:#}\n"));
    get(async move || ([(CONTENT_TYPE, "application/json")], text).into_response())
}

/// The description of a server.
pub fn document(facts: &Facts) -> Value {
    let mut paths = Map::new();
    for operation in operations::all(facts) {
        let methods = paths.entry(operation.path).or_insert_with(|| json!({}));
        methods[operation.method] = operation.described;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "ibid",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "Exports of what the users of a chat-like application could see.",
            "description": about(facts),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The server that this description comes from."}],
        "tags": [
            {"name": "exports", "description": "What a user does with exports of their own."},
            {"name": "download", "description": "The file of an export, by a signed link."},
            {"name": "log", "description": "What the application reports of its conversations."},
            {"name": "admin", "description": "What an administrator may do, which is never to \
                see the files or links of others."},
            {"name": "service", "description": "What the service says of itself, without a token."},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas::all(),
            "parameters": parameters::all(),
            "headers": answers::headers(),
            "examples": answers::examples(),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token that begins with `ibid_`. It stands for one user and \
                        has one role: `user`, `writer` or `admin`.",
                },
                "signature": {
                    "type": "apiKey",
                    "in": "query",
                    "name": "sig",
                    "description": "The signature of a link. It shows that the service made the \
                        link for this export and user, and stands in for no right: every request \
                        asks again whether the user still may.",
                },
            },
        },
    })
}

fn about(facts: &Facts) -> String {
    let Facts {
        record_days,
        link_seconds,
        ..
    } = facts;
    format!(
        "An export holds exactly what its user could see at the moment it was asked for.\n\n\
         **Idempotency.** `POST /exports` needs an `Idempotency-Key` \
         (draft-ietf-httpapi-idempotency-key-header-07). Keys belong to a user, and a key lives as \
         long as the record of its job: {record_days} days from the creation. Until then the same \
         key with the same request is answered with the same job, whatever has become of it, and \
         the same key with another request is refused with 422. A request that is refused does \
         not use up its key. The 409 of the draft is never sent, because a job is created in one \
         transaction.\n\n\
         **Links.** A link to a file is good for {link_seconds} seconds and for one user and \
         export. A download that has begun goes on after that, and one that broke is resumed with \
         a fresh link, since the ETag stays the same.\n\n\
         **Problems.** Errors are `application/problem+json` (RFC 9457). Each `type` is an address \
         here that describes it. Besides what the operations list, any request may meet these: \
         404 `not-found` at an address where there is nothing, 405 `method-not-allowed` with \
         `Allow`, and, where what came is no request that could be read, 400 `malformed`, 408 \
         `request-timeout`, 414 `uri-too-long` or 431 `headers-too-large`.\n\n\
         **Ids of requests.** Every answer carries `X-Request-Id`, which the log of the server \
         has, too."
    )
}
