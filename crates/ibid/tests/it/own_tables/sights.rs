//! What a user sees is the same, whether the stays say which seqs they hold or not.

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use tokio_postgres::Client;

use super::run;
use crate::generate::logs;
use crate::harness::{Installation, On};
use crate::pg_server::PgServer;

/// Puts ibid's own tables behind views, as if they were an application's, or takes them back.
const BEHIND_VIEWS: &str = "
CREATE SCHEMA own;
ALTER TABLE ibid.message SET SCHEMA own;
ALTER TABLE ibid.revision SET SCHEMA own;
ALTER TABLE ibid.stay SET SCHEMA own;
ALTER TABLE ibid.conv SET SCHEMA own;
CREATE VIEW ibid.message AS SELECT * FROM own.message;
CREATE VIEW ibid.revision AS SELECT * FROM own.revision;
CREATE VIEW ibid.stay AS SELECT conv, user_id, from_gseq, to_gseq FROM own.stay;
CREATE VIEW ibid.conv AS SELECT conv, history, ex_members FROM own.conv";

const BACK: &str = "
DROP VIEW ibid.message, ibid.revision, ibid.stay, ibid.conv;
ALTER TABLE own.message SET SCHEMA ibid;
ALTER TABLE own.revision SET SCHEMA ibid;
ALTER TABLE own.stay SET SCHEMA ibid;
ALTER TABLE own.conv SET SCHEMA ibid;
DROP SCHEMA own";

#[tokio::test(flavor = "multi_thread")]
async fn the_same_is_seen_through_views_as_in_tables() {
    let Some(server) = PgServer::start("the_same_is_seen_through_views_as_in_tables") else {
        return;
    };
    let on = On::Postgres(server.into());
    let home = Installation::on(&on).await;
    let client = home.postgres().client().await;
    let mut runner = TestRunner::default();
    // One log after the other into the same conversations, so that these become long.
    for round in 0..6 {
        let log = logs(150).new_tree(&mut runner).unwrap().current();
        let log: Vec<String> = log.iter().map(|line| renamed(line, round)).collect();
        home.import(&log).await;
        let in_tables = sights(&home, &client, &format!("tables-{round}")).await;
        // Conversations may say which message is their last.
        let views = match round % 2 {
            0 => BEHIND_VIEWS.to_owned(),
            _ => BEHIND_VIEWS.replace("ex_members FROM", "ex_members, last_seq FROM"),
        };
        run(&client, &views).await;
        let through_views = sights(&home, &client, &format!("views-{round}")).await;
        run(&client, BACK).await;
        assert_eq!(in_tables.len(), through_views.len());
        for (a, b) in std::iter::zip(in_tables, through_views) {
            assert_eq!(a, b, "round {round}");
        }
    }
}

/// An id must not be used by two logs for different events.
fn renamed(line: &str, round: usize) -> String {
    let mut event: serde_json::Value = serde_json::from_str(line).unwrap();
    for member in ["id", "message"] {
        if let Some(id) = event[member].as_str() {
            event[member] = format!("{round}-{id}").into();
        }
    }
    event.to_string()
}

/// What every user sees, of everything and of each conversation.
async fn sights(home: &Installation, client: &Client, keys: &str) -> Vec<String> {
    let asked = "SELECT user_id, conv FROM (
                     SELECT DISTINCT user_id, 'conv:' || conv AS conv FROM ibid.stay
                     UNION SELECT DISTINCT user_id, 'all' FROM ibid.stay
                 ) s ORDER BY 1, 2";
    let mut seen = Vec::new();
    for row in client.query(asked, &[]).await.unwrap() {
        let (user, scope): (String, String) = (row.get(0), row.get(1));
        let key = format!("{keys}-{}", seen.len());
        let job = match home.create(&user, &scope, &key).await {
            Ok(ibid::ledger::Created::New(export)) => export.job_id,
            other => panic!("{user} {scope}: {other:?}"),
        };
        let windows = home.exporter.ledger.windows(job).await.unwrap();
        seen.push(format!("{user} {scope}: {windows:?}"));
    }
    seen
}
