//! Logs that nobody thought of, appended in both ways.

use ibid::event::{Event, EventKind, File, Target};
use ibid::source::Batch;
use ibid::time::Time;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tokio_postgres::types::ToSql;

use super::Home;
use crate::generate::logs;
use crate::harness::assert_same_lines;
use crate::pg_server::PgServer;
use crate::reference::Log;

/// How a stretch of the log is appended.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// By ibid, as one batch.
    Batch,
    /// By the functions, each event in a transaction of its own.
    Functions,
    /// By the functions, all in one transaction.
    Transaction,
}

fn stretches() -> impl Strategy<Value = Vec<(usize, Way)>> {
    let way = prop_oneof![
        2 => Just(Way::Batch),
        1 => Just(Way::Functions),
        1 => Just(Way::Transaction),
    ];
    prop::collection::vec((1..20_usize, way), 1..8)
}

#[test]
fn every_user_reads_what_the_reference_says_however_the_log_was_appended() {
    let name = "every_user_reads_what_the_reference_says_however_the_log_was_appended";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let config = ProptestConfig {
        cases: 24,
        failure_persistence: None,
        max_shrink_iters: 60,
        ..ProptestConfig::default()
    };
    let case = std::cell::Cell::new(0);
    let test = |(lines, stretches): (Vec<String>, Vec<(usize, Way)>)| {
        case.set(case.get() + 1);
        let database = format!("case{}", case.get());
        runtime.block_on(append_and_read(&server, &database, &lines, &stretches));
        Ok(())
    };
    TestRunner::new(config)
        .run(&(logs(100), stretches()), test)
        .unwrap();
}

async fn append_and_read(
    server: &PgServer,
    database: &str,
    lines: &[String],
    stretches: &[(usize, Way)],
) {
    let home = Home::new(server, database).await;
    let mut client = server.connect(database).await;
    let (mut log, mut expected) = (Log::new(), Vec::new());
    let mut rest = lines;
    for (length, way) in stretches.iter().cycle() {
        let (stretch, after) = rest.split_at((*length).min(rest.len()));
        rest = after;
        append(&home, &mut client, stretch, *way).await;
        stretch.iter().for_each(|line| log.apply(line));
        for user in log.users() {
            let job = home.export(&user).await;
            expected.push((
                job,
                format!("{user} after {way:?}"),
                log.export(&user, "all"),
            ));
        }
        if rest.is_empty() {
            break;
        }
    }
    home.work().await;
    for (job, what, lines) in expected {
        assert_same_lines(&what, &home.lines(job).await, &lines);
    }
}

async fn append(home: &Home, client: &mut tokio_postgres::Client, lines: &[String], way: Way) {
    let events = lines
        .iter()
        .map(|line| Event::parse(line.as_bytes()).unwrap());
    let events: Vec<Event> = events.collect();
    match way {
        Way::Batch => batch(home, events).await,
        Way::Functions => {
            for event in events {
                let tx = client.transaction().await.unwrap();
                if call(&tx, &event).await {
                    tx.commit().await.unwrap();
                } else {
                    drop(tx);
                    batch(home, vec![event]).await;
                }
            }
        }
        Way::Transaction => {
            let mut tx = client.transaction().await.unwrap();
            for event in events {
                if !call(&tx, &event).await {
                    tx.commit().await.unwrap();
                    batch(home, vec![event]).await;
                    tx = client.transaction().await.unwrap();
                }
            }
            tx.commit().await.unwrap();
        }
    }
}

async fn batch(home: &Home, events: Vec<Event>) {
    let batch = Batch {
        events: (1..).zip(events).collect(),
        skip_invalid: false,
        import: None,
    };
    home.exporter.source.append(batch).await.unwrap();
}

/// Calls the function for an event; false where there is none, because of an id or of files.
async fn call(tx: &tokio_postgres::Transaction<'_>, event: &Event) -> bool {
    let is_message = matches!(event.kind, EventKind::Message { .. });
    if event.id.is_some() && !is_message {
        return false;
    }
    match &event.kind {
        EventKind::Message {
            conv,
            user,
            ts,
            body,
            files,
        } => {
            if File::canonical(files).is_some() {
                return false;
            }
            let (conv, user) = (conv.as_str(), user.as_str());
            let sql =
                |ty: &str| format!("append_message($1::text, $2::text, TS, $4::{ty}, $5::text)");
            if body.contains('\0') || body.len() % 3 == 0 {
                let body = body.as_bytes();
                select(tx, &sql("bytea"), *ts, [&conv, &user, &body, &event.id]).await;
            } else if event.id.is_none() && body.len() % 3 == 1 {
                let sql = "append_messages($1::text, ARRAY[$2::text], ARRAY[TS], ARRAY[$4::text])";
                select(tx, sql, *ts, [&conv, &user, body]).await;
            } else {
                select(tx, &sql("text"), *ts, [&conv, &user, body, &event.id]).await;
            }
        }
        EventKind::Edit { target, ts, body } => {
            let raw = body.as_bytes();
            let (ty, body): (_, &(dyn ToSql + Sync)) = match body.contains('\0') {
                true => ("bytea", &raw),
                false => ("text", body),
            };
            match target {
                Target::Seq { conv, seq } => {
                    let sql = format!("append_edit($1::text, $2::bigint, TS, $4::{ty})");
                    select(tx, &sql, *ts, [&conv.as_str(), &(*seq as i64), body]).await;
                }
                Target::Id(id) => {
                    // The place of the time is the third.
                    let sql = format!("append_edit($1::text, TS, $4::{ty}) AS a, ($2::text) AS b");
                    select(tx, &sql, *ts, [id, id, body]).await;
                }
            }
        }
        EventKind::Recall { target, ts } => revise(tx, "append_recall", target, *ts).await,
        EventKind::Restore { target, ts } => revise(tx, "append_restore", target, *ts).await,
        EventKind::Join { conv, user, ts } => {
            let params: [&(dyn ToSql + Sync); 2] = [&conv.as_str(), &user.as_str()];
            select(tx, "join_conv($1::text, $2::text, TS)", *ts, params).await;
        }
        EventKind::Leave { conv, user, ts } => {
            let params: [&(dyn ToSql + Sync); 2] = [&conv.as_str(), &user.as_str()];
            select(tx, "leave_conv($1::text, $2::text, TS)", *ts, params).await;
        }
        EventKind::Account { user, enabled } => {
            let sql = "SELECT ibid.set_account($1, $2)";
            tx.query_one(sql, &[&user.as_str(), enabled]).await.unwrap();
        }
        EventKind::Conv {
            conv,
            history,
            ex_members,
        } => {
            let history = history.map(|it| it.as_str());
            let ex_members = ex_members.map(|it| it.as_str());
            let sql = "SELECT ibid.set_conv($1, $2, $3)";
            tx.query_one(sql, &[&conv.as_str(), &history, &ex_members])
                .await
                .unwrap();
        }
    }
    true
}

async fn revise(tx: &tokio_postgres::Transaction<'_>, name: &str, target: &Target, ts: Time) {
    match target {
        Target::Seq { conv, seq } if name == "append_recall" && seq % 2 == 0 => {
            let sql = "append_recalls(ARRAY[$1::text], ARRAY[$2::bigint], TS)";
            select(tx, sql, ts, [&conv.as_str(), &(*seq as i64)]).await;
        }
        Target::Seq { conv, seq } => {
            let sql = format!("{name}($1::text, $2::bigint, TS)");
            select(tx, &sql, ts, [&conv.as_str(), &(*seq as i64)]).await;
        }
        Target::Id(id) => {
            let sql = format!("{name}($1::text, TS) AS a, ($2::text) AS b");
            select(tx, &sql, ts, [id, id]).await;
        }
    }
}

/// Calls a function whose parameter TS is the time, which stands third.
async fn select<const N: usize>(
    tx: &tokio_postgres::Transaction<'_>,
    call: &str,
    ts: Time,
    params: [&(dyn ToSql + Sync); N],
) {
    let ts = ts.micros();
    let mut all = params.to_vec();
    all.insert(2, &ts);
    let time = "('1970-01-01Z'::timestamptz + $3::bigint * interval '1 microsecond')";
    let sql = format!("SELECT ibid.{}", call.replace("TS", time));
    let result = tx.query_one(&sql, &all).await;
    result.unwrap_or_else(|error| panic!("{call}: {error:?}"));
}
