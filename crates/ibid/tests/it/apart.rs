//! Log and ledger in different databases: every pair of SQLite and PostgreSQL.

use std::sync::Arc;

use ibid::export::{LAST_DOWNLOADS, State};
use ibid::exporter::Exporter;
use ibid::ids::{JobId, UserId};
use ibid::ledger::{CreateError, Created, LedgerError};
use ibid::source::postgres::PostgresSource;
use tokio::sync::Notify;

use crate::events::{chat, join, leave, say};
use crate::harness::{Installation, On, TERMS, UNTIL_IDLE, create, gunzip, work};
use crate::interruptions::{InterruptedLedger, InterruptedSource, Step, Then};
use crate::pg_server::PgServer;

/// Makes a test of each function on every pair, ledger first.
macro_rules! on_every_pair {
    ($($name:ident),* $(,)?) => {
        mod sqlite_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(&super::On::Sqlite, &super::On::Sqlite).await;
                }
            )*
        }
        on_every_pair!(mixed $($name),*);
    };
    (mixed $($name:ident),*) => {
        mod sqlite_postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    if let Some(postgres) = super::postgres(stringify!($name)) {
                        super::$name(&super::On::Sqlite, &postgres).await;
                    }
                }
            )*
        }
        mod postgres_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    if let Some(postgres) = super::postgres(stringify!($name)) {
                        super::$name(&postgres, &super::On::Sqlite).await;
                    }
                }
            )*
        }
        mod postgres_postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    if let Some(postgres) = super::postgres(stringify!($name)) {
                        super::$name(&postgres, &postgres).await;
                    }
                }
            )*
        }
    };
}

fn postgres(test: &str) -> Option<On> {
    PgServer::start(test).map(|server| On::Postgres(Arc::new(server)))
}

on_every_pair!(
    the_file_is_the_one_that_a_single_database_gives,
    of_many_requests_with_one_key_one_makes_a_job_and_one_pin_stays,
    a_refused_request_leaves_no_pin,
    a_job_whose_creation_was_not_answered_is_found_again_and_made,
    a_lost_pin_fails_the_job_at_its_claim,
    a_pin_is_swept_by_its_own_ledger_only,
    a_log_that_does_not_answer_is_not_ready,
    a_pin_that_is_lost_while_the_job_is_made_fails_it_before_it_is_done,
    a_pin_is_kept_while_the_job_can_be_retried_and_released_when_it_is_over,
);

async fn pins(home: &Installation) -> u64 {
    // Every row is changed and stays as it was.
    home.change_log("UPDATE pin SET pinned_at = pinned_at")
        .await
}

/// Ann sees three messages of five.
fn some_chat() -> Vec<String> {
    vec![
        say("c", "before"),
        join("c", "ann"),
        say("c", "one"),
        say("c", "two"),
        say("c", "three"),
        leave("c", "ann"),
        say("c", "after"),
    ]
}

async fn the_file_is_the_one_that_a_single_database_gives(ledger: &On, log: &On) {
    let (apart, together) = (Installation::apart(ledger, log).await, Installation::new());
    let mut files = Vec::new();
    for home in [&apart, &together] {
        home.import(&some_chat()).await;
        home.import(&chat(300)).await;
        let job = home.export("ann", "all").await;
        home.import(&[say("c", "later")]).await;
        home.work().await;
        files.push(home.file(job).await);
    }
    assert!(files[0] == files[1]);
    assert_eq!(
        gunzip(&files[0]).iter().filter(|b| **b == b'\n').count(),
        303
    );
}

async fn of_many_requests_with_one_key_one_makes_a_job_and_one_pin_stays(ledger: &On, log: &On) {
    let home = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let requests = (0..32).map(|_| home.create("ann", "all", "key"));
    let mut new = 0;
    let mut jobs = Vec::new();
    for answer in futures::future::join_all(requests).await {
        match answer.unwrap() {
            Created::New(export) => {
                new += 1;
                jobs.push(export.job_id);
            }
            Created::Replayed(export) => jobs.push(export.job_id),
        }
    }
    jobs.dedup();
    assert_eq!((new, jobs.len()), (1, 1));
    assert_eq!(pins(&home).await, 1);
}

async fn a_refused_request_leaves_no_pin(ledger: &On, log: &On) {
    let home = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let unknown = home.create("ann", "conv:d", "other").await;
    assert!(matches!(unknown, Err(CreateError::ScopeInvalid)));
    assert_eq!(pins(&home).await, 0);
    home.create("ann", "all", "key").await.unwrap();
    // The first look finds that the key was used; where another took it since, the second does.
    let reused = home.create("ann", "conv:c", "key").await;
    assert!(matches!(reused, Err(CreateError::KeyReused)));
    let both = futures::future::join(
        home.create("ann", "conv:c", "two"),
        home.create("ann", "all", "two"),
    );
    let (one, other) = both.await;
    assert!(one.is_ok() != other.is_ok());
    assert_eq!(pins(&home).await, 2);
}

async fn a_job_whose_creation_was_not_answered_is_found_again_and_made(ledger: &On, log: &On) {
    let home = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let mut unlucky = home.exporter.clone();
    unlucky.ledger = InterruptedLedger::at(&home.exporter.ledger, |step| match step {
        Step::Created => Then::Fail,
        _ => Then::Answer,
    });
    let lost = create(&unlucky, "ann", "all", "key").await;
    assert!(
        matches!(lost, Err(CreateError::Ledger(LedgerError::Unavailable(_)))),
        "{lost:?}"
    );
    home.import(&[join("c", "ann"), say("c", "later")]).await;
    let Created::Replayed(export) = home.create("ann", "all", "key").await.unwrap() else {
        panic!("it was made twice");
    };
    home.work().await;
    let lines = String::from_utf8(home.lines(export.job_id).await).unwrap();
    assert_eq!(lines.lines().count(), 3, "{lines}");
    assert_eq!(pins(&home).await, 1);
}

async fn a_log_that_does_not_answer_is_not_ready(ledger: &On, log: &On) {
    let home = Installation::apart(ledger, log).await;
    home.exporter.ready().await.unwrap();
    home.change_log("ALTER TABLE pin RENAME TO gone").await;
    let why = home.exporter.ready().await.unwrap_err();
    assert!(why.starts_with("the log: "), "{why}");
}

async fn a_pin_is_swept_by_its_own_ledger_only(ledger: &On, log: &On) {
    let home = Installation::apart(ledger, log).await;
    let other = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let job = home.export("ann", "all").await;
    // Nobody heard whether this one was created, and it was not.
    let nobodys = JobId::random().unwrap();
    home.change_log(&format!(
        "UPDATE pin SET job_id = '{nobodys}' WHERE job_id = '{}'",
        home.export("ann", "all").await
    ))
    .await;
    home.change_log("UPDATE pin SET pinned_at = 0").await;
    let mut stranger = other.janitor();
    stranger.source = Arc::clone(&home.exporter.source);
    assert_eq!(stranger.sweep_all().await.unwrap().pins, 0);
    assert_eq!(home.janitor().sweep_all().await.unwrap().pins, 1);
    assert_eq!(pins(&home).await, 1);
    home.work().await;
    assert_eq!(home.state(job).await, State::Done);
}

async fn a_lost_pin_fails_the_job_at_its_claim(ledger: &On, log: &On) {
    let home = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let job = home.export("ann", "all").await;
    let kept = home.export("ann", "conv:c").await;
    let lost = home
        .change_log(&format!("DELETE FROM pin WHERE job_id = '{job}'"))
        .await;
    assert_eq!(lost, 1);
    home.work().await;
    assert_eq!(home.failure(job).await, "source-lost-history");
    assert_eq!(home.state(kept).await, State::Done);
    assert_eq!(home.parts(job).await, []);
}

async fn a_pin_that_is_lost_while_the_job_is_made_fails_it_before_it_is_done(
    ledger: &On,
    log: &On,
) {
    let home = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let job = home.export("ann", "all").await;
    let (reached, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let mut workshop = home.exporter.workshop(1, None);
    let (tell, wait) = (Arc::clone(&reached), Arc::clone(&go_on));
    let source = InterruptedSource::at_page(&home.exporter.source, move |_| {
        tell.notify_one();
        Then::Wait(Arc::clone(&wait))
    });
    workshop.source = Arc::new(source);
    let working = tokio::spawn(work(workshop, UNTIL_IDLE));
    reached.notified().await;
    assert_eq!(home.change_log("DELETE FROM pin").await, 1);
    go_on.notify_one();
    working.await.unwrap();
    assert_eq!(home.failure(job).await, "source-lost-history");
}

async fn a_pin_is_kept_while_the_job_can_be_retried_and_released_when_it_is_over(
    ledger: &On,
    log: &On,
) {
    let home = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let job = home.export("ann", "all").await;
    let mut workshop = home.exporter.workshop(1, None);
    let source = InterruptedSource::at_page(&home.exporter.source, |_| Then::GoneBad);
    workshop.source = Arc::new(source);
    work(workshop, UNTIL_IDLE).await;
    assert_eq!(home.failure(job).await, "log-changed");
    assert_eq!(pins(&home).await, 1);
    home.exporter.retry(job).await.unwrap();
    home.work().await;
    // Kept, since the bytes may be lost.
    assert_eq!(home.state(job).await, State::Done);
    assert_eq!(pins(&home).await, 1);

    let other = home.export("ann", "all").await;
    assert_eq!(pins(&home).await, 2);
    home.exporter.revoke(other, "no".to_owned()).await.unwrap();
    assert_eq!(pins(&home).await, 1);
    // One that can be restored keeps it, too.
    home.exporter.revoke(job, "no".to_owned()).await.unwrap();
    assert_eq!(pins(&home).await, 1);
    let ann = UserId::parse("ann").unwrap();
    home.exporter.withdraw(&ann, job).await.unwrap();
    assert_eq!(pins(&home).await, 0);

    let third = home.export("ann", "all").await;
    home.work().await;
    home.clock.advance(TERMS.retention + LAST_DOWNLOADS);
    home.janitor().sweep().await.unwrap();
    assert_eq!(home.state(third).await, State::Expired);
    assert_eq!(pins(&home).await, 0);
}

/// The log's database is lost and put back from a backup; the ledger is not.
async fn restored_log(ledger: &On, log: &On) {
    let home = Installation::apart(ledger, log).await;
    home.import(&some_chat()).await;
    let before = home.export("ann", "all").await;
    let backup = home.log_database().copy().await;
    home.import(&[join("c", "ann"), say("c", "lost")]).await;
    let after = home.export("ann", "all").await;

    let mut restored: Exporter = home.exporter.clone();
    let pg = backup.connect().await;
    restored.source = Arc::new(PostgresSource::new(pg.clone()));
    let refused = create(&restored, "ann", "all", "new").await;
    assert!(
        matches!(refused, Err(CreateError::Ledger(LedgerError::Unusable(_)))),
        "{refused:?}"
    );
    pg.adopt().await.unwrap();
    let import = |lines: Vec<String>| {
        let source = Arc::clone(&restored.source);
        async move {
            let text = lines.join("\n");
            crate::harness::import_into(source.as_ref(), text.as_bytes(), false)
                .await
                .0
                .unwrap()
        }
    };
    // Written after the restoration, with numbers that no snapshot from before has looked at.
    import(vec![
        say("c", "second life"),
        join("c", "ann"),
        say("c", "seen"),
    ])
    .await;
    work(restored.workshop(2, None), UNTIL_IDLE).await;
    assert_eq!(bodies(&home, before).await, ["one", "two", "three"]);
    assert_eq!(home.failure(after).await, "source-lost-history");
    let new = match create(&restored, "ann", "all", "new").await {
        Ok(Created::New(export)) => export.job_id,
        other => panic!("{other:?}"),
    };
    work(restored.workshop(2, None), UNTIL_IDLE).await;
    assert_eq!(bodies(&home, new).await, ["one", "two", "three", "seen"]);
}

async fn bodies(home: &Installation, job: JobId) -> Vec<String> {
    let lines = String::from_utf8(home.lines(job).await).unwrap();
    let body = |line| serde_json::from_str::<serde_json::Value>(line).unwrap()["body"].take();
    let bodies = lines.lines().map(body);
    bodies
        .map(|body| body.as_str().unwrap().to_owned())
        .collect()
}

mod restored {
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_log_from_a_backup_makes_what_it_knows_of_and_says_what_it_lost() {
        if let Some(postgres) = super::postgres("restored_log") {
            super::restored_log(&super::On::Sqlite, &postgres).await;
            super::restored_log(&postgres, &postgres).await;
        }
    }
}
