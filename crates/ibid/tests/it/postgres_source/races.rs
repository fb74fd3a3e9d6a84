//! Two and more sessions at the same time.

use std::sync::Arc;
use std::time::Duration;

use ibid::append::Outcome;
use ibid::event::Event;
use ibid::source::{Batch, SourceError};
use tokio_postgres::error::SqlState;

use super::{Home, failure, number, run};
use crate::events::{recall, say, with_id};
use crate::harness::until;
use crate::pg_server::PgServer;

/// Waits until a session waits for a lock.
async fn somebody_waits(client: &tokio_postgres::Client) {
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    until("a session waits for a lock", async || {
        number(client, waiting).await > 0
    })
    .await;
}

#[tokio::test]
async fn a_leave_waits_for_the_message_in_flight_and_a_message_for_the_leave() {
    let name = "a_leave_waits_for_the_message_in_flight_and_a_message_for_the_leave";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let (w1, w2) = (server.connect("log").await, server.connect("log").await);
    let watch = server.connect("log").await;
    run(&w1, "SELECT ibid.join_conv('c', 'ann', now())").await;

    run(
        &w1,
        "BEGIN; SELECT ibid.append_message('c', 'bob', now(), 'sent before')",
    )
    .await;
    let leave = async { run(&w2, "SELECT ibid.leave_conv('c', 'ann', now())").await };
    let commit = async {
        somebody_waits(&watch).await;
        run(&w1, "COMMIT").await;
    };
    tokio::join!(leave, commit);
    assert_eq!(home.bodies("ann").await, ["sent before"]);

    run(&w1, "SELECT ibid.join_conv('c', 'ann', now())").await;
    run(&w1, "BEGIN; SELECT ibid.leave_conv('c', 'ann', now())").await;
    let send = async {
        run(
            &w2,
            "SELECT ibid.append_message('c', 'bob', now(), 'after')",
        )
        .await
    };
    let commit = async {
        somebody_waits(&watch).await;
        run(&w1, "COMMIT").await;
    };
    tokio::join!(send, commit);
    assert_eq!(home.bodies("ann").await, ["sent before"]);
}

#[tokio::test]
async fn of_two_joins_at_the_same_time_one_is_an_entry() {
    let Some(server) = PgServer::start("of_two_joins_at_the_same_time_one_is_an_entry") else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let (w1, w2) = (server.connect("log").await, server.connect("log").await);
    let watch = server.connect("log").await;
    // The conversation does not exist yet, which is the harder case.
    run(&w1, "BEGIN; SELECT ibid.join_conv('c', 'ann', now())").await;
    let other = async {
        let row = w2
            .query_one("SELECT ibid.join_conv('c', 'ann', now())", &[])
            .await;
        assert!(!row.unwrap().get::<_, bool>(0));
    };
    let commit = async {
        somebody_waits(&watch).await;
        run(&w1, "COMMIT").await;
    };
    tokio::join!(other, commit);
    assert_eq!(number(&watch, "SELECT count(*) FROM ibid.stay").await, 1);
    run(&w1, "SELECT ibid.append_message('c', 'bob', now(), 'once')").await;
    assert_eq!(home.bodies("ann").await, ["once"]);
}

#[tokio::test]
async fn a_caller_above_read_committed_fails_where_another_has_written_and_never_goes_on() {
    let name = "a_caller_above_read_committed_fails_where_another_has_written";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let _home = Home::new(&server, "log").await;
    let (w1, w2) = (server.connect("log").await, server.connect("log").await);
    run(
        &w1,
        "SELECT ibid.join_conv('c', 'ann', now()),
                ibid.append_message('c', 'bob', now(), 'x', 'm')",
    )
    .await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for call in [
            "ibid.append_message('c', 'bob', now(), 'x')",
            "ibid.append_messages('c', '{bob}', array[now()], '{x}')",
            "ibid.append_edit('c', 1, now(), 'x')",
            "ibid.append_edit('m', now(), 'x')",
            "ibid.append_recall('m', now())",
            "ibid.append_recalls('{c}', '{1}', now())",
            "ibid.append_restore('c', 1, now())",
            "ibid.join_conv('c', 'eve', now())",
            "ibid.leave_conv('c', 'ann', now())",
            "ibid.set_conv('c', 'all', 'none')",
            "ibid.lock_convs('{c}')",
        ] {
            // The other one writes to the conversation with and without a new message.
            for other in [
                "ibid.append_message('c', 'bob', now(), 'between')",
                "ibid.append_edit('c', 1, now(), 'between')",
                "ibid.join_conv('c', 'zoe', now()), ibid.leave_conv('c', 'zoe', now())",
            ] {
                let begin =
                    format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM ibid.conv");
                run(&w1, &begin).await;
                run(&w2, &format!("SELECT {other}")).await;
                let (code, message) = failure(&w1, &format!("SELECT {call}")).await;
                let expected = SqlState::T_R_SERIALIZATION_FAILURE;
                assert_eq!(code, expected, "{level} {call} {other}: {message}");
                run(&w1, "ROLLBACK").await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_that_name_the_same_messages_in_opposite_order_do_not_deadlock() {
    let name = "batches_that_name_the_same_messages_in_opposite_order_do_not_deadlock";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    run(
        &client,
        "SELECT ibid.append_message('c' || n, 'bob', now(), 'x') FROM generate_series(1, 200) n",
    )
    .await;
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'log'";
    for round in 0..10 {
        let (one, other) = (server.connect("log").await, server.connect("log").await);
        let batch = |order: &str| {
            format!(
                "SELECT ibid.append_recalls(array_agg('c' || n ORDER BY n {order}),
                     array_agg(1::bigint), now()) FROM generate_series(1, 200) n"
            )
        };
        let (up, down) = (batch("ASC"), batch("DESC"));
        let source = &home.exporter.source;
        let mut lines: Vec<String> = (1..=200)
            .map(|n| match round % 2 {
                0 => say(&format!("c{n}"), "y"),
                _ => recall(&format!("c{n}"), 1),
            })
            .collect();
        let ascending = batch_of(&lines);
        lines.reverse();
        let descending = batch_of(&lines);
        let (first, second, ..) = tokio::join!(
            source.append(ascending),
            source.append(descending),
            run(&one, &up),
            run(&other, &down)
        );
        first.unwrap();
        second.unwrap();
        run(
            &client,
            "SELECT ibid.append_restore('c' || n, 1, now()) FROM generate_series(1, 200) n",
        )
        .await;
    }
    assert_eq!(number(&client, deadlocks).await, 0);
    let recalls = "SELECT count(*) FROM ibid.revision WHERE kind = 'recall'";
    assert_eq!(number(&client, recalls).await, 2_000);
}

fn batch_of(lines: &[String]) -> Batch {
    let events = lines.iter().zip(1..);
    let events = events.map(|(line, number)| (number, Event::parse(line.as_bytes()).unwrap()));
    Batch {
        events: events.collect(),
        skip_invalid: false,
        import: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_two_batches_use_at_the_same_time_is_taken_once() {
    let Some(server) = PgServer::start("an_id_that_two_batches_use_is_taken_once") else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let source = Arc::clone(&home.exporter.source);
    let (w1, watch) = (server.connect("log").await, server.connect("log").await);
    let same = with_id("m", &say("c", "x"));
    let ts = crate::events::TS;
    let append = format!("BEGIN; SELECT ibid.append_message('c', 'bob', '{ts}', 'x', 'm')");
    run(&w1, &append).await;
    let batch = source.append(batch_of(&[say("d", "before"), same]));
    let commit = async {
        somebody_waits(&watch).await;
        run(&w1, "COMMIT").await;
    };
    let (outcomes, ()) = tokio::join!(batch, commit);
    assert_eq!(outcomes.unwrap()[1], Outcome::Duplicate);

    // In another conversation nothing is waited for but the id.
    run(
        &w1,
        "BEGIN; SELECT ibid.append_message('c', 'bob', now(), 'x', 'n')",
    )
    .await;
    let other = source.append(batch_of(&[
        say("d", "before"),
        with_id("n", &say("e", "y")),
    ]));
    let commit = async {
        somebody_waits(&watch).await;
        run(&w1, "COMMIT").await;
    };
    let (refused, ()) = tokio::join!(other, commit);
    match refused {
        Err(SourceError::Invalid { line: 2, invalid }) => {
            assert_eq!(invalid.field.as_deref(), Some("id"));
        }
        other => panic!("{other:?}"),
    }
    // Nor has a conversation begun whose only event is skipped.
    let mut skipping = batch_of(&[say("d", "kept"), with_id("n", &say("e", "y"))]);
    skipping.skip_invalid = true;
    let outcomes = source.append(skipping).await.unwrap();
    assert!(matches!(outcomes[1], Outcome::Invalid(_)), "{outcomes:?}");
    let convs = "SELECT count(*) FROM ibid.conv WHERE conv = 'e'";
    assert_eq!(number(&watch, convs).await, 0);
}

/// Eight writers send numbered messages, while ann goes in and out: what she sees is what was
/// committed between a join and a leave, and her stays say where that is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ex_member_sees_nothing_from_after_the_leave_however_many_write() {
    let name = "an_ex_member_sees_nothing_from_after_the_leave_however_many_write";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..8 {
        let client = server.connect("log").await;
        writers.spawn(async move {
            for n in 0..60 {
                // What is rolled back draws a gseq too, and some hold theirs for a while.
                let sql = match n % 3 {
                    0 => format!("SELECT ibid.append_message('c', 'w', now(), 'w{writer}-{n}')"),
                    1 => format!(
                        "BEGIN; SELECT ibid.append_message('c', 'w', now(), 'w{writer}-{n}');
                         SELECT pg_sleep(0.002); COMMIT"
                    ),
                    _ => "BEGIN; SAVEPOINT s; SELECT ibid.append_message('c', 'w', now(), 'no');
                          ROLLBACK TO s; SELECT ibid.append_message('c', 'w', now(), 'so'); COMMIT"
                        .to_owned(),
                };
                run(&client, &sql).await;
            }
        });
    }
    let (ann, watch) = (server.connect("log").await, server.connect("log").await);
    let count = "SELECT count(*) FROM ibid.message WHERE conv = 'c'";
    let mut seen: Vec<(i64, i64)> = Vec::new();
    let mut jobs = Vec::new();
    for _ in 0..15 {
        let before_join = number(&watch, count).await;
        run(&ann, "SELECT ibid.join_conv('c', 'ann', now())").await;
        tokio::time::sleep(Duration::from_millis(4)).await;
        let inside = home.export("ann").await;
        run(&ann, "SELECT ibid.leave_conv('c', 'ann', now())").await;
        let after_leave = number(&watch, count).await;
        seen.push((before_join, after_leave));
        jobs.push((inside, home.export("ann").await));
    }
    writers.join_all().await;
    home.work().await;
    let stays = "SELECT first_seq, last_seq FROM ibid.stay WHERE user_id = 'ann' ORDER BY 1";
    let stays = watch.query(stays, &[]).await.unwrap();
    let stays: Vec<(i64, i64)> = stays.iter().map(|row| (row.get(0), row.get(1))).collect();
    for ((first, last), (before, after)) in stays.iter().zip(&seen) {
        assert!(first > before && last <= after, "{stays:?} {seen:?}");
    }
    let out_of_order = "SELECT count(*) FROM (
            SELECT gseq, lag(gseq) OVER (ORDER BY seq) AS before FROM ibid.message
        ) m WHERE before > gseq";
    assert_eq!(number(&watch, out_of_order).await, 0);
    let gaps = "SELECT max(seq) - count(*) FROM ibid.message";
    assert_eq!(number(&watch, gaps).await, 0);
    for (done, (inside, outside)) in jobs.into_iter().enumerate() {
        let all: i64 = stays[..=done]
            .iter()
            .map(|(first, last)| last - first + 1)
            .sum();
        let lines = home.lines(outside).await;
        assert_eq!(super::bodies(&lines).len() as i64, all);
        // The one created inside is a prefix of the one created after the leave.
        let prefix = home.lines(inside).await;
        assert!(lines.starts_with(&prefix));
    }
}
