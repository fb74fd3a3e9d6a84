//! The ledger in SQLite, in the same file as the log.

mod claim;
mod create;
mod rows;

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Transaction, params};

use self::claim::{claim, foreign_jobs, next_job, part_done, pass_over};
use self::create::{create, replay, windows};
use self::rows::{
    COLUMNS, claim_id, count, export_of, job_id, load, part_of, store, unreadable, user_id,
};
use super::{
    AbandonedUpload, Claim, CreateError, Created, Cursor, Download, Filter, Found, Ledger,
    LedgerError, NewExport, NewToken, Offer, Part, Queue, Role, Token,
};
use crate::export::{Change, Event, Export, LAST_DOWNLOADS, State};
use crate::ids::{ClaimId, JobId, UserId};
use crate::limits::Limits;
use crate::source::{Sight, Windows};
use crate::sqlite::Db;
use crate::time::{Clock, Time};

/// The ledger in an SQLite file; its clock is this machine's, which is the only one there is.
pub struct SqliteLedger {
    db: Db,
    clock: Clock,
}

impl SqliteLedger {
    pub fn new(db: Db, clock: Clock) -> SqliteLedger {
        SqliteLedger { db, clock }
    }
}

#[async_trait]
impl Ledger for SqliteLedger {
    async fn now(&self) -> Result<Time, LedgerError> {
        Ok(self.clock.now())
    }

    async fn replay(&self, new: &NewExport) -> Result<Option<Export>, CreateError> {
        let new = new.clone();
        self.db.read(move |tx| replay(tx, &new)).await
    }

    async fn create(
        &self,
        new: NewExport,
        limits: Limits,
        taken: Option<Sight>,
    ) -> Result<Created, CreateError> {
        let clock = self.clock.clone();
        self.db
            .write(move |tx| create(tx, &new, &limits, taken, clock.now()))
            .await
    }

    async fn find(&self, job: JobId) -> Result<Option<Found>, LedgerError> {
        self.db
            .read(move |tx| match load(tx, job)? {
                Some(export) => Ok(Some(count(tx, export)?)),
                None => Ok(None),
            })
            .await
    }

    async fn list(
        &self,
        user: &UserId,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError> {
        let user = user.clone();
        self.db
            .read(move |tx| {
                let (at, id) = before.map_or((i64::MAX, String::new()), |before| {
                    (before.created_at.micros(), before.job_id.to_string())
                });
                let sql = format!(
                    "SELECT {COLUMNS} FROM export
                     WHERE user_id = ?1 AND (created_at, job_id) < (?2, ?3)
                     ORDER BY created_at DESC, job_id DESC LIMIT ?4"
                );
                let mut statement = tx.prepare_cached(&sql)?;
                let mut rows = statement.query(params![user.as_str(), at, id, limit])?;
                let mut list = Vec::new();
                while let Some(row) = rows.next()? {
                    list.push(count(tx, export_of(row)?)?);
                }
                Ok(list)
            })
            .await
    }

    async fn search(
        &self,
        filter: Filter,
        before: Option<Cursor>,
        limit: u32,
    ) -> Result<Vec<Found>, LedgerError> {
        let clock = self.clock.clone();
        self.db
            .read(move |tx| search(tx, &filter, before, limit, clock.now()))
            .await
    }

    async fn claim(&self, offer: Offer) -> Result<Option<Claim>, LedgerError> {
        let clock = self.clock.clone();
        // Looked for in a read transaction first: an idle worker does not take the write lock.
        let (now, looking) = (clock.now(), offer.clone());
        let any = self
            .db
            .read(move |tx| next_job(tx, &looking, now).map(|job| job.is_some()))
            .await?;
        if !any {
            return Ok(None);
        }
        self.db
            .write(move |tx| claim(tx, &offer, clock.now()))
            .await
    }

    async fn pass_over(
        &self,
        encoders: &[String],
        patience: Duration,
        limit: u32,
    ) -> Result<Vec<JobId>, LedgerError> {
        let now = self.clock.now();
        let encoders = encoders.to_vec();
        let due_before = now.minus(patience);
        // Looked for in a read transaction first, as in a claim.
        let found = self
            .db
            .read(move |tx| foreign_jobs(tx, &encoders, due_before, limit))
            .await?;
        if found.is_empty() {
            return Ok(found);
        }
        self.db.write(move |tx| pass_over(tx, found, now)).await
    }

    async fn renew(&self, job: JobId, claim: ClaimId, lease: Duration) -> Result<(), LedgerError> {
        let clock = self.clock.clone();
        self.db
            .write(move |tx| {
                let now = clock.now();
                let renewed = tx
                    .prepare_cached(
                        "UPDATE export SET lease_until = ?3, renewed_at = ?4
                         WHERE job_id = ?1 AND claim = ?2 AND state = 'running'",
                    )?
                    .execute(params![
                        job.to_string(),
                        claim.to_string(),
                        now.plus(lease).micros(),
                        now.micros()
                    ])?;
                if renewed == 0 {
                    return Err(LedgerError::LeaseLost);
                }
                Ok(())
            })
            .await
    }

    async fn windows(&self, job: JobId) -> Result<Windows, LedgerError> {
        self.db.read(move |tx| windows(tx, job)).await
    }

    async fn parts(&self, job: JobId) -> Result<Vec<Part>, LedgerError> {
        self.db
            .read(move |tx| {
                let mut statement = tx.prepare_cached(
                    "SELECT part, claim, first_conv, first_seq, last_conv, last_seq, messages,
                            raw_bytes, crc32, bytes, sha256
                     FROM part WHERE job_id = ?1 ORDER BY part",
                )?;
                let mut rows = statement.query([job.to_string()])?;
                let mut parts = Vec::new();
                while let Some(row) = rows.next()? {
                    parts.push(part_of(row)?);
                }
                Ok(parts)
            })
            .await
    }

    async fn part_done(&self, job: JobId, part: Part) -> Result<(), LedgerError> {
        self.db.write(move |tx| part_done(tx, job, &part)).await
    }

    async fn settle(
        &self,
        job: JobId,
        claim: ClaimId,
        event: Event,
    ) -> Result<Export, LedgerError> {
        let clock = self.clock.clone();
        self.db
            .write(move |tx| {
                let mut export = load(tx, job)?.ok_or(LedgerError::LeaseLost)?;
                if export
                    .lease
                    .as_ref()
                    .is_none_or(|lease| lease.claim != claim)
                {
                    return Err(LedgerError::LeaseLost);
                }
                export
                    .on(event, clock.now())
                    .map_err(|refused| LedgerError::Refused(refused.state))?;
                store(tx, &export)?;
                Ok(export)
            })
            .await
    }

    async fn decide(&self, job: JobId, event: Event) -> Result<(Export, Change), LedgerError> {
        let clock = self.clock.clone();
        self.db
            .write(move |tx| {
                let mut export = load(tx, job)?.ok_or(LedgerError::NotFound)?;
                let now = clock.now();
                if export.state_at(now) == State::Expired && export.state != State::Expired {
                    // The moment has passed, though nobody has swept yet.
                    export
                        .on(Event::Expired, now)
                        .map_err(|refused| LedgerError::Refused(refused.state))?;
                }
                let change = export
                    .on(event, now)
                    .map_err(|refused| LedgerError::Refused(refused.state))?;
                store(tx, &export)?;
                Ok((export, change))
            })
            .await
    }

    async fn upload_begun(&self, job: JobId, claim: ClaimId, id: &str) -> Result<(), LedgerError> {
        let id = id.to_owned();
        self.db
            .write(move |tx| {
                let noted = tx
                    .prepare_cached(
                        "INSERT INTO upload (job_id, claim, upload_id)
                         SELECT job_id, claim, ?3 FROM export
                         WHERE job_id = ?1 AND claim = ?2 AND state = 'running'",
                    )?
                    .execute(params![job.to_string(), claim.to_string(), id])?;
                if noted == 0 {
                    return Err(LedgerError::LeaseLost);
                }
                Ok(())
            })
            .await
    }

    async fn abandoned_uploads(
        &self,
        job: Option<JobId>,
        after: Option<AbandonedUpload>,
        limit: u32,
    ) -> Result<Vec<AbandonedUpload>, LedgerError> {
        let after = after.map_or_else(Default::default, |it| (it.job_id.to_string(), it.id));
        self.db
            .read(move |tx| {
                let mut statement = tx.prepare_cached(
                    "SELECT job_id, claim, upload_id FROM upload
                     WHERE (?1 IS NULL OR job_id = ?1)
                       AND NOT EXISTS (SELECT 1 FROM export
                                       WHERE export.job_id = upload.job_id
                                         AND export.claim = upload.claim)
                       AND (job_id, upload_id) > (?3, ?4)
                     ORDER BY job_id, upload_id LIMIT ?2",
                )?;
                let job = job.map(|job| job.to_string());
                let mut rows = statement.query(params![job, limit, after.0, after.1])?;
                let mut uploads = Vec::new();
                while let Some(row) = rows.next()? {
                    uploads.push(AbandonedUpload {
                        job_id: job_id(&row.get::<_, String>(0)?)?,
                        claim: claim_id("claim", &row.get::<_, String>(1)?)?,
                        id: row.get(2)?,
                    });
                }
                Ok(uploads)
            })
            .await
    }

    async fn upload_ended(&self, job: JobId, id: &str) -> Result<(), LedgerError> {
        let id = id.to_owned();
        self.db
            .write(move |tx| {
                tx.prepare_cached("DELETE FROM upload WHERE job_id = ?1 AND upload_id = ?2")?
                    .execute(params![job.to_string(), id])?;
                Ok(())
            })
            .await
    }

    async fn expire(&self, limit: u32) -> Result<Vec<JobId>, LedgerError> {
        let now = self.clock.now();
        let ended = now.minus(LAST_DOWNLOADS);
        let due = self
            .db
            .read(move |tx| {
                let mut statement = tx.prepare_cached(
                    "SELECT job_id FROM export
                     WHERE state IN ('done', 'failed') AND expires_at <= ?1
                     ORDER BY expires_at LIMIT ?2",
                )?;
                let mut rows = statement.query(params![ended.micros(), limit])?;
                let mut due = Vec::new();
                while let Some(row) = rows.next()? {
                    due.push(job_id(&row.get::<_, String>(0)?)?);
                }
                Ok::<_, LedgerError>(due)
            })
            .await?;
        if due.is_empty() {
            return Ok(due);
        }
        self.db
            .write(move |tx| {
                let mut expired = Vec::new();
                for job in due {
                    let Some(mut export) = load(tx, job)? else {
                        continue;
                    };
                    if export.state_at(ended) == State::Expired
                        && export.on(Event::Expired, now).is_ok()
                    {
                        store(tx, &export)?;
                        expired.push(job);
                    }
                }
                Ok(expired)
            })
            .await
    }

    async fn purges(
        &self,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<(JobId, Time)>, LedgerError> {
        let after = after.map_or_else(String::new, |job| job.to_string());
        self.db
            .read(move |tx| {
                let mut statement = tx.prepare_cached(
                    "SELECT job_id, coalesce(revoked_at, expires_at, created_at) FROM export
                     WHERE purging = 1 AND purged = 0 AND job_id > ?2 ORDER BY job_id LIMIT ?1",
                )?;
                let mut rows = statement.query(params![limit, after])?;
                let mut purges = Vec::new();
                while let Some(row) = rows.next()? {
                    let job = job_id(&row.get::<_, String>(0)?)?;
                    purges.push((job, Time::from_micros(row.get(1)?)));
                }
                Ok(purges)
            })
            .await
    }

    async fn purged(&self, job: JobId) -> Result<(), LedgerError> {
        self.db
            .write(move |tx| {
                tx.prepare_cached(
                    "UPDATE export SET purged = 1 WHERE job_id = ?1 AND purging = 1",
                )?
                .execute([job.to_string()])?;
                Ok(())
            })
            .await
    }

    async fn forget(&self, record: Duration, limit: u32) -> Result<u64, LedgerError> {
        let before = self.clock.now().minus(record).micros();
        self.db
            .write(move |tx| {
                let mut statement = tx.prepare_cached(
                    "SELECT job_id FROM export
                     WHERE created_at <= ?1 AND state IN ('expired', 'revoked')
                     ORDER BY created_at LIMIT ?2",
                )?;
                let mut rows = statement.query(params![before, limit])?;
                let mut forgotten = 0;
                while let Some(row) = rows.next()? {
                    let job: String = row.get(0)?;
                    for table in ["part", "export_stay", "download", "pin", "export"] {
                        tx.prepare_cached(&format!("DELETE FROM {table} WHERE job_id = ?1"))?
                            .execute([&job])?;
                    }
                    forgotten += 1;
                }
                Ok(forgotten)
            })
            .await
    }

    async fn queue(&self) -> Result<Queue, LedgerError> {
        self.db
            .read(|tx| {
                let mut queue = Queue::default();
                let mut statement = tx.prepare_cached(
                    "SELECT state, coalesce(waiting_type, ''), count(*), min(created_at)
                     FROM export WHERE state IN ('queued', 'running') GROUP BY 1, 2",
                )?;
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    let state: String = row.get(0)?;
                    let oldest = Time::from_micros(row.get(3)?);
                    queue.add(state == "queued", row.get(1)?, row.get(2)?, oldest);
                }
                Ok(queue)
            })
            .await
    }

    async fn identity(&self) -> Result<String, LedgerError> {
        self.db
            .read(|tx| {
                let identity = tx
                    .prepare_cached("SELECT uuid FROM ledger_identity")?
                    .query_row([], |row| row.get(0))?;
                Ok(identity)
            })
            .await
    }

    async fn add_token(&self, token: NewToken) -> Result<Option<Time>, LedgerError> {
        let clock = self.clock.clone();
        self.db
            .write(move |tx| {
                let now = clock.now();
                let expires_at = token.ttl.map(|ttl| now.plus(ttl));
                tx.execute(
                    "INSERT INTO token (sha256, token_id, user_id, role, created_at, expires_at)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                    params![
                        token.sha256,
                        token.token_id,
                        token.user.as_str(),
                        token.role.as_str(),
                        now.micros(),
                        expires_at.map(Time::micros)
                    ],
                )?;
                Ok(expires_at)
            })
            .await
    }

    async fn find_token(&self, sha256: [u8; 32]) -> Result<Option<Token>, LedgerError> {
        let clock = self.clock.clone();
        self.db
            .read(move |tx| {
                let mut statement = tx.prepare_cached(
                    "SELECT token_id, user_id, role FROM token
                     WHERE sha256 = ?1 AND revoked_at IS NULL
                       AND (expires_at IS NULL OR expires_at > ?2)",
                )?;
                let mut rows = statement.query(params![sha256, clock.now().micros()])?;
                match rows.next()? {
                    None => Ok(None),
                    Some(row) => {
                        let role: String = row.get(2)?;
                        Ok(Some(Token {
                            token_id: row.get(0)?,
                            user: user_id(row.get(1)?)?,
                            role: Role::parse(&role).ok_or_else(|| unreadable("role", &role))?,
                        }))
                    }
                }
            })
            .await
    }

    async fn note_downloads(&self, downloads: Vec<Download>) -> Result<(), LedgerError> {
        let clock = self.clock.clone();
        self.db
            .write(move |tx| {
                let now = clock.now().micros();
                let mut statement = tx.prepare_cached(
                    "INSERT INTO download (job_id, source, count, last_at) VALUES (?1, ?2, 1, ?3)
                     ON CONFLICT (job_id, source) DO UPDATE SET count = count + 1, last_at = ?3",
                )?;
                for download in &downloads {
                    statement.execute(params![
                        download.job_id.to_string(),
                        download.source,
                        now
                    ])?;
                }
                Ok(())
            })
            .await
    }
}

fn search(
    tx: &Transaction<'_>,
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
        "SELECT {COLUMNS} FROM export
         WHERE (created_at, job_id) < (?1, ?2)
           AND (?3 IS NULL OR user_id = ?3)
           AND (?4 IS NULL OR ?4 =
                CASE WHEN state IN ('done', 'failed') AND expires_at <= ?5 THEN 'expired'
                     ELSE state END)
         ORDER BY created_at DESC, job_id DESC LIMIT ?6"
    );
    let mut statement = tx.prepare_cached(&sql)?;
    let mut rows = statement.query(params![
        at,
        id,
        filter.user.as_ref().map(UserId::as_str),
        filter.state.map(State::as_str),
        now.micros(),
        limit
    ])?;
    let mut list = Vec::new();
    while let Some(row) = rows.next()? {
        list.push(count(tx, export_of(row)?)?);
    }
    Ok(list)
}
