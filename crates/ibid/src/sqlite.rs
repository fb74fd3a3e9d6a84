//! The SQLite file that holds the log and the ledger: opening it, its threads, its migrations.

mod inspect;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};

pub use inspect::{Inspection, inspect};

use crate::next_release;

/// Says in the file's header that it is ours (`PRAGMA application_id`): "ibid".
const APPLICATION_ID: i32 = 0x6962_6964;

/// How long a write waits for another process's write.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

const READERS: usize = 2;

/// Page cache of a connection that writes and of one that reads, in KiB: the first looks all
/// over the file, the second mostly goes through it once.
const WRITER_CACHE_KIB: i32 = 8192;
const READER_CACHE_KIB: i32 = 1024;

/// In order; the number of those applied is the file's `PRAGMA user_version`. Each only adds, so
/// that programs that know fewer and have the file open can go on.
const MIGRATIONS: &[&str] = &[
    include_str!("../migrations/sqlite/0001_log_and_ledger.sql"),
    // Numbers are PostgreSQL's too; the empty ones are about functions, of which there are none here.
    "",
    "",
    include_str!("../migrations/sqlite/0004_pins.sql"),
    "",
    include_str!("../migrations/sqlite/0006_uploads.sql"),
    include_str!("../migrations/sqlite/0007_pins_of_ledgers.sql"),
];

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot open the database {path}: {source}; {advice}")]
    Sqlite {
        path: PathBuf,
        source: rusqlite::Error,
        advice: &'static str,
    },
    #[error(
        "cannot create the folder {path}: {source}; make its parent writable, or name another folder with --data"
    )]
    Folder {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "cannot create the database {path}: {source}; make its folder writable, or name another \
         file with --database"
    )]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the database {path} cannot be written; make the file and its folder writable for this user"
    )]
    ReadOnly { path: PathBuf },
    #[error("{path} is not a database of ibid; name another file with --database")]
    Foreign { path: PathBuf },
    #[error(
        "{path} was written by a newer ibid (schema {found}, this one knows {known}); use that \
         version, or another data folder; nothing was changed"
    )]
    Newer {
        path: PathBuf,
        found: i64,
        known: usize,
    },
    #[error(
        "{path} lies on a network file system, where SQLite's locks cannot be trusted; put the \
         data folder on a local disk"
    )]
    Network { path: PathBuf },
}

/// Why a statement failed.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    #[error("the database failed: {0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("the database is closed")]
    Closed,
}

impl DbError {
    /// What is to be done where the file can be read but nothing can be written to it.
    pub(crate) fn advice(&self) -> Option<&'static str> {
        use rusqlite::ErrorCode;
        let DbError::Sqlite(error) = self else {
            return None;
        };
        match error.sqlite_error_code()? {
            ErrorCode::DiskFull => Some(
                "The disk of the database is full, so nothing can be written. Free some space, \
                 then try again.",
            ),
            ErrorCode::ReadOnly | ErrorCode::PermissionDenied => Some(
                "The database cannot be written. Make its file and folder writable, then try \
                 again.",
            ),
            _ => None,
        }
    }
}

type Work = Box<dyn FnOnce(&mut Connection) + Send>;

/// A handle to the file. Clones share one thread that writes and a few that read, so that
/// nothing blocks the callers' threads and writers of one process queue up without contention.
///
/// No other code may open, copy or hash the file: closing such a handle would drop the locks
/// that this process holds (SQLite, "How To Corrupt", section 2.2).
#[derive(Clone)]
pub struct Db {
    path: Arc<PathBuf>,
    writer: mpsc::Sender<Work>,
    readers: mpsc::Sender<Work>,
}

impl Db {
    /// Opens the file at `path`, creates it and its folder where missing (the folder for its
    /// owner only), and brings its schema up to date.
    ///
    /// # Errors
    /// Each with what to do about it; see [`OpenError`].
    pub fn open(path: &Path) -> Result<Db, OpenError> {
        create_folder(path)?;
        refuse_network(path)?;
        create_private(path)?;
        let mut connection = connect(path, WRITER_CACHE_KIB)?;
        migrate(&mut connection, path)?;
        let (writer, work) = mpsc::channel::<Work>();
        spawn(
            "ibid-db-write",
            connection,
            Arc::new(Mutex::new(work)),
            path,
        )?;
        let (readers, work) = mpsc::channel::<Work>();
        let work = Arc::new(Mutex::new(work));
        for _ in 0..READERS {
            spawn(
                "ibid-db-read",
                connect(path, READER_CACHE_KIB)?,
                Arc::clone(&work),
                path,
            )?;
        }
        Ok(Db {
            path: Arc::new(path.to_owned()),
            writer,
            readers,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` in a write transaction; commits if it gives `Ok`, else rolls back.
    ///
    /// # Errors
    /// Those of `work`, or of the database.
    pub async fn write<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<DbError> + Send + 'static,
    {
        run(&self.writer, TransactionBehavior::Immediate, work).await
    }

    /// Runs `work` in a read transaction, which sees one state of the file.
    ///
    /// # Errors
    /// Those of `work`, or of the database.
    pub async fn read<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<DbError> + Send + 'static,
    {
        run(&self.readers, TransactionBehavior::Deferred, work).await
    }
}

async fn run<T, E>(
    threads: &mpsc::Sender<Work>,
    behavior: TransactionBehavior,
    work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
) -> Result<T, E>
where
    T: Send + 'static,
    E: From<DbError> + Send + 'static,
{
    let (answer, answered) = tokio::sync::oneshot::channel();
    let job: Work = Box::new(move |connection| {
        let result = (|| {
            let transaction = connection
                .transaction_with_behavior(behavior)
                .map_err(DbError::from)?;
            let value = work(&transaction)?;
            transaction.commit().map_err(DbError::from)?;
            Ok(value)
        })();
        // Whoever asked may have gone away; the work is done all the same.
        let _ = answer.send(result);
    });
    threads.send(job).map_err(|_| DbError::Closed)?;
    answered.await.map_err(|_| DbError::Closed)?
}

fn spawn(
    name: &str,
    mut connection: Connection,
    work: Arc<Mutex<mpsc::Receiver<Work>>>,
    path: &Path,
) -> Result<(), OpenError> {
    let thread = move || {
        loop {
            let next = match work.lock() {
                Ok(receiver) => receiver.recv(),
                Err(_) => return,
            };
            match next {
                Ok(job) => job(&mut connection),
                Err(_) => return,
            }
        }
    };
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(thread)
        .map(drop)
        .map_err(|source| OpenError::Folder {
            path: path.to_owned(),
            source,
        })
}

fn create_folder(path: &Path) -> Result<(), OpenError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) else {
        return Ok(());
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|source| OpenError::Folder {
            path: folder.to_owned(),
            source,
        })
}

/// Makes the file, for its owner only, if there is none; SQLite would let others read it.
fn create_private(path: &Path) -> Result<(), OpenError> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut options = std::fs::OpenOptions::new();
    match options.write(true).create_new(true).mode(0o600).open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(source) => Err(OpenError::File {
            path: path.to_owned(),
            source,
        }),
    }
}

fn refuse_network(path: &Path) -> Result<(), OpenError> {
    // Magic numbers of statfs(2): NFS, SMB, SMB2, CIFS, AFS, Ceph, 9P.
    const NETWORK: [u32; 7] = [
        0x6969,
        0x517b,
        0xfe53_4d42,
        0xff53_4d42,
        0x5346_414f,
        0x00c3_6400,
        0x0102_1997,
    ];
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    match rustix::fs::statfs(folder.unwrap_or(Path::new("."))) {
        Ok(stat) if NETWORK.contains(&(stat.f_type as u32)) => Err(OpenError::Network {
            path: path.to_owned(),
        }),
        _ => Ok(()),
    }
}

fn connect(path: &Path, cache_kib: i32) -> Result<Connection, OpenError> {
    let open = || -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.set_prepared_statement_cache_capacity(64);
        Ok(connection)
    };
    let set_up = |connection: &Connection| -> rusqlite::Result<()> {
        connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
        // FULL: what was answered survives a power cut. secure_delete: what is deleted or
        // overwritten is gone from the file.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update_and_check(None, "secure_delete", "ON", |_| Ok(()))?;
        connection.pragma_update(None, "foreign_keys", "ON")?;
        connection.pragma_update(None, "cache_size", -cache_kib)
    };
    let connection = open().map_err(|source| failed(path, source))?;
    // SQLite opens a file that cannot be written for reading, and says so only when it is.
    if connection.is_readonly("main").unwrap_or(false) {
        return Err(OpenError::ReadOnly {
            path: path.to_owned(),
        });
    }
    // The journal mode is kept in the file, so it is not touched before the file is known to
    // be one of ours.
    schema(&connection, path)?;
    set_up(&connection).map_err(|source| failed(path, source))?;
    Ok(connection)
}

/// How many migrations are applied to the file, which may be empty.
fn schema(connection: &Connection, path: &Path) -> Result<usize, OpenError> {
    let number = |sql: &str| -> Result<i64, OpenError> {
        let number = connection.query_row(sql, [], |row| row.get(0));
        number.map_err(|source| failed(path, source))
    };
    // In this order: a file that another process is just making ours has either no table yet,
    // or tables and our mark.
    let tables = number("SELECT count(*) FROM sqlite_schema")?;
    let application = number("PRAGMA application_id")?;
    if tables > 0 && application != i64::from(APPLICATION_ID) {
        return Err(OpenError::Foreign {
            path: path.to_owned(),
        });
    }
    let found = number("PRAGMA user_version")?;
    match usize::try_from(found) {
        Ok(done) if done <= migrations().len() => Ok(done),
        _ => Err(OpenError::Newer {
            path: path.to_owned(),
            found,
            known: migrations().len(),
        }),
    }
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), OpenError> {
    let sqlite = |source| failed(path, source);
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(sqlite)?;
    let done = schema(&transaction, path)?;
    let migrations = migrations();
    if done == migrations.len() {
        return Ok(());
    }
    for migration in &migrations[done..] {
        transaction.execute_batch(migration).map_err(sqlite)?;
    }
    transaction
        .pragma_update(None, "application_id", APPLICATION_ID)
        .map_err(sqlite)?;
    transaction
        .pragma_update(None, "user_version", migrations.len() as i64)
        .map_err(sqlite)?;
    transaction.commit().map_err(sqlite)
}

fn migrations() -> Vec<&'static str> {
    let later = next_release::migration_of_sqlite();
    MIGRATIONS.iter().copied().chain(later).collect()
}

fn failed(path: &Path, source: rusqlite::Error) -> OpenError {
    use rusqlite::ErrorCode;
    let advice = match source.sqlite_error_code() {
        Some(ErrorCode::NotADatabase) => {
            return OpenError::Foreign {
                path: path.to_owned(),
            };
        }
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => {
            "make the file and its folder writable for this user"
        }
        Some(ErrorCode::DiskFull) => "free some space",
        Some(ErrorCode::DatabaseBusy) => "another process holds it; try again",
        _ => "run `ibid doctor` to look closer",
    };
    OpenError::Sqlite {
        path: path.to_owned(),
        source,
        advice,
    }
}
