//! Rows into jobs and parts, and jobs into rows.

use rusqlite::{Row, Transaction, params};

use crate::export::{Artefact, Export, Lease, Problem, Revocation, RevokedBy, State, Waiting};
use crate::ids::{ClaimId, JobId, UserId};
use crate::ledger::{Downloads, Found, LedgerError, Part};
use crate::scope::Scope;
use crate::time::Time;

pub(super) const COLUMNS: &str =
    "job_id, user_id, scope, recipe, snapshot, messages_total, created_at,
     state, started_at, finished_at, expires_at, attempts, strikes, due_at,
     claim, lease_until, renewed_at, progressed,
     artefact_claim, artefact_sha256, artefact_bytes, artefact_messages, artefact_parts,
     problem_type, problem_detail, waiting_type, waiting_detail, waiting_since,
     revoked_at, revoked_by, revoked_reason, purging";

pub(super) fn load(tx: &Transaction<'_>, job: JobId) -> Result<Option<Export>, LedgerError> {
    let sql = format!("SELECT {COLUMNS} FROM export WHERE job_id = ?1");
    let mut statement = tx.prepare_cached(&sql)?;
    let mut rows = statement.query([job.to_string()])?;
    rows.next()?.map(export_of).transpose()
}

/// Writes everything of a job that can change after its creation.
pub(super) fn store(tx: &Transaction<'_>, export: &Export) -> Result<(), LedgerError> {
    let micros = |time: Option<Time>| time.map(Time::micros);
    let lease = export.lease.as_ref();
    let artefact = export.artefact.as_ref();
    let waiting = export.waiting.as_ref();
    let revocation = export.revocation.as_ref();
    tx.prepare_cached(
        "UPDATE export SET
             state = ?2, started_at = ?3, finished_at = ?4, expires_at = ?5, attempts = ?6,
             strikes = ?7, due_at = ?8, claim = ?9, lease_until = ?10, renewed_at = ?11,
             progressed = ?12, artefact_claim = ?13, artefact_sha256 = ?14,
             artefact_bytes = ?15, artefact_messages = ?16, artefact_parts = ?17,
             problem_type = ?18, problem_detail = ?19, waiting_type = ?20,
             waiting_detail = ?21, waiting_since = ?22, revoked_at = ?23, revoked_by = ?24,
             revoked_reason = ?25, purging = ?26
         WHERE job_id = ?1",
    )?
    .execute(params![
        export.job_id.to_string(),
        export.state.as_str(),
        micros(export.started_at),
        micros(export.finished_at),
        micros(export.expires_at),
        export.attempts,
        export.strikes,
        export.due_at.micros(),
        lease.map(|lease| lease.claim.to_string()),
        lease.map(|lease| lease.until.micros()),
        lease.map(|lease| lease.renewed_at.micros()),
        lease.is_some_and(|lease| lease.progressed),
        artefact.map(|artefact| artefact.claim.to_string()),
        artefact.map(|artefact| artefact.sha256),
        artefact.map(|artefact| artefact.bytes),
        artefact.map(|artefact| artefact.messages),
        artefact.map(|artefact| artefact.parts),
        export.problem.as_ref().map(|problem| &problem.kind),
        export.problem.as_ref().map(|problem| &problem.detail),
        waiting.map(|waiting| &waiting.problem.kind),
        waiting.map(|waiting| &waiting.problem.detail),
        waiting.map(|waiting| waiting.since.micros()),
        revocation.map(|revocation| revocation.at.micros()),
        revocation.map(|revocation| revocation.by.as_str()),
        revocation.map(|revocation| &revocation.reason),
        export.purging,
    ])?;
    if let (State::Done, Some(artefact)) = (export.state, artefact) {
        // Its upload has become the artefact.
        tx.prepare_cached("DELETE FROM upload WHERE job_id = ?1 AND claim = ?2")?
            .execute(params![
                export.job_id.to_string(),
                artefact.claim.to_string()
            ])?;
    }
    if !export.needs_log() {
        // Where the log lies in this database; elsewhere others do it.
        tx.prepare_cached("DELETE FROM pin WHERE job_id = ?1")?
            .execute([export.job_id.to_string()])?;
    }
    Ok(())
}

pub(super) fn export_of(row: &Row<'_>) -> Result<Export, LedgerError> {
    let time = |name: &str| -> rusqlite::Result<Option<Time>> {
        Ok(row.get::<_, Option<i64>>(name)?.map(Time::from_micros))
    };
    let required = |name: &str| -> Result<Time, LedgerError> {
        time(name)?.ok_or_else(|| unreadable(name, "it is null"))
    };
    let text = |name: &str| row.get::<_, String>(name);
    let (scope, state) = (text("scope")?, text("state")?);
    let problem = |kind: &str, detail: &str| -> rusqlite::Result<Option<Problem>> {
        match (row.get(kind)?, row.get(detail)?) {
            (Some(kind), Some(detail)) => Ok(Some(Problem { kind, detail })),
            _ => Ok(None),
        }
    };
    let claim_of = |name: &str| -> Result<Option<ClaimId>, LedgerError> {
        match row.get::<_, Option<String>>(name)? {
            None => Ok(None),
            Some(text) => claim_id(name, &text).map(Some),
        }
    };
    let lease = match claim_of("claim")? {
        None => None,
        Some(claim) => Some(Lease {
            claim,
            until: required("lease_until")?,
            renewed_at: required("renewed_at")?,
            progressed: row.get("progressed")?,
        }),
    };
    let artefact = match claim_of("artefact_claim")? {
        None => None,
        Some(claim) => Some(Artefact {
            claim,
            sha256: row.get("artefact_sha256")?,
            bytes: row.get("artefact_bytes")?,
            messages: row.get("artefact_messages")?,
            parts: row.get("artefact_parts")?,
        }),
    };
    let waiting = match problem("waiting_type", "waiting_detail")? {
        None => None,
        Some(problem) => Some(Waiting {
            problem,
            since: required("waiting_since")?,
        }),
    };
    let revocation = match row.get::<_, Option<String>>("revoked_by")? {
        None => None,
        Some(by) => Some(Revocation {
            at: required("revoked_at")?,
            by: RevokedBy::parse(&by).ok_or_else(|| unreadable("revoked_by", &by))?,
            reason: row
                .get::<_, Option<String>>("revoked_reason")?
                .unwrap_or_default(),
        }),
    };
    Ok(Export {
        job_id: job_id(&text("job_id")?)?,
        user: user_id(text("user_id")?)?,
        scope: Scope::parse(&scope).map_err(|e| unreadable("scope", &e))?,
        recipe: from_json("recipe", &text("recipe")?)?,
        snapshot: from_json("snapshot", &text("snapshot")?)?,
        created_at: required("created_at")?,
        messages_total: row.get("messages_total")?,
        state: State::parse(&state).ok_or_else(|| unreadable("state", &state))?,
        started_at: time("started_at")?,
        finished_at: time("finished_at")?,
        expires_at: time("expires_at")?,
        attempts: row.get("attempts")?,
        strikes: row.get("strikes")?,
        due_at: required("due_at")?,
        lease,
        artefact,
        problem: problem("problem_type", "problem_detail")?,
        waiting,
        revocation,
        purging: row.get("purging")?,
    })
}

pub(super) fn count(tx: &Transaction<'_>, export: Export) -> Result<Found, LedgerError> {
    let job = export.job_id.to_string();
    let (parts_done, messages_done) = tx
        .prepare_cached("SELECT count(*), coalesce(sum(messages), 0) FROM part WHERE job_id = ?1")?
        .query_row([&job], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let downloads = tx
        .prepare_cached(
            "SELECT coalesce(sum(count), 0), count(*), max(last_at) FROM download
             WHERE job_id = ?1",
        )?
        .query_row([&job], |row| {
            Ok(Downloads {
                count: row.get(0)?,
                sources: row.get(1)?,
                last_at: row.get::<_, Option<i64>>(2)?.map(Time::from_micros),
            })
        })?;
    Ok(Found {
        export,
        parts_done,
        messages_done,
        downloads,
    })
}

pub(super) fn part_of(row: &Row<'_>) -> Result<Part, LedgerError> {
    let claim: String = row.get(1)?;
    Ok(Part {
        number: row.get(0)?,
        claim: claim_id("claim", &claim)?,
        first: (row.get(2)?, row.get(3)?),
        last: (row.get(4)?, row.get(5)?),
        messages: row.get(6)?,
        raw_bytes: row.get(7)?,
        crc32: row.get(8)?,
        bytes: row.get(9)?,
        sha256: row.get(10)?,
    })
}

pub(super) fn claim_id(name: &str, text: &str) -> Result<ClaimId, LedgerError> {
    ClaimId::parse(text).ok_or_else(|| unreadable(name, text))
}

pub(super) fn job_id(text: &str) -> Result<JobId, LedgerError> {
    JobId::parse(text).ok_or_else(|| unreadable("job_id", text))
}

pub(super) fn user_id(text: String) -> Result<UserId, LedgerError> {
    UserId::parse(text).map_err(|reason| unreadable("user_id", reason))
}

pub(super) fn to_json(value: &impl serde::Serialize) -> Result<String, LedgerError> {
    serde_json::to_string(value).map_err(|e| LedgerError::Unreadable(e.to_string()))
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(
    name: &str,
    text: &str,
) -> Result<T, LedgerError> {
    serde_json::from_str(text).map_err(|e| unreadable(name, &e.to_string()))
}

pub(super) fn unreadable(column: &str, what: &str) -> LedgerError {
    LedgerError::Unreadable(format!("{column}: {what}"))
}
