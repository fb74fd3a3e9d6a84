//! Who may fetch what: links, accounts, tokens.

use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use ibid::export::{Event, RevokedBy};
use ibid::exporter::{Download, DownloadError};
use ibid::ids::{JobId, UserId};
use ibid::ledger::{self, Ledger, LedgerError, NewToken, Role};
use ibid::link::{KeyRing, Link};
use ibid::token::FreshToken;

use crate::events::{chat, join};
use crate::harness::{Installation, On, TERMS, on_both};

on_both! {
    a_link_gives_the_bytes_whole_and_in_ranges,
    bytes_that_end_early_end_with_an_error,
    a_link_is_for_one_user_one_job_and_some_minutes,
    a_signature_does_not_stand_in_for_authorisation,
    what_the_owner_withdrew_is_gone_for_good,
    an_export_expires_at_its_moment_though_nobody_swept,
    what_is_not_ready_or_lost_is_told_apart,
    downloads_are_counted_with_their_sources,
    two_nodes_that_count_the_same_downloads_at_once_lose_none,
    a_token_is_found_by_its_digest_until_it_expires_or_is_revoked,
}

struct Served {
    home: Installation,
    job: JobId,
    ring: KeyRing,
}

/// An installation with an export of ann's that is done.
async fn served(on: &On) -> Served {
    let home = Installation::on(on).await;
    home.import(&chat(10)).await;
    home.import(&[join("c", "eve")]).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    let ring = KeyRing::generate(home.clock.now()).unwrap();
    let ring = KeyRing::parse(&ring).unwrap();
    Served { home, job, ring }
}

impl Served {
    async fn link(&self) -> String {
        let export = self.home.find(self.job).await.export;
        let now = self.home.clock.now();
        self.home.exporter.link(&self.ring, &export, now).0
    }

    async fn download(&self, query: &str) -> Result<Download, DownloadError> {
        self.home
            .exporter
            .download(&self.ring, self.job, query)
            .await
    }

    /// The name of what a good link comes to now.
    async fn refusal(&self) -> String {
        let error = self.download(&self.link().await).await.unwrap_err();
        error.to_string()
    }

    async fn enable(&self, enabled: bool) {
        let ann = UserId::parse("ann").unwrap();
        self.home
            .exporter
            .source
            .set_account(&ann, enabled)
            .await
            .unwrap();
    }
}

async fn a_link_gives_the_bytes_whole_and_in_ranges(on: &On) {
    let served = served(on).await;
    let download = served.download(&served.link().await).await.unwrap();
    let file = served.home.file(served.job).await;
    let length = file.len() as u64;
    for range in [0..length, 0..1, 5..length, length - 1..length] {
        let read = served
            .home
            .exporter
            .read(&download, range.clone())
            .await
            .unwrap();
        let read: Vec<_> = read.try_collect().await.unwrap();
        let expected = &file[range.start as usize..range.end as usize];
        assert_eq!(read.concat(), expected, "{range:?}");
    }
}

async fn bytes_that_end_early_end_with_an_error(on: &On) {
    let served = served(on).await;
    let download = served.download(&served.link().await).await.unwrap();
    let file = served.home.file(served.job).await;
    let path = served
        .home
        .exporter
        .vault
        .folder()
        .unwrap()
        .join(served.job.to_string());
    let path = path.join(&served.home.kept(served.job)[0]);
    std::fs::write(path, &file[..50]).unwrap();
    let read = served
        .home
        .exporter
        .read(&download, 0..file.len() as u64)
        .await;
    let whole = match read {
        Ok(read) => read.try_collect::<Vec<_>>().await,
        Err(error) => Err(error),
    };
    assert!(whole.is_err());
}

async fn a_link_is_for_one_user_one_job_and_some_minutes(on: &On) {
    let served = served(on).await;
    let good = served.link().await;
    let refused = async |query: &str| served.download(query).await.unwrap_err().to_string();
    let (invalid, expired) = ("the link is not valid", "the link has expired");

    for other in [
        good.replace("u=ann", "u=eve"),
        good.replace("exp=", "exp=1"),
        format!("{good}&x=1"),
        String::new(),
    ] {
        assert_eq!(refused(&other).await, invalid, "{other}");
    }
    // Signed, but the job is another's; and an authentic link to another job.
    let eves = Link {
        job: served.job,
        user: UserId::parse("eve").unwrap(),
        exp: served
            .home
            .clock
            .now()
            .plus(Duration::from_secs(60))
            .seconds(),
    };
    assert_eq!(refused(&served.ring.sign(&eves)).await, invalid);
    let another = served.home.export("ann", "conv:c").await;
    let of_another = served
        .home
        .exporter
        .download(&served.ring, another, &good)
        .await;
    assert_eq!(of_another.unwrap_err().to_string(), invalid);

    served.home.clock.advance(Duration::from_secs(300));
    served.download(&good).await.unwrap();
    served.home.clock.advance(Duration::from_secs(1));
    assert_eq!(refused(&good).await, expired);
    served.download(&served.link().await).await.unwrap();
}

async fn a_signature_does_not_stand_in_for_authorisation(on: &On) {
    let served = served(on).await;
    let exporter = &served.home.exporter;
    served.enable(false).await;
    assert_eq!(served.refusal().await, "the account is disabled");
    exporter
        .revoke(served.job, "test".to_owned())
        .await
        .unwrap();
    // The account comes first, then the job.
    assert_eq!(served.refusal().await, "the account is disabled");
    served.enable(true).await;
    assert_eq!(served.refusal().await, "the export was revoked");
    exporter.restore(served.job).await.unwrap();
    served.download(&served.link().await).await.unwrap();
    served.enable(false).await;
    assert_eq!(served.refusal().await, "the account is disabled");
}

async fn what_the_owner_withdrew_is_gone_for_good(on: &On) {
    let served = served(on).await;
    let withdrawn = Event::Revoked {
        by: RevokedBy::Owner,
        reason: String::new(),
    };
    let ledger = &served.home.exporter.ledger;
    ledger.decide(served.job, withdrawn).await.unwrap();
    assert_eq!(served.refusal().await, "the export was revoked");
    let restored = ledger.decide(served.job, Event::Restored).await;
    assert!(
        matches!(restored, Err(LedgerError::Refused(_))),
        "{restored:?}"
    );
}

async fn an_export_expires_at_its_moment_though_nobody_swept(on: &On) {
    let served = served(on).await;
    let almost = TERMS.retention - Duration::from_micros(1);
    served.home.clock.advance(almost);
    served.download(&served.link().await).await.unwrap();
    served.home.clock.advance(Duration::from_micros(1));
    assert_eq!(served.refusal().await, "the export has expired");
    // Nor can it be revoked and restored into life.
    let exporter = &served.home.exporter;
    exporter
        .revoke(served.job, "too late".to_owned())
        .await
        .unwrap();
    assert_eq!(served.refusal().await, "the export has expired");
}

async fn what_is_not_ready_or_lost_is_told_apart(on: &On) {
    let served = served(on).await;
    let home = &served.home;
    let path = home
        .exporter
        .vault
        .folder()
        .unwrap()
        .join(served.job.to_string());
    let path = path.join(&home.kept(served.job)[0]);
    let file = std::fs::read(&path).unwrap();
    for damaged in [
        &file[..file.len() - 1],
        &[file.as_slice(), b"x"].concat()[..],
    ] {
        std::fs::write(&path, damaged).unwrap();
        let refusal = served.refusal().await;
        assert!(
            refusal.starts_with("the artefact is not available: it is "),
            "{refusal}"
        );
    }
    std::fs::remove_file(&path).unwrap();
    let refusal = served.refusal().await;
    assert_eq!(
        refusal,
        "the artefact is not available: the store has no such object"
    );

    let waiting = home.export("ann", "all").await;
    let export = home.find(waiting).await.export;
    let link = home
        .exporter
        .link(&served.ring, &export, home.clock.now())
        .0;
    let early = home.exporter.download(&served.ring, waiting, &link).await;
    assert!(matches!(early, Err(DownloadError::NotReady)), "{early:?}");
}

async fn downloads_are_counted_with_their_sources(on: &On) {
    let served = served(on).await;
    let note = async |source: &str| {
        let download = ledger::Download {
            job_id: served.job,
            source: source.to_owned(),
        };
        let ledger = &served.home.exporter.ledger;
        ledger.note_downloads(vec![download]).await.unwrap();
    };
    assert_eq!(
        served.home.find(served.job).await.downloads,
        Default::default()
    );
    note("10.0.0.1").await;
    note("10.0.0.2").await;
    served.home.clock.advance(Duration::from_secs(5));
    note("10.0.0.1").await;
    let downloads = served.home.find(served.job).await.downloads;
    assert_eq!((downloads.count, downloads.sources), (3, 2));
    assert_eq!(downloads.last_at, Some(served.home.clock.now()));
}

async fn two_nodes_that_count_the_same_downloads_at_once_lose_none(on: &On) {
    let served = served(on).await;
    let sources: Vec<String> = (0..500).map(|number| format!("source {number}")).collect();
    let note = |ledger: Arc<dyn Ledger>, mut sources: Vec<String>, backwards: bool| {
        if backwards {
            sources.reverse();
        }
        // Each source twice, so that one row is counted twice in one call.
        let downloads = sources.iter().chain(&sources);
        let downloads = downloads.map(|source| ledger::Download {
            job_id: served.job,
            source: source.clone(),
        });
        let downloads: Vec<_> = downloads.collect();
        tokio::spawn(async move {
            for _ in 0..10 {
                ledger.note_downloads(downloads.clone()).await.unwrap();
            }
        })
    };
    let one = served.home.another_exporter().await.ledger;
    let other = served.home.another_exporter().await.ledger;
    let (one, other) = (
        note(one, sources.clone(), false),
        note(other, sources, true),
    );
    one.await.unwrap();
    other.await.unwrap();
    let downloads = served.home.find(served.job).await.downloads;
    assert_eq!((downloads.count, downloads.sources), (20_000, 500));
}

async fn a_token_is_found_by_its_digest_until_it_expires_or_is_revoked(on: &On) {
    let home = Installation::on(on).await;
    let ledger = &home.exporter.ledger;
    let add = async |ttl| {
        let token = FreshToken::generate().unwrap();
        let new = NewToken {
            sha256: token.sha256,
            token_id: token.token_id.clone(),
            user: UserId::parse("ann").unwrap(),
            role: Role::Writer,
            ttl,
        };
        ledger.add_token(new).await.unwrap();
        token
    };
    let (short, long) = (add(Some(Duration::from_secs(60))).await, add(None).await);
    let found = async |token: &FreshToken| ledger.find_token(token.sha256).await.unwrap();
    let known = found(&short).await.unwrap();
    assert_eq!(
        (known.token_id.as_str(), known.user.as_str()),
        (&*short.token_id, "ann")
    );
    assert_eq!(known.role, Role::Writer);
    assert!(ledger.find_token([0; 32]).await.unwrap().is_none());

    home.clock.advance(Duration::from_secs(60));
    assert!(found(&short).await.is_none());
    assert!(found(&long).await.is_some());
    home.change("UPDATE token SET revoked_at = 1 WHERE expires_at IS NULL")
        .await;
    assert!(found(&long).await.is_none());
}
