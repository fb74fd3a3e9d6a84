//! Where the log is: who was where when, and what was said.

pub mod postgres;
pub mod sqlite;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::append::{Names, Outcome};
use crate::event::{Event, Invalid};
use crate::ids::{ConvId, JobId, UserId};
use crate::render::Message;
use crate::scope::Scope;
use crate::snapshot::{Revised, Snapshot, Window};
use crate::time::Time;

/// The log of a chat application.
///
/// Entries are only ever added, in an order that all of them share (`gseq`).
#[async_trait]
pub trait Source: Send + Sync {
    /// Appends the events of a batch in order, all or none of them, and says what became of
    /// each. With `skip_invalid` an invalid one is skipped; else it fails the batch.
    async fn append(&self, batch: Batch) -> Result<Vec<Outcome>, SourceError>;

    /// Adds to `names` what the log knows of these conversations and ids.
    async fn learn(
        &self,
        names: Names,
        convs: Vec<ConvId>,
        ids: Vec<String>,
    ) -> Result<Names, SourceError>;

    /// How far the file with this digest has been imported; `None` if never begun.
    async fn imported(&self, digest: [u8; 32]) -> Result<Option<Imported>, SourceError>;

    /// Declares the first load finished, whatever files were begun and given up.
    async fn end_load(&self) -> Result<(), SourceError>;

    /// Takes what `user` may see of `scope` now, and pins its snapshot for `job` of `ledger`, all
    /// in one transaction that is safe on disk when this returns.
    ///
    /// A pin is how a log that lies elsewhere than the ledger proves that it is still the one
    /// from which a job was created. A log that went back to an older state (another server
    /// took over before it had all, a backup was restored) has lost the pin together with what
    /// the job was to hold.
    ///
    /// # Errors
    /// See [`TakeError`]; nothing is pinned then.
    async fn take(
        &self,
        job: JobId,
        ledger: &str,
        user: &UserId,
        scope: &Scope,
    ) -> Result<Sight, TakeError>;

    /// Whether this very snapshot is pinned for `job`.
    async fn pinned(&self, job: JobId, snapshot: &Snapshot) -> Result<bool, SourceError>;

    /// Jobs of `ledger` that have had a pin for longer than `age`, in their order, at most `limit`,
    /// from the one after `after` on. Others may read the log, too.
    async fn pins(
        &self,
        ledger: &str,
        age: Duration,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<JobId>, SourceError>;

    /// Takes the pin of a job away that no worker will touch any more.
    async fn unpin(&self, job: JobId) -> Result<(), SourceError>;

    /// Reads messages in their order from `place` on, as `windows` show them in `snapshot`, into
    /// `page`, whose content is overwritten: at least one, and no more than fit a page. Every call is one short transaction; since the
    /// snapshot is data, pages of different transactions agree.
    ///
    /// # Errors
    /// [`SourceError::LogChanged`] if the log no longer holds what the snapshot says.
    async fn page(
        &self,
        snapshot: &Snapshot,
        windows: &Arc<Windows>,
        place: Place,
        page: Page,
    ) -> Result<Page, SourceError>;

    /// Whether the account is enabled; one that no event names is.
    async fn account_enabled(&self, user: &UserId) -> Result<bool, SourceError>;

    /// Enables or disables an account: the event `account`.
    async fn set_account(&self, user: &UserId, enabled: bool) -> Result<(), SourceError>;
}

/// Events to append in one transaction, each with the number of its line.
#[derive(Clone, Debug)]
pub struct Batch {
    pub events: Vec<(u64, Event)>,
    pub skip_invalid: bool,
    /// Recorded in the same transaction, so that an interrupted import goes on where it was.
    pub import: Option<Progress>,
}

/// How far an import is once its batch is committed.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub digest: [u8; 32],
    /// Where the batch begins: so many lines must be recorded before it.
    pub after_line: u64,
    pub lines: u64,
    pub finished: bool,
    /// The batch may begin a file anew that is finished.
    pub again: bool,
}

impl Progress {
    /// Whether the batch goes on where the import is. To be asked in the batch's transaction,
    /// so that two imports of one file at the same time do not write a line twice.
    ///
    /// # Errors
    /// [`SourceError::ImportElsewhere`].
    pub fn follows(&self, recorded: Option<Imported>) -> Result<(), SourceError> {
        let follows = match recorded {
            None => self.after_line == 0,
            Some(recorded) if recorded.finished => self.again && self.after_line == 0,
            Some(recorded) => recorded.lines == self.after_line,
        };
        if follows {
            Ok(())
        } else {
            Err(SourceError::ImportElsewhere)
        }
    }
}

/// How far an import was when somebody looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Imported {
    pub lines: u64,
    pub finished: bool,
}

/// What a user sees at one moment.
#[derive(Clone, Debug)]
pub struct Sight {
    pub snapshot: Snapshot,
    pub windows: Windows,
}

/// All that a job's user may see, in order of conversation.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Windows(Vec<Window>);

/// The place of a message in the order of an artefact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Index of the window.
    pub window: usize,
    pub seq: u64,
}

impl Windows {
    /// Takes windows in any order and sorts them by conversation, bytewise. Windows without
    /// messages are left out.
    pub fn new(mut windows: Vec<Window>) -> Windows {
        for window in &mut windows {
            window.stays.sort_by_key(|stay| stay.first_seq);
        }
        windows.retain(|window| window.messages() > 0);
        windows.sort_by(|a, b| a.conv.cmp(&b.conv));
        Windows(windows)
    }

    pub fn get(&self, index: usize) -> Option<&Window> {
        self.0.get(index)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Window> {
        self.0.iter()
    }

    pub fn messages(&self) -> u64 {
        self.0.iter().map(Window::messages).sum()
    }

    /// The place of the first message, or `None` if there is none.
    pub fn first(&self) -> Option<Place> {
        self.at_or_after(Place { window: 0, seq: 0 })
    }

    /// The place of the message that follows the one at `place`.
    pub fn after(&self, place: Place) -> Option<Place> {
        self.at_or_after(Place {
            window: place.window,
            seq: place.seq + 1,
        })
    }

    /// Where the message `seq` of `conv` stands, if it is one that may be seen.
    pub fn find(&self, conv: &str, seq: u64) -> Option<Place> {
        let window = self
            .0
            .binary_search_by(|window| window.conv.as_str().cmp(conv))
            .ok()?;
        let place = Place { window, seq };
        (self.at_or_after(place) == Some(place)).then_some(place)
    }

    fn at_or_after(&self, place: Place) -> Option<Place> {
        let mut seq = place.seq;
        for (index, window) in self.0.iter().enumerate().skip(place.window) {
            if let Some(stay) = window.stay_at_or_after(seq) {
                return Some(Place {
                    window: index,
                    seq: seq.max(stay.first_seq),
                });
            }
            seq = 0;
        }
        None
    }
}

/// A page ends at this many messages or bytes of text, whichever comes first.
pub const PAGE_MESSAGES: usize = 1_000;
pub const PAGE_BYTES: usize = 512 * 1024;

/// Messages in their order, each with its place. Their texts lie in two buffers that are used
/// again from page to page, so that reading leaves no small pieces behind.
#[derive(Clone, Debug, Default)]
pub struct Page {
    rows: Vec<Row>,
    bodies: Vec<u8>,
    /// Users and files.
    texts: String,
}

#[derive(Clone, Debug)]
struct Row {
    place: Place,
    ts: Time,
    user: Range<usize>,
    body: Range<usize>,
    files: Option<Range<usize>>,
    edited: bool,
    recalled: bool,
}

impl Page {
    /// How many messages there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The bytes of all texts.
    pub fn bytes(&self) -> usize {
        self.bodies.len() + self.texts.len()
    }

    /// Forgets the messages and keeps the room.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.bodies.clear();
        self.texts.clear();
    }

    /// Adds a message at `place`, as it was sent.
    pub fn push(&mut self, place: Place, ts: Time, user: &str, body: &[u8], files: Option<&str>) {
        let row = Row {
            place,
            ts,
            user: self.keep_text(user),
            body: self.keep_body(body),
            files: files.map(|files| self.keep_text(files)),
            edited: false,
            recalled: false,
        };
        self.rows.push(row);
    }

    /// Applies what the revisions made of the message at `place`, if it is here.
    pub fn revise(&mut self, place: Place, revised: &Revised) {
        let Ok(at) = self.rows.binary_search_by_key(&place, |row| row.place) else {
            return;
        };
        let body = revised.body.as_ref().map(|body| self.keep_body(body));
        let row = &mut self.rows[at];
        row.edited = revised.edited;
        row.recalled = revised.recalled;
        if let Some(body) = body {
            row.body = body;
        }
    }

    /// Whether nothing more should be read into it.
    pub fn is_full(&self) -> bool {
        self.rows.len() >= PAGE_MESSAGES || self.bytes() >= PAGE_BYTES
    }

    /// Leaves out what comes after `last`.
    pub fn cut_after(&mut self, last: Place) {
        let kept = self.rows.partition_point(|row| row.place <= last);
        self.rows.truncate(kept);
    }

    /// The place of the last message.
    pub fn last(&self) -> Option<Place> {
        self.rows.last().map(|row| row.place)
    }

    /// The message at `index`, and its place.
    pub fn get(&self, index: usize) -> Option<(Place, Message<'_>)> {
        let row = self.rows.get(index)?;
        let message = Message {
            seq: row.place.seq,
            ts: row.ts,
            user: &self.texts[row.user.clone()],
            body: &self.bodies[row.body.clone()],
            files: row.files.clone().map(|files| &self.texts[files]),
            edited: row.edited,
            recalled: row.recalled,
        };
        Some((row.place, message))
    }

    fn keep_text(&mut self, text: &str) -> Range<usize> {
        let from = self.texts.len();
        self.texts.push_str(text);
        from..self.texts.len()
    }

    fn keep_body(&mut self, body: &[u8]) -> Range<usize> {
        let from = self.bodies.len();
        self.bodies.extend_from_slice(body);
        from..self.bodies.len()
    }
}

/// A snapshot as a pin holds it.
fn snapshot_text(snapshot: &Snapshot) -> Result<String, SourceError> {
    serde_json::to_string(snapshot).map_err(|e| SourceError::Unavailable(e.to_string()))
}

/// Whether a pin holds this snapshot.
fn is_snapshot(text: &str, snapshot: &Snapshot) -> bool {
    serde_json::from_str::<Snapshot>(text).is_ok_and(|pinned| pinned == *snapshot)
}

/// Why nothing was taken from the log.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// The scope is a conversation in which the user never was.
    #[error("there is no such conversation for this user")]
    ScopeInvalid,
    #[error("a first load of the log is not finished")]
    Loading,
    #[error(transparent)]
    Source(#[from] SourceError),
}

/// Why the log could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// An event of a batch is invalid; nothing of the batch was written.
    #[error("line {line}: {invalid}")]
    Invalid { line: u64, invalid: Invalid },
    /// Another process has written lines of the same file meanwhile; nothing of the batch was
    /// written.
    #[error(
        "the same file is being imported by another process; wait for it, then run the same \
         command again to see that nothing is missing"
    )]
    ImportElsewhere,
    /// The log no longer holds what was in it when the export was created.
    #[error("the log was changed: {0}")]
    LogChanged(String),
    /// The database does not answer; it may later.
    #[error("{0}")]
    Unavailable(String),
    /// The database answers, but what it would say of the log now must not be relied on; the
    /// sentence says what to do.
    #[error("{0}")]
    Refused(String),
}

impl From<crate::sqlite::DbError> for SourceError {
    fn from(error: crate::sqlite::DbError) -> SourceError {
        match error.advice() {
            Some(what) => SourceError::Refused(what.to_owned()),
            None => SourceError::Unavailable(error.to_string()),
        }
    }
}

impl From<crate::sqlite::DbError> for TakeError {
    fn from(error: crate::sqlite::DbError) -> TakeError {
        SourceError::from(error).into()
    }
}

impl From<rusqlite::Error> for TakeError {
    fn from(error: rusqlite::Error) -> TakeError {
        SourceError::from(error).into()
    }
}

impl From<rusqlite::Error> for SourceError {
    fn from(error: rusqlite::Error) -> SourceError {
        crate::sqlite::DbError::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Stay;

    fn window(conv: &str, ranges: &[(u64, u64)]) -> Window {
        Window {
            conv: ConvId::parse(conv).unwrap(),
            stays: ranges
                .iter()
                .map(|(first_seq, last_seq)| Stay {
                    from_gseq: *first_seq,
                    to_gseq: None,
                    first_seq: *first_seq,
                    last_seq: *last_seq,
                })
                .collect(),
        }
    }

    #[test]
    fn places_walk_through_the_windows_in_order() {
        let windows = Windows::new(vec![
            window("b", &[(5, 6), (9, 9)]),
            window("empty", &[(3, 2)]),
            window("B", &[(1, 1)]),
        ]);
        let mut walked = Vec::new();
        let mut place = windows.first();
        while let Some(at) = place {
            walked.push((windows.get(at.window).unwrap().conv.to_string(), at.seq));
            place = windows.after(at);
        }
        let expected = [("B", 1), ("b", 5), ("b", 6), ("b", 9)];
        assert_eq!(walked, expected.map(|(conv, seq)| (conv.to_owned(), seq)));
        assert_eq!(windows.messages(), 4);
        assert_eq!(windows.find("b", 9), Some(Place { window: 1, seq: 9 }));
        assert_eq!(windows.find("b", 7), None);
        assert_eq!(windows.find("empty", 3), None);
        assert_eq!(Windows::default().first(), None);
    }
}
