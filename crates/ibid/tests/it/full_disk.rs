//! Real disks that are full, or cannot be written: jobs wait, say why, and go on by themselves.
//!
//! The disks are file systems of 64 MiB in memory, which the tests mount: as root, or else where a
//! user may have a namespace of its own, in one.

mod disk;

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ibid::client::{ClientError, Fetch, Link};
use ibid::export::{Export, State};
use ibid::exporter::Exporter;
use ibid::ids::JobId;
use ibid::ledger::postgres::PostgresLedger;
use ibid::ledger::sqlite::SqliteLedger;
use ibid::ledger::{CreateError, Created, Ledger, LedgerError};
use ibid::postgres::Pg;
use ibid::source::Source;
use ibid::source::postgres::PostgresSource;
use ibid::source::sqlite::SqliteSource;
use ibid::sqlite::Db;
use ibid::time::{Clock, Time};
use ibid::vault::{Key, Vault};
use ibid::work::Workshop;
use ibid::worker::WorkerTerms;
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use self::disk::{Disk, where_one_can_mount};
use crate::events::{join, say};
use crate::fetching::hostile::{Answer, Hostile, large};
use crate::harness::{
    Installation, TERMS, UNTIL_IDLE, create, import_into, until, work, work_until,
};
use crate::interruptions::{InterruptedLedger, Step, Then};
use crate::pg_server::PgServer;

/// Makes tests of functions that mount file systems. Where that cannot be done, each says that it
/// is skipped.
macro_rules! mounting {
    ($($name:ident),* $(,)?) => {
        mod mounted {
            $(
                #[test]
                fn $name() {
                    super::where_one_can_mount(stringify!($name), || {
                        let runtime = tokio::runtime::Builder::new_multi_thread()
                            .worker_threads(2)
                            .enable_all()
                            .build()
                            .unwrap();
                        runtime.block_on(super::$name());
                    });
                }
            )*
        }
    };
}

mounting!(
    a_disk_that_is_full_before_the_claim,
    a_disk_on_which_room_is_to_be_left,
    a_disk_that_fills_up_while_parts_are_written,
    a_disk_that_fills_up_while_the_artefact_is_assembled,
    a_disk_that_cannot_be_written_any_more,
    a_folder_in_which_nothing_may_be_created,
    a_full_disk_under_the_database_refuses_creations_and_takes_no_key,
    a_full_disk_under_postgres_refuses_creations_and_takes_no_key,
    a_database_whose_disk_fills_up_does_not_lose_the_job,
    a_database_whose_disk_fills_up_is_told_the_end_later,
    a_lease_is_kept_past_a_full_disk_under_the_database,
    a_disk_that_fills_up_under_a_download,
);

/// Ten parts of some hundred kilobytes, which hardly compress.
fn noise() -> Vec<String> {
    let mut lines = vec![join("c", "ann")];
    for message in 0..50_u64 {
        let digests = (0..1000_u64).map(|at| {
            let number = message * 1000 + at;
            hex::encode(Sha256::digest(number.to_be_bytes()))
        });
        lines.push(say("c", &digests.collect::<String>()));
    }
    lines
}

const PART_MESSAGES: u64 = 5;
const PARTS: usize = 10;

/// An installation whose artefacts are on a disk of 64 MiB, a job, and the file that it is to make.
struct Place {
    disk: Arc<Disk>,
    home: Installation,
    job: JobId,
    file: Vec<u8>,
}

impl Place {
    async fn new() -> Place {
        let disk = Disk::mount();
        let mut home = Installation::cutting_at(PART_MESSAGES);
        home.exporter.vault = Vault::in_folder(&disk.path().join("artifacts")).unwrap();
        home.import(&noise()).await;
        let undisturbed = home.export("ann", "all").await;
        home.work().await;
        let file = home.file(undisturbed).await;
        assert!(file.len() > 1_500_000, "{} bytes", file.len());
        let job = home.export("ann", "all").await;
        Place {
            disk,
            home,
            job,
            file,
        }
    }

    /// A workshop in which something is done when `step` is come to for the `nth` time.
    fn workshop(
        &self,
        step: Step,
        nth: usize,
        deed: impl Fn() + Send + Sync + 'static,
    ) -> Workshop {
        let mut workshop = self.home.exporter.workshop(1, None);
        let seen = AtomicUsize::new(0);
        workshop.ledger = InterruptedLedger::at(&self.home.exporter.ledger, move |at| {
            if at == step && seen.fetch_add(1, Ordering::SeqCst) + 1 == nth {
                deed();
            }
            Then::Answer
        });
        workshop
    }

    /// That the job waits for this, and that no attempt counts.
    async fn waits(&self, kind: &str, words: &str) -> Export {
        let export = self.home.find(self.job).await.export;
        assert_eq!((export.state, export.strikes), (State::Queued, 0));
        let waiting = export.waiting.as_ref().expect("it waits");
        assert_eq!(waiting.problem.kind, kind, "{}", waiting.problem.detail);
        let detail = &waiting.problem.detail;
        assert!(detail.contains(words), "{detail}");
        let queue = self.home.exporter.ledger.queue().await.unwrap();
        assert_eq!(queue.waiting, [(kind.to_owned(), 1)].into());
        export
    }

    /// Looks often enough for an attempt that counts to fail the job; that it waits all the time,
    /// and leaves no bytes that no row names.
    async fn keeps_waiting(&self, kind: &str, words: &str) {
        let since = self.waits(kind, words).await.waiting.unwrap().since;
        for _ in 0..=TERMS.max_attempts {
            self.home.clock.advance(Duration::from_secs(60));
            self.home.work().await;
            let export = self.waits(kind, words).await;
            assert_eq!(export.waiting.unwrap().since, since);
        }
        let named = self.home.parts(self.job).await.len();
        assert_eq!(self.home.kept(self.job).len(), named);
    }

    /// That it ends by itself, without leftovers; gives how many parts were kept.
    async fn ends(&self) -> u64 {
        self.home.clock.advance(Duration::from_secs(60));
        let reports = self.home.work().await;
        let export = self.home.find(self.job).await.export;
        assert_eq!((export.state, export.waiting), (State::Done, None));
        assert!(self.home.file(self.job).await == self.file);
        assert_eq!(self.home.kept(self.job).len(), 1);
        let queue = self.home.exporter.ledger.queue().await.unwrap();
        assert!(queue.waiting.is_empty());
        reports.last().unwrap().parts_kept
    }
}

async fn a_disk_that_is_full_before_the_claim() {
    let place = Place::new().await;
    place.disk.fill(0);
    place.home.work().await;
    place.keeps_waiting("storage-full", "free space").await;
    place.disk.empty();
    assert_eq!(place.ends().await, 0);
}

async fn a_disk_on_which_room_is_to_be_left() {
    let mut place = Place::new().await;
    let least = 16 << 20;
    let vault = place.home.exporter.vault.clone();
    place.home.exporter.vault = vault.leaving_free(least);
    place.disk.fill(least - 4096);
    place.home.work().await;
    place.keeps_waiting("storage-full", "free space").await;
    assert_eq!(place.disk.free(), least - 4096, "nothing is written");
    // Room for the parts, but not for the artefact beside them.
    place.disk.empty();
    place.disk.fill(least + place.file.len() as u64 * 3 / 2);
    place.home.clock.advance(Duration::from_secs(60));
    place.home.work().await;
    place.keeps_waiting("storage-full", "free space").await;
    assert_eq!(place.home.parts(place.job).await.len(), PARTS);
    assert!(place.disk.free() >= least);
    place.disk.empty();
    assert_eq!(place.ends().await, PARTS as u64);
}

async fn a_disk_that_fills_up_while_parts_are_written() {
    let place = Place::new().await;
    let disk = Arc::clone(&place.disk);
    // Half of the next one finds room.
    let workshop = place.workshop(Step::PartDone, 3, move || disk.fill(100_000));
    work(workshop, UNTIL_IDLE).await;
    place.keeps_waiting("storage-full", "free space").await;
    assert_eq!(place.home.parts(place.job).await.len(), 3);
    place.disk.empty();
    assert_eq!(place.ends().await, 3);
}

async fn a_disk_that_fills_up_while_the_artefact_is_assembled() {
    let place = Place::new().await;
    let (disk, left) = (Arc::clone(&place.disk), place.file.len() as u64 * 2 / 3);
    let workshop = place.workshop(Step::Parts, 2, move || disk.fill(left));
    work(workshop, UNTIL_IDLE).await;
    place.keeps_waiting("storage-full", "free space").await;
    assert_eq!(place.home.parts(place.job).await.len(), PARTS);
    place.disk.empty();
    assert_eq!(place.ends().await, PARTS as u64);
}

async fn a_disk_that_cannot_be_written_any_more() {
    let place = Place::new().await;
    let disk = Arc::clone(&place.disk);
    let workshop = place.workshop(Step::PartDone, 3, move || disk.remount("ro"));
    work(workshop, UNTIL_IDLE).await;
    place
        .keeps_waiting("storage-unavailable", "Read-only")
        .await;
    place.disk.remount("rw");
    assert_eq!(place.ends().await, 3);
}

async fn a_folder_in_which_nothing_may_be_created() {
    let place = Place::new().await;
    let artifacts = place.home.exporter.vault.folder().unwrap().to_owned();
    let attribute = |how: &str| Command::new("chattr").arg(how).arg(&artifacts).output();
    if !attribute("+i").is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: a folder in which root may create nothing, because chattr fails here");
        return;
    }
    place.home.work().await;
    place
        .keeps_waiting("storage-unavailable", "not permitted")
        .await;
    assert!(attribute("-i").unwrap().status.success());
    assert_eq!(place.ends().await, 0);
}

/// An installation whose database is on a disk of 64 MiB, and its artefacts elsewhere.
struct Small {
    disk: Arc<Disk>,
    exporter: Exporter,
    clock: Clock,
    _artifacts: tempfile::TempDir,
    file: Vec<u8>,
}

fn frozen() -> Clock {
    Clock::frozen_at(Time::parse("2026-01-05T12:00:00Z").unwrap())
}

/// How workers work that go on until they are told to stop.
const ON_AND_ON: WorkerTerms = WorkerTerms {
    until_idle: false,
    ..UNTIL_IDLE
};

impl Small {
    async fn new() -> Small {
        let disk = Disk::mount();
        let clock = frozen();
        let db = Db::open(&disk.path().join("ibid.db")).unwrap();
        let source = Arc::new(SqliteSource::new(db.clone()));
        let ledger = Arc::new(SqliteLedger::new(db, clock.clone()));
        Small::over(disk, clock, source, ledger).await
    }

    /// One in PostgreSQL, whose tables are on the disk and whose own log is not.
    async fn in_postgres(server: &PgServer) -> Small {
        let (disk, clock) = (Disk::mount(), frozen());
        server.give_away(disk.path());
        let superuser = server.connect("postgres").await;
        let path = disk.path().display();
        for sql in [
            &format!("CREATE TABLESPACE small LOCATION '{path}'"),
            "CREATE DATABASE small TABLESPACE small",
        ] {
            superuser.batch_execute(sql).await.unwrap();
        }
        let pg = Pg::connect(&server.url("small")).await.unwrap();
        pg.migrate().await.unwrap();
        let source = Arc::new(PostgresSource::new(pg.clone()));
        let ledger = Arc::new(PostgresLedger::new(pg, clock.clone()));
        Small::over(disk, clock, source, ledger).await
    }

    async fn over(
        disk: Arc<Disk>,
        clock: Clock,
        source: Arc<dyn Source>,
        ledger: Arc<dyn Ledger>,
    ) -> Small {
        let artifacts = tempfile::tempdir().unwrap();
        let vault = Vault::in_folder(artifacts.path()).unwrap();
        let terms = *Installation::cutting_at(PART_MESSAGES).exporter.terms();
        let exporter = Exporter::new(source, ledger, vault, terms);
        let lines = noise().join("\n");
        let (report, _) = import_into(exporter.source.as_ref(), lines.as_bytes(), false).await;
        report.unwrap();
        let mut small = Small {
            disk,
            exporter,
            clock,
            _artifacts: artifacts,
            file: Vec::new(),
        };
        let undisturbed = small.create("undisturbed").await.unwrap();
        work(small.exporter.workshop(2, None), UNTIL_IDLE).await;
        small.file = small.file_of(undisturbed).await;
        small
    }

    async fn create(&self, key: &str) -> Result<JobId, CreateError> {
        match create(&self.exporter, "ann", "all", key).await? {
            Created::New(export) => Ok(export.job_id),
            Created::Replayed(export) => panic!("{key} was taken by {export:?}"),
        }
    }

    /// Fills the disk up, so that the next transaction that writes finds no room.
    fn fill(&self) {
        fill(&self.disk);
    }

    async fn find(&self, job: JobId) -> Export {
        self.exporter
            .ledger
            .find(job)
            .await
            .unwrap()
            .unwrap()
            .export
    }

    async fn file_of(&self, job: JobId) -> Vec<u8> {
        let claim = self.find(job).await.artefact.unwrap().claim;
        let key = Key::Artefact { job, claim };
        self.exporter.vault.get(key).await.unwrap().to_vec()
    }

    async fn is_done(&self, job: JobId) -> Export {
        until("the job is done", async || {
            self.find(job).await.state == State::Done
        })
        .await;
        assert!(self.file_of(job).await == self.file);
        self.find(job).await
    }

    /// That nothing can be written, and that it is said.
    async fn is_full(&self) {
        let refused = self.create("refused").await;
        let Err(CreateError::Ledger(LedgerError::Unusable(what))) = refused else {
            panic!("{refused:?}");
        };
        assert!(what.contains("is full"), "{what}");
    }
}

/// Room that the file's own log has for what is written next would be used up first.
fn fill(disk: &Disk) {
    let connection = rusqlite::Connection::open(disk.path().join("ibid.db")).unwrap();
    connection.busy_timeout(Duration::from_secs(30)).unwrap();
    let truncated = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| {
        row.get::<_, i64>(0)
    });
    assert_eq!(truncated.unwrap(), 0, "the log was in use");
    disk.fill(0);
}

async fn a_full_disk_under_the_database_refuses_creations_and_takes_no_key() {
    let small = Small::new().await;
    let before = small.create("before").await.unwrap();
    small.fill();
    let stop = CancellationToken::new();
    let workshop = small.exporter.workshop(2, None);
    let working = tokio::spawn(work_until(workshop, ON_AND_ON, stop.clone()));
    for _ in 0..20 {
        small.is_full().await;
        tokio::time::sleep(UNTIL_IDLE.poll).await;
    }
    let waits = small.find(before).await;
    assert_eq!((waits.state, waits.attempts), (State::Queued, 0));
    small.disk.empty();
    let export = small.is_done(before).await;
    assert_eq!((export.attempts, export.strikes), (1, 0));
    let refused = small.create("refused").await.unwrap();
    small.is_done(refused).await;
    stop.cancel();
    working.await.unwrap();
}

async fn a_full_disk_under_postgres_refuses_creations_and_takes_no_key() {
    // Who is root only in a namespace of its own cannot run the server as somebody else.
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap();
    if map.split_whitespace().nth(2) != Some("4294967295") {
        eprintln!("skipped: a full disk under PostgreSQL, because no user is known but this one");
        return;
    }
    let Some(server) = PgServer::start("a full disk under PostgreSQL") else {
        return;
    };
    let small = Small::in_postgres(&server).await;
    small.disk.fill(0);
    let stop = CancellationToken::new();
    let workshop = small.exporter.workshop(2, None);
    let working = tokio::spawn(work_until(workshop, ON_AND_ON, stop.clone()));
    // As long as there is room in the tables themselves.
    let mut jobs = Vec::new();
    let refused = loop {
        assert!(jobs.len() < 500, "the disk is not full");
        let key = format!("key-{}", jobs.len());
        match small.create(&key).await {
            Ok(job) => jobs.push(job),
            Err(CreateError::Ledger(LedgerError::Unusable(what))) => {
                assert!(what.contains("is full"), "{what}");
                break key;
            }
            Err(error) => panic!("{error}"),
        }
    };
    small.disk.empty();
    jobs.push(small.create(&refused).await.unwrap());
    for job in jobs {
        // Those that had to wait look again.
        small.clock.advance(Duration::from_secs(60));
        assert_eq!(small.is_done(job).await.strikes, 0);
    }
    stop.cancel();
    working.await.unwrap();
}

/// A workshop in which the disk is full at the first `step`, and what tells when it is.
fn filling_at(small: &Small, step: Step) -> (Workshop, Arc<Notify>) {
    let reached = Arc::new(Notify::new());
    let mut workshop = small.exporter.workshop(1, None);
    let (tell, disk) = (Arc::clone(&reached), Arc::clone(&small.disk));
    let seen = AtomicUsize::new(0);
    workshop.ledger = InterruptedLedger::at(&small.exporter.ledger, move |at| {
        if at == step && seen.fetch_add(1, Ordering::SeqCst) == 0 {
            fill(&disk);
            tell.notify_one();
        }
        Then::Answer
    });
    (workshop, reached)
}

async fn a_database_whose_disk_fills_up_does_not_lose_the_job() {
    let small = Small::new().await;
    let job = small.create("job").await.unwrap();
    let (workshop, reached) = filling_at(&small, Step::PartDone);
    let stop = CancellationToken::new();
    let working = tokio::spawn(work_until(workshop, ON_AND_ON, stop.clone()));
    reached.notified().await;
    for _ in 0..20 {
        small.is_full().await;
        tokio::time::sleep(UNTIL_IDLE.poll).await;
    }
    small.disk.empty();
    until("the job says why it waits", async || {
        small.find(job).await.waiting.is_some()
    })
    .await;
    let export = small.find(job).await;
    let problem = export.waiting.unwrap().problem;
    assert_eq!(problem.kind, "database-unavailable");
    assert!(problem.detail.contains("is full"), "{}", problem.detail);
    assert_eq!((export.state, export.strikes), (State::Queued, 0));
    small.clock.advance(Duration::from_secs(60));
    small.is_done(job).await;
    stop.cancel();
    working.await.unwrap();
}

async fn a_database_whose_disk_fills_up_is_told_the_end_later() {
    let small = Small::new().await;
    let job = small.create("job").await.unwrap();
    let (workshop, reached) = filling_at(&small, Step::Settle);
    let stop = CancellationToken::new();
    let working = tokio::spawn(work_until(workshop, ON_AND_ON, stop.clone()));
    reached.notified().await;
    for _ in 0..20 {
        small.is_full().await;
        tokio::time::sleep(UNTIL_IDLE.poll).await;
    }
    small.disk.empty();
    // The artefact was whole: it is not made once more.
    let export = small.is_done(job).await;
    assert_eq!((export.attempts, export.strikes), (1, 0));
    stop.cancel();
    assert_eq!(working.await.unwrap().len(), 1);
}

async fn a_lease_is_kept_past_a_full_disk_under_the_database() {
    let small = Small::new().await;
    let job = small.create("job").await.unwrap();
    // The work stands still until the lease was renewed after the disk was full.
    let go_on = Arc::new(Notify::new());
    let (disk, wait) = (Arc::clone(&small.disk), Arc::clone(&go_on));
    let (parts, renewals, clock) = (AtomicUsize::new(0), Mutex::new(0), small.clock.clone());
    let mut workshop = small.exporter.workshop(1, None);
    workshop.ledger = InterruptedLedger::at(&small.exporter.ledger, move |at| {
        if at == Step::PartDone && parts.fetch_add(1, Ordering::SeqCst) == 0 {
            return Then::Wait(Arc::clone(&wait));
        }
        if at == Step::Renew {
            let mut renewals = renewals.lock().unwrap();
            *renewals += 1;
            // A row that is as it was is not written again.
            clock.advance(Duration::from_secs(1));
            match *renewals {
                1 => fill(&disk),
                2 => disk.empty(),
                4 => wait.notify_one(),
                _ => {}
            }
        }
        Then::Answer
    });
    let terms = WorkerTerms {
        lease: Duration::from_secs(6),
        ..ON_AND_ON
    };
    let stop = CancellationToken::new();
    let working = tokio::spawn(work_until(workshop, terms, stop.clone()));
    let export = small.is_done(job).await;
    assert_eq!((export.attempts, export.strikes), (1, 0));
    stop.cancel();
    assert_eq!(working.await.unwrap().len(), 1);
}

/// The client does not ask a server again and again for what its own disk does not take.
async fn a_disk_that_fills_up_under_a_download() {
    let disk = Disk::mount();
    disk.fill(5 << 20);
    let server = Hostile::start(|request| Answer::honest(request, &large(1))).await;
    let output = disk.path().join("out.gz");
    let fetch = Fetch {
        patience: Duration::from_secs(86_400),
        ..Fetch::default()
    };
    let fetched = async || {
        let link = Link::of_url(&server.url()).unwrap();
        fetch.into_file(link, &output, &|_| {}).await
    };
    let error = fetched().await.unwrap_err();
    let ClientError::File { path, why } = &error else {
        panic!("{error}");
    };
    assert!(path.ends_with("out.gz.part") || path.ends_with("out.gz.part.json"));
    assert!(why.contains("No space left"), "{error}");
    assert!(!output.exists());
    disk.empty();
    fetched().await.unwrap();
    assert!(std::fs::read(&output).unwrap() == large(1));
}
