//! A later release, so that tests can run it beside this one: it has one more encoder, with which
//! its new jobs are created, and one more migration. Without the feature `next-release`, which only
//! tests have, there is none.

/// What the later release adds to the migrations of PostgreSQL.
pub(crate) fn migration_of_postgres() -> Option<&'static str> {
    #[cfg(feature = "next-release")]
    if begun::is_begun() {
        return Some(begun::MIGRATION_OF_POSTGRES);
    }
    None
}

/// What the later release adds to the migrations of SQLite.
pub(crate) fn migration_of_sqlite() -> Option<&'static str> {
    #[cfg(feature = "next-release")]
    if begun::is_begun() {
        return Some(begun::MIGRATION_OF_SQLITE);
    }
    None
}

#[cfg(feature = "next-release")]
pub use begun::{begin, is_begun};

#[cfg(feature = "next-release")]
mod begun {
    use std::sync::atomic::{AtomicBool, Ordering};

    static BEGUN: AtomicBool = AtomicBool::new(false);

    /// Makes this process one of the later release.
    pub fn begin() {
        BEGUN.store(true, Ordering::SeqCst);
    }

    pub fn is_begun() -> bool {
        BEGUN.load(Ordering::SeqCst)
    }

    // Of every kind that a migration may be: a column that earlier releases do not fill, an index,
    // a table.
    pub(crate) const MIGRATION_OF_POSTGRES: &str = "
        ALTER TABLE ibid.export ADD COLUMN noted text NOT NULL DEFAULT 'nothing';
        CREATE INDEX export_noted ON ibid.export (noted, job_id);
        CREATE TABLE ibid.note (job_id text COLLATE \"C\" PRIMARY KEY);";

    pub(crate) const MIGRATION_OF_SQLITE: &str = "
        ALTER TABLE export ADD COLUMN noted TEXT NOT NULL DEFAULT 'nothing';
        CREATE INDEX export_noted ON export (noted, job_id);
        CREATE TABLE note (job_id TEXT PRIMARY KEY) STRICT;";
}
