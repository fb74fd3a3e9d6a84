//! What somebody did to parts, ledger or log behind a job's back.

use std::io::Write as _;

use ibid::export::State;
use ibid::ids::JobId;
use ibid::ledger::Part;

use crate::events::{chat, join, leave, say};
use crate::harness::{Installation, LEASE, UNTIL_IDLE, until, work};

const PARTS: u64 = 5;

/// An installation whose worker was killed when it had recorded two of five parts.
async fn cut() -> (Installation, JobId, Vec<Part>) {
    let home = Installation::cutting_at(100);
    home.import(&chat(500)).await;
    let job = home.export("ann", "all").await;
    let first = tokio::spawn(work(home.exporter.workshop(1, Some(2)), UNTIL_IDLE));
    until("two parts are recorded", async || {
        home.parts(job).await.len() == 2
    })
    .await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    home.clock.advance(LEASE);
    let parts = home.parts(job).await;
    (home, job, parts)
}

async fn undisturbed() -> [u8; 32] {
    let home = Installation::cutting_at(100);
    home.import(&chat(500)).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    home.artefact(job).await.sha256
}

async fn comes_out_whole(home: &Installation, job: JobId, kept: u64) {
    let reports = home.work().await;
    assert_eq!(
        (reports[0].parts_kept, reports[0].parts_written),
        (kept, PARTS - kept)
    );
    assert_eq!(home.artefact(job).await.sha256, undisturbed().await);
}

/// The job fails for this reason, and there is nothing that could be taken for an artefact.
async fn fails(home: &Installation, job: JobId, reason: &str) {
    home.work().await;
    assert_eq!(home.failure(job).await, reason);
    assert_eq!(home.find(job).await.export.artefact, None);
    assert!(
        home.kept(job).iter().all(|path| path.contains("part-")),
        "{:?}",
        home.kept(job)
    );
}

#[tokio::test]
async fn garbage_behind_a_part_is_found_and_the_part_is_rendered_again() {
    let (home, job, parts) = cut().await;
    let path = home.part_file(job, &parts[0]);
    let mut file = std::fs::OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap();
    file.write_all(b"garbage").unwrap();
    drop(file);
    comes_out_whole(&home, job, 1).await;
    assert!(!path.exists());
    let raw = home.lines(job).await;
    assert_eq!(raw.iter().filter(|byte| **byte == b'\n').count(), 500);
}

#[tokio::test]
async fn a_part_with_a_flipped_bit_is_rendered_again() {
    let (home, job, parts) = cut().await;
    let path = home.part_file(job, &parts[1]);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    comes_out_whole(&home, job, 1).await;
}

#[tokio::test]
async fn a_part_that_is_missing_or_empty_is_rendered_again() {
    let (home, job, parts) = cut().await;
    std::fs::remove_file(home.part_file(job, &parts[0])).unwrap();
    std::fs::write(home.part_file(job, &parts[1]), b"").unwrap();
    comes_out_whole(&home, job, 0).await;
}

#[tokio::test]
async fn a_recorded_length_or_checksum_of_raw_bytes_that_was_changed_fails_the_job() {
    for set in ["crc32 = crc32 + 1", "raw_bytes = raw_bytes + 1"] {
        let (home, job, _) = cut().await;
        home.tamper(&format!("UPDATE part SET {set} WHERE part = 1"), []);
        fails(&home, job, "not-deterministic").await;
    }
}

#[tokio::test]
async fn a_recorded_digest_that_was_changed_fails_the_job_and_nothing_is_overwritten() {
    let (home, job, parts) = cut().await;
    home.tamper("UPDATE part SET sha256 = zeroblob(32) WHERE part = 0", []);
    let path = home.part_file(job, &parts[0]);
    let before = std::fs::read(&path).unwrap();
    let recorded = home.parts(job).await;
    fails(&home, job, "not-deterministic").await;
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(home.parts(job).await, recorded);
}

#[tokio::test]
async fn recorded_bounds_that_were_changed_fail_the_job() {
    for tampering in [
        "UPDATE part SET last_seq = last_seq - 1 WHERE part = 1",
        "UPDATE part SET first_seq = first_seq + 1 WHERE part = 1",
        "UPDATE part SET last_conv = 'elsewhere' WHERE part = 0",
        "UPDATE part SET messages = messages + 1 WHERE part = 0",
        "UPDATE part SET part = 7 WHERE part = 1",
    ] {
        let (home, job, _) = cut().await;
        home.tamper(tampering, []);
        fails(&home, job, "not-deterministic").await;
    }
}

#[tokio::test]
async fn a_message_that_was_changed_after_its_part_was_recorded_fails_the_job() {
    let (home, job, parts) = cut().await;
    home.tamper("UPDATE message SET body = 'forged' WHERE seq = 7", []);
    // As long as the part is there nobody reads the message again.
    std::fs::remove_file(home.part_file(job, &parts[0])).unwrap();
    fails(&home, job, "not-deterministic").await;
}

#[tokio::test]
async fn a_message_that_was_removed_fails_the_job_and_there_is_no_shorter_file() {
    // The first of a stay, one in the middle, the last of the first stay, the very last.
    for seq in [3, 5, 12, 30] {
        let home = Installation::cutting_at(4);
        let mut lines = vec![say("c", "1"), say("c", "2"), join("c", "ann")];
        lines.extend((3..=12).map(|seq| say("c", &seq.to_string())));
        lines.extend([leave("c", "ann"), say("c", "13"), join("c", "ann")]);
        lines.extend((14..=30).map(|seq| say("c", &seq.to_string())));
        home.import(&lines).await;
        let job = home.export("ann", "all").await;
        home.tamper("DELETE FROM message WHERE seq = ?1", [seq]);
        fails(&home, job, "log-changed").await;
        let detail = home.find(job).await.export.problem.unwrap().detail;
        assert!(
            detail.contains(&format!("message {seq} of conversation \"c\"")),
            "{detail}"
        );
    }
}

#[tokio::test]
async fn a_message_that_was_put_elsewhere_in_the_log_fails_the_job() {
    let home = Installation::new();
    home.import(&chat(20)).await;
    let job = home.export("ann", "all").await;
    home.tamper("UPDATE message SET gseq = 1000 WHERE seq = 9", []);
    fails(&home, job, "log-changed").await;
}

#[tokio::test]
async fn stays_that_were_changed_in_the_ledger_fail_the_job() {
    let (home, job, _) = cut().await;
    home.tamper("UPDATE export_stay SET last_seq = last_seq - 1", []);
    fails(&home, job, "log-changed").await;
}

#[tokio::test]
async fn a_failed_job_that_is_retried_when_the_log_is_mended_gives_what_it_would_have_given() {
    let (home, job, parts) = cut().await;
    let sql = home.sql();
    sql.execute_batch(
        "CREATE TABLE aside AS SELECT * FROM message WHERE seq = 444;
         DELETE FROM message WHERE seq = 444;",
    )
    .unwrap();
    fails(&home, job, "log-changed").await;
    sql.execute_batch("INSERT INTO message SELECT * FROM aside; DROP TABLE aside;")
        .unwrap();
    let retried = ibid::export::Event::Retried;
    home.exporter.ledger.decide(job, retried).await.unwrap();
    assert_eq!(home.state(job).await, State::Queued);
    assert!(home.part_file(job, &parts[0]).exists());
    // The page in which the message was missing gave no part at all.
    comes_out_whole(&home, job, 2).await;
}
