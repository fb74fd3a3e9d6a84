//! Claiming jobs and recording their parts.

use std::time::Duration;

use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;

use super::rows::{COLUMNS, bytes, digest, export_of, get, int, int_of, ints, store, text, texts};
use super::{PostgresLedger, begin, identity, now};
use crate::export::{Change, Event, LONGEST_WAIT, Refused, State};
use crate::failpoint::failpoint;
use crate::ids::{ClaimId, JobId};
use crate::ledger::{Claim, LedgerError, Offer, Part};
use crate::time::{Clock, Time};

/// Of how many users the turns are read at once. Other workers may be at the first ones.
const TURNS: i64 = 16;

/// How long a user's row is waited for when nobody else has a job that may run.
const PATIENCE_MS: &str = "1000";

/// Reads jobs from the index in their order, and stops at the first. A planner that knows of few jobs of
/// a user, since the others came after it had looked, would gather all of them and sort them.
const IN_ORDER: &str =
    "SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off";

/// The condition of a job that may be claimed at `$2` with an encoder out of `$3`. A lease holds
/// until its end, unless that is further ahead than two of its own lengths: then it was made by
/// a clock that was wrong. So was a job that is due further ahead than any wait. The first
/// condition on the state is the one of the index.
fn due() -> String {
    let longest_wait = LONGEST_WAIT.as_micros();
    format!(
        "state IN ('queued', 'running') AND encoder = ANY ($3)
         AND ((state = 'queued' AND (due_at <= $2 OR due_at - $2 > {longest_wait}))
              OR (state = 'running'
                  AND (lease_until <= $2 OR lease_until - $2 > 2 * (lease_until - renewed_at))))"
    )
}

/// How many jobs of the user that `user` names run at `$2`.
fn running(user: &str) -> String {
    format!(
        "SELECT count(*) FROM ibid.export
         WHERE user_id = {user} AND state = 'running'
           AND lease_until > $2 AND lease_until - $2 <= 2 * (lease_until - renewed_at)"
    )
}

/// The users whose turn it is next.
#[derive(Default)]
struct Turns {
    users: Vec<String>,
    served_at: Vec<i64>,
}

/// SQLite has one writer. Here several workers look at the same time, so each first reads, and
/// locks nothing, whose turn it is; takes the row of the first user at which nobody else is;
/// and only under that lock counts the user's running jobs and picks one. Every transaction
/// holds one such row and waits for one at most, so none can wait for another in a circle.
pub(super) async fn claim(
    ledger: &PostgresLedger,
    offer: &Offer,
) -> Result<Option<Claim>, LedgerError> {
    let mut client = ledger.pg.get().await?;
    let mut passed: Vec<String> = Vec::new();
    loop {
        let tx = begin(&mut client).await?;
        tx.batch_execute(IN_ORDER).await?;
        identity(&tx).await?;
        let turns = turns(&tx, offer, &passed, now(&tx, &ledger.clock).await?).await?;
        let Some(first) = turns.users.first() else {
            return Ok(None);
        };
        let user = match lock_free(&tx, &turns).await? {
            Some(user) => user,
            // Others are at each of them, for a moment; there may be work left all the same.
            None if lock(&tx, first).await? => first.clone(),
            None => {
                passed.push(first.clone());
                continue;
            }
        };
        failpoint!("claim.locked");
        let claimed = claim_of(&tx, offer, &user, &ledger.clock).await?;
        // Also without a claim: a job may have failed just now.
        match tx.commit().await {
            // Whether the job is held now is not known. If it is, nobody else would work on it
            // until the lease lapses; if not, the first write under the claim is refused.
            Err(error) if claimed.is_some() && is_unanswered(&error) => {}
            committed => committed?,
        }
        if claimed.is_some() {
            return Ok(claimed);
        }
        passed.push(user);
    }
}

/// Whether the connection ended before it was said what came of a commit. A server that ends it
/// may have committed (class 57, operator intervention).
fn is_unanswered(error: &tokio_postgres::Error) -> bool {
    error
        .code()
        .is_none_or(|code| code.code().starts_with("57"))
}

async fn turns(
    tx: &Transaction<'_>,
    offer: &Offer,
    passed: &[String],
    now: Time,
) -> Result<Turns, LedgerError> {
    // The users with unfinished jobs are found by leaping from one to the next in the index of
    // unfinished jobs, so ten thousand jobs of one user cost no more than one. OFFSET 0 keeps
    // the planner from looking at the jobs of users whose turn does not come, and a scalar
    // subquery, unlike EXISTS, from joining with all jobs at once.
    let (running, due) = (running("turn.user_id"), due());
    let sql = format!(
        "WITH RECURSIVE waiting (user_id) AS (
             (SELECT user_id FROM ibid.export WHERE state IN ('queued', 'running')
              ORDER BY user_id LIMIT 1)
             UNION ALL
             SELECT (SELECT user_id FROM ibid.export
                     WHERE state IN ('queued', 'running') AND user_id > waiting.user_id
                     ORDER BY user_id LIMIT 1)
             FROM waiting WHERE waiting.user_id IS NOT NULL
         )
         SELECT turn.user_id, turn.served_at
         FROM (SELECT waiting.user_id, served.served_at
               FROM waiting JOIN ibid.served ON served.user_id = waiting.user_id
               WHERE waiting.user_id <> ALL ($4)
               ORDER BY served.served_at, waiting.user_id OFFSET 0) AS turn
         WHERE ($1 = 0 OR ({running}) < $1)
           AND (SELECT true FROM ibid.export
                WHERE export.user_id = turn.user_id AND {due}
                ORDER BY created_at, job_id LIMIT 1)
         ORDER BY turn.served_at, turn.user_id LIMIT $5"
    );
    let rows = tx
        .query_typed(
            &sql,
            &[
                int(&int_of(offer.running_per_user)?),
                int(&now.micros()),
                texts(&offer.encoders),
                texts(&passed),
                int(&TURNS),
            ],
        )
        .await?;
    let mut turns = Turns::default();
    for row in &rows {
        turns.users.push(get(row, "user_id")?);
        turns.served_at.push(get(row, "served_at")?);
    }
    Ok(turns)
}

/// Locks the first of these users at whom nobody else is. One who was served since the turns
/// were read comes later now, and is left out: the condition is judged again under the lock.
async fn lock_free(tx: &Transaction<'_>, turns: &Turns) -> Result<Option<String>, LedgerError> {
    let row = tx
        .query_typed_opt(
            "SELECT served.user_id
             FROM unnest($1, $2) AS turn (user_id, served_at)
             JOIN ibid.served ON served.user_id = turn.user_id
                              AND served.served_at = turn.served_at
             ORDER BY turn.served_at, turn.user_id
             LIMIT 1 FOR UPDATE OF served SKIP LOCKED",
            &[texts(&turns.users), ints(&turns.served_at)],
        )
        .await?;
    row.map(|row| get(&row, "user_id")).transpose()
}

/// Waits for a user's row; false if somebody holds it for long.
async fn lock(tx: &Transaction<'_>, user: &str) -> Result<bool, LedgerError> {
    tx.execute_typed(
        "SELECT set_config('lock_timeout', $1, true)",
        &[text(&PATIENCE_MS)],
    )
    .await?;
    let locked = tx
        .execute_typed(
            "SELECT 1 FROM ibid.served WHERE user_id = $1 FOR UPDATE",
            &[text(&user)],
        )
        .await;
    match locked {
        Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => Ok(false),
        locked => Ok(locked? > 0),
    }
}

/// Claims the oldest due job of a user whose row is locked.
async fn claim_of(
    tx: &Transaction<'_>,
    offer: &Offer,
    user: &str,
    clock: &Clock,
) -> Result<Option<Claim>, LedgerError> {
    let refused = |refused: Refused| LedgerError::Refused(refused.state);
    let now = now(tx, clock).await?;
    // A job whose row is locked is just being renewed, settled or revoked.
    let (running, due) = (running("$1"), due());
    let sql = format!(
        "SELECT {COLUMNS} FROM ibid.export
         WHERE user_id = $1 AND {due} AND ($4 = 0 OR ({running}) < $4)
         ORDER BY created_at, job_id LIMIT 1 FOR UPDATE SKIP LOCKED"
    );
    let cap = int_of(offer.running_per_user)?;
    loop {
        let next = tx
            .query_typed_opt(
                &sql,
                &[
                    text(&user),
                    int(&now.micros()),
                    texts(&offer.encoders),
                    int(&cap),
                ],
            )
            .await?;
        let Some(row) = next else {
            return Ok(None);
        };
        let mut export = export_of(&row)?;
        if export.state == State::Running {
            let terms = offer.terms;
            export.on(Event::Lapsed { terms }, now).map_err(refused)?;
        }
        if export.state != State::Queued {
            // Its last attempt was this one; it has failed now, and another is next.
            store(tx, &export).await?;
            continue;
        }
        let id = ClaimId::random()
            .map_err(|e| LedgerError::Unavailable(format!("no random numbers: {e}")))?;
        let until = now.plus(offer.lease);
        export
            .on(Event::Claimed { claim: id, until }, now)
            .map_err(refused)?;
        store(tx, &export).await?;
        tx.execute_typed(
            "UPDATE ibid.served SET served_at = $2 WHERE user_id = $1",
            &[text(&user), int(&now.micros())],
        )
        .await?;
        return Ok(Some(Claim { id, export }));
    }
}

pub(super) async fn pass_over(
    ledger: &PostgresLedger,
    encoders: &[String],
    patience: Duration,
    limit: u32,
) -> Result<Vec<JobId>, LedgerError> {
    let mut client = ledger.pg.get().await?;
    let tx = begin(&mut client).await?;
    let now = now(&tx, &ledger.clock).await?;
    let sql = format!(
        "SELECT {COLUMNS} FROM ibid.export
         WHERE state = 'queued' AND waiting_type IS NULL AND due_at <= $1 AND encoder <> ALL ($2)
         LIMIT $3 FOR UPDATE SKIP LOCKED"
    );
    let due_before = now.minus(patience).micros();
    let rows = tx
        .query_typed(
            &sql,
            &[int(&due_before), texts(&encoders), int(&i64::from(limit))],
        )
        .await?;
    let mut passed_over = Vec::new();
    for row in &rows {
        let mut export = export_of(row)?;
        if export.on(Event::PassedOver, now) == Ok(Change::Changed) {
            store(&tx, &export).await?;
            passed_over.push(export.job_id);
        }
    }
    tx.commit().await?;
    Ok(passed_over)
}

pub(super) async fn part_done(
    tx: &Transaction<'_>,
    job: JobId,
    part: &Part,
) -> Result<(), LedgerError> {
    let job = job.to_string();
    let number = int_of(part.number)?;
    // The lock keeps the claim current until the part is recorded.
    let held = tx
        .query_typed_opt(
            "SELECT 1 FROM ibid.export
             WHERE job_id = $1 AND claim = $2 AND state = 'running' FOR UPDATE",
            &[text(&job), text(&part.claim.to_string())],
        )
        .await?;
    if held.is_none() {
        return Err(LedgerError::LeaseLost);
    }
    let recorded = tx
        .query_typed_opt(
            "SELECT sha256 FROM ibid.part WHERE job_id = $1 AND part = $2",
            &[text(&job), int(&number)],
        )
        .await?;
    match recorded.map(|row| digest(&row, "sha256")).transpose()? {
        Some(sha256) if sha256 != part.sha256 => {
            return Err(LedgerError::OtherDigest { part: part.number });
        }
        Some(_) => {
            tx.execute_typed(
                "UPDATE ibid.part SET claim = $3 WHERE job_id = $1 AND part = $2",
                &[text(&job), int(&number), text(&part.claim.to_string())],
            )
            .await?;
        }
        None => {
            tx.execute_typed(
                "INSERT INTO ibid.part (job_id, part, claim, first_conv, first_seq, last_conv,
                                        last_seq, messages, raw_bytes, crc32, bytes, sha256)
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
                &[
                    text(&job),
                    int(&number),
                    text(&part.claim.to_string()),
                    text(&part.first.0),
                    int(&int_of(part.first.1)?),
                    text(&part.last.0),
                    int(&int_of(part.last.1)?),
                    int(&int_of(part.messages)?),
                    int(&int_of(part.raw_bytes)?),
                    int(&i64::from(part.crc32)),
                    int(&int_of(part.bytes)?),
                    bytes(&&part.sha256[..]),
                ],
            )
            .await?;
            // Only once: each version of a row has to be cleaned up.
            tx.execute_typed(
                "UPDATE ibid.export SET progressed = true WHERE job_id = $1 AND NOT progressed",
                &[text(&job)],
            )
            .await?;
        }
    }
    Ok(())
}
