//! Holds an answer against the description of the API: its status, media type, headers and body
//! must be described for its route and method. More is refused than a client would refuse: an
//! answer must have no member that is not described.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::LazyLock;

use ibid_server::api::openapi::{Facts, document};
use regex_automata::meta::Regex;
use serde_json::{Map, Value};

use crate::harness::Answer;

/// What a server of these tests, which is set up by the defaults, says of itself.
pub const FACTS: Facts = Facts {
    record_days: 90,
    link_seconds: 300,
    metrics: true,
};

pub static DESCRIPTION: LazyLock<Value> = LazyLock::new(|| document(&FACTS));

/// What any request may be answered, as the head of the description says.
const ANYWHERE: [&str; 4] = [
    "malformed",
    "request-timeout",
    "uri-too-long",
    "headers-too-large",
];

/// # Errors
/// What is not described.
pub fn check(method: &str, path: &str, answer: &Answer) -> Result<(), String> {
    let problem = answer.text("type");
    let problem = problem.strip_prefix("/problems/").unwrap_or_default();
    if ANYWHERE.contains(&problem) && answer.body["status"] == answer.status {
        return is_problem(answer);
    }
    let Some((_, item)) = paths().find(|(template, _)| fits(template, path)) else {
        return match (answer.status, problem) {
            (404, "not-found") => is_problem(answer),
            // Its body, which would say so, is not sent.
            (404, _) if method == "HEAD" => Ok(()),
            _ => Err("no such path is described".to_owned()),
        };
    };
    // What a server does not have, whose metrics are told on a port of their own.
    if (path, answer.status) == ("/metrics", 404) {
        return is_problem(answer);
    }
    let is_head = method == "HEAD";
    let own = item.get(method.to_lowercase());
    // HEAD is described by GET, but where it answers something of its own.
    let Some(operation) = own.or(item.get("get").filter(|_| is_head)) else {
        return match (answer.status, problem, is_head) {
            (405, "method-not-allowed", _) => {
                let allow = &component("headers", "Allow")["schema"];
                valid(&answer.header("allow").into(), allow).and_then(|()| is_problem(answer))
            }
            (405, _, true) => Ok(()),
            _ => Err("no such method is described".to_owned()),
        };
    };
    let described = &operation["responses"][answer.status.to_string()];
    if described.is_null() {
        return Err(format!("the status {} is not described", answer.status));
    }
    headers(&described["headers"], answer)?;
    body(&described["content"], answer, is_head)
}

pub fn paths() -> impl Iterator<Item = (&'static String, &'static Value)> {
    DESCRIPTION["paths"].as_object().expect("paths").iter()
}

fn fits(template: &str, path: &str) -> bool {
    let (template, path) = (template.split('/'), path.split('/'));
    template.clone().count() == path.clone().count()
        && template
            .zip(path)
            .all(|(it, part)| it == part || (it.starts_with('{') && !part.is_empty()))
}

fn is_problem(answer: &Answer) -> Result<(), String> {
    if answer.header("content-type") != "application/problem+json" {
        return Err("it is no problem".to_owned());
    }
    valid(&answer.body, component("schemas", "Problem"))
}

fn headers(described: &Value, answer: &Answer) -> Result<(), String> {
    for (name, header) in described.as_object().expect("headers") {
        let header = resolved(header);
        let Some(value) = answer.headers.get(name) else {
            match header["required"].as_bool() {
                Some(false) => continue,
                _ => return Err(format!("{name} is missing")),
            }
        };
        let value = value.to_str().map_err(|_| format!("{name} is no text"))?;
        let value = match header["schema"]["type"].as_str() {
            Some("integer") => value.parse::<u64>().map_or(Value::Null, Value::from),
            _ => value.into(),
        };
        valid(&value, &header["schema"]).map_err(|reason| format!("{name}: {reason}"))?;
    }
    Ok(())
}

fn body(described: &Value, answer: &Answer, is_head: bool) -> Result<(), String> {
    if described.is_null() || is_head {
        return match answer.bytes.is_empty() {
            true => Ok(()),
            false => Err("no body is described".to_owned()),
        };
    }
    let media_type = answer.header("content-type").split(';').next();
    let media_type = media_type.unwrap_or_default();
    let Some(content) = described.get(media_type) else {
        return Err(format!("the media type {media_type:?} is not described"));
    };
    match media_type.ends_with("json") {
        true if answer.body.is_null() => Err("the body is no JSON".to_owned()),
        true => valid(&answer.body, &content["schema"]),
        false => Ok(()),
    }
}

fn component(kind: &str, name: &str) -> &'static Value {
    &DESCRIPTION["components"][kind][name]
}

/// What a reference refers to, or the value itself.
fn resolved(value: &Value) -> &Value {
    let Some(reference) = value["$ref"].as_str() else {
        return value;
    };
    let pointer = reference.strip_prefix('#').expect("a local reference");
    let found = DESCRIPTION.pointer(pointer);
    found.unwrap_or_else(|| panic!("{reference} leads nowhere"))
}

/// Whether `value` is as `schema` has it. A schema without a type or members says nothing of
/// members, so anything goes there.
///
/// # Errors
/// The first place where it is not, and why.
pub fn valid(value: &Value, schema: &Value) -> Result<(), String> {
    satisfies(value, schema)?;
    let mut known = Map::new();
    members(schema, &mut known);
    match value.as_object() {
        Some(object) if !known.is_empty() => {
            match object.keys().find(|name| !known.contains_key(*name)) {
                Some(name) => Err(format!("the member {name:?} is not described")),
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// The members that a schema describes, also by the schemas that it is put together from.
fn members(schema: &Value, known: &mut Map<String, Value>) {
    let schema = resolved(schema);
    let of = schema["properties"].as_object();
    known.extend(
        of.into_iter()
            .flatten()
            .map(|(k, v)| (k.clone(), v.clone())),
    );
    for part in schema["allOf"].as_array().into_iter().flatten() {
        members(part, known);
    }
}

/// Holds a value against the keywords that the description uses, and no others.
fn satisfies(value: &Value, schema: &Value) -> Result<(), String> {
    let fails = |what: &Value| Err(format!("{value} is not as {what} demands"));
    for (keyword, rule) in schema.as_object().expect("a schema") {
        let holds = match keyword.as_str() {
            "$ref" => {
                valid(value, resolved(schema))?;
                true
            }
            "allOf" => {
                for part in rule.as_array().expect("schemas") {
                    satisfies(value, part)?;
                }
                true
            }
            "oneOf" => {
                let schemas = rule.as_array().expect("schemas").iter();
                schemas.filter(|it| valid(value, it).is_ok()).count() == 1
            }
            "type" => match rule {
                Value::Array(types) => types.iter().any(|it| is_of_type(value, it)),
                one => is_of_type(value, one),
            },
            "enum" => rule.as_array().expect("values").contains(value),
            "const" => rule == value,
            "pattern" => match value.as_str() {
                Some(text) => matches(text, rule.as_str().expect("a pattern")),
                None => true,
            },
            "minimum" => value.as_i64().is_none_or(|it| Some(it) >= rule.as_i64()),
            "maximum" => value.as_i64().is_none_or(|it| Some(it) <= rule.as_i64()),
            "required" => {
                let names = rule.as_array().expect("names").iter();
                names
                    .filter_map(Value::as_str)
                    .all(|it| value.get(it).is_some())
            }
            "properties" => {
                for (name, schema) in rule.as_object().expect("schemas") {
                    if let Some(member) = value.get(name) {
                        valid(member, schema).map_err(|reason| format!("{name}: {reason}"))?;
                    }
                }
                true
            }
            "items" => {
                for item in value.as_array().into_iter().flatten() {
                    valid(item, rule)?;
                }
                true
            }
            // Members that are not described are refused everywhere.
            "additionalProperties" => rule == false,
            "description" | "default" | "examples" | "format" | "minLength" | "maxLength" => true,
            other => panic!("{other} is used in the description and not checked here"),
        };
        if !holds {
            return fails(rule);
        }
    }
    Ok(())
}

fn is_of_type(value: &Value, name: &Value) -> bool {
    match name.as_str().expect("a type") {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("the type {other} is not checked here"),
    }
}

thread_local! {
    /// The patterns that were met, since making one takes longer than to use it.
    static PATTERNS: RefCell<HashMap<String, Regex>> = RefCell::default();
}

fn matches(text: &str, pattern: &str) -> bool {
    PATTERNS.with_borrow_mut(|known| {
        let known = known.entry(pattern.to_owned());
        let known = known.or_insert_with_key(|it| Regex::new(it).expect(it));
        known.is_match(text)
    })
}
