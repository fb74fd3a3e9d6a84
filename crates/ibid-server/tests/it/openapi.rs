//! `GET /openapi.json`: the description, against the server, the router and itself.

use std::collections::BTreeSet;
use std::path::Path;

use http::HeaderMap;
use serde_json::{Value, json};

use crate::described::{DESCRIPTION, check, paths, valid};
use crate::harness::{Answer, Server, Setup, answer};

/// What the file in the repository says.
const FILE: &str = include_str!("../../../../docs/openapi.json");

#[tokio::test]
async fn the_description_is_served_and_linked_and_is_the_file_in_the_repository() {
    let server = Server::start(Setup::default()).await;
    let about = answer(server.get("/")).await;
    assert_eq!(about.body["description"], "/openapi.json");
    let served = answer(server.get("/openapi.json")).await;
    assert_eq!(served.status, 200);
    assert_eq!(served.header("content-type"), "application/json");
    assert_eq!(served.body["openapi"], "3.1.0");
    let file: Value = serde_json::from_str(FILE).expect("JSON");
    if served.body != file {
        let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openapi.json");
        std::fs::write(&new, &served.bytes).expect("written");
        panic!(
            "docs/openapi.json is not what is served; look at the difference, then\n  cp {} \
             docs/openapi.json",
            new.display()
        );
    }
}

#[tokio::test]
async fn every_route_of_the_router_is_described_with_its_methods_and_nothing_else_is() {
    let router = include_str!("../../src/api.rs");
    let (_, router) = router.split_once("pub fn router(").expect("a router");
    let (router, _) = router.split_once("\n}\n").expect("an end");
    let mut routes: BTreeSet<&str> = router
        .split(".route(")
        .skip(1)
        .filter_map(|route| route.trim_start().strip_prefix('"')?.split('"').next())
        .collect();
    // The only one that is named by a constant.
    assert_eq!(router.matches(".route(openapi::PATH").count(), 1);
    routes.insert(ibid_server::api::openapi::PATH);
    assert_eq!(
        routes.len(),
        router.matches(".route(").count(),
        "{routes:?}"
    );
    let described: BTreeSet<&str> = paths().map(|(path, _)| path.as_str()).collect();
    assert_eq!(routes, described);

    let server = Server::start(Setup::default()).await;
    for (path, item) in paths() {
        let url = server.url(&path.replace('{', "a").replace('}', "b"));
        let method = "BREW".parse().expect("a method");
        let refused = answer(server.client.request(method, url)).await;
        refused.is_problem(405, "method-not-allowed");
        let allow = refused.header("allow").split(',');
        let allowed: BTreeSet<String> = allow.map(|it| it.trim().to_lowercase()).collect();
        let methods = item.as_object().expect("operations").keys();
        let mut described: BTreeSet<String> = methods.cloned().collect();
        if described.contains("get") {
            described.insert("head".to_owned());
        }
        assert_eq!(allowed, described, "{path}");
    }
}

/// Every operation of the description.
fn operations() -> Vec<(&'static str, &'static str, &'static Value)> {
    let mut all = Vec::new();
    for (path, item) in paths() {
        let methods = item.as_object().expect("operations").iter();
        all.extend(methods.map(|(method, it)| (path.as_str(), method.as_str(), it)));
    }
    all
}

#[test]
fn every_operation_says_what_it_is_and_is_named_once() {
    let mut names = BTreeSet::new();
    for (path, method, operation) in operations() {
        let text = |name: &str| operation[name].as_str().unwrap_or_default();
        assert!(!text("summary").is_empty(), "{method} {path}");
        assert!(!text("summary").ends_with('.'), "{method} {path}");
        assert!(text("description").ends_with('.'), "{method} {path}");
        assert!(names.insert(text("operationId")), "{method} {path}");
        assert_eq!(operation["tags"].as_array().map(Vec::len), Some(1));
        let is_open = operation["security"] == json!([]);
        let open = ["service", "download"].contains(&operation["tags"][0].as_str().expect("a tag"));
        assert!(open || !is_open, "{method} {path} says of nobody who may");
    }
}

/// All values in a value, itself included.
fn all_in(value: &Value) -> Vec<&Value> {
    let mut all = vec![value];
    match value {
        Value::Object(members) => all.extend(members.values().flat_map(all_in)),
        Value::Array(items) => all.extend(items.iter().flat_map(all_in)),
        _ => {}
    }
    all
}

#[test]
fn every_reference_leads_somewhere_and_every_component_is_used() {
    let values = all_in(&DESCRIPTION);
    let used: BTreeSet<&str> = values.iter().filter_map(|it| it["$ref"].as_str()).collect();
    for reference in &used {
        let pointer = reference.trim_start_matches('#');
        assert!(DESCRIPTION.pointer(pointer).is_some(), "{reference}");
    }
    // The lines of a body that is described as text are named by its description alone, and
    // these problems, which any request may meet, by the head of all.
    let named = ["LogEvent", "malformed", "uri-too-long", "headers-too-large"];
    let anywhere = ["method-not-allowed", "internal"];
    for (kind, components) in DESCRIPTION["components"].as_object().expect("components") {
        for name in components.as_object().expect("components").keys() {
            let is_used = used.contains(format!("#/components/{kind}/{name}").as_str());
            let is_named = [&named[..], &anywhere].concat().contains(&name.as_str());
            let is_scheme = kind == "securitySchemes";
            assert!(is_used || is_named || is_scheme, "{kind}/{name}");
        }
    }
}

#[test]
fn the_examples_are_as_their_schemas_demand() {
    let problem = &DESCRIPTION["components"]["schemas"]["Problem"];
    let examples = &DESCRIPTION["components"]["examples"];
    for (name, example) in examples.as_object().expect("examples") {
        valid(&example["value"], problem).expect(name);
    }
    let mut checked = 0;
    for schema in all_in(&DESCRIPTION) {
        let has = |name: &str| schema.get(name).is_some();
        let of_a_schema = has("type") || has("pattern") || has("enum");
        for example in schema["examples"].as_array().into_iter().flatten() {
            assert!(of_a_schema, "{schema}");
            valid(example, schema).expect("as demanded");
            checked += 1;
        }
    }
    assert!(checked > 10, "{checked}");
}

/// An answer with what every answer carries, and these headers.
fn made_up(status: u16, headers: &[(&'static str, &str)], body: &Value) -> Answer {
    let mut map = HeaderMap::new();
    let always = [
        ("cache-control", "private, no-store"),
        ("x-content-type-options", "nosniff"),
        ("x-request-id", "aaaaaaaaaaaaaaaaaaaaaaaaaa"),
    ];
    for (name, value) in always.iter().chain(headers) {
        map.insert(*name, value.parse().expect("a value"));
    }
    Answer {
        status,
        headers: map,
        bytes: body.to_string().into_bytes(),
        body: body.clone(),
    }
}

#[test]
fn an_answer_that_is_not_described_is_noticed() {
    let json = ("content-type", "application/json");
    let location = ("location", "/exports/aaaaaaaaaaaaaaaaaaaaaaaaaa");
    let asked = json!({
        "job_id": "aaaaaaaaaaaaaaaaaaaaaaaaaa", "state": "queued", "replayed": false,
    });
    let good = made_up(202, &[json, location], &asked);
    check("POST", "/exports", &good).expect("described");
    let with = |name: &str, value: Value| {
        let mut body = asked.clone();
        body[name] = value;
        made_up(202, &[json, location], &body)
    };
    let html = ("content-type", "text/html");
    let problem = |name: &str, status: u16| {
        let body = json!({
            "type": format!("/problems/{name}"), "title": "t", "status": status, "detail": "d.",
            "request_id": "aaaaaaaaaaaaaaaaaaaaaaaaaa",
        });
        made_up(
            status,
            &[("content-type", "application/problem+json")],
            &body,
        )
    };
    check("POST", "/exports", &problem("scope-invalid", 400)).expect("described");
    for (what, method, path, answer) in [
        (
            "a status",
            "POST",
            "/exports",
            made_up(201, &[json, location], &asked),
        ),
        (
            "a header",
            "POST",
            "/exports",
            made_up(202, &[json], &asked),
        ),
        (
            "a media type",
            "POST",
            "/exports",
            made_up(202, &[html, location], &asked),
        ),
        ("a member", "POST", "/exports", with("more", json!(1))),
        (
            "a state",
            "POST",
            "/exports",
            with("state", json!("asleep")),
        ),
        ("an id", "POST", "/exports", with("job_id", json!("A"))),
        ("a type", "POST", "/exports", with("replayed", json!("no"))),
        ("a method", "PUT", "/exports", good),
        ("a path", "GET", "/nowhere", with("replayed", json!(true))),
        ("a problem", "POST", "/exports", problem("log-invalid", 400)),
        (
            "a status of it",
            "POST",
            "/exports",
            problem("scope-invalid", 403),
        ),
        (
            "what it carries",
            "POST",
            "/exports",
            problem("unavailable", 503),
        ),
    ] {
        assert!(check(method, path, &answer).is_err(), "{what}");
    }
}
