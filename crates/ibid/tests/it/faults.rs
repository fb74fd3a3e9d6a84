//! A network that fails, a database that restarts, a store that is away: jobs wait, go on by
//! themselves, and end with the right bytes.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ibid::cut::CutRule;
use ibid::export::State;
use ibid::exporter::{ExportTerms, Exporter};
use ibid::ids::{JobId, UserId};
use ibid::key::IdempotencyKey;
use ibid::ledger::postgres::PostgresLedger;
use ibid::ledger::{CreateError, Created, Filter, LedgerError};
use ibid::postgres::Pg;
use ibid::source::postgres::PostgresSource;
use ibid::time::Clock;
use ibid::vault::Key;
use ibid::verify::verify;
use ibid::worker::{Worker, WorkerTerms};
use tokio_util::sync::CancellationToken;

use crate::events::{chat, join, say};
use crate::harness::{NO_LIMITS, On, UNTIL_IDLE, import_into, on_postgres, request, work};
use crate::proxy::{self, PgProxy};
use crate::s3_server::{Fault, S3Server};

on_postgres!(jobs_outlast_a_network_that_fails_and_a_server_that_restarts);

/// How long everything is away at once.
const AWAY: Duration = Duration::from_secs(20);

/// How long each of the other faults lasts.
const FAULT: Duration = Duration::from_millis(1500);

async fn open(url: &str, s3: &S3Server, store: SocketAddr) -> Exporter {
    // Shorter than outside of tests.
    let pg = Pg::connect(url).await.unwrap();
    let pg = pg.answering_within(Duration::from_secs(2));
    let terms = ExportTerms {
        limits: NO_LIMITS,
        cut: CutRule {
            part_bytes: 1024 * 1024,
            part_messages: 40,
        },
        link_life: Duration::from_secs(300),
    };
    let source = Arc::new(PostgresSource::new(pg.clone()));
    let ledger = Arc::new(PostgresLedger::new(pg, Clock::system()));
    Exporter::new(source, ledger, s3.vault_through(store, "faults"), terms)
}

/// Asks until there is an answer, with one key, as a client does; gives the job. Notes how often
/// it was refused, which is to be clean: one may come again.
async fn ask(exporter: &Exporter, user: &str, key: &str, refused: &AtomicU64) -> JobId {
    let key = IdempotencyKey::parse(key.as_bytes()).unwrap();
    let user = UserId::parse(user).unwrap();
    loop {
        let asked = exporter.request(user.clone(), key.clone(), request("all"));
        match asked.await {
            Ok(Created::New(export) | Created::Replayed(export)) => return export.job_id,
            Err(CreateError::Ledger(LedgerError::Unavailable(_))) => {
                refused.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Asks for one export after the other, until the end.
async fn keep_asking(
    exporter: Exporter,
    user: &'static str,
    ended: Arc<AtomicBool>,
    refused: Arc<AtomicU64>,
) -> Vec<JobId> {
    let mut jobs = Vec::new();
    while !ended.load(Ordering::SeqCst) {
        let key = format!("asked-{}", jobs.len());
        jobs.push(ask(&exporter, user, &key, &refused).await);
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    jobs
}

async fn file(exporter: &Exporter, job: JobId) -> Vec<u8> {
    let export = exporter.ledger.find(job).await.unwrap().unwrap().export;
    let claim = export.artefact.unwrap().claim;
    let key = Key::Artefact { job, claim };
    exporter.vault.get(key).await.unwrap().to_vec()
}

async fn jobs_outlast_a_network_that_fails_and_a_server_that_restarts(on: &On) {
    let On::Postgres(server) = on else {
        unreachable!("it is a test on PostgreSQL");
    };
    server.create_database("faults").await;
    let (pg_proxy, s3) = (PgProxy::start(server), S3Server::start().await);
    let (s3_proxy, store) = proxy::before(s3.address()).await;
    let direct_url = server.url("faults");
    Pg::connect(&direct_url)
        .await
        .unwrap()
        .migrate()
        .await
        .unwrap();
    let direct = open(&direct_url, &s3, s3.address()).await;
    let mut lines = chat(800);
    lines.push(join("busy", "bob"));
    let (report, _) = import_into(direct.source.as_ref(), lines.join("\n").as_bytes(), false).await;
    report.unwrap();
    let never = AtomicU64::default();
    let undisturbed = ask(&direct, "ann", "undisturbed", &never).await;
    work(direct.workshop(2, None), UNTIL_IDLE).await;
    let expected = file(&direct, undisturbed).await;

    let exporter = open(&pg_proxy.url("faults"), &s3, store).await;
    let stop = CancellationToken::new();
    let mut workers = Vec::new();
    for _ in 0..2 {
        let terms = WorkerTerms {
            workers: 2,
            lease: Duration::from_secs(2),
            poll: Duration::from_millis(50),
            until_idle: false,
            ..UNTIL_IDLE
        };
        let workshop = exporter.workshop(2, None);
        let worker = Worker::new(workshop, terms, exporter.created(), |_| {});
        let stop = stop.clone();
        workers.push(tokio::spawn(async move { worker.run(&stop).await }));
    }
    let (ended, refused) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    let asking = ["ann", "bob"].map(|user| {
        let (ended, refused) = (Arc::clone(&ended), Arc::clone(&refused));
        tokio::spawn(keep_asking(exporter.clone(), user, ended, refused))
    });
    let superuser = server.connect("postgres").await;
    let (database, store) = (&pg_proxy.proxy.weather, &s3_proxy.weather);
    for phase in 0..8 {
        let mut lasts = FAULT;
        match phase {
            // Of each of them 5 % fail; chunks are several to a statement.
            0 => {
                database.set(10, 0, 0);
                store.set(20, 0, 0);
            }
            1 => {
                database.set(0, 0, 20);
                store.set(0, 0, 20);
                s3.faults().set(5, Fault::Unanswered);
            }
            2 => {
                database.set(0, 0, 0);
                store.set(0, 0, 0);
                s3.faults().set(5, Fault::Refused);
                let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                           WHERE datname = 'faults'";
                superuser.batch_execute(sql).await.unwrap();
            }
            3 => {
                let server = Arc::clone(server);
                let restart = move || server.restart();
                tokio::task::spawn_blocking(restart).await.unwrap();
            }
            4 => {
                let server = Arc::clone(server);
                let crash = move || (server.stop_immediate(), server.start_again());
                tokio::task::spawn_blocking(crash).await.unwrap();
            }
            5 => {
                s3.faults().set(0, Fault::Refused);
                database.set(1000, 0, 0);
                store.set(1000, 0, 0);
            }
            6 => {
                database.set(0, 10, 0);
                store.set(0, 20, 0);
            }
            // The last one: nobody but the client ends a connection on which all is lost.
            _ => {
                database.set(0, 1000, 0);
                store.set(0, 1000, 0);
                lasts = AWAY;
            }
        }
        let before = refused.load(Ordering::SeqCst);
        let until = tokio::time::Instant::now() + lasts;
        let mut number = 0;
        while tokio::time::Instant::now() < until {
            number += 1;
            let line = say("busy", &format!("{phase}-{number}"));
            // The log grows meanwhile, past the network; the server may be about to start.
            let _ = import_into(direct.source.as_ref(), line.as_bytes(), false).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        if lasts == AWAY {
            assert!(refused.load(Ordering::SeqCst) > before, "nobody hangs");
        }
    }
    database.set(0, 0, 0);
    store.set(0, 0, 0);
    ended.store(true, Ordering::SeqCst);
    let mut asked = Vec::new();
    for asking in asking {
        let asking = tokio::time::timeout(Duration::from_secs(60), asking);
        asked.push(asking.await.expect("everybody is answered").unwrap());
    }
    let all: BTreeSet<String> = asked.iter().flatten().map(JobId::to_string).collect();
    assert!(
        asked.iter().all(|jobs| jobs.len() >= 12),
        "{} jobs",
        all.len()
    );
    // Longer than `until` has patience: one that waited for long looks again after as long.
    let finishing = async {
        loop {
            let queue = direct.ledger.queue().await.unwrap();
            if queue.queued + queue.running == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let finished = tokio::time::timeout(Duration::from_secs(120), finishing).await;
    finished.expect("all jobs end by themselves");
    stop.cancel();
    for worker in workers {
        worker.await.unwrap().unwrap();
    }
    // One job for each key, however often it was asked for.
    let there = direct.ledger.search(Filter::default(), None, 10_000).await;
    let there = there.unwrap();
    assert_eq!(there.len(), all.len() + 1);
    for job in asked.iter().flatten() {
        let export = direct.ledger.find(*job).await.unwrap().unwrap().export;
        assert_eq!(export.state, State::Done, "{:?}", export.problem);
        let (source, ledger) = (direct.source.as_ref(), direct.ledger.as_ref());
        let found = verify(source, ledger, &direct.vault, *job, &mut |_, _| {}).await;
        assert!(
            found.as_ref().is_ok_and(|found| found.is_good()),
            "{found:?}"
        );
    }
    for job in &asked[0] {
        assert!(file(&direct, *job).await == expected);
    }
    let janitor = direct.janitor(Duration::from_secs(90 * 86_400));
    janitor.sweep_all().await.unwrap();
    assert_eq!(s3.objects("faults").len(), all.len() + 2);
    assert_eq!(s3.unfinished(), 0);
}
