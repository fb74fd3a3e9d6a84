//! Files beside the one that is fetched, and how it gets its name.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;

use super::ClientError;

/// `output` with another ending behind its own.
pub fn beside(output: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(output);
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}

/// Makes what happened to the folder of `path` survive a power cut.
///
/// # Errors
/// The folder cannot be opened or flushed.
pub fn flush_folder(path: &Path) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder)?.sync_all()
}

/// Refuses a name that stands for something that must not be replaced.
///
/// # Errors
/// There is a file and `replace` is not given, or there is something that is no file.
pub fn refuse_taken(output: &Path, replace: bool) -> Result<(), ClientError> {
    let refuse = |why: &str| ClientError::File {
        path: output.to_owned(),
        why: why.to_owned(),
    };
    match output.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => Err(refuse("it is a folder; name a file in it")),
        Ok(_) if !replace => Err(ClientError::Taken(output.to_owned())),
        _ if output.file_name().is_none() || output.as_os_str() == "-" => {
            Err(refuse("this names no file; name one"))
        }
        _ => Ok(()),
    }
}

/// Opens the file at `path`, for its owner only, and locks it, or gives `None` if another process
/// has. The lock ends with the file.
///
/// # Errors
/// It cannot be created.
pub fn locked(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // Between the two calls its last holder may have removed it.
        let (ours, there) = (file.metadata()?, std::fs::metadata(path));
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
            return Ok(Some(file));
        }
    }
}

/// Gives a file its name.
///
/// # Errors
/// [`ErrorKind::AlreadyExists`]: there is one and `replace` is not given.
pub(super) fn rename(from: &Path, to: &Path, replace: bool) -> io::Result<()> {
    if replace {
        return std::fs::rename(from, to);
    }
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some file systems cannot do both at once; a look before is the next best.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match to.symlink_metadata() {
            Ok(_) => Err(ErrorKind::AlreadyExists.into()),
            Err(_) => std::fs::rename(from, to),
        },
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_name_of_a_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for bad in [folder.path(), Path::new("-"), Path::new("..")] {
            assert!(refuse_taken(bad, true).is_err(), "{bad:?}");
        }
        refuse_taken(&folder.path().join("new"), false).unwrap();
    }

    #[test]
    fn a_file_is_held_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let held = locked(&path).unwrap().unwrap();
        assert!(locked(&path).unwrap().is_none());
        drop(held);
        assert!(locked(&path).unwrap().is_some());
    }
}
