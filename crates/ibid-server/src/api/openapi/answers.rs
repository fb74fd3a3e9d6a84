//! What requests are answered with.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::schemas::object;
use crate::api::problem::Kind;

/// What every answer carries.
const ALWAYS: [&str; 3] = ["Cache-Control", "X-Content-Type-Options", "X-Request-Id"];

/// What every answer of the download carries besides.
pub const PROTECTING: [&str; 2] = ["Content-Security-Policy", "Referrer-Policy"];

/// An answer as it is described.
pub struct Answer {
    pub status: u16,
    described: Value,
}

impl Answer {
    pub fn new(status: u16, description: &str) -> Answer {
        let described = json!({"description": description, "headers": {}});
        Answer { status, described }.carries(&ALWAYS)
    }

    /// A JSON document with this schema.
    pub fn json(self, schema: &str) -> Answer {
        let schema = json!({"$ref": format!("#/components/schemas/{schema}")});
        self.content("application/json", schema)
    }

    pub fn content(mut self, media_type: &str, schema: Value) -> Answer {
        self.described["content"][media_type] = json!({"schema": schema});
        self
    }

    /// These of [`headers`], which say whether they are always there.
    pub fn carries(mut self, names: &[&str]) -> Answer {
        for name in names {
            // Some headers have two descriptions, as they mean different things.
            let shown = name.trim_end_matches("-Maybe").trim_end_matches("-Store");
            let reference = format!("#/components/headers/{name}");
            self.described["headers"][shown] = json!({"$ref": reference});
        }
        self
    }

    pub fn described(self) -> Value {
        self.described
    }
}

/// The answers to these problems, one for each status.
pub fn problems(kinds: &[&'static Kind]) -> Vec<Answer> {
    let mut by_status = BTreeMap::<u16, Vec<&Kind>>::new();
    for kind in kinds {
        let same = by_status.entry(kind.status.as_u16()).or_default();
        if !same.contains(kind) {
            same.push(kind);
        }
    }
    let answers = by_status.into_iter();
    answers
        .map(|(status, kinds)| problem(status, &kinds))
        .collect()
}

fn problem(status: u16, kinds: &[&Kind]) -> Answer {
    let sentences: Vec<String> = kinds
        .iter()
        .map(|kind| format!("`{}`: {}", kind.name, kind.when))
        .collect();
    let types: Vec<String> = kinds
        .iter()
        .map(|kind| format!("/problems/{}", kind.name))
        .collect();
    let schema = json!({
        "allOf": [{"$ref": "#/components/schemas/Problem"}],
        "properties": {"type": {"enum": types}, "status": {"const": status}},
    });
    let mut answer = Answer::new(status, &sentences.join("\n\n"))
        .content("application/problem+json", schema)
        .carries(match status {
            401 => &["WWW-Authenticate"],
            416 => &["Content-Range"],
            429 | 503 => &["Retry-After"],
            _ => &[],
        });
    let examples = kinds.iter().map(|kind| {
        let reference = format!("#/components/examples/{}", kind.name);
        (kind.name.to_owned(), json!({"$ref": reference}))
    });
    answer.described["content"]["application/problem+json"]["examples"] =
        examples.collect::<Map<_, _>>().into();
    answer
}

/// An example of every kind of problem.
pub fn examples() -> Map<String, Value> {
    let example = |kind: &Kind| {
        let mut value = json!({
            "type": format!("/problems/{}", kind.name),
            "title": kind.title,
            "status": kind.status.as_u16(),
            "detail": kind.todo,
            "request_id": "zk3plq5xq4m2n7r6t5w3y2a4bc",
        });
        if kind.name == "log-invalid" {
            let reason = "is missing";
            value["errors"] = json!([{"line": 2, "field": "user", "reason": reason}]);
        }
        (
            kind.name.to_owned(),
            json!({"summary": kind.title, "value": value}),
        )
    };
    let kinds = crate::api::problem::kinds::ALL.iter();
    kinds.map(example).collect()
}

/// All headers of answers.
pub fn headers() -> Map<String, Value> {
    let text = |description: &str, example: &str| {
        let schema = json!({"type": "string", "examples": [example]});
        json!({"description": description, "required": true, "schema": schema})
    };
    let one_of = |description: &str, values: &[&str]| {
        let schema = json!({"type": "string", "enum": values});
        json!({"description": description, "required": true, "schema": schema})
    };
    let seconds = |description: &str, required: bool| {
        let schema = json!({"type": "integer", "minimum": 1});
        json!({"description": description, "required": required, "schema": schema})
    };
    let whole = "of the whole file, also where only a range of it is sent";
    let headers = json!({
        "Accept-Ranges": one_of("Ranges of bytes can be asked for.", &["bytes"]),
        "Allow": text("The methods that there are.", "GET, HEAD, OPTIONS"),
        "Cache-Control": text("Nothing here is for caches that are shared.", "private, no-store"),
        "Content-Disposition": {
            "description": "The name to save the file by.",
            "required": true,
            "schema": {
                "type": "string",
                "pattern": r#"^attachment; filename="export-[a-z2-7]{26}\.jsonl\.gz"$"#,
            },
        },
        "Content-Length": {
            "description": "The exact length of the body, or of the one that a GET would have.",
            "required": true,
            "schema": {"type": "integer", "minimum": 0},
        },
        "Content-Range": {
            "description": "Which bytes these are, and of how many; with 416, how many there are.",
            "required": true,
            "schema": {"type": "string", "pattern": r"^bytes (\d+-\d+|\*)/\d+$"},
        },
        "Content-Range-Maybe": {
            "description": "Which bytes these are, and of how many. Several ranges have one each \
                in the parts of the body.",
            "required": false,
            "schema": {"type": "string", "pattern": r"^bytes \d+-\d+/\d+$"},
        },
        "Content-Security-Policy": one_of("Nothing may run here.", &["default-src 'none'"]),
        "ETag": {
            "description": "The SHA-256 of the file, as a strong tag: it stays the same with every \
                link.",
            "required": true,
            "schema": {"type": "string", "pattern": "^\"[0-9a-f]{64}\"$"},
        },
        "Idempotent-Replayed": one_of("An earlier request has made the job.", &["true"]),
        "Last-Modified": text("When the file was finished.", "Mon, 05 Jan 2026 09:30:00 GMT"),
        "Location": {
            "description": "The address of the export.",
            "required": true,
            "schema": {"type": "string", "format": "uri-reference"},
        },
        "Location-Store": {
            "description": "The address of the file at the object store.",
            "required": true,
            "schema": {"type": "string", "format": "uri"},
        },
        "Referrer-Policy": one_of("A link is never told to others.", &["no-referrer"]),
        "Repr-Digest": {
            "description": format!("The SHA-256 {whole} (RFC 9530)."),
            "required": true,
            "schema": {"type": "string", "pattern": "^sha-256=:[A-Za-z0-9+/]{43}=:$"},
        },
        "Retry-After": seconds("After how many seconds it is worth asking again.", true),
        "Retry-After-Maybe": seconds(
            "How often to ask, in seconds, as long as the state is not final.",
            false,
        ),
        "Vary": one_of("What Accept names makes a difference.", &["Accept"]),
        "WWW-Authenticate": text("How to say who is asking.", "Bearer"),
        "X-Content-Type-Options": one_of("The type is what it says.", &["nosniff"]),
        "X-Request-Id": {
            "description": "The id of the request, which the log of the server has, too.",
            "required": true,
            "schema": {"$ref": "#/components/schemas/RequestId"},
        },
    });
    object(headers)
}
