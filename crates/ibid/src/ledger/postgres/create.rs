//! Creating a job: look-up of the key, limits, snapshot, stays, all in one transaction.

use tokio_postgres::{GenericClient, Transaction};

use super::now;
use super::rows::{
    COLUMNS, bytes, digest, export_of, get, int, int_of, ints, text, texts, to_json, unreadable,
    unsigned,
};
use crate::export::Export;
use crate::ids::{ConvId, JobId, UserId};
use crate::ledger::{CreateError, Created, LedgerError, NewExport};
use crate::limits::{DAY, Limits, Usage};
use crate::postgres::{PgError, durable};
use crate::snapshot::{Stay, Window};
use crate::source::{Sight, Windows, postgres as log};
use crate::time::{Clock, Time};

pub(super) async fn create(
    tx: &Transaction<'_>,
    new: &NewExport,
    limits: &Limits,
    taken: Option<Sight>,
    clock: &Clock,
) -> Result<Created, CreateError> {
    // From here on no other transaction creates or claims a job of this user, and since each
    // statement of READ COMMITTED sees what was committed before it began, those below see all
    // that came before.
    lock_user(tx, &new.user).await?;
    let now = now(tx, clock).await?;
    if let Some(export) = replay(tx, new).await? {
        return Ok(Created::Replayed(export));
    }
    let sight = match taken {
        Some(taken) => taken,
        // Stays, policies and snapshot come of one statement, so no join or leave falls between.
        None => {
            let sight = log::sight(tx, &new.user, &new.request.scope).await?;
            log::pin(tx, new.job_id, None, &sight.snapshot).await?;
            sight
        }
    };
    limits
        .check(&usage(tx, &new.user, limits, now).await?, now)
        .map_err(CreateError::Limit)?;
    let export = new.queued(sight.snapshot, &sight.windows, now);
    insert(tx, new, &export).await?;
    keep_windows(tx, new.job_id, &sight.windows).await?;
    durable(tx).await?;
    // Wakes workers, on any machine, when this commits.
    tx.execute_typed("SELECT pg_notify('ibid_jobs', '')", &[])
        .await?;
    Ok(Created::New(export))
}

/// The job that this user and key have made before, if it was for the same request.
pub(super) async fn replay(
    client: &(impl GenericClient + Sync),
    new: &NewExport,
) -> Result<Option<Export>, CreateError> {
    let sql = format!(
        "SELECT {COLUMNS}, fingerprint FROM ibid.export
         WHERE user_id = $1 AND idempotency_key = $2"
    );
    let row = client
        .query_typed_opt(&sql, &[text(&new.user.as_str()), text(&new.key.as_str())])
        .await?;
    let Some(row) = row else {
        return Ok(None);
    };
    if digest(&row, "fingerprint")? != new.request.fingerprint() {
        return Err(CreateError::KeyReused);
    }
    Ok(Some(export_of(&row)?))
}

async fn lock_user(tx: &Transaction<'_>, user: &UserId) -> Result<(), LedgerError> {
    let user = user.as_str();
    tx.execute_typed(
        "INSERT INTO ibid.served (user_id) VALUES ($1) ON CONFLICT DO NOTHING",
        &[text(&user)],
    )
    .await?;
    tx.execute_typed(
        "SELECT 1 FROM ibid.served WHERE user_id = $1 FOR UPDATE",
        &[text(&user)],
    )
    .await?;
    Ok(())
}

async fn usage(
    tx: &Transaction<'_>,
    user: &UserId,
    limits: &Limits,
    now: Time,
) -> Result<Usage, LedgerError> {
    // The limit ends when so many of the day's jobs have left it that one more fits.
    let back = limits.exports_per_user_per_day.checked_sub(1);
    let row = tx
        .query_typed_one(
            "SELECT
                 (SELECT count(*) FROM ibid.export
                  WHERE user_id = $1 AND state IN ('queued', 'running')) AS unfinished,
                 (SELECT count(*) FROM ibid.export
                  WHERE user_id = $1 AND created_at > $2) AS last_day,
                 (SELECT created_at FROM ibid.export WHERE user_id = $1 AND $3 IS NOT NULL
                  ORDER BY created_at DESC, job_id DESC LIMIT 1 OFFSET $3) AS frees_at",
            &[
                text(&user.as_str()),
                int(&now.minus(DAY).micros()),
                int(&back.map(int_of).transpose()?),
            ],
        )
        .await?;
    Ok(Usage {
        unfinished: unsigned(&row, "unfinished")?,
        last_day: unsigned(&row, "last_day")?,
        frees_at: get::<Option<i64>>(&row, "frees_at")?.map(Time::from_micros),
    })
}

async fn insert(tx: &Transaction<'_>, new: &NewExport, export: &Export) -> Result<(), LedgerError> {
    tx.execute_typed(
        "INSERT INTO ibid.export (job_id, user_id, idempotency_key, fingerprint, scope, recipe,
                                  encoder, snapshot, messages_total, created_at, state, due_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 'queued', $11)",
        &[
            text(&export.job_id.to_string()),
            text(&export.user.as_str()),
            text(&new.key.as_str()),
            bytes(&&new.request.fingerprint()[..]),
            text(&export.scope.to_string()),
            text(&to_json(&export.recipe)?),
            text(&export.recipe.encoder),
            text(&to_json(&export.snapshot)?),
            int(&int_of(export.messages_total)?),
            int(&export.created_at.micros()),
            int(&export.due_at.micros()),
        ],
    )
    .await?;
    Ok(())
}

async fn keep_windows(
    tx: &Transaction<'_>,
    job: JobId,
    windows: &Windows,
) -> Result<(), LedgerError> {
    let mut convs: Vec<&str> = Vec::new();
    let (mut froms, mut tos) = (Vec::new(), Vec::new());
    let (mut firsts, mut lasts) = (Vec::new(), Vec::new());
    for window in windows.iter() {
        for stay in &window.stays {
            convs.push(window.conv.as_str());
            froms.push(int_of(stay.from_gseq)?);
            tos.push(stay.to_gseq.map(int_of).transpose()?);
            firsts.push(int_of(stay.first_seq)?);
            lasts.push(int_of(stay.last_seq)?);
        }
    }
    // A user may have ten thousand; one statement takes them all.
    tx.execute_typed(
        "INSERT INTO ibid.export_stay (job_id, conv, from_gseq, to_gseq, first_seq, last_seq)
         SELECT $1, conv, from_gseq, to_gseq, first_seq, last_seq
         FROM unnest($2, $3, $4, $5, $6)
              AS stay (conv, from_gseq, to_gseq, first_seq, last_seq)",
        &[
            text(&job.to_string()),
            texts(&convs),
            ints(&froms),
            ints(&tos),
            ints(&firsts),
            ints(&lasts),
        ],
    )
    .await?;
    Ok(())
}

pub(super) fn windows_of(rows: &[tokio_postgres::Row]) -> Result<Windows, LedgerError> {
    let mut windows: Vec<Window> = Vec::new();
    for row in rows {
        let conv: &str = get(row, "conv")?;
        let to_gseq: Option<i64> = get(row, "to_gseq")?;
        let stay = Stay {
            from_gseq: unsigned(row, "from_gseq")?,
            to_gseq: to_gseq
                .map(|to| u64::try_from(to).map_err(|_| unreadable("to_gseq", "it is negative")))
                .transpose()?,
            first_seq: unsigned(row, "first_seq")?,
            last_seq: unsigned(row, "last_seq")?,
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

impl From<tokio_postgres::Error> for CreateError {
    fn from(error: tokio_postgres::Error) -> CreateError {
        LedgerError::from(error).into()
    }
}

impl From<PgError> for CreateError {
    fn from(error: PgError) -> CreateError {
        LedgerError::from(error).into()
    }
}
