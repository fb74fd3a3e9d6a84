use std::time::Duration;

use super::*;

const NOW: Time = Time::from_seconds(1_000);
const TERMS: Terms = Terms {
    max_attempts: 3,
    retention: Duration::from_secs(100),
};

fn queued() -> Export {
    Export {
        job_id: JobId::from_bytes([1; 16]),
        user: UserId::parse("u").unwrap(),
        scope: Scope::All,
        recipe: Recipe {
            format: Format::JsonlGz,
            format_version: 1,
            encoder: "e".to_owned(),
            cut: CutRule {
                part_bytes: 1,
                part_messages: 0,
            },
        },
        snapshot: Snapshot::up_to(1),
        created_at: NOW,
        messages_total: 1,
        state: State::Queued,
        started_at: None,
        finished_at: None,
        expires_at: None,
        attempts: 0,
        strikes: 0,
        due_at: NOW,
        lease: None,
        artefact: None,
        problem: None,
        waiting: None,
        revocation: None,
        purging: false,
    }
}

fn problem() -> Problem {
    Problem {
        kind: "storage-unavailable".to_owned(),
        detail: "The disk is full.".to_owned(),
    }
}

fn events() -> Vec<Event> {
    let claim = ClaimId::from_bytes([2; 16]);
    vec![
        Event::Claimed { claim, until: NOW },
        Event::GivenBack,
        Event::Lapsed { terms: TERMS },
        Event::Faltered {
            problem: problem(),
            retry_at: NOW,
            terms: TERMS,
        },
        Event::Hindered {
            problem: problem(),
            retry_at: NOW,
        },
        Event::GaveUp {
            problem: problem(),
            terms: TERMS,
        },
        Event::Finished {
            artefact: Artefact {
                claim,
                sha256: [0; 32],
                bytes: 1,
                messages: 1,
                parts: 1,
            },
            terms: TERMS,
        },
        Event::Revoked {
            by: RevokedBy::Admin,
            reason: String::new(),
        },
        Event::Restored,
        Event::Retried,
        Event::Expired,
        Event::PassedOver,
        Event::Damaged { artefact: claim },
        Event::Sound { artefact: claim },
    ]
}

fn at(state: State) -> Export {
    let all = events();
    let path: &[usize] = match state {
        State::Queued => &[],
        State::Running => &[0],
        State::Done => &[0, 6],
        State::Failed => &[0, 5],
        State::Revoked => &[0, 6, 7],
        State::Expired => &[0, 6, 10],
    };
    let mut export = queued();
    for step in path {
        export.on(all[*step].clone(), NOW).expect("a legal step");
    }
    assert_eq!(export.state, state);
    export
}

#[test]
fn every_pair_of_state_and_event_does_what_the_table_says() {
    use State::{Done, Expired, Failed, Queued, Revoked, Running};
    // None: refused. The order of events is that of `events()`.
    let table: [(State, [Option<State>; 12]); 6] = [
        (
            Queued,
            [
                Some(Running),
                None,
                None,
                None,
                None,
                None,
                None,
                Some(Revoked),
                None,
                None,
                None,
                Some(Queued),
            ],
        ),
        (
            Running,
            [
                None,
                Some(Queued),
                Some(Queued),
                Some(Queued),
                Some(Queued),
                Some(Failed),
                Some(Done),
                Some(Revoked),
                None,
                None,
                None,
                None,
            ],
        ),
        (
            Done,
            [
                None,
                None,
                None,
                None,
                None,
                None,
                None,
                Some(Revoked),
                None,
                Some(Queued),
                Some(Expired),
                None,
            ],
        ),
        (
            Failed,
            [
                None,
                None,
                None,
                None,
                None,
                None,
                None,
                Some(Revoked),
                None,
                Some(Queued),
                Some(Expired),
                None,
            ],
        ),
        (
            Revoked,
            [
                None,
                None,
                None,
                None,
                None,
                None,
                None,
                Some(Revoked),
                Some(Done),
                None,
                None,
                None,
            ],
        ),
        (
            Expired,
            [
                None,
                None,
                None,
                None,
                None,
                None,
                None,
                Some(Expired),
                None,
                None,
                None,
                None,
            ],
        ),
    ];
    for (state, row) in table {
        for (event, expected) in events().into_iter().zip(row) {
            let before = at(state);
            let mut export = before.clone();
            let answer = export.on(event.clone(), NOW);
            match expected {
                Some(next) => {
                    assert!(answer.is_ok(), "{state:?} {event:?}");
                    assert_eq!(export.state, next, "{state:?} {event:?}");
                }
                None => {
                    assert_eq!(answer, Err(Refused { state }), "{event:?}");
                    assert_eq!(export, before, "a refused event changed something");
                }
            }
        }
    }
}

#[test]
fn only_attempts_without_progress_count_and_the_last_one_fails_the_job() {
    let claim = |export: &mut Export| {
        export.on(events()[0].clone(), NOW).expect("claimed");
    };
    let mut export = queued();
    for _ in 0..10 {
        claim(&mut export);
        export.lease.as_mut().expect("a lease").progressed = true;
        export.on(Event::Lapsed { terms: TERMS }, NOW).unwrap();
        claim(&mut export);
        export.on(Event::GivenBack, NOW).unwrap();
    }
    assert_eq!((export.state, export.strikes), (State::Queued, 0));
    for strikes in 1..=3 {
        claim(&mut export);
        export.on(Event::Lapsed { terms: TERMS }, NOW).unwrap();
        assert_eq!(export.strikes, strikes);
    }
    assert_eq!(export.state, State::Failed);
    assert_eq!(export.problem.as_ref().unwrap().kind, "worker-lost");
    export.on(Event::Retried, NOW).unwrap();
    assert_eq!((export.state, export.strikes), (State::Queued, 0));
}

#[test]
fn a_job_that_waits_says_why_and_since_when() {
    let mut export = at(State::Running);
    let falter = |retry_at| Event::Faltered {
        problem: problem(),
        retry_at,
        terms: TERMS,
    };
    export.on(falter(Time::from_seconds(1_010)), NOW).unwrap();
    assert_eq!(export.due_at, Time::from_seconds(1_010));
    assert_eq!(export.waiting.as_ref().unwrap().since, NOW);
    export
        .on(events()[0].clone(), Time::from_seconds(1_010))
        .unwrap();
    export
        .on(falter(Time::from_seconds(1_030)), Time::from_seconds(1_011))
        .unwrap();
    assert_eq!(export.waiting.as_ref().unwrap().since, NOW);
}

#[test]
fn what_is_not_the_jobs_fault_is_waited_out_however_long() {
    let mut export = queued();
    for attempt in 1..=20 {
        export.on(events()[0].clone(), NOW).unwrap();
        let hindered = Event::Hindered {
            problem: problem(),
            retry_at: NOW,
        };
        export.on(hindered, NOW).unwrap();
        assert_eq!((export.state, export.strikes), (State::Queued, 0));
        assert_eq!(export.attempts, attempt);
    }
    assert_eq!(export.waiting.as_ref().unwrap().since, NOW);
}

#[test]
fn one_that_was_passed_over_waits_for_its_encoder_until_somebody_has_it() {
    let mut export = queued();
    assert_eq!(export.on(Event::PassedOver, NOW), Ok(Change::Changed));
    let waiting = export.waiting.clone().unwrap();
    assert_eq!(waiting.problem.kind, NO_ENCODER);
    assert!(waiting.problem.detail.contains(&export.recipe.encoder));
    assert_eq!((export.due_at, export.attempts), (NOW, 0));
    let later = NOW.plus(Duration::from_secs(1));
    assert_eq!(export.on(Event::PassedOver, later), Ok(Change::Unchanged));
    assert_eq!(export.waiting.as_ref(), Some(&waiting));
    export.on(events()[0].clone(), later).unwrap();
    assert_eq!(export.waiting, None);

    // Why it has waited before is told until it is over.
    export.on(events()[4].clone(), later).unwrap();
    let waiting = export.waiting.clone();
    assert_eq!(export.on(Event::PassedOver, later), Ok(Change::Unchanged));
    export.on(events()[0].clone(), later).unwrap();
    assert_eq!(export.waiting, waiting);
}

#[test]
fn a_revocation_cannot_be_taken_back_after_the_retention() {
    let mut export = at(State::Revoked);
    let edge = Time::from_seconds(1_100);
    assert!(export.on(Event::Restored, edge).is_err());
    let before = edge.minus(Duration::from_micros(1));
    assert!(export.on(Event::Restored, before).is_ok());
}

#[test]
fn only_an_admins_revocation_of_a_done_export_can_be_taken_back() {
    let revoke = |by| Event::Revoked {
        by,
        reason: "because".to_owned(),
    };
    let mut export = at(State::Done);
    export.on(revoke(RevokedBy::Admin), NOW).unwrap();
    export.on(Event::Restored, NOW).unwrap();
    assert!(export.revocation.is_none() && export.state == State::Done);

    for (state, by) in [
        (State::Done, RevokedBy::Owner),
        (State::Done, RevokedBy::Erasure),
        (State::Queued, RevokedBy::Admin),
        (State::Running, RevokedBy::Admin),
        (State::Failed, RevokedBy::Admin),
    ] {
        let mut export = at(state);
        export.on(revoke(by), NOW).unwrap();
        assert!(export.on(Event::Restored, NOW).is_err(), "{state:?} {by:?}");
    }

    let mut export = at(State::Done);
    export.on(revoke(RevokedBy::Admin), NOW).unwrap();
    assert_eq!(
        export.on(revoke(RevokedBy::Admin), NOW),
        Ok(Change::Unchanged)
    );
    assert_eq!(
        export.on(revoke(RevokedBy::Owner), NOW),
        Ok(Change::Changed)
    );
    assert!(export.on(Event::Restored, NOW).is_err());
    assert_eq!(export.revocation.unwrap().by, RevokedBy::Admin);
}

#[test]
fn a_done_export_that_is_made_again_keeps_what_was_told_of_it() {
    let mut export = at(State::Done);
    let told = (
        export.finished_at,
        export.expires_at,
        export.artefact.clone(),
    );
    let later = Time::from_seconds(1_050);
    export.on(Event::Retried, later).unwrap();
    assert_eq!(export.state, State::Queued);
    export.on(events()[0].clone(), later).unwrap();
    let Some(finished) = events()
        .into_iter()
        .find(|e| matches!(e, Event::Finished { .. }))
    else {
        panic!("no event ends a job well");
    };
    export.on(finished, later).unwrap();
    assert_eq!(
        told,
        (export.finished_at, export.expires_at, export.artefact)
    );
}

#[test]
fn a_done_export_that_could_not_be_made_again_keeps_its_retention() {
    let mut export = at(State::Done);
    let told = (export.finished_at, export.expires_at);
    let later = Time::from_seconds(1_050);
    export.on(Event::Retried, later).unwrap();
    export.on(events()[0].clone(), later).unwrap();
    let problem = problem();
    let terms = TERMS;
    export.on(Event::GaveUp { problem, terms }, later).unwrap();
    assert_eq!(export.state, State::Failed);
    assert_eq!(told, (export.finished_at, export.expires_at));
    let edge = Time::from_seconds(1_100);
    assert_eq!(export.state_at(edge), State::Expired);
}

#[test]
fn bytes_are_purged_when_nobody_may_have_them_any_more() {
    let edge = Time::from_seconds(1_100);
    let purged = |state, now| at(state).is_to_be_purged(now);
    for state in State::ALL {
        let expected = state == State::Expired;
        assert_eq!(purged(state, NOW), expected, "{state:?}");
    }
    // Downloads that have begun may still read.
    let last = edge.plus(LAST_DOWNLOADS).minus(Duration::from_micros(1));
    assert!(!purged(State::Done, last) && !purged(State::Failed, last));
    let over = edge.plus(LAST_DOWNLOADS);
    assert!(purged(State::Done, over) && purged(State::Failed, over));
    assert!(!purged(State::Queued, over) && !purged(State::Running, over));
    // Of one that was taken back none goes on.
    assert!(purged(State::Revoked, edge));
    let mut export = at(State::Running);
    let by = RevokedBy::Admin;
    let reason = String::new();
    export.on(Event::Revoked { by, reason }, NOW).unwrap();
    assert!(export.is_to_be_purged(NOW) && !export.needs_log());
}

#[test]
fn retention_ends_at_its_moment_and_not_when_somebody_sweeps() {
    let export = at(State::Done);
    assert_eq!(export.expires_at, Some(Time::from_seconds(1_100)));
    let micro = Duration::from_micros(1);
    let edge = Time::from_seconds(1_100);
    assert_eq!(export.state_at(edge.minus(micro)), State::Done);
    assert_eq!(export.state_at(edge), State::Expired);
    assert_eq!(at(State::Queued).state_at(edge), State::Queued);
}

#[test]
fn a_done_export_waits_for_its_own_file_to_be_put_right_and_not_while_it_is_made_again() {
    let mut export = at(State::Done);
    let artefact = export.artefact.as_ref().unwrap().claim;
    let another = ClaimId::from_bytes([9; 16]);
    let damaged = Event::Damaged { artefact };
    let of_another = Event::Damaged { artefact: another };
    assert_eq!(export.on(of_another, NOW), Ok(Change::Unchanged));
    assert_eq!(export.on(damaged.clone(), NOW), Ok(Change::Changed));
    let waiting = export.waiting.clone().unwrap();
    assert_eq!(waiting.problem.kind, "artefact-unavailable");
    // It is told since when, however often it is found.
    let later = NOW.plus(Duration::from_secs(5));
    assert_eq!(export.on(damaged.clone(), later), Ok(Change::Unchanged));
    assert_eq!(export.waiting, Some(waiting));
    let of_another = Event::Sound { artefact: another };
    assert_eq!(export.on(of_another, later), Ok(Change::Unchanged));
    let sound = Event::Sound { artefact };
    assert_eq!(export.on(sound.clone(), later), Ok(Change::Changed));
    assert_eq!((export.state, &export.waiting), (State::Done, &None));
    assert_eq!(export.on(sound, later), Ok(Change::Unchanged));

    export.on(damaged, later).unwrap();
    export.on(Event::Retried, later).unwrap();
    assert_eq!((export.state, &export.waiting), (State::Queued, &None));
}
