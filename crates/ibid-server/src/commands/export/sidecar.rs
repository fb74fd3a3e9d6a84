//! What is kept beside an unfinished file, so that the same command continues the same export.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use ibid::client::files::{beside, flush_folder, locked};
use ibid::key::IdempotencyKey;
use serde::{Deserialize, Serialize};

use super::Ended;
use crate::commands::Failure;

/// A request that was made, or is about to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remembered {
    pub server: String,
    pub scope: String,
    /// As it stands in the header line.
    pub key: String,
}

impl Remembered {
    /// The key as a request takes it.
    ///
    /// # Errors
    /// It is none: somebody has changed the file.
    pub fn key(&self) -> Result<IdempotencyKey, Ended> {
        IdempotencyKey::parse(self.key.as_bytes()).map_err(|e| {
            Ended::NotCreated(Failure::failed(format!(
                "the key that is kept beside the file is none: {e}; delete the file that ends in \
                 .ibid-key"
            )))
        })
    }
}

/// The file `FILE.ibid-key`, locked: as long as it is held, no other command works on FILE.
pub struct Sidecar {
    path: PathBuf,
    remembered: Remembered,
    fresh: bool,
    /// Kept open: the lock ends with it.
    _file: File,
}

/// More than any request needs.
const MAX_FILE_BYTES: u64 = 64 * 1024;

impl Sidecar {
    /// Opens the one beside `output`; makes it, safe on the disk, where it is missing.
    ///
    /// # Errors
    /// Another command holds it, or it is of another request, or it cannot be written.
    pub fn open(
        output: &Path,
        server: &str,
        scope: &str,
        key: Option<&IdempotencyKey>,
    ) -> Result<Sidecar, Failure> {
        let path = beside(output, "ibid-key");
        let unusable = |e: std::io::Error| {
            Failure::failed(format!(
                "cannot write {}: {e}; name a file in a folder that is there and writable",
                path.display()
            ))
        };
        let mut file = locked(&path).map_err(unusable)?.ok_or_else(|| {
            Failure::failed(format!(
                "another `ibid export` works on {}; wait for it, or name another file with -o",
                output.display()
            ))
        })?;
        let mut text = Vec::new();
        (&file)
            .take(MAX_FILE_BYTES)
            .read_to_end(&mut text)
            .map_err(unusable)?;
        // One that is empty was made by a command that was interrupted before it asked.
        let fresh = text.is_empty();
        let remembered = if fresh {
            let key = match key {
                Some(key) => key.clone(),
                None => IdempotencyKey::random().map_err(|e| {
                    Failure::failed(format!(
                        "the system gives no random numbers: {e}; try again"
                    ))
                })?,
            };
            let remembered = Remembered {
                server: server.to_owned(),
                scope: scope.to_owned(),
                key: key.header_value(),
            };
            let text = serde_json::to_vec(&remembered).map_err(|e| unusable(e.into()))?;
            // Before anything is asked: a key that is lost is an export that is made twice.
            file.write_all(&text).map_err(unusable)?;
            file.sync_all().map_err(unusable)?;
            flush_folder(&path).map_err(unusable)?;
            remembered
        } else {
            let remembered: Remembered = serde_json::from_slice(&text).map_err(|_| {
                Failure::failed(format!(
                    "{} is not what `ibid export` keeps there; move it away, or name another \
                     file with -o",
                    path.display()
                ))
            })?;
            refuse_other(&path, &remembered, server, scope, key)?;
            remembered
        };
        Ok(Sidecar {
            path,
            remembered,
            fresh,
            _file: file,
        })
    }

    /// The request that the command is about.
    pub fn remembered(&self) -> &Remembered {
        &self.remembered
    }

    /// Whether this command has made it.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Removes it: there is nothing left to continue.
    pub fn remove(self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "delete this file");
        }
    }
}

fn refuse_other(
    path: &Path,
    remembered: &Remembered,
    server: &str,
    scope: &str,
    key: Option<&IdempotencyKey>,
) -> Result<(), Failure> {
    let same_key = key.is_none_or(|key| key.header_value() == remembered.key);
    if remembered.server == server && remembered.scope == scope && same_key {
        return Ok(());
    }
    let key = if same_key { "" } else { " with another key" };
    Err(Failure::usage(format!(
        "{} is of an unfinished export of {} from {}{key}; finish that one, or delete this file \
         to begin another",
        path.display(),
        remembered.scope,
        remembered.server
    )))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::commands::Exit;

    const SERVER: &str = "https://chat.example";

    fn refused(result: Result<Sidecar, Failure>) -> Failure {
        match result {
            Ok(_) => panic!("it was taken"),
            Err(failure) => failure,
        }
    }

    #[test]
    fn the_key_is_kept_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let open = || Sidecar::open(&output, SERVER, "all", None).unwrap();
        let first = open();
        assert!(first.is_fresh());
        let key = first.remembered().key.clone();
        assert_eq!(key.len(), 34);
        let path = folder.path().join("out.gz.ibid-key");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(first);
        let second = open();
        assert!(!second.is_fresh());
        assert_eq!(second.remembered().key, key);
        second.remove();
        assert!(!path.exists());
        assert_ne!(open().remembered().key, key);
    }

    #[test]
    fn a_given_key_is_kept_as_well() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let key = IdempotencyKey::parse(b"monday").unwrap();
        let first = Sidecar::open(&output, SERVER, "all", Some(&key)).unwrap();
        assert_eq!(first.remembered().key, "\"monday\"");
        drop(first);
        let again = Sidecar::open(&output, SERVER, "all", None).unwrap();
        assert_eq!(again.remembered().key, "\"monday\"");
    }

    #[test]
    fn another_request_for_the_same_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        drop(Sidecar::open(&output, SERVER, "all", None).unwrap());
        let key = IdempotencyKey::parse(b"other").unwrap();
        for result in [
            Sidecar::open(&output, "https://other.example", "all", None),
            Sidecar::open(&output, SERVER, "conv:c", None),
            Sidecar::open(&output, SERVER, "all", Some(&key)),
        ] {
            let failure = refused(result);
            assert_eq!(failure.exit, Exit::Usage);
            assert!(failure.message.contains("out.gz.ibid-key"), "{failure:?}");
        }
    }

    #[test]
    fn two_commands_do_not_work_on_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let held = Sidecar::open(&output, SERVER, "all", None).unwrap();
        let failure = refused(Sidecar::open(&output, SERVER, "all", None));
        assert!(failure.message.starts_with("another `ibid export`"));
        drop(held);
        Sidecar::open(&output, SERVER, "all", None).unwrap();
    }

    #[test]
    fn a_file_of_somebody_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let path = folder.path().join("out.gz.ibid-key");
        std::fs::write(&path, "my key").unwrap();
        let failure = refused(Sidecar::open(&output, SERVER, "all", None));
        assert!(failure.message.contains("move it away"), "{failure:?}");
        assert_eq!(std::fs::read(&path).unwrap(), b"my key");
        // One that was interrupted before it was written is no obstacle.
        std::fs::write(&path, "").unwrap();
        assert!(
            Sidecar::open(&output, SERVER, "all", None)
                .unwrap()
                .is_fresh()
        );
        let nowhere = folder.path().join("missing/out.gz");
        let failure = refused(Sidecar::open(&nowhere, SERVER, "all", None));
        assert!(failure.message.contains("missing/out.gz.ibid-key"));
    }
}
