//! `POST /exports`, its status, lists, accounts and roles.

mod limits;

use ibid::ledger::Role;
use ibid::limits::Limits;
use serde_json::{Value, json};
use std::time::Duration;

use crate::harness::{Answer, Server, Setup, answer, lines, sample, sample_later};

const ALL: &str = r#"{"scope":"all"}"#;

async fn with_sample() -> (Server, String) {
    let server = Server::start(Setup::default()).await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    (server, token)
}

#[tokio::test]
async fn an_export_holds_what_the_user_could_see_at_the_moment_of_the_click() {
    let (server, token) = with_sample().await;
    let made = server.post(&token, "k", ALL).await;
    server.import(&sample_later()).await;
    server.work().await;
    let job = made.text("job_id");
    let done = server.status(&token, &job).await.body;
    assert_eq!(done["state"], "done");
    assert_eq!(done["messages"], 930);
    let url = done["download"]["url"].as_str().expect("a link");
    let file = answer(server.get(url)).await;
    let lines = lines(&file.bytes);
    let of = |conv: &str| -> Vec<u64> {
        let mine = lines.iter().filter(|line| line["conv"] == conv);
        mine.map(|line| line["seq"].as_u64().unwrap()).collect()
    };
    assert_eq!(of("c-team"), (51..=550).collect::<Vec<_>>());
    assert_eq!(of("c-big"), (1..=430).collect::<Vec<_>>());
    assert_eq!(lines.len(), 930);
    let message = |seq: u64| {
        let found = lines
            .iter()
            .find(|l| l["conv"] == "c-team" && l["seq"] == seq);
        found.cloned().expect("there")
    };
    assert_eq!(
        (&message(60)["body"], &message(60)["recalled"]),
        (&json!(""), &json!(1))
    );
    assert_eq!(message(70)["body"], "message 70 of c-team");
    assert_eq!(message(70)["recalled"], 0);
}

#[tokio::test]
async fn a_post_is_accepted_once_and_then_replayed_in_whatever_state_the_job_is() {
    let (server, token) = with_sample().await;
    let made = server.post(&token, "k", ALL).await;
    assert_eq!(made.status, 202);
    assert_eq!(made.body["state"], "queued");
    assert_eq!(made.body["replayed"], false);
    assert_eq!(
        made.header("location"),
        format!("/exports/{}", made.text("job_id"))
    );
    assert!(made.headers.get("idempotent-replayed").is_none());
    assert_eq!(made.text("job_id").len(), 26);

    // White space, member order, defaults and the key's spelling make no difference.
    for (key, body) in [
        ("k", ALL),
        (
            "\"k\"",
            r#"{ "format" : "jsonl.gz", "scope" : "\u0061ll" }"#,
        ),
    ] {
        let again = server.post(&token, key, body).await;
        assert_eq!(again.status, 200);
        assert_eq!(again.body["job_id"], made.body["job_id"]);
        assert_eq!(again.body["replayed"], true);
        assert_eq!(again.header("idempotent-replayed"), "true");
        assert_eq!(again.header("location"), made.header("location"));
    }
    server.work().await;
    assert_eq!(server.post(&token, "k", ALL).await.body["state"], "done");

    let other = server.post(&token, "k", r#"{"scope":"conv:c-big"}"#).await;
    other.is_problem(422, "idempotency-key-reused");
    let bob = server.token("bob", Role::User).await;
    let of_bob = server.post(&bob, "k", ALL).await;
    assert_eq!(of_bob.status, 202);
    assert_ne!(of_bob.body["job_id"], made.body["job_id"]);
    // Case counts.
    assert_eq!(server.post(&token, "K", ALL).await.status, 202);
}

#[tokio::test]
async fn a_key_is_required_once_and_well_formed() {
    let (server, token) = with_sample().await;
    let request = |keys: &[&[u8]]| {
        let mut request = server
            .client
            .post(server.url("/exports"))
            .bearer_auth(&token)
            .header("Content-Type", "application/json")
            .body(ALL);
        for key in keys {
            let value = reqwest::header::HeaderValue::from_bytes(key).expect("a header");
            request = request.header("Idempotency-Key", value);
        }
        answer(request)
    };
    request(&[])
        .await
        .is_problem(400, "idempotency-key-missing");
    let long = "k".repeat(256);
    for bad in [
        b"" as &[u8],
        b"\"\"",
        b"a, b",
        b"\"a\", \"b\"",
        b"\"a\";p=1",
        b"\"a",
        b"a b",
        b"a\\b",
        "caf\u{e9}".as_bytes(),
        long.as_bytes(),
    ] {
        request(&[bad])
            .await
            .is_problem(400, "idempotency-key-invalid");
    }
    request(&[b"a", b"a"])
        .await
        .is_problem(400, "idempotency-key-invalid");
    // No refused request has consumed a key.
    let list = answer(server.get("/exports").bearer_auth(&token)).await;
    assert_eq!(list.body["exports"], json!([]));
}

#[tokio::test]
async fn bodies_and_scopes_that_are_not_understood_are_refused() {
    let (server, token) = with_sample().await;
    for bad in [
        "",
        "null",
        "[]",
        "{",
        "{}",
        r#"{"scope":"all"} x"#,
        r#"{"scope":"all","scope":"all"}"#,
        r#"{"scope":"all","scop\u0065":"all"}"#,
        r#"{"scope":"all","fromat":"jsonl.gz"}"#,
        r#"{"scope":"all","format":"csv"}"#,
        r#"{"scope":"all","format":null}"#,
        r#"{"scope":7}"#,
        r#"{"scope":"\ud800"}"#,
    ] {
        server
            .post(&token, "k", bad)
            .await
            .is_problem(400, "request-invalid");
    }
    for bad in [
        r#"{"scope":""}"#,
        r#"{"scope":"ALL"}"#,
        r#"{"scope":"conv:"}"#,
        r#"{"scope":"conv:a\u0000b"}"#,
        r#"{"scope":"conv:no-such"}"#,
        r#"{"scope":"conv:c-private"}"#,
    ] {
        server
            .post(&token, "k", bad)
            .await
            .is_problem(400, "scope-invalid");
    }
    // One answer for a conversation that does not exist and one that she never could see.
    let detail = |answer: Answer| answer.text("detail");
    assert_eq!(
        detail(
            server
                .post(&token, "k", r#"{"scope":"conv:no-such"}"#)
                .await
        ),
        detail(
            server
                .post(&token, "k", r#"{"scope":"conv:c-private"}"#)
                .await
        )
    );
    // The key of all these is still free.
    assert_eq!(
        server
            .post(&token, "k", r#"{"scope":"conv:c-big"}"#)
            .await
            .status,
        202
    );
}

#[tokio::test]
async fn the_type_and_the_size_of_a_body_are_limited() {
    let (server, token) = with_sample().await;
    let request = |media_type: Option<&str>, body: String| {
        let mut request = server
            .client
            .post(server.url("/exports"))
            .bearer_auth(&token)
            .body(body);
        if let Some(media_type) = media_type {
            request = request.header("Content-Type", media_type);
        }
        answer(request)
    };
    let big = format!("{{\"scope\":\"{}\"}}", "x".repeat(16 * 1024));
    for wrong in [
        None,
        Some("text/plain"),
        Some("application/x-www-form-urlencoded"),
    ] {
        // The type is looked at before the size, both before the key.
        request(wrong, big.clone())
            .await
            .is_problem(415, "unsupported-media-type");
    }
    request(Some("application/json"), big)
        .await
        .is_problem(413, "body-too-large");
    let missing = request(Some("application/json; charset=utf-8"), ALL.to_owned()).await;
    missing.is_problem(400, "idempotency-key-missing");
}

#[tokio::test]
async fn who_is_asking_must_be_known_and_have_the_role() {
    let (server, token) = with_sample().await;
    let job = server.post(&token, "k", ALL).await.text("job_id");
    let with = |value: Option<String>| {
        let mut request = server.get(&format!("/exports/{job}"));
        if let Some(value) = value {
            request = request.header("Authorization", value);
        }
        answer(request)
    };
    for bad in [
        None,
        Some(String::new()),
        Some("Bearer".to_owned()),
        Some("Bearer ".to_owned()),
        Some(format!("Basic {token}")),
        Some(token.clone()),
        Some(format!("Bearer {token}x")),
        Some(format!("Bearer {}", &token[..47])),
        Some("Bearer eyJhbGciOiJub25lIn0.e30.".to_owned()),
    ] {
        let refused = with(bad).await;
        refused.is_problem(401, "unauthorized");
        assert_eq!(refused.header("www-authenticate"), "Bearer");
    }
    assert_eq!(with(Some(format!("bearer  {token}"))).await.status, 200);

    let admin = server.token("root", Role::Admin).await;
    let writer = server.token("app", Role::Writer).await;
    for other in [&admin, &writer] {
        server
            .post(other, "k", ALL)
            .await
            .is_problem(403, "role-insufficient");
        server
            .status(other, &job)
            .await
            .is_problem(403, "role-insufficient");
    }
    let path = format!("/admin/exports/{job}/revoke");
    for other in [&token, &writer] {
        let refused = server
            .admin("POST", &path, other, json!({"reason": "r"}))
            .await;
        refused.is_problem(403, "role-insufficient");
    }
    let disable = json!({"enabled": false});
    let disabled = server
        .admin("PUT", "/admin/accounts/alice", &admin, disable)
        .await;
    assert_eq!(disabled.body, json!({"user": "alice", "enabled": false}));
    server
        .status(&token, &job)
        .await
        .is_problem(403, "account-disabled");
    server
        .post(&token, "k2", ALL)
        .await
        .is_problem(403, "account-disabled");
    let enable = json!({"enabled": true});
    server
        .admin("PUT", "/admin/accounts/alice", &admin, enable)
        .await;
    assert_eq!(server.status(&token, &job).await.status, 200);
}

#[tokio::test]
async fn another_users_export_and_one_that_does_not_exist_look_the_same() {
    let (server, token) = with_sample().await;
    let job = server.post(&token, "k", ALL).await.text("job_id");
    let mallory = server.token("mallory", Role::User).await;
    let nothing = "aaaaaaaaaaaaaaaaaaaaaaaaaa";
    let mut bodies = Vec::new();
    for id in [
        job.as_str(),
        nothing,
        "x",
        "..%2f..%2fetc",
        "%ff",
        &"a".repeat(300),
    ] {
        let mut missing = server.status(&mallory, id).await;
        missing.is_problem(404, "not-found");
        missing.body["request_id"] = Value::Null;
        bodies.push(missing.body.to_string());
    }
    bodies.dedup();
    assert_eq!(bodies.len(), 1, "{bodies:?}");
}

#[tokio::test]
async fn the_status_says_how_far_it_is() {
    let (server, token) = with_sample().await;
    let job = server.post(&token, "k", ALL).await.text("job_id");
    let queued = server.status(&token, &job).await;
    assert_eq!(queued.header("retry-after"), "1");
    assert_eq!(
        queued.body,
        json!({
            "job_id": job, "state": "queued", "scope": "all", "format": "jsonl.gz",
            "format_version": 1, "created_at": "2027-01-15T12:00:00.000000Z",
            "started_at": null, "finished_at": null, "expires_at": null, "attempts": 0,
            "progress": {
                "parts_done": 0, "parts_total": null, "messages_done": 0, "messages_total": 930,
            },
        })
    );
    server.clock.advance(Duration::from_secs(60));
    server.work().await;
    let done = server.status(&token, &job).await;
    assert!(done.headers.get("retry-after").is_none());
    let body = &done.body;
    assert_eq!(body["started_at"], "2027-01-15T12:01:00.000000Z");
    assert_eq!(body["expires_at"], "2027-01-22T12:01:00.000000Z");
    assert_eq!(body["attempts"], 1);
    assert_eq!(
        body["progress"],
        json!({"parts_done": 5, "parts_total": 5, "messages_done": 930, "messages_total": 930})
    );
    assert_eq!(
        body["download"]["expires_at"],
        "2027-01-15T12:06:00.000000Z"
    );
    assert_eq!(
        body["downloads"],
        json!({"count": 0, "sources": 0, "last_at": null})
    );
    assert_eq!(body["sha256"].as_str().map(str::len), Some(64));
}

#[tokio::test]
async fn lists_are_newest_first_and_come_in_pages() {
    let server = Server::start(Setup {
        limits: Limits {
            unfinished_per_user: 0,
            exports_per_user_per_day: 0,
        },
        ..Setup::default()
    })
    .await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    let mut made = Vec::new();
    for n in 0..5 {
        made.push(
            server
                .post(&token, &format!("k{n}"), ALL)
                .await
                .text("job_id"),
        );
        server.clock.advance(Duration::from_secs(1));
    }
    made.reverse();
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let path = format!("/exports?limit=2&cursor={cursor}");
        let page = answer(server.get(&path).bearer_auth(&token)).await;
        assert_eq!(page.status, 200, "{:?}", page.body);
        for export in page.body["exports"].as_array().expect("a list") {
            seen.push(export["job_id"].as_str().expect("an id").to_owned());
        }
        match page.body["next"].as_str() {
            Some(next) => next.clone_into(&mut cursor),
            None => break,
        }
    }
    assert_eq!(seen, made);
    for bad in [
        "limit=0",
        "limit=201",
        "limit=x",
        "limit=%ff",
        "limit=1&limit=2",
        "cursor=!",
        "page=2",
    ] {
        let refused = answer(server.get(&format!("/exports?{bad}")).bearer_auth(&token)).await;
        refused.is_problem(400, "request-invalid");
    }
    let mallory = server.token("mallory", Role::User).await;
    let none = answer(server.get("/exports").bearer_auth(&mallory)).await;
    assert_eq!(none.body, json!({"exports": [], "next": null}));
}

#[tokio::test]
async fn the_service_tells_about_itself_without_a_token() {
    let server = Server::start(Setup::default()).await;
    let about = answer(server.get("/")).await;
    assert_eq!(about.body["name"], "ibid");
    assert_eq!(about.body["link_seconds"], 300);
    assert_eq!(about.body["idempotency_key"]["kept_days"], 90);
    assert_eq!(about.header("vary"), "Accept");
    assert_eq!(answer(server.get("/healthz")).await.status, 200);
    assert_eq!(answer(server.get("/readyz")).await.status, 200);
    answer(server.get("/nowhere"))
        .await
        .is_problem(404, "not-found");
    let wrong = answer(server.client.delete(server.url("/exports"))).await;
    wrong.is_problem(405, "method-not-allowed");
    assert!(
        wrong.header("allow").contains("POST"),
        "{:?}",
        wrong.headers
    );
}

#[tokio::test]
async fn public_url_makes_links_absolute() {
    let server = Server::start(Setup {
        public_url: Some("https://chat.example/export".to_owned()),
        ..Setup::default()
    })
    .await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    let done = server.export(&token, "k").await;
    let url = done["download"]["url"].as_str().expect("a link");
    assert!(
        url.starts_with("https://chat.example/export/download/"),
        "{url}"
    );
}

#[tokio::test]
async fn an_owner_withdraws_an_export_and_nobody_else_does() {
    let (server, alice) = with_sample().await;
    let bob = server.token("bob", Role::User).await;
    let admin = server.token("root", Role::Admin).await;
    let withdraw = async |token: &str, job: &str| {
        let path = server.url(&format!("/exports/{job}"));
        answer(server.client.delete(path).bearer_auth(token)).await
    };
    let done = server.export(&alice, "k1").await;
    let done = done["job_id"].as_str().expect("an id");
    let queued = server.post(&alice, "k2", r#"{"scope":"all"}"#).await;
    let queued = queued.text("job_id");
    let nobodys = "aaaaaaaaaaaaaaaaaaaaaaaaaa";
    for (token, job) in [(&bob, done), (&alice, nobodys), (&alice, "x")] {
        withdraw(token, job).await.is_problem(404, "not-found");
    }
    let refused = withdraw(&admin, done).await;
    refused.is_problem(403, "role-insufficient");
    answer(
        server
            .client
            .delete(server.url(&format!("/exports/{done}"))),
    )
    .await
    .is_problem(401, "unauthorized");

    let status = server.status(&alice, done).await;
    let link = status.body["download"]["url"].as_str().expect("a link");
    for job in [done, &queued] {
        for _ in 0..2 {
            let gone = withdraw(&alice, job).await;
            assert_eq!(gone.status, 204, "{:?}", gone.body);
            assert!(gone.bytes.is_empty());
        }
        let status = server.status(&alice, job).await;
        assert_eq!(status.body["state"], "revoked");
        assert_eq!(status.body["revoked"]["by"], "owner");
        assert!(status.body.get("download").is_none());
    }
    answer(server.get(link))
        .await
        .is_problem(410, "export-revoked");
    let kept = server.exporter.vault.jobs().await.expect("listed");
    assert_eq!(kept, []);
    // Another one needs another key, and is another one.
    let replayed = server.post(&alice, "k1", r#"{"scope":"all"}"#).await;
    assert_eq!(
        (replayed.status, replayed.text("state").as_str()),
        (200, "revoked")
    );
    server.export(&alice, "k3").await;
    let admins = format!("/admin/exports/{done}/restore");
    let restored = server.admin("POST", &admins, &admin, json!({})).await;
    restored.is_problem(409, "not-restorable");
}

#[tokio::test]
async fn the_metrics_count_what_happened_and_say_what_waits() {
    let (server, alice) = with_sample().await;
    let metrics = async || {
        let answer = answer(server.get("/metrics")).await;
        assert_eq!(answer.status, 200);
        assert!(
            answer
                .header("content-type")
                .starts_with("application/openmetrics-text")
        );
        let text = String::from_utf8(answer.bytes).expect("UTF-8");
        assert!(text.ends_with("# EOF\n"), "{text}");
        move |line: &str| {
            assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
        }
    };
    let says = metrics().await;
    says("ibid_queue_depth{state=\"queued\"} 0");
    says("ibid_queue_age_seconds 0.0");
    let queued = server.post(&alice, "k1", r#"{"scope":"all"}"#).await;
    server.clock.advance(Duration::from_secs(90));
    let says = metrics().await;
    says("ibid_queue_depth{state=\"queued\"} 1");
    says("ibid_queue_depth{state=\"waiting\"} 0");
    says("ibid_queue_age_seconds 90.0");
    server.work().await;
    let done = server.status(&alice, &queued.text("job_id")).await;
    let url = done.body["download"]["url"].as_str().expect("a link");
    let whole = answer(server.get(url)).await;
    let part = answer(server.get(url).header("Range", "bytes=0-9")).await;
    assert_eq!((whole.status, part.status), (200, 206));
    let forged = answer(server.get(&format!("{url}x"))).await;
    assert_eq!(forged.status, 403);
    let says = metrics().await;
    says("ibid_queue_depth{state=\"queued\"} 0");
    says("ibid_downloads_total{status=\"200\"} 1");
    says("ibid_downloads_total{status=\"206\"} 1");
    says("ibid_downloads_total{status=\"403\"} 1");
    let sent = whole.bytes.len() + 10;
    says(&format!("ibid_download_bytes_total {sent}"));
}

#[tokio::test]
async fn every_kind_of_problem_is_described_at_its_address() {
    let server = Server::start(Setup::default()).await;
    for kind in ibid_server::api::problem::kinds::ALL {
        let address = format!("/problems/{}", kind.name);
        let described = answer(server.get(&address)).await;
        assert_eq!(described.status, 200, "{address}");
        assert_eq!(described.header("vary"), "Accept");
        assert_eq!(described.text("type"), address);
        assert_eq!(described.text("title"), kind.title);
        assert_eq!(described.body["status"], kind.status.as_u16());
        let page = server.get(&address).header("Accept", "text/html,*/*;q=0.8");
        let page = answer(page).await;
        assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
        let text = String::from_utf8(page.bytes.clone()).expect("UTF-8");
        assert!(text.contains(&format!("<h1>{}</h1>", kind.title)), "{text}");
    }
    let unknown = answer(server.get("/problems/other")).await;
    unknown.is_problem(404, "not-found");
}
