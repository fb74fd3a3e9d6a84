//! Reading a page of messages, as a user may see them.

use std::borrow::Cow;

use rusqlite::types::ValueRef;
use rusqlite::{Transaction, params};

use crate::snapshot::{Revised, Revision, RevisionKind, Snapshot, Stay, Window};
use crate::source::{PAGE_BYTES, Page, Place, SourceError, Windows};
use crate::time::Time;

pub(super) fn read_page(
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
        let Some(stay) = window.stay_at_or_after(place.seq) else {
            break;
        };
        read_stay(tx, snapshot, window, stay, place, page)?;
        let Some(last) = page.last() else {
            break;
        };
        revise(tx, snapshot, window, place, last.seq, page)?;
        next = page.last().and_then(|last| windows.after(last));
        if page.is_full() {
            break;
        }
    }
    Ok(())
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
        if page.is_full() {
            break;
        }
    }
    Ok(())
}

/// Applies the revisions that are in the snapshot to the messages of one window from `first` to
/// the one with `last_seq`. Long edits can fill the page; it ends with the message that does.
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
            if page.bytes() >= 2 * PAGE_BYTES {
                page.cut_after(at);
                return Ok(());
            }
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
