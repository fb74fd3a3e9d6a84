//! The file on its way: written aside, checked, and only then there under its name.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::ClientError;
use super::answer::About;
use super::files::{beside, flush_folder, locked, refuse_taken, rename};
use super::spans::Spans;

/// How often what is known is written down: so much is fetched again after a power cut.
pub(super) const SAVE: Duration = Duration::from_secs(1);

/// More than what is known of any file takes: a hundred pieces are a few kilobytes.
const MAX_KNOWN_BYTES: u64 = 1024 * 1024;

/// `FILE.part`, and in `FILE.part.json` what is known of it. It is locked: as long as it is held,
/// nobody else works on FILE. One that holds nothing is deleted when it is let go.
pub(super) struct PartFile {
    output: PathBuf,
    path: PathBuf,
    file: File,
    known: Option<Known>,
    saved: Instant,
    /// Whether there is more than is written down.
    unsaved: bool,
    replace: bool,
    finished: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    about: About,
    /// The bytes that are there.
    done: Spans,
}

impl PartFile {
    /// Opens the one beside `output`, or begins it.
    ///
    /// # Errors
    /// `output` must not be written, another process works on it, or there is a `FILE.part` of
    /// somebody else.
    pub(super) fn open(output: &Path, replace: bool) -> Result<PartFile, ClientError> {
        refuse_taken(output, replace)?;
        let path = beside(output, "part");
        let refuse = |why: String| ClientError::File {
            path: path.clone(),
            why,
        };
        let file = locked(&path).map_err(|e| unwritable(&path, &e))?;
        let file = file.ok_or_else(|| {
            refuse("another process fetches this file; wait for it, or name another".to_owned())
        })?;
        let length = file.metadata().map_err(|e| unwritable(&path, &e))?.len();
        let known = match read_known(&beside(&path, "json")) {
            Ok(known) => known,
            // What one does not know to be one's own is not overwritten.
            Err(error) if error.kind() == ErrorKind::NotFound && length > 0 => {
                return Err(refuse(
                    "this is no unfinished download of this program; move it away, or name \
                     another file"
                        .to_owned(),
                ));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(unwritable(&path, &error)),
        };
        let fits =
            |known: &Known| known.done.are_within(known.about.length) && known.done.end() <= length;
        Ok(PartFile {
            output: output.to_owned(),
            path,
            file,
            known: known.filter(fits),
            saved: Instant::now(),
            unsaved: false,
            replace,
            finished: false,
        })
    }

    /// Of which file it is, and how much of that is there, unless it holds nothing.
    pub(super) fn known(&self) -> Option<(&About, u64)> {
        let known = self.known.as_ref()?;
        let there = known.done.total();
        (there > 0).then_some((&known.about, there))
    }

    /// Of which file it is, or is going to be.
    pub(super) fn about(&self) -> Option<&About> {
        self.known.as_ref().map(|known| &known.about)
    }

    /// What is missing; nothing is known to be where it is not known of which file it is.
    pub(super) fn missing(&self) -> Vec<Range<u64>> {
        let missing = |known: &Known| known.done.missing(known.about.length);
        self.known.as_ref().map(missing).unwrap_or_default()
    }

    /// Throws away what is there.
    pub(super) fn forget(&mut self) {
        self.known = None;
    }

    /// Begins anew, with another file.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(super) fn begin(&mut self, about: About) -> Result<(), ClientError> {
        self.known = Some(Known {
            about,
            done: Spans::default(),
        });
        let begun = self.file.set_len(0);
        begun.map_err(|e| unwritable(&self.path, &e))?;
        self.save()
    }

    /// Writes what belongs at `offset`, and now and then down what is known; nothing is good for
    /// that too.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ClientError> {
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(|e| unwritable(&self.path, &e))?;
        if let Some(known) = self.known.as_mut().filter(|_| !bytes.is_empty()) {
            known.done.add(offset..offset + bytes.len() as u64);
            self.unsaved = true;
        }
        if self.unsaved && self.saved.elapsed() >= SAVE {
            self.save()?;
        }
        Ok(())
    }

    /// Writes down what is known: the bytes first, since a note of them says that they are there.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(super) fn save(&mut self) -> Result<(), ClientError> {
        let path = beside(&self.path, "json");
        let save = || -> io::Result<()> {
            self.file.sync_data()?;
            let aside = beside(&path, "new");
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&aside)?;
            file.write_all(&serde_json::to_vec(&self.known)?)?;
            file.sync_data()?;
            std::fs::rename(&aside, &path)
        };
        let saved = save();
        self.saved = Instant::now();
        self.unsaved = false;
        saved.map_err(|e| unwritable(&path, &e))
    }

    /// The SHA-256 of what is on the disk, all of which is read.
    ///
    /// # Errors
    /// The disk does not give it.
    pub(super) fn sha256(&mut self) -> Result<[u8; 32], ClientError> {
        let length = self.known.as_ref().map_or(0, |known| known.about.length);
        let mut digest = || -> io::Result<[u8; 32]> {
            // A server may have sent more before it was found out.
            self.file.set_len(length)?;
            self.file.rewind()?;
            let mut hash = Sha256::new();
            let mut buffer = vec![0; 1 << 20];
            loop {
                let n = self.file.read(&mut buffer)?;
                match buffer.get(..n) {
                    Some(read) if n > 0 => hash.update(read),
                    _ => return Ok(hash.finalize().into()),
                }
            }
        };
        digest().map_err(|e| ClientError::File {
            path: self.path.clone(),
            why: format!("it cannot be read again: {e}; look at the disk"),
        })
    }

    /// Lets it become FILE, safe on the disk.
    ///
    /// # Errors
    /// FILE has come to be meanwhile and must not be replaced, or the disk does not take it.
    pub(super) fn finish(mut self) -> Result<(), ClientError> {
        let unwritable = |e: io::Error| unwritable(&self.output, &e);
        self.file.sync_all().map_err(unwritable)?;
        match rename(&self.path, &self.output, self.replace) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(ClientError::Taken(self.output.clone()));
            }
            other => other.map_err(unwritable)?,
        }
        let _ = std::fs::remove_file(beside(&self.path, "json"));
        flush_folder(&self.output).map_err(unwritable)?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.finished && self.known().is_none() {
            let _ = std::fs::remove_file(beside(&self.path, "json"));
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What is written down; nothing, if that is damaged.
fn read_known(path: &Path) -> io::Result<Option<Known>> {
    let mut text = Vec::new();
    let file = File::open(path)?;
    file.take(MAX_KNOWN_BYTES).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text).unwrap_or_default())
}

fn unwritable(path: &Path, error: &io::Error) -> ClientError {
    ClientError::File {
        path: path.to_owned(),
        why: format!("it cannot be written: {error}; make room, or name another file"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn about() -> About {
        About {
            length: 5,
            validator: Some("\"a\"".to_owned()),
            sha256: None,
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_fetched_is_there_for_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let mut part = PartFile::open(&output, false).unwrap();
        assert!(PartFile::open(&output, false).is_err(), "it is held");
        part.begin(about()).unwrap();
        part.write(3, b"lo").unwrap();
        part.write(0, b"h").unwrap();
        part.save().unwrap();
        drop(part);
        let mut part = PartFile::open(&output, false).unwrap();
        assert_eq!(part.known(), Some((&about(), 3)));
        assert_eq!(part.missing(), vec![1..3; 1]);
        part.write(1, b"el").unwrap();
        assert_eq!(part.missing(), []);
        let sha256: [u8; 32] = Sha256::digest("hello").into();
        assert_eq!(part.sha256().unwrap(), sha256);
        assert!(!output.exists());
        part.finish().unwrap();
        assert_eq!(fs::read(&output).unwrap(), b"hello");
        assert_eq!(names(folder.path()), ["out.gz"]);
    }

    #[test]
    fn one_that_holds_nothing_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let mut part = PartFile::open(&output, false).unwrap();
        part.begin(about()).unwrap();
        part.write(0, b"he").unwrap();
        part.forget();
        drop(part);
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[test]
    fn what_contradicts_itself_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        for damaged in [
            "",
            "null",
            "{}",
            // More than there is.
            r#"{"about":{"length":5,"validator":null,"sha256":null},"done":[[0,4]]}"#,
            r#"{"about":{"length":2,"validator":null,"sha256":null},"done":[[0,3]]}"#,
        ] {
            fs::write(folder.path().join("out.gz.part"), "hel").unwrap();
            fs::write(folder.path().join("out.gz.part.json"), damaged).unwrap();
            let part = PartFile::open(&output, false).unwrap();
            assert_eq!(part.known(), None, "{damaged}");
        }
    }

    #[test]
    fn a_file_of_somebody_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        fs::write(folder.path().join("out.gz.part"), "mine").unwrap();
        assert!(PartFile::open(&output, false).is_err());
        assert_eq!(names(folder.path()), ["out.gz.part"]);
        fs::remove_file(folder.path().join("out.gz.part")).unwrap();
        let mut part = PartFile::open(&output, false).unwrap();
        part.begin(about()).unwrap();
        part.write(0, b"hello").unwrap();
        fs::write(&output, "mine").unwrap();
        assert!(part.finish().is_err());
        assert_eq!(fs::read(&output).unwrap(), b"mine");
        assert!(PartFile::open(&output, false).is_err());
        PartFile::open(&output, true).unwrap().finish().unwrap();
        assert_eq!(fs::read(&output).unwrap(), b"hello");
    }

    #[test]
    fn it_is_for_its_owner_only() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.gz");
        let mut part = PartFile::open(&output, false).unwrap();
        part.begin(about()).unwrap();
        for name in ["out.gz.part", "out.gz.part.json"] {
            let mode = fs::metadata(folder.path().join(name)).unwrap().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }
}
