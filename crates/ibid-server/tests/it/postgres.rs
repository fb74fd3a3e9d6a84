//! The process on PostgreSQL: the same story, the same bytes.

use serde_json::{Value, json};

use crate::harness::{join, message, sample};
use crate::pg_server::PgServer;
use crate::process::Place;

#[test]
fn the_demo_plays_through_on_postgresql_and_ends_with_the_bytes_of_sqlite() {
    let Some(server) = PgServer::start("the demo on PostgreSQL") else {
        return;
    };
    let place = Place::new();
    let url = server.url("postgres");
    let ran = place.run(&["demo", "--json", "--database", &url]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let steps: Vec<Value> = ran
        .out
        .lines()
        .map(|line| serde_json::from_str(line).expect("a step"))
        .collect();
    assert!(steps.len() >= 20, "{}", ran.out);
    assert!(steps.iter().all(|step| step["ok"] == true), "{}", ran.out);
    // Once more on the same database: there is a log in it now.
    let again = place.run(&["demo", "--database", &url]);
    assert_eq!(again.code, Some(1), "{again:?}");
    assert!(again.err.contains("empty one"), "{again:?}");
}

#[test]
fn a_database_without_the_schema_or_that_does_not_answer_is_refused_with_what_to_do() {
    let Some(server) = PgServer::start("refusals on PostgreSQL") else {
        return;
    };
    let place = Place::new();
    let url = server.url("postgres");
    let serve = |url: &str| place.run(&["serve", "--listen", "127.0.0.1:0", "--database", url]);
    let missing = serve(&url);
    assert_eq!(missing.code, Some(1), "{missing:?}");
    assert!(missing.err.contains("ibid admin migrate"), "{missing:?}");
    let migrated = place.run(&["admin", "migrate", "--database", &url]);
    assert_eq!(migrated.code, Some(0), "{migrated:?}");
    let again = place.run(&["admin", "migrate", "--database", &url]);
    assert!(again.out.contains("already"), "{again:?}");
    let doctor = place.run(&["doctor", "--database", &url]);
    assert!(doctor.out.contains("PostgreSQL answers"), "{doctor:?}");

    let nobody = serve("postgres://ibid:hunter2@127.0.0.1:9/ibid");
    assert_eq!(nobody.code, Some(1), "{nobody:?}");
    assert!(nobody.err.contains("does not answer"), "{nobody:?}");
    assert!(!nobody.err.contains("hunter2"), "{nobody:?}");
    let config = place.run(&[
        "config",
        "--database",
        "postgres://ibid:hunter2@127.0.0.1:9/ibid",
    ]);
    assert!(!config.out.contains("hunter2"), "{config:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_migrates_and_a_worker_beside_it_share_the_jobs() {
    let Some(server) = PgServer::start("serve and worker on PostgreSQL") else {
        return;
    };
    let (here, there) = (Place::new(), Place::new());
    let url = server.url("postgres");
    let on = ["--database", &url];
    let served = here.serve(
        &[
            &["--migrate", "--workers", "0", "--part-messages", "200"],
            &on[..],
        ]
        .concat(),
    );
    let chat = here.write("chat.jsonl", &sample());
    let imported = here.run(&[&["import", &chat], &on[..]].concat());
    assert_eq!(imported.code, Some(0), "{imported:?}");
    let token = here.run(&[&["token", "create", "--user", "alice"], &on[..]].concat());
    let token = token.out.trim();
    let job = served
        .post(token, "k", &json!({"scope": "all"}))
        .await
        .text("job_id");
    // What is written after the click changes nothing.
    let later = here.write(
        "later.jsonl",
        &[message("c-team", "later"), join("c-private", "alice")],
    );
    here.run(&[&["import", &later], &on[..]].concat());
    let artifacts = format!("file:{}", here.data().join("artifacts").display());
    let worker = there.start(&[&["worker", "--json", "--artifacts", &artifacts], &on[..]].concat());
    let done = served
        .wait(token, &job, |status| status["state"] == "done")
        .await;
    assert_eq!(done["messages"], 930);
    assert_eq!(worker.terminate().0, Some(0));
    let verified = here.run(&[&["verify", &job], &on[..]].concat());
    assert_eq!(verified.code, Some(0), "{verified:?}");

    let sqlite = Place::new();
    sqlite.import("chat.jsonl", &sample());
    let served = sqlite.serve(&["--part-messages", "200"]);
    let token = sqlite.token("alice");
    let job = served
        .post(&token, "k", &json!({"scope": "all"}))
        .await
        .text("job_id");
    let same = served
        .wait(&token, &job, |status| status["state"] == "done")
        .await;
    assert_eq!(same["sha256"], done["sha256"]);
}
