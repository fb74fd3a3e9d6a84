//! An artefact that a store joins from its pieces: however long that takes and however it is
//! answered, it is sent once, and it is there whole or the job says why it waits.

use std::time::Duration;

use ibid::export::State;
use sha2::{Digest as _, Sha256};

use crate::events::{join, say};
use crate::harness::Installation;
use crate::s3_server::{Join, S3Server};

/// An installation over the store, whose artefact is sent in two pieces.
async fn over(server: &S3Server) -> Installation {
    let mut home = Installation::new();
    home.exporter.vault = server.vault("joins");
    let mut lines = vec![join("c", "ann")];
    for message in 0..600_u64 {
        let digests = (0..500_u64).map(|at| {
            let number = message * 1000 + at;
            hex::encode(Sha256::digest(number.to_be_bytes()))
        });
        lines.push(say("c", &digests.collect::<String>()));
    }
    home.import(&lines).await;
    home
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_takes_long_to_join_is_waited_for() {
    let server = S3Server::start().await;
    let home = over(&server).await;
    let mut sha256 = None;
    for how in [Join::Plain, Join::Long, Join::Silent, Join::Unanswered] {
        server.faults().set_joins(how);
        let job = home.export("ann", "all").await;
        home.work().await;
        let export = home.find(job).await.export;
        assert_eq!(export.state, State::Done, "{how:?}: {:?}", export.waiting);
        assert_eq!(export.attempts, 1, "{how:?}");
        let artefact = export.artefact.unwrap();
        assert!(artefact.bytes > 8 << 20);
        assert_eq!(artefact.sha256, *sha256.get_or_insert(artefact.sha256));
        assert_eq!(Sha256::digest(home.file(job).await)[..], artefact.sha256);
        assert_eq!(server.unfinished(), 0, "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_behind_the_status_200_is_an_error() {
    let server = S3Server::start().await;
    let home = over(&server).await;
    for name in ["InternalError", "AccessDenied"] {
        server.faults().set_joins(Join::Fails(name));
        let job = home.export("ann", "all").await;
        home.work().await;
        let export = home.find(job).await.export;
        let waiting = export.waiting.expect(name);
        assert_eq!(waiting.problem.kind, "storage-unavailable");
        assert_eq!((export.state, export.strikes), (State::Queued, 0));
        assert_eq!(server.unfinished(), 0, "the upload is given up");
        server.faults().set_joins(Join::Plain);
        home.clock.advance(Duration::from_secs(60));
        home.work().await;
        let sha256 = home.artefact(job).await.sha256;
        assert_eq!(Sha256::digest(home.file(job).await)[..], sha256);
    }
}
