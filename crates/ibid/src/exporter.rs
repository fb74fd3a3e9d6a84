//! The facade: everything that an edge (HTTP, command line) asks for goes through here.

mod databases;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;

use crate::cut::CutRule;
use crate::export::{Artefact, Change, Event, Export, Recipe, RevokedBy, State};
use crate::ids::{ClaimId, JobId, UserId};
use crate::janitor::{self, Janitor, SweepError};
use crate::key::IdempotencyKey;
use crate::ledger::{CreateError, Created, Cursor, Found, Ledger, LedgerError, NewExport};
use crate::limits::Limits;
use crate::link::{KeyRing, Link, LinkError};
use crate::postgres::Pg;
use crate::scope::Request;
use crate::segment::{self, EncoderId};
use crate::snapshot::Snapshot;
use crate::source::{Source, SourceError};
use crate::time::Time;
use crate::vault::{Asked, Key, Vault, VaultError};
use crate::work::Workshop;

pub use databases::{Database, DatabaseError, Databases};

/// The terms on which new exports are created and fetched.
#[derive(Clone, Copy, Debug)]
pub struct ExportTerms {
    pub limits: Limits,
    /// The cut rule of new jobs.
    pub cut: CutRule,
    pub link_life: Duration,
}

/// The log, the ledger and the vault, with what may be done to them.
#[derive(Clone)]
pub struct Exporter {
    pub source: Arc<dyn Source>,
    pub ledger: Arc<dyn Ledger>,
    pub vault: Vault,
    terms: ExportTerms,
    /// Log and ledger are in different databases.
    log_elsewhere: bool,
    created: Arc<Notify>,
    /// Whether downloads are left to the object store.
    offload: bool,
    /// Where other nodes announce the jobs that they create.
    postgres: Option<Pg>,
}

/// How often a download that goes on is looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The longest that an address lives at which the object store serves a download.
const OFFLOAD_LIFE: Duration = Duration::from_secs(60);

/// A download that may go ahead.
#[derive(Clone, Debug)]
pub struct Download {
    pub export: Export,
    pub artefact: Artefact,
    /// Until when it may begin: until its link ends, and the artefact's retention.
    pub until: Time,
}

/// Why a download is refused, in the order in which it is checked.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error("the link is not valid")]
    LinkInvalid,
    #[error("the link has expired")]
    LinkExpired,
    #[error("the account is disabled")]
    AccountDisabled,
    #[error("the export was revoked")]
    Revoked(RevokedBy),
    #[error("the export has expired")]
    Expired,
    #[error("the export is not ready")]
    NotReady,
    /// The store does not answer, or the bytes are missing or of another length.
    #[error("the artefact is not available: {0}")]
    ArtefactUnavailable(String),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl Exporter {
    /// An installation whose log and ledger are in `databases` and whose artefacts are in `vault`.
    pub fn on(databases: Databases, vault: Vault, terms: ExportTerms) -> Exporter {
        let Databases {
            source,
            ledger,
            log_elsewhere,
            postgres,
        } = databases;
        Exporter {
            log_elsewhere,
            postgres,
            ..Exporter::new(source, ledger, vault, terms)
        }
    }

    /// An installation whose log, ledger and vault are where the caller opened them, the first
    /// two in the same database.
    pub fn new(
        source: Arc<dyn Source>,
        ledger: Arc<dyn Ledger>,
        vault: Vault,
        terms: ExportTerms,
    ) -> Exporter {
        Exporter {
            source,
            ledger,
            vault,
            terms,
            log_elsewhere: false,
            created: Arc::default(),
            offload: false,
            postgres: None,
        }
    }

    /// As [`Exporter::new`], with log and ledger in different databases.
    pub fn apart(
        source: Arc<dyn Source>,
        ledger: Arc<dyn Ledger>,
        vault: Vault,
        terms: ExportTerms,
    ) -> Exporter {
        Exporter {
            log_elsewhere: true,
            ..Exporter::new(source, ledger, vault, terms)
        }
    }

    /// The same, which leaves downloads to the object store once it has checked them, if
    /// `offload`: see [`Exporter::offload`].
    #[must_use]
    pub fn offloading(self, offload: bool) -> Exporter {
        Exporter { offload, ..self }
    }

    pub fn terms(&self) -> &ExportTerms {
        &self.terms
    }

    /// Lets workers of this process know of jobs that other nodes create, for as long as it is
    /// awaited; where nobody announces any, it only waits.
    pub async fn hear_of_jobs(&self) {
        match &self.postgres {
            Some(pg) => pg.listen(&self.created).await,
            None => std::future::pending().await,
        }
    }

    /// Told whenever this exporter creates a job; workers in the same process wait on it.
    pub fn created(&self) -> Arc<Notify> {
        Arc::clone(&self.created)
    }

    /// Who sweeps; records of jobs are kept for `record`.
    pub fn janitor(&self, record: Duration) -> Janitor {
        Janitor {
            ledger: Arc::clone(&self.ledger),
            source: Arc::clone(&self.source),
            vault: self.vault.clone(),
            record,
        }
    }

    /// Where workers do their work.
    pub fn workshop(&self, render_threads: usize, hold_after_parts: Option<u64>) -> Workshop {
        Workshop {
            source: Arc::clone(&self.source),
            ledger: Arc::clone(&self.ledger),
            vault: self.vault.clone(),
            render_threads,
            hold_after_parts,
            benches: Arc::default(),
        }
    }

    /// Whether the databases and the store answer.
    ///
    /// # Errors
    /// Which of them does not, and why.
    pub async fn ready(&self) -> Result<(), String> {
        let nobody = JobId::from_bytes([0; 16]);
        let ledger = self.ledger.find(nobody).await;
        ledger.map_err(|error| format!("the ledger: {error}"))?;
        if self.log_elsewhere {
            let log = self.source.pinned(nobody, &Snapshot::up_to(0)).await;
            log.map_err(|error| format!("the log: {error}"))?;
        }
        let nothing = Key::Artefact {
            job: nobody,
            claim: ClaimId::from_bytes([0; 16]),
        };
        match self.vault.length(nothing).await {
            Ok(_) | Err(VaultError::Missing) => Ok(()),
            Err(error) => Err(format!("the store of artefacts: {error}")),
        }
    }

    /// Asks for an export. The same user, key and request give the same job, however often and
    /// however concurrently they come.
    ///
    /// # Errors
    /// See [`CreateError`]; a refused request does not use up its key.
    pub async fn request(
        &self,
        user: UserId,
        key: IdempotencyKey,
        request: Request,
    ) -> Result<Created, CreateError> {
        let job_id = JobId::random().map_err(|e| {
            LedgerError::Unavailable(format!("the system gives no random numbers: {e}"))
        })?;
        let recipe = Recipe {
            format: request.format,
            format_version: segment::FORMAT_VERSION,
            encoder: EncoderId::of_new_jobs().as_str().to_owned(),
            cut: self.terms.cut,
        };
        let new = NewExport {
            job_id,
            user,
            key,
            request,
            recipe,
        };
        let created = if self.log_elsewhere {
            self.create_apart(new).await?
        } else {
            self.ledger.create(new, self.terms.limits, None).await?
        };
        if matches!(created, Created::New(_)) {
            self.created.notify_one();
        }
        Ok(created)
    }

    /// Creates a job whose log lies in another database: what the user sees is taken and pinned
    /// there first, so that there is never a job without its pin.
    async fn create_apart(&self, new: NewExport) -> Result<Created, CreateError> {
        if let Some(export) = self.ledger.replay(&new).await? {
            return Ok(Created::Replayed(export));
        }
        let job = new.job_id;
        let ledger = self.ledger.identity().await?;
        let scope = &new.request.scope;
        let taken = self.source.take(job, &ledger, &new.user, scope).await?;
        let created = self
            .ledger
            .create(new, self.terms.limits, Some(taken))
            .await;
        let of_no_job = match &created {
            Ok(Created::New(_)) => false,
            // Whether the job is there now is not known.
            Err(CreateError::Ledger(_)) => false,
            Ok(Created::Replayed(_)) | Err(_) => true,
        };
        if of_no_job {
            self.unpin(job).await;
        }
        created
    }

    async fn unpin(&self, job: JobId) {
        let unpinning = async {
            // The pin is the original's if this ledger is a copy.
            self.ledger.identity().await?;
            Ok::<_, SweepError>(self.source.unpin(job).await?)
        };
        if let Err(error) = unpinning.await {
            tracing::warn!(%job, %error, "the job's pin in the log could not be taken away yet");
        }
    }

    /// The job with this id if it is `user`'s.
    pub async fn find(&self, user: &UserId, job: JobId) -> Result<Option<Found>, LedgerError> {
        let found = self.ledger.find(job).await?;
        Ok(found.filter(|found| found.export.user == *user))
    }

    /// A user's jobs, newest first.
    pub async fn list(
        &self,
        user: &UserId,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError> {
        self.ledger.list(user, before, limit).await
    }

    /// Takes an export back on behalf of an admin; its bytes stay until the retention ends.
    pub async fn revoke(&self, job: JobId, reason: String) -> Result<Export, LedgerError> {
        let event = Event::Revoked {
            by: RevokedBy::Admin,
            reason,
        };
        self.take_back(job, event).await
    }

    /// Takes an export of `user` back in any state: work on it stops and its bytes are deleted.
    /// `None` if there is no such export of this user.
    pub async fn withdraw(&self, user: &UserId, job: JobId) -> Result<Option<Export>, LedgerError> {
        if self.find(user, job).await?.is_none() {
            return Ok(None);
        }
        let event = Event::Revoked {
            by: RevokedBy::Owner,
            reason: "withdrawn by its owner".to_owned(),
        };
        self.take_back(job, event).await.map(Some)
    }

    async fn take_back(&self, job: JobId, event: Event) -> Result<Export, LedgerError> {
        let (export, _) = self.ledger.decide(job, event).await?;
        if self.log_elsewhere && !export.needs_log() {
            self.unpin(job).await;
        }
        // What cannot be deleted now is deleted by the next sweep, and so is what a worker writes
        // that has not heard of it yet.
        if let Err(error) = janitor::tidy(self.ledger.as_ref(), &self.vault, job).await {
            tracing::warn!(%job, %error, "the bytes could not be deleted yet");
        }
        Ok(export)
    }

    /// Takes an admin's revocation back, if the bytes are still there.
    pub async fn restore(&self, job: JobId) -> Result<Export, LedgerError> {
        let export = self.ledger.find(job).await?;
        let export = export.ok_or(LedgerError::NotFound)?.export;
        if let Some(artefact) = &export.artefact {
            match self.vault.length(artefact_key(&export, artefact)).await {
                Ok(length) if length == artefact.bytes => {}
                Ok(_) | Err(VaultError::Missing) => {
                    return Err(LedgerError::Refused(export.state));
                }
                Err(error) => return Err(LedgerError::Unavailable(error.to_string())),
            }
        }
        let (export, change) = self.ledger.decide(job, Event::Restored).await?;
        debug_assert_eq!(change, Change::Changed);
        Ok(export)
    }

    /// Lets an export be made again: one that failed, from what is recorded; one that is done if
    /// its bytes are lost or damaged, and then only the same file is accepted.
    ///
    /// # Errors
    /// [`LedgerError::Refused`] if it is in another state, or done and its bytes are whole.
    pub async fn retry(&self, job: JobId) -> Result<Export, LedgerError> {
        let export = self.ledger.find(job).await?;
        let export = export.ok_or(LedgerError::NotFound)?.export;
        if let (State::Done, Some(artefact)) = (export.state, &export.artefact)
            && self.is_whole(&export, artefact).await?
        {
            return Err(LedgerError::Refused(State::Done));
        }
        let (export, _) = self.ledger.decide(job, Event::Retried).await?;
        self.created.notify_one();
        Ok(export)
    }

    /// Whether the bytes of an artefact are there and are what was recorded.
    async fn is_whole(&self, export: &Export, artefact: &Artefact) -> Result<bool, LedgerError> {
        let key = artefact_key(export, artefact);
        let unavailable = |error: VaultError| LedgerError::Unavailable(error.to_string());
        match self.vault.length(key).await {
            Ok(length) if length == artefact.bytes => {}
            Ok(_) | Err(VaultError::Missing) => return Ok(false),
            Err(error) => return Err(unavailable(error)),
        }
        let mut hash = Sha256::new();
        let mut bytes = match self.vault.read(key, 0..artefact.bytes).await {
            Ok(bytes) => bytes,
            Err(VaultError::Missing) => return Ok(false),
            Err(error) => return Err(unavailable(error)),
        };
        while let Some(chunk) = bytes.try_next().await.map_err(unavailable)? {
            hash.update(&chunk);
        }
        Ok(hash.finalize()[..] == artefact.sha256)
    }

    /// A fresh link to the artefact of `export` for its own user: the query, and until when.
    pub fn link(&self, ring: &KeyRing, export: &Export, now: Time) -> (String, Time) {
        let exp = now.plus(self.terms.link_life).seconds();
        let link = Link {
            job: export.job_id,
            user: export.user.clone(),
            exp,
        };
        (ring.sign(&link), Time::from_seconds(exp))
    }

    /// Checks a download, in the order that is promised to clients.
    ///
    /// # Errors
    /// The first check that fails.
    pub async fn download(
        &self,
        ring: &KeyRing,
        job: JobId,
        query: &str,
    ) -> Result<Download, DownloadError> {
        let now = self.ledger.now().await?;
        let link = ring.verify(job, query, now).map_err(|error| match error {
            LinkError::Invalid => DownloadError::LinkInvalid,
            LinkError::Expired => DownloadError::LinkExpired,
        })?;
        // A signature does not stand in for authorisation: all that follows is asked anew.
        let found = self.find(&link.user, job).await?;
        let export = found.ok_or(DownloadError::LinkInvalid)?.export;
        if !self.source.account_enabled(&link.user).await? {
            return Err(DownloadError::AccountDisabled);
        }
        match export.state_at(now) {
            State::Revoked => {
                let by = export.revocation.as_ref().map(|revocation| revocation.by);
                return Err(DownloadError::Revoked(by.unwrap_or(RevokedBy::Admin)));
            }
            State::Expired => return Err(DownloadError::Expired),
            State::Queued | State::Running | State::Failed => return Err(DownloadError::NotReady),
            State::Done => {}
        }
        let Some(artefact) = export.artefact.clone() else {
            return Err(DownloadError::NotReady);
        };
        match self.vault.length(artefact_key(&export, &artefact)).await {
            Ok(length) if length == artefact.bytes => {
                self.note_sound(&export, &artefact).await;
                let exp = Time::from_seconds(link.exp);
                let until = export.expires_at.map_or(exp, |at| at.min(exp));
                Ok(Download {
                    export,
                    artefact,
                    until,
                })
            }
            Ok(length) => {
                self.note_damage(&export, &artefact).await;
                Err(DownloadError::ArtefactUnavailable(format!(
                    "it is {length} bytes long instead of {}",
                    artefact.bytes
                )))
            }
            Err(error) => {
                if matches!(error, VaultError::Missing) {
                    self.note_damage(&export, &artefact).await;
                }
                Err(DownloadError::ArtefactUnavailable(error.to_string()))
            }
        }
    }

    /// Flags an export whose bytes are not as they should be, for its owner and for operators.
    async fn note_damage(&self, export: &Export, artefact: &Artefact) {
        let job = export.job_id;
        tracing::error!(%job, "an artefact is damaged; `ibid admin retry` makes it again");
        if export.waiting.is_none() {
            let artefact = artefact.claim;
            let noted = self.ledger.decide(job, Event::Damaged { artefact }).await;
            if let Err(error) = noted {
                tracing::warn!(%job, %error, "the damage could not be noted");
            }
        }
    }

    /// Takes the flag away: somebody has put the bytes back.
    async fn note_sound(&self, export: &Export, artefact: &Artefact) {
        if export.waiting.is_some() {
            let (job, artefact) = (export.job_id, artefact.claim);
            let noted = self.ledger.decide(job, Event::Sound { artefact }).await;
            if let Err(error) = noted {
                tracing::warn!(%job, %error, "that the artefact is sound could not be noted");
            }
        }
    }

    /// The address at which the object store itself serves a download that may go ahead, to
    /// whoever has it: a secret, which lives for a minute at most and ends with the link and with
    /// the retention. What the store answers is not checked again. `None` if this installation
    /// serves its downloads itself, or there is less than a second left.
    ///
    /// # Errors
    /// No address can be signed now, or the ledger does not answer.
    pub async fn offload(
        &self,
        download: &Download,
        asked: Asked,
    ) -> Result<Option<String>, DownloadError> {
        if !self.offload {
            return Ok(None);
        }
        // Asked anew, since the store may have taken its time to answer meanwhile. Whole seconds
        // are what can be signed; half a one more would outlive the link.
        let left = self.ledger.now().await?.until(download.until).as_secs();
        if left == 0 {
            return Ok(None);
        }
        let life = OFFLOAD_LIFE.min(Duration::from_secs(left));
        let key = artefact_key(&download.export, &download.artefact);
        let signed = self.vault.presign(key, asked, life).await;
        signed.map_err(|error| DownloadError::ArtefactUnavailable(error.to_string()))
    }

    /// The bytes of `range` of an artefact; ends with an error if they cannot be read, or once
    /// the download may no longer go on.
    pub async fn read(
        &self,
        download: &Download,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, VaultError>>, VaultError> {
        let key = artefact_key(&download.export, &download.artefact);
        let bytes = self.vault.read(key, range).await?;
        let (exporter, download) = (self.clone(), download.clone());
        let watched = futures::stream::try_unfold(
            (bytes, tokio::time::Instant::now()),
            move |(mut bytes, mut looked)| {
                let (exporter, download) = (exporter.clone(), download.clone());
                async move {
                    if looked.elapsed() >= LOOK_AGAIN {
                        looked = tokio::time::Instant::now();
                        exporter.may_go_on(&download.export).await?;
                    }
                    match bytes.try_next().await {
                        Ok(next) => Ok(next.map(|chunk| (chunk, (bytes, looked)))),
                        Err(error) => {
                            exporter.look_after(&download).await;
                            Err(error)
                        }
                    }
                }
            },
        );
        Ok(watched.boxed())
    }

    /// Looks, after a read that failed, whether that was the artefact's fault.
    async fn look_after(&self, download: &Download) {
        let Download {
            export, artefact, ..
        } = download;
        let found = self.vault.length(artefact_key(export, artefact)).await;
        let is_damaged = match found {
            // It is all there, so it was the network's fault; a disk has none.
            Ok(length) if length == artefact.bytes => self.vault.is_folder(),
            Ok(_) | Err(VaultError::Missing) => true,
            Err(_) => false,
        };
        if is_damaged {
            self.note_damage(export, artefact).await;
        }
    }

    /// Whether a download that has begun may go on: its link may end meanwhile, and so may the
    /// retention (for [`LAST_DOWNLOADS`](crate::export::LAST_DOWNLOADS)), but not its user's right
    /// to it. A database that does not answer now has
    /// answered before, and is asked again.
    async fn may_go_on(&self, export: &Export) -> Result<(), VaultError> {
        let gone = |what: &str| Err(VaultError::Unavailable(what.to_owned()));
        match self.ledger.find(export.job_id).await {
            Ok(Some(found)) if found.export.state == State::Revoked => {
                return gone("the export was revoked");
            }
            // Not from when its retention ends, but from when its bytes are to go.
            Ok(Some(found)) if found.export.state == State::Expired => {
                return gone("the export has expired");
            }
            Ok(None) => return gone("the export is gone"),
            Ok(Some(_)) | Err(_) => {}
        }
        match self.source.account_enabled(&export.user).await {
            Ok(false) => gone("the account was disabled"),
            Ok(true) | Err(_) => Ok(()),
        }
    }
}

fn artefact_key(export: &Export, artefact: &Artefact) -> Key {
    Key::Artefact {
        job: export.job_id,
        claim: artefact.claim,
    }
}
