//! Appending events: every kind, judged and numbered inside one transaction.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use rusqlite::{OptionalExtension as _, Transaction, params};

use super::{account_enabled, conv_id, policy, snapshot};
use crate::event::{Event, EventKind, ExMembers, File, History, Invalid, Target};
use crate::ids::{ConvId, UserId};
use crate::snapshot::Policy;
use crate::source::{
    Batch, Known, KnownId, Outcome, Progress, SourceError, id_taken, no_such_message,
    not_a_message, unknown_message,
};
use crate::time::Time;

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

pub(super) fn append(tx: &Transaction<'_>, batch: &Batch) -> Result<Vec<Outcome>, SourceError> {
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

pub(super) fn known(
    tx: &Transaction<'_>,
    convs: Vec<ConvId>,
    ids: Vec<String>,
) -> Result<Known, SourceError> {
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
