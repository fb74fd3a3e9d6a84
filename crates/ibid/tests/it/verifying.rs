//! `verify`: renders again, compares, and writes nothing.

use std::path::Path;

use ibid::ids::JobId;
use ibid::verify::{Verification, VerifyError, verify};

use crate::events::{chat, edit, say};
use crate::harness::{Installation, UNTIL_IDLE, until, work};

async fn verified(home: &Installation, job: JobId) -> Result<Verification, VerifyError> {
    let exporter = &home.exporter;
    let (source, ledger) = (exporter.source.as_ref(), exporter.ledger.as_ref());
    verify(source, ledger, &exporter.vault, job, &mut |_, _| ()).await
}

async fn done() -> (Installation, JobId) {
    let home = Installation::cutting_at(100);
    home.import(&chat(450)).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    home.artefact(job).await;
    (home, job)
}

/// Every file of a folder with its bytes and when it was written.
fn snapshot(folder: &Path) -> Vec<(String, Vec<u8>, std::time::SystemTime)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let modified = path.metadata().unwrap().modified().unwrap();
        let bytes = if path.is_dir() {
            files.extend(snapshot(&path));
            Vec::new()
        } else {
            std::fs::read(&path).unwrap()
        };
        files.push((path.display().to_string(), bytes, modified));
    }
    files.sort();
    files
}

/// All rows of all tables, as text.
fn tables(home: &Installation) -> Vec<String> {
    let sql = home.sql();
    let mut names = sql
        .prepare("SELECT name FROM sqlite_schema WHERE type = 'table'")
        .unwrap();
    let names = names.query_map([], |row| row.get::<_, String>(0)).unwrap();
    let mut rows = Vec::new();
    for name in names.map(Result::unwrap) {
        let mut table = sql.prepare(&format!("SELECT * FROM {name}")).unwrap();
        let columns = table.column_count();
        let mut found = table.query([]).unwrap();
        while let Some(row) = found.next().unwrap() {
            let cells = (0..columns).map(|at| format!("{:?}", row.get_ref(at).unwrap()));
            rows.push(format!("{name}: {}", cells.collect::<Vec<_>>().join(", ")));
        }
    }
    rows
}

#[tokio::test]
async fn a_job_that_is_done_verifies_also_when_the_log_went_on_and_nothing_is_written() {
    let (home, job) = done().await;
    home.import(&[say("c", "later"), edit("c", 7, "later")])
        .await;
    let vault = home.exporter.vault.folder().unwrap().to_owned();
    let before = (snapshot(&vault), tables(&home));

    let found = verified(&home, job).await.unwrap();
    assert!(found.is_good(), "{found:?}");
    assert_eq!(
        (found.messages, found.parts, found.parts_equal),
        (450, 5, 5)
    );
    assert_eq!(
        (found.artefact_equal, found.stored_equal),
        (Some(true), Some(true))
    );
    assert_eq!(found.sha256, hex::encode(home.artefact(job).await.sha256));

    assert!(snapshot(&vault) == before.0, "files changed");
    assert_eq!(tables(&home), before.1);
}

#[tokio::test]
async fn progress_is_told_up_to_the_last_message() {
    let (home, job) = done().await;
    let exporter = &home.exporter;
    let mut told = Vec::new();
    let mut progress = |done, total| told.push((done, total));
    let (source, ledger) = (exporter.source.as_ref(), exporter.ledger.as_ref());
    verify(source, ledger, &exporter.vault, job, &mut progress)
        .await
        .unwrap();
    assert_eq!(told, [100, 200, 300, 400, 450].map(|done| (done, 450)));
}

#[tokio::test]
async fn a_damaged_shortened_or_missing_artefact_is_found() {
    for damage in ["flipped", "shortened", "missing"] {
        let (home, job) = done().await;
        let path = home
            .exporter
            .vault
            .folder()
            .unwrap()
            .join(job.to_string())
            .join(&home.kept(job)[0]);
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        match damage {
            "flipped" => {
                bytes[middle] ^= 1;
                std::fs::write(&path, bytes).unwrap();
            }
            "shortened" => std::fs::write(&path, &bytes[..middle]).unwrap(),
            _ => std::fs::remove_file(&path).unwrap(),
        }
        let found = verified(&home, job).await.unwrap();
        assert!(!found.is_good(), "{damage}");
        assert_eq!(
            (found.artefact_equal, found.stored_equal),
            (Some(true), Some(false))
        );
    }
}

#[tokio::test]
async fn a_changed_message_is_found_with_its_part() {
    let (home, job) = done().await;
    home.tamper("UPDATE message SET body = 'forged' WHERE seq = 250", []);
    let found = verified(&home, job).await.unwrap();
    assert!(!found.is_good());
    assert_eq!(
        (found.parts_equal, &found.parts_different[..]),
        (4, &[2][..])
    );
    assert_eq!(
        (found.artefact_equal, found.stored_equal),
        (Some(false), Some(true))
    );
}

#[tokio::test]
async fn a_removed_message_is_an_error_that_names_it() {
    let (home, job) = done().await;
    home.tamper("DELETE FROM message WHERE seq = 250", []);
    let error = verified(&home, job).await.unwrap_err().to_string();
    assert_eq!(
        error,
        "the log was changed: message 250 of conversation \"c\" is missing"
    );
}

#[tokio::test]
async fn changed_records_are_found() {
    for (tampering, equal, different) in [
        (
            "UPDATE part SET sha256 = zeroblob(32) WHERE part = 1",
            4,
            &[1][..],
        ),
        ("UPDATE part SET crc32 = crc32 + 1 WHERE part = 4", 4, &[4]),
        ("UPDATE part SET part = 9 WHERE part = 3", 4, &[9]),
        ("UPDATE export SET artefact_sha256 = zeroblob(32)", 5, &[]),
        ("UPDATE export SET artefact_messages = 449", 5, &[]),
    ] {
        let (home, job) = done().await;
        home.tamper(tampering, []);
        let found = verified(&home, job).await.unwrap();
        assert!(!found.is_good(), "{tampering}");
        assert_eq!(
            (found.parts_equal, &found.parts_different[..]),
            (equal, different)
        );
    }
}

#[tokio::test]
async fn a_job_that_is_not_done_is_compared_as_far_as_it_is() {
    let home = Installation::cutting_at(100);
    home.import(&chat(450)).await;
    let job = home.export("ann", "all").await;
    let held = tokio::spawn(work(home.exporter.workshop(1, Some(2)), UNTIL_IDLE));
    until("two parts are recorded", async || {
        home.parts(job).await.len() == 2
    })
    .await;
    let found = verified(&home, job).await.unwrap();
    held.abort();
    assert!(found.is_good());
    assert_eq!((found.parts, found.parts_equal), (5, 2));
    assert_eq!((found.artefact_equal, found.stored_equal), (None, None));
}

#[tokio::test]
async fn a_job_whose_bytes_are_withdrawn_is_compared_without_them() {
    let (home, job) = done().await;
    let ann = ibid::ids::UserId::parse("ann").unwrap();
    home.exporter.withdraw(&ann, job).await.unwrap();
    let found = verified(&home, job).await.unwrap();
    assert!(found.is_good());
    assert_eq!(
        (found.artefact_equal, found.stored_equal),
        (Some(true), None)
    );
}

#[tokio::test]
async fn a_job_that_is_not_there_or_of_another_encoder_is_refused() {
    let (home, job) = done().await;
    let nobodys = JobId::from_bytes([1; 16]);
    let missing = verified(&home, nobodys).await;
    assert!(
        matches!(missing, Err(VerifyError::NotFound(of)) if of == nobodys),
        "{missing:?}"
    );
    home.tamper(
        "UPDATE export SET recipe = json_set(recipe, '$.encoder', 'of another version')",
        [],
    );
    let other = verified(&home, job).await;
    assert!(
        matches!(other, Err(VerifyError::OtherEncoder { .. })),
        "{other:?}"
    );
}
