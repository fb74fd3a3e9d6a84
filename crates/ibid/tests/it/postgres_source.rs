//! The log in PostgreSQL, where many write at once.

use ibid::postgres::Pg;
use ibid::source::postgres::PostgresSource;

use crate::events::{edit, join, leave, recall, say, with_id};
use crate::harness::import_into;
use crate::pg_server::PgServer;

#[tokio::test]
async fn a_first_load_is_taken_and_repeated_without_effect() {
    let Some(server) = PgServer::start("a_first_load_is_taken_and_repeated_without_effect") else {
        return;
    };
    server.create_database("log").await;
    let pg = Pg::connect(&server.url("log")).await.unwrap();
    pg.migrate().await.unwrap();
    let source = PostgresSource::new(pg);
    let lines = [
        join("c", "ann"),
        with_id("m1", &say("c", "one\0two")),
        edit("c", 1, "uno"),
        recall("c", 1),
        recall("c", 1),
        leave("c", "ann"),
    ];
    let text = lines.join("\n");
    let (report, refused) = import_into(&source, text.as_bytes(), false).await;
    let report = report.unwrap_or_else(|error| panic!("{error}: {refused:?}"));
    assert_eq!((report.accepted, report.unchanged), (5, 1));
    let (again, _) = import_into(&source, format!("{text}\n").as_bytes(), false).await;
    assert_eq!(again.unwrap().duplicates, 1);
    let client = server.connect("log").await;
    let row = client
        .query_one("SELECT baseline, (SELECT count(*) FROM ibid.message WHERE body_raw IS NOT NULL) FROM ibid.anchor", &[])
        .await
        .unwrap();
    assert!(row.get::<_, i64>(0) > 0);
    assert_eq!(row.get::<_, i64>(1), 1);
}
