//! Connections that the database ends in the middle of what is asked on them: nothing is lost, and
//! nothing is done twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ibid::export::{Export, State};
use ibid::ids::JobId;
use ibid::ledger::postgres::PostgresLedger;
use ibid::postgres::Pg;
use ibid::work::Workshop;
use ibid::worker::{AttemptReport, Worker, WorkerTerms};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::events::chat;
use crate::harness::{Database, Installation, On, UNTIL_IDLE, on_postgres, until, work};
use crate::interruptions::{InterruptedLedger, InterruptedSource, Step, Then};
use crate::proxy::PgProxy;

on_postgres!(
    a_claim_that_is_cut_off_is_made_again,
    a_claim_whose_answer_is_lost_is_held,
    a_page_that_is_cut_off_is_waited_for,
    a_lease_whose_renewal_is_cut_off_is_kept,
    a_part_whose_record_is_cut_off_is_recorded_later,
    an_end_that_is_cut_off_is_told_again,
    a_job_is_heard_of_after_listening_was_cut_off,
);

/// How workers work that go on until they are told to stop.
const ON_AND_ON: WorkerTerms = WorkerTerms {
    until_idle: false,
    ..UNTIL_IDLE
};

/// An installation with a job, and the file that it is to make.
async fn created(on: &On) -> (Installation, JobId, Vec<u8>) {
    let home = Installation::cutting(on, 20).await;
    home.import(&chat(100)).await;
    let undisturbed = home.export("ann", "all").await;
    home.work().await;
    let file = home.file(undisturbed).await;
    (home, undisturbed, file)
}

/// A worker that is at work until it is stopped.
struct Working {
    stop: CancellationToken,
    working: tokio::task::JoinHandle<Vec<AttemptReport>>,
}

impl Working {
    fn start(workshop: Workshop, terms: WorkerTerms) -> Working {
        let stop = CancellationToken::new();
        let working = tokio::spawn(crate::harness::work_until(workshop, terms, stop.clone()));
        Working { stop, working }
    }

    async fn stop(self) -> Vec<AttemptReport> {
        self.stop.cancel();
        self.working.await.unwrap()
    }
}

/// Holds a lock until it is dropped.
struct Lock(tokio_postgres::Client);

impl Lock {
    async fn take(database: &Database, sql: &str) -> Lock {
        let client = database.client().await;
        client
            .batch_execute(&format!("BEGIN; {sql}"))
            .await
            .unwrap();
        Lock(client)
    }

    /// Lets the server end everybody who waits for the lock, once somebody does.
    async fn cut_off(self, database: &Database) {
        let neighbour = database.neighbour().await;
        let sql = format!(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
             WHERE datname = '{}' AND wait_event_type = 'Lock'",
            database.name()
        );
        until("somebody waits for the lock", async || {
            !neighbour.query(&sql, &[]).await.unwrap().is_empty()
        })
        .await;
        self.0.batch_execute("ROLLBACK").await.unwrap();
    }
}

async fn is_done(home: &Installation, job: JobId) -> Export {
    until("the job is done", async || {
        home.state(job).await == State::Done
    })
    .await;
    home.find(job).await.export
}

async fn a_claim_that_is_cut_off_is_made_again(on: &On) {
    let (home, _, file) = created(on).await;
    let job = home.export("ann", "all").await;
    let locked = "LOCK TABLE ibid.served IN ACCESS EXCLUSIVE MODE";
    let lock = Lock::take(home.postgres(), locked).await;
    let working = Working::start(home.exporter.workshop(2, None), ON_AND_ON);
    lock.cut_off(home.postgres()).await;
    let export = is_done(&home, job).await;
    assert_eq!((export.attempts, export.strikes), (1, 0));
    assert!(home.file(job).await == file);
    working.stop().await;
}

async fn a_claim_whose_answer_is_lost_is_held(on: &On) {
    let On::Postgres(server) = on else {
        unreachable!("it is a test on PostgreSQL");
    };
    let (home, _, file) = created(on).await;
    let job = home.export("ann", "all").await;
    let before = PgProxy::start(server);
    let pg = Pg::connect(&before.url(home.postgres().name())).await;
    let mut workshop = home.exporter.workshop(2, None);
    workshop.ledger = Arc::new(PostgresLedger::new(pg.unwrap(), home.clock.clone()));
    // The first one is that of the claim.
    before.proxy.weather.lose_answer_to(b"COMMIT\0");
    let reports = work(workshop, UNTIL_IDLE).await;
    assert_eq!(reports.len(), 1);
    let export = home.find(job).await.export;
    assert_eq!((export.state, export.attempts), (State::Done, 1));
    assert!(home.file(job).await == file);
}

async fn a_page_that_is_cut_off_is_waited_for(on: &On) {
    let (home, _, file) = created(on).await;
    let job = home.export("ann", "all").await;
    let locked = "LOCK TABLE ibid.message IN ACCESS EXCLUSIVE MODE";
    let lock = Lock::take(home.postgres(), locked).await;
    let working = Working::start(home.exporter.workshop(2, None), ON_AND_ON);
    lock.cut_off(home.postgres()).await;
    until("the job says that it waits", async || {
        home.find(job).await.export.waiting.is_some()
    })
    .await;
    let export = home.find(job).await.export;
    assert_eq!(export.waiting.unwrap().problem.kind, "source-unavailable");
    assert_eq!((export.state, export.strikes), (State::Queued, 0));
    home.clock.advance(Duration::from_secs(60));
    is_done(&home, job).await;
    assert!(home.file(job).await == file);
    working.stop().await;
}

async fn a_lease_whose_renewal_is_cut_off_is_kept(on: &On) {
    let (home, _, file) = created(on).await;
    let job = home.export("ann", "all").await;
    // The work stands still until the lease was renewed after the cut.
    let (reached, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let renewals = Arc::new(AtomicUsize::new(0));
    let mut workshop = home.exporter.workshop(1, None);
    let (tell, wait) = (Arc::clone(&reached), Arc::clone(&go_on));
    workshop.source = Arc::new(InterruptedSource::at_page(
        &home.exporter.source,
        move |page| {
            if page > 1 {
                return Then::Answer;
            }
            tell.notify_one();
            Then::Wait(Arc::clone(&wait))
        },
    ));
    let count = Arc::clone(&renewals);
    workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |step| {
        if step == Step::Renew {
            count.fetch_add(1, Ordering::SeqCst);
        }
        Then::Answer
    });
    let terms = WorkerTerms {
        lease: Duration::from_secs(6),
        ..ON_AND_ON
    };
    let working = Working::start(workshop, terms);
    reached.notified().await;
    let row = format!("SELECT FROM ibid.export WHERE job_id = '{job}' FOR UPDATE");
    let lock = Lock::take(home.postgres(), &row).await;
    lock.cut_off(home.postgres()).await;
    let cut = renewals.load(Ordering::SeqCst);
    until("the lease is renewed once more", async || {
        renewals.load(Ordering::SeqCst) > cut + 1
    })
    .await;
    go_on.notify_one();
    let export = is_done(&home, job).await;
    assert_eq!((export.attempts, export.strikes), (1, 0));
    assert!(home.file(job).await == file);
    working.stop().await;
}

/// A workshop in which the first `step` waits until it may go on, and what tells when it is there.
fn waiting_at(home: &Installation, step: Step) -> (Workshop, Arc<Notify>, Arc<Notify>) {
    let (reached, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let mut workshop = home.exporter.workshop(1, None);
    let (tell, wait) = (Arc::clone(&reached), Arc::clone(&go_on));
    let seen = AtomicUsize::new(0);
    workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |at| {
        if at != step || seen.fetch_add(1, Ordering::SeqCst) > 0 {
            return Then::Answer;
        }
        tell.notify_one();
        Then::Wait(Arc::clone(&wait))
    });
    (workshop, reached, go_on)
}

async fn a_part_whose_record_is_cut_off_is_recorded_later(on: &On) {
    let (home, _, file) = created(on).await;
    let job = home.export("ann", "all").await;
    let (workshop, reached, go_on) = waiting_at(&home, Step::PartDone);
    let working = Working::start(workshop, ON_AND_ON);
    reached.notified().await;
    let locked = "LOCK TABLE ibid.part IN ACCESS EXCLUSIVE MODE";
    let lock = Lock::take(home.postgres(), locked).await;
    go_on.notify_one();
    lock.cut_off(home.postgres()).await;
    until("the job says that it waits", async || {
        home.find(job).await.export.waiting.is_some()
    })
    .await;
    let export = home.find(job).await.export;
    assert_eq!(export.waiting.unwrap().problem.kind, "database-unavailable");
    assert_eq!((export.state, export.strikes), (State::Queued, 0));
    home.clock.advance(Duration::from_secs(60));
    is_done(&home, job).await;
    assert!(home.file(job).await == file);
    working.stop().await;
}

async fn an_end_that_is_cut_off_is_told_again(on: &On) {
    let (home, _, file) = created(on).await;
    let job = home.export("ann", "all").await;
    let (workshop, reached, go_on) = waiting_at(&home, Step::Settle);
    let working = Working::start(workshop, ON_AND_ON);
    reached.notified().await;
    let row = format!("SELECT FROM ibid.export WHERE job_id = '{job}' FOR UPDATE");
    let lock = Lock::take(home.postgres(), &row).await;
    go_on.notify_one();
    lock.cut_off(home.postgres()).await;
    let export = is_done(&home, job).await;
    // The artefact was whole: it is not made once more.
    assert_eq!((export.attempts, export.strikes), (1, 0));
    assert!(home.file(job).await == file);
    assert_eq!(working.stop().await.len(), 1);
}

async fn a_job_is_heard_of_after_listening_was_cut_off(on: &On) {
    let (home, _, _) = created(on).await;
    let pg = home.postgres().connect().await;
    let wake = Arc::new(Notify::new());
    let hearing = {
        let wake = Arc::clone(&wake);
        tokio::spawn(async move { pg.listen(&wake).await })
    };
    // Nobody polls, so only who listens hears of jobs, which somebody else creates.
    let terms = WorkerTerms {
        poll: Duration::from_secs(3600),
        ..ON_AND_ON
    };
    let worker = Worker::new(home.exporter.workshop(1, None), terms, wake, |_| {});
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let working = tokio::spawn(async move { worker.run(&stopped).await });
    let listens = "query LIKE 'LISTEN%' AND state = 'idle'";
    let listeners = format!(
        "FROM pg_stat_activity WHERE datname = '{}' AND {listens}",
        home.postgres().name()
    );
    let neighbour = home.postgres().neighbour().await;
    let is_listened = async || {
        let sql = format!("SELECT {listeners}");
        !neighbour.query(&sql, &[]).await.unwrap().is_empty()
    };
    until("somebody listens", is_listened).await;
    let another = home.another_exporter().await;
    let first = crate::harness::create(&another, "ann", "all", "first").await;
    let first = first.unwrap();
    let job = |created| match created {
        ibid::ledger::Created::New(export) => export.job_id,
        other => panic!("{other:?}"),
    };
    is_done(&home, job(first)).await;
    let sql = format!("SELECT pg_terminate_backend(pid, 10000) {listeners}");
    assert_eq!(neighbour.query(&sql, &[]).await.unwrap().len(), 1);
    // While nobody listens.
    let second = crate::harness::create(&another, "ann", "all", "second").await;
    is_done(&home, job(second.unwrap())).await;
    until("somebody listens again", is_listened).await;
    let third = crate::harness::create(&another, "ann", "all", "third").await;
    is_done(&home, job(third.unwrap())).await;
    stop.cancel();
    working.await.unwrap().unwrap();
    hearing.abort();
}
