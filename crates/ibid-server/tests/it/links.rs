//! A link is short-lived, bound to job and user, and no authorisation.

use std::time::Duration;

use ibid::ledger::Role;
use serde_json::{Value, json};

use crate::harness::{Answer, Server, Setup, answer, sample};

struct Linked {
    server: Server,
    token: String,
    admin: String,
    job: String,
    url: String,
}

async fn linked() -> Linked {
    let server = Server::start(Setup::default()).await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    let admin = server.token("root", Role::Admin).await;
    let document = server.export(&token, "k").await;
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    Linked {
        job: text(&document["job_id"]),
        url: text(&document["download"]["url"]),
        server,
        token,
        admin,
    }
}

impl Linked {
    async fn fetch(&self, url: &str) -> Answer {
        answer(self.server.get(url)).await
    }

    async fn admin(&self, method: &str, path: &str, body: Value) -> Answer {
        self.server.admin(method, path, &self.admin, body).await
    }
}

#[tokio::test]
async fn an_altered_link_is_refused_whichever_byte_it_is() {
    let linked = linked().await;
    let at = linked.url.find("sig=").expect("a signature") + 4;
    assert_eq!(linked.url.len() - at, 43);
    for place in at..linked.url.len() {
        for with in ["A", "B", "_"] {
            let mut altered = linked.url.clone();
            altered.replace_range(place..=place, with);
            if altered != linked.url {
                linked.fetch(&altered).await.is_problem(403, "link-invalid");
            }
        }
    }
    let other_job = linked
        .url
        .replace(&linked.job, "aaaaaaaaaaaaaaaaaaaaaaaaaa");
    for altered in [
        linked.url.replace("u=alice", "u=bob"),
        linked.url.replace("exp=1", "exp=2"),
        other_job,
        format!("{}&x=1", linked.url),
        format!("{}&u=alice", linked.url),
        linked.url.split('?').next().expect("a path").to_owned(),
        format!(
            "/download/x?{}",
            linked.url.split('?').nth(1).expect("a query")
        ),
    ] {
        linked.fetch(&altered).await.is_problem(403, "link-invalid");
    }
    assert_eq!(linked.fetch(&linked.url).await.status, 200);
}

#[tokio::test]
async fn a_link_ends_at_its_second_and_a_fresh_one_goes_on() {
    let linked = linked().await;
    let etag = linked.fetch(&linked.url).await.header("etag").to_owned();
    linked.server.clock.advance(Duration::from_secs(300));
    assert_eq!(linked.fetch(&linked.url).await.status, 200);
    linked.server.clock.advance(Duration::from_secs(1));
    linked
        .fetch(&linked.url)
        .await
        .is_problem(403, "link-expired");
    // Altered and expired: what it says of itself is not believed.
    let altered = linked.url.replace("u=alice", "u=bob");
    linked.fetch(&altered).await.is_problem(403, "link-invalid");
    let status = linked.server.status(&linked.token, &linked.job).await;
    let fresh = status.body["download"]["url"]
        .as_str()
        .expect("a link")
        .to_owned();
    assert_ne!(fresh, linked.url);
    assert_eq!(linked.fetch(&fresh).await.header("etag"), etag);
}

#[tokio::test]
async fn a_good_link_of_another_user_is_refused() {
    let linked = linked().await;
    // A genuine signature for the right user and another job, and for another user's own job.
    let bob = linked.server.token("bob", Role::User).await;
    let of_bob = linked.server.export(&bob, "k").await;
    let url = of_bob["download"]["url"].as_str().expect("a link");
    assert_eq!(linked.fetch(url).await.status, 200);
    let job = of_bob["job_id"].as_str().expect("an id");
    let swapped = url.replace(job, &linked.job);
    linked.fetch(&swapped).await.is_problem(403, "link-invalid");
}

#[tokio::test]
async fn disabling_revoking_and_restoring_take_effect_at_once() {
    let linked = linked().await;
    let disable = json!({"enabled": false});
    let enable = json!({"enabled": true});
    let revoke = format!("/admin/exports/{}/revoke", linked.job);
    let restore = format!("/admin/exports/{}/restore", linked.job);

    linked
        .admin("PUT", "/admin/accounts/alice", disable.clone())
        .await;
    linked
        .fetch(&linked.url)
        .await
        .is_problem(403, "account-disabled");
    linked
        .admin("PUT", "/admin/accounts/alice", enable.clone())
        .await;
    assert_eq!(linked.fetch(&linked.url).await.status, 200);

    let revoked = linked
        .admin("POST", &revoke, json!({"reason": "leaver"}))
        .await;
    assert_eq!(revoked.status, 200);
    assert_eq!(revoked.body["state"], "revoked");
    assert_eq!(revoked.body["user"], "alice");
    assert!(!String::from_utf8_lossy(&revoked.bytes).contains("sig="));
    linked
        .fetch(&linked.url)
        .await
        .is_problem(410, "export-revoked");
    let status = linked.server.status(&linked.token, &linked.job).await.body;
    assert_eq!(status["state"], "revoked");
    assert_eq!(status["revoked"]["by"], "admin");
    assert_eq!(status["revoked"]["reason"], "leaver");
    assert!(status.get("download").is_none());

    let restored = linked.admin("POST", &restore, Value::Null).await;
    assert_eq!(
        (restored.status, &restored.body["state"]),
        (200, &json!("done"))
    );
    assert_eq!(linked.fetch(&linked.url).await.status, 200);
    linked
        .admin("POST", &restore, Value::Null)
        .await
        .is_problem(409, "not-restorable");
    linked.admin("PUT", "/admin/accounts/alice", disable).await;
    linked
        .fetch(&linked.url)
        .await
        .is_problem(403, "account-disabled");
    linked.admin("PUT", "/admin/accounts/alice", enable).await;

    // Disabled and revoked: the account is looked at first.
    linked
        .admin("POST", &revoke, json!({"reason": "again"}))
        .await;
    linked
        .admin("PUT", "/admin/accounts/alice", json!({"enabled": false}))
        .await;
    linked
        .fetch(&linked.url)
        .await
        .is_problem(403, "account-disabled");
}

#[tokio::test]
async fn an_export_whose_bytes_are_gone_cannot_be_restored() {
    let linked = linked().await;
    let path = format!("/admin/exports/{}", linked.job);
    let reason = json!({"reason": "r"});
    linked
        .admin("POST", &format!("{path}/revoke"), reason)
        .await;
    let job = linked
        .server
        .folder
        .path()
        .join("artifacts")
        .join(&linked.job);
    std::fs::remove_dir_all(job).expect("removed");
    let refused = linked
        .admin("POST", &format!("{path}/restore"), Value::Null)
        .await;
    refused.is_problem(409, "not-restorable");
}

#[tokio::test]
async fn an_export_that_is_not_done_or_no_longer_kept_is_not_served() {
    let linked = linked().await;
    let job = linked
        .server
        .post(&linked.token, "k2", r#"{"scope":"all"}"#)
        .await
        .text("job_id");
    let found = linked
        .server
        .exporter
        .ledger
        .find(ibid::ids::JobId::parse(&job).unwrap())
        .await;
    let export = found.expect("found").expect("there").export;
    let keys = std::fs::read_to_string(linked.server.folder.path().join("keys")).expect("keys");
    let ring = ibid::link::KeyRing::parse(&keys).expect("a ring");
    let (query, _) = linked
        .server
        .exporter
        .link(&ring, &export, linked.server.clock.now());
    let early = format!("/download/{job}?{query}");
    linked
        .fetch(&early)
        .await
        .is_problem(409, "export-not-ready");

    linked
        .server
        .clock
        .advance(Duration::from_secs(7 * 86_400 - 1));
    let status = linked.server.status(&linked.token, &linked.job).await;
    assert_eq!(status.body["state"], "done");
    let last = status.body["download"]["url"]
        .as_str()
        .expect("a link")
        .to_owned();
    assert_eq!(linked.fetch(&last).await.status, 200);
    linked.server.clock.advance(Duration::from_secs(1));
    linked.fetch(&last).await.is_problem(410, "export-expired");
    let status = linked.server.status(&linked.token, &linked.job).await;
    assert_eq!(status.body["state"], "expired");
    assert_eq!(
        linked
            .server
            .post(&linked.token, "k", r#"{"scope":"all"}"#)
            .await
            .body["state"],
        "expired"
    );
}

#[tokio::test]
async fn admins_get_clear_answers() {
    let linked = linked().await;
    let nothing = "/admin/exports/aaaaaaaaaaaaaaaaaaaaaaaaaa/revoke";
    linked
        .admin("POST", nothing, json!({"reason": "r"}))
        .await
        .is_problem(404, "not-found");
    let revoke = format!("/admin/exports/{}/revoke", linked.job);
    for bad in [
        json!({}),
        json!({"reason": ""}),
        json!({"reason": 1}),
        json!({"why": "x"}),
        json!([]),
    ] {
        linked
            .admin("POST", &revoke, bad)
            .await
            .is_problem(400, "request-invalid");
    }
    for bad in [
        json!({}),
        json!({"enabled": "no"}),
        json!({"enabled": true, "x": 1}),
    ] {
        let refused = linked.admin("PUT", "/admin/accounts/alice", bad).await;
        refused.is_problem(400, "request-invalid");
    }
    let odd = linked
        .admin(
            "PUT",
            "/admin/accounts/Zo%C3%AB%20%26",
            json!({"enabled": false}),
        )
        .await;
    assert_eq!(odd.body["user"], "Zoë &");
}

#[tokio::test]
async fn a_failed_export_can_be_tried_again_and_no_other() {
    let linked = linked().await;
    let done = format!("/admin/exports/{}/retry", linked.job);
    linked
        .admin("POST", &done, Value::Null)
        .await
        .is_problem(409, "state-conflict");
    let all = r#"{"scope":"all"}"#;
    let job = linked
        .server
        .post(&linked.token, "k2", all)
        .await
        .text("job_id");
    // Somebody takes a message out of the log, and puts it back once that was noticed.
    let path = linked.server.folder.path().join("ibid.db");
    let log = rusqlite::Connection::open(path).expect("opened");
    let change = |sql: &str| log.execute_batch(sql).expect("changed");
    change("CREATE TABLE kept AS SELECT * FROM message WHERE conv = 'c-team' AND seq = 60");
    change("DELETE FROM message WHERE conv = 'c-team' AND seq = 60");
    linked.server.work().await;
    let failed = linked.server.status(&linked.token, &job).await.body;
    assert_eq!(
        (&failed["state"], &failed["error"]["type"]),
        (&json!("failed"), &json!("log-changed"))
    );
    change("INSERT INTO message SELECT * FROM kept");
    let retry = format!("/admin/exports/{job}/retry");
    let queued = linked.admin("POST", &retry, Value::Null).await;
    assert_eq!(
        (queued.status, &queued.body["state"]),
        (200, &json!("queued"))
    );
    linked.server.work().await;
    let again = linked.server.status(&linked.token, &job).await.body;
    assert_eq!(
        (&again["state"], &again["messages"]),
        (&json!("done"), &json!(930))
    );
}
