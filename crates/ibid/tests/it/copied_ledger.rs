//! A ledger in PostgreSQL that was copied while the original lives on: the copy has the same
//! identity and is pointed at the same vault and the same log.

use std::sync::Arc;

use ibid::export::State;
use ibid::exporter::Exporter;
use ibid::ids::{JobId, UserId};
use ibid::janitor::SweepError;
use ibid::ledger::postgres::PostgresLedger;
use ibid::ledger::{CreateError, LedgerError};
use ibid::source::Source;
use ibid::source::postgres::PostgresSource;
use tokio_util::sync::CancellationToken;

use crate::events::chat;
use crate::harness::{
    Database, Installation, On, TERMS, UNTIL_IDLE, create, offer, on_postgres, until,
};

on_postgres! {
    a_copied_ledger_touches_nothing_of_the_original_until_it_is_adopted,
    a_copied_ledger_leaves_the_original_s_pins_in_a_log_that_both_read,
}

/// A job that is done and one that has recorded parts, and a copy of the ledger from before.
async fn copied(home: &Installation) -> (Database, JobId, JobId) {
    home.import(&chat(20)).await;
    let done = home.export("ann", "all").await;
    let copy = home.postgres().copy().await;
    // The connections of the pool are new ones now.
    until("the original answers again", async || {
        home.exporter.ledger.now().await.is_ok()
    })
    .await;
    home.work().await;
    let begun = home.export("ann", "all").await;
    let mut workshop = home.exporter.workshop(1, None);
    let (stop, recorded) = (CancellationToken::new(), CancellationToken::new());
    let told = recorded.clone();
    workshop.hold_after_parts = Some(2);
    let working = tokio::spawn({
        let stop = stop.clone();
        async move {
            tokio::select! {
                _ = crate::harness::work_until(workshop, UNTIL_IDLE, stop) => {}
                () = told.cancelled() => {}
            }
        }
    });
    // And the bytes of a third one are there, whole.
    until("two parts are recorded", async || {
        let kept = home.kept(begun);
        let whole = kept.last().is_some_and(|it| it.ends_with("/part-000002"));
        whole && home.parts(begun).await.len() == 2
    })
    .await;
    recorded.cancel();
    working.await.unwrap();
    (copy, done, begun)
}

/// The copy as its processes see it, with the original's vault, and the log that is given.
async fn exporter(
    home: &Installation,
    copy: &Database,
    elsewhere: Option<&Arc<dyn Source>>,
) -> Exporter {
    let pg = copy.connect().await;
    let ledger = Arc::new(PostgresLedger::new(pg.clone(), home.clock.clone()));
    let (vault, terms) = (home.exporter.vault.clone(), *home.exporter.terms());
    match elsewhere {
        None => Exporter::new(Arc::new(PostgresSource::new(pg)), ledger, vault, terms),
        Some(log) => Exporter::apart(Arc::clone(log), ledger, vault, terms),
    }
}

fn refuses<T: std::fmt::Debug>(answer: &Result<T, LedgerError>) {
    match answer {
        Err(LedgerError::Unusable(why)) => assert!(why.contains("ibid admin adopt"), "{why}"),
        other => panic!("{other:?}"),
    }
}

async fn refuses_to_sweep(copy: &Exporter) {
    let janitor = copy.janitor(TERMS.retention);
    for swept in [janitor.sweep().await, janitor.sweep_all().await] {
        match swept {
            Err(SweepError::Ledger(error)) => refuses::<()>(&Err(error)),
            other => panic!("{other:?}"),
        }
    }
}

async fn a_copied_ledger_touches_nothing_of_the_original_until_it_is_adopted(on: &On) {
    let home = Installation::cutting(on, 4).await;
    let (copied, done, begun) = copied(&home).await;
    let (file, parts) = (home.kept(done), home.kept(begun));
    assert_eq!((file.len(), parts.len()), (1, 3));
    let copy = exporter(&home, &copied, None).await;
    let copy = &copy;

    // There the job is still to be made, and the other one is not known.
    let there = copy.ledger.find(done).await.unwrap().unwrap();
    assert_eq!(there.export.state, State::Queued);
    refuses(&copy.ledger.claim(offer(0)).await);
    let worker = ibid::worker::Worker::new(
        copy.workshop(1, None),
        UNTIL_IDLE,
        Arc::default(),
        |report| panic!("{report:?}"),
    );
    refuses(&worker.run(&CancellationToken::new()).await);
    refuses_to_sweep(copy).await;
    // Its own rows are its own. What they named is not.
    let ann = UserId::parse("ann").unwrap();
    let withdrawn = copy.withdraw(&ann, done).await.unwrap().unwrap();
    assert_eq!(withdrawn.state, State::Revoked);
    home.clock.advance(TERMS.retention / 2);
    refuses_to_sweep(copy).await;
    assert_eq!((home.kept(done), home.kept(begun)), (file, parts));
    home.work().await;
    let (one, other) = (home.file(done).await, home.file(begun).await);
    assert!(one == other);

    // Adopted, it is the ledger whose vault this is, as after a move to another server.
    let identity = home.exporter.ledger.identity().await.unwrap();
    copied.connect().await.adopt().await.unwrap();
    assert_eq!(copy.ledger.identity().await.unwrap(), identity);
    let janitor = copy.janitor(TERMS.retention * 100);
    janitor.sweep_all().await.unwrap();
    assert_eq!(home.kept(done), [""; 0]);
    create(copy, "ann", "all", "new").await.unwrap();
    assert!(copy.ledger.claim(offer(0)).await.unwrap().is_some());
}

async fn a_copied_ledger_leaves_the_original_s_pins_in_a_log_that_both_read(on: &On) {
    let home = Installation::apart(on, &On::Sqlite).await;
    home.import(&chat(20)).await;
    let job = home.export("ann", "all").await;
    let copied = home.postgres().copy().await;
    let copy = exporter(&home, &copied, Some(&home.exporter.source)).await;
    let ann = UserId::parse("ann").unwrap();
    match create(&copy, "ann", "all", "new").await {
        Err(CreateError::Ledger(error)) => refuses::<()>(&Err(error)),
        other => panic!("{other:?}"),
    }
    copy.withdraw(&ann, job).await.unwrap().unwrap();
    home.clock.advance(TERMS.retention);
    refuses_to_sweep(&copy).await;

    until("the original answers again", async || {
        home.exporter.ledger.now().await.is_ok()
    })
    .await;
    home.work().await;
    assert_eq!(home.state(job).await, State::Done);
}
