//! The real log and the real ledger, which stop answering where a test says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use ibid::append::{Names, Outcome};
use ibid::export::{Change, Event, Export};
use ibid::ids::{ClaimId, ConvId, JobId, UserId};
use ibid::ledger::{
    AbandonedUpload, Claim, CreateError, Created, Cursor, Download, Filter, Found, Ledger,
    LedgerError, NewExport, NewToken, Offer, Part, Queue, Token,
};
use ibid::limits::Limits;
use ibid::scope::Scope;
use ibid::snapshot::Snapshot;
use ibid::source::{Batch, Imported, Page, Place, Sight, Source, SourceError, TakeError, Windows};
use ibid::time::Time;
use tokio::sync::Notify;

/// What a call comes to.
#[derive(Clone, Debug)]
pub enum Then {
    Answer,
    /// As a database that is gone for a moment.
    Fail,
    /// As in a process that is killed there.
    Hang,
    /// As a log that somebody has changed.
    GoneBad,
    /// It is done, and the answer is lost; only of ends of attempts.
    Unanswered,
    /// An answer, once somebody has said that it may come.
    Wait(Arc<Notify>),
}

type Decide<T> = Box<dyn Fn(T) -> Then + Send + Sync>;

async fn act(then: Then) -> Result<(), String> {
    match then {
        Then::Answer | Then::Unanswered => Ok(()),
        Then::Fail | Then::GoneBad => Err("gone for a moment".to_owned()),
        Then::Hang => std::future::pending().await,
        Then::Wait(until) => {
            until.notified().await;
            Ok(())
        }
    }
}

/// A log that is asked, before each batch and each page, what is to come of it; both are counted
/// from 1.
pub struct InterruptedSource {
    source: Arc<dyn Source>,
    batches: AtomicUsize,
    at_batch: Decide<usize>,
    pages: AtomicUsize,
    at_page: Decide<usize>,
}

impl InterruptedSource {
    pub fn at_batch(
        source: &Arc<dyn Source>,
        at_batch: impl Fn(usize) -> Then + Send + Sync + 'static,
    ) -> InterruptedSource {
        InterruptedSource {
            source: Arc::clone(source),
            batches: AtomicUsize::new(0),
            at_batch: Box::new(at_batch),
            pages: AtomicUsize::new(0),
            at_page: Box::new(|_| Then::Answer),
        }
    }

    pub fn at_page(
        source: &Arc<dyn Source>,
        at_page: impl Fn(usize) -> Then + Send + Sync + 'static,
    ) -> InterruptedSource {
        InterruptedSource {
            at_page: Box::new(at_page),
            ..InterruptedSource::at_batch(source, |_| Then::Answer)
        }
    }
}

#[async_trait]
impl Source for InterruptedSource {
    async fn append(&self, batch: Batch) -> Result<Vec<Outcome>, SourceError> {
        let number = self.batches.fetch_add(1, Ordering::SeqCst) + 1;
        let then = act((self.at_batch)(number)).await;
        then.map_err(SourceError::Unavailable)?;
        self.source.append(batch).await
    }

    async fn learn(
        &self,
        names: Names,
        convs: Vec<ConvId>,
        ids: Vec<String>,
    ) -> Result<Names, SourceError> {
        self.source.learn(names, convs, ids).await
    }

    async fn imported(&self, digest: [u8; 32]) -> Result<Option<Imported>, SourceError> {
        self.source.imported(digest).await
    }

    async fn end_load(&self) -> Result<(), SourceError> {
        self.source.end_load().await
    }

    async fn take(
        &self,
        job: JobId,
        ledger: &str,
        user: &UserId,
        scope: &Scope,
    ) -> Result<Sight, TakeError> {
        self.source.take(job, ledger, user, scope).await
    }

    async fn pinned(&self, job: JobId, snapshot: &Snapshot) -> Result<bool, SourceError> {
        self.source.pinned(job, snapshot).await
    }

    async fn pins(
        &self,
        ledger: &str,
        age: Duration,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<JobId>, SourceError> {
        self.source.pins(ledger, age, after, limit).await
    }

    async fn unpin(&self, job: JobId) -> Result<(), SourceError> {
        self.source.unpin(job).await
    }

    async fn page(
        &self,
        snapshot: &Snapshot,
        windows: &Arc<Windows>,
        place: Place,
        page: Page,
    ) -> Result<Page, SourceError> {
        let number = self.pages.fetch_add(1, Ordering::SeqCst) + 1;
        let then = (self.at_page)(number);
        if matches!(then, Then::GoneBad) {
            return Err(SourceError::LogChanged("for a moment".to_owned()));
        }
        act(then).await.map_err(SourceError::Unavailable)?;
        self.source.page(snapshot, windows, place, page).await
    }

    async fn account_enabled(&self, user: &UserId) -> Result<bool, SourceError> {
        self.source.account_enabled(user).await
    }

    async fn set_account(&self, user: &UserId, enabled: bool) -> Result<(), SourceError> {
        self.source.set_account(user, enabled).await
    }
}

/// What somebody tells the ledger, or asks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A job was created; whoever asked for it is to be told.
    Created,
    /// Asks which parts are recorded: before it renders, and before it assembles.
    Parts,
    /// Records a part whose bytes are written.
    PartDone,
    /// Notes an upload that was begun.
    UploadBegun,
    /// Asks to keep its lease.
    Renew,
    /// Says how the attempt ended; the artefact is written if it ended well.
    Settle,
}

/// A ledger that is asked, before each step, what is to come of it.
pub struct InterruptedLedger {
    ledger: Arc<dyn Ledger>,
    at: Decide<Step>,
}

impl InterruptedLedger {
    pub fn at(
        ledger: &Arc<dyn Ledger>,
        at: impl Fn(Step) -> Then + Send + Sync + 'static,
    ) -> Arc<InterruptedLedger> {
        Arc::new(InterruptedLedger {
            ledger: Arc::clone(ledger),
            at: Box::new(at),
        })
    }

    async fn step(&self, step: Step) -> Result<(), LedgerError> {
        let then = act((self.at)(step)).await;
        then.map_err(LedgerError::Unavailable)
    }
}

#[async_trait]
impl Ledger for InterruptedLedger {
    async fn now(&self) -> Result<Time, LedgerError> {
        self.ledger.now().await
    }

    async fn replay(&self, new: &NewExport) -> Result<Option<Export>, CreateError> {
        self.ledger.replay(new).await
    }

    async fn create(
        &self,
        new: NewExport,
        limits: Limits,
        taken: Option<Sight>,
    ) -> Result<Created, CreateError> {
        let created = self.ledger.create(new, limits, taken).await?;
        self.step(Step::Created).await?;
        Ok(created)
    }

    async fn find(&self, job: JobId) -> Result<Option<Found>, LedgerError> {
        self.ledger.find(job).await
    }

    async fn list(
        &self,
        user: &UserId,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError> {
        self.ledger.list(user, before, limit).await
    }

    async fn search(
        &self,
        filter: Filter,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError> {
        self.ledger.search(filter, before, limit).await
    }

    async fn claim(&self, offer: Offer) -> Result<Option<Claim>, LedgerError> {
        self.ledger.claim(offer).await
    }

    async fn pass_over(
        &self,
        encoders: &[String],
        patience: Duration,
        limit: u32,
    ) -> Result<Vec<JobId>, LedgerError> {
        self.ledger.pass_over(encoders, patience, limit).await
    }

    async fn renew(&self, job: JobId, claim: ClaimId, lease: Duration) -> Result<(), LedgerError> {
        self.step(Step::Renew).await?;
        self.ledger.renew(job, claim, lease).await
    }

    async fn windows(&self, job: JobId) -> Result<Windows, LedgerError> {
        self.ledger.windows(job).await
    }

    async fn parts(&self, job: JobId) -> Result<Vec<Part>, LedgerError> {
        self.step(Step::Parts).await?;
        self.ledger.parts(job).await
    }

    async fn part_done(&self, job: JobId, part: Part) -> Result<(), LedgerError> {
        self.step(Step::PartDone).await?;
        self.ledger.part_done(job, part).await
    }

    async fn settle(
        &self,
        job: JobId,
        claim: ClaimId,
        event: Event,
    ) -> Result<Export, LedgerError> {
        let then = (self.at)(Step::Settle);
        let is_lost = matches!(then, Then::Unanswered);
        act(then).await.map_err(LedgerError::Unavailable)?;
        let settled = self.ledger.settle(job, claim, event).await?;
        if is_lost {
            return Err(LedgerError::Unavailable("no answer came".to_owned()));
        }
        Ok(settled)
    }

    async fn decide(&self, job: JobId, event: Event) -> Result<(Export, Change), LedgerError> {
        self.ledger.decide(job, event).await
    }

    async fn upload_begun(&self, job: JobId, claim: ClaimId, id: &str) -> Result<(), LedgerError> {
        self.step(Step::UploadBegun).await?;
        self.ledger.upload_begun(job, claim, id).await
    }

    async fn abandoned_uploads(
        &self,
        job: Option<JobId>,
        after: Option<AbandonedUpload>,
        limit: u32,
    ) -> Result<Vec<AbandonedUpload>, LedgerError> {
        self.ledger.abandoned_uploads(job, after, limit).await
    }

    async fn upload_ended(&self, job: JobId, id: &str) -> Result<(), LedgerError> {
        self.ledger.upload_ended(job, id).await
    }

    async fn expire(&self, limit: u32) -> Result<Vec<JobId>, LedgerError> {
        self.ledger.expire(limit).await
    }

    async fn purges(
        &self,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<(JobId, Time)>, LedgerError> {
        self.ledger.purges(after, limit).await
    }

    async fn purged(&self, job: JobId) -> Result<(), LedgerError> {
        self.ledger.purged(job).await
    }

    async fn forget(&self, record: Duration, limit: u32) -> Result<u64, LedgerError> {
        self.ledger.forget(record, limit).await
    }

    async fn queue(&self) -> Result<Queue, LedgerError> {
        self.ledger.queue().await
    }

    async fn identity(&self) -> Result<String, LedgerError> {
        self.ledger.identity().await
    }

    async fn add_token(&self, token: NewToken) -> Result<Option<Time>, LedgerError> {
        self.ledger.add_token(token).await
    }

    async fn find_token(&self, sha256: [u8; 32]) -> Result<Option<Token>, LedgerError> {
        self.ledger.find_token(sha256).await
    }

    async fn note_downloads(&self, downloads: Vec<Download>) -> Result<(), LedgerError> {
        self.ledger.note_downloads(downloads).await
    }
}
