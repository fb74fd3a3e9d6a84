//! Appending a batch: what it needs is loaded, what it makes is stored, in one transaction.

use rusqlite::{OptionalExtension as _, Transaction, params};

use super::{account_enabled, conv_id, policy, snapshot};
use crate::append::{Appender, Known, KnownId, Names, Outcome, Writes};
use crate::event::Event;
use crate::ids::ConvId;
use crate::snapshot::Policy;
use crate::source::{Batch, Imported, Progress, SourceError};

pub(super) fn append(tx: &Transaction<'_>, batch: &Batch) -> Result<Vec<Outcome>, SourceError> {
    if let Some(progress) = &batch.import {
        progress.follows(imported(tx, &progress.digest)?)?;
    }
    let log_was_empty = !tx.prepare_cached("SELECT 1 FROM conv")?.exists([])?;
    let mut gseq = snapshot(tx)?.high;
    let mut appender = Appender::new(load(tx, batch)?);
    let mut outcomes = Vec::with_capacity(batch.events.len());
    for (line, event) in &batch.events {
        let outcome = appender.apply(event, gseq + 1);
        match &outcome {
            Outcome::Accepted { .. } => gseq += 1,
            Outcome::Duplicate | Outcome::Unchanged => {}
            Outcome::Invalid(invalid) if !batch.skip_invalid => {
                return Err(SourceError::Invalid {
                    line: *line,
                    invalid: invalid.clone(),
                });
            }
            Outcome::Invalid(_) => {}
        }
        outcomes.push(outcome);
    }
    store(tx, &appender.finish())?;
    tx.prepare_cached("UPDATE log_counter SET gseq = ?1")?
        .execute([gseq])?;
    if let Some(progress) = &batch.import {
        record_import(tx, progress, log_was_empty)?;
    }
    Ok(outcomes)
}

/// The conversations and ids that `names` does not know yet.
pub(super) fn learn(
    tx: &Transaction<'_>,
    names: &mut Names,
    convs: Vec<ConvId>,
    ids: Vec<String>,
) -> Result<(), SourceError> {
    for conv in convs {
        let known = conv_row(tx, &conv)?.map(|(last_seq, _)| last_seq);
        names.learn_conv(conv, known);
    }
    for id in ids {
        let known = known_id(tx, &id)?;
        names.learn_id(id, known);
    }
    Ok(())
}

fn load(tx: &Transaction<'_>, batch: &Batch) -> Result<Known, SourceError> {
    let events = || batch.events.iter().map(|(_, event): &(u64, Event)| event);
    let mut known = Known::default();
    let (convs, ids) = known.names.unknown(events());
    for conv in &convs {
        if let Some((_, policy)) = conv_row(tx, conv)? {
            known.policies.insert(conv.clone(), policy);
        }
    }
    learn(tx, &mut known.names, convs, ids)?;
    let questions = known.questions(events());
    let mut inside = tx.prepare_cached(
        "SELECT 1 FROM stay WHERE conv = ?1 AND user_id = ?2 AND to_gseq IS NULL",
    )?;
    for (conv, user) in questions.inside {
        if inside.exists([conv.as_str(), user.as_str()])? {
            known.inside.insert((conv, user));
        }
    }
    let mut latest = tx.prepare_cached(
        "SELECT kind FROM revision
         WHERE conv = ?1 AND seq = ?2 AND kind <> 'edit' ORDER BY gseq DESC LIMIT 1",
    )?;
    for (conv, seq) in questions.recalled {
        let kind: Option<String> = latest
            .query_row(params![conv.as_str(), seq], |row| row.get(0))
            .optional()?;
        if kind.as_deref() == Some("recall") {
            known.recalled.insert((conv, seq));
        }
    }
    for user in questions.disabled {
        if !account_enabled(tx, &user)? {
            known.disabled.insert(user);
        }
    }
    Ok(known)
}

fn conv_row(tx: &Transaction<'_>, conv: &ConvId) -> rusqlite::Result<Option<(u64, Policy)>> {
    tx.prepare_cached("SELECT last_seq, history, ex_members FROM conv WHERE conv = ?1")?
        .query_row([conv.as_str()], |row| {
            Ok((row.get(0)?, policy(row.get(1)?, row.get(2)?)))
        })
        .optional()
}

fn known_id(tx: &Transaction<'_>, id: &str) -> Result<Option<KnownId>, SourceError> {
    type Row = ([u8; 32], Option<String>, Option<u64>);
    let row: Option<Row> = tx
        .prepare_cached("SELECT digest, conv, seq FROM event_id WHERE id = ?1")?
        .query_row([id], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((digest, conv, seq)) = row else {
        return Ok(None);
    };
    let message = match (conv, seq) {
        (Some(conv), Some(seq)) => Some((conv_id(conv)?, seq)),
        _ => None,
    };
    Ok(Some(KnownId { digest, message }))
}

fn store(tx: &Transaction<'_>, writes: &Writes<'_>) -> rusqlite::Result<()> {
    let mut message = tx.prepare_cached(
        "INSERT INTO message (conv, seq, gseq, ts, user_id, body, files)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?;
    for row in &writes.messages {
        message.execute(params![
            row.conv.as_str(),
            row.seq,
            row.gseq,
            row.ts.micros(),
            row.user.as_str(),
            row.body,
            row.files
        ])?;
    }
    let mut revision = tx.prepare_cached(
        "INSERT INTO revision (conv, seq, gseq, ts, kind, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    for row in &writes.revisions {
        revision.execute(params![
            row.conv.as_str(),
            row.seq,
            row.gseq,
            row.ts.micros(),
            row.kind,
            row.body
        ])?;
    }
    store_stays(tx, writes)?;
    let mut account = tx.prepare_cached(
        "INSERT INTO account (user_id, enabled) VALUES (?1, ?2)
         ON CONFLICT (user_id) DO UPDATE SET enabled = ?2",
    )?;
    for (user, enabled) in &writes.accounts {
        account.execute(params![user.as_str(), enabled])?;
    }
    let mut id =
        tx.prepare_cached("INSERT INTO event_id (id, digest, conv, seq) VALUES (?1, ?2, ?3, ?4)")?;
    for (text, known) in &writes.ids {
        let message = known.message.as_ref();
        id.execute(params![
            text,
            known.digest,
            message.map(|(conv, _)| conv.as_str()),
            message.map(|(_, seq)| seq)
        ])?;
    }
    let mut conv = tx.prepare_cached(
        "INSERT INTO conv (conv, last_seq, history, ex_members) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (conv) DO UPDATE SET last_seq = ?2, history = ?3, ex_members = ?4",
    )?;
    for (name, (last_seq, policy)) in &writes.convs {
        conv.execute(params![
            name.as_str(),
            last_seq,
            policy.history.as_str(),
            policy.ex_members.as_str()
        ])?;
    }
    Ok(())
}

fn store_stays(tx: &Transaction<'_>, writes: &Writes<'_>) -> rusqlite::Result<()> {
    let mut end = tx.prepare_cached(
        "UPDATE stay SET to_gseq = ?3, last_seq = ?4
         WHERE conv = ?1 AND user_id = ?2 AND to_gseq IS NULL",
    )?;
    for stay in &writes.ended {
        end.execute(params![
            stay.conv.as_str(),
            stay.user.as_str(),
            stay.to_gseq,
            stay.last_seq
        ])?;
    }
    let mut begin = tx.prepare_cached(
        "INSERT INTO stay (user_id, conv, from_gseq, to_gseq, first_seq, last_seq)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    for stay in &writes.begun {
        begin.execute(params![
            stay.user.as_str(),
            stay.conv.as_str(),
            stay.from_gseq,
            stay.end.map(|(to_gseq, _)| to_gseq),
            stay.first_seq,
            stay.end.map(|(_, last_seq)| last_seq)
        ])?;
    }
    Ok(())
}

pub(super) fn imported(
    tx: &Transaction<'_>,
    digest: &[u8; 32],
) -> rusqlite::Result<Option<Imported>> {
    tx.prepare_cached("SELECT lines, finished FROM import WHERE digest = ?1")?
        .query_row([digest], |row| {
            Ok(Imported {
                lines: row.get(0)?,
                finished: row.get(1)?,
            })
        })
        .optional()
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
    Ok(())
}
