//! One claim, from the first line to the artefact.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::export::{Artefact, Export, Problem};
use crate::failpoint::failpoint;
use crate::ids::JobId;
use crate::ledger::{Claim, Ledger, LedgerError, Part};
use crate::parts::{PartReader, RawPart};
use crate::segment::{self, Encoder, EncoderId, HEADER, Trailer};
use crate::source::{Place, Source, SourceError, Windows};
use crate::vault::{Key, Vault, VaultError};

/// Where the work is done: the log it reads, the ledger it reports to, the vault it fills.
#[derive(Clone)]
pub struct Workshop {
    pub source: Arc<dyn Source>,
    pub ledger: Arc<dyn Ledger>,
    pub vault: Vault,
    /// Parts that are compressed at the same time, at least 1. Memory is bounded by it.
    pub render_threads: usize,
    /// Stands still, lease and all, once so many parts were recorded: for whoever wants to see
    /// what happens to a worker that is killed there.
    pub hold_after_parts: Option<u64>,
    pub(crate) benches: Arc<Benches>,
}

/// The buffers that one part is made with. They go round, because a fresh megabyte for every
/// part leaves an allocator with a heap that grows.
#[derive(Default)]
struct Bench {
    lines: Vec<u8>,
    encoder: Encoder,
}

/// The buffers that are free.
#[derive(Default)]
pub(crate) struct Benches(Mutex<Vec<Bench>>);

impl Benches {
    fn take(&self) -> Bench {
        self.free().pop().unwrap_or_default()
    }

    fn put_back(&self, bench: Bench) {
        self.free().push(bench);
    }

    fn free(&self) -> MutexGuard<'_, Vec<Bench>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much of an attempt was new and how much was there already.
#[derive(Debug, Default)]
pub struct Tally {
    pub parts_written: AtomicU64,
    parts_begun: AtomicU64,
    pub parts_kept: AtomicU64,
}

/// How an attempt came to its end without an error.
#[derive(Debug)]
pub enum Worked {
    /// The artefact is written and safe.
    Whole(Artefact),
    /// Told to stop: the parts in hand are recorded, the rest is for the next attempt.
    Stopped,
}

/// Why an attempt did not come to its end, by what is to be done.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// Nothing: the job is no longer this worker's.
    #[error("the lease was lost")]
    LeaseLost,
    /// Try again later; it may be the job's fault, so not for ever.
    #[error("{}", .0.detail)]
    Retry(Problem),
    /// Wait until something else is over, such as a full disk.
    #[error("{}", .0.detail)]
    Hindered(Problem),
    /// Give up: it would not end differently.
    #[error("{}", .0.detail)]
    GiveUp(Problem),
}

impl WorkError {
    fn retry(kind: &str, detail: String) -> WorkError {
        WorkError::Retry(Problem {
            kind: kind.to_owned(),
            detail,
        })
    }

    fn hindered(kind: &str, detail: String) -> WorkError {
        WorkError::Hindered(Problem {
            kind: kind.to_owned(),
            detail,
        })
    }

    fn give_up(kind: &str, detail: String) -> WorkError {
        WorkError::GiveUp(Problem {
            kind: kind.to_owned(),
            detail,
        })
    }

    fn not_deterministic(part: u64) -> WorkError {
        WorkError::give_up(
            "not-deterministic",
            format!(
                "Part {part} came out other than it was recorded, so the log, the ledger or a \
                 machine was tampered with or is broken. Nothing was overwritten. Find out which \
                 before a new export is made."
            ),
        )
    }
}

impl From<LedgerError> for WorkError {
    fn from(error: LedgerError) -> WorkError {
        match error {
            LedgerError::LeaseLost | LedgerError::NotFound | LedgerError::Refused(_) => {
                WorkError::LeaseLost
            }
            LedgerError::OtherDigest { part } => WorkError::not_deterministic(part),
            LedgerError::Unavailable(detail) => WorkError::hindered(
                "database-unavailable",
                format!("The ledger does not answer ({detail}). It is tried again by itself."),
            ),
            LedgerError::Unusable(detail) => WorkError::hindered("database-unavailable", detail),
            LedgerError::Unreadable(_) => WorkError::give_up(
                "ledger-unreadable",
                format!("{error}. Use the version of ibid that wrote it."),
            ),
        }
    }
}

impl From<SourceError> for WorkError {
    fn from(error: SourceError) -> WorkError {
        match error {
            SourceError::LogChanged(what) => WorkError::give_up(
                "log-changed",
                format!(
                    "The log was changed since the export was created: {what}. A shorter file \
                     is never made; find out who changed the log, then ask for a new export."
                ),
            ),
            SourceError::Unavailable(detail)
            | SourceError::Invalid {
                invalid: crate::event::Invalid { reason: detail, .. },
                ..
            } => WorkError::hindered(
                "source-unavailable",
                format!("The log does not answer ({detail}). It is tried again by itself."),
            ),
            SourceError::Refused(detail) => WorkError::hindered("source-unavailable", detail),
            // Reading never meets it.
            SourceError::ImportElsewhere => {
                WorkError::hindered("source-unavailable", format!("{error}."))
            }
        }
    }
}

impl From<VaultError> for WorkError {
    fn from(error: VaultError) -> WorkError {
        match error {
            VaultError::Full { .. } | VaultError::NoRoom(_) => WorkError::hindered(
                "storage-full",
                format!(
                    "The disk of artefacts has no room ({error}). It is tried again by itself; \
                     free space."
                ),
            ),
            VaultError::Missing | VaultError::Unavailable(_) => WorkError::hindered(
                "storage-unavailable",
                format!(
                    "The store of artefacts failed ({error}). It is tried again by itself; free \
                     space or mend the store if this lasts."
                ),
            ),
        }
    }
}

impl Workshop {
    /// Renders what is not rendered yet, and assembles the artefact.
    ///
    /// `stop` asks to end early: parts in hand are finished and recorded.
    pub async fn run(
        &self,
        claim: &Claim,
        stop: &CancellationToken,
        tally: &Arc<Tally>,
    ) -> Result<Worked, WorkError> {
        let Some(encoder_id) = EncoderId::parse(&claim.export.recipe.encoder) else {
            return Err(WorkError::LeaseLost);
        };
        let job = claim.export.job_id;
        self.check_pin(&claim.export).await?;
        let windows = Arc::new(self.ledger.windows(job).await?);
        if windows.messages() != claim.export.messages_total {
            let what = "what the user may see was altered in the ledger";
            return Err(WorkError::give_up("log-changed", format!("{what}.")));
        }
        let recorded = self.recorded(job).await?;
        let writer = PartWriter {
            workshop: self.clone(),
            claim: claim.clone(),
            encoder_id,
            windows,
            tally: Arc::clone(tally),
        };
        if !self.render(writer, recorded, stop).await? {
            return Ok(Worked::Stopped);
        }
        let parts = self.ledger.parts(job).await?;
        let artefact = self.assemble(claim, parts).await?;
        // What was read may have come from a log that went back meanwhile.
        self.check_pin(&claim.export).await?;
        Ok(Worked::Whole(artefact))
    }

    /// Whether the log is still the one from which the job was created.
    async fn check_pin(&self, export: &Export) -> Result<(), WorkError> {
        if self.source.pinned(export.job_id, &export.snapshot).await? {
            return Ok(());
        }
        Err(WorkError::give_up(
            "source-lost-history",
            "The log no longer knows of this export: it was put back to an older state (by a \
             failover or a backup), or it is not the log from which the export was created. Ask \
             for a new export."
                .to_owned(),
        ))
    }

    /// The recorded parts, each with whether its bytes are there and are what was recorded.
    async fn recorded(&self, job: JobId) -> Result<Vec<(Part, bool)>, WorkError> {
        let parts = self.ledger.parts(job).await?;
        stream::iter(parts)
            .map(|part| async move {
                match self.segment(job, &part).await {
                    Ok(_) => Ok((part, true)),
                    Err(PartError::Damaged) => Ok((part, false)),
                    Err(PartError::Altered) => Err(WorkError::not_deterministic(part.number)),
                    Err(PartError::Vault(error)) => Err(error.into()),
                }
            })
            .buffered(self.render_threads.max(1))
            .try_collect()
            .await
    }

    /// The segment of a recorded part, whole and as it was recorded.
    async fn segment(&self, job: JobId, part: &Part) -> Result<Bytes, PartError> {
        let key = Key::Part {
            job,
            claim: part.claim,
            number: part.number,
        };
        let bytes = match self.vault.length(key).await {
            Ok(length) if length == part.bytes => self.vault.get(key).await,
            Ok(_) => return Err(PartError::Damaged),
            Err(error) => Err(error),
        };
        let bytes = match bytes {
            Ok(bytes) if Sha256::digest(&bytes)[..] == part.sha256 => bytes,
            Ok(_) | Err(VaultError::Missing) => return Err(PartError::Damaged),
            Err(error) => return Err(PartError::Vault(error)),
        };
        match segment::unseal(&bytes) {
            Some((segment, crc32, raw_bytes))
                if (crc32, raw_bytes) == (part.crc32, part.raw_bytes) =>
            {
                Ok(bytes.slice_ref(segment))
            }
            _ => Err(PartError::Altered),
        }
    }

    /// Renders and records every part that is not recorded whole; false if told to stop.
    async fn render(
        &self,
        writer: PartWriter,
        recorded: Vec<(Part, bool)>,
        stop: &CancellationToken,
    ) -> Result<bool, WorkError> {
        let (export, windows) = (&writer.claim.export, &writer.windows);
        let mut reader = PartReader::new(
            self.source.as_ref(),
            &export.snapshot,
            windows,
            export.recipe.cut,
        );
        let mut recorded = recorded.into_iter().peekable();
        let mut in_hand: JoinSet<Result<(), WorkError>> = JoinSet::new();
        while let Some(place) = reader.place() {
            if stop.is_cancelled() {
                while let Some(done) = in_hand.join_next().await {
                    finished(done)?;
                }
                return Ok(false);
            }
            let known = recorded.next_if(|(part, _)| part.number == reader.number());
            if let Some((part, whole)) = &known {
                let last = self.bounds(windows, part, place)?;
                if *whole {
                    writer.tally.parts_kept.fetch_add(1, Ordering::Relaxed);
                    reader.skip(last);
                    continue;
                }
            }
            while in_hand.len() >= self.render_threads.max(1) {
                if let Some(done) = in_hand.join_next().await {
                    finished(done)?;
                }
            }
            let bench = self.benches.take();
            let Some(part) = reader.read(bench.lines).await? else {
                break;
            };
            let expected = known.map(|(part, _)| part.sha256);
            let encoder = bench.encoder;
            let writer = writer.clone();
            in_hand.spawn(async move { writer.write(part, encoder, expected).await });
        }
        while let Some(done) = in_hand.join_next().await {
            finished(done)?;
        }
        match recorded.next() {
            // A part beyond the last one, or one whose number was passed over.
            Some((part, _)) => Err(WorkError::not_deterministic(part.number)),
            None => Ok(true),
        }
    }

    /// Where a recorded part ends, if it begins where the next part must begin.
    fn bounds(&self, windows: &Windows, part: &Part, place: Place) -> Result<Place, WorkError> {
        let first = windows.find(&part.first.0, part.first.1);
        match windows.find(&part.last.0, part.last.1) {
            Some(last) if first == Some(place) && place <= last => Ok(last),
            _ => Err(WorkError::not_deterministic(part.number)),
        }
    }

    /// Streams the parts, once and in order, into the artefact.
    async fn assemble(&self, claim: &Claim, parts: Vec<Part>) -> Result<Artefact, WorkError> {
        let job = claim.export.job_id;
        let messages: u64 = parts.iter().map(|part| part.messages).sum();
        if messages != claim.export.messages_total {
            return Err(WorkError::not_deterministic(parts.len() as u64));
        }
        let key = Key::Artefact {
            job,
            claim: claim.id,
        };
        let bytes = segment::artefact_bytes(parts.iter().map(|part| part.bytes));
        failpoint!("upload.before");
        let mut upload = self.vault.upload(key, bytes).await?;
        failpoint!("upload.begun");
        if let Some(id) = upload.id() {
            // Known before the first byte is sent, so that it can be given up by others.
            if let Err(error) = self.ledger.upload_begun(job, claim.id, id).await {
                // Nobody else may ever hear of it.
                if let Err(error) = self.vault.give_up(key, id).await {
                    tracing::warn!(%job, %error, "an upload could not be given up");
                }
                return Err(error.into());
            }
        }
        failpoint!("upload.noted");
        let mut whole = Whole::default();
        upload.write(whole.push(&HEADER)).await?;
        for part in &parts {
            let bytes = self.segment(job, part).await.map_err(|error| match error {
                PartError::Vault(error) => error.into(),
                PartError::Altered => WorkError::not_deterministic(part.number),
                // It was whole when this attempt began; the next one renders it again.
                PartError::Damaged => WorkError::hindered(
                    "storage-unavailable",
                    format!("Part {} was damaged in the store.", part.number),
                ),
            })?;
            whole.trailer.push(part.crc32, part.raw_bytes);
            upload.write(whole.push(&bytes)).await?;
        }
        let trailer = whole.trailer.clone().bytes();
        upload.write(whole.push(&trailer)).await?;
        let sha256: [u8; 32] = whole.hash.finalize().into();
        // Made before, and its bytes are lost: what was told of the file must stay true.
        let told = claim.export.artefact.as_ref();
        if whole.bytes != bytes || told.is_some_and(|told| told.sha256 != sha256) {
            return Err(WorkError::not_deterministic(0));
        }
        upload.finish().await?;
        failpoint!("upload.finished");
        Ok(Artefact {
            claim: claim.id,
            sha256,
            bytes: whole.bytes,
            messages,
            parts: parts.len() as u64,
        })
    }
}

enum PartError {
    /// Its bytes are missing or others.
    Damaged,
    /// Its row is not the one that was recorded with its bytes.
    Altered,
    Vault(VaultError),
}

/// The artefact as it grows.
#[derive(Default)]
pub(crate) struct Whole {
    pub hash: Sha256,
    pub bytes: u64,
    pub trailer: Trailer,
}

impl Whole {
    pub fn push<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        bytes
    }
}

/// Takes rendered parts to where they are recorded.
#[derive(Clone)]
struct PartWriter {
    workshop: Workshop,
    claim: Claim,
    encoder_id: EncoderId,
    windows: Arc<Windows>,
    tally: Arc<Tally>,
}

impl PartWriter {
    async fn write(
        self,
        raw: RawPart,
        mut encoder: Encoder,
        expected: Option<[u8; 32]>,
    ) -> Result<(), WorkError> {
        let (lines, encoder_id) = (raw.lines, self.encoder_id);
        let benches = Arc::clone(&self.workshop.benches);
        let (crc32, raw_bytes, stored, sha256) = tokio::task::spawn_blocking(move || {
            let segment = encoder.encode(encoder_id, &lines)?;
            benches.put_back(Bench { lines, encoder });
            let (crc32, raw_bytes) = (segment.crc32, segment.raw_bytes);
            let stored = segment.seal();
            let sha256: [u8; 32] = Sha256::digest(&stored).into();
            Ok::<_, segment::EncodeError>((crc32, raw_bytes, stored, sha256))
        })
        .await
        .map_err(|e| WorkError::retry("worker-fault", format!("The encoder stopped: {e}.")))?
        .map_err(|e| WorkError::retry("worker-fault", format!("{e}.")))?;
        if expected.is_some_and(|expected| expected != sha256) {
            return Err(WorkError::not_deterministic(raw.number));
        }
        let job = self.claim.export.job_id;
        let part = Part {
            number: raw.number,
            claim: self.claim.id,
            first: self.name(raw.first),
            last: self.name(raw.last),
            messages: raw.messages,
            raw_bytes,
            crc32,
            bytes: stored.len() as u64,
            sha256,
        };
        let key = Key::Part {
            job,
            claim: part.claim,
            number: part.number,
        };
        failpoint!("part.encoded");
        // The bytes are safe before the row says so: a row is a promise.
        self.workshop.vault.put(key, stored).await?;
        failpoint!("part.put");
        self.hold_or_record(job, part).await
    }

    async fn hold_or_record(&self, job: JobId, part: Part) -> Result<(), WorkError> {
        let begun = self.tally.parts_begun.fetch_add(1, Ordering::SeqCst);
        if self
            .workshop
            .hold_after_parts
            .is_some_and(|hold| begun >= hold)
        {
            std::future::pending::<()>().await;
        }
        self.workshop.ledger.part_done(job, part).await?;
        failpoint!("part.recorded");
        self.tally.parts_written.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn name(&self, place: Place) -> (String, u64) {
        let conv = self.windows.get(place.window);
        (
            conv.map_or_else(String::new, |window| window.conv.to_string()),
            place.seq,
        )
    }
}

fn finished(done: Result<Result<(), WorkError>, tokio::task::JoinError>) -> Result<(), WorkError> {
    done.map_err(|e| WorkError::retry("worker-fault", format!("A part's task stopped: {e}.")))?
}
