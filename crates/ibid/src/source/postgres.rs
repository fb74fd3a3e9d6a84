//! The log in PostgreSQL. Many write at once and a smaller gseq may commit after a larger one, so
//! every entry carries the transaction that wrote it, and a snapshot says which of these were
//! committed. Inside one conversation every append holds the conversation's row until it commits;
//! there gseq order is commit order.

mod append;
mod read;
mod store;
mod views;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::types::{FromSql, Type};
use tokio_postgres::{Client, Row, Transaction};

use self::append::{Failure, append, learn};
use self::read::read_page;
use self::views::{check_appendable, check_log};
use super::{
    Batch, Imported, Page, Place, Sight, Source, SourceError, TakeError, Windows, is_snapshot,
    snapshot_text,
};
use crate::append::{Names, Outcome};
use crate::event::{Event, EventKind, ExMembers, History};
use crate::ids::{ConvId, JobId, UserId};
use crate::postgres::{IS_ANCHORED, NOT_ANCHORED, Pg, PgError, begin, durable};
use crate::scope::Scope;
use crate::snapshot::{Policy, Snapshot, Stay, Window, effective_stays};

/// How often a batch that other writers got in the way of is tried again.
const RETRIES: u32 = 8;

/// The log in a PostgreSQL database.
pub struct PostgresSource {
    pg: Pg,
}

impl PostgresSource {
    pub fn new(pg: Pg) -> PostgresSource {
        PostgresSource { pg }
    }

    async fn try_append(&self, batch: &Batch) -> Result<Vec<Outcome>, Failure> {
        let mut client = self.pg.get().await?;
        check_appendable(&**client, batch.events.iter().map(|(_, event)| event)).await?;
        let tx = begin(&mut client).await?;
        let outcomes = append(&tx, batch).await?;
        tx.commit().await?;
        Ok(outcomes)
    }
}

#[async_trait]
impl Source for PostgresSource {
    async fn append(&self, batch: Batch) -> Result<Vec<Outcome>, SourceError> {
        let mut tries = 0;
        loop {
            match self.try_append(&batch).await {
                Ok(outcomes) => return Ok(outcomes),
                Err(Failure::Overtaken(_)) if tries < RETRIES => {
                    tries += 1;
                    tokio::time::sleep(Duration::from_millis(1 << tries)).await;
                }
                Err(Failure::Overtaken(error) | Failure::Other(error)) => return Err(error),
            }
        }
    }

    async fn learn(
        &self,
        mut names: Names,
        convs: Vec<ConvId>,
        ids: Vec<String>,
    ) -> Result<Names, SourceError> {
        let client = self.pg.get().await?;
        check_log(&**client).await?;
        learn(&client, &mut names, convs, ids).await?;
        Ok(names)
    }

    async fn imported(&self, digest: [u8; 32]) -> Result<Option<Imported>, SourceError> {
        let client = self.pg.get().await?;
        let row = client
            .query_typed_opt(
                "SELECT lines, finished FROM ibid.import WHERE digest = $1",
                &[(&digest.as_slice(), Type::BYTEA)],
            )
            .await?;
        row.map(|row| imported_of(&row)).transpose()
    }

    async fn end_load(&self) -> Result<(), SourceError> {
        let client = self.pg.get().await?;
        client
            .execute_typed("UPDATE ibid.import SET first = false WHERE first", &[])
            .await?;
        Ok(())
    }

    async fn take(
        &self,
        job: JobId,
        ledger: &str,
        user: &UserId,
        scope: &Scope,
    ) -> Result<Sight, TakeError> {
        let mut client = self.pg.get().await?;
        let tx = begin(&mut client).await?;
        let sight = sight(&tx, user, scope).await?;
        pin(&tx, job, Some(ledger), &sight.snapshot).await?;
        durable(&tx).await?;
        tx.commit().await?;
        Ok(sight)
    }

    async fn pinned(&self, job: JobId, snapshot: &Snapshot) -> Result<bool, SourceError> {
        let client = self.pg.get().await?;
        let row = client
            .query_typed_opt(
                "SELECT snapshot FROM ibid.pin WHERE job_id = $1",
                &[(&job.to_string(), Type::TEXT)],
            )
            .await?;
        let Some(row) = row else {
            return Ok(false);
        };
        Ok(is_snapshot(row.try_get(0)?, snapshot))
    }

    async fn pins(
        &self,
        ledger: &str,
        age: Duration,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<JobId>, SourceError> {
        let client = self.pg.get().await?;
        let age = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
        let after = after.map_or_else(String::new, |job| job.to_string());
        let rows = client
            .query_typed(
                "SELECT job_id FROM ibid.pin
                 WHERE pinned_at <= extract(epoch FROM clock_timestamp()) * 1000000 - $1
                   AND job_id > $2 AND ledger = $4
                 ORDER BY job_id LIMIT $3",
                &[
                    (&age, Type::INT8),
                    (&after, Type::TEXT),
                    (&i64::from(limit), Type::INT8),
                    (&ledger, Type::TEXT),
                ],
            )
            .await?;
        let mut jobs = Vec::new();
        for row in &rows {
            jobs.extend(JobId::parse(row.try_get(0)?));
        }
        Ok(jobs)
    }

    async fn unpin(&self, job: JobId) -> Result<(), SourceError> {
        let client = self.pg.get().await?;
        client
            .execute_typed(
                "DELETE FROM ibid.pin WHERE job_id = $1",
                &[(&job.to_string(), Type::TEXT)],
            )
            .await?;
        Ok(())
    }

    async fn page(
        &self,
        snapshot: &Snapshot,
        windows: &Arc<Windows>,
        place: Place,
        mut page: Page,
    ) -> Result<Page, SourceError> {
        let client = self.pg.get().await?;
        page.clear();
        read_page(&client, snapshot, windows, place, &mut page).await?;
        Ok(page)
    }

    async fn account_enabled(&self, user: &UserId) -> Result<bool, SourceError> {
        let client = self.pg.get().await?;
        account_enabled(&client, user).await
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
/// Both come from one statement, so that they belong together in READ COMMITTED too.
///
/// # Errors
/// As [`Source::take`]; [`SourceError::Refused`] on a standby, whose snapshots do not name the transactions that are
/// in progress, and where the log was not written by this database, so that the transactions
/// stored in it are not the ones that a snapshot of this database names.
pub(crate) async fn sight(
    tx: &Transaction<'_>,
    user: &UserId,
    scope: &Scope,
) -> Result<Sight, TakeError> {
    if is_loading(tx).await? {
        return Err(TakeError::Loading);
    }
    let only = match scope {
        Scope::All => None,
        Scope::Conv(conv) => Some(conv.as_str()),
    };
    // Of the database there is one row; of the stays there may be ten thousand.
    //
    // Where the log is the application's own, behind views, these need not have `first_seq` and
    // `last_seq`: the names in the lateral subqueries then mean those of `absent`, and the messages
    // are asked. Nor need a conversation there begin with seq 1.
    let rows = tx
        .query_typed(
            &format!(
                "SELECT pg_is_in_recovery(), {IS_ANCHORED},
                    pg_current_snapshot()::text,
                    (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM ibid.log_gseq),
                    a.baseline,
                    NULL::text, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint,
                    NULL::text, NULL::text, NULL::bigint
             FROM ibid.anchor a
             UNION ALL
             SELECT NULL, NULL, NULL, NULL, NULL,
                    s.conv, s.from_gseq, s.to_gseq,
                    coalesce(s.first, ibid.last_before(s.conv, s.from_gseq, c.last) + 1),
                    CASE WHEN s.to_gseq IS NOT NULL
                    THEN coalesce(s.last, ibid.last_before(s.conv, s.to_gseq, c.last))
                    ELSE coalesce(c.last, (SELECT seq FROM ibid.message m WHERE m.conv = s.conv
                                           ORDER BY m.seq DESC LIMIT 1), 0)
                    END,
                    c.history, c.ex_members,
                    CASE WHEN c.history = 'all'
                         AND (s.first IS NULL OR (SELECT relkind <> 'r' FROM pg_class
                                                  WHERE oid = 'ibid.message'::regclass))
                    THEN (SELECT seq FROM ibid.message m WHERE m.conv = s.conv
                          ORDER BY m.seq LIMIT 1)
                    END
             FROM (SELECT NULL::bigint AS first_seq, NULL::bigint AS last_seq) absent
             CROSS JOIN LATERAL (
                 SELECT v.conv, v.from_gseq, v.to_gseq, first_seq AS first, last_seq AS last
                 FROM ibid.stay v
                 WHERE v.user_id = $1 AND ($2 IS NULL OR v.conv = $2)
             ) s
             LEFT JOIN LATERAL (
                 SELECT v.history, v.ex_members, last_seq AS last
                 FROM ibid.conv v WHERE v.conv = s.conv
             ) c ON true"
            ),
            &[(&user.as_str(), Type::TEXT), (&only, Type::TEXT)],
        )
        .await?;
    let mut snapshot = None;
    let mut convs: BTreeMap<ConvId, Seen> = BTreeMap::new();
    for row in &rows {
        let Some(conv) = row.try_get(5)? else {
            snapshot = Some(snapshot_of(row)?);
            continue;
        };
        let stay = Stay {
            from_gseq: unsigned(row, 6)?,
            to_gseq: unsigned_or_null(row, 7)?,
            first_seq: unsigned(row, 8)?,
            last_seq: unsigned(row, 9)?,
        };
        let policy = policy(row.try_get(10)?, row.try_get(11)?)?;
        let begins = unsigned_or_null(row, 12)?;
        let seen = convs.entry(conv_id(conv)?).or_insert_with(|| Seen {
            policy,
            begins,
            stays: Vec::new(),
        });
        seen.stays.push(stay);
    }
    let snapshot = snapshot.ok_or_else(|| SourceError::Refused(NOT_ANCHORED.to_owned()))?;
    if only.is_some() && convs.is_empty() {
        return Err(TakeError::ScopeInvalid);
    }
    let windows = convs.into_iter().map(|(conv, seen)| seen.window(conv));
    let windows = Windows::new(windows.collect());
    Ok(Sight { snapshot, windows })
}

/// Pins `snapshot` for `job` of `ledger`; `None` is the one in this database.
pub(crate) async fn pin(
    tx: &Transaction<'_>,
    job: JobId,
    ledger: Option<&str>,
    snapshot: &Snapshot,
) -> Result<(), SourceError> {
    tx.execute_typed(
        "INSERT INTO ibid.pin (job_id, snapshot, ledger)
         VALUES ($1, $2, coalesce($3, (SELECT uuid FROM ibid.ledger_identity)))",
        &[
            (&job.to_string(), Type::TEXT),
            (&snapshot_text(snapshot)?, Type::TEXT),
            (&ledger, Type::TEXT),
        ],
    )
    .await?;
    Ok(())
}

/// What the log says of one user in one conversation.
struct Seen {
    policy: Policy,
    /// The first seq, where it need not be 1.
    begins: Option<u64>,
    stays: Vec<Stay>,
}

impl Seen {
    fn window(self, conv: ConvId) -> Window {
        let mut stays = effective_stays(self.stays, self.policy);
        for stay in &mut stays {
            stay.first_seq = stay.first_seq.max(self.begins.unwrap_or(0));
        }
        Window { conv, stays }
    }
}

const STANDBY: &str = "this database is a standby, on which the transactions in progress cannot be \
     told from those that are committed; connect ibid to the primary";

/// The snapshot in the row of the database.
fn snapshot_of(row: &Row) -> Result<Snapshot, SourceError> {
    if row.try_get(0)? {
        return Err(SourceError::Refused(STANDBY.to_owned()));
    }
    if !row.try_get::<_, bool>(1)? {
        return Err(SourceError::Refused(NOT_ANCHORED.to_owned()));
    }
    let text: &str = row.try_get(2)?;
    let (xmax, xip) = parse_snapshot(text)
        .ok_or_else(|| SourceError::Unavailable(format!("{text:?} is not a snapshot")))?;
    Ok(Snapshot {
        low: unsigned(row, 4)?,
        high: unsigned(row, 3)?,
        xmax,
        xip,
    })
}

/// Reads the text of a `pg_snapshot`, `xmin:xmax:xip,xip,...` (PostgreSQL 15, section 9.26.8).
fn parse_snapshot(text: &str) -> Option<(u64, Vec<u64>)> {
    let mut parts = text.split(':').skip(1);
    let (xmax, xip) = (parts.next()?.parse().ok()?, parts.next()?);
    let xip = xip.split(',').filter(|xid| !xid.is_empty());
    let xip = xip.map(|xid| xid.parse().ok()).collect::<Option<_>>()?;
    Some((xmax, xip))
}

/// Whether a first load of the log has begun and is not finished.
async fn is_loading(tx: &Transaction<'_>) -> Result<bool, SourceError> {
    let row = tx
        .query_typed_one(
            "SELECT EXISTS (SELECT FROM ibid.import WHERE first AND NOT finished)",
            &[],
        )
        .await?;
    Ok(row.try_get(0)?)
}

async fn account_enabled(client: &Client, user: &UserId) -> Result<bool, SourceError> {
    let row = client
        .query_typed_opt(
            "SELECT enabled FROM ibid.account WHERE user_id = $1",
            &[(&user.as_str(), Type::TEXT)],
        )
        .await?;
    match row {
        Some(row) => Ok(row.try_get(0)?),
        None => Ok(true),
    }
}

fn imported_of(row: &Row) -> Result<Imported, SourceError> {
    Ok(Imported {
        lines: unsigned(row, 0)?,
        finished: row.try_get(1)?,
    })
}

/// An application's own tables may say anything, or nothing. What is not understood is not guessed.
fn policy(history: Option<&str>, ex_members: Option<&str>) -> Result<Policy, SourceError> {
    let parsed = (
        history.and_then(History::parse),
        ex_members.and_then(ExMembers::parse),
    );
    let (Some(history), Some(ex_members)) = parsed else {
        return Err(SourceError::LogChanged(format!(
            "{history:?}, {ex_members:?} is not the policy of a conversation"
        )));
    };
    Ok(Policy {
        history,
        ex_members,
    })
}

fn conv_id(text: &str) -> Result<ConvId, SourceError> {
    ConvId::parse(text)
        .map_err(|reason| SourceError::LogChanged(format!("a conversation's id {reason}")))
}

/// A number of the log, none of which is ever negative.
fn unsigned(row: &Row, index: usize) -> Result<u64, SourceError> {
    unsigned_or_null(row, index)?
        .ok_or_else(|| SourceError::LogChanged("a number of the log is missing".to_owned()))
}

fn unsigned_or_null(row: &Row, index: usize) -> Result<Option<u64>, SourceError> {
    let number: Option<i64> = row.try_get(index)?;
    number
        .map(u64::try_from)
        .transpose()
        .map_err(|_| SourceError::LogChanged("a number of the log is negative".to_owned()))
}

/// A number as PostgreSQL holds it. What does not fit is larger than anything there is.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A transaction's full 64-bit number, `xid8`.
struct Xid(u64);

impl<'a> FromSql<'a> for Xid {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Xid, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Xid(u64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::XID8
    }
}

/// The bytes of a text or of a bytea; text need not be UTF-8 where the database does not check it.
struct Raw<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(
        _: &Type,
        raw: &'a [u8],
    ) -> Result<Raw<'a>, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Raw(raw))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TEXT | Type::BYTEA)
    }
}

impl From<PgError> for SourceError {
    fn from(error: PgError) -> SourceError {
        SourceError::Unavailable(error.to_string())
    }
}

impl From<PgError> for TakeError {
    fn from(error: PgError) -> TakeError {
        SourceError::from(error).into()
    }
}

impl From<tokio_postgres::Error> for TakeError {
    fn from(error: tokio_postgres::Error) -> TakeError {
        SourceError::from(error).into()
    }
}

impl From<tokio_postgres::Error> for SourceError {
    fn from(error: tokio_postgres::Error) -> SourceError {
        PgError::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_snapshot_is_read() {
        assert_eq!(parse_snapshot("100:100:"), Some((100, vec![])));
        assert_eq!(
            parse_snapshot("4294967396:4294967400:4294967396,4294967399"),
            Some((4_294_967_400, vec![4_294_967_396, 4_294_967_399]))
        );
        for wrong in ["", "100", "100:101", "100:x:", "100:101:1,x"] {
            assert_eq!(parse_snapshot(wrong), None, "{wrong}");
        }
    }
}
