//! A link into a file: goes on where a connection broke, and never splices two files.

mod link;
mod run;

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use super::ClientError;
use super::part_file::PartFile;

pub use link::Link;
use run::{Run, blocking};

/// How a file is fetched.
#[derive(Clone, Debug)]
pub struct Fetch {
    /// Connections at the same time, where the server takes ranges.
    pub connections: NonZeroU32,
    /// Whether a file that is there already may be replaced.
    pub replace: bool,
    /// What the file must be; by default what the server says in `Repr-Digest` (RFC 9530).
    pub expected: Option<Expected>,
    /// How long to go on trying while no byte comes.
    pub patience: Duration,
    /// How long a connection may be silent before it counts as broken.
    pub silence: Duration,
}

impl Default for Fetch {
    fn default() -> Fetch {
        Fetch {
            connections: NonZeroU32::MIN,
            replace: false,
            expected: None,
            patience: Duration::from_secs(60),
            silence: Duration::from_secs(30),
        }
    }
}

/// What a file must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// SHA-256 of its bytes.
    pub sha256: [u8; 32],
    /// Its length in bytes, if that is known.
    pub bytes: Option<u64>,
}

/// A file that was fetched and is what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Its length in bytes.
    pub bytes: u64,
    /// SHA-256 of its bytes.
    pub sha256: [u8; 32],
    /// How many of its bytes an earlier run had fetched.
    pub resumed: u64,
}

/// What happens on the way.
#[derive(Debug)]
pub enum FetchEvent<'a> {
    /// So many bytes are there.
    There {
        /// Bytes so far.
        bytes: u64,
        /// Bytes in all.
        of: u64,
    },
    /// It will be tried again, and why.
    Waiting(&'a ClientError),
    /// What was there is thrown away, and why.
    Anew(&'a str),
    /// All is there, and is read once more to see whether it is right.
    Verifying,
}

/// Who watches.
pub type Observer<'a> = &'a (dyn Fn(FetchEvent<'_>) + Sync);

impl Fetch {
    /// Fetches what `link` leads to into the file `output`.
    ///
    /// The bytes are gathered in `FILE.part`, and what is known of them in `FILE.part.json`; the
    /// same call goes on from there, also in another process and with another link, and throws
    /// them away if the server has another file by then. FILE appears whole, right by its
    /// SHA-256, safe on the disk, or not at all.
    ///
    /// # Errors
    /// The server refuses, does not answer for as long as [`Fetch::patience`], or contradicts
    /// itself; or the file cannot be written. But for [`ClientError::WrongBytes`] what is there
    /// is kept.
    pub async fn into_file(
        &self,
        link: Link<'_>,
        output: &Path,
        observe: Observer<'_>,
    ) -> Result<Fetched, ClientError> {
        let (path, replace) = (output.to_owned(), self.replace);
        let part = blocking(move || PartFile::open(&path, replace)).await?;
        Run::new(self, &link, observe).all(part).await
    }
}
