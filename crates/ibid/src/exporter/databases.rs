//! The databases of an installation: where log and ledger are, and how they are opened.

use std::path::PathBuf;
use std::sync::Arc;

use crate::ledger::Ledger;
use crate::ledger::postgres::PostgresLedger;
use crate::ledger::sqlite::SqliteLedger;
use crate::postgres::{ConnectError, Pg};
use crate::source::Source;
use crate::source::postgres::PostgresSource;
use crate::source::sqlite::SqliteSource;
use crate::sqlite::{Db, OpenError};
use crate::time::Clock;

/// Where a log or a ledger is.
#[derive(Clone, PartialEq, Eq)]
pub enum Database {
    /// A file of SQLite.
    Sqlite(PathBuf),
    /// The address of a PostgreSQL database, which may hold a password.
    Postgres(String),
}

impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Database::Sqlite(path) => f.debug_tuple("Sqlite").field(path).finish(),
            Database::Postgres(_) => f.write_str("Postgres(..)"),
        }
    }
}

/// Why a database of an installation could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error(transparent)]
    Postgres(#[from] ConnectError),
}

/// The databases of an installation, open.
pub struct Databases {
    pub(super) source: Arc<dyn Source>,
    pub(super) ledger: Arc<dyn Ledger>,
    pub(super) log_elsewhere: bool,
    pub(super) postgres: Option<Pg>,
}

impl Databases {
    /// Opens the ledger in `database` and the log in `log` or, where that is `None`, in the
    /// ledger's database. Files are created where missing; in PostgreSQL the schema must be there
    /// and up to date.
    ///
    /// # Errors
    /// Each with what to do about it.
    pub async fn open(
        database: &Database,
        log: Option<&Database>,
        clock: Clock,
    ) -> Result<Databases, DatabaseError> {
        let ledger_in = Opened::open(database).await?;
        let log_in = match log {
            Some(log) => Some(Opened::open(log).await?),
            None => None,
        };
        let source = log_in.as_ref().unwrap_or(&ledger_in).source();
        let ledger: Arc<dyn Ledger> = match &ledger_in {
            Opened::Sqlite(db) => Arc::new(SqliteLedger::new(db.clone(), clock)),
            Opened::Postgres(pg) => Arc::new(PostgresLedger::new(pg.clone(), clock)),
        };
        Ok(Databases {
            source,
            ledger,
            log_elsewhere: log_in.is_some(),
            postgres: match ledger_in {
                Opened::Sqlite(_) => None,
                Opened::Postgres(pg) => Some(pg),
            },
        })
    }
}

/// A database that is open.
enum Opened {
    Sqlite(Db),
    Postgres(Pg),
}

impl Opened {
    async fn open(database: &Database) -> Result<Opened, DatabaseError> {
        match database {
            Database::Sqlite(path) => Ok(Opened::Sqlite(Db::open(path)?)),
            Database::Postgres(url) => {
                let pg = Pg::connect(url).await?;
                pg.check_schema().await?;
                Ok(Opened::Postgres(pg))
            }
        }
    }

    fn source(&self) -> Arc<dyn Source> {
        match self {
            Opened::Sqlite(db) => Arc::new(SqliteSource::new(db.clone())),
            Opened::Postgres(pg) => Arc::new(PostgresSource::new(pg.clone())),
        }
    }
}
