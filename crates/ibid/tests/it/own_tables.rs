//! An application's own tables behind the relations of the log: the page for those who do that,
//! run as it stands.

mod adopting;
mod conditions;
mod reading;
mod sights;

use std::sync::Arc;
use std::time::Duration;

use ibid::cut::CutRule;
use ibid::export::State;
use ibid::exporter::{ExportTerms, Exporter};
use ibid::ids::JobId;
use ibid::ledger::Created;
use ibid::ledger::postgres::PostgresLedger;
use ibid::postgres::Pg;
use ibid::source::postgres::PostgresSource;
use ibid::time::{Clock, Time};
use ibid::vault::{Key, Vault};
use tokio::sync::{RwLock, watch};
use tokio::time::timeout;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use crate::harness::{NO_LIMITS, UNTIL_IDLE, assert_same_lines, create, gunzip, work};
use crate::pg_server::PgServer;
use crate::reference::Log;

/// The blocks of SQL in the page, in order.
fn blocks() -> Vec<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/own-tables.md");
    let page = std::fs::read_to_string(page).unwrap();
    let blocks = page.split("```sql\n").skip(1);
    let blocks = blocks.map(|block| block.split("```").next().unwrap().to_owned());
    blocks.collect()
}

/// The application of the page, and ibid as the role that the page gives it.
struct Chat {
    pg: Pg,
    exporter: Exporter,
    /// As the administrator of the database.
    admin: Client,
    _folder: tempfile::TempDir,
}

impl Chat {
    async fn new(server: &PgServer) -> Chat {
        let cluster = server.connect("postgres").await;
        run(&cluster, "CREATE ROLE ibid LOGIN").await;
        run(&cluster, "CREATE DATABASE chat OWNER ibid").await;
        let pg = Pg::connect(&server.url_as("ibid", "chat")).await.unwrap();
        pg.migrate().await.unwrap();
        let admin = server.connect("chat").await;
        let blocks = blocks();
        assert!(blocks.len() >= 5, "{} blocks", blocks.len());
        for block in blocks {
            run(&admin, &block).await;
        }
        let folder = tempfile::tempdir().unwrap();
        let terms = ExportTerms {
            limits: NO_LIMITS,
            cut: CutRule {
                part_bytes: 1024 * 1024,
                part_messages: 0,
            },
            link_life: Duration::from_secs(300),
        };
        let clock = Clock::frozen_at(Time::parse("2026-01-05T12:00:00Z").unwrap());
        let source = Arc::new(PostgresSource::new(pg.clone()));
        let ledger = Arc::new(PostgresLedger::new(pg.clone(), clock));
        let vault = Vault::in_folder(folder.path()).unwrap();
        Chat {
            exporter: Exporter::new(source, ledger, vault, terms),
            pg,
            admin,
            _folder: folder,
        }
    }

    async fn run(&self, sql: &str) {
        run(&self.admin, sql).await;
    }

    async fn export(&self, user: &str, key: &str) -> JobId {
        match create(&self.exporter, user, "all", key).await {
            Ok(Created::New(export)) => export.job_id,
            other => panic!("{user}: {other:?}"),
        }
    }

    async fn work(&self) {
        work(self.exporter.workshop(2, None), UNTIL_IDLE).await;
    }

    async fn lines(&self, job: JobId) -> Vec<u8> {
        let found = self.exporter.ledger.find(job).await.unwrap().unwrap();
        let export = found.export;
        assert_eq!(export.state, State::Done, "{:?}", export.problem);
        let claim = export.artefact.unwrap().claim;
        let key = Key::Artefact { job, claim };
        gunzip(&self.exporter.vault.get(key).await.unwrap())
    }

    /// The lines of an export that is created and made now.
    async fn export_now(&self, user: &str, key: &str) -> Vec<u8> {
        let job = self.export(user, key).await;
        self.work().await;
        self.lines(job).await
    }

    /// Why an export that is created now fails.
    async fn failure(&self, user: &str, key: &str) -> String {
        let job = self.export(user, key).await;
        self.work().await;
        let found = self.exporter.ledger.find(job).await.unwrap().unwrap();
        found.export.problem.expect("it failed").detail
    }

    /// What is committed now, as the reference understands it.
    async fn log(&self) -> Log {
        let mut log = Log::new();
        for row in self.admin.query(EVENTS, &[]).await.unwrap() {
            log.apply(row.get(0));
        }
        log
    }
}

async fn run(client: &Client, sql: &str) {
    if let Err(error) = client.batch_execute(sql).await {
        panic!("{sql}: {:?}", error.as_db_error());
    }
}

/// The application's rows as events. Of one conversation, their order is that of the commits.
const EVENTS: &str = r#"
SELECT json_strip_nulls(event)::text FROM (
    SELECT 0 AS gseq, json_build_object('kind', 'conv', 'conv', room, 'history', 'all') AS event
    FROM app.room WHERE open_past
    UNION ALL
    SELECT joined_gseq, json_build_object(
        'kind', 'join', 'conv', room, 'user', person, 'ts', '2026-01-05T09:30:00Z')
    FROM app.membership
    UNION ALL
    SELECT left_gseq, json_build_object(
        'kind', 'leave', 'conv', room, 'user', person, 'ts', '2026-01-05T09:30:00Z')
    FROM app.membership WHERE left_gseq IS NOT NULL
    UNION ALL
    SELECT gseq, json_build_object(
        'kind', 'message', 'conv', room, 'user', author, 'body', body,
        'ts', to_char(sent_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
    FROM app.post
    UNION ALL
    SELECT gseq, json_build_object(
        'kind', CASE change WHEN 'edit' THEN 'edit' WHEN 'delete' THEN 'recall' ELSE 'restore' END,
        'conv', room, 'seq', seq, 'body', body, 'ts', '2026-01-05T09:30:00Z')
    FROM app.post_change
) e ORDER BY gseq"#;

const PEOPLE: &str = "
INSERT INTO app.person (person) SELECT 'p' || n FROM generate_series(0, 5) n;
INSERT INTO app.room (room, open_past) SELECT 'r' || n, n % 4 = 0 FROM generate_series(0, 7) n;
SELECT app.enter('r' || r, 'p' || p)
FROM generate_series(0, 7) r, generate_series(0, 5) p WHERE (r + p) % 3 > 0;
SELECT app.send('r' || r, 'p0', 'first') FROM generate_series(0, 7) r, generate_series(1, 3)";

/// Sebastiano Vigna's splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// What the writers and the one that creates exports share.
struct Stage {
    /// Held by a writer while it commits.
    gate: RwLock<()>,
    /// Transactions that have written and are not ended.
    open: watch::Sender<usize>,
    stop: CancellationToken,
}

/// A session of the application: transactions through the write path of the page.
async fn write(stage: Arc<Stage>, client: Client, mut random: Random) -> u64 {
    let mut written = 0;
    while !stage.stop.is_cancelled() {
        run(&client, "BEGIN").await;
        // Several rooms are written to in one order.
        let mut rooms: Vec<u64> = (0..1 + random.below(2)).map(|_| random.below(8)).collect();
        rooms.sort_unstable();
        for room in rooms {
            for _ in 0..1 + random.below(3) {
                let (person, seq) = (random.below(6), 1 + random.below(3));
                let call = match random.below(10) {
                    0 => format!("app.enter('r{room}', 'p{person}')"),
                    1 => format!("app.leave('r{room}', 'p{person}')"),
                    2 => format!("app.change('r{room}', {seq}, 'delete', NULL)"),
                    3 => format!("app.change('r{room}', {seq}, 'undelete', NULL)"),
                    4 | 5 => format!("app.change('r{room}', {seq}, 'edit', 'edited {written}')"),
                    _ => format!("app.send('r{room}', 'p{person}', 'post {written}')"),
                };
                run(&client, &format!("SELECT {call}")).await;
            }
        }
        stage.open.send_modify(|open| *open += 1);
        let end = match random.below(6) {
            0 => "ROLLBACK",
            _ => "COMMIT",
        };
        let gate = stage.gate.read().await;
        run(&client, end).await;
        drop(gate);
        stage.open.send_modify(|open| *open -= 1);
        written += 1;
    }
    written
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_page_runs_and_its_exports_equal_the_reference_while_sessions_write() {
    let name = "the_page_runs_and_its_exports_equal_the_reference_while_sessions_write";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let chat = Chat::new(&server).await;
    chat.run(PEOPLE).await;
    let seed = getrandom::u64().unwrap();
    eprintln!("seed {seed}");
    let stage = Arc::new(Stage {
        gate: RwLock::new(()),
        open: watch::Sender::new(0),
        stop: CancellationToken::new(),
    });
    let mut writers = Vec::new();
    for number in 0..6 {
        let client = server.connect_as("chat", "chat").await;
        let random = Random(seed.wrapping_mul(number + 2));
        writers.push(tokio::spawn(write(Arc::clone(&stage), client, random)));
    }
    let mut jobs = Vec::new();
    for round in 0..12 {
        // Some have written and are not committed; they may commit with smaller gseqs afterwards.
        let gate = stage.gate.write().await;
        let mut open = stage.open.subscribe();
        let _ = timeout(Duration::from_millis(60), open.wait_for(|open| *open >= 3)).await;
        let log = chat.log().await;
        for person in 0..6 {
            let user = format!("p{person}");
            let job = chat.export(&user, &format!("{round}-{person}")).await;
            jobs.push((
                job,
                format!("{user} in round {round}"),
                log.export(&user, "all"),
            ));
        }
        drop(gate);
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    stage.stop.cancel();
    let mut written = 0;
    for writer in writers {
        written += writer.await.unwrap();
    }
    chat.work().await;
    let mut lines = 0;
    for (job, what, expected) in &jobs {
        assert_same_lines(what, &chat.lines(*job).await, expected);
        lines += expected.split(|byte| *byte == b'\n').count();
    }
    let late = "
        SELECT count(DISTINCT job_id)
        FROM ibid.export e, jsonb_array_elements_text(e.snapshot::jsonb -> 'xip') x
        JOIN ibid.message m ON m.xid::text = x
        WHERE m.gseq <= (e.snapshot::jsonb -> 'high')::bigint";
    let late: i64 = chat.admin.query_one(late, &[]).await.unwrap().get(0);
    eprintln!(
        "{} exports, {late} with posts in flight, {lines} lines, {written} transactions",
        jobs.len()
    );
    assert!(late > 10 && lines > 1000, "{late} {lines}");
    // Updating the rooms is what the write path does; the entries were only added.
    let found = chat.pg.inspect().await.unwrap().own_tables.unwrap();
    assert_eq!(found.failures, [""; 0]);
    assert_eq!(found.warnings, [""; 0]);
}
