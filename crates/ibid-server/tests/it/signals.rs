//! Processes that are told to stop, or stand still.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::sample;
use crate::pg_server::PgServer;
use crate::process::{Place, Running, until};

fn is_done(status: &Value) -> bool {
    status["state"] == "done"
}

/// The row of a user is locked by whoever claims a job of his.
#[tokio::test(flavor = "multi_thread")]
async fn one_who_stands_still_in_a_transaction_is_in_nobody_s_way_for_long_and_then_goes_on() {
    let Some(server) = PgServer::start("one who stands still in a transaction") else {
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
    let body = json!({"scope": "all"});
    let first = served.post(token, "k1", &body).await.text("job_id");

    let worker = [&["worker", "--json"], &on[..]].concat();
    let point = "claim.locked:0:stands-still";
    let mut standing = Running::start(place.command(&worker).env("IBID_TEST_FAILPOINT", point));
    until("it stands still", async || standing.stands_still()).await;
    let other = place.start(&worker);
    served.wait(token, &first, is_done).await;
    assert_eq!(other.terminate().0, Some(0));

    // It finds that its claim did not come about, and takes the next job.
    standing.signal(Signal::CONT);
    let second = served.post(token, "k2", &body).await.text("job_id");
    served.wait(token, &second, is_done).await;
    let report: Value = serde_json::from_str(&standing.line()).expect("a report");
    assert_eq!(report["job_id"], second);
    assert_eq!(standing.terminate(), (Some(0), String::new()));
}
