//! One installation of real processes: its databases, its vault, its store.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ibid::cut::CutRule;
use ibid::event::Event;
use ibid::exporter::{Database, Databases, ExportTerms, Exporter};
use ibid::ids::{JobId, UserId};
use ibid::key::IdempotencyKey;
use ibid::ledger::{CreateError, Created, LedgerError};
use ibid::limits::Limits;
use ibid::postgres::Pg;
use ibid::scope::{Format, Request, Scope};
use ibid::source::{Batch, SourceError};
use ibid::time::Clock;
use ibid::vault::Vault;
use tokio::time::Instant;
use tokio_postgres::SimpleQueryMessage;

use crate::pg_server::PgServer;
use crate::process::{Place, on_thread};
use crate::s3_server::S3Server;

/// Where everything is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    SqliteAndDisk,
    PostgresAndDisk,
    PostgresAndS3,
}

impl Kept {
    pub const ALL: [Kept; 3] = [
        Kept::SqliteAndDisk,
        Kept::PostgresAndDisk,
        Kept::PostgresAndS3,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Kept::SqliteAndDisk => "SQLite and disk",
            Kept::PostgresAndDisk => "PostgreSQL and disk",
            Kept::PostgresAndS3 => "PostgreSQL and S3",
        }
    }
}

/// So many messages end a part: small, so that attempts have many steps.
const PART_MESSAGES: u64 = 20;

const PREFIX: &str = "crash";

pub struct Home {
    pub kept: Kept,
    pub exporter: Exporter,
    pub place: Place,
    pub store: Option<S3Server>,
    server: Option<PgServer>,
    flags: Vec<String>,
}

impl Home {
    /// `None` where PostgreSQL is needed and not installed.
    pub async fn start(kept: Kept) -> Option<Home> {
        let place = Place::new();
        let mut flags = Vec::new();
        let mut server = None;
        let mut database = Database::Sqlite(place.data().join("ibid.db"));
        if kept != Kept::SqliteAndDisk {
            let started = PgServer::start(kept.as_str())?;
            let url = started.url("postgres");
            let pg = Pg::connect(&url).await.expect("it answers");
            pg.migrate().await.expect("migrated");
            flags.extend(["--database".to_owned(), url.clone()]);
            database = Database::Postgres(url);
            server = Some(started);
        }
        let mut store = None;
        let vault = if kept == Kept::PostgresAndS3 {
            let started = S3Server::start().await;
            flags.extend(["--artifacts".to_owned(), started.url(PREFIX)]);
            let variables = started.variables();
            let options = variables.iter().map(|(name, value)| (*name, &**value));
            let vault = Vault::at_url(&started.url(PREFIX), options);
            store = Some(started);
            vault
        } else {
            Vault::in_folder(&place.data().join("artifacts"))
        };
        let terms = ExportTerms {
            limits: Limits {
                unfinished_per_user: 0,
                exports_per_user_per_day: 0,
            },
            cut: CutRule {
                part_bytes: 1 << 20,
                part_messages: PART_MESSAGES,
            },
            link_life: Duration::from_secs(300),
        };
        let databases = Databases::open(&database, None, Clock::system()).await;
        let databases = databases.expect("a database");
        let exporter = Exporter::on(databases, vault.expect("a vault"), terms);
        Some(Home {
            kept,
            exporter,
            place,
            store,
            server,
            flags,
        })
    }

    /// The program on this installation.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        command.args(&self.flags);
        if let Some(store) = &self.store {
            command.envs(store.variables());
        }
        command
    }

    pub async fn append(&self, lines: &[String]) {
        append(&self.exporter, lines).await;
    }

    pub async fn ask(&self, user: &str, scope: &str, key: &str) -> JobId {
        let request = Request {
            scope: Scope::parse(scope).expect("a scope"),
            format: Format::JsonlGz,
        };
        let key = IdempotencyKey::parse(key.as_bytes()).expect("a key");
        let begun = Instant::now();
        loop {
            let created = self
                .exporter
                .request(user_id(user), key.clone(), request.clone());
            match created.await {
                // The second time its first answer may have been lost.
                Ok(Created::New(export) | Created::Replayed(export)) => return export.job_id,
                Err(CreateError::Ledger(LedgerError::Unavailable(_))) if is_soon(begun) => {}
                Err(error) => panic!("not created: {error}"),
            }
        }
    }

    /// What rows hold; every column must be text.
    pub async fn rows(&self, sql: &str) -> Vec<Vec<String>> {
        let Some(server) = &self.server else {
            let sql = sql.to_owned();
            let path = self.place.data().join("ibid.db");
            return on_thread(move || sqlite_rows(&path, &sql)).await;
        };
        let client = server.connect("postgres").await;
        let path = "SET search_path = ibid";
        client.batch_execute(path).await.expect("the schema");
        let messages = client.simple_query(sql).await.expect(sql);
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let text = |value: Option<&str>| value.unwrap_or_default().to_owned();
        rows.map(|row| (0..row.len()).map(|at| text(row.get(at))).collect())
            .collect()
    }

    pub async fn count(&self, what: &str) -> u64 {
        let sql = format!("SELECT CAST(count(*) AS text) FROM {what}");
        self.rows(&sql).await[0][0].parse().expect("a number")
    }

    /// Changes rows behind everybody's back.
    pub async fn change(&self, sql: &str) {
        self.rows(sql).await;
    }

    /// Everything in the vault; on a disk also folders that are empty, and files that the store
    /// hides.
    pub fn objects(&self) -> BTreeSet<String> {
        match &self.store {
            Some(store) => store.objects(PREFIX).into_iter().collect(),
            None => {
                let root = self.place.data().join("artifacts");
                let mut found = BTreeSet::new();
                walk(&root, &root, &mut found);
                found
            }
        }
    }
}

pub fn user_id(user: &str) -> UserId {
    UserId::parse(user).expect("an id")
}

pub async fn append(exporter: &Exporter, lines: &[String]) {
    let event = |line: &String| Event::parse(line.as_bytes()).expect("an event");
    let batch = Batch {
        events: (1..).zip(lines.iter().map(event)).collect(),
        skip_invalid: false,
        import: None,
    };
    let begun = Instant::now();
    while let Err(error) = exporter.source.append(batch.clone()).await {
        let passes = matches!(error, SourceError::Unavailable(_));
        assert!(passes && is_soon(begun), "not appended: {error}");
    }
}

/// Whether it is worth asking again, as every client does: a worker may stand still with the lock
/// of an SQLite file, for longer than another waits for it.
fn is_soon(begun: Instant) -> bool {
    begun.elapsed() < Duration::from_secs(60)
}

fn sqlite_rows(path: &Path, sql: &str) -> Vec<Vec<String>> {
    let connection = rusqlite::Connection::open(path).expect("a database");
    let patience = Duration::from_secs(60);
    connection.busy_timeout(patience).expect("a timeout");
    let mut statement = connection.prepare(sql).expect(sql);
    let columns = statement.column_count();
    let mut rows = statement.query([]).expect(sql);
    let mut found = Vec::new();
    while let Some(row) = rows.next().expect(sql) {
        found.push((0..columns).map(|at| row.get(at).expect("text")).collect());
    }
    found
}

fn walk(root: &Path, folder: &Path, found: &mut BTreeSet<String>) {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let mut empty = true;
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        empty = false;
        if path.is_dir() {
            walk(root, &path, found);
        } else {
            found.insert(name(root, &path));
        }
    }
    if empty && root != folder {
        found.insert(name(root, folder) + "/");
    }
}

fn name(root: &Path, path: &Path) -> String {
    let path = path.strip_prefix(root).expect("below the root");
    path.display().to_string()
}
