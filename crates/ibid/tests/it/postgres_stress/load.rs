//! A bulk load in one transaction that stays open, beside one that writes in another database of
//! the cluster: exports are created and made meanwhile, and hold nothing of it.
//!
//! `IBID_TEST_LOAD_ROWS` makes it larger.

use std::sync::Arc;
use std::time::Duration;

use ibid::ids::JobId;
use ibid::snapshot::Snapshot;
use ibid::verify::verify;
use tokio::time::Instant;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::{MICROS, TS, asked_for, run_worker};
use crate::events::{edit, join, leave, say};
use crate::harness::{Installation, On, assert_same_lines};
use crate::pg_server::PgServer;
use crate::reference::Log;

const ROWS: u64 = 200_000;
/// How many messages the load edits that were there before it.
const EDITS: u64 = 100;
/// How many exports a time is the middle one of.
const SAMPLES: usize = 9;

struct Bench {
    home: Arc<Installation>,
    /// What was committed, in order.
    log: Log,
    writer: Client,
    said: u64,
}

/// An export, what it must hold, and how long it took.
struct Made {
    job: JobId,
    what: &'static str,
    expected: Vec<u8>,
    created_in: Duration,
    made_in: Duration,
}

impl Bench {
    async fn new(server: &Arc<PgServer>) -> Bench {
        let home = Installation::on(&On::Postgres(Arc::clone(server))).await;
        let mut lines = Vec::new();
        for conv in ["a", "bulk", "c"] {
            lines.push(say(conv, "before"));
            lines.push(join(conv, "ann"));
            lines.extend((1..=200).map(|n| say(conv, &format!("{conv} {n}"))));
            lines.push(edit(conv, 7, "other words"));
            lines.push(join(conv, "eve"));
            lines.push(leave(conv, "eve"));
        }
        home.import(&lines).await;
        let mut log = Log::new();
        lines.iter().for_each(|line| log.apply(line));
        let writer = home.postgres().client().await;
        Bench {
            home: Arc::new(home),
            log,
            writer,
            said: 0,
        }
    }

    /// One more message, whose gseq is above those of the load once there is one.
    async fn say(&mut self) {
        self.said += 1;
        let body = format!("meanwhile {}", self.said);
        let sql = format!("SELECT ibid.append_message('c', 'bob', '{TS}', '{body}')");
        self.writer.batch_execute(&sql).await.unwrap();
        self.log.apply(&say("c", &body));
    }

    async fn create(&mut self) -> (JobId, Vec<u8>, Duration) {
        self.say().await;
        let asked = Instant::now();
        let job = self.home.export("ann", "all").await;
        (job, self.log.export("ann", "all"), asked.elapsed())
    }

    async fn export(&mut self, what: &'static str) -> Made {
        let (job, expected, created_in) = self.create().await;
        let began = Instant::now();
        self.work().await;
        let made_in = began.elapsed();
        assert_same_lines(what, &self.home.lines(job).await, &expected);
        Made {
            job,
            what,
            expected,
            created_in,
            made_in,
        }
    }

    async fn samples(&mut self, what: &'static str) -> Vec<Made> {
        let mut made = Vec::new();
        while made.len() < SAMPLES {
            made.push(self.export(what).await);
        }
        made
    }

    async fn work(&self) {
        // However long it takes: the load may be as large as somebody wants.
        run_worker(Arc::clone(&self.home), true, CancellationToken::new()).await;
    }

    async fn snapshot(&self, job: JobId) -> (String, Snapshot) {
        let sql = "SELECT snapshot FROM ibid.export WHERE job_id = $1";
        let row = self.writer.query_one(sql, &[&job.to_string()]).await;
        let text: String = row.unwrap().get(0);
        let snapshot = serde_json::from_str(&text).unwrap();
        (text, snapshot)
    }

    async fn unchanged(&self, made: &Made) {
        let Made {
            job,
            what,
            expected,
            ..
        } = made;
        assert_same_lines(what, &self.home.lines(*job).await, expected);
        let exporter = &self.home.exporter;
        let (source, ledger) = (exporter.source.as_ref(), exporter.ledger.as_ref());
        let found = verify(source, ledger, &exporter.vault, *job, &mut |_, _| {}).await;
        let found = found.unwrap();
        let same = (found.artefact_equal, found.stored_equal);
        assert_eq!(same, (Some(true), Some(true)), "{what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_load_in_flight_is_in_no_export_and_in_nobodys_way() {
    let Some(server) = PgServer::start("a_large_load_in_flight_is_in_no_export_and_in_nobodys_way")
    else {
        return;
    };
    let rows = asked_for("IBID_TEST_LOAD_ROWS").unwrap_or(ROWS);
    let mut bench = Bench::new(&Arc::new(server)).await;
    let mut made = bench.samples("without a load").await;

    let elsewhere = bench.home.postgres().neighbour().await;
    let elsewhere_xid = begin(&elsewhere, "CREATE TABLE public.other AS SELECT 1").await;
    let loader = bench.home.postgres().client().await;
    let sql = format!(
        "UPDATE ibid.conv SET last_seq = last_seq + {rows} WHERE conv = 'bulk';
         INSERT INTO ibid.revision (conv, seq, ts, kind, body)
         SELECT 'bulk', n, {MICROS}, 'edit', 'loaded ' || n FROM generate_series(1, {EDITS}) n"
    );
    let load_xid = begin(&loader, &sql).await;
    let began = Instant::now();
    let load = tokio::spawn(async move {
        let sql = format!(
            "INSERT INTO ibid.message (conv, seq, ts, user_id, body)
             SELECT conv, last_seq - {rows} + n, {MICROS}, 'bob', 'load ' || n
             FROM ibid.conv, generate_series(1, {rows}) n WHERE conv = 'bulk' ORDER BY n"
        );
        loader.batch_execute(&sql).await.unwrap();
        loader
    });
    made.push(bench.export("while rows are inserted").await);
    while !load.is_finished() {
        made.push(bench.export("while rows are inserted").await);
    }
    let loader = load.await.unwrap();
    let loaded_in = began.elapsed();
    made.extend(bench.samples("while rows are uncommitted").await);
    let (late, expected_late, _) = bench.create().await;

    let sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
    let backends: i64 = bench.writer.query_one(sql, &[]).await.unwrap().get(0);
    let (text, snapshot) = bench.snapshot(late).await;
    for xid in [load_xid, elsewhere_xid] {
        assert!(snapshot.xip.contains(&xid), "{xid} {text}");
    }
    assert!(snapshot.xip.len() <= backends as usize, "{backends} {text}");
    let most = 100 + 21 * backends as usize;
    assert!(text.len() <= most, "more than {most} bytes: {text}");
    assert!(snapshot.high > rows, "the load has no gseqs yet: {text}");

    loader.batch_execute("COMMIT").await.unwrap();
    elsewhere.batch_execute("COMMIT").await.unwrap();
    bench.work().await;
    let what = "created before the load was committed, made afterwards";
    assert_same_lines(what, &bench.home.lines(late).await, &expected_late);
    for made in &made {
        bench.unchanged(made).await;
    }
    let job = bench.home.export("ann", "conv:bulk").await;
    bench.work().await;
    for n in 1..=EDITS {
        bench.log.apply(&edit("bulk", n, &format!("loaded {n}")));
    }
    let mut expected = bench.log.export("ann", "conv:bulk");
    for n in 1..=rows {
        let (seq, body) = (201 + n, format!("load {n}"));
        let line = format!(
            r#"{{"body":"{body}","conv":"bulk","edited":0,"recalled":0,"seq":{seq},"ts":"{TS}","user":"bob"}}"#
        );
        expected.extend_from_slice(line.as_bytes());
        expected.push(b'\n');
    }
    let what = "once the load is committed";
    assert_same_lines(what, &bench.home.lines(job).await, &expected);

    eprintln!("{rows} rows loaded in {loaded_in:?}; snapshot {text}");
    for of in made.chunk_by(|a, b| a.what == b.what) {
        eprintln!(
            "{}: {} exports, created in {:?}, made in {:?}",
            of[0].what,
            of.len(),
            middle(of, |made| made.created_in),
            middle(of, |made| made.made_in)
        );
    }
}

/// Begins a transaction that writes, and gives its number.
async fn begin(client: &Client, sql: &str) -> u64 {
    let sql = format!("BEGIN; {sql}");
    client.batch_execute(&sql).await.unwrap();
    let sql = "SELECT pg_current_xact_id()::text";
    let xid: String = client.query_one(sql, &[]).await.unwrap().get(0);
    xid.parse().unwrap()
}

fn middle(made: &[Made], of: impl Fn(&Made) -> Duration) -> Duration {
    let mut times: Vec<_> = made.iter().map(of).collect();
    times.sort();
    times[times.len() / 2]
}
