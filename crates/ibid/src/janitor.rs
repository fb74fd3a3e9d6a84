//! What nobody else does: bytes that no row names, retention, records that are old.
//!
//! Every step may be taken by several processes at once, broken off anywhere and taken again. The
//! vault is listed first and the ledger is read then: bytes are written before the row that names
//! them, but only by an attempt that is current and keeps all that is under its claim.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::export::{Export, State};
use crate::failpoint::failpoint;
use crate::ids::JobId;
use crate::ledger::{Ledger, LedgerError, Part};
use crate::source::{Source, SourceError};
use crate::time::Time;
use crate::vault::{Key, Object, Vault, VaultError};

/// How often a process sweeps. Each waits up to half as long again, so that several spread.
const PAUSE: Duration = Duration::from_secs(20);

/// How often it sweeps everything, which lists the whole vault.
const PAUSE_OF_ALL: Duration = Duration::from_secs(3600);

/// How long after a job was taken back somebody may still write for it: a worker that has not
/// heard of it yet, or was killed before it could tidy up.
const LAST_WRITES: Duration = Duration::from_secs(600);

/// How many rows one transaction takes.
const BATCH: u32 = 100;

/// After so many failures in a row that took so long together, what failed is away as a whole, and
/// each further try would wait for it. Those that fail at once keep nobody waiting, however many.
const MOST_FAILURES: usize = 10;
const MOST_WAITED: Duration = Duration::from_secs(10);

/// How long a pin is left alone: its job may be about to be created.
const PIN_PATIENCE: Duration = Duration::from_secs(3600);

/// After so long a probe of the store is not under way any more: it was killed.
const PROBE_PATIENCE: Duration = Duration::from_secs(3600);

/// Sweeps the vault and the ledger.
#[derive(Clone)]
pub struct Janitor {
    pub ledger: Arc<dyn Ledger>,
    pub source: Arc<dyn Source>,
    pub vault: Vault,
    /// How long the record of a job is kept from its creation.
    pub record: Duration,
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Serialize)]
pub struct Swept {
    /// Jobs whose retention had passed.
    pub expired: u64,
    /// Objects that were deleted.
    pub objects: u64,
    /// Uploads that were begun and given up.
    pub uploads: u64,
    /// Records of jobs that were old.
    pub records: u64,
    /// Pins that no job needs.
    pub pins: u64,
}

impl Swept {
    fn log(self) {
        if self != Swept::default() {
            tracing::info!(
                expired = self.expired,
                objects = self.objects,
                uploads = self.uploads,
                records = self.records,
                pins = self.pins,
                "swept"
            );
        }
    }
}

/// Why a sweep did not do all that it should.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    #[error(
        "the store of artefacts belongs to another ledger ({found}; this one is {own}), so nothing \
         in it was deleted; give each installation a store of its own, or, if this ledger has \
         taken the other's place, delete the object named \"ledger\" in the store"
    )]
    ForeignVault { found: String, own: String },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Vault(#[from] VaultError),
}

/// What a sweep met and went past.
#[derive(Default)]
struct Failures {
    first: Option<SweepError>,
    in_a_row: usize,
    /// When the last step began that was none of those in a row.
    since: Option<Instant>,
}

impl Failures {
    /// Begins with things of another kind.
    fn begin(&mut self) {
        self.in_a_row = 0;
        self.since = Some(Instant::now());
    }

    /// Notes how a step has ended.
    fn pass<T>(&mut self, step: Result<T, impl Into<SweepError>>) -> Option<T> {
        match step {
            Ok(done) => {
                self.begin();
                Some(done)
            }
            Err(error) => {
                self.in_a_row += 1;
                self.first.get_or_insert_with(|| error.into());
                None
            }
        }
    }

    /// Whether so many have failed that the next of their kind would, too.
    fn are_many(&self) -> bool {
        let waited = self.since.map(|since| since.elapsed());
        self.in_a_row >= MOST_FAILURES && waited >= Some(MOST_WAITED)
    }

    fn end(self, swept: Swept) -> Result<Swept, SweepError> {
        match self.first {
            None => Ok(swept),
            Some(error) => {
                swept.log();
                Err(error)
            }
        }
    }
}

impl Janitor {
    /// Sweeps again and again until `stop`: often what the ledger knows of, seldom all.
    pub async fn run(&self, stop: &CancellationToken) {
        let mut all_at = Instant::now();
        loop {
            let mut noise = [0; 1];
            let _ = getrandom::fill(&mut noise);
            let pause = PAUSE + PAUSE / 2 * u32::from(noise[0]) / 255;
            if stop
                .run_until_cancelled(tokio::time::sleep(pause))
                .await
                .is_none()
            {
                return;
            }
            let all = all_at.elapsed() >= PAUSE_OF_ALL;
            let sweep = async {
                if all {
                    self.sweep_all().await
                } else {
                    self.sweep().await
                }
            };
            match stop.run_until_cancelled(sweep).await {
                None => return,
                Some(Ok(swept)) => swept.log(),
                Some(Err(error)) => tracing::warn!(%error, "the sweep left something"),
            }
            if all {
                // Also after a failure, which may last, and all of it is much to list.
                all_at = Instant::now();
            }
        }
    }

    /// Sweeps what the ledger knows of: retention that has passed, bytes that are to be deleted,
    /// uploads that nobody will finish.
    ///
    /// # Errors
    /// See [`SweepError`]; what was done stays done, and the next sweep goes on. What cannot be
    /// deleted is left for it, and does not keep this one from the rest.
    pub async fn sweep(&self) -> Result<Swept, SweepError> {
        let mut failures = Failures::default();
        let swept = self.sweep_known(&mut failures).await?;
        failures.end(swept)
    }

    async fn sweep_known(&self, failures: &mut Failures) -> Result<Swept, SweepError> {
        let (ledger, vault) = (self.ledger.as_ref(), &self.vault);
        // A copy that nobody has adopted names what is the original's, and takes nothing away.
        ledger.identity().await?;
        let mut swept = Swept::default();
        failures.begin();
        loop {
            let expired = ledger.expire(BATCH).await?;
            swept.expired += expired.len() as u64;
            failpoint!("sweep.expired");
            for job in &expired {
                // A pin that stays is found when all is swept.
                if !failures.are_many() {
                    failures.pass(self.source.unpin(*job).await);
                }
            }
            if expired.len() < BATCH as usize {
                break;
            }
        }
        swept.objects = self.purge(failures).await?;
        swept.uploads = give_up_uploads(ledger, vault, None, failures).await?;
        Ok(swept)
    }

    /// Deletes the bytes of all jobs that are to be purged; gives how many objects that were.
    async fn purge(&self, failures: &mut Failures) -> Result<u64, SweepError> {
        let (ledger, vault) = (self.ledger.as_ref(), &self.vault);
        failures.begin();
        let settled = ledger.now().await?.minus(LAST_WRITES);
        let mut deleted = 0;
        let mut after = None;
        loop {
            // Those that stay, because somebody may still write or they cannot be deleted, are passed
            // over by their ids, so that none of the others waits for them.
            let purges = ledger.purges(after, BATCH).await?;
            for (job, since) in &purges {
                if failures.are_many() {
                    return Ok(deleted);
                }
                let Some(objects) = failures.pass(tidy_objects(ledger, vault, *job).await) else {
                    continue;
                };
                deleted += objects;
                failpoint!("purge.tidied");
                if *since <= settled {
                    ledger.purged(*job).await?;
                    failpoint!("purge.noted");
                }
            }
            after = purges.last().map(|(job, _)| *job);
            if purges.len() < BATCH as usize {
                return Ok(deleted);
            }
        }
    }

    /// Sweeps everything, what nobody knows of too: lists the whole vault.
    ///
    /// # Errors
    /// As [`Janitor::sweep`].
    pub async fn sweep_all(&self) -> Result<Swept, SweepError> {
        let mut failures = Failures::default();
        let mut swept = self.sweep_known(&mut failures).await?;
        let own = self.ledger.identity().await?;
        let found = self.vault.owner(&own).await?;
        if found != own {
            return Err(SweepError::ForeignVault { found, own });
        }
        failures.begin();
        let before = self.ledger.now().await?.minus(PROBE_PATIENCE);
        let probes = self.vault.sweep_probes(before).await;
        swept.objects += failures.pass(probes).unwrap_or(0);
        for job in self.vault.jobs().await? {
            if failures.are_many() {
                break;
            }
            let objects = tidy_objects(self.ledger.as_ref(), &self.vault, job).await;
            swept.objects += failures.pass(objects).unwrap_or(0);
        }
        loop {
            let records = self.ledger.forget(self.record, BATCH).await?;
            swept.records += records;
            if records < u64::from(BATCH) {
                break;
            }
        }
        swept.pins = self.release_pins().await?;
        failures.end(swept)
    }

    /// Takes pins away whose job was never created, or needs the log no more.
    async fn release_pins(&self) -> Result<u64, SweepError> {
        let own = self.ledger.identity().await?;
        let mut released = 0;
        let mut after = None;
        loop {
            let pins = self.source.pins(&own, PIN_PATIENCE, after, BATCH).await?;
            for job in &pins {
                let found = self.ledger.find(*job).await?;
                if found.is_none_or(|found| !found.export.needs_log()) {
                    self.source.unpin(*job).await?;
                    released += 1;
                }
            }
            after = pins.last().copied();
            if pins.len() < BATCH as usize {
                return Ok(released);
            }
        }
    }
}

/// Deletes what is kept of `job` and named by nobody; gives how many objects that were.
///
/// # Errors
/// See [`SweepError`]; nothing is deleted where the ledger is a copy ([`Ledger::identity`]).
pub(crate) async fn tidy(
    ledger: &dyn Ledger,
    vault: &Vault,
    job: JobId,
) -> Result<u64, SweepError> {
    ledger.identity().await?;
    let mut failures = Failures::default();
    let objects = tidy_objects(ledger, vault, job).await?;
    let uploads = give_up_uploads(ledger, vault, Some(job), &mut failures).await?;
    match failures.first {
        None => Ok(objects + uploads),
        Some(error) => Err(error),
    }
}

async fn tidy_objects(ledger: &dyn Ledger, vault: &Vault, job: JobId) -> Result<u64, SweepError> {
    // In this order: see above.
    let mut objects = vault.objects(job).await?;
    failpoint!("tidy.listed");
    let export = ledger.find(job).await?.map(|found| found.export);
    let parts = match &export {
        Some(export) if !matches!(export.state, State::Done) => ledger.parts(job).await?,
        _ => Vec::new(),
    };
    let now = ledger.now().await?;
    objects.retain(|object| !is_needed(object, export.as_ref(), &parts, now));
    failpoint!("tidy.read");
    let deleted = objects.len() as u64;
    vault.delete(job, objects).await?;
    Ok(deleted)
}

/// Whether somebody may still want this object of a job.
fn is_needed(object: &Object, export: Option<&Export>, parts: &[Part], now: Time) -> bool {
    let Some(export) = export else {
        return false;
    };
    if export.is_to_be_purged(now) {
        return false;
    }
    let job = export.job_id;
    match export.state {
        State::Done | State::Revoked | State::Expired => {
            export.artefact.as_ref().is_some_and(|artefact| {
                let claim = artefact.claim;
                object.is(Key::Artefact { job, claim })
            })
        }
        State::Queued | State::Running | State::Failed => {
            let lease = export.lease.as_ref();
            lease.is_some_and(|lease| object.is_of(lease.claim))
                || parts.iter().any(|part| {
                    let (claim, number) = (part.claim, part.number);
                    object.is(Key::Part { job, claim, number })
                })
        }
    }
}

async fn give_up_uploads(
    ledger: &dyn Ledger,
    vault: &Vault,
    job: Option<JobId>,
    failures: &mut Failures,
) -> Result<u64, SweepError> {
    failures.begin();
    let mut given_up = 0;
    let mut after = None;
    loop {
        let uploads = ledger.abandoned_uploads(job, after, BATCH).await?;
        for upload in &uploads {
            if failures.are_many() {
                return Ok(given_up);
            }
            let (job, claim) = (upload.job_id, upload.claim);
            let key = Key::Artefact { job, claim };
            failpoint!("give-up.before");
            if failures
                .pass(vault.give_up(key, &upload.id).await)
                .is_some()
            {
                failpoint!("give-up.done");
                ledger.upload_ended(job, &upload.id).await?;
                failpoint!("give-up.forgotten");
                given_up += 1;
            }
        }
        if uploads.len() < BATCH as usize {
            return Ok(given_up);
        }
        after = uploads.into_iter().next_back();
    }
}
