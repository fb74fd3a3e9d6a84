//! Who may work on a job, and until when.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ibid::export::{Artefact, Event, Export, Problem, State};
use ibid::ids::JobId;
use ibid::ledger::{Claim, LedgerError, Offer, Part};
use ibid::worker::WorkerTerms;
use tokio_util::sync::CancellationToken;

use crate::events::{chat, join};
use crate::harness::{
    Installation, LEASE, TERMS, UNTIL_IDLE, offer, stray_claim, until, work, work_until,
};
use crate::interruptions::{InterruptedLedger, InterruptedSource, Step, Then};

async fn claim(home: &Installation) -> Option<Claim> {
    home.exporter.ledger.claim(offer(0)).await.unwrap()
}

fn part(claim: &Claim, number: u64) -> Part {
    Part {
        number,
        claim: claim.id,
        first: ("c".to_owned(), number + 1),
        last: ("c".to_owned(), number + 1),
        messages: 1,
        raw_bytes: 1,
        crc32: 1,
        bytes: 1,
        sha256: [number as u8; 32],
    }
}

fn artefact(claim: &Claim) -> Artefact {
    Artefact {
        claim: claim.id,
        sha256: [9; 32],
        bytes: 1,
        messages: 10,
        parts: 1,
    }
}

fn finished(claim: &Claim) -> Event {
    Event::Finished {
        artefact: artefact(claim),
        terms: TERMS,
    }
}

async fn export(home: &Installation, job: JobId) -> Export {
    home.find(job).await.export
}

async fn one_job() -> (Installation, JobId) {
    let home = Installation::new();
    home.import(&chat(10)).await;
    let job = home.export("ann", "all").await;
    (home, job)
}

#[tokio::test]
async fn a_job_is_held_by_one_worker_until_its_lease_ends() {
    let (home, job) = one_job().await;
    let first = claim(&home).await.unwrap();
    assert_eq!(
        (first.export.job_id, first.export.state),
        (job, State::Running)
    );
    home.clock.advance(LEASE - Duration::from_micros(1));
    assert!(claim(&home).await.is_none());
    home.clock.advance(Duration::from_micros(1));
    let second = claim(&home).await.unwrap();
    assert_eq!((second.export.job_id, second.export.attempts), (job, 2));
    assert_ne!(second.id, first.id);
}

#[tokio::test]
async fn a_renewed_lease_lasts_from_its_renewal_on() {
    let (home, job) = one_job().await;
    let first = claim(&home).await.unwrap();
    home.clock.advance(LEASE / 2);
    home.exporter
        .ledger
        .renew(job, first.id, LEASE)
        .await
        .unwrap();
    home.clock.advance(LEASE / 2);
    assert!(claim(&home).await.is_none());
    home.clock.advance(LEASE / 2);
    assert!(claim(&home).await.is_some());
}

#[tokio::test]
async fn whoever_lost_the_lease_can_write_nothing_any_more() {
    let (home, job) = one_job().await;
    let ledger = &home.exporter.ledger;
    let old = claim(&home).await.unwrap();
    home.clock.advance(LEASE);
    let new = claim(&home).await.unwrap();

    let before = export(&home, job).await;
    let lost = |result: Result<(), LedgerError>| {
        assert!(matches!(result, Err(LedgerError::LeaseLost)), "{result:?}");
    };
    lost(ledger.renew(job, old.id, LEASE).await);
    lost(ledger.part_done(job, part(&old, 0)).await);
    lost(ledger.settle(job, old.id, Event::GivenBack).await.map(drop));
    lost(ledger.settle(job, old.id, finished(&old)).await.map(drop));
    lost(
        ledger
            .settle(job, stray_claim(), finished(&old))
            .await
            .map(drop),
    );
    assert_eq!(export(&home, job).await, before);
    assert!(home.parts(job).await.is_empty());

    ledger.part_done(job, part(&new, 0)).await.unwrap();
    ledger.renew(job, new.id, LEASE).await.unwrap();
    let done = ledger.settle(job, new.id, finished(&new)).await.unwrap();
    assert_eq!(done.state, State::Done);
    // Nor can the one who ended it write once more.
    lost(ledger.part_done(job, part(&new, 1)).await);
    lost(ledger.renew(job, new.id, LEASE).await);
}

#[tokio::test]
async fn a_part_is_recorded_once_and_only_with_one_digest() {
    let (home, job) = one_job().await;
    let ledger = &home.exporter.ledger;
    let first = claim(&home).await.unwrap();
    ledger.part_done(job, part(&first, 0)).await.unwrap();
    home.clock.advance(LEASE);
    let second = claim(&home).await.unwrap();
    ledger.part_done(job, part(&second, 0)).await.unwrap();
    assert_eq!(home.parts(job).await, [part(&second, 0)]);
    let other = Part {
        sha256: [5; 32],
        ..part(&second, 0)
    };
    let refused = ledger.part_done(job, other).await;
    assert!(
        matches!(refused, Err(LedgerError::OtherDigest { part: 0 })),
        "{refused:?}"
    );
    assert_eq!(home.parts(job).await, [part(&second, 0)]);
}

#[tokio::test]
async fn a_job_whose_workers_vanish_fails_after_so_many_attempts_and_can_be_retried() {
    let (home, job) = one_job().await;
    for attempt in 1..=TERMS.max_attempts {
        assert_eq!(claim(&home).await.unwrap().export.attempts, attempt);
        home.clock.advance(LEASE);
    }
    assert!(claim(&home).await.is_none());
    assert_eq!(home.failure(job).await, "worker-lost");

    home.exporter
        .ledger
        .decide(job, Event::Retried)
        .await
        .unwrap();
    // A retry begins to count anew.
    claim(&home).await.unwrap();
    home.clock.advance(LEASE);
    home.work().await;
    assert_eq!(home.artefact(job).await.messages, 10);
}

#[tokio::test]
async fn attempts_that_recorded_a_new_part_do_not_count() {
    let (home, job) = one_job().await;
    for number in 0..2 * u64::from(TERMS.max_attempts) {
        let claim = claim(&home).await.unwrap();
        home.exporter
            .ledger
            .part_done(job, part(&claim, number))
            .await
            .unwrap();
        home.clock.advance(LEASE);
    }
    for _ in 0..TERMS.max_attempts {
        // Recording what is recorded already is no progress.
        let claim = claim(&home).await.unwrap();
        home.exporter
            .ledger
            .part_done(job, part(&claim, 0))
            .await
            .unwrap();
        assert_eq!(home.state(job).await, State::Running);
        home.clock.advance(LEASE);
    }
    assert!(claim(&home).await.is_none());
    assert_eq!(home.failure(job).await, "worker-lost");
}

#[tokio::test]
async fn leases_given_back_do_not_count_and_the_job_is_due_at_once() {
    let (home, job) = one_job().await;
    for _ in 0..2 * TERMS.max_attempts {
        let claim = claim(&home).await.unwrap();
        let settled = home
            .exporter
            .ledger
            .settle(job, claim.id, Event::GivenBack)
            .await;
        assert_eq!(settled.unwrap().strikes, 0);
    }
    assert!(claim(&home).await.is_some());
}

#[tokio::test]
async fn a_job_that_faltered_waits_with_its_reason_until_it_is_due() {
    let (home, job) = one_job().await;
    let problem = Problem {
        kind: "storage-unavailable".to_owned(),
        detail: "No space.".to_owned(),
    };
    let retry_at = home.clock.now().plus(Duration::from_secs(8));
    let faltered = Event::Faltered {
        problem: problem.clone(),
        retry_at,
        terms: TERMS,
    };
    let held = claim(&home).await.unwrap();
    home.exporter
        .ledger
        .settle(job, held.id, faltered)
        .await
        .unwrap();
    let waiting = export(&home, job).await.waiting.unwrap();
    assert_eq!(
        (waiting.problem, waiting.since),
        (problem, home.clock.now())
    );
    home.clock
        .advance(Duration::from_secs(8) - Duration::from_micros(1));
    assert!(claim(&home).await.is_none());
    home.clock.advance(Duration::from_micros(1));
    home.work().await;
    let export = export(&home, job).await;
    assert_eq!((export.state, export.waiting), (State::Done, None));
}

#[tokio::test]
async fn a_lease_of_a_clock_that_was_far_ahead_is_not_waited_for() {
    let (home, job) = one_job().await;
    claim(&home).await.unwrap();
    let ahead_by = |micros: i64| {
        let renewed_at = home.clock.now().micros() + micros;
        let until = renewed_at + LEASE.as_micros() as i64;
        let set = "UPDATE export SET renewed_at = ?1, lease_until = ?2";
        home.tamper(set, [renewed_at, until]);
    };
    ahead_by(LEASE.as_micros() as i64);
    assert!(claim(&home).await.is_none());
    ahead_by(LEASE.as_micros() as i64 + 1);
    assert_eq!(claim(&home).await.unwrap().export.job_id, job);
}

#[tokio::test]
async fn a_longer_lease_is_not_taken_away_by_a_worker_that_asks_for_a_shorter_one() {
    let (home, _) = one_job().await;
    let long = Offer {
        lease: LEASE * 10,
        ..offer(0)
    };
    home.exporter.ledger.claim(long).await.unwrap().unwrap();
    assert!(claim(&home).await.is_none());
    home.clock.advance(LEASE * 10 - Duration::from_micros(1));
    assert!(claim(&home).await.is_none());
    home.clock.advance(Duration::from_micros(1));
    assert!(claim(&home).await.is_some());
}

#[tokio::test]
async fn the_user_who_was_served_longest_ago_is_next() {
    let home = Installation::new();
    home.import(&chat(3)).await;
    home.import(&[join("c", "eve"), join("c", "zoe")]).await;
    let ask = async |user: &str, count: usize| {
        for _ in 0..count {
            home.clock.advance(Duration::from_secs(1));
            home.export(user, "all").await;
        }
    };
    ask("zoe", 4).await;
    ask("ann", 4).await;
    ask("eve", 1).await;
    let mut served = Vec::new();
    let mut oldest = std::collections::HashMap::new();
    loop {
        home.clock.advance(Duration::from_millis(1));
        let Some(claim) = claim(&home).await else {
            break;
        };
        let user = claim.export.user.to_string();
        let before = oldest.insert(user.clone(), claim.export.created_at);
        assert!(
            before < Some(claim.export.created_at),
            "{user}: not the oldest first"
        );
        served.push(user);
    }
    let expected = [
        "ann", "eve", "zoe", "ann", "zoe", "ann", "zoe", "ann", "zoe",
    ];
    assert_eq!(served, expected);
}

#[tokio::test]
async fn no_more_jobs_of_one_user_run_at_a_time_than_the_cap_says() {
    let home = Installation::new();
    home.import(&chat(3)).await;
    for _ in 0..5 {
        home.export("ann", "all").await;
    }
    home.export("eve", "all").await;
    let mut claims = Vec::new();
    while let Some(claim) = home.exporter.ledger.claim(offer(2)).await.unwrap() {
        claims.push(claim);
    }
    let of = |user: &'static str| {
        claims
            .iter()
            .filter(move |claim| claim.export.user.as_str() == user)
    };
    assert_eq!((of("ann").count(), of("eve").count()), (2, 1));

    let anns = of("ann").next().unwrap();
    let ledger = &home.exporter.ledger;
    ledger
        .settle(anns.export.job_id, anns.id, finished(anns))
        .await
        .unwrap();
    assert!(ledger.claim(offer(2)).await.unwrap().is_some());
    assert!(ledger.claim(offer(2)).await.unwrap().is_none());
    // Those whose worker vanished do not run.
    home.clock.advance(LEASE);
    assert!(ledger.claim(offer(2)).await.unwrap().is_some());
    // And 0 is no cap.
    let mut rest = 0;
    while ledger.claim(offer(0)).await.unwrap().is_some() {
        rest += 1;
    }
    assert_eq!(rest, 4);
}

#[tokio::test]
async fn a_job_of_an_encoder_that_is_not_here_is_left_alone() {
    let (home, job) = one_job().await;
    home.tamper("UPDATE export SET encoder = 'of another version'", []);
    let before = export(&home, job).await;
    assert!(home.work().await.is_empty());
    assert_eq!(export(&home, job).await, before);
    home.clock.advance(Duration::from_secs(1));
    let next = home.export("ann", "all").await;
    home.work().await;
    assert_eq!(home.state(next).await, State::Done);
    assert_eq!(home.state(job).await, State::Queued);
}

#[tokio::test]
async fn a_worker_keeps_its_lease_alive_while_it_works() {
    let (home, job) = one_job().await;
    let terms = WorkerTerms {
        // Long enough for a machine that is busy with something else.
        lease: Duration::from_millis(1_500),
        ..UNTIL_IDLE
    };
    let held = tokio::spawn(work(home.exporter.workshop(1, Some(0)), terms));
    until("the job runs", async || {
        home.state(job).await == State::Running
    })
    .await;
    home.clock.advance(Duration::from_millis(200));
    let renewed = home.clock.now();
    until("the lease is renewed", async || {
        let lease = export(&home, job).await.lease.unwrap();
        (lease.renewed_at, lease.until) == (renewed, renewed.plus(terms.lease))
    })
    .await;
    held.abort();
}

#[tokio::test]
async fn a_worker_whose_job_is_revoked_stops_and_nothing_is_done() {
    let home = Installation::cutting_at(2);
    home.import(&chat(10)).await;
    let job = home.export("ann", "all").await;
    let terms = WorkerTerms {
        lease: Duration::from_millis(300),
        ..UNTIL_IDLE
    };
    let revoked = Arc::new(AtomicBool::new(false));
    let asked = Arc::new(AtomicUsize::new(0));
    let (was_revoked, counted) = (Arc::clone(&revoked), Arc::clone(&asked));
    let mut workshop = home.exporter.workshop(1, Some(2));
    workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |step| {
        if step == Step::Renew && was_revoked.load(Ordering::SeqCst) {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        Then::Answer
    });
    let held = tokio::spawn(work(workshop, terms));
    until("two parts are recorded", async || {
        home.parts(job).await.len() == 2
    })
    .await;
    let reason = "found out".to_owned();
    home.exporter.revoke(job, reason).await.unwrap();
    revoked.store(true, Ordering::SeqCst);

    let reports = held.await.unwrap();
    // The first answer was enough.
    assert!(asked.load(Ordering::SeqCst) <= 1);
    assert_eq!(reports.len(), 1);
    assert_eq!((reports[0].state, &reports[0].sha256), (None, &None));
    let export = export(&home, job).await;
    assert_eq!((export.state, export.artefact), (State::Revoked, None));
    assert!(home.kept(job).iter().all(|path| path.contains("part-")));
    // It never had an artefact, so there is nothing to restore.
    let refused = home.exporter.ledger.decide(job, Event::Restored).await;
    assert!(
        matches!(refused, Err(LedgerError::Refused(State::Revoked))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_worker_that_is_told_to_stop_finishes_what_is_in_hand_and_gives_the_job_back() {
    let home = Installation::cutting_at(100);
    home.import(&chat(2_500)).await;
    let job = home.export("ann", "all").await;
    let stop = CancellationToken::new();
    let mut workshop = home.exporter.workshop(2, None);
    let token = stop.clone();
    let source = InterruptedSource::at_page(&home.exporter.source, move |page| {
        if page == 2 {
            token.cancel();
        }
        Then::Answer
    });
    workshop.source = Arc::new(source);
    let reports = work_until(workshop, UNTIL_IDLE, stop).await;
    assert_eq!(reports.len(), 1);
    assert_eq!(reports[0].state, Some(State::Queued));
    let recorded = home.parts(job).await;
    assert_eq!(recorded.len() as u64, reports[0].parts_written);
    // A page has a thousand messages, so ten parts were whole when the second was asked for.
    assert!((10..25).contains(&recorded.len()), "{}", recorded.len());
    let export = export(&home, job).await;
    assert_eq!((export.strikes, export.lease), (0, None));

    let next = home.work().await;
    assert_eq!(next[0].parts_kept, recorded.len() as u64);
    assert_eq!(next[0].parts_kept + next[0].parts_written, 25);
}

#[tokio::test]
async fn a_worker_that_is_told_to_stop_before_it_did_anything_counts_no_attempt() {
    let (home, job) = one_job().await;
    for attempt in 1..=TERMS.max_attempts + 1 {
        let stop = CancellationToken::new();
        let token = stop.clone();
        let mut workshop = home.exporter.workshop(1, None);
        workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |step| {
            if step == Step::Parts {
                token.cancel();
            }
            Then::Answer
        });
        let reports = work_until(workshop, UNTIL_IDLE, stop).await;
        assert_eq!(reports[0].state, Some(State::Queued));
        assert_eq!(reports[0].parts_written, 0);
        let export = export(&home, job).await;
        assert_eq!((export.attempts, export.strikes), (attempt, 0));
    }
}
