//! What only the ledger in PostgreSQL has to show: its clock, its locks, its settings, and that
//! what comes out is the same as on SQLite.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use ibid::export::{Event, RevokedBy, State};
use ibid::ids::UserId;
use ibid::ledger::postgres::PostgresLedger;
use ibid::ledger::{CreateError, Created, Ledger, LedgerError};
use ibid::limits::Limits;
use ibid::postgres::{ConnectError, Pg};
use ibid::time::{Clock, Time};
use tokio_postgres::{AsyncMessage, NoTls};

use crate::events::{chat, edit, join, leave, policy, recall, restore, say};
use crate::harness::{
    Installation, NO_LIMITS, On, UNTIL_IDLE, assert_same_lines, create, offer, on_postgres, until,
    work,
};
use crate::reference::Log;

on_postgres! {
    one_who_waits_while_another_migrates_finds_it_done,
    an_artefact_is_the_same_on_both_databases_and_what_the_reference_says,
    time_is_the_databases_and_what_is_added_to_it,
    no_default_of_the_database_changes_what_is_promised,
    a_database_that_takes_no_writes_says_what_to_do,
    a_log_that_was_written_elsewhere_says_what_to_do,
    a_job_that_is_created_is_announced_and_nothing_else_is,
    a_user_at_whom_somebody_is_comes_later_and_is_waited_for_if_there_is_no_other,
    a_reason_with_a_nul_is_kept_without_it,
    a_database_that_goes_away_is_told_from_one_that_refuses_and_found_again,
}

async fn with_chat(on: &On) -> Installation {
    let home = Installation::on(on).await;
    home.import(&chat(3)).await;
    home.import(&[join("c", "eve")]).await;
    home
}

/// Also if it has looked before, over the same connection: the server remembers what was not there.
async fn one_who_waits_while_another_migrates_finds_it_done(on: &On) {
    let On::Postgres(server) = on else {
        unreachable!("it is a test on PostgreSQL");
    };
    server.create_database("fresh").await;
    let observer = server.connect("fresh").await;
    let url = server.url("fresh");
    let (first, second) = (Pg::connect(&url).await, Pg::connect(&url).await);
    let (first, second) = (first.unwrap(), second.unwrap());
    let missing = second.check_schema().await;
    assert!(matches!(missing, Err(ConnectError::NotMigrated)));

    // The lock of migrations.
    let lock = format!(
        "BEGIN; SELECT pg_advisory_xact_lock({})",
        0x6962_6964_0001_i64
    );
    observer.batch_execute(&lock).await.unwrap();
    let mut migrating = Vec::new();
    for node in [first, second] {
        migrating.push(tokio::spawn(async move { node.migrate().await }));
        let waiting = async || {
            let sql = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
            observer.query(sql, &[]).await.unwrap().len() == migrating.len()
        };
        until("it waits for its turn", waiting).await;
    }
    observer.batch_execute("COMMIT").await.unwrap();
    let mut applied = Vec::new();
    for node in migrating {
        applied.push(node.await.unwrap().unwrap());
    }
    assert!(applied[0] > 0 && applied[1] == 0, "{applied:?}");
}

async fn an_artefact_is_the_same_on_both_databases_and_what_the_reference_says(on: &On) {
    let mut lines = chat(1_500);
    lines.extend([
        edit("c", 17, "edited \u{0} é😀"),
        recall("c", 250),
        recall("c", 251),
        restore("c", 251),
        say("b", "unseen"),
        join("b", "ann"),
    ]);
    lines.extend((1..=300).map(|number| say("b", &format!("first stay {number}"))));
    lines.extend([leave("b", "ann"), edit("b", 3, "after the leave")]);
    lines.extend([
        recall("b", 4),
        join("B", "ann"),
        say("B", "bytewise\u{0}\r\n"),
    ]);
    lines.extend([
        say("Zürich", "before"),
        join("Zürich", "ann"),
        say("Zürich", "after"),
    ]);
    lines.extend([say("d", "once"), join("d", "ann"), leave("d", "ann")]);
    lines.extend([policy("d", "all", "keep"), policy("Zürich", "all", "keep")]);
    let mut log = Log::new();
    lines.iter().for_each(|line| log.apply(line));

    let mut files = Vec::new();
    for (on, database) in [(&On::Sqlite, "SQLite"), (on, "PostgreSQL")] {
        let home = Installation::cutting(on, 200).await;
        home.import(&lines).await;
        let mut jobs = Vec::new();
        for scope in ["all", "conv:c", "conv:Zürich"] {
            jobs.push((scope, home.export("ann", scope).await));
        }
        let later = [
            say("c", "later"),
            edit("c", 20, "later"),
            join("later", "ann"),
        ];
        home.import(&later).await;
        let reports = work(home.exporter.workshop(2, None), UNTIL_IDLE).await;
        assert_eq!(reports.len(), jobs.len());
        for (scope, job) in jobs {
            let what = format!("{scope} on {database}");
            assert_same_lines(&what, &home.lines(job).await, &log.export("ann", scope));
            files.push(home.file(job).await);
        }
    }
    let (sqlite, postgres) = files.split_at(3);
    assert!(sqlite == postgres);
}

async fn time_is_the_databases_and_what_is_added_to_it(on: &On) {
    let home = with_chat(on).await;
    let clock = Clock::system();
    let ledger = PostgresLedger::new(home.postgres().connect().await, clock.clone());
    let client = home.postgres().client().await;
    let theirs = async || {
        let micros = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
        let row = client.query_typed_one(micros, &[]).await.unwrap();
        Time::from_micros(row.get(0))
    };
    for added in [Duration::ZERO, Duration::from_secs(3_600)] {
        clock.advance(added);
        let before = theirs().await.plus(added);
        let now = ledger.now().await.unwrap();
        let after = theirs().await.plus(added);
        assert!((before..=after).contains(&now), "{before} {now} {after}");
    }

    // All that is stored goes by it.
    let job = home.export("ann", "all").await;
    let before = theirs().await.plus(Duration::from_secs(3_600));
    let lease = offer(0).lease;
    let claim = ledger.claim(offer(0)).await.unwrap().unwrap();
    let held = claim.export.lease.unwrap();
    assert!(held.renewed_at >= before);
    assert_eq!(held.until, held.renewed_at.plus(lease));
    clock.advance(lease);
    ledger.renew(job, claim.id, lease).await.unwrap();
    assert!(ledger.claim(offer(0)).await.unwrap().is_none());
    clock.advance(lease);
    let next = ledger.claim(offer(0)).await.unwrap().unwrap();
    assert_eq!((next.export.job_id, next.export.attempts), (job, 2));
}

async fn no_default_of_the_database_changes_what_is_promised(on: &On) {
    let limits = Limits {
        unfinished_per_user: 3,
        ..NO_LIMITS
    };
    let home = Installation::with(on, 0, limits).await;
    home.import(&chat(3)).await;
    let client = home.postgres().client().await;
    for set in [
        "default_transaction_isolation = 'serializable'",
        "synchronous_commit = 'off'",
        "timezone = 'Asia/Kathmandu'",
        "extra_float_digits = 0",
        "enable_indexscan = off",
    ] {
        let set = format!("ALTER DATABASE {} SET {set}", home.postgres().name());
        client.batch_execute(&set).await.unwrap();
    }
    let mut exporters = Vec::new();
    for _ in 0..4 {
        exporters.push(home.another_exporter().await);
    }
    let requests = (0..32).map(|number| {
        let exporter = exporters[number % 4].clone();
        let key = format!("key-{number}");
        tokio::spawn(async move { create(&exporter, "ann", "all", &key).await })
    });
    let answers = futures::future::join_all(requests.collect::<Vec<_>>()).await;
    let mut new = 0;
    for answer in answers {
        match answer.unwrap() {
            Ok(Created::New(_)) => new += 1,
            Err(CreateError::Limit(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(new, 3);
    let claims = exporters.iter().map(|it| it.ledger.claim(offer(2)));
    let claims = futures::future::join_all(claims).await;
    let claims = claims.into_iter().filter_map(Result::unwrap);
    assert_eq!(claims.count(), 2);
}

async fn a_database_that_takes_no_writes_says_what_to_do(on: &On) {
    let home = with_chat(on).await;
    let job = home.export("ann", "all").await;
    let name = home.postgres().name();
    let set = format!("ALTER DATABASE {name} SET default_transaction_read_only = on");
    let client = home.postgres().client().await;
    client.batch_execute(&set).await.unwrap();
    let exporter = home.another_exporter().await;
    match create(&exporter, "ann", "all", "key").await {
        Err(CreateError::Ledger(LedgerError::Unusable(what))) => {
            assert!(what.contains("--database"), "{what}");
        }
        other => panic!("{other:?}"),
    }
    // What is there can be read.
    assert!(exporter.ledger.find(job).await.unwrap().is_some());
}

async fn a_log_that_was_written_elsewhere_says_what_to_do(on: &On) {
    let home = with_chat(on).await;
    home.change("UPDATE anchor SET system_identifier = system_identifier + 1")
        .await;
    match home.create("ann", "all", "key").await {
        Err(CreateError::Ledger(LedgerError::Unusable(what))) => {
            assert!(what.contains("adopt"), "{what}");
        }
        other => panic!("{other:?}"),
    }
    home.change("UPDATE anchor SET system_identifier = system_identifier - 1")
        .await;
    // The refusal used up no key.
    let created = home.create("ann", "all", "key").await.unwrap();
    assert!(matches!(created, Created::New(_)));
}

async fn a_job_that_is_created_is_announced_and_nothing_else_is(on: &On) {
    let home = with_chat(on).await;
    let (client, mut connection) = tokio_postgres::connect(&home.postgres().url(), NoTls)
        .await
        .unwrap();
    let messages = futures::stream::poll_fn(move |context| connection.poll_message(context));
    let announced = tokio::spawn(async move {
        let mut announced = 0;
        let mut messages = std::pin::pin!(messages);
        while let Some(message) = messages.next().await {
            if let AsyncMessage::Notification(note) = message.unwrap() {
                match note.channel() {
                    "ibid_jobs" => announced += 1,
                    "done" => break,
                    other => panic!("{other}"),
                }
            }
        }
        announced
    });
    client.batch_execute("LISTEN ibid_jobs").await.unwrap();
    client.batch_execute("LISTEN done").await.unwrap();
    home.create("ann", "all", "key").await.unwrap();
    home.create("ann", "all", "key").await.unwrap();
    home.create("ann", "conv:c", "key").await.unwrap_err();
    home.create("ann", "conv:nowhere", "other")
        .await
        .unwrap_err();
    home.create("eve", "all", "key").await.unwrap();
    let other = home.postgres().client().await;
    other.batch_execute("NOTIFY done").await.unwrap();
    assert_eq!(announced.await.unwrap(), 2);
}

async fn a_user_at_whom_somebody_is_comes_later_and_is_waited_for_if_there_is_no_other(on: &On) {
    let home = with_chat(on).await;
    let anns = home.export("ann", "all").await;
    home.clock.advance(Duration::from_secs(1));
    let eves = home.export("eve", "all").await;
    let mut client = home.postgres().client().await;
    let busy = client.transaction().await.unwrap();
    let lock = "SELECT 1 FROM ibid.served WHERE user_id = 'ann' FOR UPDATE";
    busy.batch_execute(lock).await.unwrap();
    assert_eq!(home.claim().await.unwrap().export.job_id, eves);
    // Not for long: another user's job may come meanwhile.
    assert!(home.claim().await.is_none());

    let ledger = Arc::clone(&home.exporter.ledger);
    let waiting = tokio::spawn(async move { ledger.claim(offer(0)).await });
    let observer = home.postgres().client().await;
    until("the claim waits", async || {
        let waits = "SELECT count(*) FROM pg_stat_activity
                     WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let row = observer.query_typed_one(waits, &[]).await.unwrap();
        row.get::<_, i64>(0) > 0
    })
    .await;
    busy.commit().await.unwrap();
    let claimed = waiting.await.unwrap().unwrap().unwrap();
    assert_eq!(claimed.export.job_id, anns);
}

async fn a_reason_with_a_nul_is_kept_without_it(on: &On) {
    let home = with_chat(on).await;
    let job = home.export("ann", "all").await;
    let revoked = Event::Revoked {
        by: RevokedBy::Admin,
        reason: "a\0b".to_owned(),
    };
    home.exporter.ledger.decide(job, revoked).await.unwrap();
    let export = home.find(job).await.export;
    assert_eq!(export.revocation.unwrap().reason, "a\u{fffd}b");
}

async fn a_database_that_goes_away_is_told_from_one_that_refuses_and_found_again(on: &On) {
    let home = with_chat(on).await;
    let job = home.export("ann", "all").await;
    let held = home.claim().await.unwrap();
    let other = home.postgres().neighbour().await;
    let name = home.postgres().name();
    let allow = async |allowed: bool| {
        let sql = format!(
            "ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed};
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        );
        other.batch_execute(&sql).await.unwrap();
    };
    allow(false).await;
    let ledger = &home.exporter.ledger;
    for _ in 0..3 {
        let gone = ledger.find(job).await;
        assert!(matches!(gone, Err(LedgerError::Unavailable(_))), "{gone:?}");
        let gone = home.create("ann", "all", "key").await;
        assert!(
            matches!(gone, Err(CreateError::Ledger(LedgerError::Unavailable(_)))),
            "{gone:?}"
        );
        let gone = ledger.settle(job, held.id, Event::GivenBack).await;
        assert!(matches!(gone, Err(LedgerError::Unavailable(_))), "{gone:?}");
    }
    allow(true).await;
    until("it answers again", async || ledger.find(job).await.is_ok()).await;
    let settled = ledger.settle(job, held.id, Event::GivenBack).await.unwrap();
    assert_eq!(settled.state, State::Queued);
    let ann = UserId::parse("ann").unwrap();
    assert_eq!(ledger.list(&ann, None, 9).await.unwrap().len(), 1);
}
