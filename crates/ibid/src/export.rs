//! An export job and the one place that decides how its state changes.

use serde::{Deserialize, Serialize};

use crate::cut::CutRule;
use crate::ids::{ClaimId, JobId, UserId};
use crate::scope::{Format, Scope};
use crate::snapshot::Snapshot;
use crate::time::Time;

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Waits for a worker.
    Queued,
    /// A worker holds it under a lease.
    Running,
    /// The artefact is there.
    Done,
    /// Given up, with a reason; can be tried again.
    Failed,
    /// Withdrawn by its owner, an admin or an erasure.
    Revoked,
    /// Its retention has passed.
    Expired,
}

impl State {
    pub const ALL: [State; 6] = [
        State::Queued,
        State::Running,
        State::Done,
        State::Failed,
        State::Revoked,
        State::Expired,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            State::Queued => "queued",
            State::Running => "running",
            State::Done => "done",
            State::Failed => "failed",
            State::Revoked => "revoked",
            State::Expired => "expired",
        }
    }

    pub fn parse(text: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == text)
    }

    /// Whether no worker will touch the job any more unless somebody asks for it.
    pub const fn is_final(self) -> bool {
        match self {
            State::Queued | State::Running => false,
            State::Done | State::Failed | State::Revoked | State::Expired => true,
        }
    }
}

/// What the bytes of an artefact depend on besides the log: fixed when the job is created, so
/// that another worker, or a newer binary, makes the same bytes or refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    pub format: Format,
    pub format_version: u32,
    pub encoder: String,
    pub cut: CutRule,
}

/// The whole file that a job made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artefact {
    /// The claim under which it was written, which is part of where it is kept.
    pub claim: ClaimId,
    pub sha256: [u8; 32],
    pub bytes: u64,
    pub messages: u64,
    pub parts: u64,
}

/// Why a job failed or has to wait: a stable name and a sentence that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    #[serde(rename = "type")]
    pub kind: String,
    pub detail: String,
}

/// Why a job does not go on for now, and since when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Waiting {
    #[serde(flatten)]
    pub problem: Problem,
    pub since: Time,
}

/// Who took an export back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RevokedBy {
    Owner,
    Admin,
    Erasure,
}

impl RevokedBy {
    pub const fn as_str(self) -> &'static str {
        match self {
            RevokedBy::Owner => "owner",
            RevokedBy::Admin => "admin",
            RevokedBy::Erasure => "erasure",
        }
    }

    pub fn parse(text: &str) -> Option<RevokedBy> {
        [RevokedBy::Owner, RevokedBy::Admin, RevokedBy::Erasure]
            .into_iter()
            .find(|by| by.as_str() == text)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Revocation {
    pub at: Time,
    pub by: RevokedBy,
    pub reason: String,
}

/// A worker's hold on a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The fence: a write that carries another claim changes nothing.
    pub claim: ClaimId,
    pub until: Time,
    pub renewed_at: Time,
    /// Whether this attempt has recorded a new part; if so it does not count when it ends badly.
    pub progressed: bool,
}

/// An export job as the ledger keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    pub job_id: JobId,
    pub user: UserId,
    pub scope: Scope,
    pub recipe: Recipe,
    pub snapshot: Snapshot,
    pub created_at: Time,
    /// How many messages the artefact will hold.
    pub messages_total: u64,

    pub state: State,
    pub started_at: Option<Time>,
    pub finished_at: Option<Time>,
    pub expires_at: Option<Time>,
    /// How often the job was claimed.
    pub attempts: u32,
    /// Attempts that ended badly without recording a part, since the last retry.
    pub strikes: u32,
    /// Not to be claimed before.
    pub due_at: Time,
    pub lease: Option<Lease>,
    pub artefact: Option<Artefact>,
    pub problem: Option<Problem>,
    pub waiting: Option<Waiting>,
    pub revocation: Option<Revocation>,
    /// The bytes are being deleted, or are gone; there is no way back.
    pub purging: bool,
}

/// What can happen to a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A worker takes it.
    Claimed { claim: ClaimId, until: Time },
    /// Workers that were free have let it lie for some time, since they do not have its encoder.
    PassedOver,
    /// The worker that holds it is told to stop and gives it back.
    GivenBack,
    /// The worker that holds it let its lease end.
    Lapsed { terms: Terms },
    /// The worker met something that may pass, and the job is to be tried again at `retry_at`.
    Faltered {
        problem: Problem,
        retry_at: Time,
        terms: Terms,
    },
    /// The worker met something that is not the job's fault, such as a full disk: it waits until
    /// that is over, however long, and the attempt does not count.
    Hindered { problem: Problem, retry_at: Time },
    /// The worker met something that will not pass.
    GaveUp { problem: Problem, terms: Terms },
    /// The artefact is written and safe.
    Finished { artefact: Artefact, terms: Terms },
    /// Somebody takes the export back. The owner's withdrawal and an erasure also purge.
    Revoked { by: RevokedBy, reason: String },
    /// An admin takes a revocation back.
    Restored,
    /// Somebody asks for another try.
    Retried,
    /// Somebody who wanted the bytes of this artefact found them missing, cut or unreadable.
    Damaged { artefact: ClaimId },
    /// Somebody found them as they should be.
    Sound { artefact: ClaimId },
    /// The retention has passed.
    Expired,
}

/// The longest time that a job waits before it is tried again.
pub const LONGEST_WAIT: std::time::Duration = std::time::Duration::from_secs(60);

/// How long bytes outlive their retention, for downloads that began before it ended. For everybody
/// else the export has expired at the moment that was told.
pub const LAST_DOWNLOADS: std::time::Duration = std::time::Duration::from_secs(3600);

/// The kind of problem that a job waits with for a worker that has its encoder.
const NO_ENCODER: &str = "encoder-missing";

/// The rules that an event is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub max_attempts: u32,
    pub retention: std::time::Duration,
}

/// The event does not fit the state; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this cannot be done to an export that is {}", state.as_str())]
pub struct Refused {
    pub state: State,
}

/// Whether the event made a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Changed,
    Unchanged,
}

impl Export {
    /// Decides what `event` makes of the job.
    ///
    /// | event | queued | running | done | failed | revoked | expired |
    /// |---|---|---|---|---|---|---|
    /// | Claimed | running | - | - | - | - | - |
    /// | PassedOver | (waits) | - | - | - | - | - |
    /// | GivenBack | - | queued | - | - | - | - |
    /// | Lapsed, Faltered | - | queued, or failed after `max_attempts` | - | - | - | - |
    /// | Hindered | - | queued | - | - | - | - |
    /// | GaveUp | - | failed | - | - | - | - |
    /// | Finished | - | done | - | - | - | - |
    /// | Revoked | revoked | revoked | revoked | revoked | (unchanged) | (unchanged) |
    /// | Restored | - | - | - | - | done, if an admin revoked a done one whose bytes are there | - |
    /// | Retried | - | - | queued, to make the same file again | queued | - | - |
    /// | Damaged, Sound | - | - | (waits, or not any more) | - | - | - |
    /// | Expired | - | - | expired | expired | - | - |
    ///
    /// # Errors
    /// [`Refused`] where the table has a dash; the job is as it was.
    pub fn on(&mut self, event: Event, now: Time) -> Result<Change, Refused> {
        let refused = Refused { state: self.state };
        match (self.state, event) {
            (State::Queued, Event::Claimed { claim, until }) => {
                self.state = State::Running;
                self.attempts += 1;
                self.started_at.get_or_insert(now);
                // Who takes it has it.
                self.waiting
                    .take_if(|waiting| waiting.problem.kind == NO_ENCODER);
                self.lease = Some(Lease {
                    claim,
                    until,
                    renewed_at: now,
                    progressed: false,
                });
            }
            (State::Queued, Event::PassedOver) => {
                if self.waiting.is_some() {
                    return Ok(Change::Unchanged);
                }
                let problem = Problem {
                    kind: NO_ENCODER.to_owned(),
                    detail: format!(
                        "A worker that was free could not take the export, because it does not \
                         have the encoder {:?}. One of the version of ibid that created the export \
                         goes on with it; let one run.",
                        self.recipe.encoder
                    ),
                };
                self.waiting = Some(Waiting {
                    problem,
                    since: now,
                });
            }
            (State::Running, Event::GivenBack) => self.back_to_queue(now),
            (State::Running, Event::Lapsed { terms }) => {
                let problem = Problem {
                    kind: "worker-lost".to_owned(),
                    detail: format!(
                        "The worker stopped renewing its lease {} times without making \
                         progress. Look at the workers' logs, then retry the export.",
                        self.strikes + 1
                    ),
                };
                if self.strike(terms) {
                    self.fail(problem, now, terms);
                } else {
                    self.back_to_queue(now);
                }
            }
            (
                State::Running,
                Event::Faltered {
                    problem,
                    retry_at,
                    terms,
                },
            ) => {
                if self.strike(terms) {
                    self.fail(problem, now, terms);
                } else {
                    self.wait(problem, retry_at, now);
                }
            }
            (State::Running, Event::Hindered { problem, retry_at }) => {
                self.wait(problem, retry_at, now);
            }
            (State::Running, Event::GaveUp { problem, terms }) => self.fail(problem, now, terms),
            (State::Running, Event::Finished { artefact, terms }) => {
                self.state = State::Done;
                self.lease = None;
                self.waiting = None;
                self.problem = None;
                if self.artefact.is_none() {
                    self.finished_at = Some(now);
                    self.expires_at = Some(now.plus(terms.retention));
                }
                self.artefact = Some(artefact);
            }
            (
                State::Queued | State::Running | State::Done | State::Failed,
                Event::Revoked { by, reason },
            ) => {
                self.state = State::Revoked;
                self.lease = None;
                self.waiting = None;
                self.purging = self.purging || purges(by);
                self.revocation = Some(Revocation {
                    at: now,
                    by,
                    reason,
                });
            }
            (State::Revoked, Event::Revoked { by, .. }) => {
                // The first revocation stands, but an owner who withdraws what an admin had
                // revoked wants the bytes gone.
                if self.purging || !purges(by) {
                    return Ok(Change::Unchanged);
                }
                self.purging = true;
            }
            (State::Expired, Event::Revoked { .. }) => return Ok(Change::Unchanged),
            (State::Revoked, Event::Restored) => {
                let by_admin = self
                    .revocation
                    .as_ref()
                    .is_some_and(|revocation| revocation.by == RevokedBy::Admin);
                let expired = self.expires_at.is_some_and(|at| at <= now);
                if !by_admin || self.artefact.is_none() || self.purging || expired {
                    return Err(refused);
                }
                self.state = State::Done;
                self.revocation = None;
            }
            (State::Done, Event::Retried) => {
                // What was told of the file stays true: only the same one is accepted.
                self.strikes = 0;
                self.back_to_queue(now);
            }
            (State::Failed, Event::Retried) => {
                self.strikes = 0;
                self.problem = None;
                if self.artefact.is_none() {
                    self.finished_at = None;
                    self.expires_at = None;
                }
                self.back_to_queue(now);
            }
            (State::Done, Event::Damaged { artefact }) => {
                if self.waiting.is_some() || !self.is_made_by(artefact) {
                    return Ok(Change::Unchanged);
                }
                let problem = Problem {
                    kind: "artefact-unavailable".to_owned(),
                    detail: "The file is missing or damaged where it is kept. An admin can have \
                             the same one made again, by a retry of the export."
                        .to_owned(),
                };
                self.waiting = Some(Waiting {
                    problem,
                    since: now,
                });
            }
            (State::Done, Event::Sound { artefact }) => {
                if self.waiting.is_none() || !self.is_made_by(artefact) {
                    return Ok(Change::Unchanged);
                }
                self.waiting = None;
            }
            (State::Done | State::Failed, Event::Expired) => {
                self.state = State::Expired;
                self.purging = true;
            }
            (
                State::Running | State::Done | State::Failed | State::Revoked | State::Expired,
                Event::Claimed { .. } | Event::PassedOver,
            )
            | (
                State::Queued | State::Done | State::Failed | State::Revoked | State::Expired,
                Event::GivenBack
                | Event::Lapsed { .. }
                | Event::Faltered { .. }
                | Event::Hindered { .. }
                | Event::GaveUp { .. }
                | Event::Finished { .. },
            )
            | (
                State::Queued | State::Running | State::Done | State::Failed | State::Expired,
                Event::Restored,
            )
            | (State::Queued | State::Running | State::Revoked | State::Expired, Event::Retried)
            | (State::Queued | State::Running | State::Revoked | State::Expired, Event::Expired)
            | (
                State::Queued | State::Running | State::Failed | State::Revoked | State::Expired,
                Event::Damaged { .. } | Event::Sound { .. },
            ) => {
                return Err(refused);
            }
        }
        Ok(Change::Changed)
    }

    fn is_made_by(&self, claim: ClaimId) -> bool {
        let artefact = self.artefact.as_ref();
        artefact.is_some_and(|artefact| artefact.claim == claim)
    }

    /// Whether a worker may still have to read the log for the job: one that failed can be tried
    /// again, and one that is done too, if its bytes are lost.
    pub fn needs_log(&self) -> bool {
        match self.state {
            State::Queued | State::Running | State::Done | State::Failed => true,
            State::Revoked => self.artefact.is_some() && !self.purging,
            State::Expired => false,
        }
    }

    /// Whether all bytes of the job are to be deleted at `now`. Those of one whose retention has
    /// passed stay for [`LAST_DOWNLOADS`]; those of one that was taken back do not.
    pub fn is_to_be_purged(&self, now: Time) -> bool {
        let over = |now: Time| self.expires_at.is_some_and(|at| at <= now);
        match self.state {
            State::Queued | State::Running => false,
            State::Done | State::Failed => over(now.minus(LAST_DOWNLOADS)),
            State::Revoked => self.purging || over(now) || self.artefact.is_none(),
            State::Expired => true,
        }
    }

    /// The state as it is at `now`: a job whose retention has passed is expired from that
    /// moment on, not from when somebody sweeps.
    pub fn state_at(&self, now: Time) -> State {
        match self.state {
            State::Done | State::Failed if self.expires_at.is_some_and(|at| at <= now) => {
                State::Expired
            }
            state => state,
        }
    }

    /// Counts an attempt that ended badly; true when it was the last one allowed.
    fn strike(&mut self, terms: Terms) -> bool {
        if !self.lease.as_ref().is_some_and(|lease| lease.progressed) {
            self.strikes += 1;
        }
        self.strikes >= terms.max_attempts
    }

    fn back_to_queue(&mut self, due_at: Time) {
        self.state = State::Queued;
        self.lease = None;
        self.due_at = due_at;
    }

    fn wait(&mut self, problem: Problem, retry_at: Time, now: Time) {
        self.back_to_queue(retry_at);
        let since = self.waiting.take().map_or(now, |waiting| waiting.since);
        self.waiting = Some(Waiting { problem, since });
    }

    fn fail(&mut self, problem: Problem, now: Time, terms: Terms) {
        self.state = State::Failed;
        self.lease = None;
        self.waiting = None;
        self.problem = Some(problem);
        // What was told of a file that could not be made again stays true.
        if self.artefact.is_none() {
            self.finished_at = Some(now);
            self.expires_at = Some(now.plus(terms.retention));
        }
    }
}

const fn purges(by: RevokedBy) -> bool {
    match by {
        RevokedBy::Owner | RevokedBy::Erasure => true,
        RevokedBy::Admin => false,
    }
}

#[cfg(test)]
mod tests {
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
}
