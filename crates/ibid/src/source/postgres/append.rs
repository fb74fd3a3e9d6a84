//! Appending a batch: its conversations are locked, what it needs is loaded, and what it makes is
//! stored, in one transaction.

use std::collections::{BTreeMap, HashSet};

use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, GenericClient, Transaction};

use super::store::store;
use super::{conv_id, imported_of, policy, signed, unsigned, unsigned_or_null};
use crate::append::{Appender, Known, KnownId, Names, Outcome};
use crate::event::{Event, EventKind, Target};
use crate::ids::{ConvId, UserId};
use crate::postgres::PgError;
use crate::snapshot::Policy;
use crate::source::{Batch, Progress, SourceError};

/// Why a batch was not appended.
pub(super) enum Failure {
    /// Another writer got in its way; the same batch may well be appended the next time.
    Overtaken(SourceError),
    Other(SourceError),
}

pub(super) async fn append(tx: &Transaction<'_>, batch: &Batch) -> Result<Vec<Outcome>, Failure> {
    let baseline = match &batch.import {
        Some(progress) => begin_import(tx, progress).await?,
        None => false,
    };
    let locked = lock(tx, batch).await?;
    let known = load(tx, batch, &locked).await?;
    let mut gseqs = draw_gseqs(tx, batch.events.len()).await?.into_iter();
    let mut gseq = gseqs.next().unwrap_or(0);
    let mut appender = Appender::new(known);
    let mut outcomes = Vec::with_capacity(batch.events.len());
    for (line, event) in &batch.events {
        let outcome = appender.apply(event, gseq);
        match &outcome {
            Outcome::Accepted { .. } => gseq = gseqs.next().unwrap_or(0),
            Outcome::Duplicate | Outcome::Unchanged => {}
            Outcome::Invalid(invalid) if !batch.skip_invalid => {
                return Err(Failure::Other(SourceError::Invalid {
                    line: *line,
                    invalid: invalid.clone(),
                }));
            }
            Outcome::Invalid(_) => {}
        }
        outcomes.push(outcome);
    }
    store(tx, &appender.finish(), &locked.created).await?;
    if let Some(progress) = &batch.import {
        record_import(tx, progress, baseline).await?;
    }
    Ok(outcomes)
}

/// The conversations and ids that `names` does not know yet.
pub(super) async fn learn(
    client: &Client,
    names: &mut Names,
    convs: Vec<ConvId>,
    ids: Vec<String>,
) -> Result<(), SourceError> {
    let rows = conv_rows(client, &convs).await?;
    for conv in convs {
        let known = rows.get(&conv).map(|(last_seq, _)| *last_seq);
        names.learn_conv(conv, known);
    }
    let mut rows = known_ids(client, &ids).await?;
    for id in ids {
        let known = rows.remove(&id);
        names.learn_id(id, known);
    }
    Ok(())
}

/// Takes the row of the import that the batch belongs to, and looks whether the batch goes on
/// where the import is. Gives whether the batch ends a first load and nobody else is writing.
async fn begin_import(tx: &Transaction<'_>, progress: &Progress) -> Result<bool, Failure> {
    let begun = tx
        .query_typed_opt(
            "INSERT INTO ibid.import (digest, lines, first, finished)
             SELECT $1, 0, NOT EXISTS (SELECT FROM ibid.conv), false
             ON CONFLICT (digest) DO NOTHING RETURNING first",
            &[(&progress.digest.as_slice(), Type::BYTEA)],
        )
        .await?;
    let (recorded, first) = match begun {
        Some(row) => (None, row.try_get(0)?),
        None => {
            let row = tx
                .query_typed_one(
                    "SELECT lines, finished, first FROM ibid.import WHERE digest = $1 FOR UPDATE",
                    &[(&progress.digest.as_slice(), Type::BYTEA)],
                )
                .await?;
            (Some(imported_of(&row)?), row.try_get::<_, bool>(2)?)
        }
    };
    progress.follows(recorded)?;
    if !(first && progress.finished) {
        return Ok(false);
    }
    // Every gseq up to the baseline counts as committed, so nobody may be writing when it is
    // taken. Where somebody is and does not end soon, it is not taken: the snapshots are right
    // without it.
    let row = tx.query_typed_one("SELECT ibid.lock_log()", &[]).await?;
    Ok(row.try_get(0)?)
}

/// The conversations whose rows this transaction holds.
struct Locked {
    convs: Vec<String>,
    /// Those of them that did not exist.
    created: Vec<String>,
}

/// Locks the rows of all conversations that the batch may write to, and creates those that it
/// may begin: before anything of them is read, and in the order that every writer follows.
async fn lock(tx: &Transaction<'_>, batch: &Batch) -> Result<Locked, Failure> {
    // Which message has an id never changes, so it may be read before the lock.
    let targets: Vec<&str> = target_ids(batch).collect();
    let mut convs: BTreeMap<String, bool> = BTreeMap::new();
    if !targets.is_empty() {
        let rows = tx
            .query_typed(
                "SELECT DISTINCT conv FROM ibid.event_id WHERE id = ANY($1) AND conv IS NOT NULL",
                &[(&targets, Type::TEXT_ARRAY)],
            )
            .await?;
        for row in rows {
            convs.insert(row.try_get(0)?, false);
        }
    }
    for (_, event) in &batch.events {
        let (conv, begins) = match &event.kind {
            EventKind::Message { conv, .. }
            | EventKind::Join { conv, .. }
            | EventKind::Leave { conv, .. }
            | EventKind::Conv { conv, .. } => (conv, true),
            EventKind::Edit { target, .. }
            | EventKind::Recall { target, .. }
            | EventKind::Restore { target, .. } => match target {
                Target::Seq { conv, .. } => (conv, false),
                Target::Id(_) => continue,
            },
            EventKind::Account { .. } => continue,
        };
        *convs.entry(conv.as_str().to_owned()).or_default() |= begins;
    }
    let (convs, begins): (Vec<String>, Vec<bool>) = convs.into_iter().unzip();
    // The transaction has its number before it draws a gseq. What is acknowledged is durable,
    // also where the server's default is another.
    let row = tx
        .query_typed_one(
            "SELECT ibid.lock_sorted($1, $2), pg_current_xact_id(),
                    CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
                    THEN set_config('synchronous_commit', 'on', true) END",
            &[(&convs, Type::TEXT_ARRAY), (&begins, Type::BOOL_ARRAY)],
        )
        .await?;
    let created = row.try_get(0)?;
    Ok(Locked { convs, created })
}

fn target_ids(batch: &Batch) -> impl Iterator<Item = &str> {
    batch
        .events
        .iter()
        .filter_map(|(_, event)| match &event.kind {
            EventKind::Edit { target, .. }
            | EventKind::Recall { target, .. }
            | EventKind::Restore { target, .. } => match target {
                Target::Id(id) => Some(id.as_str()),
                Target::Seq { .. } => None,
            },
            _ => None,
        })
}

async fn load(tx: &Transaction<'_>, batch: &Batch, locked: &Locked) -> Result<Known, Failure> {
    let events = || batch.events.iter().map(|(_, event): &(u64, Event)| event);
    let mut known = Known::default();
    let (convs, ids) = known.names.unknown(events());
    let rows = conv_rows(tx, &convs).await?;
    for conv in convs {
        let row = rows.get(&conv).copied();
        if let Some((_, policy)) = row {
            known.policies.insert(conv.clone(), policy);
        }
        known
            .names
            .learn_conv(conv, row.map(|(last_seq, _)| last_seq));
    }
    let mut rows = known_ids(tx, &ids).await?;
    for target in target_ids(batch) {
        let message = rows.get(target).and_then(|known| known.message.as_ref());
        if message.is_some_and(|(conv, _)| !is_locked(locked, conv)) {
            let error = format!("the message {target:?} was only just written");
            return Err(Failure::Overtaken(SourceError::Unavailable(error)));
        }
    }
    for id in ids {
        let row = rows.remove(&id);
        known.names.learn_id(id, row);
    }
    answer(tx, &mut known, events()).await?;
    Ok(known)
}

fn is_locked(locked: &Locked, conv: &ConvId) -> bool {
    let search = |held: &String| held.as_str().cmp(conv.as_str());
    locked.convs.binary_search_by(search).is_ok()
}

/// Answers the questions that are left once names are known.
async fn answer<'e>(
    tx: &Transaction<'_>,
    known: &mut Known,
    events: impl Iterator<Item = &'e Event>,
) -> Result<(), SourceError> {
    let questions = known.questions(events);
    let inside: Vec<(ConvId, UserId)> = questions.inside.into_iter().collect();
    if !inside.is_empty() {
        let (convs, users): (Vec<&str>, Vec<&str>) = inside
            .iter()
            .map(|(conv, user)| (conv.as_str(), user.as_str()))
            .unzip();
        let rows = tx
            .query_typed(
                "SELECT q.place
                 FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS q (conv, user_id, place)
                 CROSS JOIN LATERAL (
                     SELECT FROM ibid.stay
                     WHERE conv = q.conv AND user_id = q.user_id AND to_gseq IS NULL LIMIT 1
                 ) open",
                &[(&convs, Type::TEXT_ARRAY), (&users, Type::TEXT_ARRAY)],
            )
            .await?;
        known.inside = picked(&rows, inside)?;
    }
    let recalled: Vec<(ConvId, u64)> = questions.recalled.into_iter().collect();
    if !recalled.is_empty() {
        let (convs, seqs): (Vec<&str>, Vec<i64>) = recalled
            .iter()
            .map(|(conv, seq)| (conv.as_str(), signed(*seq)))
            .unzip();
        let rows = tx
            .query_typed(
                "SELECT q.place
                 FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS q (conv, seq, place)
                 CROSS JOIN LATERAL (
                     SELECT kind FROM ibid.revision
                     WHERE conv = q.conv AND seq = q.seq AND kind <> 'edit'
                     ORDER BY gseq DESC LIMIT 1
                 ) latest
                 WHERE latest.kind = 'recall'",
                &[(&convs, Type::TEXT_ARRAY), (&seqs, Type::INT8_ARRAY)],
            )
            .await?;
        known.recalled = picked(&rows, recalled)?;
    }
    let users: Vec<UserId> = questions.disabled.into_iter().collect();
    if !users.is_empty() {
        let names: Vec<&str> = users.iter().map(UserId::as_str).collect();
        let rows = tx
            .query_typed(
                "SELECT q.place FROM unnest($1::text[]) WITH ORDINALITY AS q (user_id, place)
                 JOIN ibid.account a ON a.user_id = q.user_id WHERE NOT a.enabled",
                &[(&names, Type::TEXT_ARRAY)],
            )
            .await?;
        known.disabled = picked(&rows, users)?;
    }
    Ok(())
}

/// Those of `asked` whose places, counted from 1, stand in `rows`.
fn picked<T: Clone + Eq + std::hash::Hash>(
    rows: &[tokio_postgres::Row],
    asked: Vec<T>,
) -> Result<HashSet<T>, SourceError> {
    let mut picked = HashSet::new();
    for row in rows {
        let place = usize::try_from(unsigned(row, 0)?).unwrap_or(0);
        picked.extend(asked.get(place.wrapping_sub(1)).cloned());
    }
    Ok(picked)
}

async fn conv_rows(
    client: &impl GenericClient,
    convs: &[ConvId],
) -> Result<BTreeMap<ConvId, (u64, Policy)>, SourceError> {
    if convs.is_empty() {
        return Ok(BTreeMap::new());
    }
    let names: Vec<&str> = convs.iter().map(ConvId::as_str).collect();
    let rows = client
        .query_typed(
            "SELECT conv, last_seq, history, ex_members FROM ibid.conv WHERE conv = ANY($1)",
            &[(&names, Type::TEXT_ARRAY)],
        )
        .await?;
    rows.iter()
        .map(|row| {
            let policy = policy(row.try_get(2)?, row.try_get(3)?)?;
            Ok((conv_id(row.try_get(0)?)?, (unsigned(row, 1)?, policy)))
        })
        .collect()
}

async fn known_ids(
    client: &impl GenericClient,
    ids: &[String],
) -> Result<BTreeMap<String, KnownId>, SourceError> {
    if ids.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows = client
        .query_typed(
            "SELECT id, digest, conv, seq FROM ibid.event_id WHERE id = ANY($1)",
            &[(&ids, Type::TEXT_ARRAY)],
        )
        .await?;
    let mut known = BTreeMap::new();
    for row in &rows {
        let digest: &[u8] = row.try_get(1)?;
        let digest = digest.try_into().map_err(|_| {
            SourceError::LogChanged("the digest of an event is not one of SHA-256".to_owned())
        })?;
        let message = match (row.try_get(2)?, unsigned_or_null(row, 3)?) {
            (Some(conv), Some(seq)) => Some((conv_id(conv)?, seq)),
            _ => None,
        };
        known.insert(row.try_get(0)?, KnownId { digest, message });
    }
    Ok(known)
}

async fn draw_gseqs(tx: &Transaction<'_>, count: usize) -> Result<Vec<u64>, SourceError> {
    let count = i32::try_from(count).unwrap_or(i32::MAX);
    let rows = tx
        .query_typed(
            "SELECT nextval('ibid.log_gseq') FROM generate_series(1, $1)",
            &[(&count, Type::INT4)],
        )
        .await?;
    rows.iter().map(|row| unsigned(row, 0)).collect()
}

async fn record_import(
    tx: &Transaction<'_>,
    progress: &Progress,
    baseline: bool,
) -> Result<(), SourceError> {
    tx.execute_typed(
        "UPDATE ibid.import SET lines = $2, finished = $3 WHERE digest = $1",
        &[
            (&progress.digest.as_slice(), Type::BYTEA),
            (&signed(progress.lines), Type::INT8),
            (&progress.finished, Type::BOOL),
        ],
    )
    .await?;
    if baseline {
        tx.execute_typed(
            "UPDATE ibid.anchor SET baseline = (SELECT last_value FROM ibid.log_gseq)",
            &[],
        )
        .await?;
    }
    Ok(())
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        Failure::Other(error)
    }
}

impl From<PgError> for Failure {
    fn from(error: PgError) -> Failure {
        match error {
            PgError::Postgres(error) => error.into(),
            PgError::Pool(_) => Failure::Other(error.into()),
        }
    }
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Failure {
        let overtaken = error.as_db_error().is_some_and(|error| {
            *error.code() == SqlState::T_R_DEADLOCK_DETECTED
                || *error.code() == SqlState::T_R_SERIALIZATION_FAILURE
                || (*error.code() == SqlState::UNIQUE_VIOLATION
                    && error.constraint() == Some("event_id_pkey"))
        });
        match overtaken {
            true => Failure::Overtaken(error.into()),
            false => Failure::Other(error.into()),
        }
    }
}
