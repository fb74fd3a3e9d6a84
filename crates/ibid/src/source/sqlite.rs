//! The log in SQLite. There is one writer at a time, so gseq order is commit order and a
//! snapshot is the highest gseq.

mod append;
mod read;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{OptionalExtension as _, Transaction, params};

use self::append::{append, imported, learn};
use self::read::read_page;
use super::{
    Batch, Imported, Page, Place, Sight, Source, SourceError, TakeError, Windows, is_snapshot,
    snapshot_text,
};
use crate::append::{Names, Outcome};
use crate::event::{Event, EventKind, ExMembers, History};
use crate::ids::{ConvId, JobId, UserId};
use crate::scope::Scope;
use crate::snapshot::{Policy, Snapshot, Stay, Window, effective_stays};
use crate::sqlite::Db;

/// The log in an SQLite file.
pub struct SqliteSource {
    db: Db,
}

impl SqliteSource {
    pub fn new(db: Db) -> SqliteSource {
        SqliteSource { db }
    }
}

#[async_trait]
impl Source for SqliteSource {
    async fn append(&self, batch: Batch) -> Result<Vec<Outcome>, SourceError> {
        self.db.write(move |tx| append(tx, &batch)).await
    }

    async fn learn(
        &self,
        mut names: Names,
        convs: Vec<ConvId>,
        ids: Vec<String>,
    ) -> Result<Names, SourceError> {
        self.db
            .read(move |tx| {
                learn(tx, &mut names, convs, ids)?;
                Ok(names)
            })
            .await
    }

    async fn imported(&self, digest: [u8; 32]) -> Result<Option<Imported>, SourceError> {
        self.db.read(move |tx| Ok(imported(tx, &digest)?)).await
    }

    async fn end_load(&self) -> Result<(), SourceError> {
        self.db
            .write(|tx| {
                tx.execute("UPDATE import SET first = 0 WHERE first = 1", [])?;
                Ok(())
            })
            .await
    }

    async fn take(
        &self,
        job: JobId,
        ledger: &str,
        user: &UserId,
        scope: &Scope,
    ) -> Result<Sight, TakeError> {
        let (ledger, user, scope) = (ledger.to_owned(), user.clone(), scope.clone());
        self.db
            .write(move |tx| {
                let sight = sight(tx, &user, &scope)?;
                pin(tx, job, Some(&ledger), &sight.snapshot)?;
                Ok(sight)
            })
            .await
    }

    async fn pinned(&self, job: JobId, snapshot: &Snapshot) -> Result<bool, SourceError> {
        let snapshot = snapshot.clone();
        self.db
            .read(move |tx| {
                let text: Option<String> = tx
                    .prepare_cached("SELECT snapshot FROM pin WHERE job_id = ?1")?
                    .query_row([job.to_string()], |row| row.get(0))
                    .optional()?;
                Ok(text.is_some_and(|text| is_snapshot(&text, &snapshot)))
            })
            .await
    }

    async fn pins(
        &self,
        ledger: &str,
        age: Duration,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<JobId>, SourceError> {
        let ledger = ledger.to_owned();
        self.db
            .read(move |tx| {
                let mut statement = tx.prepare_cached(
                    "SELECT job_id FROM pin
                     WHERE pinned_at <= unixepoch('subsec') * 1000000 - ?1 AND job_id > ?2
                       AND ledger = ?4
                     ORDER BY job_id LIMIT ?3",
                )?;
                let age = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
                let after = after.map_or_else(String::new, |job| job.to_string());
                let mut rows = statement.query(params![age, after, limit, ledger])?;
                let mut jobs = Vec::new();
                while let Some(row) = rows.next()? {
                    jobs.extend(JobId::parse(&row.get::<_, String>(0)?));
                }
                Ok(jobs)
            })
            .await
    }

    async fn unpin(&self, job: JobId) -> Result<(), SourceError> {
        self.db
            .write(move |tx| {
                tx.prepare_cached("DELETE FROM pin WHERE job_id = ?1")?
                    .execute([job.to_string()])?;
                Ok(())
            })
            .await
    }

    async fn page(
        &self,
        snapshot: &Snapshot,
        windows: &Arc<Windows>,
        place: Place,
        mut page: Page,
    ) -> Result<Page, SourceError> {
        let (snapshot, windows) = (snapshot.clone(), Arc::clone(windows));
        self.db
            .read(move |tx| {
                page.clear();
                read_page(tx, &snapshot, &windows, place, &mut page)?;
                Ok(page)
            })
            .await
    }

    async fn account_enabled(&self, user: &UserId) -> Result<bool, SourceError> {
        let user = user.clone();
        self.db
            .read(move |tx| Ok(account_enabled(tx, &user)?))
            .await
    }

    async fn set_account(&self, user: &UserId, enabled: bool) -> Result<(), SourceError> {
        let kind = EventKind::Account {
            user: user.clone(),
            enabled,
        };
        let batch = Batch {
            events: vec![(1, Event { id: None, kind })],
            skip_invalid: false,
            import: None,
        };
        self.append(batch).await.map(drop)
    }
}

/// What `user` may see of `scope` now, and the snapshot that goes with it.
///
/// # Errors
/// As [`Source::take`].
pub(crate) fn sight(
    tx: &Transaction<'_>,
    user: &UserId,
    scope: &Scope,
) -> Result<Sight, TakeError> {
    if is_loading(tx)? {
        return Err(TakeError::Loading);
    }
    let windows = windows(tx, user, scope)?.ok_or(TakeError::ScopeInvalid)?;
    let snapshot = snapshot(tx)?;
    Ok(Sight { snapshot, windows })
}

/// Pins `snapshot` for `job` of `ledger`; `None` is the one in this database.
pub(crate) fn pin(
    tx: &Transaction<'_>,
    job: JobId,
    ledger: Option<&str>,
    snapshot: &Snapshot,
) -> Result<(), SourceError> {
    tx.prepare_cached(
        "INSERT INTO pin (job_id, snapshot, ledger)
         VALUES (?1, ?2, coalesce(?3, (SELECT uuid FROM ledger_identity)))",
    )?
    .execute(params![job.to_string(), snapshot_text(snapshot)?, ledger])?;
    Ok(())
}

/// The snapshot as it is now: everything that is committed.
fn snapshot(tx: &Transaction<'_>) -> rusqlite::Result<Snapshot> {
    let gseq = tx
        .prepare_cached("SELECT gseq FROM log_counter")?
        .query_row([], |row| row.get(0))?;
    Ok(Snapshot::up_to(gseq))
}

/// Whether a first load of the log has begun and is not finished.
fn is_loading(tx: &Transaction<'_>) -> rusqlite::Result<bool> {
    tx.prepare_cached("SELECT EXISTS (SELECT 1 FROM import WHERE first = 1 AND finished = 0)")?
        .query_row([], |row| row.get(0))
}

/// What `user` may see of `scope` now, or `None` if it is a conversation in which the user
/// never was.
fn windows(
    tx: &Transaction<'_>,
    user: &UserId,
    scope: &Scope,
) -> Result<Option<Windows>, SourceError> {
    let only = match scope {
        Scope::All => None,
        Scope::Conv(conv) => Some(conv.as_str()),
    };
    // Two statements, because one with `?2 IS NULL OR` would not use the key.
    let sql = match only {
        Some(_) => {
            "SELECT s.conv, s.from_gseq, s.to_gseq, s.first_seq, coalesce(s.last_seq, c.last_seq),
                    c.history, c.ex_members
             FROM stay s JOIN conv c ON c.conv = s.conv
             WHERE s.user_id = ?1 AND s.conv = ?2 ORDER BY s.conv, s.from_gseq"
        }
        None => {
            "SELECT s.conv, s.from_gseq, s.to_gseq, s.first_seq, coalesce(s.last_seq, c.last_seq),
                    c.history, c.ex_members
             FROM stay s JOIN conv c ON c.conv = s.conv
             WHERE s.user_id = ?1 AND ?2 IS NULL ORDER BY s.conv, s.from_gseq"
        }
    };
    let mut statement = tx.prepare_cached(sql)?;
    let mut rows = statement.query(params![user.as_str(), only])?;
    let mut all: Vec<(ConvId, Policy, Vec<Stay>)> = Vec::new();
    while let Some(row) = rows.next()? {
        let conv = conv_id(row.get(0)?)?;
        let stay = Stay {
            from_gseq: row.get(1)?,
            to_gseq: row.get(2)?,
            first_seq: row.get(3)?,
            last_seq: row.get(4)?,
        };
        match all.last_mut() {
            Some((last, _, stays)) if *last == conv => stays.push(stay),
            _ => all.push((conv, policy(row.get(5)?, row.get(6)?), vec![stay])),
        }
    }
    if only.is_some() && all.is_empty() {
        return Ok(None);
    }
    let windows = all.into_iter().map(|(conv, policy, stays)| Window {
        conv,
        stays: effective_stays(stays, policy),
    });
    Ok(Some(Windows::new(windows.collect())))
}

pub(crate) fn account_enabled(tx: &Transaction<'_>, user: &UserId) -> rusqlite::Result<bool> {
    let enabled = tx
        .prepare_cached("SELECT enabled FROM account WHERE user_id = ?1")?
        .query_row([user.as_str()], |row| row.get(0))
        .optional()?;
    Ok(enabled.unwrap_or(true))
}

fn policy(history: String, ex_members: String) -> Policy {
    Policy {
        history: History::parse(&history).unwrap_or_default(),
        ex_members: ExMembers::parse(&ex_members).unwrap_or_default(),
    }
}

fn conv_id(text: String) -> Result<ConvId, SourceError> {
    ConvId::parse(text)
        .map_err(|reason| SourceError::LogChanged(format!("a conversation's id {reason}")))
}
