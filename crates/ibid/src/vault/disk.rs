//! The folder of a vault, as the disk shows it.

use std::path::Path;

use super::{Object, VaultError};
use crate::failpoint::failpoint;

pub(super) async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, VaultError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| VaultError::Unavailable(e.to_string()))?
        .map_err(|e| VaultError::Unavailable(format!("the disk failed: {e}")))
}

/// The names in a folder; none if it is gone or is no folder.
pub(super) fn names_in(folder: &Path) -> std::io::Result<Vec<String>> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let entries = match std::fs::read_dir(folder) {
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => return Ok(Vec::new()),
        entries => entries?,
    };
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Deletes files of a job, and the folders that are empty then.
pub(super) fn delete_files(folder: &Path, objects: &[Object]) -> std::io::Result<()> {
    for object in objects {
        failpoint!("delete.object");
        match std::fs::remove_file(folder.join(&object.claim).join(&object.name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    failpoint!("delete.deleted");
    for claim in names_in(folder)? {
        // One that is not empty stays.
        let _ = std::fs::remove_dir(folder.join(claim));
    }
    let _ = std::fs::remove_dir(folder);
    Ok(())
}
