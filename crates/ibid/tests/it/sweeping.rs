//! What nobody needs is deleted, and nothing else.

use std::sync::Arc;
use std::time::Duration;

use ibid::export::{Event, LAST_DOWNLOADS, RevokedBy, State};
use ibid::ids::{ClaimId, JobId, UserId};
use ibid::janitor::{SweepError, Swept};
use ibid::ledger::LedgerError;
use ibid::vault::{Key, PROBE_PREFIX};
use tokio::sync::Notify;

use crate::events::{chat, say};
use crate::harness::{Installation, On, TERMS, UNTIL_IDLE, on_both, work};
use crate::interruptions::{InterruptedLedger, Step, Then};

on_both!(
    what_no_row_names_is_deleted_and_what_one_names_stays,
    what_an_attempt_that_is_current_writes_stays_until_it_is_overtaken,
    an_export_expires_and_its_bytes_go,
    a_withdrawn_export_is_gone_in_every_state,
    a_worker_that_has_not_heard_of_a_withdrawal_leaves_nothing,
    old_records_go_and_free_their_keys,
    a_sweep_goes_on_past_what_cannot_be_deleted,
    none_of_a_great_many_waits_for_those_whose_bytes_cannot_be_deleted,
    a_vault_of_another_ledger_is_left_alone,
    what_a_killed_doctor_has_left_is_deleted_after_an_hour,
    a_done_export_whose_bytes_are_lost_is_made_again_and_is_the_same,
    a_done_export_that_would_come_out_other_fails,
);

fn ann() -> UserId {
    UserId::parse("ann").unwrap()
}

/// Something that a killed worker may have left, with a name that the store hides.
fn leave(home: &Installation, job: JobId, claim: &str, name: &str) {
    let folder = home.exporter.vault.folder().unwrap();
    let folder = folder.join(job.to_string()).join(claim);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), "left").unwrap();
}

async fn what_no_row_names_is_deleted_and_what_one_names_stays(on: &On) {
    let home = Installation::cutting(on, 50).await;
    home.import(&chat(200)).await;
    let done = home.export("ann", "all").await;
    home.work().await;
    let kept = home.kept(done);
    assert_eq!(kept.len(), 1);
    let claim = ClaimId::random().unwrap().to_string();
    leave(&home, done, &claim, "part-000001#1");
    leave(&home, done, &claim, "export.jsonl.gz");
    let nobodys = JobId::random().unwrap();
    leave(&home, nobodys, &claim, "part-000000");
    leave(&home, nobodys, &claim, "part-000001#7");
    // One that waits, with parts: some of them recorded.
    let waiting = home.export("ann", "all").await;
    let mut workshop = home.exporter.workshop(1, None);
    let seen = std::sync::atomic::AtomicUsize::new(0);
    workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |step| {
        let third =
            step == Step::PartDone && seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst) >= 2;
        if third { Then::Fail } else { Then::Answer }
    });
    work(workshop, UNTIL_IDLE).await;
    assert_eq!(home.state(waiting).await, State::Queued);
    let recorded: Vec<String> = home
        .parts(waiting)
        .await
        .iter()
        .map(|part| format!("{}/part-{:06}", part.claim, part.number))
        .collect();
    assert_eq!(recorded.len(), 2);
    leave(&home, waiting, &claim, "part-000002");

    let swept = home.janitor().sweep_all().await.unwrap();
    assert_eq!(home.kept(done), kept);
    assert_eq!(home.kept(waiting), recorded);
    assert_eq!(home.kept(nobodys), [""; 0]);
    let folder = home.exporter.vault.folder().unwrap();
    assert!(!folder.join(nobodys.to_string()).exists());
    // What the interrupted attempt had left was deleted when it ended.
    assert_eq!(
        swept,
        Swept {
            objects: 5,
            ..Swept::default()
        }
    );
    assert_eq!(home.janitor().sweep_all().await.unwrap(), Swept::default());
    home.clock.advance(Duration::from_secs(60));
    home.work().await;
    let (one, other) = (home.file(done).await, home.file(waiting).await);
    assert!(one == other);
}

async fn what_an_attempt_that_is_current_writes_stays_until_it_is_overtaken(on: &On) {
    let home = Installation::on(on).await;
    home.import(&chat(20)).await;
    let job = home.export("ann", "all").await;
    let claim = home.claim().await.unwrap();
    assert_eq!(claim.export.job_id, job);
    leave(&home, job, &claim.id.to_string(), "part-000000#3");
    leave(&home, job, &claim.id.to_string(), "export.jsonl.gz#1");
    assert_eq!(home.janitor().sweep_all().await.unwrap().objects, 0);
    let ledger = &home.exporter.ledger;
    ledger
        .settle(job, claim.id, Event::GivenBack)
        .await
        .unwrap();
    assert_eq!(home.janitor().sweep_all().await.unwrap().objects, 2);
}

async fn an_export_expires_and_its_bytes_go(on: &On) {
    let home = Installation::on(on).await;
    home.import(&chat(20)).await;
    let (done, failed) = (
        home.export("ann", "all").await,
        home.export("ann", "all").await,
    );
    let claim = home.claim().await.unwrap();
    home.work().await;
    let ledger = &home.exporter.ledger;
    let gave_up = Event::GaveUp {
        problem: ibid::export::Problem {
            kind: "log-changed".to_owned(),
            detail: "It was.".to_owned(),
        },
        terms: TERMS,
    };
    ledger
        .settle(claim.export.job_id, claim.id, gave_up)
        .await
        .unwrap();
    // Expired for everybody at its moment; the bytes stay for whom began to read before.
    home.clock
        .advance(TERMS.retention + LAST_DOWNLOADS - Duration::from_micros(1));
    for all in [false, true] {
        let janitor = home.janitor();
        let swept = match all {
            false => janitor.sweep().await,
            true => janitor.sweep_all().await,
        };
        assert_eq!(swept.unwrap(), Swept::default());
    }
    let now = home.clock.now();
    let mut kept = 0;
    for job in [done, failed] {
        assert_eq!(home.find(job).await.export.state_at(now), State::Expired);
        kept += home.kept(job).len();
    }
    // Which of the two was claimed first, and failed, is not said.
    assert_eq!(kept, 1);
    home.clock.advance(Duration::from_micros(1));
    let swept = home.janitor().sweep().await.unwrap();
    assert_eq!((swept.expired, swept.objects), (2, 1));
    for job in [done, failed] {
        assert_eq!(home.state(job).await, State::Expired);
        assert_eq!(home.kept(job), [""; 0]);
    }
    // Known to be gone from then on, so that no later sweep looks for it.
    home.clock.advance(Duration::from_secs(3600));
    home.janitor().sweep().await.unwrap();
    assert_eq!(ledger.purges(None, 9).await.unwrap(), []);
}

async fn a_withdrawn_export_is_gone_in_every_state(on: &On) {
    let home = Installation::on(on).await;
    home.import(&chat(20)).await;
    let bob = UserId::parse("bob").unwrap();
    for state in [
        State::Queued,
        State::Running,
        State::Done,
        State::Failed,
        State::Revoked,
        State::Expired,
    ] {
        let job = home.export("ann", "all").await;
        let ledger = &home.exporter.ledger;
        match state {
            State::Queued => {}
            State::Running => {
                let claim = home.claim().await.unwrap();
                leave(&home, job, &claim.id.to_string(), "part-000000");
            }
            State::Failed => {
                let claim = home.claim().await.unwrap();
                let problem = ibid::export::Problem {
                    kind: "x".to_owned(),
                    detail: "X.".to_owned(),
                };
                let terms = TERMS;
                let event = Event::GaveUp { problem, terms };
                ledger.settle(job, claim.id, event).await.unwrap();
            }
            State::Done | State::Revoked | State::Expired => {
                home.work().await;
                if state == State::Revoked {
                    home.exporter.revoke(job, "x".to_owned()).await.unwrap();
                    assert_eq!(home.kept(job).len(), 1, "an admin keeps the bytes");
                }
                if state == State::Expired {
                    home.clock.advance(TERMS.retention + LAST_DOWNLOADS);
                    home.janitor().sweep().await.unwrap();
                }
            }
        }
        assert_eq!(home.state(job).await, state);
        let strangers = home.exporter.withdraw(&bob, job).await.unwrap();
        assert!(strangers.is_none());
        for _ in 0..2 {
            let withdrawn = home.exporter.withdraw(&ann(), job).await.unwrap();
            let expected = match state {
                State::Expired => State::Expired,
                _ => State::Revoked,
            };
            assert_eq!(withdrawn.unwrap().state, expected);
            assert_eq!(home.kept(job), [""; 0], "{state:?}");
        }
        let restored = home.exporter.restore(job).await;
        assert!(
            matches!(restored, Err(LedgerError::Refused(_))),
            "{state:?}"
        );
    }
}

async fn a_worker_that_has_not_heard_of_a_withdrawal_leaves_nothing(on: &On) {
    let home = Installation::cutting(on, 5).await;
    home.import(&chat(20)).await;
    let job = home.export("ann", "all").await;
    // The job is withdrawn between the bytes of a part and its row.
    let (reached, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let mut workshop = home.exporter.workshop(1, None);
    let (tell, wait) = (Arc::clone(&reached), Arc::clone(&go_on));
    workshop.ledger = InterruptedLedger::at(&home.exporter.ledger, move |step| {
        if step != Step::PartDone {
            return Then::Answer;
        }
        tell.notify_one();
        Then::Wait(Arc::clone(&wait))
    });
    let working = tokio::spawn(work(workshop, UNTIL_IDLE));
    reached.notified().await;
    assert_eq!(home.kept(job).len(), 1);
    home.exporter.withdraw(&ann(), job).await.unwrap();
    go_on.notify_one();
    let reports = working.await.unwrap();
    assert_eq!(reports[0].state, None);
    assert_eq!(home.kept(job), [""; 0]);
    assert_eq!(home.state(job).await, State::Revoked);
}

async fn old_records_go_and_free_their_keys(on: &On) {
    let home = Installation::on(on).await;
    home.import(&chat(20)).await;
    home.create("ann", "all", "key").await.unwrap();
    home.work().await;
    let queued = home.export("ann", "all").await;
    let day = Duration::from_secs(86_400);
    home.clock.advance(90 * day - Duration::from_micros(1));
    let swept = home.janitor().sweep_all().await.unwrap();
    assert_eq!((swept.expired, swept.records), (1, 0));
    let known = home.create("ann", "all", "key").await.unwrap();
    assert!(matches!(known, ibid::ledger::Created::Replayed(_)));
    home.clock.advance(Duration::from_micros(1));
    assert_eq!(home.janitor().sweep_all().await.unwrap().records, 1);
    let new = home.create("ann", "all", "key").await.unwrap();
    assert!(matches!(new, ibid::ledger::Created::New(_)), "{new:?}");
    // One that is not over is kept, however old.
    assert_eq!(home.state(queued).await, State::Queued);
}

async fn a_sweep_goes_on_past_what_cannot_be_deleted(on: &On) {
    let home = Installation::on(on).await;
    home.import(&chat(20)).await;
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(home.export("ann", "all").await);
    }
    home.work().await;
    // Of the one that is looked at first: a folder, which is not deleted as a file is.
    jobs.sort_by_key(JobId::to_string);
    let claim = home.artefact(jobs[0]).await.claim.to_string();
    let lasting = home.exporter.vault.folder().unwrap();
    let lasting = lasting.join(jobs[0].to_string()).join(claim);
    leave(&home, jobs[0], "x", "y");
    std::fs::create_dir_all(lasting.join("part-000000").join("z")).unwrap();
    home.clock.advance(Duration::from_secs(90 * 86_400));
    let ended = home.janitor().sweep().await;
    assert!(matches!(ended, Err(SweepError::Vault(_))), "{ended:?}");
    for job in &jobs[1..] {
        assert_eq!(home.kept(*job), [""; 0]);
    }
    let nobodys = JobId::random().unwrap();
    leave(&home, nobodys, "x", "y");
    let ended = home.janitor().sweep_all().await;
    assert!(matches!(ended, Err(SweepError::Vault(_))), "{ended:?}");
    assert_eq!(home.kept(nobodys), [""; 0]);
    for job in jobs {
        let found = home.exporter.ledger.find(job).await.unwrap();
        assert!(found.is_none(), "{job}");
    }
}

async fn none_of_a_great_many_waits_for_those_whose_bytes_cannot_be_deleted(on: &On) {
    let home = Installation::on(on).await;
    home.import(&chat(2)).await;
    let first = home.export("ann", "all").await;
    let mut jobs = home.queue_more(first, 1_040).await;
    jobs.push(first);
    home.change_all(
        "UPDATE export SET state = 'revoked', revoked_by = 'owner', revoked_reason = '',
                purging = true, revoked_at = created_at",
    )
    .await;
    jobs.sort_by_key(JobId::to_string);
    let claim = ClaimId::random().unwrap().to_string();
    for job in &jobs {
        leave(&home, *job, &claim, "part-000000");
    }
    // Those that are looked at first, and more of them than show that a store is away.
    let vault = home.exporter.vault.folder().unwrap();
    let (lasting, others) = jobs.split_at(30);
    for job in lasting {
        let folder = vault.join(job.to_string()).join(&claim);
        std::fs::create_dir_all(folder.join("part-000001").join("z")).unwrap();
    }
    // Somebody may still write, so nobody is done with any of them.
    let ended = home.janitor().sweep().await;
    assert!(matches!(ended, Err(SweepError::Vault(_))), "{ended:?}");
    for job in others {
        assert_eq!(home.kept(*job), [""; 0]);
    }
    // The next one comes to those that were not known yet, however many are not done with.
    leave(&home, jobs[jobs.len() - 1], &claim, "part-000007");
    home.clock.advance(Duration::from_secs(601));
    home.janitor().sweep().await.unwrap_err();
    let ledger = &home.exporter.ledger;
    let left = ledger.purges(None, 2_000).await.unwrap();
    assert_eq!(left.len(), lasting.len());
    assert_eq!(home.kept(jobs[jobs.len() - 1]), [""; 0]);
}

async fn a_vault_of_another_ledger_is_left_alone(on: &On) {
    let (home, other) = (Installation::on(on).await, Installation::on(on).await);
    home.import(&chat(20)).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    assert_eq!(home.janitor().sweep_all().await.unwrap(), Swept::default());
    let mut strangers = other.janitor();
    strangers.vault = home.exporter.vault.clone();
    let refused = strangers.sweep_all().await;
    assert!(
        matches!(refused, Err(SweepError::ForeignVault { .. })),
        "{refused:?}"
    );
    assert_eq!(home.kept(job).len(), 1);
}

async fn what_a_killed_doctor_has_left_is_deleted_after_an_hour(on: &On) {
    let home = Installation::on(on).await;
    let folder = home.exporter.vault.folder().unwrap();
    let now = Duration::from_micros(home.clock.now().micros() as u64);
    let leave = |name: &str, ago: u64| {
        let file = std::fs::File::create(folder.join(name)).unwrap();
        let at = std::time::UNIX_EPOCH + now - Duration::from_secs(ago);
        file.set_modified(at).unwrap();
    };
    leave(&format!("{PROBE_PREFIX}old"), 3601);
    leave(&format!("{PROBE_PREFIX}young"), 1800);
    leave("not-ours", 9999);
    assert_eq!(home.janitor().sweep().await.unwrap(), Swept::default());
    assert_eq!(home.janitor().sweep_all().await.unwrap().objects, 1);
    let there = |name: &str| folder.join(name).exists();
    assert!(!there(&format!("{PROBE_PREFIX}old")));
    assert!(there(&format!("{PROBE_PREFIX}young")) && there("not-ours"));
}

/// The file of a done export, and where it lies.
async fn done(on: &On) -> (Installation, JobId, Vec<u8>, std::path::PathBuf) {
    let home = Installation::cutting(on, 7).await;
    home.import(&chat(20)).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    let file = home.file(job).await;
    let folder = home.exporter.vault.folder().unwrap();
    let path = folder.join(job.to_string()).join(&home.kept(job)[0]);
    (home, job, file, path)
}

async fn a_done_export_whose_bytes_are_lost_is_made_again_and_is_the_same(on: &On) {
    let (home, job, file, mut path) = done(on).await;
    let told = home.find(job).await.export;
    let whole = home.exporter.retry(job).await;
    assert!(matches!(whole, Err(LedgerError::Refused(State::Done))));
    let mut damaged = file.clone();
    damaged[15] ^= 1;
    for left in [None, Some(&damaged[..]), Some(&file[..9])] {
        match left {
            None => std::fs::remove_file(&path).unwrap(),
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
        }
        home.clock.advance(Duration::from_secs(3600));
        home.import(&[say("c", "later")]).await;
        home.exporter.retry(job).await.unwrap();
        assert_eq!(home.state(job).await, State::Queued);
        home.work().await;
        assert!(home.file(job).await == file);
        let again = home.find(job).await.export;
        assert_eq!(again.finished_at, told.finished_at);
        assert_eq!(again.expires_at, told.expires_at);
        assert_eq!(home.kept(job).len(), 1);
        let folder = home.exporter.vault.folder().unwrap();
        path = folder.join(job.to_string()).join(&home.kept(job)[0]);
    }
}

async fn a_done_export_that_would_come_out_other_fails(on: &On) {
    let (home, job, _, path) = done(on).await;
    std::fs::remove_file(path).unwrap();
    let parts = home.parts(job).await;
    let revoked = home.exporter.ledger.identity().await.unwrap();
    assert!(!revoked.is_empty());
    home.exporter.retry(job).await.unwrap();
    // The digest of what was told, altered in the ledger: nothing else can come out.
    home.change(
        "UPDATE export SET artefact_bytes = artefact_bytes + 1, artefact_sha256 = sha256
         FROM part WHERE part.job_id = export.job_id AND part.part = 0",
    )
    .await;
    home.work().await;
    assert_eq!(home.failure(job).await, "not-deterministic");
    assert_eq!(home.parts(job).await.len(), parts.len());
    let by = RevokedBy::Owner;
    let reason = String::new();
    let event = Event::Revoked { by, reason };
    home.exporter.ledger.decide(job, event).await.unwrap();
    let key = Key::Part {
        job,
        claim: parts[0].claim,
        number: 0,
    };
    home.janitor().sweep().await.unwrap();
    assert!(home.exporter.vault.get(key).await.is_err());
}
