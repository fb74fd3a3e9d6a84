//! The ledger in PostgreSQL, in the same database as the log.
//!
//! A transaction here waits for one row at most, of a user or of a job, and holds no other while
//! it waits; rows that many lock at once are taken in one order. So none is undone because of
//! another (40P01), and at READ COMMITTED none has to be repeated (40001).

mod claim;
mod create;
mod rows;

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, GenericClient};

use self::claim::{claim, part_done, pass_over};
use self::create::{create, replay, windows_of};
use self::rows::{
    COLUMNS, bytes, claim_id, export_of, found_of, get, int, ints, job_id, load, part_of,
    select_found, store, text, texts, unreadable, unsigned, user_id,
};
use super::{
    AbandonedUpload, Claim, CreateError, Created, Cursor, Download, Filter, Found, Ledger,
    LedgerError, NewExport, NewToken, Offer, Part, Queue, Role, Token,
};
use crate::export::{Change, Event, Export, LAST_DOWNLOADS, State};
use crate::ids::{ClaimId, JobId, UserId};
use crate::limits::Limits;
use crate::postgres::{IS_ANCHORED, NOT_ANCHORED, Pg, PgError, begin, durable};
use crate::source::{Sight, Windows};
use crate::time::{Clock, Time};

/// The ledger in a PostgreSQL database. Its clock is the database's, so that nodes whose clocks
/// differ agree; of `clock` counts only what tests make of it.
pub struct PostgresLedger {
    pg: Pg,
    clock: Clock,
}

impl PostgresLedger {
    pub fn new(pg: Pg, clock: Clock) -> PostgresLedger {
        PostgresLedger { pg, clock }
    }
}

#[async_trait]
impl Ledger for PostgresLedger {
    async fn now(&self) -> Result<Time, LedgerError> {
        let client = self.pg.get().await?;
        now(&**client, &self.clock).await
    }

    async fn replay(&self, new: &NewExport) -> Result<Option<Export>, CreateError> {
        let client = self.pg.get().await?;
        replay(&**client, new).await
    }

    async fn create(
        &self,
        new: NewExport,
        limits: Limits,
        taken: Option<Sight>,
    ) -> Result<Created, CreateError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        let created = create(&tx, &new, &limits, taken, &self.clock).await?;
        tx.commit().await?;
        Ok(created)
    }

    async fn find(&self, job: JobId) -> Result<Option<Found>, LedgerError> {
        let client = self.pg.get().await?;
        let sql = format!("{} WHERE job_id = $1", select_found());
        let row = client
            .query_typed_opt(&sql, &[text(&job.to_string())])
            .await?;
        row.as_ref().map(found_of).transpose()
    }

    async fn list(
        &self,
        user: &UserId,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError> {
        let client = self.pg.get().await?;
        let (at, id) = before.map_or((i64::MAX, String::new()), |before| {
            (before.created_at.micros(), before.job_id.to_string())
        });
        let sql = format!(
            "{} WHERE user_id = $1 AND (created_at, job_id) < ($2, $3)
             ORDER BY created_at DESC, job_id DESC LIMIT $4",
            select_found()
        );
        let rows = client
            .query_typed(
                &sql,
                &[
                    text(&user.as_str()),
                    int(&at),
                    text(&id),
                    int(&i64::from(limit)),
                ],
            )
            .await?;
        rows.iter().map(found_of).collect()
    }

    async fn search(
        &self,
        filter: Filter,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError> {
        let client = self.pg.get().await?;
        let now = now(&**client, &self.clock).await?;
        search(&client, &filter, before, limit, now).await
    }

    async fn claim(&self, offer: Offer) -> Result<Option<Claim>, LedgerError> {
        claim(self, &offer).await
    }

    async fn pass_over(
        &self,
        encoders: &[String],
        patience: Duration,
        limit: u32,
    ) -> Result<Vec<JobId>, LedgerError> {
        pass_over(self, encoders, patience, limit).await
    }

    async fn renew(&self, job: JobId, claim: ClaimId, lease: Duration) -> Result<(), LedgerError> {
        let client = self.pg.get().await?;
        let now = now(&**client, &self.clock).await?;
        let renewed = client
            .execute_typed(
                "UPDATE ibid.export SET lease_until = $3, renewed_at = $4
                 WHERE job_id = $1 AND claim = $2 AND state = 'running'",
                &[
                    text(&job.to_string()),
                    text(&claim.to_string()),
                    int(&now.plus(lease).micros()),
                    int(&now.micros()),
                ],
            )
            .await?;
        if renewed == 0 {
            return Err(LedgerError::LeaseLost);
        }
        Ok(())
    }

    async fn windows(&self, job: JobId) -> Result<Windows, LedgerError> {
        let client = self.pg.get().await?;
        let rows = client
            .query_typed(
                "SELECT conv, from_gseq, to_gseq, first_seq, last_seq FROM ibid.export_stay
                 WHERE job_id = $1 ORDER BY conv, from_gseq",
                &[text(&job.to_string())],
            )
            .await?;
        windows_of(&rows)
    }

    async fn parts(&self, job: JobId) -> Result<Vec<Part>, LedgerError> {
        let client = self.pg.get().await?;
        let rows = client
            .query_typed(
                "SELECT part, claim, first_conv, first_seq, last_conv, last_seq, messages,
                        raw_bytes, crc32, bytes, sha256
                 FROM ibid.part WHERE job_id = $1 ORDER BY part",
                &[text(&job.to_string())],
            )
            .await?;
        rows.iter().map(part_of).collect()
    }

    async fn part_done(&self, job: JobId, part: Part) -> Result<(), LedgerError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        part_done(&tx, job, &part).await?;
        tx.commit().await?;
        Ok(())
    }

    async fn settle(
        &self,
        job: JobId,
        claim: ClaimId,
        event: Event,
    ) -> Result<Export, LedgerError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        let mut export = load(&tx, job).await?.ok_or(LedgerError::LeaseLost)?;
        if export
            .lease
            .as_ref()
            .is_none_or(|lease| lease.claim != claim)
        {
            return Err(LedgerError::LeaseLost);
        }
        export
            .on(event, now(&tx, &self.clock).await?)
            .map_err(|refused| LedgerError::Refused(refused.state))?;
        store(&tx, &export).await?;
        tx.commit().await?;
        Ok(export)
    }

    async fn decide(&self, job: JobId, event: Event) -> Result<(Export, Change), LedgerError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        let mut export = load(&tx, job).await?.ok_or(LedgerError::NotFound)?;
        let now = now(&tx, &self.clock).await?;
        if export.state_at(now) == State::Expired && export.state != State::Expired {
            // The moment has passed, though nobody has swept yet.
            export
                .on(Event::Expired, now)
                .map_err(|refused| LedgerError::Refused(refused.state))?;
        }
        let change = export
            .on(event, now)
            .map_err(|refused| LedgerError::Refused(refused.state))?;
        store(&tx, &export).await?;
        durable(&tx).await?;
        tx.commit().await?;
        Ok((export, change))
    }

    async fn upload_begun(&self, job: JobId, claim: ClaimId, id: &str) -> Result<(), LedgerError> {
        let client = self.pg.get().await?;
        let noted = client
            .execute_typed(
                "INSERT INTO ibid.upload (job_id, claim, upload_id)
                 SELECT job_id, claim, $3 FROM ibid.export
                 WHERE job_id = $1 AND claim = $2 AND state = 'running' FOR UPDATE",
                &[text(&job.to_string()), text(&claim.to_string()), text(&id)],
            )
            .await?;
        if noted == 0 {
            return Err(LedgerError::LeaseLost);
        }
        Ok(())
    }

    async fn abandoned_uploads(
        &self,
        job: Option<JobId>,
        after: Option<AbandonedUpload>,
        limit: u32,
    ) -> Result<Vec<AbandonedUpload>, LedgerError> {
        let after = after.map_or_else(Default::default, |it| (it.job_id.to_string(), it.id));
        let client = self.pg.get().await?;
        let rows = client
            .query_typed(
                "SELECT job_id, claim, upload_id FROM ibid.upload
                 WHERE ($1 IS NULL OR job_id = $1)
                   AND NOT EXISTS (SELECT FROM ibid.export
                                   WHERE export.job_id = upload.job_id
                                     AND export.claim = upload.claim)
                   AND (job_id, upload_id) > ($3, $4)
                 ORDER BY job_id, upload_id LIMIT $2",
                &[
                    text(&job.map(|job| job.to_string())),
                    int(&i64::from(limit)),
                    text(&after.0),
                    text(&after.1),
                ],
            )
            .await?;
        let uploads = rows.iter().map(|row| {
            Ok(AbandonedUpload {
                job_id: job_id(get(row, "job_id")?)?,
                claim: claim_id("claim", get(row, "claim")?)?,
                id: get(row, "upload_id")?,
            })
        });
        uploads.collect()
    }

    async fn upload_ended(&self, job: JobId, id: &str) -> Result<(), LedgerError> {
        let client = self.pg.get().await?;
        client
            .execute_typed(
                "DELETE FROM ibid.upload WHERE job_id = $1 AND upload_id = $2",
                &[text(&job.to_string()), text(&id)],
            )
            .await?;
        Ok(())
    }

    async fn expire(&self, limit: u32) -> Result<Vec<JobId>, LedgerError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        let now = now(&tx, &self.clock).await?;
        let ended = now.minus(LAST_DOWNLOADS);
        // Several may sweep at once; each takes jobs at which nobody else is.
        let sql = format!(
            "SELECT {COLUMNS} FROM ibid.export
             WHERE state IN ('done', 'failed') AND expires_at <= $1
             ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED"
        );
        let rows = tx
            .query_typed(&sql, &[int(&ended.micros()), int(&i64::from(limit))])
            .await?;
        let mut expired = Vec::new();
        for row in &rows {
            let mut export = export_of(row)?;
            if export.on(Event::Expired, now).is_ok() {
                store(&tx, &export).await?;
                expired.push(export.job_id);
            }
        }
        tx.commit().await?;
        Ok(expired)
    }

    async fn purges(
        &self,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<(JobId, Time)>, LedgerError> {
        let after = after.map_or_else(String::new, |job| job.to_string());
        let client = self.pg.get().await?;
        let rows = client
            .query_typed(
                "SELECT job_id, coalesce(revoked_at, expires_at, created_at) AS since
                 FROM ibid.export WHERE purging AND NOT purged AND job_id > $2
                 ORDER BY job_id LIMIT $1",
                &[int(&i64::from(limit)), text(&after)],
            )
            .await?;
        let purges = rows.iter().map(|row| {
            let job = job_id(get(row, "job_id")?)?;
            Ok((job, Time::from_micros(get(row, "since")?)))
        });
        purges.collect()
    }

    async fn purged(&self, job: JobId) -> Result<(), LedgerError> {
        let client = self.pg.get().await?;
        client
            .execute_typed(
                "UPDATE ibid.export SET purged = true WHERE job_id = $1 AND purging",
                &[text(&job.to_string())],
            )
            .await?;
        Ok(())
    }

    async fn forget(&self, record: Duration, limit: u32) -> Result<u64, LedgerError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        let before = now(&tx, &self.clock).await?.minus(record).micros();
        let rows = tx
            .query_typed(
                "SELECT job_id FROM ibid.export
                 WHERE created_at <= $1 AND state IN ('expired', 'revoked')
                 ORDER BY created_at, job_id LIMIT $2 FOR UPDATE SKIP LOCKED",
                &[int(&before), int(&i64::from(limit))],
            )
            .await?;
        let jobs: Vec<String> = rows
            .iter()
            .map(|row| get(row, "job_id"))
            .collect::<Result<_, _>>()?;
        for table in ["part", "export_stay", "download", "pin", "export"] {
            let sql = format!("DELETE FROM ibid.{table} WHERE job_id = ANY ($1)");
            tx.execute_typed(&sql, &[texts(&jobs)]).await?;
        }
        tx.commit().await?;
        Ok(jobs.len() as u64)
    }

    async fn queue(&self) -> Result<Queue, LedgerError> {
        let client = self.pg.get().await?;
        let rows = client
            .query_typed(
                "SELECT state, coalesce(waiting_type, '') AS kind, count(*) AS number,
                        min(created_at) AS oldest
                 FROM ibid.export WHERE state IN ('queued', 'running') GROUP BY 1, 2",
                &[],
            )
            .await?;
        let mut queue = Queue::default();
        for row in &rows {
            let state: &str = get(row, "state")?;
            let oldest = Time::from_micros(get(row, "oldest")?);
            queue.add(
                state == "queued",
                get(row, "kind")?,
                unsigned(row, "number")?,
                oldest,
            );
        }
        Ok(queue)
    }

    async fn identity(&self) -> Result<String, LedgerError> {
        let client = self.pg.get().await?;
        identity(&**client).await
    }

    async fn add_token(&self, token: NewToken) -> Result<Option<Time>, LedgerError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        let now = now(&tx, &self.clock).await?;
        let expires_at = token.ttl.map(|ttl| now.plus(ttl));
        tx.execute_typed(
            "INSERT INTO ibid.token (sha256, token_id, user_id, role, created_at, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6)",
            &[
                bytes(&&token.sha256[..]),
                text(&token.token_id),
                text(&token.user.as_str()),
                text(&token.role.as_str()),
                int(&now.micros()),
                int(&expires_at.map(Time::micros)),
            ],
        )
        .await?;
        durable(&tx).await?;
        tx.commit().await?;
        Ok(expires_at)
    }

    async fn find_token(&self, sha256: [u8; 32]) -> Result<Option<Token>, LedgerError> {
        let client = self.pg.get().await?;
        // Asked with every request, so the time comes along.
        let sql = format!(
            "SELECT token_id, user_id, role, expires_at, {NOW} AS now FROM ibid.token
             WHERE sha256 = $1 AND revoked_at IS NULL"
        );
        let row = client.query_typed_opt(&sql, &[bytes(&&sha256[..])]).await?;
        let Some(row) = row else {
            return Ok(None);
        };
        let now = self.clock.on(Time::from_micros(get(&row, "now")?));
        let expires_at: Option<i64> = get(&row, "expires_at")?;
        if expires_at.is_some_and(|at| at <= now.micros()) {
            return Ok(None);
        }
        let role: &str = get(&row, "role")?;
        Ok(Some(Token {
            token_id: get(&row, "token_id")?,
            user: user_id(get(&row, "user_id")?)?,
            role: Role::parse(role).ok_or_else(|| unreadable("role", role))?,
        }))
    }

    async fn note_downloads(&self, downloads: Vec<Download>) -> Result<(), LedgerError> {
        // Each row once and in order, so that two nodes that count the same ones do not wait
        // for each other.
        let mut counts: BTreeMap<(String, String), i64> = BTreeMap::new();
        for download in downloads {
            let place = (download.job_id.to_string(), download.source);
            *counts.entry(place).or_default() += 1;
        }
        let (mut jobs, mut sources, mut times) = (Vec::new(), Vec::new(), Vec::new());
        for ((job, source), count) in counts {
            jobs.push(job);
            sources.push(source);
            times.push(count);
        }
        let client = self.pg.get().await?;
        let now = now(&**client, &self.clock).await?;
        client
            .execute_typed(
                "INSERT INTO ibid.download AS there (job_id, source, count, last_at)
                 SELECT job_id, source, count, $4
                 FROM unnest($1, $2, $3) AS new (job_id, source, count)
                 ON CONFLICT (job_id, source)
                 DO UPDATE SET count = there.count + excluded.count, last_at = $4",
                &[
                    texts(&jobs),
                    texts(&sources),
                    ints(&times),
                    int(&now.micros()),
                ],
            )
            .await?;
        Ok(())
    }
}

/// Asked before anything is claimed or deleted: the identity is copied with the rows.
async fn identity(client: &(impl GenericClient + Sync)) -> Result<String, LedgerError> {
    let sql = format!(
        "SELECT uuid, EXISTS (SELECT FROM ibid.anchor a WHERE {IS_ANCHORED}) AS anchored
         FROM ibid.ledger_identity"
    );
    let row = client.query_typed_one(&sql, &[]).await?;
    if get(&row, "anchored")? {
        return get(&row, "uuid");
    }
    Err(LedgerError::Unusable(NOT_ANCHORED.to_owned()))
}

async fn search(
    client: &Client,
    filter: &Filter,
    before: Option<Cursor>,
    limit: u32,
    now: Time,
) -> Result<Vec<Found>, LedgerError> {
    let (at, id) = before.map_or((i64::MAX, String::new()), |before| {
        (before.created_at.micros(), before.job_id.to_string())
    });
    // A job whose retention has passed is expired, also before somebody has swept.
    let sql = format!(
        "{} WHERE (created_at, job_id) < ($1, $2)
           AND ($3 IS NULL OR user_id = $3)
           AND ($4 IS NULL OR $4 =
                CASE WHEN state IN ('done', 'failed') AND expires_at <= $5 THEN 'expired'
                     ELSE state END)
         ORDER BY created_at DESC, job_id DESC LIMIT $6",
        select_found()
    );
    let rows = client
        .query_typed(
            &sql,
            &[
                int(&at),
                text(&id),
                text(&filter.user.as_ref().map(UserId::as_str)),
                text(&filter.state.map(State::as_str)),
                int(&now.micros()),
                int(&i64::from(limit)),
            ],
        )
        .await?;
    rows.iter().map(found_of).collect()
}

/// `now()` would be the time at which the transaction began, before it waited for a lock.
const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

async fn now(client: &(impl GenericClient + Sync), clock: &Clock) -> Result<Time, LedgerError> {
    let row = client
        .query_typed_one(&format!("SELECT {NOW} AS now"), &[])
        .await?;
    Ok(clock.on(Time::from_micros(get(&row, "now")?)))
}

impl From<tokio_postgres::Error> for LedgerError {
    fn from(error: tokio_postgres::Error) -> LedgerError {
        let code = error.code().cloned();
        let what = PgError::from(error).to_string();
        match code {
            Some(SqlState::READ_ONLY_SQL_TRANSACTION) => LedgerError::Unusable(
                "The database takes no writes, as a standby does. Give ibid the address of the \
                 primary with --database."
                    .to_owned(),
            ),
            Some(SqlState::DISK_FULL) => LedgerError::Unusable(
                "The disk of the database is full, so nothing can be written. Free some space, \
                 then try again."
                    .to_owned(),
            ),
            // A constraint: something else than this program wrote here.
            Some(code) if code.code().starts_with("23") => LedgerError::Unreadable(what),
            _ => LedgerError::Unavailable(what),
        }
    }
}

impl From<PgError> for LedgerError {
    fn from(error: PgError) -> LedgerError {
        match error {
            PgError::Postgres(error) => error.into(),
            PgError::Pool(_) => LedgerError::Unavailable(error.to_string()),
        }
    }
}
