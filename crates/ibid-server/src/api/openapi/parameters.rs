//! What requests may carry besides their bodies.

use serde_json::{Map, Value, json};

use super::schemas::object;

/// All parameters by the names that operations call them by.
pub fn all() -> Map<String, Value> {
    let job = json!({"$ref": "#/components/schemas/JobId"});
    let text = json!({"type": "string"});
    let parameters = json!({
        "job": {
            "name": "id",
            "in": "path",
            "required": true,
            "description": "The id of the export.",
            "schema": job,
        },
        "user": {
            "name": "user",
            "in": "path",
            "required": true,
            "description": "The id of the user, percent-encoded.",
            "schema": {"$ref": "#/components/schemas/UserId"},
        },
        "problem": {
            "name": "name",
            "in": "path",
            "required": true,
            "description": "The name of a kind of problem: what stands behind `/problems/` in \
                its `type`.",
            "schema": {"type": "string", "pattern": "^[a-z-]+$"},
            "example": "idempotency-key-reused",
        },
        "limit": {
            "name": "limit",
            "in": "query",
            "description": "How many exports a page has at most. Nothing else than `limit` and \
                `cursor` may stand in the query, each once; an empty one counts as none.",
            "schema": {"type": "integer", "minimum": 1, "maximum": 200, "default": 50},
        },
        "cursor": {
            "name": "cursor",
            "in": "query",
            "description": "The `next` of the page before, unchanged.",
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]*$"},
        },
        "skip_invalid": {
            "name": "skip_invalid",
            "in": "query",
            "description": "Whether lines that are not valid are left out and named, instead of \
                nothing being written.",
            "schema": {"type": "string", "enum": ["0", "1"], "default": "0"},
        },
        "u": {
            "name": "u",
            "in": "query",
            "required": true,
            "description": "The user that the link is for.",
            "schema": {"$ref": "#/components/schemas/UserId"},
        },
        "exp": {
            "name": "exp",
            "in": "query",
            "required": true,
            "description": "When the link expires, in seconds since the epoch.",
            "schema": {"type": "integer", "format": "int64", "minimum": 0},
        },
        "k": {
            "name": "k",
            "in": "query",
            "required": true,
            "description": "The id of the key that signed the link.",
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,32}$"},
        },
        "sig": {
            "name": "sig",
            "in": "query",
            "required": true,
            "description": "The signature: HMAC-SHA256 over export, user and time, in base64url \
                without padding.",
            "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{43}$"},
        },
        "Idempotency-Key": {
            "name": "Idempotency-Key",
            "in": "header",
            "required": true,
            "description": "A value that the client makes once for each export that it wants, \
                such as a UUID, and sends again with every repetition of the request. It stands \
                in one header line, as 1 to 255 visible ASCII characters without `\"`, `,`, `;` \
                and `\\`, or as a quoted string (RFC 9651). The same key in either spelling is \
                the same key, and case counts.",
            "schema": {
                "type": "string",
                "pattern": r#"^([!#-+\-.-:<-\[\]-~]{1,255}|"([ !#-\[\]-~]|\\["\\]){1,255}")$"#,
            },
            "example": "0190d1c4-7a52-7c1e-8f0e-6d2f3b9a1c55",
        },
        "Last-Event-ID": {
            "name": "Last-Event-ID",
            "in": "header",
            "description": "The id of the last event that the client has, so that it is not sent \
                again. A browser sends it by itself.",
            "schema": text,
        },
        "Range": {
            "name": "Range",
            "in": "header",
            "description": "The bytes that are wanted (RFC 9110 section 14.2), in at most 16 \
                ranges. What cannot be understood, or asks for too much, gets the whole file.",
            "schema": text,
            "example": "bytes=1000-",
        },
        "If-Range": {
            "name": "If-Range",
            "in": "header",
            "description": "The ETag (or Last-Modified) of the file that the client has a part \
                of. If the file is another one, the whole of it comes and never a splice.",
            "schema": text,
        },
        "If-Match": {
            "name": "If-Match",
            "in": "header",
            "description": "Refused with 412 unless the file has one of these ETags.",
            "schema": text,
        },
        "If-None-Match": {
            "name": "If-None-Match",
            "in": "header",
            "description": "Answered with 304 if the file has one of these ETags.",
            "schema": text,
        },
        "If-Modified-Since": {
            "name": "If-Modified-Since",
            "in": "header",
            "description": "Answered with 304 if the file is not newer; passed over beside \
                `If-None-Match`.",
            "schema": text,
        },
        "If-Unmodified-Since": {
            "name": "If-Unmodified-Since",
            "in": "header",
            "description": "Refused with 412 if the file is newer; passed over beside `If-Match`.",
            "schema": text,
        },
    });
    object(parameters)
}
