//! Many requests at once, and how many exports a user may have.

use std::time::Duration;

use ibid::ledger::Role;
use ibid::limits::Limits;

use super::{ALL, with_sample};
use crate::harness::{Answer, Server, Setup, sample};

async fn at_once(
    server: &Server,
    count: usize,
    of: impl Fn(usize) -> (String, String, String),
) -> Vec<Answer> {
    let requests = (0..count).map(|n| {
        let (token, key, body) = of(n);
        async move { server.post(&token, &key, &body).await }
    });
    futures::future::join_all(requests).await
}

#[tokio::test(flavor = "multi_thread")]
async fn many_posts_at_once_make_the_jobs_that_they_should() {
    let (server, token) = with_sample().await;
    let count =
        |answers: &[Answer], status: u16| answers.iter().filter(|a| a.status == status).count();

    let same = at_once(&server, 64, |_| (token.clone(), "one".into(), ALL.into())).await;
    assert_eq!((count(&same, 202), count(&same, 200)), (1, 63));
    assert!(
        same.iter()
            .all(|answer| answer.body["job_id"] == same[0].body["job_id"])
    );

    let bodies = [
        ALL,
        r#"{"scope":"conv:c-team"}"#,
        r#"{"scope":"conv:c-big"}"#,
    ];
    let different = at_once(&server, 63, |n| {
        (token.clone(), "two".into(), bodies[n % 3].into())
    })
    .await;
    assert_eq!(count(&different, 202), 1);
    assert_eq!((count(&different, 200), count(&different, 422)), (20, 42));

    let dave = server.token("bob", Role::User).await;
    let limited = at_once(&server, 32, |n| (dave.clone(), format!("k{n}"), ALL.into())).await;
    assert_eq!((count(&limited, 202), count(&limited, 429)), (3, 29));
    let refused = limited
        .iter()
        .find(|answer| answer.status == 429)
        .expect("one");
    refused.is_problem(429, "too-many-exports");
    assert_eq!(refused.header("retry-after"), "10");
    // A replay never counts against the limit.
    let accepted = limited
        .iter()
        .position(|answer| answer.status == 202)
        .expect("one");
    assert_eq!(
        server
            .post(&dave, &format!("k{accepted}"), ALL)
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn the_daily_limit_says_when_it_ends() {
    let server = Server::start(Setup {
        limits: Limits {
            unfinished_per_user: 0,
            exports_per_user_per_day: 2,
        },
        ..Setup::default()
    })
    .await;
    server.import(&sample()).await;
    let token = server.token("alice", Role::User).await;
    server.post(&token, "k1", ALL).await;
    server.clock.advance(Duration::from_secs(3600));
    server.post(&token, "k2", ALL).await;
    let refused = server.post(&token, "k3", ALL).await;
    refused.is_problem(429, "too-many-exports");
    assert_eq!(refused.header("retry-after"), (23 * 3600).to_string());
    assert!(
        refused
            .text("detail")
            .contains("2027-01-16T12:00:00.000000Z"),
        "{:?}",
        refused.body
    );
    server.clock.advance(Duration::from_secs(23 * 3600));
    assert_eq!(server.post(&token, "k3", ALL).await.status, 202);
    server
        .post(&token, "k4", ALL)
        .await
        .is_problem(429, "too-many-exports");
}
