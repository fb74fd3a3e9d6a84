//! The file of the keys that sign download links: made where it is missing, read again when it
//! changes.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ibid::link::{KeyRing, KeyRingError};
use ibid::time::Time;

/// More than any ring needs; a file that is longer is another one.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Why the key file cannot be used. No secret stands in any of them.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error(
        "the key file {path} can be read or written by others (mode {mode:04o}); run \
         `chmod 600 {path}`"
    )]
    Open { path: PathBuf, mode: u32 },
    #[error("the key file {path} is not a file; name a file with --signing-keys")]
    NotAFile { path: PathBuf },
    #[error(
        "the key file {path} cannot be used: {reason}; correct that line, or move the file away \
         and new keys are made"
    )]
    Unreadable { path: PathBuf, reason: KeyRingError },
    #[error("the key file {path} is not text; move it away and new keys are made")]
    NotText { path: PathBuf },
    #[error("cannot use the key file {path}: {source}; make it readable for this user")]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "cannot create the key file {path}: {source}; make its folder writable, or name another \
         file with --signing-keys"
    )]
    Create { path: PathBuf, source: io::Error },
}

/// The key ring of a file, as the file was when it was last right.
pub struct KeyStore {
    path: PathBuf,
    held: Mutex<Held>,
}

struct Held {
    ring: Arc<KeyRing>,
    /// Of the file that was looked at last, be it right or wrong; `None` if it was missing.
    stamp: Option<Stamp>,
}

/// What changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    mode: u32,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            mode: metadata.mode(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl KeyStore {
    /// Reads the file at `path`; makes it, with one new key and for its owner only, where it is
    /// missing. Of several that start at once, all end with the same file.
    ///
    /// # Errors
    /// See [`KeysError`].
    pub fn open_or_create(path: &Path, now: Time) -> Result<KeyStore, KeysError> {
        let read = match read(path)? {
            Some(read) => read,
            None => {
                create(path, now)?;
                read(path)?.ok_or_else(|| KeysError::Io {
                    path: path.to_owned(),
                    source: ErrorKind::NotFound.into(),
                })?
            }
        };
        let (ring, stamp) = read;
        Ok(KeyStore {
            path: path.to_owned(),
            held: Mutex::new(Held {
                ring: Arc::new(ring),
                stamp: Some(stamp),
            }),
        })
    }

    /// The keys as they are now.
    pub fn ring(&self) -> Arc<KeyRing> {
        Arc::clone(&self.held().ring)
    }

    /// Looks whether the file is another one than at the last look, and reads it then. One that
    /// is wrong or gone is logged once, and the keys stay as they are.
    pub fn reload_if_changed(&self) {
        let stamp = std::fs::metadata(&self.path).ok().as_ref().map(Stamp::of);
        let mut held = self.held();
        if stamp == held.stamp {
            return;
        }
        held.stamp = stamp;
        match read(&self.path) {
            Ok(Some((ring, stamp))) => {
                tracing::info!(path = %self.path.display(), keys = ring.len(), "signing keys read again");
                held.ring = Arc::new(ring);
                held.stamp = Some(stamp);
            }
            Ok(None) => tracing::error!(
                path = %self.path.display(),
                "the key file is gone; the keys read before stay in use until it is back"
            ),
            Err(error) => tracing::error!(%error, "the keys read before stay in use"),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Nothing panics while it is held, and each field is right by itself.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ring in the file at `path`, or `None` if there is no file.
///
/// # Errors
/// See [`KeysError`].
pub fn check(path: &Path) -> Result<Option<KeyRing>, KeysError> {
    Ok(read(path)?.map(|(ring, _)| ring))
}

fn read(path: &Path) -> Result<Option<(KeyRing, Stamp)>, KeysError> {
    let io = |source| KeysError::Io {
        path: path.to_owned(),
        source,
    };
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits();
    let opened = OpenOptions::new()
        .read(true)
        // A pipe is refused below, not waited for.
        .custom_flags(nonblocking.cast_signed())
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    // Before the bytes are read: what changes meanwhile has another stamp at the next look.
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(KeysError::NotAFile {
            path: path.to_owned(),
        });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeysError::Open {
            path: path.to_owned(),
            mode,
        });
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    let text = String::from_utf8(bytes).map_err(|_| KeysError::NotText {
        path: path.to_owned(),
    })?;
    let ring = KeyRing::parse(&text).map_err(|reason| KeysError::Unreadable {
        path: path.to_owned(),
        reason,
    })?;
    Ok(Some((ring, Stamp::of(&metadata))))
}

/// Writes a file with one new key unless there is a file by then. It appears whole or not at
/// all: it is written and flushed under another name and then linked.
fn create(path: &Path, now: Time) -> Result<(), KeysError> {
    let failed = |source| KeysError::Create {
        path: path.to_owned(),
        source,
    };
    let text = KeyRing::generate(now).map_err(|e| failed(io::Error::other(e)))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(failed)?;
    let mut file = tempfile::Builder::new()
        .prefix(".keys-")
        .tempfile_in(folder)
        .map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    match file.persist_noclobber(path) {
        Ok(_) => {}
        // Somebody else was faster; theirs it is.
        Err(error) if error.error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(failed(error.error)),
    }
    let folder = File::open(folder).map_err(failed)?;
    folder.sync_all().map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use ibid::ids::{JobId, UserId};
    use ibid::link::Link;
    use tempfile::TempDir;

    use super::*;

    const NOW: Time = Time::from_seconds(1_800_000_000);

    /// 32 bytes, so that a test can look for them in what is said.
    const SECRET: &str = "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U";

    fn folder() -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data/keys");
        (folder, path)
    }

    /// Puts a file there as an operator does: written aside and renamed.
    fn put(path: &Path, text: impl AsRef<[u8]>, mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let aside = path.with_extension("new");
        fs::write(&aside, text).unwrap();
        fs::set_permissions(&aside, Permissions::from_mode(mode)).unwrap();
        fs::rename(&aside, path).unwrap();
    }

    /// A link by which one ring is told from another.
    fn sample(ring: &KeyRing) -> String {
        ring.sign(&Link {
            job: JobId::from_bytes([1; 16]),
            user: UserId::parse("u").unwrap(),
            exp: 1_800_000_100,
        })
    }

    fn refusal(path: &Path) -> String {
        match KeyStore::open_or_create(path, NOW) {
            Ok(_) => panic!("it was taken"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_missing_file_is_made_for_its_owner_only_and_kept() {
        let (folder, path) = folder();
        let made = KeyStore::open_or_create(&path, NOW).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        let data = folder.path().join("data");
        assert_eq!(fs::metadata(&data).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(fs::read_dir(&data).unwrap().count(), 1);
        let again = KeyStore::open_or_create(&path, NOW).unwrap();
        assert_eq!(sample(&made.ring()), sample(&again.ring()));
    }

    #[test]
    fn all_who_start_at_once_have_the_same_keys() {
        let (_folder, path) = folder();
        let starters: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || {
                    sample(&KeyStore::open_or_create(&path, NOW).unwrap().ring())
                })
            })
            .collect();
        let mut samples: Vec<String> = starters.into_iter().map(|s| s.join().unwrap()).collect();
        samples.dedup();
        assert_eq!(samples.len(), 1);
    }

    #[test]
    fn a_file_that_others_can_use_is_refused() {
        let (_folder, path) = folder();
        for mode in [0o640, 0o604, 0o620, 0o602, 0o601, 0o644] {
            put(&path, KeyRing::generate(NOW).unwrap(), mode);
            let refusal = refusal(&path);
            let advice = format!("chmod 600 {}", path.display());
            assert!(refusal.contains(&advice), "{refusal}");
        }
        put(&path, KeyRing::generate(NOW).unwrap(), 0o400);
        KeyStore::open_or_create(&path, NOW).unwrap();
    }

    #[test]
    fn a_file_that_is_no_ring_is_refused_by_its_line_and_without_its_secret() {
        let (_folder, path) = folder();
        let line = format!("\nkey yesterday {SECRET}\n");
        put(&path, line, 0o600);
        let text = refusal(&path);
        assert!(text.contains("line 2: "), "{text}");
        assert!(text.contains(path.to_str().unwrap()), "{text}");
        assert!(!text.contains(&SECRET[..8]), "{text}");
        put(&path, "", 0o600);
        assert!(refusal(&path).contains("there is no key"));
        put(&path, b"\xff\xfe", 0o600);
        assert!(refusal(&path).contains("is not text"));
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let (_folder, path) = folder();
        fs::create_dir_all(&path).unwrap();
        assert!(refusal(&path).contains("is not a file"));
        fs::remove_dir(&path).unwrap();
        let cwd = rustix::fs::CWD;
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(cwd, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(refusal(&path).contains("is not a file"));
    }

    #[test]
    fn a_new_file_is_taken_and_a_bad_one_is_not() {
        let (_folder, path) = folder();
        let store = KeyStore::open_or_create(&path, NOW).unwrap();
        let first = sample(&store.ring());
        store.reload_if_changed();
        assert_eq!(sample(&store.ring()), first);

        put(&path, KeyRing::generate(NOW).unwrap(), 0o600);
        store.reload_if_changed();
        let second = sample(&store.ring());
        assert_ne!(second, first);

        let third = KeyRing::generate(NOW).unwrap();
        put(&path, "nonsense", 0o600);
        store.reload_if_changed();
        put(&path, &third, 0o644);
        store.reload_if_changed();
        assert_eq!(sample(&store.ring()), second);
        // The same bytes with the right mode are another state of the file.
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        store.reload_if_changed();
        let ring = KeyRing::parse(&third).unwrap();
        assert_eq!(sample(&store.ring()), sample(&ring));

        fs::remove_file(&path).unwrap();
        store.reload_if_changed();
        assert_eq!(sample(&store.ring()), sample(&ring));
        put(&path, KeyRing::generate(NOW).unwrap(), 0o600);
        store.reload_if_changed();
        assert_ne!(sample(&store.ring()), sample(&ring));
    }

    #[test]
    fn a_check_makes_nothing() {
        let (_folder, path) = folder();
        assert!(check(&path).unwrap().is_none());
        assert!(!path.parent().unwrap().exists());
    }
}
