//! The ledger in SQLite, in the same file as the log.

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{OptionalExtension as _, Row, Transaction, params};

use super::{
    Claim, CreateError, Created, Cursor, Download, Downloads, Filter, Found, Ledger, LedgerError,
    NewExport, NewToken, Offer, Part, Role, Token,
};
use crate::export::{
    Artefact, Change, Event, Export, Lease, Problem, Revocation, RevokedBy, State, Waiting,
};
use crate::ids::{ClaimId, ConvId, JobId, UserId};
use crate::limits::{DAY, Limits, Usage};
use crate::scope::Scope;
use crate::snapshot::{Stay, Window};
use crate::source::{SourceError, Windows, sqlite as log};
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

    async fn create(&self, new: NewExport, limits: Limits) -> Result<Created, CreateError> {
        let clock = self.clock.clone();
        self.db
            .write(move |tx| create(tx, &new, &limits, clock.now()))
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

// ---- creating

fn create(
    tx: &Transaction<'_>,
    new: &NewExport,
    limits: &Limits,
    now: Time,
) -> Result<Created, CreateError> {
    let existing: Option<(String, [u8; 32])> = tx
        .prepare_cached(
            "SELECT job_id, fingerprint FROM export WHERE user_id = ?1 AND idempotency_key = ?2",
        )?
        .query_row([new.user.as_str(), new.key.as_str()], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .optional()?;
    if let Some((job, fingerprint)) = existing {
        if fingerprint != new.request.fingerprint() {
            return Err(CreateError::KeyReused);
        }
        let export = load(tx, job_id(&job)?)?.ok_or(LedgerError::NotFound)?;
        return Ok(Created::Replayed(export));
    }
    if log::is_loading(tx)? {
        return Err(CreateError::SourceLoading);
    }
    // The log lies in the same file, so snapshot, stays and job are of one transaction.
    let windows = log::windows(tx, &new.user, &new.request.scope)
        .map_err(unavailable)?
        .ok_or(CreateError::ScopeInvalid)?;
    limits
        .check(&usage(tx, &new.user, limits, now)?, now)
        .map_err(CreateError::Limit)?;
    let export = Export {
        job_id: new.job_id,
        user: new.user.clone(),
        scope: new.request.scope.clone(),
        recipe: new.recipe.clone(),
        snapshot: log::snapshot(tx)?,
        created_at: now,
        messages_total: windows.messages(),
        state: State::Queued,
        started_at: None,
        finished_at: None,
        expires_at: None,
        attempts: 0,
        strikes: 0,
        due_at: now,
        lease: None,
        artefact: None,
        problem: None,
        waiting: None,
        revocation: None,
        purging: false,
    };
    insert(tx, new, &export)?;
    keep_windows(tx, new.job_id, &windows)?;
    Ok(Created::New(export))
}

fn usage(
    tx: &Transaction<'_>,
    user: &UserId,
    limits: &Limits,
    now: Time,
) -> rusqlite::Result<Usage> {
    let unfinished = tx
        .prepare_cached(
            "SELECT count(*) FROM export WHERE user_id = ?1 AND state IN ('queued', 'running')",
        )?
        .query_row([user.as_str()], |row| row.get(0))?;
    let since = now.minus(DAY).micros();
    let last_day = tx
        .prepare_cached("SELECT count(*) FROM export WHERE user_id = ?1 AND created_at > ?2")?
        .query_row(params![user.as_str(), since], |row| row.get(0))?;
    // The limit ends when so many of the day's jobs have left it that one more fits.
    let frees_at = match limits.exports_per_user_per_day.checked_sub(1) {
        Some(back) => tx
            .prepare_cached(
                "SELECT created_at FROM export WHERE user_id = ?1
                 ORDER BY created_at DESC, job_id DESC LIMIT 1 OFFSET ?2",
            )?
            .query_row(params![user.as_str(), back], |row| row.get(0))
            .optional()?,
        None => None,
    };
    Ok(Usage {
        unfinished,
        last_day,
        frees_at: frees_at.map(Time::from_micros),
    })
}

fn insert(tx: &Transaction<'_>, new: &NewExport, export: &Export) -> Result<(), LedgerError> {
    tx.prepare_cached(
        "INSERT INTO export (job_id, user_id, idempotency_key, fingerprint, scope, recipe,
                             encoder, snapshot, messages_total, created_at, state, due_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, 'queued', ?11)",
    )?
    .execute(params![
        export.job_id.to_string(),
        export.user.as_str(),
        new.key.as_str(),
        new.request.fingerprint(),
        export.scope.to_string(),
        to_json(&export.recipe)?,
        export.recipe.encoder,
        to_json(&export.snapshot)?,
        export.messages_total,
        export.created_at.micros(),
        export.due_at.micros(),
    ])?;
    Ok(())
}

fn keep_windows(tx: &Transaction<'_>, job: JobId, windows: &Windows) -> rusqlite::Result<()> {
    let mut statement = tx.prepare_cached(
        "INSERT INTO export_stay (job_id, conv, from_gseq, to_gseq, first_seq, last_seq)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    let job = job.to_string();
    for window in windows.iter() {
        for stay in &window.stays {
            statement.execute(params![
                job,
                window.conv.as_str(),
                stay.from_gseq,
                stay.to_gseq,
                stay.first_seq,
                stay.last_seq
            ])?;
        }
    }
    Ok(())
}

fn windows(tx: &Transaction<'_>, job: JobId) -> Result<Windows, LedgerError> {
    let mut statement = tx.prepare_cached(
        "SELECT conv, from_gseq, to_gseq, first_seq, last_seq FROM export_stay
         WHERE job_id = ?1 ORDER BY conv, from_gseq",
    )?;
    let mut rows = statement.query([job.to_string()])?;
    let mut windows: Vec<Window> = Vec::new();
    while let Some(row) = rows.next()? {
        let conv: String = row.get(0)?;
        let stay = Stay {
            from_gseq: row.get(1)?,
            to_gseq: row.get(2)?,
            first_seq: row.get(3)?,
            last_seq: row.get(4)?,
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

// ---- working

/// The job that is to be claimed next: the oldest due one of the user served longest ago.
fn next_job(tx: &Transaction<'_>, offer: &Offer, now: Time) -> Result<Option<JobId>, LedgerError> {
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
    let mut running = tx.prepare_cached(
        "SELECT count(*) FROM export
         WHERE user_id = ?1 AND state = 'running' AND lease_until > ?2 AND lease_until <= ?3",
    )?;
    // A lease further ahead than two lengths was made by a clock that was wrong.
    let mut job = tx.prepare_cached(
        "SELECT job_id FROM export
         WHERE user_id = ?1 AND encoder IN (SELECT value FROM json_each(?4))
           AND ((state = 'queued' AND due_at <= ?2)
                OR (state = 'running' AND (lease_until <= ?2 OR lease_until > ?3)))
         ORDER BY created_at, job_id LIMIT 1",
    )?;
    let now_micros = now.micros();
    let too_far = now.plus(offer.lease * 2).micros();
    let encoders = to_json(&offer.encoders)?;
    let mut users = users.query([])?;
    while let Some(row) = users.next()? {
        let user: String = row.get(0)?;
        let held: u64 = running.query_row(params![user, now_micros, too_far], |row| row.get(0))?;
        if offer.running_per_user != 0 && held >= offer.running_per_user {
            continue;
        }
        let found: Option<String> = job
            .query_row(params![user, now_micros, too_far, encoders], |row| {
                row.get(0)
            })
            .optional()?;
        if let Some(found) = found {
            return Ok(Some(job_id(&found)?));
        }
    }
    Ok(None)
}

fn claim(tx: &Transaction<'_>, offer: &Offer, now: Time) -> Result<Option<Claim>, LedgerError> {
    let refused = |refused: crate::export::Refused| LedgerError::Refused(refused.state);
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

fn part_done(tx: &Transaction<'_>, job: JobId, part: &Part) -> Result<(), LedgerError> {
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

// ---- rows

const COLUMNS: &str = "job_id, user_id, scope, recipe, snapshot, messages_total, created_at,
     state, started_at, finished_at, expires_at, attempts, strikes, due_at,
     claim, lease_until, renewed_at, progressed,
     artefact_claim, artefact_sha256, artefact_bytes, artefact_messages, artefact_parts,
     problem_type, problem_detail, waiting_type, waiting_detail, waiting_since,
     revoked_at, revoked_by, revoked_reason, purging";

fn load(tx: &Transaction<'_>, job: JobId) -> Result<Option<Export>, LedgerError> {
    let sql = format!("SELECT {COLUMNS} FROM export WHERE job_id = ?1");
    let mut statement = tx.prepare_cached(&sql)?;
    let mut rows = statement.query([job.to_string()])?;
    rows.next()?.map(export_of).transpose()
}

/// Writes everything of a job that can change after its creation.
fn store(tx: &Transaction<'_>, export: &Export) -> Result<(), LedgerError> {
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
    Ok(())
}

fn export_of(row: &Row<'_>) -> Result<Export, LedgerError> {
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
            Some(text) => ClaimId::parse(&text)
                .map(Some)
                .ok_or_else(|| unreadable(name, &text)),
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

fn count(tx: &Transaction<'_>, export: Export) -> Result<Found, LedgerError> {
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

fn part_of(row: &Row<'_>) -> Result<Part, LedgerError> {
    let claim: String = row.get(1)?;
    Ok(Part {
        number: row.get(0)?,
        claim: ClaimId::parse(&claim).ok_or_else(|| unreadable("claim", &claim))?,
        first: (row.get(2)?, row.get(3)?),
        last: (row.get(4)?, row.get(5)?),
        messages: row.get(6)?,
        raw_bytes: row.get(7)?,
        crc32: row.get(8)?,
        bytes: row.get(9)?,
        sha256: row.get(10)?,
    })
}

fn job_id(text: &str) -> Result<JobId, LedgerError> {
    JobId::parse(text).ok_or_else(|| unreadable("job_id", text))
}

fn user_id(text: String) -> Result<UserId, LedgerError> {
    UserId::parse(text).map_err(|reason| unreadable("user_id", reason))
}

fn to_json(value: &impl serde::Serialize) -> Result<String, LedgerError> {
    serde_json::to_string(value).map_err(|e| LedgerError::Unreadable(e.to_string()))
}

fn from_json<T: serde::de::DeserializeOwned>(name: &str, text: &str) -> Result<T, LedgerError> {
    serde_json::from_str(text).map_err(|e| unreadable(name, &e.to_string()))
}

fn unreadable(column: &str, what: &str) -> LedgerError {
    LedgerError::Unreadable(format!("{column}: {what}"))
}

fn unavailable(error: SourceError) -> CreateError {
    CreateError::Ledger(LedgerError::Unavailable(error.to_string()))
}
