//! `POST /log`: events over HTTP.

use ibid::ledger::Role;
use serde_json::{Value, json};

use crate::harness::{Answer, Server, Setup, answer, event, join, message};

struct Stage {
    server: Server,
    token: String,
}

impl Stage {
    async fn open() -> Stage {
        let server = Server::start(Setup::default()).await;
        let token = server.token("app", Role::Writer).await;
        Stage { server, token }
    }

    async fn post_to(&self, path: &str, body: String) -> Answer {
        let request = self.server.client.post(self.server.url(path));
        let request = request.bearer_auth(&self.token);
        let request = request.header("Content-Type", "application/x-ndjson");
        answer(request.body(body)).await
    }

    async fn post(&self, lines: &[String]) -> Answer {
        self.post_to("/log", lines.join("\n")).await
    }

    /// The lines of an export of alice's.
    async fn export(&self, key: &str) -> Vec<Value> {
        let token = self.server.token("alice", Role::User).await;
        let document = self.server.export(&token, key).await;
        let url = document["download"]["url"].as_str().expect("a link");
        let file = answer(self.server.get(url)).await.bytes;
        crate::harness::lines(&file)
    }
}

fn with_id(id: &str, body: &str) -> String {
    event(json!({"kind": "message", "conv": "c", "user": "bob", "body": body, "id": id}))
}

#[tokio::test]
async fn events_are_taken_in_their_order_and_say_where_they_are() {
    let stage = Stage::open().await;
    let lines = [
        join("c", "alice"),
        String::new(),
        message("c", "one") + "\r",
        with_id("m", "two"),
        join("c", "alice"),
    ];
    let taken = stage.post(&lines).await;
    assert_eq!(taken.status, 200, "{:?}", taken.body);
    assert_eq!(
        taken.body,
        json!({
            "accepted": 3, "duplicates": 0, "unchanged": 1, "skipped": [],
            "assigned": [
                {"line": 3, "conv": "c", "seq": 1},
                {"line": 4, "conv": "c", "seq": 2},
            ],
        })
    );
    // What has an id is recognised when it comes again.
    let again = stage.post(&[with_id("m", "two")]).await;
    assert_eq!(again.body["duplicates"], 1);
    let export = stage.export("k").await;
    let bodies: Vec<_> = export.iter().map(|line| &line["body"]).collect();
    assert_eq!(bodies, ["one", "two"]);
    // Nothing is nothing.
    assert_eq!(stage.post(&[]).await.body["accepted"], 0);
}

#[tokio::test]
async fn one_bad_line_means_that_nothing_is_written_and_all_are_named() {
    let stage = Stage::open().await;
    let recall = event(json!({"kind": "recall", "conv": "c", "seq": 7}));
    let lines = [
        join("c", "alice"),
        "{".to_owned(),
        message("c", "one"),
        recall,
        event(json!({"kind": "message", "conv": "c", "user": "bob", "body": "x", "colour": 1})),
    ];
    let refused = stage.post(&lines).await;
    refused.is_problem(400, "log-invalid");
    let errors = refused.body["errors"].as_array().expect("errors");
    let named: Vec<_> = errors.iter().map(|it| it["line"].as_u64()).collect();
    assert_eq!(named, [Some(2), Some(4), Some(5)]);
    assert_eq!(errors[2]["field"], "colour");
    assert!(errors.iter().all(|it| it["reason"].is_string()));
    let counted = "SELECT count(*) FROM message";
    assert_eq!(count(&stage, counted), 0);

    let taken = stage.post_to("/log?skip_invalid=1", lines.join("\n")).await;
    assert_eq!(taken.status, 200);
    assert_eq!(taken.body["accepted"], 2);
    let skipped = taken.body["skipped"].as_array().expect("skipped lines");
    let named: Vec<_> = skipped.iter().map(|it| it["line"].as_u64()).collect();
    assert_eq!(named, [Some(2), Some(4), Some(5)]);
    assert_eq!(count(&stage, counted), 1);
}

fn count(stage: &Stage, sql: &str) -> u64 {
    let path = stage.server.folder.path().join("ibid.db");
    let database = rusqlite::Connection::open(path).expect("a database");
    database.query_row(sql, [], |row| row.get(0)).expect(sql)
}

#[tokio::test]
async fn what_is_no_log_is_refused() {
    let mut stage = Stage::open().await;
    let unknown = stage.post_to("/log?skip=1", String::new()).await;
    unknown.is_problem(400, "request-invalid");
    let large = stage.post_to("/log", "x".repeat((16 << 20) + 1)).await;
    large.is_problem(413, "body-too-large");
    assert!(large.text("detail").contains("16 MiB"));
    let url = stage.server.url("/log");
    let json = stage.server.client.post(&url).bearer_auth(&stage.token);
    let json = json.header("Content-Type", "application/json").body("{}");
    answer(json).await.is_problem(415, "unsupported-media-type");
    stage.token = stage.server.token("alice", Role::User).await;
    let other = stage.post(&[join("c", "alice")]).await;
    other.is_problem(403, "role-insufficient");
    let nobody = stage.server.client.post(&url);
    answer(nobody).await.is_problem(401, "unauthorized");
}
