//! Claiming jobs and recording their parts.

use rusqlite::{OptionalExtension as _, Transaction, params};

use super::rows::{job_id, load, store, to_json};
use crate::export::{Change, Event, LONGEST_WAIT, Refused, State};
use crate::ids::{ClaimId, JobId};
use crate::ledger::{Claim, LedgerError, Offer, Part};
use crate::time::Time;

/// The job that is to be claimed next: the oldest due one of the user served longest ago.
pub(super) fn next_job(
    tx: &Transaction<'_>,
    offer: &Offer,
    now: Time,
) -> Result<Option<JobId>, LedgerError> {
    // The users with unfinished jobs are found by leaping from one to the next in the index of
    // unfinished jobs, so ten thousand jobs of one user cost no more than one.
    let mut users = tx.prepare_cached(
        "WITH RECURSIVE waiting (user_id) AS (
             SELECT min(user_id) FROM export WHERE state IN ('queued', 'running')
             UNION ALL
             SELECT (SELECT min(user_id) FROM export
                     WHERE state IN ('queued', 'running') AND user_id > waiting.user_id)
             FROM waiting WHERE waiting.user_id IS NOT NULL
         )
         SELECT waiting.user_id FROM waiting LEFT JOIN served USING (user_id)
         WHERE waiting.user_id IS NOT NULL
         ORDER BY coalesce(served_at, 0), waiting.user_id",
    )?;
    // A lease holds until its end, unless that is further ahead than two of its own lengths:
    // then it was made by a clock that was wrong.
    let mut running = tx.prepare_cached(
        "SELECT count(*) FROM export
         WHERE user_id = ?1 AND state = 'running'
           AND lease_until > ?2 AND lease_until - ?2 <= 2 * (lease_until - renewed_at)",
    )?;
    // The first condition on the state is the one of the index. A job that is due further ahead
    // than any wait was made by a clock that was wrong, too.
    let mut job = tx.prepare_cached(
        "SELECT job_id FROM export
         WHERE user_id = ?1 AND state IN ('queued', 'running')
           AND encoder IN (SELECT value FROM json_each(?3))
           AND ((state = 'queued' AND (due_at <= ?2 OR due_at - ?2 > ?4))
                OR (state = 'running'
                    AND (lease_until <= ?2 OR lease_until - ?2 > 2 * (lease_until - renewed_at))))
         ORDER BY created_at, job_id LIMIT 1",
    )?;
    let now = now.micros();
    let encoders = to_json(&offer.encoders)?;
    let longest_wait = Time::from_micros(0).plus(LONGEST_WAIT).micros();
    let mut users = users.query([])?;
    while let Some(row) = users.next()? {
        let user: String = row.get(0)?;
        let held: u64 = running.query_row(params![user, now], |row| row.get(0))?;
        if offer.running_per_user != 0 && held >= offer.running_per_user {
            continue;
        }
        let found: Option<String> = job
            .query_row(params![user, now, encoders, longest_wait], |row| row.get(0))
            .optional()?;
        if let Some(found) = found {
            return Ok(Some(job_id(&found)?));
        }
    }
    Ok(None)
}

pub(super) fn claim(
    tx: &Transaction<'_>,
    offer: &Offer,
    now: Time,
) -> Result<Option<Claim>, LedgerError> {
    let refused = |refused: Refused| LedgerError::Refused(refused.state);
    while let Some(job) = next_job(tx, offer, now)? {
        let mut export = load(tx, job)?.ok_or(LedgerError::NotFound)?;
        if export.state == State::Running {
            let terms = offer.terms;
            export.on(Event::Lapsed { terms }, now).map_err(refused)?;
        }
        if export.state != State::Queued {
            // Its last attempt was this one; it has failed now, and somebody else is next.
            store(tx, &export)?;
            continue;
        }
        let id = ClaimId::random()
            .map_err(|e| LedgerError::Unavailable(format!("no random numbers: {e}")))?;
        let until = now.plus(offer.lease);
        export
            .on(Event::Claimed { claim: id, until }, now)
            .map_err(refused)?;
        store(tx, &export)?;
        tx.prepare_cached(
            "INSERT INTO served (user_id, served_at) VALUES (?1, ?2)
             ON CONFLICT (user_id) DO UPDATE SET served_at = ?2",
        )?
        .execute(params![export.user.as_str(), now.micros()])?;
        return Ok(Some(Claim { id, export }));
    }
    Ok(None)
}

/// Jobs that have been due since `due_before` and have none of `encoders`, and do not say yet that
/// they wait for one who has theirs.
pub(super) fn foreign_jobs(
    tx: &Transaction<'_>,
    encoders: &[String],
    due_before: Time,
    limit: u32,
) -> Result<Vec<JobId>, LedgerError> {
    let mut statement = tx.prepare_cached(
        "SELECT job_id FROM export
         WHERE state = 'queued' AND state IN ('queued', 'running') AND waiting_type IS NULL
           AND due_at <= ?1 AND encoder NOT IN (SELECT value FROM json_each(?2))
         LIMIT ?3",
    )?;
    let encoders = to_json(&encoders)?;
    let mut rows = statement.query(params![due_before.micros(), encoders, limit])?;
    let mut jobs = Vec::new();
    while let Some(row) = rows.next()? {
        jobs.push(job_id(&row.get::<_, String>(0)?)?);
    }
    Ok(jobs)
}

/// Notes it on those of `jobs` that nobody has taken meanwhile.
pub(super) fn pass_over(
    tx: &Transaction<'_>,
    jobs: Vec<JobId>,
    now: Time,
) -> Result<Vec<JobId>, LedgerError> {
    let mut passed_over = Vec::new();
    for job in jobs {
        let Some(mut export) = load(tx, job)? else {
            continue;
        };
        if export.on(Event::PassedOver, now) == Ok(Change::Changed) {
            store(tx, &export)?;
            passed_over.push(job);
        }
    }
    Ok(passed_over)
}

pub(super) fn part_done(tx: &Transaction<'_>, job: JobId, part: &Part) -> Result<(), LedgerError> {
    let job = job.to_string();
    let held: bool = tx
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM export
             WHERE job_id = ?1 AND claim = ?2 AND state = 'running')",
        )?
        .query_row(params![job, part.claim.to_string()], |row| row.get(0))?;
    if !held {
        return Err(LedgerError::LeaseLost);
    }
    let recorded: Option<[u8; 32]> = tx
        .prepare_cached("SELECT sha256 FROM part WHERE job_id = ?1 AND part = ?2")?
        .query_row(params![job, part.number], |row| row.get(0))
        .optional()?;
    match recorded {
        Some(sha256) if sha256 != part.sha256 => {
            return Err(LedgerError::OtherDigest { part: part.number });
        }
        Some(_) => {
            tx.prepare_cached("UPDATE part SET claim = ?3 WHERE job_id = ?1 AND part = ?2")?
                .execute(params![job, part.number, part.claim.to_string()])?;
        }
        None => {
            tx.prepare_cached(
                "INSERT INTO part (job_id, part, claim, first_conv, first_seq, last_conv,
                                   last_seq, messages, raw_bytes, crc32, bytes, sha256)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            )?
            .execute(params![
                job,
                part.number,
                part.claim.to_string(),
                part.first.0,
                part.first.1,
                part.last.0,
                part.last.1,
                part.messages,
                part.raw_bytes,
                part.crc32,
                part.bytes,
                part.sha256
            ])?;
            tx.prepare_cached("UPDATE export SET progressed = 1 WHERE job_id = ?1")?
                .execute([job])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use rusqlite::Connection;

    use super::*;
    use crate::cut::CutRule;
    use crate::export::{Recipe, Terms};
    use crate::ids::UserId;
    use crate::key::IdempotencyKey;
    use crate::ledger::sqlite::SqliteLedger;
    use crate::ledger::{Ledger as _, NewExport};
    use crate::limits::Limits;
    use crate::scope::{Format, Request, Scope};
    use crate::snapshot::Snapshot;
    use crate::source::{Sight, Windows};
    use crate::sqlite::Db;
    use crate::time::Clock;

    const NOW: Time = Time::from_seconds(1_000);

    fn offer(running_per_user: u64) -> Offer {
        Offer {
            encoders: vec!["e".to_owned()],
            lease: Duration::from_secs(30),
            terms: Terms {
                max_attempts: 5,
                retention: Duration::from_secs(1),
            },
            running_per_user,
        }
    }

    /// A file with so many jobs of one user and one of another, who comes later.
    async fn queue(folder: &tempfile::TempDir, count: u64) -> Connection {
        let path = folder.path().join(format!("{count}.db"));
        let ledger = SqliteLedger::new(Db::open(&path).unwrap(), Clock::frozen_at(NOW));
        for user in ["ann", "eve"] {
            let new = NewExport {
                job_id: JobId::random().unwrap(),
                user: UserId::parse(user).unwrap(),
                key: IdempotencyKey::parse(b"key").unwrap(),
                request: Request {
                    scope: Scope::All,
                    format: Format::JsonlGz,
                },
                recipe: Recipe {
                    format: Format::JsonlGz,
                    format_version: 1,
                    encoder: "e".to_owned(),
                    cut: CutRule {
                        part_bytes: 1,
                        part_messages: 0,
                    },
                },
            };
            let sight = Sight {
                snapshot: Snapshot::up_to(0),
                windows: Windows::new(Vec::new()),
            };
            let limits = Limits {
                unfinished_per_user: 0,
                exports_per_user_per_day: 0,
            };
            ledger.create(new, limits, Some(sight)).await.unwrap();
        }
        let mut connection = Connection::open(path).unwrap();
        let tx = connection.transaction().unwrap();
        for number in 1..count {
            let job = JobId::random().unwrap().to_string();
            tx.prepare_cached(
                "INSERT INTO export
                     (job_id, user_id, idempotency_key, fingerprint, scope, recipe, encoder,
                      snapshot, messages_total, created_at, state, due_at)
                 SELECT ?1, user_id, ?1, fingerprint, scope, recipe, encoder, snapshot,
                        messages_total, created_at + ?2, state, due_at
                 FROM export WHERE user_id = 'ann' AND idempotency_key = 'key'",
            )
            .unwrap()
            .execute(params![job, number])
            .unwrap();
        }
        tx.commit().unwrap();
        connection
    }

    /// The steps of SQLite's machine are the work that it does, whatever else the computer does.
    #[tokio::test]
    async fn a_claim_takes_no_more_steps_when_one_user_has_ten_thousand_jobs() {
        let folder = tempfile::tempdir().unwrap();
        let mut steps = Vec::new();
        for count in [25, 10_000] {
            let mut connection = queue(&folder, count).await;
            let counted = Arc::new(AtomicU64::new(0));
            let counting = Arc::clone(&counted);
            let count_one = move || {
                counting.fetch_add(1, Ordering::SeqCst);
                false
            };
            connection.progress_handler(1, Some(count_one)).unwrap();
            let tx = connection.transaction().unwrap();
            let mut claimed = Vec::new();
            // Without a cap, at the cap, and beyond it.
            for cap in [0, 0, 2, 2, 2] {
                let claim = claim(&tx, &offer(cap), NOW).unwrap();
                claimed.push(claim.map(|claim| claim.export.user.to_string()));
            }
            let user = |name: &str| Some(name.to_owned());
            assert_eq!(claimed, [user("ann"), user("eve"), user("ann"), None, None]);
            steps.push(counted.load(Ordering::SeqCst));
        }
        eprintln!("{steps:?} steps");
        assert!(steps[0] > 100, "nothing was counted: {steps:?}");
        assert!(steps[1] <= steps[0] + steps[0] / 10, "{steps:?}");
    }
}
