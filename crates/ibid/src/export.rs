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
                // That its bytes are damaged is no reason for the new attempt to wait.
                self.waiting = None;
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
mod tests;
