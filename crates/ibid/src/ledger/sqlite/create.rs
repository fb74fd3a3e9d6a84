//! Creating a job: look-up of the key, limits, snapshot, stays, all in one transaction.

use rusqlite::{OptionalExtension as _, Transaction, params};

use super::rows::{job_id, load, to_json, unreadable};
use crate::export::Export;
use crate::ids::{ConvId, JobId, UserId};
use crate::ledger::{CreateError, Created, LedgerError, NewExport};
use crate::limits::{DAY, Limits, Usage};
use crate::snapshot::{Stay, Window};
use crate::source::{Sight, Windows, sqlite as log};
use crate::time::Time;

pub(super) fn create(
    tx: &Transaction<'_>,
    new: &NewExport,
    limits: &Limits,
    taken: Option<Sight>,
    now: Time,
) -> Result<Created, CreateError> {
    if let Some(export) = replay(tx, new)? {
        return Ok(Created::Replayed(export));
    }
    let sight = match taken {
        Some(taken) => taken,
        // The log lies in the same file, so snapshot, stays and job are of one transaction.
        None => {
            let sight = log::sight(tx, &new.user, &new.request.scope)?;
            log::pin(tx, new.job_id, None, &sight.snapshot)?;
            sight
        }
    };
    limits
        .check(&usage(tx, &new.user, limits, now)?, now)
        .map_err(CreateError::Limit)?;
    let export = new.queued(sight.snapshot, &sight.windows, now);
    insert(tx, new, &export)?;
    keep_windows(tx, new.job_id, &sight.windows)?;
    Ok(Created::New(export))
}

/// The job that this user and key have made before, if it was for the same request.
pub(super) fn replay(tx: &Transaction<'_>, new: &NewExport) -> Result<Option<Export>, CreateError> {
    let existing: Option<(String, [u8; 32])> = tx
        .prepare_cached(
            "SELECT job_id, fingerprint FROM export WHERE user_id = ?1 AND idempotency_key = ?2",
        )?
        .query_row([new.user.as_str(), new.key.as_str()], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .optional()?;
    let Some((job, fingerprint)) = existing else {
        return Ok(None);
    };
    if fingerprint != new.request.fingerprint() {
        return Err(CreateError::KeyReused);
    }
    Ok(load(tx, job_id(&job)?)?)
}

fn usage(
    tx: &Transaction<'_>,
    user: &UserId,
    limits: &Limits,
    now: Time,
) -> rusqlite::Result<Usage> {
    let unfinished = tx
        .prepare_cached(
            "SELECT count(*) FROM export WHERE user_id = ?1 AND state IN ('queued', 'running')",
        )?
        .query_row([user.as_str()], |row| row.get(0))?;
    let since = now.minus(DAY).micros();
    let last_day = tx
        .prepare_cached("SELECT count(*) FROM export WHERE user_id = ?1 AND created_at > ?2")?
        .query_row(params![user.as_str(), since], |row| row.get(0))?;
    // The limit ends when so many of the day's jobs have left it that one more fits.
    let frees_at = match limits.exports_per_user_per_day.checked_sub(1) {
        Some(back) => tx
            .prepare_cached(
                "SELECT created_at FROM export WHERE user_id = ?1
                 ORDER BY created_at DESC, job_id DESC LIMIT 1 OFFSET ?2",
            )?
            .query_row(params![user.as_str(), back], |row| row.get(0))
            .optional()?,
        None => None,
    };
    Ok(Usage {
        unfinished,
        last_day,
        frees_at: frees_at.map(Time::from_micros),
    })
}

fn insert(tx: &Transaction<'_>, new: &NewExport, export: &Export) -> Result<(), LedgerError> {
    tx.prepare_cached(
        "INSERT INTO export (job_id, user_id, idempotency_key, fingerprint, scope, recipe,
                             encoder, snapshot, messages_total, created_at, state, due_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, 'queued', ?11)",
    )?
    .execute(params![
        export.job_id.to_string(),
        export.user.as_str(),
        new.key.as_str(),
        new.request.fingerprint(),
        export.scope.to_string(),
        to_json(&export.recipe)?,
        export.recipe.encoder,
        to_json(&export.snapshot)?,
        export.messages_total,
        export.created_at.micros(),
        export.due_at.micros(),
    ])?;
    Ok(())
}

fn keep_windows(tx: &Transaction<'_>, job: JobId, windows: &Windows) -> rusqlite::Result<()> {
    let mut statement = tx.prepare_cached(
        "INSERT INTO export_stay (job_id, conv, from_gseq, to_gseq, first_seq, last_seq)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    let job = job.to_string();
    for window in windows.iter() {
        for stay in &window.stays {
            statement.execute(params![
                job,
                window.conv.as_str(),
                stay.from_gseq,
                stay.to_gseq,
                stay.first_seq,
                stay.last_seq
            ])?;
        }
    }
    Ok(())
}

pub(super) fn windows(tx: &Transaction<'_>, job: JobId) -> Result<Windows, LedgerError> {
    let mut statement = tx.prepare_cached(
        "SELECT conv, from_gseq, to_gseq, first_seq, last_seq FROM export_stay
         WHERE job_id = ?1 ORDER BY conv, from_gseq",
    )?;
    let mut rows = statement.query([job.to_string()])?;
    let mut windows: Vec<Window> = Vec::new();
    while let Some(row) = rows.next()? {
        let conv: String = row.get(0)?;
        let stay = Stay {
            from_gseq: row.get(1)?,
            to_gseq: row.get(2)?,
            first_seq: row.get(3)?,
            last_seq: row.get(4)?,
        };
        match windows.last_mut() {
            Some(window) if window.conv.as_str() == conv => window.stays.push(stay),
            _ => windows.push(Window {
                conv: ConvId::parse(conv).map_err(|e| unreadable("conv", e))?,
                stays: vec![stay],
            }),
        }
    }
    Ok(Windows::new(windows))
}
