//! Where parts and artefacts are kept: an object store, which on a laptop is a folder.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use object_store::local::LocalFileSystem;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt as _, PutPayload};

use crate::ids::{ClaimId, JobId};

/// Spells every path in the vault. Paths are made from ids only, and each attempt at a job
/// writes under its own claim, so a worker that overstays touches nothing that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Part {
        job: JobId,
        claim: ClaimId,
        number: u64,
    },
    Artefact {
        job: JobId,
        claim: ClaimId,
    },
}

impl Key {
    fn path(self) -> object_store::path::Path {
        match self {
            Key::Part { job, claim, number } => format!("{job}/{claim}/part-{number:06}").into(),
            Key::Artefact { job, claim } => format!("{job}/{claim}/export.jsonl.gz").into(),
        }
    }
}

/// Why the vault did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    #[error("the store has no such object")]
    Missing,
    /// The store does not answer or refuses; it may later.
    #[error("the store failed: {0}")]
    Unavailable(String),
}

impl From<object_store::Error> for VaultError {
    fn from(error: object_store::Error) -> VaultError {
        match error {
            object_store::Error::NotFound { .. } => VaultError::Missing,
            other => VaultError::Unavailable(describe(&other)),
        }
    }
}

/// An error with its causes, which `Display` of most of them leaves out.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let next_text = next.to_string();
        if !text.contains(&next_text) {
            text.push_str(": ");
            text.push_str(&next_text);
        }
        cause = next.source();
    }
    text
}

/// The size of the pieces that an artefact is written to a disk in.
const DISK_PIECE_BYTES: usize = 1024 * 1024;

/// The store of parts and artefacts.
#[derive(Clone)]
pub struct Vault {
    store: Arc<dyn ObjectStore>,
    folder: PathBuf,
    piece_bytes: usize,
}

impl Vault {
    /// The vault in a folder of a local disk, which is created (for its owner only) where it is
    /// missing. What was written survives a power cut once the call has answered.
    ///
    /// # Errors
    /// The folder cannot be created or is not one.
    pub fn in_folder(folder: &Path) -> Result<Vault, VaultError> {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|e| {
                VaultError::Unavailable(format!("cannot create {}: {e}", folder.display()))
            })?;
        let store = LocalFileSystem::new_with_prefix(folder)?.with_fsync(true);
        Ok(Vault {
            store: Arc::new(store),
            folder: folder.to_owned(),
            piece_bytes: DISK_PIECE_BYTES,
        })
    }

    /// The folder that this vault is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes an object whole.
    pub async fn put(&self, key: Key, bytes: Vec<u8>) -> Result<(), VaultError> {
        self.store.put(&key.path(), bytes.into()).await?;
        Ok(())
    }

    /// Reads an object whole.
    pub async fn get(&self, key: Key) -> Result<Bytes, VaultError> {
        Ok(self.store.get(&key.path()).await?.bytes().await?)
    }

    /// The length of an object.
    pub async fn length(&self, key: Key) -> Result<u64, VaultError> {
        Ok(self.store.head(&key.path()).await?.size)
    }

    /// The bytes of `range`, as they come. A stream that ends early ends with an error.
    pub async fn read(
        &self,
        key: Key,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, VaultError>>, VaultError> {
        let options = object_store::GetOptions {
            range: Some(object_store::GetRange::Bounded(range.clone())),
            ..object_store::GetOptions::default()
        };
        let got = self.store.get_opts(&key.path(), options).await?;
        if got.range != range {
            let what = format!("asked for {range:?}, got {:?}", got.range);
            return Err(VaultError::Unavailable(what));
        }
        let missing = range.end - range.start;
        let stream = got.into_stream().map_err(VaultError::from);
        let whole =
            futures::stream::try_unfold((stream, missing), |(mut stream, missing)| async move {
                match stream.next().await {
                    // A file that was cut is read as empty pieces without end.
                    Some(Ok(bytes)) if bytes.is_empty() && missing > 0 => Err(
                        VaultError::Unavailable(format!("the object ended {missing} bytes early")),
                    ),
                    Some(Ok(bytes)) => {
                        let missing = missing.saturating_sub(bytes.len() as u64);
                        Ok(Some((bytes, (stream, missing))))
                    }
                    Some(Err(error)) => Err(error),
                    None if missing > 0 => Err(VaultError::Unavailable(format!(
                        "the object ended {missing} bytes early"
                    ))),
                    None => Ok(None),
                }
            });
        Ok(whole.boxed())
    }

    /// Begins to write an object of any size, in order.
    pub async fn upload(&self, key: Key) -> Result<Upload, VaultError> {
        Ok(Upload {
            upload: self.store.put_multipart(&key.path()).await?,
            pending: Vec::with_capacity(self.piece_bytes),
            piece_bytes: self.piece_bytes,
        })
    }

    /// Deletes everything of `job` but the object at `keep`. What is gone already is no error.
    /// Looks at the disk itself, because the store hides what a write that was killed left.
    pub async fn delete_all_but(&self, job: JobId, keep: Option<Key>) -> Result<(), VaultError> {
        let folder = self.folder.join(job.to_string());
        let keep = keep.map(|key| self.folder.join(key.path().as_ref()));
        tokio::task::spawn_blocking(move || delete_below(&folder, keep.as_deref()))
            .await
            .map_err(|e| VaultError::Unavailable(e.to_string()))?
            .map_err(|e| VaultError::Unavailable(format!("cannot delete: {e}")))
    }
}

/// Deletes what is in `folder`, but not `keep` and the folders above it.
fn delete_below(folder: &Path, keep: Option<&Path>) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        let deleted = match keep {
            Some(keep) if keep == path => Ok(()),
            Some(keep) if keep.starts_with(&path) => delete_below(&path, Some(keep)),
            _ if entry.file_type()?.is_dir() => std::fs::remove_dir_all(&path),
            _ => std::fs::remove_file(&path),
        };
        match deleted {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// An object that is being written.
pub struct Upload {
    upload: Box<dyn MultipartUpload>,
    pending: Vec<u8>,
    piece_bytes: usize,
}

impl Upload {
    /// Writes on.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<(), VaultError> {
        while !bytes.is_empty() {
            let room = self.piece_bytes - self.pending.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.pending.extend_from_slice(now);
            bytes = later;
            if self.pending.len() == self.piece_bytes {
                self.flush().await?;
            }
        }
        Ok(())
    }

    /// Ends it: when this has answered, the object is there, whole and safe.
    pub async fn finish(mut self) -> Result<(), VaultError> {
        self.flush().await?;
        self.upload.complete().await?;
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), VaultError> {
        if !self.pending.is_empty() {
            let next = Vec::with_capacity(self.piece_bytes);
            let piece = PutPayload::from(std::mem::replace(&mut self.pending, next));
            self.upload.put_part(piece).await?;
        }
        Ok(())
    }
}
