//! Whether a store gives back what is written to it, without a trace.

use std::path::Path;

use bytes::Bytes;
use futures::stream::TryStreamExt as _;
use object_store::ObjectStoreExt as _;

use super::disk::{names_in, on_disk};
use super::{Place, Vault, VaultError};
use crate::ids::ClaimId;
use crate::time::Time;

/// Where probes write in an object store.
const PROBES: &str = "probe";

/// How the names of files begin that try a folder, for as long as that takes.
pub const PROBE_PREFIX: &str = ".ibid-doctor-";

impl Vault {
    /// Writes an object, reads it and deletes it again; whether it was the same.
    pub async fn probe(&self) -> Result<bool, VaultError> {
        let id = ClaimId::random().map_err(|e| VaultError::Unavailable(e.to_string()))?;
        let path = object_store::path::Path::from(format!("{PROBES}/{id}"));
        let written: Bytes = (0..=u8::MAX).cycle().take(64 * 1024).collect();
        self.store.put(&path, written.clone().into()).await?;
        let read = self.store.get(&path).await?.bytes().await?;
        self.store.delete(&path).await?;
        Ok(read == written)
    }

    /// Deletes what probes that were killed have left, if it is from before `before` by the
    /// store's clock; gives how many objects that were.
    pub async fn sweep_probes(&self, before: Time) -> Result<u64, VaultError> {
        if let Place::Folder(folder) = &self.place {
            let folder = folder.clone();
            return on_disk(move || delete_probes(&folder, before)).await;
        }
        let prefix = object_store::path::Path::from(PROBES);
        let listed = self.store.list(Some(&prefix));
        let old = listed.try_filter_map(|meta| {
            let is_old = meta.last_modified.timestamp_micros() < before.micros();
            std::future::ready(Ok(is_old.then_some(meta.location)))
        });
        let old: Vec<_> = old.try_collect().await?;
        let mut deleted = 0;
        for path in old {
            match self.store.delete(&path).await {
                Ok(()) => deleted += 1,
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(deleted)
    }
}

/// Deletes the files of probes that were last written before `before`.
fn delete_probes(folder: &Path, before: Time) -> std::io::Result<u64> {
    let mut deleted = 0;
    for name in names_in(folder)? {
        if !name.starts_with(PROBE_PREFIX) {
            continue;
        }
        let path = folder.join(name);
        let written = match path.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            metadata => metadata?.modified()?,
        };
        let since = written.duration_since(std::time::UNIX_EPOCH);
        if Time::from_micros(0).plus(since.unwrap_or_default()) >= before {
            continue;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => deleted += 1,
        }
    }
    Ok(deleted)
}
