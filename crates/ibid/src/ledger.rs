//! What was asked for and how far it is: jobs, leases, parts, tokens.

pub mod postgres;
pub mod sqlite;

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;

use crate::export::{Change, Event, Export, Recipe, State, Terms};
use crate::ids::{ClaimId, JobId, UserId};
use crate::key::IdempotencyKey;
use crate::limits::{LimitReached, Limits};
use crate::scope::Request;
use crate::snapshot::Snapshot;
use crate::source::{Sight, SourceError, TakeError, Windows};
use crate::time::Time;

/// The record of all export jobs.
///
/// Every verb is one transaction. Time is the ledger's own ([`Ledger::now`]), so that nodes
/// whose clocks differ agree.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// The time by which leases, links and retention are judged.
    async fn now(&self) -> Result<Time, LedgerError>;

    /// The job that this user, key and request have made before.
    ///
    /// # Errors
    /// [`CreateError::KeyReused`] if the key was used for another request.
    async fn replay(&self, new: &NewExport) -> Result<Option<Export>, CreateError>;

    /// Creates a job, or finds the one that this user, key and request have made before.
    ///
    /// `taken` is what the user sees, where the log lies elsewhere and has pinned it. `None`
    /// says that it lies in the ledger's own database: then snapshot, stays and pin are taken
    /// there, in the same transaction.
    async fn create(
        &self,
        new: NewExport,
        limits: Limits,
        taken: Option<Sight>,
    ) -> Result<Created, CreateError>;

    /// The job with this id.
    async fn find(&self, job: JobId) -> Result<Option<Found>, LedgerError>;

    /// A user's jobs, newest first, at most `limit`, older than the one at `before`.
    async fn list(
        &self,
        user: &UserId,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError>;

    /// The jobs of all users that `filter` lets through, as [`Ledger::list`] orders them.
    async fn search(
        &self,
        filter: Filter,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError>;

    /// Claims the oldest due job of the user who was served longest ago, or `None` when there
    /// is nothing to do. A job whose lease has lapsed counts as due.
    ///
    /// At most one caller gets a job until its lease ends. A worker that overstays finds its
    /// later writes refused with [`LedgerError::LeaseLost`].
    ///
    /// # Errors
    /// [`LedgerError::Unusable`] as [`Ledger::identity`].
    async fn claim(&self, offer: Offer) -> Result<Option<Claim>, LedgerError>;

    /// Notes on jobs that they wait for a worker that has their encoder: those that have been due for
    /// `patience` and have none of `encoders`, at most `limit`. Gives those that were not noted yet.
    async fn pass_over(
        &self,
        encoders: &[String],
        patience: Duration,
        limit: u32,
    ) -> Result<Vec<JobId>, LedgerError>;

    /// Renews the lease of a claim.
    ///
    /// # Errors
    /// [`LedgerError::LeaseLost`] if the claim is no longer current: stop now.
    async fn renew(&self, job: JobId, claim: ClaimId, lease: Duration) -> Result<(), LedgerError>;

    /// What the job's user may see.
    async fn windows(&self, job: JobId) -> Result<Windows, LedgerError>;

    /// The recorded parts of a job, in order.
    async fn parts(&self, job: JobId) -> Result<Vec<Part>, LedgerError>;

    /// Records a part whose bytes are written and safe, under the claim that wrote them. A
    /// part that is recorded already must have the same digest; only where its bytes are kept
    /// is changed then.
    ///
    /// # Errors
    /// [`LedgerError::LeaseLost`], [`LedgerError::OtherDigest`].
    async fn part_done(&self, job: JobId, part: Part) -> Result<(), LedgerError>;

    /// Lets `event` happen to a job that is held under `claim`.
    ///
    /// # Errors
    /// [`LedgerError::LeaseLost`] if the claim is no longer current.
    async fn settle(&self, job: JobId, claim: ClaimId, event: Event)
    -> Result<Export, LedgerError>;

    /// Lets `event` happen to a job, on behalf of its owner or an admin.
    ///
    /// # Errors
    /// [`LedgerError::NotFound`], [`LedgerError::Refused`].
    async fn decide(&self, job: JobId, event: Event) -> Result<(Export, Change), LedgerError>;

    /// Notes that an upload of the job's artefact was begun, under the claim that did.
    ///
    /// # Errors
    /// [`LedgerError::LeaseLost`] if the claim is no longer current; nothing is noted then.
    async fn upload_begun(&self, job: JobId, claim: ClaimId, id: &str) -> Result<(), LedgerError>;

    /// Uploads (of one job, or of all) whose claim is no longer current and which did not become
    /// the artefact, in the order of their ids, from behind the one at `after`, at most `limit`.
    async fn abandoned_uploads(
        &self,
        job: Option<JobId>,
        after: Option<AbandonedUpload>,
        limit: u32,
    ) -> Result<Vec<AbandonedUpload>, LedgerError>;

    /// Forgets an upload that was given up.
    async fn upload_ended(&self, job: JobId, id: &str) -> Result<(), LedgerError>;

    /// Settles that jobs have expired, at most `limit`, and gives them: those whose retention has
    /// passed for [`LAST_DOWNLOADS`](crate::export::LAST_DOWNLOADS), so that nobody reads their
    /// bytes any more.
    async fn expire(&self, limit: u32) -> Result<Vec<JobId>, LedgerError>;

    /// Jobs whose bytes are to be deleted and are not yet, with since when, in the order of their ids,
    /// from behind `after`, at most `limit`.
    async fn purges(
        &self,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<(JobId, Time)>, LedgerError>;

    /// Notes that the bytes of a job are deleted, and that nobody writes any more.
    async fn purged(&self, job: JobId) -> Result<(), LedgerError>;

    /// Deletes the records of jobs that were created longer than `record` ago and have expired or
    /// were revoked, at most `limit`; gives how many.
    async fn forget(&self, record: Duration, limit: u32) -> Result<u64, LedgerError>;

    /// How many jobs are not over.
    async fn queue(&self) -> Result<Queue, LedgerError>;

    /// What tells this ledger from others. Whoever deletes what the ledger does not name asks for
    /// it first.
    ///
    /// # Errors
    /// [`LedgerError::Unusable`] where the ledger is told to be a copy (of a PostgreSQL database) that
    /// was not adopted: whose the store of artefacts and the pins are is not known then. A copy of
    /// an SQLite file is like the original and is not noticed.
    async fn identity(&self) -> Result<String, LedgerError>;

    /// Stores a token by its digest; gives when it expires.
    async fn add_token(&self, token: NewToken) -> Result<Option<Time>, LedgerError>;

    /// The token with this digest, if it is neither revoked nor expired.
    async fn find_token(&self, sha256: [u8; 32]) -> Result<Option<Token>, LedgerError>;

    /// Counts downloads that have begun.
    async fn note_downloads(&self, downloads: Vec<Download>) -> Result<(), LedgerError>;
}

/// A job to be created.
#[derive(Clone, Debug)]
pub struct NewExport {
    pub job_id: JobId,
    pub user: UserId,
    pub key: IdempotencyKey,
    pub request: Request,
    pub recipe: Recipe,
}

impl NewExport {
    /// The job as it is when it is created at `now`, with what its user sees in `snapshot`.
    pub fn queued(&self, snapshot: Snapshot, windows: &Windows, now: Time) -> Export {
        Export {
            job_id: self.job_id,
            user: self.user.clone(),
            scope: self.request.scope.clone(),
            recipe: self.recipe.clone(),
            snapshot,
            created_at: now,
            messages_total: windows.messages(),
            state: State::Queued,
            started_at: None,
            finished_at: None,
            expires_at: None,
            attempts: 0,
            strikes: 0,
            due_at: now,
            lease: None,
            artefact: None,
            problem: None,
            waiting: None,
            revocation: None,
            purging: false,
        }
    }
}

/// What asking for an export came to.
#[derive(Clone, Debug)]
pub enum Created {
    New(Export),
    /// The job was there already; nothing was changed.
    Replayed(Export),
}

/// Why no export was created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error("the key was used for another request")]
    KeyReused,
    #[error("there is no such conversation for this user")]
    ScopeInvalid,
    #[error("a limit is reached")]
    Limit(LimitReached),
    #[error("a first load of the log is not finished")]
    SourceLoading,
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl From<TakeError> for CreateError {
    fn from(error: TakeError) -> CreateError {
        match error {
            TakeError::ScopeInvalid => CreateError::ScopeInvalid,
            TakeError::Loading => CreateError::SourceLoading,
            TakeError::Source(error) => error.into(),
        }
    }
}

impl From<SourceError> for CreateError {
    fn from(error: SourceError) -> CreateError {
        CreateError::Ledger(match error {
            SourceError::Refused(why) => LedgerError::Unusable(why),
            other => LedgerError::Unavailable(other.to_string()),
        })
    }
}

/// A job with what is counted beside it.
#[derive(Clone, Debug)]
pub struct Found {
    pub export: Export,
    pub parts_done: u64,
    pub messages_done: u64,
    pub downloads: Downloads,
}

/// How often and from how many sources an artefact was fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Serialize)]
pub struct Downloads {
    pub count: u64,
    pub sources: u64,
    pub last_at: Option<Time>,
}

/// A place in a list of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    pub created_at: Time,
    pub job_id: JobId,
}

/// Which jobs an operator looks for; what is `None` lets all through.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub user: Option<UserId>,
    /// The state as [`Export::state_at`] gives it.
    pub state: Option<State>,
}

/// What a worker that asks for work can do.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The encoders it has; a job with another one is left alone.
    pub encoders: Vec<String>,
    pub lease: Duration,
    pub terms: Terms,
    /// How many jobs of one user may run at the same time; 0 means no limit.
    pub running_per_user: u64,
}

/// A job that a worker holds.
#[derive(Clone, Debug)]
pub struct Claim {
    pub id: ClaimId,
    pub export: Export,
}

/// A part of an artefact that is written and safe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// From 0.
    pub number: u64,
    /// Under which claim its bytes were written.
    pub claim: ClaimId,
    /// Conversation and seq of its first message.
    pub first: (String, u64),
    /// Conversation and seq of its last message.
    pub last: (String, u64),
    pub messages: u64,
    pub raw_bytes: u64,
    pub crc32: u32,
    /// Length and digest of what is stored: the segment and its seal.
    pub bytes: u64,
    pub sha256: [u8; 32],
}

/// The jobs that are not over.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Queue {
    /// For a worker; those that wait are among them.
    pub queued: u64,
    pub running: u64,
    /// How many cannot go on for now, by the kind of problem that is to pass.
    pub waiting: BTreeMap<String, u64>,
    /// When the oldest queued one was created.
    pub oldest: Option<Time>,
}

impl Queue {
    /// Adds `number` jobs in one state that wait for the same `kind` of problem to pass, or for
    /// none, which is empty.
    fn add(&mut self, queued: bool, kind: String, number: u64, oldest: Time) {
        if !queued {
            self.running += number;
            return;
        }
        self.queued += number;
        if !kind.is_empty() {
            self.waiting.insert(kind, number);
        }
        self.oldest = Some(self.oldest.map_or(oldest, |before| before.min(oldest)));
    }
}

/// An upload that nobody will finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbandonedUpload {
    pub job_id: JobId,
    pub claim: ClaimId,
    pub id: String,
}

/// What a token lets its bearer do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Own exports.
    User,
    /// Write to the log.
    Writer,
    /// The admin API.
    Admin,
}

impl Role {
    pub const fn as_str(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Writer => "writer",
            Role::Admin => "admin",
        }
    }

    pub fn parse(text: &str) -> Option<Role> {
        [Role::User, Role::Writer, Role::Admin]
            .into_iter()
            .find(|role| role.as_str() == text)
    }
}

/// A token as it is stored: never itself, only its digest.
#[derive(Clone, Debug)]
pub struct NewToken {
    pub sha256: [u8; 32],
    pub token_id: String,
    pub user: UserId,
    pub role: Role,
    pub ttl: Option<Duration>,
}

/// Whom a token stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub token_id: String,
    pub user: UserId,
    pub role: Role,
}

/// A download that has begun.
#[derive(Clone, Debug)]
pub struct Download {
    pub job_id: JobId,
    pub source: String,
}

/// Why the ledger did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Another claim is current, or the job is no longer running: what was asked counts no more.
    #[error("the lease was lost")]
    LeaseLost,
    /// The part is recorded with another digest.
    #[error("part {part} was recorded with another digest")]
    OtherDigest { part: u64 },
    #[error("there is no such export")]
    NotFound,
    #[error("this cannot be done to an export that is {}", .0.as_str())]
    Refused(State),
    /// The database does not answer; it may later.
    #[error("{0}")]
    Unavailable(String),
    /// The database answers, but nothing may be created in it as it is; the sentence says what
    /// to do.
    #[error("{0}")]
    Unusable(String),
    /// A row holds what this version cannot read.
    #[error("the ledger holds a row that cannot be read: {0}")]
    Unreadable(String),
}

impl From<crate::sqlite::DbError> for LedgerError {
    fn from(error: crate::sqlite::DbError) -> LedgerError {
        match error.advice() {
            Some(what) => LedgerError::Unusable(what.to_owned()),
            None => LedgerError::Unavailable(error.to_string()),
        }
    }
}

impl From<rusqlite::Error> for LedgerError {
    fn from(error: rusqlite::Error) -> LedgerError {
        crate::sqlite::DbError::from(error).into()
    }
}

impl From<crate::sqlite::DbError> for CreateError {
    fn from(error: crate::sqlite::DbError) -> CreateError {
        LedgerError::from(error).into()
    }
}

impl From<rusqlite::Error> for CreateError {
    fn from(error: rusqlite::Error) -> CreateError {
        LedgerError::from(error).into()
    }
}
