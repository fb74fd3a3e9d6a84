//! Everything through a pooler in transaction mode: a real PgBouncer, in front of a real server,
//! with fewer connections to it than there are to itself. Statements of one connection then reach
//! the server over one connection and the next, between those of others.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use futures::TryStreamExt as _;
use futures::future::join_all;
use ibid::cut::CutRule;
use ibid::export::{Event, State};
use ibid::exporter::{Database, Databases, ExportTerms, Exporter};
use ibid::ids::{JobId, UserId};
use ibid::ledger::{Created, LedgerError};
use ibid::link::KeyRing;
use ibid::postgres::{ConnectError, Pg};
use ibid::time::{Clock, Time};
use ibid::vault::Vault;
use ibid::verify::verify;
use ibid::worker::{Worker, WorkerTerms};
use tokio_postgres::{NoTls, SimpleQueryMessage};
use tokio_util::sync::CancellationToken;

use crate::events::{edit, join, leave, recall, say};
use crate::harness::{
    LEASE, NO_LIMITS, UNTIL_IDLE, assert_same_lines, create, gunzip, import_into, offer, until,
};
use crate::pg_server::{PgServer, search_path};
use crate::reference::Log;

const PORT: u16 = 6432;
/// Connections to a database of the server.
const POOL: usize = 3;
const PART_MESSAGES: u64 = 40;
const USERS: [&str; 6] = ["ann", "bob", "cid", "dan", "eve", "fay"];
const CONVS: [&str; 4] = ["a", "b", "c", "d"];

struct Pooler {
    folder: tempfile::TempDir,
    process: Child,
}

impl Pooler {
    /// Starts a pooler before a server, or says that `test` is skipped where there is none.
    async fn start(server: &PgServer, test: &str) -> Option<Pooler> {
        let system = [PathBuf::from("/usr/sbin"), PathBuf::from("/usr/local/sbin")];
        let mut programs = search_path().into_iter().chain(system);
        let programs = programs.find_map(|folder| {
            let program = folder.join("pgbouncer");
            program.exists().then_some(program)
        });
        let Some(program) = programs else {
            eprintln!("skipped: {test}, because PgBouncer is not installed");
            return None;
        };
        let folder = tempfile::Builder::new()
            .prefix("ibid-pooler-")
            .tempdir_in("/tmp")
            .unwrap();
        let settings = folder.path().join("pgbouncer.ini");
        std::fs::write(&settings, ini(server, folder.path())).unwrap();
        server.give_away(folder.path());
        let mut command = server.command(&program);
        let process = command.arg("--quiet").arg(&settings).spawn().unwrap();
        let pooler = Pooler { folder, process };
        let answers = async || {
            let answer = tokio_postgres::connect(&pooler.url("pgbouncer"), NoTls).await;
            answer.is_ok()
        };
        until("the pooler answers", answers).await;
        Some(pooler)
    }

    fn url(&self, database: &str) -> String {
        let folder = self.folder.path().display().to_string();
        let folder = folder.replace('/', "%2F");
        format!("postgres://postgres@{folder}:{PORT}/{database}")
    }

    /// How many connections there are to the pooler, and from it, for a database.
    async fn connections(&self, database: &str) -> (usize, usize) {
        let url = self.url("pgbouncer");
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        tokio::spawn(connection);
        let count = async |what: &str| {
            let rows = client.simple_query(&format!("SHOW {what}")).await.unwrap();
            let of_database = |row: &&SimpleQueryMessage| match row {
                SimpleQueryMessage::Row(row) => row.get("database") == Some(database),
                _ => false,
            };
            rows.iter().filter(of_database).count()
        };
        (count("CLIENTS").await, count("SERVERS").await)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ini(server: &PgServer, folder: &Path) -> String {
    let (to, here) = (server.folder().display(), folder.display());
    format!(
        "[databases]
* = host={to} user=postgres
[pgbouncer]
unix_socket_dir = {here}
listen_port = {PORT}
auth_type = any
pool_mode = transaction
default_pool_size = {POOL}
logfile = {here}/log
"
    )
}

/// A process of ibid: a pool of its own, workers of its own.
async fn node(url: &str, folder: &Path) -> Exporter {
    let terms = ExportTerms {
        limits: NO_LIMITS,
        cut: CutRule {
            part_bytes: 1024 * 1024,
            part_messages: PART_MESSAGES,
        },
        link_life: Duration::from_secs(300),
    };
    let database = Database::Postgres(url.to_owned());
    let databases = Databases::open(&database, None, clock()).await.unwrap();
    Exporter::on(databases, Vault::in_folder(folder).unwrap(), terms)
}

fn clock() -> Clock {
    Clock::frozen_at(Time::parse("2026-01-05T12:00:00Z").unwrap())
}

fn sample() -> Vec<String> {
    let mut lines = Vec::new();
    for (at, conv) in CONVS.iter().enumerate() {
        for (nth, user) in USERS.iter().enumerate().filter(|(nth, _)| *nth != at) {
            lines.push(join(conv, user));
            lines.extend((0..30).map(|n| say(conv, &format!("{conv} {nth} {n}"))));
            lines.push(edit(conv, 5 + nth as u64, &format!("better {nth}")));
        }
        lines.push(leave(conv, "fay"));
        lines.extend((0..30).map(|n| say(conv, &format!("{conv} unseen {n}"))));
        lines.push(recall(conv, 11));
    }
    lines
}

/// Works as a server does: listens, and looks by itself now and then.
async fn serve(exporter: Exporter, poll: Duration, stop: CancellationToken) {
    let terms = WorkerTerms {
        workers: 2,
        poll,
        until_idle: false,
        ..UNTIL_IDLE
    };
    let workshop = exporter.workshop(2, None);
    let worker = Worker::new(workshop, terms, exporter.created(), |_| {});
    tokio::select! {
        worked = worker.run(&stop) => worked.expect("the ledger answers"),
        () = exporter.hear_of_jobs() => panic!("it does not end"),
    }
}

async fn state(exporter: &Exporter, job: JobId) -> State {
    let found = exporter.ledger.find(job).await.unwrap();
    found.unwrap().export.state
}

async fn download(exporter: &Exporter, ring: &KeyRing, user: &str, job: JobId) -> Vec<u8> {
    let user = UserId::parse(user).unwrap();
    let found = exporter.find(&user, job).await.unwrap().unwrap();
    let now = exporter.ledger.now().await.unwrap();
    let (query, _) = exporter.link(ring, &found.export, now);
    let download = exporter.download(ring, job, &query).await.unwrap();
    let whole = 0..download.artefact.bytes;
    let bytes = exporter.read(&download, whole).await.unwrap();
    let bytes: Vec<_> = bytes.try_collect().await.unwrap();
    bytes.concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exports_are_the_same_through_a_pooler_in_transaction_mode() {
    let test = "exports_are_the_same_through_a_pooler_in_transaction_mode";
    let Some(server) = PgServer::start(test) else {
        return;
    };
    let Some(pooler) = Pooler::start(&server, test).await else {
        return;
    };
    server.create_database("pooled").await;
    let url = pooler.url("pooled");
    let pgs = [Pg::connect(&url).await, Pg::connect(&url).await].map(Result::unwrap);
    let unmigrated = pgs[0].check_schema().await;
    assert!(matches!(unmigrated, Err(ConnectError::NotMigrated)));
    let mut applied = join_all(pgs.iter().map(Pg::migrate)).await;
    applied.sort_by_key(|applied| *applied.as_ref().unwrap());
    assert!(matches!(applied[..], [Ok(0), Ok(1..)]), "{applied:?}");
    let folder = tempfile::tempdir().unwrap();
    let nodes = [
        node(&url, folder.path()).await,
        node(&url, folder.path()).await,
    ];

    let mut log = Log::new();
    for lines in sample().chunks(250) {
        let file = lines.join("\n");
        let imported = import_into(nodes[0].source.as_ref(), file.as_bytes(), false).await;
        imported.0.unwrap();
        lines.iter().for_each(|line| log.apply(line));
    }

    // Each request twice at once, to either node.
    let scopes = ["all".to_owned(), "conv:a".to_owned(), "conv:c".to_owned()];
    let mut asked = Vec::new();
    for (user, scope) in USERS
        .iter()
        .flat_map(|u| scopes.iter().map(move |s| (u, s)))
    {
        let is_there = scope == "all" || log.has_stay(user, &scope["conv:".len()..]);
        if is_there {
            asked.push((*user, scope.as_str()));
        }
    }
    assert!(asked.len() > 15);
    let twice = asked.iter().map(async |&(user, scope)| {
        let of = |node| create(node, user, scope, scope);
        let (one, other) = tokio::join!(of(&nodes[0]), of(&nodes[1]));
        match (one.unwrap(), other.unwrap()) {
            (Created::New(new), Created::Replayed(old))
            | (Created::Replayed(old), Created::New(new)) => {
                assert_eq!(old.job_id, new.job_id);
                new.job_id
            }
            both => panic!("{both:?}"),
        }
    });
    let jobs = join_all(twice).await;

    let stop = CancellationToken::new();
    let polls = Duration::from_millis(5);
    let serving = nodes.clone();
    let serving = serving.map(|node| tokio::spawn(serve(node, polls, stop.clone())));
    let (mut clients, mut servers) = (0, 0);
    for &job in &jobs {
        let done = async || state(&nodes[0], job).await == State::Done;
        until("a job is done", done).await;
        let now = pooler.connections("pooled").await;
        (clients, servers) = (clients.max(now.0), servers.max(now.1));
    }
    // Otherwise no statement met what another connection had left.
    assert!(clients > servers && servers <= POOL, "{clients} {servers}");

    let ring = KeyRing::parse(&KeyRing::generate(clock().now()).unwrap()).unwrap();
    for (&(user, scope), &job) in asked.iter().zip(&jobs) {
        let what = format!("{scope} for {user}");
        let file = download(&nodes[1], &ring, user, job).await;
        assert_same_lines(&what, &gunzip(&file), &log.export(user, scope));
        let (source, ledger) = (nodes[1].source.as_ref(), nodes[1].ledger.as_ref());
        let found = verify(source, ledger, &nodes[1].vault, job, &mut |_, _| {}).await;
        let found = found.unwrap();
        let same = (found.artefact_equal, found.stored_equal);
        assert_eq!(same, (Some(true), Some(true)), "{what}");
    }
    stop.cancel();
    for node in serving {
        node.await.unwrap();
    }
    let client = server.connect("pooled").await;
    let sql = "SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'),
                      (SELECT count(*) FROM ibid.export)";
    let row = client.query_one(sql, &[]).await.unwrap();
    let left: (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(left, (0, jobs.len() as i64), "locks, jobs");
}

/// The node that works listens, but a pooler tells it nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_a_pooler_jobs_are_found_by_polling_and_leases_are_kept() {
    let test = "through_a_pooler_jobs_are_found_by_polling_and_leases_are_kept";
    let Some(server) = PgServer::start(test) else {
        return;
    };
    let Some(pooler) = Pooler::start(&server, test).await else {
        return;
    };
    server.create_database("pooled").await;
    let url = pooler.url("pooled");
    Pg::connect(&url).await.unwrap().migrate().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (asks, works) = (
        node(&url, folder.path()).await,
        node(&url, folder.path()).await,
    );
    let lines = sample();
    let imported = import_into(asks.source.as_ref(), lines.join("\n").as_bytes(), false).await;
    imported.0.unwrap();

    let held = create(&asks, "ann", "all", "held").await.unwrap();
    let claim = works.ledger.claim(offer(0)).await.unwrap().unwrap();
    let Created::New(export) = held else {
        panic!("{held:?}");
    };
    let job = export.job_id;
    assert_eq!(claim.export.job_id, job);
    let other = asks.ledger.claim(offer(0)).await.unwrap();
    assert!(other.is_none(), "{other:?}");
    works.ledger.renew(job, claim.id, LEASE).await.unwrap();
    let back = works.ledger.settle(job, claim.id, Event::GivenBack).await;
    assert_eq!(back.unwrap().state, State::Queued);
    let lost = works.ledger.renew(job, claim.id, LEASE).await;
    assert!(matches!(lost, Err(LedgerError::LeaseLost)), "{lost:?}");

    // Idle by now, and nobody in its process wakes it.
    let stop = CancellationToken::new();
    let serving = tokio::spawn(serve(works, Duration::from_millis(20), stop.clone()));
    until("it works", async || state(&asks, job).await == State::Done).await;
    for key in ["one", "two", "three"] {
        let asked = create(&asks, "bob", "conv:a", key).await.unwrap();
        let Created::New(export) = asked else {
            panic!("{asked:?}");
        };
        let done = async || state(&asks, export.job_id).await == State::Done;
        until("a job of another node is found", done).await;
    }
    stop.cancel();
    serving.await.unwrap();
}
