//! Rows into jobs and parts, and jobs into rows.

use std::borrow::Cow;

use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{Row, Transaction};

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

/// The start of a statement that gives jobs with what is counted beside them: one statement
/// and so one moment, without a transaction.
pub(super) fn select_found() -> String {
    format!(
        "SELECT {COLUMNS}, parts_done, messages_done, downloads, sources, downloaded_at
         FROM ibid.export
         CROSS JOIN LATERAL (
             SELECT count(*) AS parts_done, coalesce(sum(messages), 0)::bigint AS messages_done
             FROM ibid.part WHERE part.job_id = export.job_id) AS done
         CROSS JOIN LATERAL (
             SELECT coalesce(sum(count), 0)::bigint AS downloads, count(*) AS sources,
                    max(last_at) AS downloaded_at
             FROM ibid.download WHERE download.job_id = export.job_id) AS fetched"
    )
}

/// Loads a job and locks its row until the transaction ends.
pub(super) async fn load(tx: &Transaction<'_>, job: JobId) -> Result<Option<Export>, LedgerError> {
    let sql = format!("SELECT {COLUMNS} FROM ibid.export WHERE job_id = $1 FOR UPDATE");
    let row = tx.query_typed_opt(&sql, &[text(&job.to_string())]).await?;
    row.as_ref().map(export_of).transpose()
}

/// Writes everything of a job that can change after its creation.
pub(super) async fn store(tx: &Transaction<'_>, export: &Export) -> Result<(), LedgerError> {
    let micros = |time: Option<Time>| time.map(Time::micros);
    let lease = export.lease.as_ref();
    let artefact = export.artefact.as_ref();
    let number = |of: fn(&Artefact) -> u64| artefact.map(|it| int_of(of(it))).transpose();
    let problem = export.problem.as_ref();
    let waiting = export.waiting.as_ref();
    let revocation = export.revocation.as_ref();
    tx.execute_typed(
        "UPDATE ibid.export SET
             state = $2, started_at = $3, finished_at = $4, expires_at = $5, attempts = $6,
             strikes = $7, due_at = $8, claim = $9, lease_until = $10, renewed_at = $11,
             progressed = $12, artefact_claim = $13, artefact_sha256 = $14,
             artefact_bytes = $15, artefact_messages = $16, artefact_parts = $17,
             problem_type = $18, problem_detail = $19, waiting_type = $20,
             waiting_detail = $21, waiting_since = $22, revoked_at = $23, revoked_by = $24,
             revoked_reason = $25, purging = $26
         WHERE job_id = $1",
        &[
            text(&export.job_id.to_string()),
            text(&export.state.as_str()),
            int(&micros(export.started_at)),
            int(&micros(export.finished_at)),
            int(&micros(export.expires_at)),
            int(&i64::from(export.attempts)),
            int(&i64::from(export.strikes)),
            int(&export.due_at.micros()),
            text(&lease.map(|lease| lease.claim.to_string())),
            int(&lease.map(|lease| lease.until.micros())),
            int(&lease.map(|lease| lease.renewed_at.micros())),
            boolean(&lease.is_some_and(|lease| lease.progressed)),
            text(&artefact.map(|artefact| artefact.claim.to_string())),
            bytes(&artefact.map(|artefact| &artefact.sha256[..])),
            int(&number(|artefact| artefact.bytes)?),
            int(&number(|artefact| artefact.messages)?),
            int(&number(|artefact| artefact.parts)?),
            text(&problem.map(|problem| storable(&problem.kind))),
            text(&problem.map(|problem| storable(&problem.detail))),
            text(&waiting.map(|waiting| storable(&waiting.problem.kind))),
            text(&waiting.map(|waiting| storable(&waiting.problem.detail))),
            int(&waiting.map(|waiting| waiting.since.micros())),
            int(&revocation.map(|revocation| revocation.at.micros())),
            text(&revocation.map(|revocation| revocation.by.as_str())),
            text(&revocation.map(|revocation| storable(&revocation.reason))),
            boolean(&export.purging),
        ],
    )
    .await?;
    if let (State::Done, Some(artefact)) = (export.state, artefact) {
        // Its upload has become the artefact.
        tx.execute_typed(
            "DELETE FROM ibid.upload WHERE job_id = $1 AND claim = $2",
            &[
                text(&export.job_id.to_string()),
                text(&artefact.claim.to_string()),
            ],
        )
        .await?;
    }
    if !export.needs_log() {
        // Where the log lies in this database; elsewhere others do it.
        tx.execute_typed(
            "DELETE FROM ibid.pin WHERE job_id = $1",
            &[text(&export.job_id.to_string())],
        )
        .await?;
    }
    Ok(())
}

pub(super) fn export_of(row: &Row) -> Result<Export, LedgerError> {
    let time = |name: &str| -> Result<Option<Time>, LedgerError> {
        Ok(get::<Option<i64>>(row, name)?.map(Time::from_micros))
    };
    let required = |name: &str| -> Result<Time, LedgerError> {
        time(name)?.ok_or_else(|| unreadable(name, "it is null"))
    };
    let small = |name: &str| -> Result<u32, LedgerError> {
        u32::try_from(get::<i32>(row, name)?).map_err(|_| unreadable(name, "it is negative"))
    };
    let (scope, state): (&str, &str) = (get(row, "scope")?, get(row, "state")?);
    let problem = |kind: &str, detail: &str| -> Result<Option<Problem>, LedgerError> {
        match (get(row, kind)?, get(row, detail)?) {
            (Some(kind), Some(detail)) => Ok(Some(Problem { kind, detail })),
            _ => Ok(None),
        }
    };
    let claim_of = |name: &str| -> Result<Option<ClaimId>, LedgerError> {
        get::<Option<&str>>(row, name)?
            .map(|text| claim_id(name, text))
            .transpose()
    };
    let lease = match claim_of("claim")? {
        None => None,
        Some(claim) => Some(Lease {
            claim,
            until: required("lease_until")?,
            renewed_at: required("renewed_at")?,
            progressed: get(row, "progressed")?,
        }),
    };
    let artefact = match claim_of("artefact_claim")? {
        None => None,
        Some(claim) => Some(Artefact {
            claim,
            sha256: digest(row, "artefact_sha256")?,
            bytes: unsigned(row, "artefact_bytes")?,
            messages: unsigned(row, "artefact_messages")?,
            parts: unsigned(row, "artefact_parts")?,
        }),
    };
    let waiting = match problem("waiting_type", "waiting_detail")? {
        None => None,
        Some(problem) => Some(Waiting {
            problem,
            since: required("waiting_since")?,
        }),
    };
    let revocation = match get::<Option<&str>>(row, "revoked_by")? {
        None => None,
        Some(by) => Some(Revocation {
            at: required("revoked_at")?,
            by: RevokedBy::parse(by).ok_or_else(|| unreadable("revoked_by", by))?,
            reason: get::<Option<String>>(row, "revoked_reason")?.unwrap_or_default(),
        }),
    };
    Ok(Export {
        job_id: job_id(get(row, "job_id")?)?,
        user: user_id(get(row, "user_id")?)?,
        scope: Scope::parse(scope).map_err(|e| unreadable("scope", &e))?,
        recipe: from_json("recipe", get(row, "recipe")?)?,
        snapshot: from_json("snapshot", get(row, "snapshot")?)?,
        created_at: required("created_at")?,
        messages_total: unsigned(row, "messages_total")?,
        state: State::parse(state).ok_or_else(|| unreadable("state", state))?,
        started_at: time("started_at")?,
        finished_at: time("finished_at")?,
        expires_at: time("expires_at")?,
        attempts: small("attempts")?,
        strikes: small("strikes")?,
        due_at: required("due_at")?,
        lease,
        artefact,
        problem: problem("problem_type", "problem_detail")?,
        waiting,
        revocation,
        purging: get(row, "purging")?,
    })
}

/// A row of [`select_found`].
pub(super) fn found_of(row: &Row) -> Result<Found, LedgerError> {
    Ok(Found {
        export: export_of(row)?,
        parts_done: unsigned(row, "parts_done")?,
        messages_done: unsigned(row, "messages_done")?,
        downloads: Downloads {
            count: unsigned(row, "downloads")?,
            sources: unsigned(row, "sources")?,
            last_at: get::<Option<i64>>(row, "downloaded_at")?.map(Time::from_micros),
        },
    })
}

pub(super) fn part_of(row: &Row) -> Result<Part, LedgerError> {
    let crc32 = unsigned(row, "crc32")?;
    Ok(Part {
        number: unsigned(row, "part")?,
        claim: claim_id("claim", get(row, "claim")?)?,
        first: (get(row, "first_conv")?, unsigned(row, "first_seq")?),
        last: (get(row, "last_conv")?, unsigned(row, "last_seq")?),
        messages: unsigned(row, "messages")?,
        raw_bytes: unsigned(row, "raw_bytes")?,
        crc32: u32::try_from(crc32).map_err(|_| unreadable("crc32", "it is too large"))?,
        bytes: unsigned(row, "bytes")?,
        sha256: digest(row, "sha256")?,
    })
}

pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, name: &str) -> Result<T, LedgerError> {
    row.try_get(name)
        .map_err(|error| unreadable(name, &error.to_string()))
}

pub(super) fn unsigned(row: &Row, name: &str) -> Result<u64, LedgerError> {
    u64::try_from(get::<i64>(row, name)?).map_err(|_| unreadable(name, "it is negative"))
}

pub(super) fn digest(row: &Row, name: &str) -> Result<[u8; 32], LedgerError> {
    let bytes: &[u8] = get(row, name)?;
    bytes
        .try_into()
        .map_err(|_| unreadable(name, "it is not 32 bytes long"))
}

pub(super) fn job_id(text: &str) -> Result<JobId, LedgerError> {
    JobId::parse(text).ok_or_else(|| unreadable("job_id", text))
}

pub(super) fn user_id(text: String) -> Result<UserId, LedgerError> {
    UserId::parse(text).map_err(|reason| unreadable("user_id", reason))
}

pub(super) fn claim_id(name: &str, text: &str) -> Result<ClaimId, LedgerError> {
    ClaimId::parse(text).ok_or_else(|| unreadable(name, text))
}

pub(super) fn to_json(value: &impl serde::Serialize) -> Result<String, LedgerError> {
    serde_json::to_string(value).map_err(|e| LedgerError::Unreadable(e.to_string()))
}

fn from_json<T: serde::de::DeserializeOwned>(name: &str, text: &str) -> Result<T, LedgerError> {
    serde_json::from_str(text).map_err(|e| unreadable(name, &e.to_string()))
}

pub(super) fn unreadable(column: &str, what: &str) -> LedgerError {
    LedgerError::Unreadable(format!("{column}: {what}"))
}

// What a statement is given, with its type: a statement whose types are known needs no name
// and no second round trip.

pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

pub(super) fn text(value: &(impl ToSql + Sync)) -> Param<'_> {
    (value, Type::TEXT)
}

pub(super) fn texts(value: &(impl ToSql + Sync)) -> Param<'_> {
    (value, Type::TEXT_ARRAY)
}

pub(super) fn int(value: &(impl ToSql + Sync)) -> Param<'_> {
    (value, Type::INT8)
}

pub(super) fn ints(value: &(impl ToSql + Sync)) -> Param<'_> {
    (value, Type::INT8_ARRAY)
}

pub(super) fn bytes(value: &(impl ToSql + Sync)) -> Param<'_> {
    (value, Type::BYTEA)
}

pub(super) fn boolean(value: &(impl ToSql + Sync)) -> Param<'_> {
    (value, Type::BOOL)
}

/// PostgreSQL has no unsigned integers.
pub(super) fn int_of(value: u64) -> Result<i64, LedgerError> {
    i64::try_from(value).map_err(|_| unreadable("number", "it is too large"))
}

/// PostgreSQL's text cannot hold NUL, which somebody may have typed into a reason.
fn storable(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}
