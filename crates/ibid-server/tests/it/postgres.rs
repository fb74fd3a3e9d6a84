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

/// Copies the whole database of one server into another, as a backup is restored.
fn dump_and_restore(from: &str, to: &str) {
    let script = format!("pg_dump '{from}' | psql -q -v ON_ERROR_STOP=1 '{to}' >/dev/null");
    let status = std::process::Command::new("bash")
        .args(["-o", "pipefail", "-c", &script])
        .status();
    assert!(status.expect("it runs").success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_dump_creates_and_makes_nothing_until_it_is_adopted_and_then_whole_exports() {
    let (Some(old), Some(new)) = (
        PgServer::start("a dump"),
        PgServer::start("a restored dump"),
    ) else {
        return;
    };
    let place = Place::new();
    // The servers are copies of one cluster, which is told by the database alone.
    new.create_database("restored").await;
    let (from, to) = (old.url("postgres"), new.url("restored"));
    let run = |url: &str, arguments: &[&str]| {
        let ran = place.run(&[arguments, &["--database", url]].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.out
    };
    run(&from, &["admin", "migrate"]);
    let chat = place.write("chat.jsonl", &sample());
    run(&from, &["import", &chat]);
    let token = run(&from, &["token", "create", "--user", "alice"]);
    let token = token.trim();
    let serve = |url| {
        place.serve(&[
            "--workers",
            "0",
            "--part-messages",
            "200",
            "--database",
            url,
        ])
    };
    let served = serve(&from);
    let before = served
        .post(token, "k", &json!({"scope": "all"}))
        .await
        .text("job_id");
    assert_eq!(served.process.terminate().0, Some(0));
    dump_and_restore(&from, &to);

    let served = serve(&to);
    let later = place.write("later.jsonl", &[message("c-team", "after the restore")]);
    run(&to, &["import", &later]);
    let doctor = place.run(&["doctor", "--database", &to]);
    assert_eq!(doctor.code, Some(1), "{doctor:?}");
    assert!(
        doctor.out.contains("failure  database: it is not the one"),
        "{doctor:?}"
    );
    let refused = served.post(token, "k2", &json!({"scope": "all"})).await;
    refused.is_problem(503, "unavailable");
    assert!(
        refused.text("detail").contains("ibid admin adopt"),
        "{:?}",
        refused.body
    );
    // Nor is what it was told of worked on: the original may be doing that.
    for arguments in [&["worker", "--until-idle"][..], &["admin", "sweep"]] {
        let refused = place.run(&[arguments, &["--database", &to]].concat());
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.err.contains("ibid admin adopt"), "{refused:?}");
        assert_eq!(refused.out, "", "{refused:?}");
    }
    let adopted = run(&to, &["admin", "adopt"]);
    assert!(adopted.contains("--artifacts"), "{adopted}");
    let doctor = run(&to, &["doctor"]);
    assert!(doctor.contains("ok       database: "), "{doctor}");
    assert!(
        doctor.contains("warning  database: fsync is off"),
        "{doctor}"
    );
    assert!(doctor.contains("messages in 3 conversations"), "{doctor}");
    run(
        &to,
        &[
            "import",
            &place.write("last.jsonl", &[message("c-team", "the last one")]),
        ],
    );
    let after = served.post(token, "k2", &json!({"scope": "all"})).await;
    assert_eq!(after.status, 202, "{:?}", after.body);
    let after = after.text("job_id");
    // Written above all that any snapshot has looked at, so in neither of them.
    run(
        &to,
        &[
            "import",
            &place.write("late.jsonl", &[message("c-team", "too late")]),
        ],
    );
    run(&to, &["worker", "--until-idle"]);
    let done = |body: &Value| body["state"] == "done";
    let old_job = served.wait(token, &before, done).await;
    assert_eq!(old_job["messages"], 930);
    assert_eq!(served.wait(token, &after, done).await["messages"], 932);

    let sqlite = Place::new();
    sqlite.import("chat.jsonl", &sample());
    let elsewhere = sqlite.serve(&["--part-messages", "200"]);
    let token = sqlite.token("alice");
    let job = elsewhere
        .post(&token, "k", &json!({"scope": "all"}))
        .await
        .text("job_id");
    let same = elsewhere.wait(&token, &job, done).await;
    assert_eq!(same["sha256"], old_job["sha256"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_hears_of_jobs_that_others_create_also_after_its_connection_was_lost() {
    let Some(server) = PgServer::start("a worker that hears") else {
        return;
    };
    let place = Place::new();
    let url = server.url("postgres");
    let on = ["--database", &url];
    let served = place.serve(&[&["--migrate", "--workers", "0"], &on[..]].concat());
    let chat = place.write("chat.jsonl", &sample());
    place.run(&[&["import", &chat], &on[..]].concat());
    let token = place.run(&[&["token", "create", "--user", "alice"], &on[..]].concat());
    let token = token.out.trim();
    let worker = place.start(&[&["worker", "--poll-seconds", "3600"], &on[..]].concat());
    let done = async |key: &str| {
        let job = served
            .post(token, key, &json!({"scope": "all"}))
            .await
            .text("job_id");
        served
            .wait(token, &job, |status| status["state"] == "done")
            .await;
    };
    // The first may be found by the look that every worker begins with, the second may not.
    done("k1").await;
    done("k2").await;
    let client = server.connect("postgres").await;
    let ended = client
        .execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE query = 'LISTEN ibid_jobs'",
            &[],
        )
        .await;
    assert_eq!(ended.expect("ended"), 1);
    done("k3").await;
    assert_eq!(worker.terminate().0, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_may_lie_in_another_database_than_the_ledger() {
    let Some(server) = PgServer::start("log and ledger apart") else {
        return;
    };
    let mut hashes = Vec::new();
    for (database, source) in [
        (None, Some("log1")),
        (Some("ledger2"), None),
        (Some("ledger3"), Some("log3")),
        (None, None),
    ] {
        for name in [database, source].into_iter().flatten() {
            server.create_database(name).await;
        }
        let place = Place::new();
        let own = format!("sqlite:{}", place.data().join("log.db").display());
        let (database_url, source_url) = (
            database.map(|name| server.url(name)),
            source.map(|name| server.url(name)),
        );
        let mut on = vec!["--source", source_url.as_deref().unwrap_or(&own)];
        if let Some(url) = &database_url {
            on.extend(["--database", url]);
        }
        let run = |arguments: &[&str], code: i32| {
            let ran = place.run(&[arguments, &on[..]].concat());
            assert_eq!(ran.code, Some(code), "{ran:?}");
            ran.out
        };
        run(&["admin", "migrate"], 0);
        let chat = place.write("chat.jsonl", &sample());
        run(&["import", &chat], 0);
        let token = run(&["token", "create", "--user", "alice"], 0);
        let served = place.serve(&[&["--workers", "0"], &on[..]].concat());
        let body = json!({"scope": "all"});
        let job = served.post(token.trim(), "k1", &body).await;
        assert_eq!(job.status, 202, "{:?}", job.body);
        let doctor = run(&["doctor"], 0);
        assert!(doctor.contains("knows of all 1 exports"), "{doctor}");
        assert!(doctor.contains("ok       source: "), "{doctor}");
        assert!(
            doctor.contains("messages in 3 conversations; 1 exp"),
            "{doctor}"
        );
        run(&["worker", "--until-idle"], 0);
        let done = served
            .wait(token.trim(), &job.text("job_id"), |status| {
                status["state"] == "done"
            })
            .await;
        hashes.push(done["sha256"].clone());
        let kept = served.post(token.trim(), "k2", &body).await.text("job_id");
        let lost = match source {
            Some(name) => {
                let client = server.connect(name).await;
                client.execute("DELETE FROM ibid.pin", &[]).await
            }
            None => {
                let file = rusqlite::Connection::open(place.data().join("log.db"));
                let deleted = file.expect("a file").execute("DELETE FROM pin", []);
                Ok(deleted.expect("deleted") as u64)
            }
        };
        // Of the one that is done, too.
        assert_eq!(lost.expect("deleted"), 2);
        let doctor = run(&["doctor"], 1);
        assert!(
            doctor.contains("failure  pins: the log does not"),
            "{doctor}"
        );
        run(&["worker", "--until-idle"], 0);
        let failed = served
            .wait(token.trim(), &kept, |status| status["state"] == "failed")
            .await;
        assert_eq!(failed["error"]["type"], "source-lost-history");
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
}

/// Puts the tables of the log behind views, as an application's own would be.
const OWN_TABLES: &str = "
CREATE SCHEMA own;
ALTER TABLE ibid.message SET SCHEMA own;
ALTER TABLE ibid.revision SET SCHEMA own;
ALTER TABLE ibid.stay SET SCHEMA own;
ALTER TABLE ibid.conv SET SCHEMA own;
ALTER TABLE ibid.account SET SCHEMA own;
CREATE VIEW ibid.message AS SELECT * FROM own.message;
CREATE VIEW ibid.revision AS SELECT * FROM own.revision;
CREATE VIEW ibid.stay AS SELECT conv, user_id, from_gseq, to_gseq FROM own.stay;
CREATE VIEW ibid.conv AS SELECT conv, history, ex_members FROM own.conv;
CREATE VIEW ibid.account AS SELECT * FROM own.account";

#[tokio::test(flavor = "multi_thread")]
async fn a_log_of_the_application_s_own_is_read_and_looked_at_and_never_written() {
    let Some(server) = PgServer::start("a log of the application's own") else {
        return;
    };
    let place = Place::new();
    let url = server.url("postgres");
    let run = |arguments: &[&str]| place.run(&[arguments, &["--database", &url]].concat());
    assert_eq!(run(&["admin", "migrate"]).code, Some(0));
    let chat = place.write("chat.jsonl", &sample());
    assert_eq!(run(&["import", &chat]).code, Some(0));
    let client = server.connect("postgres").await;
    client.batch_execute(OWN_TABLES).await.expect("done");

    let later = place.write("later.jsonl", &[message("c-team", "later")]);
    for (refused, why) in [
        (vec!["import", &later], "append there"),
        (vec!["demo"], "give it an empty database"),
        (
            vec!["admin", "disable", "alice"],
            "disable or enable the account there",
        ),
    ] {
        let refused = run(&refused);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.err.contains(why), "{refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    }

    let doctor = || {
        let ran = run(&["doctor", "--json"]);
        let lines = ran
            .out
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let lines: Vec<Value> = lines.collect();
        let own = lines.iter().filter(|line| line["check"] == "own tables");
        let own = own.map(|line| (line["result"].to_string(), line["text"].to_string()));
        let log = lines.iter().find(|line| line["check"] == "log").cloned();
        (ran.code, own.collect::<Vec<_>>(), log)
    };
    let (code, own, log) = doctor();
    assert_eq!((code, own.len()), (Some(0), 1), "{own:?}");
    assert_eq!(own[0].0, "\"ok\"");
    assert!(
        own[0]
            .1
            .contains("message, revision, stay, conv, account are views over own.message")
    );
    let text = log.expect("a line")["text"].to_string();
    assert!(text.contains("messages in 3 conversations"), "{text}");
    let told: u64 = text
        .trim_matches('"')
        .split(' ')
        .next()
        .expect("a number")
        .parse()
        .expect("one");
    let counted = client
        .query_one("SELECT count(*) FROM own.message", &[])
        .await;
    assert_eq!(told as i64, counted.expect("counted").get::<_, i64>(0));

    let broken = "ALTER TABLE own.message ALTER COLUMN xid DROP DEFAULT;
                  DROP VIEW ibid.stay";
    client.batch_execute(broken).await.expect("done");
    let (code, own, log) = doctor();
    assert_eq!((code, log), (Some(1), None), "{own:?}");
    let said = |part: &str| {
        own.iter()
            .any(|(result, text)| result == "\"failure\"" && text.contains(part))
    };
    assert!(said("own.message.xid must be filled by"), "{own:?}");
    assert!(said("ibid.stay is missing"), "{own:?}");
    let mended = "ALTER TABLE own.message ALTER COLUMN xid SET DEFAULT pg_current_xact_id();
                  CREATE VIEW ibid.stay AS SELECT conv, user_id, from_gseq, to_gseq FROM own.stay";
    client.batch_execute(mended).await.expect("done");

    let token = run(&["token", "create", "--user", "alice"]);
    let served = place.serve(&["--database", &url]);
    let token = token.out.trim();
    let job = served
        .post(token, "k", &json!({"scope": "all"}))
        .await
        .text("job_id");
    let done = served
        .wait(token, &job, |status| status["state"] == "done")
        .await;
    assert_eq!(done["messages"], 930);
}
