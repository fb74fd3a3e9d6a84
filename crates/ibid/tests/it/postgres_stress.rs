//! Eight writers at work on one server, exports created all the time, and a crash in the middle:
//! every export is what a REPEATABLE READ transaction saw when it was created.
//!
//! What that transaction saw is asked for in plain SQL, which knows nothing of ibid's snapshots.
//! Most exports are created while no writer may commit. Everything else goes on meanwhile, so
//! transactions are in flight, have drawn their gseqs and are committed soon afterwards; the
//! answer is exact nevertheless. Other exports are created while writers commit. What they hold of
//! a conversation is its state after one of the commits between a look before and a look after.
//! Requests that the crash leaves without an answer are repeated under their keys.
//!
//! `IBID_TEST_STRESS_SECONDS` makes it longer.

mod crash;
mod load;
mod owner;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream;
use ibid::export::State;
use ibid::ids::JobId;
use ibid::ledger::{CreateError, Created};
use ibid::verify::verify;
use ibid::worker::{Worker, WorkerTerms};
use tokio::sync::{RwLock, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::{Client, IsolationLevel, NoTls};
use tokio_util::sync::CancellationToken;

use self::writer::{Random, Writer};
use crate::harness::{Installation, On, UNTIL_IDLE, assert_same_lines, until};
use crate::pg_server::PgServer;

const SECONDS: u64 = 8;
const WRITERS: u64 = 8;
const CONVS: u64 = 20;
/// Those who join and leave; u10 and u11 stay where they are.
const USERS: u64 = 10;
const LEAST_JOBS: usize = 500;
const PATIENCE: Duration = Duration::from_secs(30);
const TS: &str = "2026-01-05T09:30:00.000000Z";
/// The same time as the tables hold it.
const MICROS: i64 = 1_767_605_400_000_000;

/// What is committed is in `done`, with all the messages that it appended. `upto` is drawn last, so
/// it stands between the transaction's gseqs and those of the next one in the same conversation.
/// `seen` gives the lines of a user in a conversation, of the entries up to a gseq. Without `jit`,
/// which would compile it each time, and that takes longer than all of its rows.
const SCHEMA: &str = r#"
CREATE TABLE public.done (
    tx_label bigint PRIMARY KEY,
    xid      xid8 NOT NULL DEFAULT pg_current_xact_id(),
    upto     bigint NOT NULL DEFAULT nextval('ibid.log_gseq'),
    ops      jsonb NOT NULL
);
CREATE FUNCTION public.seen(who text, of_conv text, cut bigint) RETURNS text
LANGUAGE sql STABLE SET jit = off AS $$
    WITH inside AS (
        SELECT from_gseq AS after, least(to_gseq, cut + 1) AS before
        FROM ibid.stay WHERE user_id = who AND conv = of_conv AND from_gseq <= cut
    )
    SELECT coalesce(string_agg(format(
        E'{"body":"%s","conv":"%s","edited":%s,"recalled":%s,"seq":%s,"ts":"@TS","user":"%s"}\n',
        CASE WHEN state.kind = 'recall' THEN '' ELSE coalesce(edit.body, m.body) END, m.conv,
        (edit.body IS NOT NULL)::int, (state.kind IS NOT DISTINCT FROM 'recall')::int,
        m.seq, m.user_id), '' ORDER BY m.seq), '')
    FROM ibid.message m
    LEFT JOIN LATERAL (
        SELECT r.body FROM ibid.revision r
        WHERE r.conv = m.conv AND r.seq = m.seq AND r.kind = 'edit'
        AND EXISTS (SELECT FROM inside i WHERE r.gseq > i.after AND r.gseq < i.before)
        ORDER BY r.gseq DESC LIMIT 1
    ) edit ON true
    LEFT JOIN LATERAL (
        SELECT r.kind FROM ibid.revision r
        WHERE r.conv = m.conv AND r.seq = m.seq AND r.kind <> 'edit' AND r.gseq <= cut
        ORDER BY r.gseq DESC LIMIT 1
    ) state ON true
    WHERE m.conv = of_conv
    AND EXISTS (SELECT FROM inside i WHERE m.gseq > i.after AND m.gseq < i.before)
$$;
SELECT ibid.append_messages('c' || n, '{u0,u1,u2}', array_fill('@TS'::timestamptz, '{3}'), '{a,b,c}')
FROM generate_series(10, 29) n;
SELECT ibid.join_conv('c' || n, 'u' || u, '@TS')
FROM generate_series(10, 29) n, generate_series(0, 11) u WHERE (n + u) % 3 > 0;
"#;

/// What writers and the creator share.
struct Stage {
    url: String,
    /// Held by a writer while it commits.
    gate: RwLock<()>,
    /// Transactions that have written and are not ended.
    open: watch::Sender<usize>,
    committed: watch::Sender<usize>,
    stop: CancellationToken,
}

impl Stage {
    /// Connects as soon as the server answers.
    async fn connect(&self) -> Client {
        let connecting = async {
            loop {
                if let Ok((client, connection)) = tokio_postgres::connect(&self.url, NoTls).await {
                    tokio::spawn(connection);
                    return client;
                }
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, connecting)
            .await
            .expect("the server answers")
    }

    async fn commits(&self, more: usize) {
        let mut committed = self.committed.subscribe();
        let enough = *committed.borrow() + more;
        let waiting = timeout(PATIENCE, committed.wait_for(|now| *now >= enough));
        waiting.await.expect("writers go on").unwrap();
    }
}

/// What one REPEATABLE READ transaction sees.
struct Sight {
    ever_inside: bool,
    /// The user's lines of each conversation.
    lines: Vec<(String, String)>,
    commits: BTreeSet<(String, i64)>,
}

impl Sight {
    /// If nothing was committed since.
    fn alone(self) -> Truth {
        let lines = self.lines.into_iter();
        lines.map(|(conv, lines)| (conv, vec![lines])).collect()
    }
}

/// Of each conversation what an export may hold.
type Truth = Vec<(String, Vec<String>)>;

const SEEN: &str = "SELECT conv, public.seen($1, conv, 1::bigint << 60) FROM ibid.conv
                    WHERE $2 IN ('all', 'conv:' || conv) ORDER BY conv";
const COMMITS: &str = "SELECT DISTINCT op ->> 'conv', upto
                       FROM public.done, jsonb_array_elements(ops) op";
const EVER: &str = "SELECT EXISTS (SELECT FROM ibid.stay
                    WHERE user_id = $1 AND $2 IN ('all', 'conv:' || conv))";

async fn look(client: &mut Client, user: &str, scope: &str, commits: bool) -> Sight {
    let level = IsolationLevel::RepeatableRead;
    let tx = client.build_transaction().isolation_level(level).start();
    let tx = tx.await.unwrap();
    let lines = tx.query(SEEN, &[&user, &scope]).await.unwrap();
    let ever = tx.query_one(EVER, &[&user, &scope]).await.unwrap();
    let commits = match commits {
        true => tx.query(COMMITS, &[]).await.unwrap(),
        false => Vec::new(),
    };
    tx.commit().await.unwrap();
    Sight {
        ever_inside: ever.get(0),
        lines: lines.iter().map(|row| (row.get(0), row.get(1))).collect(),
        commits: commits.iter().map(|row| (row.get(0), row.get(1))).collect(),
    }
}

struct Job {
    id: JobId,
    what: String,
    truth: Truth,
}

impl Job {
    /// Compares the file with the truth, and with what is rendered now.
    async fn check(self, home: Arc<Installation>) {
        let file = home.lines(self.id).await;
        self.compare(&file);
        let (source, ledger) = (home.exporter.source.as_ref(), home.exporter.ledger.as_ref());
        let vault = &home.exporter.vault;
        let found = verify(source, ledger, vault, self.id, &mut |_, _| {}).await;
        let found = found.unwrap();
        let same = (found.artefact_equal, found.stored_equal);
        assert_eq!(same, (Some(true), Some(true)), "{}", self.what);
    }

    fn compare(&self, file: &[u8]) {
        let text = std::str::from_utf8(file).unwrap();
        let mut of_convs: BTreeMap<&str, String> = BTreeMap::new();
        for line in text.split_inclusive('\n') {
            let (_, after) = line.split_once(r#"","conv":""#).unwrap();
            let (conv, _) = after.split_once('"').unwrap();
            of_convs.entry(conv).or_default().push_str(line);
        }
        let mut sorted = String::new();
        for (conv, states) in &self.truth {
            let lines = of_convs.remove(&**conv).unwrap_or_default();
            if !states.contains(&lines) {
                let what = format!("{}, {conv}, {} states", self.what, states.len());
                assert_same_lines(&what, lines.as_bytes(), states[0].as_bytes());
            }
            sorted.push_str(&lines);
        }
        assert_same_lines(&self.what, file, sorted.as_bytes());
    }
}

struct Creator {
    home: Arc<Installation>,
    stage: Arc<Stage>,
    random: Random,
    client: Client,
    jobs: Vec<Job>,
    refused: usize,
}

impl Creator {
    /// Creates an export while nobody may commit.
    async fn create(&mut self) {
        let (user, scope) = self.choose();
        let seen = look(&mut self.client, &user, &scope, false).await;
        if let Some((id, what)) = self.ask(&user, &scope, seen.ever_inside).await {
            assert!(seen.ever_inside || scope == "all", "{what}");
            let truth = seen.alone();
            self.jobs.push(Job { id, what, truth });
        }
    }

    /// Creates an export at the moment at which all writers that waited for it commit.
    async fn create_beside_commits(&mut self) {
        let (user, scope) = self.choose();
        let stage = Arc::clone(&self.stage);
        let gate = stage.gate.write().await;
        let before = look(&mut self.client, &user, &scope, true).await;
        drop(gate);
        let asked = self.ask(&user, &scope, before.ever_inside).await;
        // The log would grow while it is looked at.
        let _gate = stage.gate.write().await;
        if let Some((id, what)) = asked {
            let after = look(&mut self.client, &user, &scope, true).await;
            assert!(after.ever_inside || scope == "all", "{what}");
            let truth = self.between(&user, before, &after).await;
            self.jobs.push(Job { id, what, truth });
        }
    }

    fn choose(&mut self) -> (String, String) {
        let scope = match self.random.below(3) {
            0 => format!("conv:{}", self.random.conv()),
            _ => "all".to_owned(),
        };
        (self.random.user(), scope)
    }

    /// Asks for an export. One of a conversation in which the user never was is refused.
    async fn ask(&mut self, user: &str, scope: &str, ever_inside: bool) -> Option<(JobId, String)> {
        let number = self.jobs.len() + self.refused;
        let what = format!("export {number} of {scope} for {user}");
        match self.home.create(user, scope, &number.to_string()).await {
            Ok(Created::New(export)) => Some((export.job_id, what)),
            Err(CreateError::ScopeInvalid) if !ever_inside && scope != "all" => {
                self.refused += 1;
                None
            }
            other => panic!("{what}: {other:?}"),
        }
    }

    /// What a user may have seen of each conversation between two looks.
    async fn between(&self, user: &str, before: Sight, after: &Sight) -> Truth {
        let commits = after.commits.difference(&before.commits);
        let commits: Vec<_> = commits.cloned().collect();
        let mut truth = before.alone();
        for (conv, upto) in commits {
            if let Some((_, states)) = truth.iter_mut().find(|(of, _)| *of == conv) {
                let sql = "SELECT public.seen($1, $2, $3)";
                let row = self.client.query_one(sql, &[&user, &conv, &upto]).await;
                states.push(row.unwrap().get(0));
            }
        }
        truth
    }

    async fn round(&mut self) {
        let stage = Arc::clone(&self.stage);
        let gate = stage.gate.write().await;
        // Usually more than these are in flight; fewer if they wait for each other.
        let mut open = stage.open.subscribe();
        let _ = timeout(Duration::from_millis(60), open.wait_for(|open| *open >= 4)).await;
        for _ in 0..8 {
            self.create().await;
        }
        drop(gate);
        stage.commits(10).await;
        for _ in 0..4 {
            self.create_beside_commits().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn eight_writers_and_a_crash_never_make_a_wrong_export() {
    let Some(server) = PgServer::start("eight_writers_and_a_crash_never_make_a_wrong_export")
    else {
        return;
    };
    let seed = getrandom::u64().unwrap();
    eprintln!("seed {seed}");
    let server = Arc::new(server);
    let home = Arc::new(Installation::on(&On::Postgres(Arc::clone(&server))).await);
    let stage = Arc::new(Stage {
        url: home.postgres().url(),
        gate: RwLock::new(()),
        open: watch::Sender::new(0),
        committed: watch::Sender::new(0),
        stop: CancellationToken::new(),
    });
    let client = stage.connect().await;
    let schema = SCHEMA.replace("@TS", TS);
    client.batch_execute(&schema).await.unwrap();
    let writers = (0..WRITERS).map(|number| tokio::spawn(Writer::new(&stage, number, seed).run()));
    let writers: Vec<_> = writers.collect();
    let stop_worker = CancellationToken::new();
    let worker = tokio::spawn(run_worker(Arc::clone(&home), false, stop_worker.clone()));

    let mut creator = Creator {
        home: Arc::clone(&home),
        stage: Arc::clone(&stage),
        random: Random(seed),
        client,
        jobs: Vec::new(),
        refused: 0,
    };
    let half = Duration::from_secs(seconds()) / 2;
    for (end, least) in [(half, LEAST_JOBS / 2), (half, LEAST_JOBS)] {
        let end = Instant::now() + end;
        while Instant::now() < end || creator.jobs.len() < least {
            creator.round().await;
        }
        if least < LEAST_JOBS {
            let first = creator.jobs[0].id;
            until("the worker works", async || {
                home.state(first).await == State::Done
            })
            .await;
            let unanswered = creator.ask_without_an_answer().await;
            let server = Arc::clone(&server);
            let crash = move || (server.stop_immediate(), server.start_again());
            tokio::task::spawn_blocking(crash).await.unwrap();
            creator.client = stage.connect().await;
            creator.let_commits_be_answered().await;
            let answers = async || home.exporter.ledger.find(first).await.is_ok();
            until("the connections are new", answers).await;
            creator.ask_again(unanswered).await;
        }
    }
    stage.stop.cancel();
    let (mut committed, mut rolled_back) = (Vec::new(), Vec::new());
    let (mut again, mut drawn) = (0, 0);
    for writer in writers {
        let mut writer = writer.await.unwrap();
        assert!(writer.lost > 0, "it has met the crash");
        again += writer.again;
        drawn += writer.late;
        committed.append(&mut writer.committed);
        rolled_back.append(&mut writer.rolled_back);
    }
    stop_worker.cancel();
    worker.await.unwrap();
    // What the crash has interrupted is due again.
    home.clock.advance(Duration::from_secs(3600));
    run_worker(Arc::clone(&home), true, CancellationToken::new()).await;

    let Creator { jobs, client, .. } = creator;
    let several = |job: &&Job| job.truth.iter().any(|(_, states)| states.len() > 1);
    let (several, exports) = (jobs.iter().filter(several).count(), jobs.len());
    let checks = jobs.into_iter().map(|job| job.check(Arc::clone(&home)));
    let mut checks = stream::iter(checks).map(tokio::spawn).buffer_unordered(4);
    while let Some(checked) = checks.next().await {
        checked.unwrap();
    }
    let number = async |sql: &str| -> i64 { client.query_one(sql, &[]).await.unwrap().get(0) };
    let late = number(LATE).await;
    eprintln!(
        "{exports} exports, {late} with edits in flight, {several} beside commits; {} transactions, \
         {} rolled back, {again} tried again, {drawn} with gseqs drawn long before; {} messages",
        committed.len(),
        rolled_back.len(),
        number("SELECT count(*) FROM ibid.message").await
    );
    assert!(late > 20 && several > 0, "{late} {several}");
    assert!(drawn > 20, "{drawn}");
    let told = "SELECT count(*) FROM public.done WHERE tx_label = ANY ($1)";
    let there = client.query_one(told, &[&committed]).await.unwrap();
    assert_eq!(there.get::<_, i64>(0), committed.len() as i64);
    let there = client.query_one(told, &[&rolled_back]).await.unwrap();
    assert_eq!(there.get::<_, i64>(0), 0);
    assert_eq!(number(MISSING).await, 0);
    assert_eq!(number(GAPS).await, 0);
}

/// Exports whose snapshot leaves out an edit that has a small enough gseq and is committed now.
const LATE: &str = "
SELECT count(DISTINCT job_id)
FROM ibid.export e, jsonb_array_elements_text(e.snapshot::jsonb -> 'xip') x
JOIN (SELECT xid::text, min(gseq) AS gseq FROM ibid.revision GROUP BY xid) r ON r.xid = x
WHERE r.gseq <= (e.snapshot::jsonb -> 'high')::bigint";

/// Messages that were appended and are not in the log, or the other way round.
const MISSING: &str = "
SELECT count(*) FROM (SELECT * FROM ibid.message WHERE seq > 3) m FULL JOIN (
    SELECT xid, op ->> 'conv' AS conv, op ->> 'body' AS body
    FROM public.done, jsonb_array_elements(ops) op WHERE op ? 'body'
) o ON (o.xid, o.conv, o.body) = (m.xid, m.conv, m.body)
WHERE m.conv IS NULL OR o.conv IS NULL";

const GAPS: &str = "
SELECT count(*) FROM ibid.conv c WHERE (c.last_seq, c.last_seq, 1::bigint) IS DISTINCT FROM
    (SELECT (count(*), max(seq), min(seq)) FROM ibid.message m WHERE m.conv = c.conv)";

async fn run_worker(home: Arc<Installation>, until_idle: bool, stop: CancellationToken) {
    let terms = WorkerTerms {
        until_idle,
        ..UNTIL_IDLE
    };
    let workshop = home.exporter.workshop(2, None);
    let worker = Worker::new(workshop, terms, Arc::default(), |_| {});
    worker.run(&stop).await.expect("the ledger answers");
}

fn seconds() -> u64 {
    asked_for("IBID_TEST_STRESS_SECONDS").unwrap_or(SECONDS)
}

/// How large somebody wants a test to be.
fn asked_for(variable: &str) -> Option<u64> {
    #[expect(
        clippy::disallowed_methods,
        reason = "how large a test is, is no configuration of the product"
    )]
    let text = std::env::var_os(variable)?;
    Some(text.to_str()?.parse().expect("a number"))
}
