//! One installation as a test uses it: a real SQLite file or a database in a real PostgreSQL
//! server, a real disk, and a clock that stands still until the test moves it.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ibid::cut::CutRule;
use ibid::event::Invalid;
use ibid::export::{Artefact, State, Terms};
use ibid::exporter::{ExportTerms, Exporter};
use ibid::ids::{ClaimId, JobId, UserId};
use ibid::import::{ImportError, Manner, Note, Report, import};
use ibid::janitor::Janitor;
use ibid::key::IdempotencyKey;
use ibid::ledger::postgres::PostgresLedger;
use ibid::ledger::sqlite::SqliteLedger;
use ibid::ledger::{Claim, CreateError, Created, Found, Ledger, Offer, Part};
use ibid::limits::Limits;
use ibid::postgres::Pg;
use ibid::scope::{Format, Request, Scope};
use ibid::segment::EncoderId;
use ibid::source::Source;
use ibid::source::postgres::PostgresSource;
use ibid::source::sqlite::SqliteSource;
use ibid::sqlite::Db;
use ibid::time::{Clock, Time};
use ibid::vault::{Key, Vault};
use ibid::work::Workshop;
use ibid::worker::{AttemptReport, Worker, WorkerTerms};
use tokio_util::sync::CancellationToken;

use crate::pg_server::PgServer;

pub const LEASE: Duration = Duration::from_secs(30);

pub const TERMS: Terms = Terms {
    max_attempts: 5,
    retention: Duration::from_secs(7 * 86_400),
};

pub const NO_LIMITS: Limits = Limits {
    unfinished_per_user: 0,
    exports_per_user_per_day: 0,
};

/// How workers work here unless a test says otherwise.
pub const UNTIL_IDLE: WorkerTerms = WorkerTerms {
    workers: 1,
    lease: LEASE,
    poll: Duration::from_millis(5),
    terms: TERMS,
    running_per_user: 0,
    until_idle: true,
};

/// Where log and ledger are.
pub enum On {
    Sqlite,
    /// Each installation has a database of its own in it.
    Postgres(Arc<PgServer>),
}

/// Makes two tests out of each of these functions, one for each database. One that is left out
/// is code that nobody uses, which the compiler says.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(&crate::harness::On::Sqlite).await;
                }
            )*
        }

        crate::harness::on_postgres!($($name),*);
    };
}
pub(crate) use on_both;

/// Makes tests of functions that need PostgreSQL. Where it is not installed, each says that it
/// is skipped.
macro_rules! on_postgres {
    ($($name:ident),* $(,)?) => {
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let server = crate::pg_server::PgServer::start(stringify!($name));
                    if let Some(server) = server {
                        super::$name(&crate::harness::On::Postgres(server.into())).await;
                    }
                }
            )*
        }
    };
}
pub(crate) use on_postgres;

pub struct Installation {
    pub exporter: Exporter,
    pub clock: Clock,
    folder: tempfile::TempDir,
    postgres: Option<Database>,
    /// The database of the log, where that is another one and not a file of SQLite.
    log: Option<Database>,
    terms: ExportTerms,
    keys: AtomicU64,
}

impl Installation {
    /// On SQLite, without limits, and cutting parts as a server does by default.
    pub fn new() -> Installation {
        Installation::cutting_at(0)
    }

    /// One on SQLite whose parts hold at most so many messages.
    pub fn cutting_at(part_messages: u64) -> Installation {
        let (folder, clock, terms) = prepared(part_messages, NO_LIMITS);
        let exporter = in_folder(&folder, &clock, terms);
        Installation::of(exporter, folder, None, clock, terms)
    }

    /// Without limits, and cutting parts as a server does by default.
    pub async fn on(on: &On) -> Installation {
        Installation::cutting(on, 0).await
    }

    /// One whose parts hold at most so many messages.
    pub async fn cutting(on: &On, part_messages: u64) -> Installation {
        Installation::with(on, part_messages, NO_LIMITS).await
    }

    pub async fn with(on: &On, part_messages: u64, limits: Limits) -> Installation {
        let (folder, clock, terms) = prepared(part_messages, limits);
        match on {
            On::Sqlite => {
                let exporter = in_folder(&folder, &clock, terms);
                Installation::of(exporter, folder, None, clock, terms)
            }
            On::Postgres(server) => {
                let database = Database::create(server).await;
                let exporter = in_database(&database, &folder, &clock, terms).await;
                Installation::of(exporter, folder, Some(database), clock, terms)
            }
        }
    }

    /// One whose log lies in another database than its ledger.
    pub async fn apart(ledger: &On, log: &On) -> Installation {
        let (folder, clock, terms) = prepared(0, NO_LIMITS);
        let (path, artifacts) = paths(&folder);
        let vault = Vault::in_folder(&artifacts).unwrap();
        let (ledger, postgres): (Arc<dyn Ledger>, _) = match ledger {
            On::Sqlite => {
                let db = Db::open(&path).unwrap();
                (Arc::new(SqliteLedger::new(db, clock.clone())), None)
            }
            On::Postgres(server) => {
                let database = Database::create(server).await;
                let pg = database.connect().await;
                (
                    Arc::new(PostgresLedger::new(pg, clock.clone())),
                    Some(database),
                )
            }
        };
        let (source, log): (Arc<dyn Source>, _) = match log {
            On::Sqlite => {
                let db = Db::open(&path.with_file_name("log.db")).unwrap();
                (Arc::new(SqliteSource::new(db)), None)
            }
            On::Postgres(server) => {
                let database = Database::create(server).await;
                let pg = database.connect().await;
                (Arc::new(PostgresSource::new(pg)), Some(database))
            }
        };
        let exporter = Exporter::apart(source, ledger, vault, terms);
        Installation {
            log,
            ..Installation::of(exporter, folder, postgres, clock, terms)
        }
    }

    /// The database of the log, where that is another one in PostgreSQL.
    pub fn log_database(&self) -> &Database {
        self.log.as_ref().expect("the log is apart, on PostgreSQL")
    }

    /// Changes rows of the log's own database, where it lies elsewhere, behind everybody's back;
    /// gives how many.
    pub async fn change_log(&self, sql: &str) -> u64 {
        match &self.log {
            None => {
                let path = paths(&self.folder).0.with_file_name("log.db");
                let connection = rusqlite::Connection::open(path).unwrap();
                connection.execute(sql, []).unwrap() as u64
            }
            Some(database) => {
                let client = database.client().await;
                client
                    .batch_execute("SET search_path = ibid")
                    .await
                    .unwrap();
                client.execute_typed(sql, &[]).await.unwrap()
            }
        }
    }

    fn of(
        exporter: Exporter,
        folder: tempfile::TempDir,
        postgres: Option<Database>,
        clock: Clock,
        terms: ExportTerms,
    ) -> Installation {
        Installation {
            exporter,
            clock,
            folder,
            postgres,
            log: None,
            terms,
            keys: AtomicU64::new(0),
        }
    }

    /// The same database and folder opened once more, as another process would.
    pub async fn another_exporter(&self) -> Exporter {
        match &self.postgres {
            None => in_folder(&self.folder, &self.clock, self.terms),
            Some(database) => in_database(database, &self.folder, &self.clock, self.terms).await,
        }
    }

    /// The database of an installation on PostgreSQL.
    pub fn postgres(&self) -> &Database {
        self.postgres.as_ref().expect("it is on PostgreSQL")
    }

    /// A connection of another program to the SQLite file.
    pub fn sql(&self) -> rusqlite::Connection {
        let connection = rusqlite::Connection::open(paths(&self.folder).0).unwrap();
        connection.busy_timeout(Duration::from_secs(30)).unwrap();
        connection
    }

    /// Changes exactly one row behind everybody's back.
    pub fn tamper(&self, sql: &str, params: impl rusqlite::Params) {
        assert_eq!(self.sql().execute(sql, params).unwrap(), 1, "{sql}");
    }

    /// The same on either database.
    pub async fn change(&self, sql: &str) {
        match &self.postgres {
            None => self.tamper(sql, []),
            Some(database) => {
                let client = database.client().await;
                client
                    .batch_execute("SET search_path = ibid")
                    .await
                    .unwrap();
                assert_eq!(client.execute_typed(sql, &[]).await.unwrap(), 1, "{sql}");
            }
        }
    }

    /// The same of any number of rows.
    pub async fn change_all(&self, sql: &str) {
        match &self.postgres {
            None => {
                self.sql().execute(sql, []).unwrap();
            }
            Some(database) => {
                let client = database.client().await;
                let sql = format!("SET search_path = ibid; {sql}");
                client.batch_execute(&sql).await.unwrap();
            }
        }
    }

    /// Queues so many more jobs like `job`, each a microsecond later than the one before, without
    /// their stays and pins: nobody can work on them.
    pub async fn queue_more(&self, job: JobId, count: i64) -> Vec<JobId> {
        let jobs: Vec<JobId> = (0..count).map(|_| JobId::random().unwrap()).collect();
        let ids: Vec<String> = jobs.iter().map(JobId::to_string).collect();
        let copy = |id: &str, number: &str, from: &str| {
            format!(
                "INSERT INTO export
                     (job_id, user_id, idempotency_key, fingerprint, scope, recipe, encoder,
                      snapshot, messages_total, created_at, state, due_at)
                 SELECT {id}, user_id, {id}, fingerprint, scope, recipe, encoder, snapshot,
                        messages_total, created_at + {number}, 'queued', due_at
                 FROM export{from} WHERE job_id = '{job}'"
            )
        };
        match &self.postgres {
            None => {
                let mut connection = self.sql();
                let tx = connection.transaction().unwrap();
                for (number, id) in (1i64..).zip(&ids) {
                    let copy = copy("?1", "?2", "");
                    let mut copy = tx.prepare_cached(&copy).unwrap();
                    copy.execute(rusqlite::params![id, number]).unwrap();
                }
                tx.commit().unwrap();
            }
            Some(database) => {
                let client = database.client().await;
                let path = "SET search_path = ibid";
                client.batch_execute(path).await.unwrap();
                let from = ", unnest($1::text[]) WITH ORDINALITY AS new (id, number)";
                let copy = copy("new.id", "new.number", from);
                client.execute(&copy, &[&ids]).await.unwrap();
            }
        }
        jobs
    }

    /// Imports these lines, which must be valid.
    pub async fn import<S: AsRef<str>>(&self, lines: &[S]) -> Report {
        let mut text = String::new();
        for line in lines {
            text.push_str(line.as_ref());
            text.push('\n');
        }
        let (report, refused) = self.try_import(text.as_bytes(), false).await;
        report.unwrap_or_else(|error| panic!("{error}: {refused:?}"))
    }

    /// Imports a file of these bytes; gives also the refused lines, as often as they were told.
    pub async fn try_import(
        &self,
        bytes: &[u8],
        skip_invalid: bool,
    ) -> (Result<Report, ImportError>, Vec<(u64, Invalid)>) {
        import_into(self.exporter.source.as_ref(), bytes, skip_invalid).await
    }

    pub async fn create(&self, user: &str, scope: &str, key: &str) -> Result<Created, CreateError> {
        create(&self.exporter, user, scope, key).await
    }

    /// Asks for an export under a key of its own.
    pub async fn export(&self, user: &str, scope: &str) -> JobId {
        let key = format!("key-{}", self.keys.fetch_add(1, Ordering::Relaxed));
        match self.create(user, scope, &key).await {
            Ok(Created::New(export)) => export.job_id,
            other => panic!("{other:?}"),
        }
    }

    /// One who keeps records for 90 days.
    pub fn janitor(&self) -> Janitor {
        self.exporter.janitor(Duration::from_secs(90 * 86_400))
    }

    /// Claims the next job, as a worker does.
    pub async fn claim(&self) -> Option<Claim> {
        self.exporter.ledger.claim(offer(0)).await.unwrap()
    }

    /// Works until there is nothing left to do.
    pub async fn work(&self) -> Vec<AttemptReport> {
        work(self.exporter.workshop(2, None), UNTIL_IDLE).await
    }

    /// The raw lines of the artefact of an export that is created and made now.
    pub async fn export_now(&self, user: &str, scope: &str) -> Vec<u8> {
        let job = self.export(user, scope).await;
        self.work().await;
        self.lines(job).await
    }

    pub async fn find(&self, job: JobId) -> Found {
        self.exporter.ledger.find(job).await.unwrap().unwrap()
    }

    pub async fn state(&self, job: JobId) -> State {
        self.find(job).await.export.state
    }

    /// The kind of problem with which a job has failed.
    pub async fn failure(&self, job: JobId) -> String {
        let export = self.find(job).await.export;
        assert_eq!(export.state, State::Failed, "{export:?}");
        export.problem.unwrap().kind
    }

    /// What is recorded of a finished job.
    pub async fn artefact(&self, job: JobId) -> Artefact {
        let export = self.find(job).await.export;
        let (problem, waiting) = (&export.problem, &export.waiting);
        assert_eq!(export.state, State::Done, "{problem:?}, {waiting:?}");
        export.artefact.unwrap()
    }

    /// The file that a finished job made.
    pub async fn file(&self, job: JobId) -> Vec<u8> {
        let claim = self.artefact(job).await.claim;
        let key = Key::Artefact { job, claim };
        self.exporter.vault.get(key).await.unwrap().to_vec()
    }

    /// The raw lines that a finished job's file holds.
    pub async fn lines(&self, job: JobId) -> Vec<u8> {
        gunzip(&self.file(job).await)
    }

    pub async fn parts(&self, job: JobId) -> Vec<Part> {
        self.exporter.ledger.parts(job).await.unwrap()
    }

    /// Where the bytes of a part are.
    pub fn part_file(&self, job: JobId, part: &Part) -> PathBuf {
        let name = format!("{job}/{}/part-{:06}", part.claim, part.number);
        self.exporter.vault.folder().unwrap().join(name)
    }

    /// Everything that the vault keeps of a job, as paths below the job.
    pub fn kept(&self, job: JobId) -> Vec<String> {
        let folder = self.exporter.vault.folder().unwrap().join(job.to_string());
        let mut kept = Vec::new();
        let claims = std::fs::read_dir(folder).into_iter().flatten();
        for claim in claims.map(|entry| entry.unwrap().path()) {
            for object in std::fs::read_dir(&claim).unwrap() {
                let object = object.unwrap().path();
                let name =
                    |path: &std::path::Path| path.file_name().unwrap().to_str().unwrap().to_owned();
                kept.push(format!("{}/{}", name(&claim), name(&object)));
            }
        }
        kept.sort();
        kept
    }
}

/// A database of an installation on PostgreSQL.
pub struct Database {
    server: Arc<PgServer>,
    name: String,
}

impl Database {
    async fn create(server: &Arc<PgServer>) -> Database {
        let name = format!("ibid_{}", JobId::random().unwrap());
        server.create_database(&name).await;
        let server = Arc::clone(server);
        let database = Database { server, name };
        database.connect().await.migrate().await.unwrap();
        database
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A copy as it is now, as a backup that is restored elsewhere. Whoever is connected is
    /// disconnected for it.
    pub async fn copy(&self) -> Database {
        let copy = Database {
            server: Arc::clone(&self.server),
            name: format!("ibid_{}", JobId::random().unwrap()),
        };
        let other = self.neighbour().await;
        let (from, to) = (&self.name, &copy.name);
        let disconnect = format!(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{from}'"
        );
        other.batch_execute(&disconnect).await.unwrap();
        let copying = format!("CREATE DATABASE {to} TEMPLATE {from}");
        other.batch_execute(&copying).await.unwrap();
        copy
    }

    pub fn url(&self) -> String {
        self.server.url(&self.name)
    }

    /// As a process of ibid does.
    pub async fn connect(&self) -> Pg {
        Pg::connect(&self.url()).await.unwrap()
    }

    /// A connection of another program.
    pub async fn client(&self) -> tokio_postgres::Client {
        self.server.connect(&self.name).await
    }

    /// A connection of another program to another database of the same server.
    pub async fn neighbour(&self) -> tokio_postgres::Client {
        self.server.connect("postgres").await
    }
}

fn prepared(part_messages: u64, limits: Limits) -> (tempfile::TempDir, Clock, ExportTerms) {
    let clock = Clock::frozen_at(Time::parse("2026-01-05T12:00:00Z").unwrap());
    let terms = ExportTerms {
        limits,
        cut: CutRule {
            part_bytes: 1024 * 1024,
            part_messages,
        },
        link_life: Duration::from_secs(300),
    };
    (tempfile::tempdir().unwrap(), clock, terms)
}

fn in_folder(folder: &tempfile::TempDir, clock: &Clock, terms: ExportTerms) -> Exporter {
    let (database, artifacts) = paths(folder);
    let db = Db::open(&database).unwrap();
    let vault = Vault::in_folder(&artifacts).unwrap();
    let source = Arc::new(SqliteSource::new(db.clone()));
    let ledger = Arc::new(SqliteLedger::new(db, clock.clone()));
    Exporter::new(source, ledger, vault, terms)
}

async fn in_database(
    database: &Database,
    folder: &tempfile::TempDir,
    clock: &Clock,
    terms: ExportTerms,
) -> Exporter {
    let pg = database.connect().await;
    let vault = Vault::in_folder(&paths(folder).1).unwrap();
    let source = Arc::new(PostgresSource::new(pg.clone()));
    let ledger = Arc::new(PostgresLedger::new(pg, clock.clone()));
    Exporter::new(source, ledger, vault, terms)
}

fn paths(folder: &tempfile::TempDir) -> (PathBuf, PathBuf) {
    let at = |name| folder.path().join(name);
    (at("ibid.db"), at("artifacts"))
}

pub fn request(scope: &str) -> Request {
    Request {
        scope: Scope::parse(scope).unwrap(),
        format: Format::JsonlGz,
    }
}

pub async fn create(
    exporter: &Exporter,
    user: &str,
    scope: &str,
    key: &str,
) -> Result<Created, CreateError> {
    let key = IdempotencyKey::parse(key.as_bytes()).unwrap();
    let user = UserId::parse(user).unwrap();
    exporter.request(user, key, request(scope)).await
}

/// What a worker of this version asks for.
pub fn offer(running_per_user: u64) -> Offer {
    Offer {
        encoders: vec![EncoderId::of_new_jobs().as_str().to_owned()],
        lease: LEASE,
        terms: TERMS,
        running_per_user,
    }
}

pub async fn import_into(
    source: &dyn Source,
    bytes: &[u8],
    skip_invalid: bool,
) -> (Result<Report, ImportError>, Vec<(u64, Invalid)>) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    let mut refused = Vec::new();
    let mut note = |note: Note<'_>| {
        if let Note::Refused { line, invalid } = note {
            refused.push((line, invalid.clone()));
        }
    };
    let manner = Manner {
        skip_invalid,
        again: false,
    };
    let report = import(source, &mut file, manner, &mut note).await;
    (report, refused)
}

/// Runs a worker until it ends by itself, which `terms` must see to.
pub async fn work(workshop: Workshop, terms: WorkerTerms) -> Vec<AttemptReport> {
    work_until(workshop, terms, CancellationToken::new()).await
}

pub async fn work_until(
    workshop: Workshop,
    terms: WorkerTerms,
    stop: CancellationToken,
) -> Vec<AttemptReport> {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&reports);
    let note = move |report| seen.lock().unwrap().push(report);
    let worker = Worker::new(workshop, terms, Arc::default(), note);
    let ended = tokio::time::timeout(Duration::from_secs(60), worker.run(&stop)).await;
    ended
        .expect("the worker ends by itself")
        .expect("the ledger answers");
    drop(worker);
    Arc::into_inner(reports).unwrap().into_inner().unwrap()
}

/// Asks again and again until the answer is yes.
pub async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let asking = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let asked = tokio::time::timeout(Duration::from_secs(30), asking).await;
    asked.unwrap_or_else(|_| panic!("it never came to that: {what}"));
}

/// What one gzip member holds, and that there is nothing behind it.
pub fn gunzip(file: &[u8]) -> Vec<u8> {
    let mut decoder = flate2::bufread::GzDecoder::new(file);
    let mut raw = Vec::new();
    decoder.read_to_end(&mut raw).unwrap();
    assert_eq!(decoder.into_inner(), b"", "bytes after the gzip member");
    raw
}

/// A claim that nobody holds.
pub fn stray_claim() -> ClaimId {
    ClaimId::from_bytes([7; 16])
}

/// Says where two exports differ, instead of printing both.
#[track_caller]
pub fn assert_same_lines(what: &str, found: &[u8], expected: &[u8]) {
    if found == expected {
        return;
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (found, expected) = (text(found), text(expected));
    let (found, expected): (Vec<_>, Vec<_>) = (found.lines().collect(), expected.lines().collect());
    let at = std::iter::zip(&found, &expected).take_while(|(a, b)| a == b);
    let at = at.count();
    panic!(
        "{what}: {} lines instead of {}; line {} is\n{:?} instead of\n{:?}",
        found.len(),
        expected.len(),
        at + 1,
        found.get(at),
        expected.get(at)
    );
}
