//! `GET /exports/{id}/events`: server-sent events.

use std::time::Duration;

use ibid::ledger::Role;
use reqwest::Response;
use serde_json::Value;

use crate::harness::{Server, Setup, answer, sample};

/// A stream of events, as a browser reads it.
struct Stream {
    response: Response,
    text: String,
}

#[derive(Debug, Default)]
struct Received {
    name: String,
    id: String,
    retry: String,
    data: Value,
}

impl Stream {
    async fn open(server: &Server, token: &str, job: &str, last: Option<&str>) -> Stream {
        let mut request = server.get(&format!("/exports/{job}/events"));
        request = request.bearer_auth(token);
        if let Some(last) = last {
            request = request.header("Last-Event-ID", last);
        }
        let response = request.send().await.expect("an answer");
        let text = String::new();
        Stream { response, text }
    }

    /// The next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Received> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let received = parse(event);
                self.text = rest.to_owned();
                if received.name.is_empty() {
                    // A comment that keeps the connection alive.
                    continue;
                }
                return Some(received);
            }
            let chunk = self.response.chunk().await.expect("the stream goes on")?;
            self.text += str::from_utf8(&chunk).expect("UTF-8");
        }
    }
}

fn parse(event: &str) -> Received {
    let mut received = Received::default();
    for line in event.lines() {
        match line.split_once(": ") {
            Some(("event", name)) => received.name = name.to_owned(),
            Some(("id", id)) => received.id = id.to_owned(),
            Some(("retry", retry)) => received.retry = retry.to_owned(),
            Some(("data", data)) => received.data = serde_json::from_str(data).expect("JSON"),
            _ => assert!(line.starts_with(':'), "{line}"),
        }
    }
    received
}

struct Asked {
    server: Server,
    token: String,
    job: String,
}

async fn asked() -> Asked {
    let server = Server::start(Setup::default()).await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    let created = server.post(&token, "k", r#"{"scope":"all"}"#).await;
    Asked {
        job: created.text("job_id"),
        server,
        token,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_shows_what_changes_until_the_state_is_final_and_goes_on_where_it_was() {
    let Asked { server, token, job } = asked().await;
    let mut stream = Stream::open(&server, &token, &job, None).await;
    let headers = stream.response.headers();
    assert_eq!(headers["content-type"], "text/event-stream");
    assert_eq!(headers["cache-control"], "private, no-store");
    let queued = stream.next().await.expect("an event");
    assert_eq!(queued.name, "export");
    assert_eq!(queued.data["state"], "queued");
    assert_eq!(queued.data["job_id"], job.as_str());
    assert_eq!(queued.retry, "2000");

    server.work().await;
    let done = stream.next().await.expect("an event");
    assert_eq!(done.data["state"], "done");
    assert!(done.data["download"]["url"].is_string());
    assert!(done.retry.is_empty());
    assert_ne!(done.id, queued.id);
    assert!(stream.next().await.is_none(), "a final state is the end");

    // Whoever has an older version gets the newest, and whoever has that nothing more.
    let mut again = Stream::open(&server, &token, &job, Some(&queued.id)).await;
    let newest = again.next().await.expect("an event");
    assert_eq!(newest.id, done.id);
    assert_eq!(newest.data["state"], "done");
    let over = Stream::open(&server, &token, &job, Some(&done.id)).await;
    assert_eq!(over.response.status(), 204);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_for_the_owner_alone_and_as_long_as_there_is_a_right_to_it() {
    let Asked { server, token, job } = asked().await;
    let path = format!("/exports/{job}/events");
    answer(server.get(&path))
        .await
        .is_problem(401, "unauthorized");
    let other = server.token("bob", Role::User).await;
    let foreign = answer(server.get(&path).bearer_auth(&other)).await;
    foreign.is_problem(404, "not-found");

    let mut stream = Stream::open(&server, &token, &job, None).await;
    stream.next().await.expect("an event");
    let admin = server.token("root", Role::Admin).await;
    let disable = serde_json::json!({"enabled": false});
    let path = "/admin/accounts/alice";
    let disabled = server.admin("PUT", path, &admin, disable).await;
    assert_eq!(disabled.status, 200);
    assert!(stream.next().await.is_none(), "it ends with the right");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_when_the_server_does() {
    let Asked { server, token, job } = asked().await;
    let mut stream = Stream::open(&server, &token, &job, None).await;
    stream.next().await.expect("an event");
    server.stop();
    let end = tokio::time::timeout(Duration::from_secs(30), stream.next()).await;
    assert!(end.expect("it ends").is_none());
}
