//! `metrics_listen`: a port for those who watch a server, and the only one of a worker.

use std::process::Stdio;
use std::time::Duration;

use crate::harness::{Answer, answer_of_others, sample};
use crate::process::{Place, Running, all, is_done};

/// Asks a port that a process has named in `line`.
async fn ask(line: &str, path: &str) -> Answer {
    let at = line.find("http://");
    let at = at.unwrap_or_else(|| panic!("no address in {line:?}"));
    let base = line[at..].trim().trim_end_matches("/metrics");
    let client = ibid_server::commands::http_client().expect("a client");
    answer_of_others(client.get(format!("{base}{path}"))).await
}

async fn metrics(line: &str) -> Vec<String> {
    let answer = ask(line, "/metrics").await;
    assert_eq!(answer.status, 200);
    let kind = answer.header("content-type");
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    let text = String::from_utf8(answer.bytes).expect("text");
    assert!(text.ends_with("# EOF\n"), "{text}");
    text.lines().map(str::to_owned).collect()
}

fn line(process: &mut Running) -> String {
    tokio::task::block_in_place(|| process.line())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_tells_its_metrics_on_a_port_of_their_own_alone() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let mut served = place.serve(&["--metrics-listen", "127.0.0.1:0"]);
    let watched = line(&mut served.process);
    let token = place.token("alice");
    let none = served.get(&token, "/metrics").await;
    none.is_problem(404, "not-found");
    // A load balancer looks where it sends requests to.
    assert_eq!(served.get(&token, "/readyz").await.status, 200);

    let job = served.post(&token, "k", &all()).await.text("job_id");
    served.wait(&token, &job, is_done).await;
    let told = metrics(&watched).await;
    let line = "ibid_job_attempts_total{outcome=\"done\"} 1";
    assert!(told.iter().any(|told| told == line), "{told:?}");
    for path in ["/healthz", "/readyz"] {
        assert_eq!(ask(&watched, path).await.status, 200, "{path}");
    }
    for path in ["/", "/exports", "/download/x"] {
        ask(&watched, path).await.is_problem(404, "not-found");
    }
    let (code, _) = tokio::task::block_in_place(|| served.process.terminate());
    assert_eq!(code, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_alone_can_be_watched() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let served = place.serve(&["--workers", "0", "--part-messages", "200"]);
    let token = place.token("alice");
    let job = served.post(&token, "k", &all()).await.text("job_id");
    // One that is killed, so that another has something to keep.
    let first = place.start(&["worker", "--hold-after-parts", "2", "--lease-seconds", "1"]);
    let held = |status: &serde_json::Value| status["progress"]["parts_done"] == 2;
    served.wait(&token, &job, held).await;
    tokio::task::block_in_place(|| first.kill());

    let mut worker = place.start(&["worker", "--metrics-listen", "127.0.0.1:0"]);
    let watched = line(&mut worker);
    served.wait(&token, &job, is_done).await;
    // The job is done a moment before its attempt is told of.
    assert!(line(&mut worker).starts_with(&job));
    let counted = async {
        loop {
            let told = metrics(&watched).await;
            if told.iter().any(|told| told == "ibid_parts_written_total 3") {
                return told;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let told = tokio::time::timeout(Duration::from_secs(30), counted).await;
    let told = told.expect("what the worker did is counted");
    for expected in [
        "ibid_job_attempts_total{outcome=\"done\"} 1",
        "ibid_parts_skipped_total 2",
        "ibid_lease_lost_total 0",
        "ibid_job_seconds_count 1",
        "ibid_queue_depth{state=\"queued\"} 0",
        "ibid_queue_age_seconds 0.0",
    ] {
        let is_told = told.iter().any(|told| told == expected);
        assert!(is_told, "no {expected:?} in {told:?}");
    }
    assert_eq!(ask(&watched, "/healthz").await.body["status"], "ok");
    assert_eq!(ask(&watched, "/readyz").await.body["status"], "ready");
    ask(&watched, "/exports").await.is_problem(404, "not-found");
    let (code, _) = tokio::task::block_in_place(|| worker.terminate());
    assert_eq!(code, Some(0));
}

#[test]
fn the_output_of_a_worker_for_programs_holds_attempts_alone() {
    let place = Place::new();
    place.import("chat.jsonl", &sample());
    let ran = place.run(&[
        "worker",
        "--until-idle",
        "--json",
        "--metrics-listen",
        "127.0.0.1:0",
    ]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{ran:?}");
    assert!(ran.err.contains("http://127.0.0.1:"), "{ran:?}");
}

#[test]
fn a_port_of_the_metrics_in_use_is_named() {
    let place = Place::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    for command in ["serve", "worker"] {
        let mut asked = place.command(&[command, "--metrics-listen", &address]);
        let output = asked
            .env("IBID_LISTEN", "127.0.0.1:0")
            .stdout(Stdio::piped())
            .output();
        let output = output.expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("--metrics-listen"), "{said}");
        assert!(said.contains(&address), "{said}");
    }
}
