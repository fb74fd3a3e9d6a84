//! Databases that are set up otherwise, and copies of one.

use ibid::ledger::{CreateError, LedgerError};
use ibid::postgres::Pg;

use super::{Home, run};
use crate::events::{edit, join, leave, say};
use crate::harness::{gunzip, until};
use crate::pg_server::PgServer;

#[tokio::test]
async fn collation_time_zone_and_other_settings_of_the_database_do_not_matter() {
    let name = "collation_time_zone_and_other_settings_of_the_database_do_not_matter";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    server
        .create_database_with(
            "odd",
            "TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'",
        )
        .await;
    let admin = server.connect("odd").await;
    run(
        &admin,
        "ALTER DATABASE odd SET timezone = 'Asia/Kolkata';
         ALTER DATABASE odd SET datestyle = 'German, DMY';
         ALTER DATABASE odd SET intervalstyle = 'sql_standard';
         ALTER DATABASE odd SET bytea_output = 'escape';
         ALTER DATABASE odd SET extra_float_digits = -5;
         ALTER DATABASE odd SET standard_conforming_strings = off;
         ALTER DATABASE odd SET synchronous_commit = off;
         ALTER DATABASE odd SET default_transaction_isolation = 'serializable';
         ALTER DATABASE odd SET search_path = 'nowhere'",
    )
    .await;
    let homes = [
        Home::new(&server, "plain").await,
        Home::in_database(&server, "odd").await,
    ];
    let mut lines = Vec::new();
    // By locale, case or accent these would stand in another order.
    for conv in ["b", "B", "a-b", "ab", "ä", "A", "z", "Z"] {
        lines.push(join(conv, "ann"));
        lines.push(say(conv, &format!("{conv}\0\\ 'x'")));
        lines.push(say(conv, "unseen").replace("09:30:00Z", "23:59:59.999999-11:30"));
        lines.push(edit(conv, 1, "e\u{301}"));
        lines.push(leave(conv, "ann"));
    }
    let mut files = Vec::new();
    for home in &homes {
        home.import(&lines).await;
        let client = server.connect(&home.database).await;
        run(
            &client,
            "SELECT ibid.join_conv('fn', 'ann', '2026-01-05 09:30:00Z'),
                    ibid.append_message('fn', 'bob', '2026-01-05 23:30:00.123456-08', 'x'),
                    ibid.append_messages('fn', '{b,B,ä}', array_fill(
                        '1969-12-31 23:59:59.999999Z'::timestamptz, '{3}'), '{1,2,3}')",
        )
        .await;
        let job = home.export("ann").await;
        home.work().await;
        files.push(home.file(job).await);
    }
    assert_eq!(super::bodies(&gunzip(&files[0])).len(), 20);
    assert_eq!(files[0], files[1]);
}

#[tokio::test]
async fn a_copy_of_the_database_is_refused_and_once_adopted_finishes_what_was_begun() {
    let name = "a_copy_of_the_database_is_refused_and_once_adopted_finishes_what_was_begun";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    home.import(&[join("c", "ann"), say("c", "one")]).await;
    let job = home.export("ann").await;
    drop(home);
    let copy = async || {
        let admin = server.connect("postgres").await;
        let sql = "CREATE DATABASE copy TEMPLATE log";
        admin.batch_execute(sql).await.is_ok()
    };
    // The connections of the pool end in the background.
    until("the database is copied", copy).await;
    let home = Home::in_database(&server, "copy").await;
    home.import(&[say("c", "two")]).await;
    match home.try_export("ann", "all").await {
        Err(CreateError::Ledger(LedgerError::Unusable(why))) => {
            assert!(why.contains("ibid admin adopt"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    let pg = Pg::connect(&server.url("copy")).await.unwrap();
    pg.adopt().await.unwrap();
    home.work().await;
    assert_eq!(super::bodies(&home.lines(job).await), ["one"]);
}

#[tokio::test]
async fn a_standby_is_refused_and_serves_what_there_is() {
    let Some(server) = PgServer::start("a_standby_is_refused_and_serves_what_there_is") else {
        return;
    };
    let home = Home::new(&server, "log").await;
    home.import(&[join("c", "ann"), say("c", "one")]).await;
    let job = home.export("ann").await;
    home.work().await;
    server.become_standby();
    let answers = async || home.exporter.ledger.find(job).await.is_ok();
    until("the connections are new", answers).await;
    match home.try_export("ann", "all").await {
        Err(CreateError::Ledger(LedgerError::Unusable(why))) => {
            assert!(why.contains("primary"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(super::bodies(&home.lines(job).await), ["one"]);
}
