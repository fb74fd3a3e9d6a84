//! What `ibid doctor` looks at in the databases of log and ledger.

use std::path::Path;

use ibid::contents::Contents;
use ibid::postgres::{OwnTables, Pg};
use ibid::sqlite::inspect;
use ibid::time::Clock;

use super::{Findings, look};
use crate::config::Database;

/// Checks a database, and gives what is in it if it is sound.
pub(super) fn look_into(
    findings: &mut Findings,
    check: &str,
    database: &Database,
) -> Option<Contents> {
    match database {
        Database::Sqlite(path) => sqlite(findings, check, path),
        Database::Postgres(url) => postgres(findings, check, url),
    }
}

fn sqlite(findings: &mut Findings, check: &str, path: &Path) -> Option<Contents> {
    look(findings, check, path)?;
    let shown = path.display();
    let found = match inspect(path, Clock::system().now()) {
        Ok(found) => found,
        Err(error) => {
            findings.failure(check, error.to_string());
            return None;
        }
    };
    if !found.damage.is_empty() {
        findings.failure(
            check,
            format!(
                "{shown} is damaged ({}); stop everything that uses it, keep a copy, and go back \
                 to a backup",
                found.damage.join("; ")
            ),
        );
        return None;
    }
    let (schema, known) = (found.schema, found.known_schema);
    if schema > known {
        findings.failure(
            check,
            format!(
                "{shown} was written by a newer ibid (schema {schema}, this one knows {known}); \
                 use that version"
            ),
        );
        return None;
    }
    if schema < known {
        findings.warning(
            check,
            format!(
                "{shown} has schema {schema}; the next command that opens it brings it to {known}"
            ),
        );
        return None;
    }
    if found.journal_mode != "wal" {
        findings.warning(
            check,
            format!(
                "its journal mode is {} instead of wal; the next command that opens it sets it",
                found.journal_mode
            ),
        );
    }
    findings.ok(check, format!("{shown} is sound, schema {schema}"));
    found.contents
}

fn postgres(findings: &mut Findings, check: &str, url: &str) -> Option<Contents> {
    let looking = async { Pg::connect(url).await?.inspect().await };
    // The doctor works on a thread that may block.
    let found = match tokio::runtime::Handle::current().block_on(looking) {
        Ok(found) => found,
        Err(error) => {
            findings.failure(check, error.to_string());
            return None;
        }
    };
    if found.standby {
        findings.failure(check, "it is a standby; connect ibid to the primary");
    } else if !found.anchored {
        findings.failure(
            check,
            "it is not the one that ibid has worked in (it was restored, copied or upgraded), so \
             no export is created or worked on and nothing is deleted; run `ibid admin adopt` once \
             nobody uses the other one",
        );
    } else {
        findings.ok(check, "PostgreSQL answers, and its schema is up to date");
    }
    if !found.fsync {
        findings.warning(
            check,
            "fsync is off, so a power cut can lose what was answered; turn it on",
        );
    }
    if found.asynchronous {
        findings.warning(
            check,
            "its standbys follow asynchronously, so a failover can undo the last seconds, an \
             accepted export or a revocation among them; set synchronous_standby_names if that \
             must not be",
        );
    }
    if found.changes > 0 {
        findings.warning(
            check,
            format!(
                "{} rows of messages or revisions were updated or deleted, which ibid never does; \
                 exports that held them fail; find out who did",
                found.changes
            ),
        );
    }
    match &found.own_tables {
        Some(own) => {
            own_tables(findings, own);
            // Where it cannot be read, what is in it cannot be told.
            own.readable.then_some(found.contents)
        }
        None => Some(found.contents),
    }
}

fn own_tables(findings: &mut Findings, found: &OwnTables) {
    const CHECK: &str = "own tables";
    if !found.views.is_empty() {
        findings.ok(
            CHECK,
            format!(
                "{} are views over {}, which the application writes; docs/own-tables.md says what \
                 it must keep to besides what is checked",
                found.views.join(", "),
                found.tables.join(", ")
            ),
        );
    }
    for failure in &found.failures {
        findings.failure(CHECK, failure);
    }
    for warning in &found.warnings {
        findings.warning(CHECK, warning);
    }
}

pub(super) fn log(findings: &mut Findings, contents: &Contents, exports: u64) {
    const CHECK: &str = "log";
    let Contents {
        conversations,
        messages,
        ..
    } = contents;
    if contents.loading {
        findings.warning(
            CHECK,
            "a first load is not finished and no export can be created; run the same `ibid \
             import` again, or give it up with `ibid admin end-load`",
        );
    } else if *conversations == 0 {
        findings.warning(CHECK, "there is nothing in it; fill it with `ibid import`");
    } else {
        findings.ok(
            CHECK,
            format!("{messages} messages in {conversations} conversations; {exports} exports"),
        );
    }
}

/// Whether the log knows of the exports for which it may still have to be read.
pub(super) fn pins(findings: &mut Findings, in_ledger: &Contents, in_log: &Contents) {
    const CHECK: &str = "pins";
    let lost = in_ledger.pins.lost(&in_log.pins);
    match lost.first() {
        None => findings.ok(
            CHECK,
            format!(
                "the log knows of all {} exports that are not done",
                in_ledger.pins.needed.len()
            ),
        ),
        Some(first) => findings.failure(
            CHECK,
            format!(
                "the log does not know of {} exports that are not done ({first} is one): it was \
                 put back to an older state, or it is not the log from which they were created; \
                 correct --source, or if it is right, let their users ask anew",
                lost.len()
            ),
        ),
    }
}
