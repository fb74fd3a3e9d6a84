//! The log in PostgreSQL, where many write at once.

mod eleven_steps;
mod functions;
mod odd_databases;
mod races;
mod random;
mod rights;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ibid::cut::CutRule;
use ibid::export::State;
use ibid::exporter::{ExportTerms, Exporter};
use ibid::ids::JobId;
use ibid::import::Report;
use ibid::ledger::postgres::PostgresLedger;
use ibid::ledger::{CreateError, Created};
use ibid::postgres::Pg;
use ibid::source::Page;
use ibid::source::postgres::PostgresSource;
use ibid::time::{Clock, Time};
use ibid::vault::{Key, Vault};
use tokio_postgres::error::SqlState;

use crate::events::{edit, join, leave, recall, say, with_id};
use crate::harness::{NO_LIMITS, UNTIL_IDLE, create, gunzip, import_into, until, work};
use crate::pg_server::PgServer;

/// An installation whose log and ledger are one PostgreSQL database.
struct Home {
    exporter: Exporter,
    database: String,
    keys: AtomicU64,
    _folder: tempfile::TempDir,
}

impl Home {
    /// Creates a database and the schema in it.
    async fn new(server: &PgServer, database: &str) -> Home {
        server.create_database(database).await;
        Home::in_database(server, database).await
    }

    /// Uses a database that exists.
    async fn in_database(server: &PgServer, database: &str) -> Home {
        let pg = Pg::connect(&server.url(database)).await.unwrap();
        pg.migrate().await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let terms = ExportTerms {
            limits: NO_LIMITS,
            cut: CutRule {
                part_bytes: 1024 * 1024,
                part_messages: 0,
            },
            link_life: std::time::Duration::from_secs(300),
        };
        let clock = Clock::frozen_at(Time::parse("2026-01-05T12:00:00Z").unwrap());
        let source = Arc::new(PostgresSource::new(pg.clone()));
        let ledger = Arc::new(PostgresLedger::new(pg, clock));
        let vault = Vault::in_folder(folder.path()).unwrap();
        Home {
            exporter: Exporter::new(source, ledger, vault, terms),
            database: database.to_owned(),
            keys: AtomicU64::new(0),
            _folder: folder,
        }
    }

    async fn import<S: AsRef<str>>(&self, lines: &[S]) -> Report {
        // Another number of empty lines makes another file of the same lines.
        let empty = "\n".repeat(1 + self.next() as usize);
        let lines: Vec<&str> = lines.iter().map(AsRef::as_ref).collect();
        let text = lines.join("\n") + &empty;
        let source = self.exporter.source.as_ref();
        let (report, refused) = import_into(source, text.as_bytes(), false).await;
        report.unwrap_or_else(|error| panic!("{error}: {refused:?}"))
    }

    async fn try_export(&self, user: &str, scope: &str) -> Result<JobId, CreateError> {
        let key = format!("{}-{}", self.database, self.next());
        match create(&self.exporter, user, scope, &key).await? {
            Created::New(export) => Ok(export.job_id),
            other => panic!("{other:?}"),
        }
    }

    async fn export(&self, user: &str) -> JobId {
        self.try_export(user, "all").await.unwrap()
    }

    async fn work(&self) {
        work(self.exporter.workshop(2, None), UNTIL_IDLE).await;
    }

    /// The file of a job that is done.
    async fn file(&self, job: JobId) -> Vec<u8> {
        let export = self
            .exporter
            .ledger
            .find(job)
            .await
            .unwrap()
            .unwrap()
            .export;
        assert_eq!(export.state, State::Done, "{:?}", export.problem);
        let claim = export.artefact.unwrap().claim;
        let key = Key::Artefact { job, claim };
        self.exporter.vault.get(key).await.unwrap().to_vec()
    }

    async fn lines(&self, job: JobId) -> Vec<u8> {
        gunzip(&self.file(job).await)
    }

    /// The lines of an export that is created and made now.
    async fn export_now(&self, user: &str) -> Vec<u8> {
        let job = self.export(user).await;
        self.work().await;
        self.lines(job).await
    }

    /// The bodies in an export that is created and made now.
    async fn bodies(&self, user: &str) -> Vec<String> {
        bodies(&self.export_now(user).await)
    }

    fn next(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }
}

fn bodies(lines: &[u8]) -> Vec<String> {
    let lines = std::str::from_utf8(lines).unwrap().lines();
    let lines = lines.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines
        .map(|line| line["body"].as_str().unwrap().to_owned())
        .collect()
}

/// Runs statements that must succeed.
async fn run(client: &tokio_postgres::Client, sql: &str) {
    if let Err(error) = client.batch_execute(sql).await {
        panic!("{sql}: {:?}", error.as_db_error());
    }
}

/// The number that a statement answers with.
async fn number(client: &tokio_postgres::Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Runs a statement that must fail, and gives its code and message.
async fn failure(client: &tokio_postgres::Client, sql: &str) -> (SqlState, String) {
    let error = client.batch_execute(sql).await.expect_err(sql);
    let error = error.as_db_error().expect(sql);
    (error.code().clone(), error.message().to_owned())
}

#[tokio::test]
async fn a_first_load_sets_the_baseline_and_is_repeated_without_effect() {
    let name = "a_first_load_sets_the_baseline_and_is_repeated_without_effect";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let lines = [
        join("c", "ann"),
        with_id("m1", &say("c", "one\0two")),
        edit("c", 1, "uno"),
        recall("c", 1),
        recall("c", 1),
        leave("c", "ann"),
    ];
    let report = home.import(&lines).await;
    assert_eq!((report.accepted, report.unchanged), (5, 1));
    let client = server.connect("log").await;
    let baseline = "SELECT baseline FROM ibid.anchor";
    let first = number(&client, baseline).await;
    let highest = "SELECT last_value FROM ibid.log_gseq";
    assert!(first >= 6 && first == number(&client, highest).await);
    let again = home.import(&lines).await;
    assert_eq!(again.duplicates, 1);
    assert_eq!(number(&client, baseline).await, first);
}

#[tokio::test]
async fn a_writer_that_is_still_at_work_keeps_the_baseline_from_being_set() {
    let name = "a_writer_that_is_still_at_work_keeps_the_baseline_from_being_set";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let writer = server.connect("log").await;
    run(
        &writer,
        "BEGIN; SELECT ibid.append_message('other', 'bob', now(), 'x')",
    )
    .await;
    home.import(&[join("c", "ann"), say("c", "one")]).await;
    assert_eq!(number(&writer, "SELECT baseline FROM ibid.anchor").await, 0);
    run(&writer, "COMMIT").await;
    assert_eq!(home.bodies("ann").await, ["one"]);
}

#[tokio::test]
async fn pages_are_read_through_the_primary_key() {
    let Some(server) = PgServer::start("pages_are_read_through_the_primary_key") else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    // Never analysed, then analysed: the planner knows nothing, then everything.
    run(
        &client,
        "SELECT ibid.join_conv(conv, 'ann', now()) FROM unnest('{big,a,b}'::text[]) conv;
         SELECT ibid.append_messages('big', array_agg('bob'::text), array_agg(now()), array_agg(n::text))
         FROM generate_series(1, 30000) n;
         SELECT ibid.append_message('c' || n, 'bob', now(), 'x'),
                ibid.join_conv('c' || n, 'ann', now()),
                ibid.append_message('c' || n, 'bob', now(), 'y'),
                ibid.append_edit('c' || n, 2, now(), 'z')
         FROM generate_series(1, 3000) n",
    )
    .await;
    for turn in ["fresh", "analysed"] {
        let scans = "SELECT coalesce(sum(seq_scan), 0)::bigint FROM pg_stat_user_tables
                     WHERE schemaname = 'ibid' AND relname IN ('message', 'revision')";
        let reads = "SELECT sum(idx_scan)::bigint FROM pg_stat_user_tables
                     WHERE schemaname = 'ibid' AND relname = 'revision'";
        let (before, counted) = (number(&client, scans).await, number(&client, reads).await);
        let bodies = home.bodies("ann").await;
        assert_eq!(bodies.len(), 33_000, "{turn}");
        assert_eq!(bodies[0], "1");
        assert!(bodies[30_000..].iter().all(|body| body == "z"), "{turn}");
        // Counts are told by a session when it has been idle for a while, or when it ends.
        until("the reads are counted", async || {
            number(&client, reads).await > counted
        })
        .await;
        // Building each index was a scan, which may be counted late.
        let after = number(&client, scans).await;
        assert!(after <= before + 2, "{turn}: {after} {before}");
        run(&client, "ANALYZE").await;
    }
    let out_of_order = "SELECT count(*) FROM (
            SELECT gseq, lag(gseq) OVER (PARTITION BY conv ORDER BY seq) AS before FROM ibid.message
        ) m WHERE before > gseq";
    assert_eq!(number(&client, out_of_order).await, 0);
}

#[tokio::test]
async fn a_page_ends_where_long_messages_or_long_edits_fill_it() {
    let name = "a_page_ends_where_long_messages_or_long_edits_fill_it";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let home = Home::new(&server, "log").await;
    let client = server.connect("log").await;
    run(
        &client,
        "SELECT ibid.join_conv(conv, 'ann', now()) FROM unnest('{a,b}'::text[]) conv;
         SELECT ibid.append_message('a', 'bob', now(), repeat(n::text, 100000)),
                ibid.append_message('b', 'bob', now(), 'short')
         FROM generate_series(10, 49) n;
         SELECT ibid.append_edit('b', n, now(), repeat('x', 300000)) FROM generate_series(1, 40) n",
    )
    .await;
    let job = home.export("ann").await;
    let (source, ledger) = (&home.exporter.source, &home.exporter.ledger);
    let windows = Arc::new(ledger.windows(job).await.unwrap());
    let snapshot = ledger.find(job).await.unwrap().unwrap().export.snapshot;
    let (mut place, mut messages) = (windows.first(), Vec::new());
    while let Some(at) = place {
        let reading = source.page(&snapshot, &windows, at, Page::default());
        let page = reading.await.unwrap();
        assert!(page.bytes() < 1_500_000, "{} bytes", page.bytes());
        messages.push(page.len());
        place = windows.after(page.last().unwrap());
    }
    assert_eq!(messages.iter().sum::<usize>(), 80);
    // Three of 200,000 bytes go over 512 KiB, four edits of 300,000 over twice that.
    assert_eq!(messages[..3], [3, 3, 3]);
    assert_eq!(messages[15..20], [4, 4, 4, 4, 4]);
}
