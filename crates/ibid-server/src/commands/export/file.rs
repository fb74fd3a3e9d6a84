//! The file on its way: written aside, checked, and only then there under its name.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::api::Artefact;
use crate::commands::Failure;

/// `output` with another ending behind its own.
pub fn beside(output: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(output);
    name.push(".");
    name.push(ending);
    PathBuf::from(name)
}

/// Makes what happened to the folder of `path` survive a power cut.
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
/// There is a file and `force` is not given, or there is something that is no file.
pub fn refuse_taken(output: &Path, force: bool) -> Result<(), Failure> {
    let shown = output.display();
    match output.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => Err(Failure::usage(format!(
            "{shown} is a folder; name a file in it with -o"
        ))),
        Ok(_) if !force => Err(taken(output)),
        _ if output.file_name().is_none() || output.as_os_str() == "-" => Err(Failure::usage(
            "the export is written to a file; name one with -o",
        )),
        _ => Ok(()),
    }
}

fn taken(output: &Path) -> Failure {
    Failure::failed(format!(
        "{} is there already; name another file with -o, or replace it with --force",
        output.display()
    ))
}

/// The file `FILE.part`. It is deleted unless it becomes FILE.
pub struct PartFile {
    output: PathBuf,
    path: PathBuf,
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl PartFile {
    /// Begins it anew, for its owner only: a chat is nobody else's.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn create(output: &Path) -> Result<PartFile, Failure> {
        let path = beside(output, "part");
        let create = || {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
        };
        let file = create().map_err(|e| unwritable(&path, &e))?;
        Ok(PartFile {
            output: output.to_owned(),
            path,
            file,
            hash: Sha256::new(),
            bytes: 0,
        })
    }

    /// How much is written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes on.
    ///
    /// # Errors
    /// The disk does not take it.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file
            .write_all(bytes)
            .map_err(|e| unwritable(&self.path, &e))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Lets it become FILE if it is the artefact, byte for byte.
    ///
    /// # Errors
    /// It is not, or FILE has come to be meanwhile and `force` is not given.
    pub fn finish(&mut self, artefact: &Artefact, force: bool) -> Result<(), Failure> {
        let sha256 = hex::encode(self.hash.clone().finalize());
        if self.bytes != artefact.bytes || sha256 != artefact.sha256 {
            return Err(Failure::failed(format!(
                "what was downloaded is not the export ({} bytes with sha256 {sha256} instead of \
                 {} bytes with {}); the same command fetches it again",
                self.bytes, artefact.bytes, artefact.sha256
            )));
        }
        let unwritable = |e: io::Error| unwritable(&self.output, &e);
        self.file.sync_all().map_err(unwritable)?;
        match rename(&self.path, &self.output, force) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(taken(&self.output)),
            Err(error) => Err(unwritable(error)),
            Ok(()) => flush_folder(&self.output).map_err(unwritable),
        }
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        // After it became FILE there is none.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn rename(from: &Path, to: &Path, force: bool) -> io::Result<()> {
    if force {
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

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::failed(format!(
        "cannot write {}: {error}; make room or name another file with -o, then run the same \
         command again",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn artefact() -> Artefact {
        Artefact {
            sha256: hex::encode(Sha256::digest("hello")),
            bytes: 5,
            messages: 1,
            url: String::new(),
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_whole_file_gets_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        fs::write(folder.path().join("out.gz.part"), "left over").unwrap();
        let mut part = PartFile::create(&output).unwrap();
        part.write(b"hel").unwrap();
        part.write(b"lo").unwrap();
        assert!(!output.exists());
        part.finish(&artefact(), false).unwrap();
        drop(part);
        assert_eq!(fs::read(&output).unwrap(), b"hello");
        assert_eq!(names(folder.path()), ["out.gz"]);
    }

    #[test]
    fn a_wrong_file_never_gets_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        for wrong in ["hell", "hello!", "hallo", ""] {
            let mut part = PartFile::create(&output).unwrap();
            part.write(wrong.as_bytes()).unwrap();
            part.finish(&artefact(), true).unwrap_err();
        }
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[test]
    fn a_file_that_is_there_is_replaced_only_by_force() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let download = |force| {
            let mut part = PartFile::create(&output).unwrap();
            part.write(b"hello").unwrap();
            fs::write(&output, "mine").unwrap();
            part.finish(&artefact(), force)
        };
        let failure = download(false).unwrap_err();
        assert!(failure.message.contains("--force"), "{failure:?}");
        assert_eq!(fs::read(&output).unwrap(), b"mine");
        assert!(refuse_taken(&output, false).is_err());
        refuse_taken(&output, true).unwrap();
        download(true).unwrap();
        assert_eq!(fs::read(&output).unwrap(), b"hello");
        assert_eq!(names(folder.path()), ["out.gz"]);
    }

    #[test]
    fn what_is_no_name_of_a_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for bad in [folder.path(), Path::new("-"), Path::new("..")] {
            assert!(refuse_taken(bad, true).is_err(), "{bad:?}");
        }
        refuse_taken(&folder.path().join("new"), false).unwrap();
    }
}
