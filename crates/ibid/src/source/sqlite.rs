//! The log in SQLite. There is one writer at a time, so gseq order is commit order and a
//! snapshot is the highest gseq.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use async_trait::async_trait;
use rusqlite::types::ValueRef;
use rusqlite::{OptionalExtension as _, Transaction, params};

use super::{
    Batch, Imported, Known, KnownId, Outcome, Page, Place, Progress, Source, SourceError, Windows,
    id_taken, no_such_message, not_a_message, unknown_message,
};
use crate::event::{Event, EventKind, ExMembers, File, History, Invalid, Target};
use crate::ids::{ConvId, UserId};
use crate::scope::Scope;
use crate::snapshot::{
    Policy, Revised, Revision, RevisionKind, Snapshot, Stay, Window, effective_stays,
};
use crate::sqlite::Db;
use crate::time::Time;

/// A page ends at this many messages or bytes of text, whichever comes first.
const PAGE_MESSAGES: usize = 1_000;
const PAGE_BYTES: usize = 512 * 1024;

/// The log in an SQLite file.
pub struct SqliteSource {
    db: Db,
}

impl SqliteSource {
    pub fn new(db: Db) -> SqliteSource {
        SqliteSource { db }
    }
}

#[async_trait]
impl Source for SqliteSource {
    async fn append(&self, batch: Batch) -> Result<Vec<Outcome>, SourceError> {
        self.db.write(move |tx| append(tx, &batch)).await
    }

    async fn known(&self, convs: Vec<ConvId>, ids: Vec<String>) -> Result<Known, SourceError> {
        self.db.read(move |tx| known(tx, convs, ids)).await
    }

    async fn imported(&self, digest: [u8; 32]) -> Result<Option<Imported>, SourceError> {
        self.db
            .read(move |tx| {
                let row = tx
                    .prepare_cached("SELECT lines, finished FROM import WHERE digest = ?1")?
                    .query_row([digest], |row| {
                        Ok(Imported {
                            lines: row.get(0)?,
                            finished: row.get(1)?,
                        })
                    })
                    .optional()?;
                Ok(row)
            })
            .await
    }

    async fn page(
        &self,
        snapshot: &Snapshot,
        windows: &Arc<Windows>,
        place: Place,
        mut page: Page,
    ) -> Result<Page, SourceError> {
        let (snapshot, windows) = (snapshot.clone(), Arc::clone(windows));
        self.db
            .read(move |tx| {
                page.clear();
                read_page(tx, &snapshot, &windows, place, &mut page)?;
                Ok(page)
            })
            .await
    }

    async fn account_enabled(&self, user: &UserId) -> Result<bool, SourceError> {
        let user = user.clone();
        self.db
            .read(move |tx| Ok(account_enabled(tx, &user)?))
            .await
    }

    async fn set_account(&self, user: &UserId, enabled: bool) -> Result<(), SourceError> {
        let kind = EventKind::Account {
            user: user.clone(),
            enabled,
        };
        let batch = Batch {
            events: vec![(1, Event { id: None, kind })],
            skip_invalid: false,
            import: None,
        };
        self.append(batch).await.map(drop)
    }
}

/// The snapshot as it is now: everything that is committed.
pub(crate) fn snapshot(tx: &Transaction<'_>) -> rusqlite::Result<Snapshot> {
    let gseq = tx
        .prepare_cached("SELECT gseq FROM log_counter")?
        .query_row([], |row| row.get(0))?;
    Ok(Snapshot::up_to(gseq))
}

/// Whether a first load of the log has begun and is not finished.
pub(crate) fn is_loading(tx: &Transaction<'_>) -> rusqlite::Result<bool> {
    tx.prepare_cached("SELECT EXISTS (SELECT 1 FROM import WHERE first = 1 AND finished = 0)")?
        .query_row([], |row| row.get(0))
}

/// What `user` may see of `scope` now, or `None` if it is a conversation in which the user
/// never was.
pub(crate) fn windows(
    tx: &Transaction<'_>,
    user: &UserId,
    scope: &Scope,
) -> Result<Option<Windows>, SourceError> {
    let only = match scope {
        Scope::All => None,
        Scope::Conv(conv) => Some(conv.as_str()),
    };
    // Two statements, because one with `?2 IS NULL OR` would not use the key.
    let sql = match only {
        Some(_) => {
            "SELECT s.conv, s.from_gseq, s.to_gseq, s.first_seq, coalesce(s.last_seq, c.last_seq),
                    c.history, c.ex_members
             FROM stay s JOIN conv c ON c.conv = s.conv
             WHERE s.user_id = ?1 AND s.conv = ?2 ORDER BY s.conv, s.from_gseq"
        }
        None => {
            "SELECT s.conv, s.from_gseq, s.to_gseq, s.first_seq, coalesce(s.last_seq, c.last_seq),
                    c.history, c.ex_members
             FROM stay s JOIN conv c ON c.conv = s.conv
             WHERE s.user_id = ?1 AND ?2 IS NULL ORDER BY s.conv, s.from_gseq"
        }
    };
    let mut statement = tx.prepare_cached(sql)?;
    let mut rows = statement.query(params![user.as_str(), only])?;
    let mut all: Vec<(ConvId, Policy, Vec<Stay>)> = Vec::new();
    while let Some(row) = rows.next()? {
        let conv = conv_id(row.get(0)?)?;
        let stay = Stay {
            from_gseq: row.get(1)?,
            to_gseq: row.get(2)?,
            first_seq: row.get(3)?,
            last_seq: row.get(4)?,
        };
        match all.last_mut() {
            Some((last, _, stays)) if *last == conv => stays.push(stay),
            _ => all.push((conv, policy(row.get(5)?, row.get(6)?), vec![stay])),
        }
    }
    if only.is_some() && all.is_empty() {
        return Ok(None);
    }
    let windows = all.into_iter().map(|(conv, policy, stays)| Window {
        conv,
        stays: effective_stays(stays, policy),
    });
    Ok(Some(Windows::new(windows.collect())))
}

pub(crate) fn account_enabled(tx: &Transaction<'_>, user: &UserId) -> rusqlite::Result<bool> {
    let enabled = tx
        .prepare_cached("SELECT enabled FROM account WHERE user_id = ?1")?
        .query_row([user.as_str()], |row| row.get(0))
        .optional()?;
    Ok(enabled.unwrap_or(true))
}

fn policy(history: String, ex_members: String) -> Policy {
    Policy {
        history: History::parse(&history).unwrap_or_default(),
        ex_members: ExMembers::parse(&ex_members).unwrap_or_default(),
    }
}

fn conv_id(text: String) -> Result<ConvId, SourceError> {
    ConvId::parse(text)
        .map_err(|reason| SourceError::LogChanged(format!("a conversation's id {reason}")))
}

// ---- reading

fn read_page(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    windows: &Windows,
    place: Place,
    page: &mut Page,
) -> Result<(), SourceError> {
    let mut next = Some(place);
    while let Some(place) = next {
        let Some(window) = windows.get(place.window) else {
            break;
        };
        let Some(stay) = window
            .stays
            .iter()
            .find(|stay| stay.first_seq <= place.seq && place.seq <= stay.last_seq)
        else {
            break;
        };
        read_stay(tx, snapshot, window, stay, place, page)?;
        let Some(last) = page.last() else {
            break;
        };
        revise(tx, snapshot, window, place, last.seq, page)?;
        next = windows.after(last);
        if is_full(page) {
            break;
        }
    }
    Ok(())
}

fn is_full(page: &Page) -> bool {
    page.len() >= PAGE_MESSAGES || page.bytes() >= PAGE_BYTES
}

/// Reads on in one stay until it ends or the page is full.
fn read_stay(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    window: &Window,
    stay: &Stay,
    place: Place,
    page: &mut Page,
) -> Result<(), SourceError> {
    let conv = window.conv.as_str();
    let mut statement = tx.prepare_cached(
        "SELECT seq, gseq, ts, user_id, body, files FROM message
         WHERE conv = ?1 AND seq >= ?2 AND seq <= ?3 ORDER BY seq",
    )?;
    let mut rows = statement.query(params![conv, place.seq, stay.last_seq])?;
    let mut expected = place;
    while expected.seq <= stay.last_seq {
        let missing = || {
            SourceError::LogChanged(format!(
                "message {} of conversation {conv:?} is missing",
                expected.seq
            ))
        };
        let row = rows.next()?.ok_or_else(missing)?;
        let (seq, gseq): (u64, u64) = (row.get(0)?, row.get(1)?);
        if seq != expected.seq {
            return Err(missing());
        }
        if !stay.contains(gseq) || !snapshot.contains(gseq, 0) {
            return Err(SourceError::LogChanged(format!(
                "message {seq} of conversation {conv:?} was not written when the log says"
            )));
        }
        let text = |index: usize| {
            row.get_ref(index)?
                .as_str_or_null()
                .map_err(rusqlite::Error::from)
        };
        let (user, files) = (text(3)?.unwrap_or_default(), text(5)?);
        let ts = Time::from_micros(row.get(2)?);
        page.push(expected, ts, user, &bytes_of(row.get_ref(4)?), files);
        expected.seq += 1;
        if is_full(page) {
            break;
        }
    }
    Ok(())
}

/// Applies the revisions that are in the snapshot to the messages of one window from `first` to
/// the one with `last_seq`.
fn revise(
    tx: &Transaction<'_>,
    snapshot: &Snapshot,
    window: &Window,
    first: Place,
    last_seq: u64,
    page: &mut Page,
) -> Result<(), SourceError> {
    let mut statement = tx.prepare_cached(
        "SELECT seq, gseq, kind, body FROM revision
         WHERE conv = ?1 AND seq >= ?2 AND seq <= ?3 ORDER BY seq, gseq",
    )?;
    let mut rows = statement.query(params![window.conv.as_str(), first.seq, last_seq])?;
    let mut at = first;
    let mut revised = Revised::default();
    while let Some(row) = rows.next()? {
        let (seq, gseq): (u64, u64) = (row.get(0)?, row.get(1)?);
        if !snapshot.contains(gseq, 0) {
            continue;
        }
        if at.seq != seq {
            page.revise(at, &revised);
            revised = Revised::default();
            at.seq = seq;
        }
        let kind = match row.get_ref(2)?.as_str() {
            Ok("edit") => RevisionKind::Edit {
                body: bytes_of(row.get_ref(3)?).into_owned(),
            },
            Ok("recall") => RevisionKind::Recall,
            _ => RevisionKind::Restore,
        };
        revised.apply(Revision { gseq, kind }, window);
    }
    page.revise(at, &revised);
    Ok(())
}

/// Text that another program wrote need not be UTF-8, nor need it be text.
fn bytes_of(value: ValueRef<'_>) -> Cow<'_, [u8]> {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Cow::Borrowed(bytes),
        ValueRef::Integer(number) => Cow::Owned(number.to_string().into_bytes()),
        ValueRef::Real(number) => Cow::Owned(number.to_string().into_bytes()),
        ValueRef::Null => Cow::Borrowed(b""),
    }
}

// ---- writing

/// What a batch has to know of a conversation.
struct ConvState {
    last_seq: u64,
    policy: Policy,
    /// Whether the row has to be written when the batch ends.
    dirty: bool,
    is_new: bool,
}

struct Appender<'a> {
    tx: &'a Transaction<'a>,
    gseq: u64,
    convs: HashMap<ConvId, ConvState>,
}

fn append(tx: &Transaction<'_>, batch: &Batch) -> Result<Vec<Outcome>, SourceError> {
    let before = snapshot(tx)?.high;
    let mut appender = Appender {
        tx,
        gseq: before,
        convs: HashMap::new(),
    };
    let mut outcomes = Vec::with_capacity(batch.events.len());
    for (line, event) in &batch.events {
        let outcome = appender.event(event)?;
        if let Outcome::Invalid(invalid) = &outcome
            && !batch.skip_invalid
        {
            return Err(SourceError::Invalid {
                line: *line,
                invalid: invalid.clone(),
            });
        }
        outcomes.push(outcome);
    }
    appender.finish()?;
    if let Some(progress) = &batch.import {
        record_import(tx, progress, before == 0)?;
    }
    Ok(outcomes)
}

fn record_import(
    tx: &Transaction<'_>,
    progress: &Progress,
    log_was_empty: bool,
) -> rusqlite::Result<()> {
    tx.prepare_cached(
        "INSERT INTO import (digest, lines, first, finished) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (digest) DO UPDATE SET lines = ?2, finished = ?4",
    )?
    .execute(params![
        progress.digest,
        progress.lines,
        log_was_empty,
        progress.finished
    ])?;
    if progress.finished {
        // Whatever file was begun on the empty log, a finished one ends the first load: one
        // that was begun and given up must not bar exports for ever.
        tx.execute("UPDATE import SET first = 0 WHERE first = 1", [])?;
    }
    Ok(())
}

impl Appender<'_> {
    fn event(&mut self, event: &Event) -> Result<Outcome, SourceError> {
        let digest = event.id.as_ref().map(|_| event.digest());
        if let (Some(id), Some(digest)) = (&event.id, &digest) {
            match known_id(self.tx, id)? {
                Some(known) if known.digest == *digest => return Ok(Outcome::Duplicate),
                Some(_) => return Ok(Outcome::Invalid(id_taken())),
                None => {}
            }
        }
        let outcome = self.kind(&event.kind)?;
        if let (Some(id), Some(digest)) = (&event.id, digest)
            && !matches!(outcome, Outcome::Invalid(_))
        {
            let assigned = match &outcome {
                Outcome::Accepted { assigned } => assigned.as_ref(),
                Outcome::Duplicate | Outcome::Unchanged | Outcome::Invalid(_) => None,
            };
            self.tx
                .prepare_cached(
                    "INSERT INTO event_id (id, digest, conv, seq) VALUES (?1, ?2, ?3, ?4)",
                )?
                .execute(params![
                    id,
                    digest,
                    assigned.map(|(conv, _)| conv.as_str()),
                    assigned.map(|(_, seq)| seq)
                ])?;
        }
        Ok(outcome)
    }

    fn kind(&mut self, kind: &EventKind) -> Result<Outcome, SourceError> {
        match kind {
            EventKind::Message {
                conv,
                user,
                ts,
                body,
                files,
            } => self.message(conv, user, *ts, body, files),
            EventKind::Edit { target, ts, body } => self.revision(target, *ts, "edit", Some(body)),
            EventKind::Recall { target, ts } => self.revision(target, *ts, "recall", None),
            EventKind::Restore { target, ts } => self.revision(target, *ts, "restore", None),
            EventKind::Join { conv, user, .. } => self.join(conv, user),
            EventKind::Leave { conv, user, .. } => self.leave(conv, user),
            EventKind::Account { user, enabled } => self.account(user, *enabled),
            EventKind::Conv {
                conv,
                history,
                ex_members,
            } => self.policy(conv, *history, *ex_members),
        }
    }

    fn message(
        &mut self,
        conv: &ConvId,
        user: &UserId,
        ts: Time,
        body: &str,
        files: &[File],
    ) -> Result<Outcome, SourceError> {
        let state = self.conv(conv)?;
        state.last_seq += 1;
        state.dirty = true;
        let seq = state.last_seq;
        let gseq = self.next_gseq();
        self.tx
            .prepare_cached(
                "INSERT INTO message (conv, seq, gseq, ts, user_id, body, files)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?
            .execute(params![
                conv.as_str(),
                seq,
                gseq,
                ts.micros(),
                user.as_str(),
                body,
                File::canonical(files)
            ])?;
        Ok(Outcome::Accepted {
            assigned: Some((conv.clone(), seq)),
        })
    }

    fn revision(
        &mut self,
        target: &Target,
        ts: Time,
        kind: &str,
        body: Option<&str>,
    ) -> Result<Outcome, SourceError> {
        let (conv, seq) = match self.resolve(target)? {
            Ok(message) => message,
            Err(invalid) => return Ok(Outcome::Invalid(invalid)),
        };
        if kind != "edit" {
            let latest: Option<String> = self
                .tx
                .prepare_cached(
                    "SELECT kind FROM revision
                     WHERE conv = ?1 AND seq = ?2 AND kind <> 'edit' ORDER BY gseq DESC LIMIT 1",
                )?
                .query_row(params![conv.as_str(), seq], |row| row.get(0))
                .optional()?;
            let recalled = latest.as_deref() == Some("recall");
            if recalled == (kind == "recall") {
                return Ok(Outcome::Unchanged);
            }
        }
        let gseq = self.next_gseq();
        self.tx
            .prepare_cached(
                "INSERT INTO revision (conv, seq, gseq, ts, kind, body)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?
            .execute(params![conv.as_str(), seq, gseq, ts.micros(), kind, body])?;
        Ok(Outcome::Accepted { assigned: None })
    }

    fn resolve(&mut self, target: &Target) -> Result<Result<(ConvId, u64), Invalid>, SourceError> {
        match target {
            Target::Seq { conv, seq } => {
                // Looked up and not created: an edit does not begin a conversation.
                let last_seq = match self.convs.get(conv) {
                    Some(state) => Some(state.last_seq),
                    None => last_seq(self.tx, conv)?,
                };
                Ok(match last_seq {
                    Some(last) if *seq <= last => Ok((conv.clone(), *seq)),
                    _ => Err(no_such_message(conv, *seq)),
                })
            }
            Target::Id(id) => {
                let row: Option<(Option<String>, Option<u64>)> = self
                    .tx
                    .prepare_cached("SELECT conv, seq FROM event_id WHERE id = ?1")?
                    .query_row([id], |row| Ok((row.get(0)?, row.get(1)?)))
                    .optional()?;
                match row {
                    Some((Some(conv), Some(seq))) => Ok(Ok((conv_id(conv)?, seq))),
                    Some(_) => Ok(Err(not_a_message(id))),
                    None => Ok(Err(unknown_message(id))),
                }
            }
        }
    }

    fn join(&mut self, conv: &ConvId, user: &UserId) -> Result<Outcome, SourceError> {
        let first_seq = self.conv(conv)?.last_seq + 1;
        let inside: bool = self
            .tx
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM stay
                 WHERE conv = ?1 AND user_id = ?2 AND to_gseq IS NULL)",
            )?
            .query_row([conv.as_str(), user.as_str()], |row| row.get(0))?;
        if inside {
            return Ok(Outcome::Unchanged);
        }
        let gseq = self.next_gseq();
        self.tx
            .prepare_cached(
                "INSERT INTO stay (user_id, conv, from_gseq, first_seq) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![user.as_str(), conv.as_str(), gseq, first_seq])?;
        Ok(Outcome::Accepted { assigned: None })
    }

    fn leave(&mut self, conv: &ConvId, user: &UserId) -> Result<Outcome, SourceError> {
        let last_seq = self.conv(conv)?.last_seq;
        let gseq = self.gseq + 1;
        let left = self
            .tx
            .prepare_cached(
                "UPDATE stay SET to_gseq = ?3, last_seq = ?4
                 WHERE conv = ?1 AND user_id = ?2 AND to_gseq IS NULL",
            )?
            .execute(params![conv.as_str(), user.as_str(), gseq, last_seq])?;
        if left == 0 {
            return Ok(Outcome::Unchanged);
        }
        self.gseq = gseq;
        Ok(Outcome::Accepted { assigned: None })
    }

    fn account(&mut self, user: &UserId, enabled: bool) -> Result<Outcome, SourceError> {
        if account_enabled(self.tx, user)? == enabled {
            return Ok(Outcome::Unchanged);
        }
        self.next_gseq();
        self.tx
            .prepare_cached(
                "INSERT INTO account (user_id, enabled) VALUES (?1, ?2)
                 ON CONFLICT (user_id) DO UPDATE SET enabled = ?2",
            )?
            .execute(params![user.as_str(), enabled])?;
        Ok(Outcome::Accepted { assigned: None })
    }

    fn policy(
        &mut self,
        conv: &ConvId,
        history: Option<History>,
        ex_members: Option<ExMembers>,
    ) -> Result<Outcome, SourceError> {
        let state = self.conv(conv)?;
        let policy = Policy {
            history: history.unwrap_or(state.policy.history),
            ex_members: ex_members.unwrap_or(state.policy.ex_members),
        };
        if state.policy == policy {
            return Ok(Outcome::Unchanged);
        }
        state.policy = policy;
        state.dirty = true;
        self.next_gseq();
        Ok(Outcome::Accepted { assigned: None })
    }

    fn next_gseq(&mut self) -> u64 {
        self.gseq += 1;
        self.gseq
    }

    /// The conversation, which its first event begins.
    fn conv(&mut self, conv: &ConvId) -> Result<&mut ConvState, SourceError> {
        match self.convs.entry(conv.clone()) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let row: Option<(u64, String, String)> = self
                    .tx
                    .prepare_cached(
                        "SELECT last_seq, history, ex_members FROM conv WHERE conv = ?1",
                    )?
                    .query_row([conv.as_str()], |row| {
                        Ok((row.get(0)?, row.get(1)?, row.get(2)?))
                    })
                    .optional()?;
                let is_new = row.is_none();
                let (last_seq, policy) = match row {
                    Some((last_seq, history, ex_members)) => {
                        (last_seq, policy(history, ex_members))
                    }
                    None => (0, Policy::default()),
                };
                Ok(entry.insert(ConvState {
                    last_seq,
                    policy,
                    dirty: is_new,
                    is_new,
                }))
            }
        }
    }

    fn finish(self) -> rusqlite::Result<()> {
        let mut insert = self.tx.prepare_cached(
            "INSERT INTO conv (last_seq, history, ex_members, conv) VALUES (?1, ?2, ?3, ?4)",
        )?;
        let mut update = self.tx.prepare_cached(
            "UPDATE conv SET last_seq = ?1, history = ?2, ex_members = ?3 WHERE conv = ?4",
        )?;
        for (conv, state) in self.convs.iter().filter(|(_, state)| state.dirty) {
            let statement = if state.is_new {
                &mut insert
            } else {
                &mut update
            };
            statement.execute(params![
                state.last_seq,
                state.policy.history.as_str(),
                state.policy.ex_members.as_str(),
                conv.as_str()
            ])?;
        }
        self.tx
            .prepare_cached("UPDATE log_counter SET gseq = ?1")?
            .execute([self.gseq])?;
        Ok(())
    }
}

fn known(tx: &Transaction<'_>, convs: Vec<ConvId>, ids: Vec<String>) -> Result<Known, SourceError> {
    let mut known = Known::default();
    for conv in convs {
        if let Some(last) = last_seq(tx, &conv)? {
            known.last_seq.insert(conv, last);
        }
    }
    for id in ids {
        if let Some(of) = known_id(tx, &id)? {
            known.ids.insert(id, of);
        }
    }
    Ok(known)
}

fn last_seq(tx: &Transaction<'_>, conv: &ConvId) -> rusqlite::Result<Option<u64>> {
    tx.prepare_cached("SELECT last_seq FROM conv WHERE conv = ?1")?
        .query_row([conv.as_str()], |row| row.get(0))
        .optional()
}

fn known_id(tx: &Transaction<'_>, id: &str) -> rusqlite::Result<Option<KnownId>> {
    tx.prepare_cached("SELECT digest, seq IS NOT NULL FROM event_id WHERE id = ?1")?
        .query_row([id], |row| {
            Ok(KnownId {
                digest: row.get(0)?,
                is_message: row.get(1)?,
            })
        })
        .optional()
}
