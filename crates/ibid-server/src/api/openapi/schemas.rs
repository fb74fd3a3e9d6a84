//! Schemas: of answers from the types that are written; of what the library writes, and of
//! bodies that are taken, by hand.

use std::borrow::Cow;

use ibid::export::State as ExportState;
use ibid::ids::MAX_ID_BYTES;
use ibid::scope::Format as ExportFormat;
use serde_json::{Map, Value, json};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::super::{admin, exports, log, problem, service};

/// Names of schemas that [`by_hand`] has, for the types of the library, which knows nothing of
/// descriptions.
macro_rules! named {
    ($($name:ident)*) => {$(
        pub enum $name {}

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new().into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    )*};
}

named! {
    ConvId Downloads Failure Format JobId RequestId Revocation Scope Sha256 State Time UserId
    Waiting
}

/// All schemas by their names.
pub fn all() -> Map<String, Value> {
    let mut all = Map::new();
    add::<admin::Account>(&mut all);
    add::<admin::Owned>(&mut all);
    add::<exports::Asked>(&mut all);
    add::<exports::Document>(&mut all);
    add::<exports::Done>(&mut all);
    add::<exports::Page>(&mut all);
    add::<log::Taking>(&mut all);
    add::<problem::Members<'_>>(&mut all);
    add::<problem::page::ProblemKind>(&mut all);
    add::<service::About>(&mut all);
    add::<service::Health>(&mut all);
    all.extend(by_hand());
    all.extend(bodies());
    let done = all.remove("Done").unwrap_or_default();
    all["Export"]["properties"] = both(&all["Export"]["properties"], &done["properties"]);
    // An export with its owner is one object, not two.
    let owner = json!({"user": {"$ref": "#/components/schemas/UserId"}});
    let mut owned = all["Export"].clone();
    owned["description"] = "An export as an admin sees it: whose it is, and never a link.".into();
    owned["properties"] = both(&owned["properties"], &owner);
    if let Some(properties) = owned["properties"].as_object_mut() {
        properties.remove("download");
    }
    if let Some(required) = owned["required"].as_array_mut() {
        required.push("user".into());
    }
    all.insert("OwnedExport".to_owned(), owned);
    all
}

/// The schema of a type, and those that it refers to.
fn add<T: ToSchema>(all: &mut Map<String, Value>) {
    let mut found = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut found);
    for (name, schema) in found {
        // Schemas are text and numbers, which can always be written.
        all.insert(name, serde_json::to_value(schema).unwrap_or_default());
    }
}

/// The members of two objects.
fn both(one: &Value, other: &Value) -> Value {
    let members = [one, other].into_iter().filter_map(Value::as_object);
    members
        .flatten()
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect()
}

/// What any id of an application is.
fn id(description: &str, example: &str) -> Value {
    json!({
        "type": "string",
        "description": format!(
            "{description} It is {MAX_ID_BYTES} bytes of UTF-8 at most, without control characters."
        ),
        "minLength": 1,
        "maxLength": MAX_ID_BYTES,
        "pattern": r"^[^\u0000-\u001f\u007f-\u009f]+$",
        "examples": [example],
    })
}

/// What the library writes.
fn by_hand() -> Map<String, Value> {
    let states = ExportState::ALL.map(ExportState::as_str);
    let time = json!({"$ref": "#/components/schemas/Time"});
    let sentence = json!({
        "type": "string",
        "description": "What happened, and what to do about it.",
    });
    let name = json!({"type": "string", "description": "The stable name of the reason."});
    let count = json!({"type": "integer", "minimum": 0});
    let schemas = json!({
        "ConvId": id("The application's id of a conversation.", "c-team"),
        "UserId": id("The application's id of a user.", "alice"),
        "JobId": {
            "type": "string",
            "description": "The id of an export: 128 random bits in base32.",
            "pattern": "^[a-z2-7]{26}$",
            "examples": ["kzpnjlfwg6jkimo5smwsaxgrf4"],
        },
        "RequestId": {
            "type": "string",
            "description": "The id of a request: 128 random bits in base32.",
            "pattern": "^[a-z2-7]{26}$",
            "examples": ["zk3plq5xq4m2n7r6t5w3y2a4bc"],
        },
        "Time": {
            "type": "string",
            "format": "date-time",
            "description": "A time in UTC, with microseconds (RFC 3339).",
            "pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}Z$",
            "examples": ["2026-01-05T09:30:00.000000Z"],
        },
        "State": {
            "type": "string",
            "description": "Where an export stands: it waits in `queued`, is worked on in \
                `running`, and ends in `done` or `failed`; `revoked` is one that its owner or an \
                administrator has taken back, `expired` one whose time is over.",
            "enum": states,
        },
        "Scope": {
            "type": "string",
            "description": "What an export holds: `all` that its user could see, or `conv:` and \
                the id of one conversation.",
            "pattern": r"^(all|conv:[^\u0000-\u001f\u007f-\u009f]{1,200})$",
            "maxLength": MAX_ID_BYTES + "conv:".len(),
            "examples": ["all", "conv:c-team"],
        },
        "Format": {
            "type": "string",
            "description": "The form of the file: one gzip member, and in it one JSON object a \
                line.",
            "enum": [ExportFormat::JsonlGz.as_str()],
            "default": ExportFormat::JsonlGz.as_str(),
        },
        "Sha256": {
            "type": "string",
            "description": "The SHA-256 of the file in hexadecimal, which is its ETag, too.",
            "pattern": "^[0-9a-f]{64}$",
        },
        "Failure": {
            "type": "object",
            "description": "Why an export failed.",
            "required": ["type", "detail"],
            "properties": {"type": name, "detail": sentence},
        },
        "Waiting": {
            "type": "object",
            "description": "Why an export does not go on for now, and since when.",
            "required": ["type", "detail", "since"],
            "properties": {"type": name, "detail": sentence, "since": time},
        },
        "Revocation": {
            "type": "object",
            "description": "When, by whom and why an export was taken back.",
            "required": ["at", "by", "reason"],
            "properties": {
                "at": time,
                "by": {"type": "string", "enum": ["owner", "admin", "erasure"]},
                "reason": {"type": "string"},
            },
        },
        "Downloads": {
            "type": "object",
            "description": "How often the file was fetched, from how many addresses, and when \
                last. A request for a range counts, a HEAD does not.",
            "required": ["count", "sources", "last_at"],
            "properties": {
                "count": count,
                "sources": count,
                "last_at": {"oneOf": [{"type": "null"}, time]},
            },
        },
    });
    object(schemas)
}

/// What is taken as bodies.
fn bodies() -> Map<String, Value> {
    let schemas = json!({
        "ExportRequest": {
            "type": "object",
            "description": "What to export. Unknown and doubled members are refused, so that a \
                slip never exports something else.",
            "required": ["scope"],
            "additionalProperties": false,
            "properties": {
                "scope": {"$ref": "#/components/schemas/Scope"},
                "format": {"$ref": "#/components/schemas/Format"},
            },
            "examples": [{"scope": "all"}, {"scope": "conv:c-team", "format": "jsonl.gz"}],
        },
        "Revoke": {
            "type": "object",
            "required": ["reason"],
            "additionalProperties": false,
            "properties": {
                "reason": {
                    "type": "string",
                    "description": "Why, for the owner to read; not only white space.",
                    "minLength": 1,
                    "maxLength": admin::MAX_REASON_CHARS,
                    "pattern": r"\S",
                },
            },
            "examples": [{"reason": "Asked for by mistake."}],
        },
        "AccountChange": {
            "type": "object",
            "required": ["enabled"],
            "additionalProperties": false,
            "properties": {
                "enabled": {
                    "type": "boolean",
                    "description": "Whether the user may ask for exports and fetch files.",
                },
            },
            "examples": [{"enabled": false}],
        },
        "LogEvents": {
            "type": "string",
            "description": "Events, one a line, each a `LogEvent` in UTF-8; empty lines are \
                passed over.",
            "examples": [concat!(
                r#"{"kind":"join","conv":"c-team","user":"alice","ts":"2026-01-05T09:00:00Z"}"#, "\n",
                r#"{"kind":"message","conv":"c-team","user":"bob","ts":"2026-01-05T09:30:00Z","body":"hi","id":"m-17"}"#, "\n",
                r#"{"kind":"edit","message":"m-17","ts":"2026-01-05T09:31:00Z","body":"hello"}"#, "\n",
            )],
        },
        "LogEvent": {
            "description": "One line of the log. `edit`, `recall` and `restore` name their message \
                by `conv` and `seq`, or by `message`, the id that its event has. Any event may \
                have an `id`, by which a repetition is recognised.",
            "oneOf": [
                event("message", &["conv", "user", "ts", "body"], &["files"]),
                event("edit", &["conv", "seq", "ts", "body"], &[]),
                event("edit", &["message", "ts", "body"], &[]),
                event("recall", &["conv", "seq", "ts"], &[]),
                event("recall", &["message", "ts"], &[]),
                event("restore", &["conv", "seq", "ts"], &[]),
                event("restore", &["message", "ts"], &[]),
                event("join", &["conv", "user", "ts"], &[]),
                event("leave", &["conv", "user", "ts"], &[]),
                event("account", &["user", "enabled"], &["ts"]),
                event("conv", &["conv", "history"], &["ex_members", "ts"]),
                event("conv", &["conv", "ex_members"], &["ts"]),
            ],
        },
    });
    object(schemas)
}

/// A kind of event with the members that it must and those that it may have.
fn event(kind: &str, required: &[&str], optional: &[&str]) -> Value {
    let member = |name: &str| match name {
        "conv" => json!({"$ref": "#/components/schemas/ConvId"}),
        "user" => json!({"$ref": "#/components/schemas/UserId"}),
        "ts" => json!({
            "type": "string",
            "format": "date-time",
            "description": "When it happened, with the offset from UTC.",
        }),
        "seq" => json!({
            "type": "integer",
            "minimum": 1,
            "maximum": (1_u64 << 53) - 1,
            "description": "The number of the message in its conversation.",
        }),
        "enabled" => json!({"type": "boolean"}),
        "history" => json!({"type": "string", "enum": ["joined", "all"]}),
        "ex_members" => json!({"type": "string", "enum": ["keep", "none"]}),
        "message" => id("The id of the message's own event.", "m-17"),
        "id" => id(
            "The application's own id of the event, unique over the log.",
            "m-17",
        ),
        "files" => json!({
            "type": "array",
            "description": "Files that the message mentions; their bytes are not exported.",
            "items": {
                "type": "object",
                "additionalProperties": false,
                "required": ["bytes", "id", "name", "type"],
                "properties": {
                    "bytes": {"type": "integer", "minimum": 0, "maximum": (1_u64 << 53) - 1},
                    "id": {"type": "string"},
                    "name": {"type": "string"},
                    "type": {"type": "string"},
                },
            },
        }),
        _ => json!({"type": "string"}),
    };
    let mut properties = Map::new();
    properties.insert("kind".to_owned(), json!({"const": kind}));
    for name in required.iter().chain(optional).chain(&["id"]) {
        properties.insert((*name).to_owned(), member(name));
    }
    let required: Vec<&str> = ["kind"].iter().chain(required).copied().collect();
    json!({
        "type": "object",
        "required": required,
        "additionalProperties": false,
        "properties": properties,
    })
}

/// The members of what is known to be an object.
pub(super) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}
