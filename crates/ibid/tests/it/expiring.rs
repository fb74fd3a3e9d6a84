//! What becomes of downloads that go on while their export expires, and of what the store says of
//! an artefact.

use std::time::Duration;

use futures::TryStreamExt as _;
use futures::stream::BoxStream;
use ibid::export::{LAST_DOWNLOADS, State};
use ibid::exporter::{Download, DownloadError, Exporter};
use ibid::ids::{JobId, UserId};
use ibid::janitor::Swept;
use ibid::link::KeyRing;
use ibid::vault::VaultError;

use crate::events::{join, say};
use crate::harness::{Installation, On, TERMS, on_both};
use crate::object_store::noise;
use crate::s3_server::S3Server;

on_both!(
    a_download_from_a_store_goes_on_after_its_export_has_expired,
    a_download_ends_when_its_expired_export_is_withdrawn_or_its_time_is_over,
);

/// An export of some MiB in a store, of which a download has begun just before it expires.
struct Begun {
    server: S3Server,
    home: Installation,
    exporter: Exporter,
    ring: KeyRing,
    job: JobId,
    whole: Vec<u8>,
    got: Vec<u8>,
    rest: BoxStream<'static, Result<bytes::Bytes, VaultError>>,
}

async fn begun(on: &On) -> Begun {
    let server = S3Server::start().await;
    let mut home = Installation::cutting(on, 0).await;
    home.exporter.vault = server.vault("a");
    let exporter = home.exporter.clone();
    let mut lines = vec![join("c", "ann")];
    lines.extend((0..250).map(|number| say("c", &noise(number * 100_000))));
    home.import(&lines).await;
    let job = home.export("ann", "all").await;
    home.work().await;
    let whole = home.file(job).await;
    // It is fetched by the MiB, and the next one ahead.
    assert!(whole.len() > 4 << 20, "{}", whole.len());
    let ring = KeyRing::generate(home.clock.now()).unwrap();
    let ring = KeyRing::parse(&ring).unwrap();
    home.clock
        .advance(TERMS.retention - Duration::from_micros(1));
    let download = ask(&exporter, &home, &ring, job).await.unwrap();
    let mut rest = exporter
        .read(&download, 0..whole.len() as u64)
        .await
        .unwrap();
    let got = rest.try_next().await.unwrap().unwrap().to_vec();
    home.clock.advance(Duration::from_micros(1));
    Begun {
        server,
        home,
        exporter,
        ring,
        job,
        whole,
        got,
        rest,
    }
}

async fn ask(
    exporter: &Exporter,
    home: &Installation,
    ring: &KeyRing,
    job: JobId,
) -> Result<Download, DownloadError> {
    let export = home.find(job).await.export;
    let (query, _) = exporter.link(ring, &export, home.clock.now());
    exporter.download(ring, job, &query).await
}

impl Begun {
    /// A download that begins now is refused.
    async fn is_expired(&self) {
        let refused = ask(&self.exporter, &self.home, &self.ring, self.job).await;
        assert!(
            matches!(refused, Err(DownloadError::Expired)),
            "{refused:?}"
        );
    }

    /// The rest of the download that has begun.
    async fn read_on(&mut self) -> Result<(), VaultError> {
        while let Some(chunk) = self.rest.try_next().await? {
            self.got.extend_from_slice(&chunk);
        }
        Ok(())
    }
}

async fn a_download_from_a_store_goes_on_after_its_export_has_expired(on: &On) {
    let mut begun = begun(on).await;
    begun.is_expired().await;
    begun
        .home
        .clock
        .advance(LAST_DOWNLOADS - Duration::from_micros(1));
    assert_eq!(
        begun.home.janitor().sweep_all().await.unwrap(),
        Swept::default()
    );
    begun.is_expired().await;
    begun.read_on().await.unwrap();
    assert!(begun.got == begun.whole);
    begun.home.clock.advance(Duration::from_micros(1));
    let swept = begun.home.janitor().sweep().await.unwrap();
    assert_eq!((swept.expired, swept.objects), (1, 1));
    assert_eq!(begun.server.objects("a"), ["ledger"]);
    begun.is_expired().await;
}

async fn a_download_ends_when_its_expired_export_is_withdrawn_or_its_time_is_over(on: &On) {
    for withdrawn in [true, false] {
        let mut begun = begun(on).await;
        if withdrawn {
            let ann = UserId::parse("ann").unwrap();
            let export = begun.exporter.withdraw(&ann, begun.job).await.unwrap();
            // It had expired, and that stands; but the bytes do not wait.
            assert_eq!(export.unwrap().state, State::Expired);
        } else {
            begun.home.clock.advance(LAST_DOWNLOADS);
            begun.home.janitor().sweep().await.unwrap();
        }
        assert_eq!(begun.server.objects("a"), [""; 0]);
        let ended = begun.read_on().await;
        assert!(ended.is_err(), "ended as if it were whole");
        assert!(begun.got.len() < begun.whole.len());
        assert!(begun.whole.starts_with(&begun.got));
        begun.is_expired().await;
    }
}
