//! A look at the file that changes nothing, for whoever wants to know what is wrong with it.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::{APPLICATION_ID, OpenError, failed, migrations, refuse_network};
use crate::contents::{Contents, Pins};
use crate::time::Time;

/// How long a look waits for a writer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a look at the file found.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// The version of the schema in the file; 0 if there is nothing in it.
    pub schema: i64,
    /// The version that this program makes.
    pub known_schema: i64,
    /// `wal` where all is well.
    pub journal_mode: String,
    /// What SQLite finds wrong with the file; nothing where all is well.
    pub damage: Vec<String>,
    /// What is in it, where the schema is the one that this program knows.
    pub contents: Option<Contents>,
}

/// Looks at the file at `path`, which must exist; it is `now`. Nothing is created, changed or migrated.
/// Reads the whole file, and so blocks for as long as that takes.
///
/// # Errors
/// The file cannot be opened, or is not one of ours.
pub fn inspect(path: &Path, now: Time) -> Result<Inspection, OpenError> {
    refuse_network(path)?;
    let sqlite = |source| failed(path, source);
    // Without the right to write SQLite could not tidy up its files after a crash.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(sqlite)?;
    connection.busy_timeout(PATIENCE).map_err(sqlite)?;
    let number = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, i64>(0));
    let tables = number("SELECT count(*) FROM sqlite_schema").map_err(sqlite)?;
    let application = number("PRAGMA application_id").map_err(sqlite)?;
    if tables > 0 && application != i64::from(APPLICATION_ID) {
        return Err(OpenError::Foreign {
            path: path.to_owned(),
        });
    }
    let schema = number("PRAGMA user_version").map_err(sqlite)?;
    let known_schema = i64::try_from(migrations().len()).unwrap_or(i64::MAX);
    let journal_mode = connection
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .map_err(sqlite)?;
    // A file can be so damaged that the check itself fails; that is its finding then.
    let damage = check(&connection).unwrap_or_else(|error| vec![error.to_string()]);
    let contents = if schema == known_schema && damage.is_empty() {
        Some(contents(&connection, now).map_err(sqlite)?)
    } else {
        None
    };
    Ok(Inspection {
        schema,
        known_schema,
        journal_mode,
        damage,
        contents,
    })
}

fn check(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    let mut statement = connection.prepare("PRAGMA quick_check(10)")?;
    let lines = statement.query_map([], |row| row.get(0))?;
    let mut lines: Vec<String> = lines.collect::<rusqlite::Result<_>>()?;
    lines.retain(|line| line != "ok");
    Ok(lines)
}

fn contents(connection: &Connection, now: Time) -> rusqlite::Result<Contents> {
    let pairs = |sql: &str| {
        let mut statement = connection.prepare(sql)?;
        let pairs = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        pairs.collect::<rusqlite::Result<Vec<(String, String)>>>()
    };
    let pins = Pins {
        needed: pairs(
            "SELECT job_id, snapshot FROM export WHERE state IN ('queued', 'running', 'failed')",
        )?,
        there: pairs("SELECT job_id, snapshot FROM pin")?
            .into_iter()
            .collect(),
    };
    connection.query_row(
        "SELECT (SELECT count(*) FROM conv),
                (SELECT coalesce(sum(last_seq), 0) FROM conv),
                (SELECT count(*) FROM export),
                (SELECT count(*) FROM export WHERE state = 'done' AND expires_at > ?1),
                EXISTS (SELECT 1 FROM import WHERE first = 1 AND finished = 0),
                (SELECT max(at) FROM (
                     SELECT max(created_at) AS at FROM export
                     UNION ALL SELECT max(started_at) FROM export
                     UNION ALL SELECT max(finished_at) FROM export
                     UNION ALL SELECT max(renewed_at) FROM export
                     UNION ALL SELECT max(created_at) FROM token
                     UNION ALL SELECT max(last_at) FROM download))",
        [now.micros()],
        |row| {
            Ok(Contents {
                conversations: row.get(0)?,
                messages: row.get(1)?,
                exports: row.get(2)?,
                kept: row.get(3)?,
                loading: row.get(4)?,
                latest: row.get::<_, Option<i64>>(5)?.map(Time::from_micros),
                pins,
            })
        },
    )
}
