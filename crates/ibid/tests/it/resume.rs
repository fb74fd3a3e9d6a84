//! A job that was cut and goes on: the same bytes, and nothing made twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ibid::export::State;
use ibid::ids::JobId;
use ibid::work::Workshop;

use crate::events::{chat, edit, join, leave, recall, say};
use crate::harness::{Installation, LEASE, On, UNTIL_IDLE, on_both, until, work};
use crate::interruptions::{InterruptedLedger, InterruptedSource, Step, Then};

on_both! {
    a_worker_that_is_killed_after_some_parts_is_followed_by_one_that_does_the_rest,
    a_worker_that_is_killed_between_bytes_and_rows_is_followed_by_one_that_does_the_rest,
    a_database_that_is_gone_for_a_moment_makes_the_job_wait_and_say_so,
    an_end_that_was_heard_and_not_answered_is_known,
    a_disk_that_is_nearly_full_makes_jobs_wait_before_it_is_full,
    several_workers_do_several_jobs_at_once_and_each_comes_out_right,
}

const PART_MESSAGES: u64 = 100;
const PARTS: u64 = 8;

fn log() -> Vec<String> {
    let mut lines = chat(500);
    lines.extend([
        edit("c", 17, "edited"),
        recall("c", 250),
        say("b", "unseen"),
        join("b", "ann"),
    ]);
    lines.extend((1..=150).map(|number| say("b", &format!("first stay {number}"))));
    lines.extend([leave("b", "ann"), say("b", "unseen"), join("b", "ann")]);
    lines.extend((1..=150).map(|number| say("b", &format!("second stay {number}"))));
    lines
}

/// An installation in which ann's export of that log waits for a worker.
async fn created(on: &On) -> (Installation, JobId) {
    let home = Installation::cutting(on, PART_MESSAGES).await;
    home.import(&log()).await;
    let job = home.export("ann", "all").await;
    (home, job)
}

/// The digest that the log gives in a folder where nothing is cut.
async fn undisturbed() -> [u8; 32] {
    let (home, job) = created(&On::Sqlite).await;
    home.work().await;
    let artefact = home.artefact(job).await;
    assert_eq!((artefact.messages, artefact.parts), (800, PARTS));
    artefact.sha256
}

/// Lets a worker begin and kills it once `cut` says so; its lease lapses, and the log goes on.
async fn killed(home: &Installation, workshop: Workshop, what: &str, cut: impl AsyncFn() -> bool) {
    let first = tokio::spawn(work(workshop, UNTIL_IDLE));
    until(what, cut).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled(), "{what}");
    home.clock.advance(LEASE);
    let later = [say("c", "later"), edit("c", 20, "later"), recall("c", 21)];
    home.import(&later).await;
}

/// Lets the next worker finish the job, and checks that it is what it would have been.
async fn finished(home: &Installation, job: JobId, kept: u64, threads: usize) {
    let reports = work(home.exporter.workshop(threads, None), UNTIL_IDLE).await;
    assert_eq!(reports.len(), 1);
    let report = &reports[0];
    assert_eq!((report.attempt, report.state), (2, Some(State::Done)));
    assert_eq!(
        (report.parts_kept, report.parts_written),
        (kept, PARTS - kept)
    );
    let artefact = home.artefact(job).await;
    assert_eq!(artefact.sha256, undisturbed().await);
    // Parts have gone into the artefact, and what the first worker left behind is gone too.
    let only = format!("{}/export.jsonl.gz", artefact.claim);
    assert_eq!(home.kept(job), [only]);
}

async fn a_worker_that_is_killed_after_some_parts_is_followed_by_one_that_does_the_rest(on: &On) {
    for (parts, threads) in [(0, 1), (1, 1), (2, 1), (5, 3), (7, 2)] {
        let (home, job) = created(on).await;
        let workshop = home.exporter.workshop(threads, Some(parts));
        // So many are recorded, and each thread holds one more whose bytes are written.
        let written = PARTS.min(parts + threads as u64);
        let recorded = async || {
            home.parts(job).await.len() as u64 == parts
                && home
                    .kept(job)
                    .iter()
                    .filter(|path| !path.contains('#'))
                    .count() as u64
                    == written
        };
        killed(&home, workshop, "the parts are recorded", recorded).await;
        finished(&home, job, parts, threads).await;
    }
}

/// Where a worker can be killed on its way, apart from between two parts.
async fn a_worker_that_is_killed_between_bytes_and_rows_is_followed_by_one_that_does_the_rest(
    on: &On,
) {
    for (step, occurrence, kept) in [
        (Step::Parts, 1, 0),
        (Step::PartDone, 1, 0),
        (Step::PartDone, 8, 7),
        // All parts are recorded, and the artefact is not begun.
        (Step::Parts, 2, 8),
        // The artefact is written, and nobody knows.
        (Step::Settle, 1, 8),
    ] {
        let (home, job) = created(on).await;
        let reached = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&reached);
        let mut workshop = home.exporter.workshop(1, None);
        workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |at| {
            if at == step && seen.fetch_add(1, Ordering::SeqCst) + 1 == occurrence {
                return Then::Hang;
            }
            Then::Answer
        });
        let hangs = async || reached.load(Ordering::SeqCst) == occurrence;
        killed(&home, workshop, &format!("{step:?} {occurrence}"), hangs).await;
        finished(&home, job, kept, 2).await;
    }
}

async fn a_database_that_is_gone_for_a_moment_makes_the_job_wait_and_say_so(on: &On) {
    for fault in ["source", "ledger"] {
        let (home, job) = created(on).await;
        let mut workshop = home.exporter.workshop(1, None);
        match fault {
            "source" => {
                let source = InterruptedSource::at_page(&home.exporter.source, |_| Then::Fail);
                workshop.source = Arc::new(source);
            }
            _ => {
                workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, |step| match step {
                    Step::PartDone => Then::Fail,
                    _ => Then::Answer,
                });
            }
        }
        let reports = work(workshop, UNTIL_IDLE).await;
        assert_eq!(reports[0].state, Some(State::Queued), "{fault}");
        let export = home.find(job).await.export;
        let reason = export.waiting.unwrap().problem.kind;
        let expected = if fault == "source" {
            "source-unavailable"
        } else {
            "database-unavailable"
        };
        assert_eq!(reason, expected);
        assert!(export.due_at > home.clock.now());

        home.clock.advance(Duration::from_secs(60));
        finished(&home, job, 0, 1).await;
        assert_eq!(home.find(job).await.export.waiting, None);
    }
}

async fn several_workers_do_several_jobs_at_once_and_each_comes_out_right(on: &On) {
    let home = Installation::cutting(on, PART_MESSAGES).await;
    home.import(&log()).await;
    home.import(&[join("c", "eve"), say("c", "after eve came")])
        .await;
    let mut jobs = Vec::new();
    for _ in 0..4 {
        jobs.push(home.export("ann", "all").await);
        jobs.push(home.export("eve", "conv:c").await);
    }
    let terms = ibid::worker::WorkerTerms {
        workers: 3,
        ..UNTIL_IDLE
    };
    let another = home.another_exporter().await;
    let (mut reports, others) = tokio::join!(
        work(home.exporter.workshop(2, None), terms),
        work(another.workshop(1, None), terms),
    );
    reports.extend(others);
    assert_eq!(reports.len(), jobs.len());
    let mut digests = Vec::new();
    for job in &jobs {
        digests.push(home.artefact(*job).await.sha256);
    }
    assert!(
        digests
            .iter()
            .step_by(2)
            .all(|digest| *digest == digests[0])
    );
    assert!(
        digests
            .iter()
            .skip(1)
            .step_by(2)
            .all(|digest| *digest == digests[1])
    );
    assert!(home.lines(jobs[1]).await.ends_with(b"\"user\":\"bob\"}\n"));
}

async fn an_end_that_was_heard_and_not_answered_is_known(on: &On) {
    let (home, job) = created(on).await;
    let mut workshop = home.exporter.workshop(1, None);
    let settled = AtomicUsize::new(0);
    workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |step| {
        if step == Step::Settle && settled.fetch_add(1, Ordering::SeqCst) == 0 {
            return Then::Unanswered;
        }
        Then::Answer
    });
    let reports = work(workshop, UNTIL_IDLE).await;
    assert_eq!(reports.len(), 1);
    assert_eq!(reports[0].state, Some(State::Done));
    assert_eq!(home.artefact(job).await.sha256, undisturbed().await);
    assert_eq!(home.kept(job).len(), 1);
}

async fn a_disk_that_is_nearly_full_makes_jobs_wait_before_it_is_full(on: &On) {
    let (home, job) = created(on).await;
    let mut workshop = home.exporter.workshop(1, None);
    workshop.vault = workshop.vault.leaving_free(u64::MAX);
    work(workshop, UNTIL_IDLE).await;
    let export = home.find(job).await.export;
    assert_eq!((export.state, export.strikes), (State::Queued, 0));
    let waiting = export.waiting.unwrap().problem;
    assert_eq!(waiting.kind, "storage-full");
    assert!(waiting.detail.contains("bytes are free"), "{waiting:?}");
    assert_eq!(home.kept(job), [""; 0]);
    home.clock.advance(Duration::from_secs(60));
    finished(&home, job, 0, 2).await;
}
