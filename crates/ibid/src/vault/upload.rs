//! An object as it is written, piece by piece.

use std::sync::Arc;
use std::time::Duration;

use object_store::client::{HttpError, HttpErrorKind};
use object_store::multipart::PartId;
use object_store::{
    Attributes, MultipartUpload, ObjectStore, ObjectStoreExt as _, PutMultipartOptions, PutOptions,
    PutPayload,
};
use tokio::time::Instant;

use super::{Key, Objects, Place, Vault, VaultError, presign};
use crate::failpoint::failpoint;

/// The size of the pieces that an artefact is written to a disk in.
const DISK_PIECE_BYTES: usize = 1024 * 1024;

/// The least size of the pieces that an artefact is sent to an object store in. S3 takes pieces
/// of 5 MiB to 5 GiB, the last may be smaller (Amazon S3 User Guide, multipart upload limits).
const LEAST_PIECE_BYTES: u64 = 8 * 1024 * 1024;

/// The most pieces of one object.
const MOST_PIECES: u64 = 10_000;

/// How long it may take until an object is joined from its pieces. Of many of them that is minutes;
/// meanwhile S3 sends white space (Amazon S3 API Reference, CompleteMultipartUpload), so that only
/// silence is limited as other requests are.
pub(super) const JOIN_LIMIT: Duration = Duration::from_secs(900);

impl Vault {
    /// Begins to write an object of `bytes` bytes, in order.
    pub async fn upload(&self, key: Key, bytes: u64) -> Result<Upload, VaultError> {
        self.check_room(bytes)?;
        Upload::begin(self, key, bytes).await
    }

    /// Gives up an upload that was begun and not finished. One that is unknown, because it was
    /// finished or given up, is no error.
    pub async fn give_up(&self, key: Key, upload: &str) -> Result<(), VaultError> {
        let Place::Objects(objects) = &self.place else {
            return Ok(());
        };
        let (path, id) = (key.path(), upload.to_owned());
        match objects.store.abort_multipart(&path, &id).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// An object that is being written.
pub struct Upload {
    sink: Sink,
    pending: Vec<u8>,
    piece_bytes: usize,
}

enum Sink {
    File(Box<dyn MultipartUpload>),
    /// Small enough to be sent at once, at the end.
    Object(Arc<dyn ObjectStore>, object_store::path::Path, Attributes),
    Pieces(Pieces),
}

impl Upload {
    /// Begins an object of `bytes` bytes.
    async fn begin(vault: &Vault, key: Key, bytes: u64) -> Result<Upload, VaultError> {
        let path = key.path();
        let (sink, piece_bytes) = match &vault.place {
            Place::Folder(_) => {
                let file = vault.store.put_multipart(&path).await?;
                (Sink::File(file), DISK_PIECE_BYTES as u64)
            }
            Place::Objects(_) if bytes <= LEAST_PIECE_BYTES => {
                let store = Arc::clone(&vault.store);
                let attributes = presign::attributes(key);
                (Sink::Object(store, path, attributes), bytes)
            }
            Place::Objects(objects) => {
                let attributes = if objects.pieces_take_attributes {
                    presign::attributes(key)
                } else {
                    Attributes::new()
                };
                let options = PutMultipartOptions::from(attributes);
                let id = objects.store.create_multipart_opts(&path, options).await?;
                let pieces = Pieces {
                    objects: objects.clone(),
                    vault: vault.clone(),
                    key,
                    id,
                    sent: Vec::new(),
                    bytes: 0,
                };
                (Sink::Pieces(pieces), piece_bytes(bytes))
            }
        };
        let piece_bytes = usize::try_from(piece_bytes).unwrap_or(usize::MAX).max(1);
        Ok(Upload {
            sink,
            pending: Vec::with_capacity(piece_bytes),
            piece_bytes,
        })
    }

    /// Under which id the store keeps what is sent until it is finished; it stays there, unseen,
    /// if it is neither finished nor given up. `None` where nothing can stay, and where the store
    /// has no such ids: Azure forgets pieces by itself.
    pub fn id(&self) -> Option<&str> {
        match &self.sink {
            Sink::Pieces(pieces) => Some(pieces.id.as_str()).filter(|id| !id.is_empty()),
            Sink::File(_) | Sink::Object(..) => None,
        }
    }

    /// Writes on.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<(), VaultError> {
        while !bytes.is_empty() {
            if self.pending.len() == self.piece_bytes {
                self.flush().await?;
            }
            let room = self.piece_bytes - self.pending.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.pending.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    /// Ends it: when this has answered, the object is there, whole and safe.
    pub async fn finish(mut self) -> Result<(), VaultError> {
        if !self.pending.is_empty() {
            self.flush().await?;
        }
        failpoint!("upload.sent");
        match self.sink {
            Sink::File(mut file) => {
                file.complete().await?;
            }
            Sink::Object(..) => {}
            Sink::Pieces(pieces) => pieces.join().await?,
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), VaultError> {
        failpoint!("piece.before");
        let next = Vec::with_capacity(self.piece_bytes);
        let piece = PutPayload::from(std::mem::replace(&mut self.pending, next));
        match &mut self.sink {
            Sink::File(file) => file.put_part(piece).await?,
            Sink::Object(store, path, attributes) => {
                let options = PutOptions::from(attributes.clone());
                store.put_opts(path, piece, options).await?;
            }
            Sink::Pieces(pieces) => pieces.send(piece).await?,
        }
        failpoint!("piece.sent");
        Ok(())
    }
}

struct Pieces {
    objects: Objects,
    /// To look whether the object is there.
    vault: Vault,
    key: Key,
    id: String,
    sent: Vec<PartId>,
    bytes: u64,
}

impl Pieces {
    async fn send(&mut self, piece: PutPayload) -> Result<(), VaultError> {
        let (path, number) = (self.key.path(), self.sent.len());
        let bytes = piece.content_length() as u64;
        let store = &self.objects.store;
        let sent = store.put_part(&path, &self.id, number, piece).await?;
        self.sent.push(sent);
        self.bytes += bytes;
        Ok(())
    }

    /// Makes the object out of its pieces.
    async fn join(self) -> Result<(), VaultError> {
        let path = self.key.path();
        let store = &self.objects.joining;
        let end = Instant::now() + JOIN_LIMIT;
        loop {
            let sent = self.sent.clone();
            let Err(error) = store.complete_multipart(&path, &self.id, sent).await else {
                return Ok(());
            };
            // They may have been joined and the answer lost: asked again, a store says that there
            // is no such upload. Nobody else writes this object, and it is there whole or not.
            match self.vault.length(self.key).await {
                Ok(length) if length == self.bytes => return Ok(()),
                // The store answers, so it is not away but busy with joining, and says nothing.
                Err(VaultError::Missing) if is_silence(&error) && Instant::now() < end => {}
                _ => return Err(error.into()),
            }
        }
    }
}

/// Whether no answer came in time.
fn is_silence(error: &object_store::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<HttpError>() {
            return error.kind() == HttpErrorKind::Timeout;
        }
        cause = error.source();
    }
    false
}

/// The size of the pieces in which an object of `bytes` bytes is sent: as small as the most
/// pieces allow, since one is kept in memory.
fn piece_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(MOST_PIECES).max(LEAST_PIECE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ClaimId, JobId};

    #[tokio::test]
    async fn an_upload_that_has_no_name_in_the_store_is_not_noted() {
        // Azure gives none, so two of one job could not be told apart. Nothing is sent yet.
        let options = [
            ("AZURE_STORAGE_ACCOUNT_NAME", "a"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "a2V5"),
        ];
        let vault = Vault::at_url("az://c/p", options).unwrap();
        let key = Key::Artefact {
            job: JobId::from_bytes([1; 16]),
            claim: ClaimId::from_bytes([2; 16]),
        };
        let upload = vault.upload(key, 20 * 1024 * 1024).await.unwrap();
        assert_eq!(upload.id(), None);
    }

    #[test]
    fn pieces_are_as_small_as_the_limits_allow() {
        const MIB: u64 = 1024 * 1024;
        assert_eq!(piece_bytes(9 * MIB), 8 * MIB);
        assert_eq!(piece_bytes(80_000 * MIB), 8 * MIB);
        let more = 80_000 * MIB + 1;
        assert_eq!(piece_bytes(more), 8 * MIB + 1);
        assert!(more.div_ceil(piece_bytes(more)) <= MOST_PIECES);
        // The largest object that S3 keeps.
        assert!(piece_bytes(5 * 1024 * 1024 * MIB) < 5 * 1024 * MIB);
    }
}
