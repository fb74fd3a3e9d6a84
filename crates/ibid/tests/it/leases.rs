//! Who may work on a job, and until when.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ibid::export::{Artefact, Event, Export, Problem, State};
use ibid::ids::{JobId, UserId};
use ibid::ledger::{Claim, Filter, Ledger, LedgerError, Offer, Part};
use ibid::worker::WorkerTerms;
use tokio_util::sync::CancellationToken;

use crate::events::{chat, join};
use crate::harness::{
    Installation, LEASE, On, TERMS, UNTIL_IDLE, offer, on_both, stray_claim, until, work,
    work_until,
};
use crate::interruptions::{InterruptedLedger, InterruptedSource, Step, Then};

on_both! {
    a_job_is_held_by_one_worker_until_its_lease_ends,
    a_renewed_lease_lasts_from_its_renewal_on,
    whoever_lost_the_lease_can_write_nothing_any_more,
    a_part_is_recorded_once_and_only_with_one_digest,
    a_job_whose_workers_vanish_fails_after_so_many_attempts_and_can_be_retried,
    attempts_that_recorded_a_new_part_do_not_count,
    leases_given_back_do_not_count_and_the_job_is_due_at_once,
    a_job_that_faltered_waits_with_its_reason_until_it_is_due,
    a_lease_of_a_clock_that_was_far_ahead_is_not_waited_for,
    a_job_of_a_clock_that_was_far_ahead_is_not_waited_for,
    a_longer_lease_is_not_taken_away_by_a_worker_that_asks_for_a_shorter_one,
    the_user_who_was_served_longest_ago_is_next,
    no_more_jobs_of_one_user_run_at_a_time_than_the_cap_says,
    workers_that_claim_at_once_share_the_jobs_and_keep_the_cap,
    a_job_of_an_encoder_that_is_not_here_is_left_alone,
    a_worker_keeps_its_lease_alive_while_it_works,
    a_worker_whose_job_is_revoked_stops_and_nothing_is_done,
    a_worker_that_is_told_to_stop_finishes_what_is_in_hand_and_gives_the_job_back,
    a_worker_that_is_told_to_stop_before_it_did_anything_counts_no_attempt,
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

async fn one_job(on: &On) -> (Installation, JobId) {
    let home = Installation::on(on).await;
    home.import(&chat(10)).await;
    let job = home.export("ann", "all").await;
    (home, job)
}

async fn a_job_is_held_by_one_worker_until_its_lease_ends(on: &On) {
    let (home, job) = one_job(on).await;
    let first = home.claim().await.unwrap();
    assert_eq!(
        (first.export.job_id, first.export.state),
        (job, State::Running)
    );
    home.clock.advance(LEASE - Duration::from_micros(1));
    assert!(home.claim().await.is_none());
    home.clock.advance(Duration::from_micros(1));
    let second = home.claim().await.unwrap();
    assert_eq!((second.export.job_id, second.export.attempts), (job, 2));
    assert_ne!(second.id, first.id);
}

async fn a_renewed_lease_lasts_from_its_renewal_on(on: &On) {
    let (home, job) = one_job(on).await;
    let first = home.claim().await.unwrap();
    home.clock.advance(LEASE / 2);
    home.exporter
        .ledger
        .renew(job, first.id, LEASE)
        .await
        .unwrap();
    home.clock.advance(LEASE / 2);
    assert!(home.claim().await.is_none());
    home.clock.advance(LEASE / 2);
    assert!(home.claim().await.is_some());
}

async fn whoever_lost_the_lease_can_write_nothing_any_more(on: &On) {
    let (home, job) = one_job(on).await;
    let ledger = &home.exporter.ledger;
    let old = home.claim().await.unwrap();
    home.clock.advance(LEASE);
    let new = home.claim().await.unwrap();

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

async fn a_part_is_recorded_once_and_only_with_one_digest(on: &On) {
    let (home, job) = one_job(on).await;
    let ledger = &home.exporter.ledger;
    let first = home.claim().await.unwrap();
    ledger.part_done(job, part(&first, 0)).await.unwrap();
    home.clock.advance(LEASE);
    let second = home.claim().await.unwrap();
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

async fn a_job_whose_workers_vanish_fails_after_so_many_attempts_and_can_be_retried(on: &On) {
    let (home, job) = one_job(on).await;
    for attempt in 1..=TERMS.max_attempts {
        assert_eq!(home.claim().await.unwrap().export.attempts, attempt);
        home.clock.advance(LEASE);
    }
    assert!(home.claim().await.is_none());
    assert_eq!(home.failure(job).await, "worker-lost");

    home.exporter
        .ledger
        .decide(job, Event::Retried)
        .await
        .unwrap();
    // A retry begins to count anew.
    home.claim().await.unwrap();
    home.clock.advance(LEASE);
    home.work().await;
    assert_eq!(home.artefact(job).await.messages, 10);
}

async fn attempts_that_recorded_a_new_part_do_not_count(on: &On) {
    let (home, job) = one_job(on).await;
    for number in 0..2 * u64::from(TERMS.max_attempts) {
        let claim = home.claim().await.unwrap();
        home.exporter
            .ledger
            .part_done(job, part(&claim, number))
            .await
            .unwrap();
        home.clock.advance(LEASE);
    }
    for _ in 0..TERMS.max_attempts {
        // Recording what is recorded already is no progress.
        let claim = home.claim().await.unwrap();
        home.exporter
            .ledger
            .part_done(job, part(&claim, 0))
            .await
            .unwrap();
        assert_eq!(home.state(job).await, State::Running);
        home.clock.advance(LEASE);
    }
    assert!(home.claim().await.is_none());
    assert_eq!(home.failure(job).await, "worker-lost");
}

async fn leases_given_back_do_not_count_and_the_job_is_due_at_once(on: &On) {
    let (home, job) = one_job(on).await;
    for _ in 0..2 * TERMS.max_attempts {
        let claim = home.claim().await.unwrap();
        let settled = home
            .exporter
            .ledger
            .settle(job, claim.id, Event::GivenBack)
            .await;
        assert_eq!(settled.unwrap().strikes, 0);
    }
    assert!(home.claim().await.is_some());
}

async fn a_job_that_faltered_waits_with_its_reason_until_it_is_due(on: &On) {
    let (home, job) = one_job(on).await;
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
    let held = home.claim().await.unwrap();
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
    assert!(home.claim().await.is_none());
    home.clock.advance(Duration::from_micros(1));
    home.work().await;
    let export = export(&home, job).await;
    assert_eq!((export.state, export.waiting), (State::Done, None));
}

async fn a_lease_of_a_clock_that_was_far_ahead_is_not_waited_for(on: &On) {
    let (home, job) = one_job(on).await;
    home.claim().await.unwrap();
    let ahead_by = async |micros: i64| {
        let renewed_at = home.clock.now().micros() + micros;
        let until = renewed_at + LEASE.as_micros() as i64;
        let set = format!("UPDATE export SET renewed_at = {renewed_at}, lease_until = {until}");
        home.change(&set).await;
    };
    ahead_by(LEASE.as_micros() as i64).await;
    assert!(home.claim().await.is_none());
    ahead_by(LEASE.as_micros() as i64 + 1).await;
    assert_eq!(home.claim().await.unwrap().export.job_id, job);
}

async fn a_job_of_a_clock_that_was_far_ahead_is_not_waited_for(on: &On) {
    let (home, job) = one_job(on).await;
    let due_in = async |micros: i64| {
        let due_at = home.clock.now().micros() + micros;
        home.change(&format!("UPDATE export SET due_at = {due_at}"))
            .await;
    };
    due_in(60_000_000).await;
    assert!(home.claim().await.is_none());
    due_in(60_000_001).await;
    assert_eq!(home.claim().await.unwrap().export.job_id, job);
}

async fn a_longer_lease_is_not_taken_away_by_a_worker_that_asks_for_a_shorter_one(on: &On) {
    let (home, _) = one_job(on).await;
    let long = Offer {
        lease: LEASE * 10,
        ..offer(0)
    };
    home.exporter.ledger.claim(long).await.unwrap().unwrap();
    assert!(home.claim().await.is_none());
    home.clock.advance(LEASE * 10 - Duration::from_micros(1));
    assert!(home.claim().await.is_none());
    home.clock.advance(Duration::from_micros(1));
    assert!(home.claim().await.is_some());
}

async fn the_user_who_was_served_longest_ago_is_next(on: &On) {
    let home = Installation::on(on).await;
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
        let Some(claim) = home.claim().await else {
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

async fn no_more_jobs_of_one_user_run_at_a_time_than_the_cap_says(on: &On) {
    let home = Installation::on(on).await;
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

async fn workers_that_claim_at_once_share_the_jobs_and_keep_the_cap(on: &On) {
    const CAP: u64 = 2;
    let home = Installation::on(on).await;
    home.import(&chat(3)).await;
    home.import(&[join("c", "eve"), join("c", "zoe")]).await;
    for _ in 0..10 {
        for user in ["ann", "eve", "zoe"] {
            home.export(user, "all").await;
        }
    }
    let mut ledgers = Vec::new();
    for _ in 0..4 {
        ledgers.push(home.another_exporter().await.ledger);
    }
    let workers = |work: Work| {
        let workers = (0..8).map(|number| {
            let ledger = Arc::clone(&ledgers[number % ledgers.len()]);
            tokio::spawn(async move { work_off(ledger.as_ref(), CAP, work).await })
        });
        futures::future::join_all(workers.collect::<Vec<_>>())
    };
    let done = |claimed: Vec<Result<Vec<Claim>, _>>| {
        let claims = claimed.into_iter().flat_map(Result::unwrap);
        claims.map(|claim| (claim.export.user.to_string(), claim))
    };
    let held: Vec<_> = done(workers(Work::Hold).await).collect();
    for user in ["ann", "eve", "zoe"] {
        let of_user = held.iter().filter(|(of, _)| of == user).count() as u64;
        assert_eq!(of_user, CAP, "{user}");
    }
    // A lease that is given back is one that another worker can have.
    for (_, claim) in &held {
        let given_back =
            home.exporter
                .ledger
                .settle(claim.export.job_id, claim.id, Event::GivenBack);
        given_back.await.unwrap();
    }
    let finished: Vec<_> = done(workers(Work::Finish).await).collect();
    let jobs: HashSet<JobId> = finished.iter().map(|(_, it)| it.export.job_id).collect();
    assert_eq!((finished.len(), jobs.len()), (30, 30));
}

#[derive(Clone, Copy)]
enum Work {
    /// Claims all that there is and finishes nothing.
    Hold,
    /// Finishes what it claims, until nothing is left.
    Finish,
}

async fn work_off(ledger: &dyn Ledger, cap: u64, work: Work) -> Vec<Claim> {
    let mut claims = Vec::new();
    loop {
        match (ledger.claim(offer(cap)).await.unwrap(), work) {
            (Some(claim), Work::Hold) => claims.push(claim),
            (None, Work::Hold) => return claims,
            (Some(claim), Work::Finish) => {
                let of_user = of(State::Running, Some(&claim.export.user));
                let running = ledger.search(of_user, None, 100).await.unwrap().len() as u64;
                assert!((1..=cap).contains(&running), "{running}");
                let (job, end) = (claim.export.job_id, finished(&claim));
                ledger.settle(job, claim.id, end).await.unwrap();
                claims.push(claim);
            }
            (None, Work::Finish) => {
                let queued = ledger.search(of(State::Queued, None), None, 1).await;
                if queued.unwrap().is_empty() {
                    return claims;
                }
                // Others hold as many as may run.
                tokio::task::yield_now().await;
            }
        }
    }
}

fn of(state: State, user: Option<&UserId>) -> Filter {
    Filter {
        user: user.cloned(),
        state: Some(state),
    }
}

async fn a_job_of_an_encoder_that_is_not_here_is_left_alone(on: &On) {
    let (home, job) = one_job(on).await;
    home.change("UPDATE export SET encoder = 'of another version'")
        .await;
    let before = export(&home, job).await;
    assert!(home.work().await.is_empty());
    home.clock.advance(LEASE - Duration::from_micros(1));
    let next = home.export("ann", "all").await;
    home.work().await;
    assert_eq!(home.state(next).await, State::Done);
    assert_eq!(export(&home, job).await, before);

    // Nobody has come who has it: that is said, once, and nothing else is done.
    home.clock.advance(Duration::from_micros(1));
    let since = home.clock.now();
    for _ in 0..2 {
        assert!(home.work().await.is_empty());
        let mut left = export(&home, job).await;
        let waiting = left.waiting.take().unwrap();
        assert_eq!(waiting.problem.kind, "encoder-missing");
        assert_eq!(waiting.since, since);
        assert_eq!(left, before);
        home.clock.advance(LEASE);
    }
    let newer = Offer {
        encoders: vec!["of another version".to_owned()],
        ..offer(0)
    };
    let claim = home.exporter.ledger.claim(newer).await.unwrap().unwrap();
    assert_eq!((claim.export.job_id, claim.export.waiting), (job, None));
}

async fn a_worker_keeps_its_lease_alive_while_it_works(on: &On) {
    let (home, job) = one_job(on).await;
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

async fn a_worker_whose_job_is_revoked_stops_and_nothing_is_done(on: &On) {
    let home = Installation::cutting(on, 2).await;
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

async fn a_worker_that_is_told_to_stop_finishes_what_is_in_hand_and_gives_the_job_back(on: &On) {
    let home = Installation::cutting(on, 100).await;
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

async fn a_worker_that_is_told_to_stop_before_it_did_anything_counts_no_attempt(on: &On) {
    let (home, job) = one_job(on).await;
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
