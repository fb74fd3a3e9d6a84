//! An import that was interrupted goes on where it stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ibid::ids::UserId;
use ibid::import::ImportError;
use ibid::ledger::CreateError;
use ibid::source::SourceError;

use crate::events::{edit, join, recall, say};
use crate::harness::{Installation, assert_same_lines, import_into, until};
use crate::interruptions::{InterruptedSource, Then};

/// More events than three transactions take.
const EVENTS: usize = 16_000;
/// So many are in one transaction.
const BATCH: u64 = 5_000;

fn big_file() -> Vec<u8> {
    let mut text = join("c", "ann") + "\n" + &join("d", "ann") + "\n";
    for number in 1..=(EVENTS - 2) / 2 {
        text.push_str(&say("c", &format!("c {number}")));
        text.push('\n');
        let other = match number % 50 {
            0 => edit("c", number as u64 / 2, &format!("edited at {number}")),
            25 => recall("c", number as u64 / 2),
            _ => say("d", &format!("d {number}")),
        };
        text.push_str(&other);
        text.push('\n');
    }
    text.into_bytes()
}

async fn undisturbed() -> Vec<u8> {
    let home = Installation::new();
    let (report, _) = home.try_import(&big_file(), false).await;
    assert_eq!(report.unwrap().accepted, EVENTS as u64);
    home.export_now("ann", "all").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_failed_or_was_killed_between_batches_goes_on_and_nothing_is_doubled_or_lost()
 {
    let expected = undisturbed().await;
    for (batches, then) in [
        (1, Then::Fail),
        (2, Then::Fail),
        (3, Then::Hang),
        (4, Then::Hang),
    ] {
        let home = Installation::new();
        let reached = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&reached);
        let interruption = then.clone();
        let source = InterruptedSource::at_batch(&home.exporter.source, move |batch| {
            let last = batch == batches;
            seen.store(last, Ordering::SeqCst);
            if last {
                interruption.clone()
            } else {
                Then::Answer
            }
        });
        let import = tokio::spawn(async move { import_into(&source, &big_file(), false).await.0 });
        until("the import is interrupted", async || {
            reached.load(Ordering::SeqCst)
        })
        .await;
        match then {
            Then::Hang | Then::Wait(_) => import.abort(),
            Then::Fail | Then::GoneBad | Then::Answer | Then::Unanswered => {
                let failed = import.await.unwrap();
                assert!(matches!(failed, Err(ImportError::Source(_))), "{failed:?}");
            }
        }

        let done = (batches as u64 - 1) * BATCH;
        let asked = home.create("ann", "all", "key").await;
        if done > 0 {
            assert!(
                matches!(asked, Err(CreateError::SourceLoading)),
                "{asked:?}"
            );
        }
        let (report, _) = home.try_import(&big_file(), false).await;
        let report = report.unwrap();
        assert_eq!(report.continued_after_line, done.min(EVENTS as u64));
        assert_eq!(report.accepted, EVENTS as u64 - report.continued_after_line);
        let found = home.export_now("ann", "all").await;
        assert_same_lines(&format!("after {batches} batches"), &found, &expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_is_dropped_in_the_middle_of_a_batch_goes_on_after_it() {
    let home = Installation::new();
    let source = Arc::clone(&home.exporter.source);
    let import =
        tokio::spawn(async move { import_into(source.as_ref(), &big_file(), false).await });
    let written = || -> u64 {
        let query = "SELECT coalesce(sum(lines), 0) FROM import";
        home.sql().query_row(query, [], |row| row.get(0)).unwrap()
    };
    until("a batch is written", async || written() > 0).await;
    import.abort();
    let dropped = import.await;
    // Another write waits for the one that was under way, as a new process would.
    let nobody = UserId::parse("nobody").unwrap();
    home.exporter
        .source
        .set_account(&nobody, true)
        .await
        .unwrap();
    // Whatever was under way when it was dropped, whole batches are in the log.
    let (report, _) = home.try_import(&big_file(), false).await;
    let report = report.unwrap();
    if dropped.is_err() {
        assert_eq!(report.continued_after_line % BATCH, 0, "{report:?}");
    }
    assert_eq!(report.continued_after_line + report.accepted, EVENTS as u64);
    let found = home.export_now("ann", "all").await;
    assert_same_lines("dropped", &found, &undisturbed().await);
}

#[tokio::test]
async fn lines_that_were_skipped_before_the_interruption_stay_skipped() {
    let mut file = b"nonsense\n".to_vec();
    file.extend(big_file());
    file.extend(b"{}\n");
    let home = Installation::new();
    let source = InterruptedSource::at_batch(&home.exporter.source, |batch| match batch {
        2 => Then::Fail,
        _ => Then::Answer,
    });
    let (failed, refused) = import_into(&source, &file, true).await;
    assert!(failed.is_err());
    assert_eq!(refused.len(), 2);
    let (report, refused) = home.try_import(&file, true).await;
    let report = report.unwrap();
    assert_eq!((report.continued_after_line, report.skipped), (BATCH, 1));
    assert_eq!(refused[0].0, EVENTS as u64 + 2);
    let found = home.export_now("ann", "all").await;
    assert_same_lines("skipped", &found, &undisturbed().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_imports_of_one_file_at_the_same_time_write_each_line_once() {
    let home = Installation::new();
    let file = big_file();
    let (one, other) = tokio::join!(home.try_import(&file, false), home.try_import(&file, false));
    // Whoever finds that the other was faster stops and says so, or finds that all is done.
    let mut stopped = 0;
    for (result, _) in [one, other] {
        match result {
            Ok(_) => {}
            Err(ImportError::Source(SourceError::ImportElsewhere)) => stopped += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(stopped < 2);
    home.try_import(&file, false).await.0.unwrap();
    let found = home.export_now("ann", "all").await;
    assert_same_lines("imported twice at once", &found, &undisturbed().await);
}
