//! Artefacts in an object store: the same files, and nothing left.

use std::time::Duration;

use ::object_store::aws::AmazonS3Builder;
use ::object_store::{Attribute, ObjectStoreExt as _};
use futures::TryStreamExt as _;
use ibid::export::{Event, State};
use ibid::exporter::Exporter;
use ibid::ids::{ClaimId, JobId, UserId};
use ibid::janitor::{SweepError, Swept};
use ibid::ledger::LedgerError;
use ibid::vault::{Key, Vault, VaultError};
use sha2::{Digest as _, Sha256};

use crate::events::{chat, join, say};
use crate::harness::{Installation, LEASE, On, UNTIL_IDLE, on_both, work};
use crate::interruptions::{InterruptedLedger, Step, Then};
use crate::s3_server::{Fault, S3Server};

on_both!(
    the_file_is_the_one_that_a_disk_gives_and_parts_are_gone,
    a_large_artefact_is_sent_in_pieces,
    an_upload_that_a_killed_worker_began_is_given_up,
    an_upload_that_cannot_be_noted_is_given_up,
    what_no_row_names_is_deleted_from_the_store,
    what_a_killed_probe_has_left_is_deleted_after_an_hour,
    calls_that_fail_are_repeated_and_a_store_that_is_away_is_waited_for,
    how_requests_to_the_store_are_signed_is_not_told,
);

/// An installation and its exporter over the store.
async fn at(server: &S3Server, on: &On, part_messages: u64) -> (Installation, Exporter) {
    let mut home = Installation::cutting(on, part_messages).await;
    home.exporter.vault = server.vault("a/prefix");
    let exporter = home.exporter.clone();
    (home, exporter)
}

async fn bytes(exporter: &Exporter, job: JobId, range: std::ops::Range<u64>) -> Vec<u8> {
    let export = exporter.ledger.find(job).await.unwrap().unwrap().export;
    let claim = export.artefact.unwrap().claim;
    let stream = exporter.vault.read(Key::Artefact { job, claim }, range);
    let chunks: Vec<_> = stream.await.unwrap().try_collect().await.unwrap();
    chunks.concat()
}

async fn the_file_is_the_one_that_a_disk_gives_and_parts_are_gone(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 50).await;
    let disk = Installation::cutting_at(50);
    let mut files = Vec::new();
    for home in [&home, &disk] {
        home.import(&chat(300)).await;
        let job = home.export("ann", "all").await;
        home.work().await;
        files.push((job, home.file(job).await));
    }
    assert!(files[0].1 == files[1].1);
    let job = files[0].0;
    let claim = home.artefact(job).await.claim;
    assert_eq!(
        server.objects("a/prefix"),
        [format!("{job}/{claim}/export.jsonl.gz")]
    );
    is_named(&server, job, claim).await;
    let file = &files[0].1;
    let length = file.len() as u64;
    for range in [0..length, 0..1, length - 1..length, 7..length - 7] {
        let expected = &file[range.start as usize..range.end as usize];
        assert!(bytes(&exporter, job, range).await == expected);
    }
    let missing = exporter.vault.read(
        Key::Artefact {
            job,
            claim: ClaimId::random().unwrap(),
        },
        0..9,
    );
    assert!(matches!(missing.await, Err(VaultError::Missing)));
    let ann = UserId::parse("ann").unwrap();
    exporter.withdraw(&ann, job).await.unwrap();
    assert_eq!(server.objects("a/prefix"), [""; 0]);
}

/// What the store says of the artefact of a job to whoever fetches it.
async fn is_named(server: &S3Server, job: JobId, claim: ClaimId) {
    let mut builder = AmazonS3Builder::new().with_bucket_name("vault");
    for (name, value) in server.variables() {
        let name = name.to_ascii_lowercase();
        builder = builder.with_config(name.parse().unwrap(), value);
    }
    let store = builder.build().unwrap();
    let path = format!("a/prefix/{job}/{claim}/export.jsonl.gz");
    let got = store.get(&path.into()).await.unwrap();
    let name = format!("attachment; filename=\"export-{job}.jsonl.gz\"");
    for (attribute, value) in [
        (Attribute::ContentType, "application/gzip"),
        (Attribute::ContentDisposition, &name),
    ] {
        let said = got.attributes.get(&attribute);
        assert_eq!(said.map(AsRef::as_ref), Some(value), "{attribute:?}");
    }
    assert_eq!(got.attributes.get(&Attribute::ContentEncoding), None);
}

/// Text that hardly compresses.
pub fn noise(number: u64) -> String {
    let mut text = String::new();
    let mut at = number;
    while text.len() < 40_000 {
        at = at.wrapping_add(1);
        text.push_str(&hex::encode(Sha256::digest(at.to_be_bytes())));
    }
    text
}

async fn a_large_artefact_is_sent_in_pieces(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 0).await;
    let mut lines = vec![join("c", "ann")];
    lines.extend((0..1_000).map(|number| say("c", &noise(number * 100_000))));
    home.import(&lines).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    let artefact = home.artefact(job).await;
    assert!(artefact.bytes > 17 * 1024 * 1024, "{}", artefact.bytes);
    is_named(&server, job, artefact.claim).await;
    let whole = bytes(&exporter, job, 0..artefact.bytes).await;
    assert_eq!(Sha256::digest(&whole)[..], artefact.sha256);
    assert_eq!(server.unfinished(), 0);
    let uploads = exporter
        .ledger
        .abandoned_uploads(None, None, 9)
        .await
        .unwrap();
    assert_eq!(uploads, []);
    // Across the borders of what is fetched at once.
    let mib = 1024 * 1024;
    let range = mib - 5..3 * mib + 5;
    let expected = &whole[range.start as usize..range.end as usize];
    assert!(bytes(&exporter, job, range).await == expected);
}

async fn an_upload_that_a_killed_worker_began_is_given_up(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 0).await;
    home.import(&chat(50)).await;
    let job = home.export("ann", "all").await;
    let held = home.claim().await.unwrap();
    let key = Key::Artefact {
        job,
        claim: held.id,
    };
    let mut upload = exporter.vault.upload(key, 20 << 20).await.unwrap();
    let id = upload.id().unwrap().to_owned();
    let ledger = &exporter.ledger;
    ledger.upload_begun(job, held.id, &id).await.unwrap();
    upload.write(&vec![7; 9 << 20]).await.unwrap();
    assert_eq!(server.unfinished(), 2, "one piece and what is known of it");
    drop(upload);
    // As long as the claim is current it is left alone.
    assert_eq!(home.janitor().sweep_all().await.unwrap(), Swept::default());
    let strangers = ClaimId::random().unwrap();
    let refused = ledger.upload_begun(job, strangers, "x").await;
    assert!(matches!(refused, Err(LedgerError::LeaseLost)));
    home.clock.advance(2 * LEASE);
    home.work().await;
    assert_eq!(home.state(job).await, State::Done);
    assert_eq!(server.unfinished(), 0);
    assert_eq!(ledger.abandoned_uploads(None, None, 9).await.unwrap(), []);
    assert_eq!(
        home.file(job).await.len() as u64,
        home.artefact(job).await.bytes
    );
}

async fn an_upload_that_cannot_be_noted_is_given_up(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 0).await;
    let mut lines = vec![join("c", "ann")];
    lines.extend((0..500).map(|number| say("c", &noise(number * 100_000))));
    home.import(&lines).await;
    let job = home.export("ann", "all").await;
    let mut workshop = exporter.workshop(1, None);
    workshop.ledger = InterruptedLedger::at(&exporter.ledger, |step| match step {
        Step::UploadBegun => Then::Fail,
        _ => Then::Answer,
    });
    work(workshop, UNTIL_IDLE).await;
    let export = home.find(job).await.export;
    assert_eq!(export.waiting.unwrap().problem.kind, "database-unavailable");
    assert_eq!(server.unfinished(), 0);
    home.clock.advance(Duration::from_secs(60));
    home.work().await;
    assert!(home.artefact(job).await.bytes > 8 << 20);
    assert_eq!(server.unfinished(), 0);
}

async fn what_no_row_names_is_deleted_from_the_store(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 20).await;
    home.import(&chat(50)).await;
    let done = home.export("ann", "all").await;
    home.work().await;
    let (nobodys, claim) = (JobId::random().unwrap(), ClaimId::random().unwrap());
    for job in [nobodys, done] {
        let key = Key::Part {
            job,
            claim,
            number: 1,
        };
        exporter.vault.put(key, vec![1, 2, 3]).await.unwrap();
    }
    let held = home.export("ann", "all").await;
    let current = home.claim().await.unwrap();
    let key = Key::Part {
        job: held,
        claim: current.id,
        number: 0,
    };
    exporter.vault.put(key, vec![1, 2, 3]).await.unwrap();
    assert_eq!(home.janitor().sweep_all().await.unwrap().objects, 2);
    let left = server.objects("a/prefix");
    assert_eq!(left.len(), 3, "{left:?}");
    assert!(left.contains(&"ledger".to_owned()), "{left:?}");
    assert!(exporter.vault.get(key).await.is_ok());

    let other = Installation::on(on).await;
    let mut strangers = other.janitor();
    strangers.vault = exporter.vault.clone();
    let refused = strangers.sweep_all().await;
    assert!(matches!(refused, Err(SweepError::ForeignVault { .. })));
    assert_eq!(server.objects("a/prefix"), left);
    // Its neighbour in the same bucket is another vault.
    strangers.vault = server.vault("a/prefix-2");
    assert_eq!(strangers.sweep_all().await.unwrap(), Swept::default());

    let event = Event::GivenBack;
    exporter
        .ledger
        .settle(held, current.id, event)
        .await
        .unwrap();
    assert_eq!(home.janitor().sweep_all().await.unwrap().objects, 1);
}

async fn what_a_killed_probe_has_left_is_deleted_after_an_hour(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 0).await;
    assert!(exporter.vault.probe().await.unwrap());
    assert_eq!(server.objects("a/prefix"), [""; 0]);
    // The store's own clock and the ledger's are compared; that of a test stands.
    let now = home.clock.now();
    let hour = Duration::from_secs(3600);
    server.put(
        "a/prefix/probe/old",
        now.minus(hour + Duration::from_secs(1)),
    );
    server.put("a/prefix/probe/young", now.minus(hour / 2));
    assert_eq!(home.janitor().sweep().await.unwrap(), Swept::default());
    assert_eq!(home.janitor().sweep_all().await.unwrap().objects, 1);
    assert_eq!(server.objects("a/prefix"), ["ledger", "probe/young"]);
}

async fn calls_that_fail_are_repeated_and_a_store_that_is_away_is_waited_for(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 10).await;
    home.import(&chat(200)).await;
    let undisturbed = home.export("ann", "all").await;
    home.work().await;
    let expected = home.file(undisturbed).await;
    for fault in [Fault::Refused, Fault::Cut, Fault::Unanswered] {
        let job = home.export("ann", "all").await;
        server.faults().set(5, fault);
        home.work().await;
        server.faults().set(0, fault);
        assert_eq!(home.state(job).await, State::Done, "{fault:?}");
        assert!(home.file(job).await == expected, "{fault:?}");
    }
    for fault in [Fault::Refused, Fault::Hangs] {
        let job = home.export("ann", "all").await;
        server.faults().set(100, fault);
        let before = server.faults().calls();
        work(exporter.workshop(1, None), UNTIL_IDLE).await;
        assert!(server.faults().calls() > before);
        let export = home.find(job).await.export;
        assert_eq!(export.state, State::Queued, "{fault:?}");
        assert_eq!(export.waiting.unwrap().problem.kind, "storage-unavailable");
        assert_eq!(export.strikes, 0);
        let done = exporter.ready().await;
        assert!(done.unwrap_err().contains("the store of artefacts"));
        server.faults().set(0, fault);
        home.clock.advance(Duration::from_secs(60));
        home.work().await;
        assert!(home.file(job).await == expected, "{fault:?}");
    }
    // Nothing is left but what rows name.
    home.janitor().sweep_all().await.unwrap();
    let left = server.objects("a/prefix");
    assert_eq!(left.len(), 6 + 1, "{left:?}");
    assert_eq!(server.unfinished(), 0);
}

async fn how_requests_to_the_store_are_signed_is_not_told(on: &On) {
    let server = S3Server::start().await;
    let (home, exporter) = at(&server, on, 0).await;
    home.import(&chat(20)).await;
    let job = home.export("ann", "all").await;
    server.faults().set(100, Fault::Denied);
    home.work().await;
    // Its owner reads this.
    let waiting = home.find(job).await.export.waiting.unwrap();
    for said in [waiting.problem.detail, exporter.ready().await.unwrap_err()] {
        assert!(said.contains("403"), "{said}");
        assert!(!said.contains("AKIDEXAMPLE"), "{said}");
        assert!(!said.contains("SESSIONTOKEN"), "{said}");
    }
    let listed = exporter.vault.jobs().await.unwrap_err().to_string();
    assert!(listed.contains("SignatureDoesNotMatch"), "{listed}");
    assert!(!listed.contains("SESSIONTOKEN"), "{listed}");
}

/// The same on a store of the world: see `scripts/test-s3`.
#[allow(clippy::disallowed_methods)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_the_environment_names() {
    let Ok(url) = std::env::var("IBID_TEST_STORE") else {
        eprintln!("skipped: IBID_TEST_STORE names no object store");
        return;
    };
    let variables: Vec<(String, String)> = std::env::vars().collect();
    let options = || {
        variables
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    };
    // Below a prefix of its own, so that nothing else is looked at or deleted.
    let url = format!(
        "{}/test-{}",
        url.trim_end_matches('/'),
        JobId::random().unwrap()
    );
    let mut home = Installation::cutting_at(50);
    home.exporter.vault = Vault::at_url(&url, options()).unwrap();
    let vault = home.exporter.vault.clone();
    assert!(vault.probe().await.unwrap());

    home.import(&chat(300)).await;
    let small = home.export("ann", "all").await;
    home.work().await;
    let disk = Installation::cutting_at(50);
    disk.import(&chat(300)).await;
    let same = disk.export("ann", "all").await;
    disk.work().await;
    assert!(home.file(small).await == disk.file(same).await);

    let lines: Vec<String> = (0..1_000).map(|n| say("c", &noise(n * 100_000))).collect();
    home.import(&lines).await;
    let large = home.export("ann", "all").await;
    home.work().await;
    let artefact = home.artefact(large).await;
    assert!(artefact.bytes > 17 << 20, "{}", artefact.bytes);
    let whole = bytes(&home.exporter, large, 0..artefact.bytes).await;
    assert_eq!(Sha256::digest(&whole)[..], artefact.sha256);

    let key = Key::Artefact {
        job: JobId::random().unwrap(),
        claim: ClaimId::random().unwrap(),
    };
    let mut upload = vault.upload(key, 20 << 20).await.unwrap();
    upload.write(&vec![7; 9 << 20]).await.unwrap();
    let id = upload.id().unwrap().to_owned();
    drop(upload);
    for _ in 0..2 {
        vault.give_up(key, &id).await.unwrap();
    }
    let Key::Artefact { job, claim } = key else {
        unreachable!()
    };
    let part = Key::Part {
        job,
        claim,
        number: 0,
    };
    vault.put(part, vec![1]).await.unwrap();
    let swept = home.janitor().sweep_all().await.unwrap();
    assert_eq!((swept.objects, swept.uploads), (1, 0));
    let mut jobs = vault.jobs().await.unwrap();
    jobs.sort_by_key(JobId::to_string);
    let mut expected = vec![small, large];
    expected.sort_by_key(JobId::to_string);
    assert_eq!(jobs, expected);
    let ann = UserId::parse("ann").unwrap();
    for job in expected {
        home.exporter.withdraw(&ann, job).await.unwrap();
    }
    assert_eq!(vault.jobs().await.unwrap(), []);
}
