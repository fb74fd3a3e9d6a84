//! The PostgreSQL database that holds the log and the ledger: its pool and its migrations.
//!
//! Everything runs in short transactions, without session state and without named prepared
//! statements, so that a pooler in transaction mode can stand between.

mod own_tables;
mod pool;

use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::Pool;
use tokio::sync::Notify;
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Config, IsolationLevel, NoTls, Socket, Transaction};
use tokio_postgres_rustls::MakeRustlsConnect;

pub use self::own_tables::OwnTables;
use self::pool::Connections;
pub(crate) use self::pool::Lent;
use crate::contents::{Contents, Pins};
use crate::next_release;

/// In order; the number of those applied stands in `ibid.schema_version`. Each only adds, so that
/// programs that know fewer and run already can go on.
const MIGRATIONS: &[&str] = &[
    include_str!("../migrations/postgres/0001_log_and_ledger.sql"),
    include_str!("../migrations/postgres/0002_append_functions.sql"),
    include_str!("../migrations/postgres/0003_faster_appends.sql"),
    include_str!("../migrations/postgres/0004_pins.sql"),
    include_str!("../migrations/postgres/0005_views.sql"),
    include_str!("../migrations/postgres/0006_uploads.sql"),
    include_str!("../migrations/postgres/0007_pins_of_ledgers.sql"),
];

/// The oldest server that is supported, as `server_version_num`.
const OLDEST_SERVER: i32 = 150_000;

/// The lock that migrations of several nodes are serialised by: "ibid" and a version.
const MIGRATION_LOCK: i64 = 0x6962_6964_0001;

/// Whether the database is the one that ibid has worked in, of its row `a` in `ibid.anchor`: a
/// restored dump, a logical copy and an upgraded cluster have another number, or are another
/// database of the same one. A copy of a server's files (a base backup, a disk's snapshot) is not
/// told from the original.
pub(crate) const IS_ANCHORED: &str = "
    a.system_identifier = (SELECT system_identifier FROM pg_control_system())
    AND a.database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())";

pub(crate) const NOT_ANCHORED: &str = "this database is not the one that ibid has worked in (it \
     was restored, copied or upgraded), so no export is created or worked on and nothing is \
     deleted; run `ibid admin adopt` once nobody uses the other one";

/// How long it takes until a lost connection is made again on which jobs are listened for.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// How long a connection is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// After how long without a word it is asked whether the other end of a connection is still there,
/// and how long it may take to say so. Connections on which nobody asks anything need it, too: the
/// one on which jobs are listened for.
const SILENCE: Duration = Duration::from_secs(30);

/// Why the database cannot be used. No password stands in any of them.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("the address of the database cannot be read: {0}; write postgres://USER@HOST/DATABASE")]
    Address(String),
    #[error("the database does not answer: {0}; check its address, and that it runs")]
    Unreachable(String),
    #[error("PostgreSQL {found} is too old; use 15 or newer")]
    TooOld { found: String },
    #[error("the database has no schema of ibid yet; run `ibid admin migrate`")]
    NotMigrated,
    #[error(
        "the schema of ibid in the database is version {found} and this program needs {known}; \
         run `ibid admin migrate`"
    )]
    Older { found: i32, known: usize },
    #[error(
        "the schema of ibid in the database was made by a newer ibid (version {found}, this one \
         knows {known}); use that version; nothing was changed"
    )]
    Newer { found: i32, known: usize },
    #[error("the migration failed and nothing was changed: {0}")]
    Migration(String),
    #[error("the database was not adopted and nothing was changed: {0}")]
    Adoption(String),
}

/// Why a statement failed.
#[derive(Debug, thiserror::Error)]
pub enum PgError {
    #[error("the database failed: {}", describe(.0))]
    Postgres(#[from] tokio_postgres::Error),
    #[error("no connection to the database: {0}")]
    Pool(String),
}

/// The database's own words, which `Display` of the driver leaves out.
fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} ({})", db.message(), db.code().code()),
        None => {
            let mut text = error.to_string();
            if let Some(cause) = std::error::Error::source(error) {
                text.push_str(": ");
                text.push_str(&cause.to_string());
            }
            text
        }
    }
}

/// A handle to the database. Clones share one pool of connections.
#[derive(Clone)]
pub struct Pg {
    pool: Pool<Connections>,
    config: Arc<Config>,
    answer_limit: Duration,
}

impl std::fmt::Debug for Pg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The address may hold a password.
        f.write_str("Pg")
    }
}

impl Pg {
    /// Prepares connections to the database at `url` and asks whether one can be had. With
    /// `sslmode=require` the connection is encrypted, and the server's certificate is checked
    /// against the machine's authorities; without it, it is not encrypted.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(url: &str) -> Result<Pg, ConnectError> {
        let mut config: Config = url
            .parse()
            .map_err(|e: tokio_postgres::Error| ConnectError::Address(describe(&e)))?;
        if config.get_application_name().is_none() {
            config.application_name("ibid");
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(PATIENCE);
        }
        if config.get_keepalives_idle() == Config::new().get_keepalives_idle() {
            config.keepalives_idle(SILENCE);
            config.keepalives_interval(SILENCE / 6);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(SILENCE);
        }
        let tls = match config.get_ssl_mode() {
            SslMode::Require => Some(tls()?),
            _ => {
                config.ssl_mode(SslMode::Disable);
                None
            }
        };
        let pool = pool::of(config.clone(), tls)?;
        let config = Arc::new(config);
        let pg = Pg {
            pool,
            config,
            answer_limit: pool::ANSWER_LIMIT,
        };
        pg.check_server().await?;
        Ok(pg)
    }

    /// Wakes `wake` whenever a job is created, on any node, until it is dropped. Listens on a
    /// connection of its own, since a pooler in transaction mode forgets who listens; where
    /// there is one, nothing comes and polling finds the jobs. When the connection was lost,
    /// jobs may have been missed, so `wake` is woken once it is back.
    pub async fn listen(&self, wake: &Notify) {
        loop {
            match self.config.get_ssl_mode() {
                SslMode::Require => match tls() {
                    Ok(tls) => self.listen_once(tls, wake).await,
                    Err(error) => tracing::warn!(%error, "jobs cannot be listened for"),
                },
                _ => self.listen_once(NoTls, wake).await,
            }
            tokio::time::sleep(LISTEN_AGAIN).await;
        }
    }

    /// Listens until the connection is lost.
    async fn listen_once<T>(&self, tls: T, wake: &Notify)
    where
        T: MakeTlsConnect<Socket>,
        T::Stream: Send + 'static,
    {
        let connecting = tokio::time::timeout(PATIENCE, self.config.connect(tls));
        let (client, mut connection) = match connecting.await {
            Ok(Ok(connected)) => connected,
            Ok(Err(error)) => {
                tracing::debug!(error = describe(&error), "jobs cannot be listened for yet");
                return;
            }
            Err(_) => return,
        };
        let messages = async {
            loop {
                match std::future::poll_fn(|cx| connection.poll_message(cx)).await {
                    Some(Ok(AsyncMessage::Notification(_))) => wake.notify_one(),
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return,
                }
            }
        };
        let listening = async {
            let asked = client.batch_execute("LISTEN ibid_jobs");
            match tokio::time::timeout(PATIENCE, asked).await {
                Ok(Ok(())) => {
                    wake.notify_one();
                    // The client is kept: without it the connection ends.
                    std::future::pending::<()>().await;
                }
                Ok(Err(error)) => tracing::debug!(error = describe(&error), "LISTEN failed"),
                Err(_) => {}
            }
        };
        tokio::select! {
            () = messages => {}
            () = listening => {}
        }
    }

    async fn check_server(&self) -> Result<(), ConnectError> {
        let client = self.get().await.map_err(unreachable)?;
        let row = client
            .query_typed_one(
                "SELECT current_setting('server_version_num')::int, version()",
                &[],
            )
            .await
            .map_err(|e| unreachable(e.into()))?;
        let (number, version): (i32, String) = (row.get(0), row.get(1));
        if number < OLDEST_SERVER {
            let found = version.split_whitespace().nth(1).unwrap_or("").to_owned();
            return Err(ConnectError::TooOld { found });
        }
        Ok(())
    }

    /// Whether the schema is the one that this program knows.
    ///
    /// # Errors
    /// It is missing, older or newer.
    pub async fn check_schema(&self) -> Result<(), ConnectError> {
        let mut client = self.get().await.map_err(unreachable)?;
        let transaction = begin(&mut client).await.map_err(unreachable)?;
        let known = migrations().len();
        match version(&transaction).await.map_err(unreachable)? {
            None => Err(ConnectError::NotMigrated),
            Some(found) if usize::try_from(found) == Ok(known) => Ok(()),
            Some(found) if usize::try_from(found).is_ok_and(|found| found < known) => {
                Err(ConnectError::Older { found, known })
            }
            Some(found) => Err(ConnectError::Newer { found, known }),
        }
    }

    /// Brings the schema up to date, in one transaction. Several nodes may do it at once: one
    /// does the work, the others wait and find it done. Gives how many migrations were applied.
    ///
    /// # Errors
    /// The schema is newer, or a statement failed; nothing was changed then.
    pub async fn migrate(&self) -> Result<usize, ConnectError> {
        let failed = |e: tokio_postgres::Error| ConnectError::Migration(describe(&e));
        let mut client = self.get_for_long().await.map_err(unreachable)?;
        let transaction = begin(&mut client).await.map_err(unreachable)?;
        transaction
            .execute_typed(
                "SELECT pg_advisory_xact_lock($1)",
                &[(&MIGRATION_LOCK, Type::INT8)],
            )
            .await
            .map_err(failed)?;
        let found = version(&transaction)
            .await
            .map_err(|e| ConnectError::Migration(e.to_string()))?
            .unwrap_or(0);
        let migrations = migrations();
        let known = migrations.len();
        let done = usize::try_from(found).unwrap_or(usize::MAX);
        if done > known {
            return Err(ConnectError::Newer { found, known });
        }
        if done == known {
            return Ok(0);
        }
        if done == 0 {
            transaction
                .batch_execute(
                    "CREATE SCHEMA IF NOT EXISTS ibid;
                     CREATE TABLE IF NOT EXISTS ibid.schema_version (
                         one boolean PRIMARY KEY CHECK (one), version integer NOT NULL
                     );
                     INSERT INTO ibid.schema_version VALUES (true, 0) ON CONFLICT DO NOTHING",
                )
                .await
                .map_err(failed)?;
        }
        for migration in &migrations[done..] {
            transaction.batch_execute(migration).await.map_err(failed)?;
        }
        let version = i32::try_from(known).unwrap_or(i32::MAX);
        transaction
            .execute_typed(
                "UPDATE ibid.schema_version SET version = $1",
                &[(&version, Type::INT4)],
            )
            .await
            .map_err(failed)?;
        transaction.commit().await.map_err(failed)?;
        Ok(known - done)
    }
}

/// What a look at the database found.
#[derive(Clone, Debug)]
pub struct PgInspection {
    /// The database is a standby, in which nothing can be created.
    pub standby: bool,
    /// The database is the one in which its log was written.
    pub anchored: bool,
    /// Standbys follow, and none of them is waited for when something is committed.
    pub asynchronous: bool,
    /// What is committed survives a power cut.
    pub fsync: bool,
    /// Updates and deletes that PostgreSQL has counted in ibid's tables to which rows are only
    /// added.
    pub changes: u64,
    pub contents: Contents,
    /// Where the log is the application's own: what was found there. What cannot be read is not
    /// counted.
    pub own_tables: Option<OwnTables>,
}

impl Pg {
    /// Looks at the database, whose schema must be up to date; changes nothing.
    ///
    /// # Errors
    /// The schema is not up to date, or the database does not answer.
    pub async fn inspect(&self) -> Result<PgInspection, ConnectError> {
        self.check_schema().await?;
        let mut client = self.get_for_long().await.map_err(unreachable)?;
        let own_tables = own_tables::inspect(&mut client)
            .await
            .map_err(unreachable)?;
        let readable = own_tables.as_ref().is_none_or(|found| found.readable);
        let (conversations, messages) = match readable {
            true => counts(&client).await.map_err(unreachable)?,
            false => (0, 0),
        };
        let sql = format!(
            "SELECT pg_is_in_recovery(),
                    EXISTS (SELECT FROM ibid.anchor a WHERE {IS_ANCHORED}),
                    (SELECT count(*) FROM ibid.export),
                    EXISTS (SELECT FROM ibid.import WHERE first AND NOT finished),
                    EXISTS (SELECT FROM pg_stat_replication)
                        AND current_setting('synchronous_standby_names') = '',
                    current_setting('fsync')::boolean,
                    (SELECT coalesce(sum(n_tup_upd + n_tup_del), 0)::bigint
                     FROM pg_stat_user_tables
                     WHERE schemaname = 'ibid' AND relname IN ('message', 'revision')),
                    (SELECT count(*) FROM ibid.export WHERE state = 'done' AND expires_at
                         > (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"
        );
        let row = client
            .query_typed_one(&sql, &[])
            .await
            .map_err(|e| unreachable(e.into()))?;
        let count = |index: usize| u64::try_from(row.get::<_, i64>(index)).unwrap_or(0);
        let pairs = async |sql: &str| match client.query_typed(sql, &[]).await {
            Ok(rows) => Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect()),
            Err(error) => Err(unreachable(error.into())),
        };
        let needed: Vec<(String, String)> = pairs(
            "SELECT job_id, snapshot FROM ibid.export
             WHERE state IN ('queued', 'running', 'failed')",
        )
        .await?;
        let there = pairs("SELECT job_id, snapshot FROM ibid.pin").await?;
        Ok(PgInspection {
            standby: row.get(0),
            anchored: row.get(1),
            contents: Contents {
                conversations,
                messages,
                exports: count(2),
                kept: count(7),
                loading: row.get(3),
                latest: None,
                pins: Pins {
                    needed,
                    there: there.into_iter().collect(),
                },
            },
            asynchronous: row.get(4),
            fsync: row.get(5),
            changes: count(6),
            own_tables,
        })
    }

    /// Takes this database for the one in which the log and the ledger live on: after a dump was
    /// restored, a logical copy has become the main one, or the server was upgraded.
    ///
    /// The ledger keeps its identity, and with it its store of artefacts and its pins in a log that
    /// lies elsewhere: they are this database's from then on. If the original goes on as well, each
    /// deletes from a shared store what only the other one names.
    ///
    /// The transactions stored in the log are then those of another database, so everything that
    /// is in it counts as committed, for all later snapshots; and new entries get numbers above
    /// all that any snapshot so far has looked at, so that exports created before stay as they
    /// are. Nobody can write to the log meanwhile.
    ///
    /// # Errors
    /// The database is a standby, somebody keeps writing, the role may not lock an application's own
    /// tables, or a statement failed; nothing was changed then.
    pub async fn adopt(&self) -> Result<(), ConnectError> {
        let failed = |e: tokio_postgres::Error| ConnectError::Adoption(describe(&e));
        self.check_schema().await?;
        let mut client = self.get_for_long().await.map_err(unreachable)?;
        let transaction = begin(&mut client).await.map_err(unreachable)?;
        let standby = transaction
            .query_typed_one("SELECT pg_is_in_recovery()", &[])
            .await
            .map_err(failed)?;
        if standby.get(0) {
            let why = "the database is a standby; adopt the primary, or promote this one first";
            return Err(ConnectError::Adoption(why.to_owned()));
        }
        lock_log(&transaction).await?;
        transaction
            .batch_execute(
                "UPDATE ibid.anchor SET
                     system_identifier = (SELECT system_identifier FROM pg_control_system()),
                     database_oid = (SELECT oid FROM pg_database WHERE datname = current_database()),
                     baseline = greatest(
                         baseline,
                         (SELECT max(gseq) FROM ibid.message),
                         (SELECT max(gseq) FROM ibid.revision),
                         (SELECT max(greatest(from_gseq, to_gseq)) FROM ibid.stay));
                 SELECT setval('ibid.log_gseq', greatest(
                     (SELECT last_value FROM ibid.log_gseq),
                     (SELECT baseline FROM ibid.anchor),
                     (SELECT max((snapshot::json ->> 'high')::bigint) FROM ibid.pin),
                     (SELECT max((snapshot::json ->> 'high')::bigint) FROM ibid.export)))",
            )
            .await
            .map_err(failed)?;
        transaction.commit().await.map_err(failed)
    }
}

/// Begins a transaction that sees with each statement what was committed before it, whatever
/// the database or the role has as its default. Of a process that stands still in the middle of
/// one, or is cut off, the server ends it, so that its locks are in nobody's way for long.
pub(crate) async fn begin(client: &mut Lent) -> Result<Transaction<'_>, PgError> {
    let begun = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .start()
        .await?;
    begun
        .batch_execute("SET LOCAL idle_in_transaction_session_timeout = '10s'")
        .await?;
    Ok(begun)
}

/// Makes the commit wait until it is on disk, also where the database's default is not to: what
/// somebody was told must survive a crash.
pub(crate) async fn durable(tx: &Transaction<'_>) -> Result<(), PgError> {
    tx.execute_typed(
        "SELECT set_config('synchronous_commit', 'on', true)
         WHERE current_setting('synchronous_commit') IN ('off', 'local')",
        &[],
    )
    .await?;
    Ok(())
}

/// Keeps everybody from writing to the log until the transaction ends.
async fn lock_log(transaction: &Transaction<'_>) -> Result<(), ConnectError> {
    let locked: Result<bool, tokio_postgres::Error> = async {
        let row = transaction
            .query_typed_one(
                "SELECT ibid.lock_log(), EXISTS (
                     SELECT FROM pg_class WHERE oid = 'ibid.message'::regclass AND relkind = 'v')",
                &[],
            )
            .await?;
        let (locked, own_tables): (bool, bool) = (row.try_get(0)?, row.try_get(1)?);
        if locked && own_tables {
            // Locking a view locks the tables that it reads (PostgreSQL 15, LOCK). How an
            // application begins to write is its own matter, so these are locked too.
            transaction
                .batch_execute(
                    "SET LOCAL lock_timeout = '5s';
                     LOCK TABLE ibid.stay, ibid.message, ibid.revision
                     IN SHARE ROW EXCLUSIVE MODE",
                )
                .await?;
        }
        Ok(locked)
    }
    .await;
    let why = match locked {
        Ok(true) => return Ok(()),
        Ok(false) => WRITING.to_owned(),
        Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => WRITING.to_owned(),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            format!(
                "the tables of the log cannot be locked against writers ({}); run it as a role \
                 that may lock them, such as their owner",
                describe(&error)
            )
        }
        Err(error) => describe(&error),
    };
    Err(ConnectError::Adoption(why))
}

const WRITING: &str = "somebody is writing to the log and does not end; stop the writers first";

/// How many conversations and messages there are, told from their seqs.
async fn counts(client: &Client) -> Result<(u64, u64), PgError> {
    // A view need not have `last_seq`: the name means that of `absent` then.
    let row = client
        .query_typed_one(
            "SELECT count(*), coalesce(sum(coalesce(c.last, m.last - m.first + 1)), 0)::bigint
             FROM (SELECT NULL::bigint AS last_seq) absent
             CROSS JOIN LATERAL (SELECT v.conv, last_seq AS last FROM ibid.conv v) c
             LEFT JOIN LATERAL (
                 SELECT (SELECT seq FROM ibid.message WHERE conv = c.conv
                         ORDER BY seq LIMIT 1) AS first,
                        (SELECT seq FROM ibid.message WHERE conv = c.conv
                         ORDER BY seq DESC LIMIT 1) AS last
             ) m ON c.last IS NULL",
            &[],
        )
        .await?;
    let count = |index: usize| -> Result<u64, tokio_postgres::Error> {
        Ok(u64::try_from(row.try_get::<_, i64>(index)?).unwrap_or(0))
    };
    Ok((count(0)?, count(1)?))
}

fn migrations() -> Vec<&'static str> {
    let later = next_release::migration_of_postgres();
    MIGRATIONS.iter().copied().chain(later).collect()
}

/// The version of the schema, or `None` if there is none.
async fn version(transaction: &Transaction<'_>) -> Result<Option<i32>, PgError> {
    // The tables themselves: `to_regclass` answers from what this session remembers, which after
    // a wait for another node's migration is that there was nothing.
    let there = transaction
        .query_typed_one(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c
                            JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                            WHERE n.nspname = 'ibid' AND c.relname = 'schema_version')",
            &[],
        )
        .await?;
    if !there.get::<_, bool>(0) {
        return Ok(None);
    }
    let row = transaction
        .query_typed_opt("SELECT version FROM ibid.schema_version", &[])
        .await?;
    Ok(row.map(|row| row.get(0)))
}

fn unreachable(error: PgError) -> ConnectError {
    ConnectError::Unreachable(match error {
        PgError::Postgres(error) => describe(&error),
        PgError::Pool(what) => what,
    })
}

fn tls() -> Result<MakeRustlsConnect, ConnectError> {
    let native = rustls_native_certs::load_native_certs();
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(native.certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| ConnectError::Address(e.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(MakeRustlsConnect::new(config))
}
