//! What can stand where an installation should be.

use std::path::{Path, PathBuf};

use ibid::cut::CutRule;
use ibid::exporter::{Database, Databases, ExportTerms, Exporter};
use ibid::time::Clock;
use ibid::vault::Vault;

use crate::events::chat;
use crate::harness::{Installation, NO_LIMITS};

fn open(database: &Path, artifacts: &Path) -> Result<Exporter, String> {
    let terms = ExportTerms {
        limits: NO_LIMITS,
        cut: CutRule {
            part_bytes: 1024 * 1024,
            part_messages: 0,
        },
        link_life: std::time::Duration::from_secs(300),
    };
    let database = Database::Sqlite(database.to_owned());
    let databases = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(Databases::open(&database, None, Clock::system()))
        .map_err(|error| error.to_string())?;
    let vault = Vault::in_folder(artifacts).map_err(|error| error.to_string())?;
    Ok(Exporter::on(databases, vault, terms))
}

/// Opening is refused with these words, and every file of the folder is as it was.
fn refused(folder: &Path, database: &Path, words: &[&str]) {
    let before = contents(folder);
    let error = open(database, &folder.join("artifacts"))
        .err()
        .expect("it was opened");
    for word in words {
        assert!(error.contains(word), "{error}");
    }
    let after = contents(folder);
    let names: Vec<&PathBuf> = after.iter().map(|(path, _)| path).collect();
    assert!(after == before, "there was a change: {names:?}");
}

fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut contents: Vec<_> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap_or_default();
            (path, bytes)
        })
        .collect();
    contents.sort();
    contents
}

/// A database that was not written by this program.
fn database(path: &Path, pragmas: &str) {
    let sql = rusqlite::Connection::open(path).unwrap();
    sql.execute_batch(pragmas).unwrap();
    sql.execute_batch("CREATE TABLE precious (x); INSERT INTO precious VALUES (1);")
        .unwrap();
    sql.close().unwrap();
}

const OURS: &str = "PRAGMA application_id = 0x69626964;";

#[test]
fn a_database_of_a_newer_version_is_refused_and_unchanged() {
    for mode in ["WAL", "DELETE"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ibid.db");
        database(
            &path,
            &format!("PRAGMA journal_mode = {mode}; {OURS} PRAGMA user_version = 99;"),
        );
        let words = [
            "newer ibid (schema 99, this one knows ",
            "nothing was changed",
        ];
        refused(folder.path(), &path, &words);
    }
}

#[test]
fn a_database_of_another_program_is_refused_and_unchanged() {
    for pragmas in [
        "",
        "PRAGMA journal_mode = WAL;",
        "PRAGMA user_version = 1;",
        "PRAGMA application_id = 7; PRAGMA user_version = 99;",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ibid.db");
        database(&path, pragmas);
        refused(
            folder.path(),
            &path,
            &["is not a database of ibid", "--database"],
        );
    }
}

#[test]
fn a_file_that_is_no_database_is_refused_and_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ibid.db");
    std::fs::write(&path, "a letter to a friend, ".repeat(1_000)).unwrap();
    refused(folder.path(), &path, &["is not a database of ibid"]);
}

#[test]
fn a_folder_that_cannot_be_made_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "not a folder").unwrap();
    let words = ["cannot create the folder", "--data"];
    refused(folder.path(), &file.join("data/ibid.db"), &words);
    // Nobody may create anything there, not even root.
    refused(folder.path(), Path::new("/proc/ibid/ibid.db"), &words);
}

#[test]
fn a_database_that_is_a_folder_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ibid.db");
    std::fs::create_dir(&path).unwrap();
    refused(
        folder.path(),
        &path,
        &["cannot open the database", "writable"],
    );
}

#[test]
fn a_folder_of_artefacts_that_is_a_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("artifacts");
    std::fs::write(&file, "not a folder").unwrap();
    let error = open(&folder.path().join("ibid.db"), &file).err().unwrap();
    assert!(error.contains("cannot create"), "{error}");
}

#[test]
fn what_is_created_is_for_its_owner_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("new/data");
    let exporter = open(&data.join("ibid.db"), &data.join("artifacts")).unwrap();
    for created in [&data, &data.join("artifacts")] {
        let mode = std::fs::metadata(created).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{}", created.display());
    }
    drop(exporter);
}

#[tokio::test]
async fn what_was_written_is_there_when_the_folder_is_opened_again() {
    let home = Installation::new();
    home.import(&chat(10)).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    let again = home.another_exporter().await;
    let found = again.ledger.find(job).await.unwrap().unwrap();
    assert_eq!(found.export, home.find(job).await.export);
    assert_eq!((found.parts_done, found.messages_done), (1, 10));
}
