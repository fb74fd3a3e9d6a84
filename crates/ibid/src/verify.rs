//! Renders a job again from the log and compares it with what was recorded; writes nothing.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::ids::JobId;
use crate::ledger::{Ledger, LedgerError, Part};
use crate::parts::PartReader;
use crate::segment::{self, EncoderId, HEADER};
use crate::source::{Source, SourceError};
use crate::vault::{Key, Vault, VaultError};
use crate::work::Whole;

/// What a check of one job found.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Verification {
    pub job_id: JobId,
    pub messages: u64,
    /// Parts rendered again.
    pub parts: u64,
    /// Parts that were recorded and are the same.
    pub parts_equal: u64,
    /// Parts that were recorded and are not the same.
    pub parts_different: Vec<u64>,
    /// The sha256 of the whole file as rendered again.
    pub sha256: String,
    /// Whether that is what was recorded; `None` if the job is not done.
    pub artefact_equal: Option<bool>,
    /// Whether the stored file is what was recorded; `None` if there is none to look at.
    pub stored_equal: Option<bool>,
}

impl Verification {
    /// Whether everything that could be compared is the same.
    pub fn is_good(&self) -> bool {
        self.parts_different.is_empty()
            && self.artefact_equal != Some(false)
            && self.stored_equal != Some(false)
    }
}

/// Why a job could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("there is no export {0}; `ibid admin list` and GET /exports name those that are")]
    NotFound(JobId),
    #[error(
        "the export was made with encoder {found:?}, which this version does not have (it has \
         {known}); use the version that made it"
    )]
    OtherEncoder { found: String, known: String },
    #[error("the encoder failed: {0}")]
    Encoder(#[from] segment::EncodeError),
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Vault(#[from] VaultError),
}

/// Checks `job`; `progress` is told how many messages of how many are done.
///
/// # Errors
/// See [`VerifyError`]; a difference is not an error but a finding.
pub async fn verify(
    source: &dyn Source,
    ledger: &dyn Ledger,
    vault: &Vault,
    job: JobId,
    progress: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Verification, VerifyError> {
    let export = ledger
        .find(job)
        .await?
        .ok_or(VerifyError::NotFound(job))?
        .export;
    let Some(encoder_id) = EncoderId::parse(&export.recipe.encoder) else {
        let known: Vec<_> = EncoderId::all().iter().map(|it| it.as_str()).collect();
        return Err(VerifyError::OtherEncoder {
            found: export.recipe.encoder,
            known: known.join(", "),
        });
    };
    let windows = Arc::new(ledger.windows(job).await?);
    let mut recorded = ledger.parts(job).await?.into_iter().peekable();
    let mut reader = PartReader::new(source, &export.snapshot, &windows, export.recipe.cut);
    let mut whole = Whole::default();
    whole.push(&HEADER);
    let (mut equal, mut different, mut messages) = (0, Vec::new(), 0);
    let (mut lines, mut encoder) = (Vec::new(), segment::Encoder::default());
    while let Some(raw) = reader.read(std::mem::take(&mut lines)).await? {
        let (number, count) = (raw.number, raw.messages);
        let encoding = tokio::task::spawn_blocking(move || {
            let segment = encoder.encode(encoder_id, &raw.lines);
            (segment, encoder, raw.lines)
        });
        let segment;
        (segment, encoder, lines) = encoding
            .await
            .map_err(|e| LedgerError::Unavailable(e.to_string()))?;
        let segment = segment?;
        if let Some(part) = recorded.next_if(|part| part.number == number) {
            if same(&part, &segment, count) {
                equal += 1;
            } else {
                different.push(number);
            }
        }
        whole.trailer.push(segment.crc32, segment.raw_bytes);
        whole.push(&segment.bytes);
        messages += count;
        progress(messages, export.messages_total);
    }
    different.extend(recorded.map(|part| part.number));
    let trailer = whole.trailer.clone().bytes();
    whole.push(&trailer);
    let sha256: [u8; 32] = whole.hash.finalize().into();
    let stored = match &export.artefact {
        Some(artefact) if !export.purging => {
            let key = Key::Artefact {
                job,
                claim: artefact.claim,
            };
            Some(stored_sha256(vault, key, artefact.bytes).await? == Some(artefact.sha256))
        }
        _ => None,
    };
    Ok(Verification {
        job_id: job,
        messages,
        parts: reader.number(),
        parts_equal: equal,
        parts_different: different,
        sha256: hex::encode(sha256),
        artefact_equal: export
            .artefact
            .as_ref()
            .map(|artefact| artefact.sha256 == sha256 && artefact.messages == messages),
        stored_equal: stored,
    })
}

fn same(part: &Part, segment: &segment::Segment, messages: u64) -> bool {
    part.sha256 == Sha256::digest(segment.clone().seal())[..]
        && part.crc32 == segment.crc32
        && part.raw_bytes == segment.raw_bytes
        && part.messages == messages
}

/// The digest of a stored object, or `None` if it is missing or of another length.
async fn stored_sha256(
    vault: &Vault,
    key: Key,
    bytes: u64,
) -> Result<Option<[u8; 32]>, VaultError> {
    use futures::TryStreamExt as _;
    match vault.length(key).await {
        Ok(length) if length == bytes => {}
        Ok(_) | Err(VaultError::Missing) => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut stream = vault.read(key, 0..bytes).await?;
    let mut hash = Sha256::new();
    while let Some(chunk) = stream.try_next().await? {
        hash.update(&chunk);
    }
    Ok(Some(hash.finalize().into()))
}
