//! Reading a page of messages, as a user may see them.

use std::pin::pin;

use futures::TryStreamExt as _;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use super::{Raw, Xid, signed, unsigned};
use crate::snapshot::{Revised, Revision, RevisionKind, Snapshot, Stay, Window};
use crate::source::{PAGE_BYTES, PAGE_MESSAGES, Page, Place, SourceError, Windows};
use crate::time::Time;

/// Messages of one stay that a page may hold.
struct Run<'w> {
    at: usize,
    window: &'w Window,
    stay: &'w Stay,
    first_seq: u64,
    last_seq: u64,
}

/// One statement reads the messages of a page and one their revisions, however many
/// conversations they are from: half of all conversations have fewer than ten messages.
pub(super) async fn read_page(
    client: &Client,
    snapshot: &Snapshot,
    windows: &Windows,
    place: Place,
    page: &mut Page,
) -> Result<(), SourceError> {
    let mut runs = runs(windows, place);
    if runs.is_empty() {
        return Ok(());
    }
    read_messages(client, snapshot, &runs, page).await?;
    let Some(last) = page.last() else {
        return Ok(());
    };
    runs.retain(|run| (run.at, run.first_seq) <= (last.window, last.seq));
    if let Some(run) = runs.last_mut() {
        run.last_seq = last.seq;
    }
    revise(client, snapshot, &runs, page).await
}

/// What a page from `place` on holds at most.
fn runs(windows: &Windows, place: Place) -> Vec<Run<'_>> {
    let mut runs = Vec::new();
    let mut room = PAGE_MESSAGES as u64;
    for (at, window) in windows.iter().enumerate().skip(place.window) {
        for stay in &window.stays {
            let first_seq = match at == place.window {
                true => stay.first_seq.max(place.seq),
                false => stay.first_seq,
            };
            let last_seq = stay.last_seq.min(first_seq + room - 1);
            if first_seq > last_seq {
                continue;
            }
            runs.push(Run {
                at,
                window,
                stay,
                first_seq,
                last_seq,
            });
            room -= last_seq - first_seq + 1;
            if room == 0 {
                return runs;
            }
        }
    }
    runs
}

// The lateral subqueries keep their ORDER BY and cannot be pulled up, so each run is read through
// the primary key, and what is sorted is one page of rows (long texts lie elsewhere and are not
// moved) and never a conversation. A view need not have `files`: its name means that of `absent` then.
const MESSAGES: &str = "
SELECT seq, gseq, xid, ts, user_id, body, body_raw, files, through
FROM (
    SELECT r.run, m.*, sum(m.bytes) OVER (ORDER BY r.run, m.seq ROWS UNBOUNDED PRECEDING) AS through
    FROM unnest($1::text[], $2::bigint[], $3::bigint[])
        WITH ORDINALITY AS r (conv, first_seq, last_seq, run)
    CROSS JOIN (SELECT NULL::text AS files) absent
    CROSS JOIN LATERAL (
        SELECT seq, gseq, xid, ts, user_id, body, body_raw, files,
               coalesce(octet_length(body), octet_length(body_raw))
               + octet_length(user_id) + coalesce(octet_length(files), 0) AS bytes
        FROM ibid.message
        WHERE conv = r.conv AND seq >= r.first_seq AND seq <= r.last_seq
        ORDER BY seq OFFSET 0
    ) m
) page
WHERE through - bytes < $4
ORDER BY run, seq";

/// Reads the messages of `runs` until the page is full.
async fn read_messages(
    client: &Client,
    snapshot: &Snapshot,
    runs: &[Run<'_>],
    page: &mut Page,
) -> Result<(), SourceError> {
    let (convs, first, last) = arrays(runs);
    let most = PAGE_BYTES as i64;
    let params: [(&(dyn ToSql + Sync), Type); 4] = [
        (&convs, Type::TEXT_ARRAY),
        (&first, Type::INT8_ARRAY),
        (&last, Type::INT8_ARRAY),
        (&most, Type::INT8),
    ];
    let mut rows = pin!(client.query_typed_raw(MESSAGES, params).await?);
    for run in runs {
        let conv = run.window.conv.as_str();
        for seq in run.first_seq..=run.last_seq {
            let missing = || {
                SourceError::LogChanged(format!(
                    "message {seq} of conversation {conv:?} is missing"
                ))
            };
            let row = rows.try_next().await?.ok_or_else(missing)?;
            if unsigned(&row, 0)? != seq {
                return Err(missing());
            }
            let (gseq, Xid(xid)) = (unsigned(&row, 1)?, row.try_get(2)?);
            if !run.stay.contains(gseq) || !snapshot.contains(gseq, xid) {
                return Err(SourceError::LogChanged(format!(
                    "message {seq} of conversation {conv:?} was not written when the log says"
                )));
            }
            let place = Place {
                window: run.at,
                seq,
            };
            let ts = Time::from_micros(row.try_get(3)?);
            page.push(place, ts, row.try_get(4)?, body(&row, 5)?, row.try_get(7)?);
            // Counted by the database, which ended the page by the same number.
            if row.try_get::<_, i64>(8)? >= most {
                return Ok(());
            }
        }
    }
    Ok(())
}

const REVISIONS: &str = "
SELECT r.run, v.seq, v.gseq, v.xid, v.kind, v.body, v.body_raw
FROM unnest($1::text[], $2::bigint[], $3::bigint[])
    WITH ORDINALITY AS r (conv, first_seq, last_seq, run)
CROSS JOIN LATERAL (
    SELECT seq, gseq, xid, kind, body, body_raw
    FROM ibid.revision
    WHERE conv = r.conv AND seq >= r.first_seq AND seq <= r.last_seq AND gseq <= $4
    ORDER BY seq, gseq OFFSET 0
) v
ORDER BY r.run, v.seq, v.gseq";

/// Applies the revisions that are in the snapshot to the messages of `runs`. Long edits can fill
/// the page; it ends with the message that does.
async fn revise(
    client: &Client,
    snapshot: &Snapshot,
    runs: &[Run<'_>],
    page: &mut Page,
) -> Result<(), SourceError> {
    let (convs, first, last) = arrays(runs);
    let params: [(&(dyn ToSql + Sync), Type); 4] = [
        (&convs, Type::TEXT_ARRAY),
        (&first, Type::INT8_ARRAY),
        (&last, Type::INT8_ARRAY),
        (&signed(snapshot.high), Type::INT8),
    ];
    let mut rows = pin!(client.query_typed_raw(REVISIONS, params).await?);
    let mut current: Option<(Place, Revised)> = None;
    while let Some(row) = rows.try_next().await? {
        let (gseq, Xid(xid)) = (unsigned(&row, 2)?, row.try_get(3)?);
        if !snapshot.contains(gseq, xid) {
            continue;
        }
        let run = usize::try_from(row.try_get::<_, i64>(0)? - 1).unwrap_or(usize::MAX);
        let Some(run) = runs.get(run) else {
            continue;
        };
        let place = Place {
            window: run.at,
            seq: unsigned(&row, 1)?,
        };
        if let Some((last, revised)) = current.take_if(|(last, _)| *last != place) {
            page.revise(last, &revised);
            if page.bytes() >= 2 * PAGE_BYTES {
                page.cut_after(last);
                return Ok(());
            }
        }
        let kind = match row.try_get(4)? {
            "edit" => RevisionKind::Edit {
                body: body(&row, 5)?.to_vec(),
            },
            "recall" => RevisionKind::Recall,
            "restore" => RevisionKind::Restore,
            // Only where the log is an application's own.
            other => {
                return Err(SourceError::LogChanged(format!(
                    "{other:?} is not a kind of revision"
                )));
            }
        };
        let (_, revised) = current.get_or_insert_with(|| (place, Revised::default()));
        revised.apply(Revision { gseq, kind }, run.window);
    }
    if let Some((last, revised)) = current {
        page.revise(last, &revised);
    }
    Ok(())
}

fn arrays<'w>(runs: &[Run<'w>]) -> (Vec<&'w str>, Vec<i64>, Vec<i64>) {
    let convs = runs.iter().map(|run| run.window.conv.as_str());
    let first = runs.iter().map(|run| signed(run.first_seq));
    let last = runs.iter().map(|run| signed(run.last_seq));
    (convs.collect(), first.collect(), last.collect())
}

/// The body in the columns `index` and the one after it, of which one is null.
fn body(row: &Row, index: usize) -> Result<&[u8], SourceError> {
    let text: Option<Raw<'_>> = row.try_get(index)?;
    let raw: Option<Raw<'_>> = row.try_get(index + 1)?;
    Ok(text.or(raw).map_or(b"", |Raw(bytes)| bytes))
}
