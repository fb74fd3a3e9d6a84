//! One user's ten thousand jobs, and one job of another.

use std::time::Duration;

use ibid::export::Event;
use ibid::ids::JobId;
use ibid::ledger::Ledger;

use crate::events::{chat, join};
use crate::harness::{Installation, On, offer, on_both, until};
use crate::pg_server::PgServer;

on_both! {
    one_user_s_ten_thousand_jobs_are_in_nobody_s_way_and_the_cap_holds,
}

/// So many jobs of ann, the first of which is the oldest.
async fn with_queue(on: &On, count: i64) -> (Installation, JobId, Vec<JobId>) {
    let home = Installation::on(on).await;
    home.import(&chat(2)).await;
    home.import(&[join("c", "eve")]).await;
    let first = home.export("ann", "all").await;
    let more = home.queue_more(first, count - 1).await;
    (home, first, more)
}

async fn one_user_s_ten_thousand_jobs_are_in_nobody_s_way_and_the_cap_holds(on: &On) {
    let (home, first, more) = with_queue(on, 10_000).await;
    let ledger = &home.exporter.ledger;
    let claim = async || {
        home.clock.advance(Duration::from_millis(1));
        ledger.claim(offer(2)).await.unwrap()
    };
    let held = claim().await.unwrap();
    assert_eq!(held.export.job_id, first);
    let eves = home.export("eve", "all").await;
    assert_eq!(claim().await.unwrap().export.job_id, eves);
    // Hers are all running; his go on in their order, and no more of them than may run.
    assert_eq!(claim().await.unwrap().export.job_id, more[0]);
    assert!(claim().await.is_none());
    let eves = home.export("eve", "all").await;
    assert_eq!(claim().await.unwrap().export.job_id, eves);
    assert!(claim().await.is_none());
    ledger
        .settle(first, held.id, Event::GivenBack)
        .await
        .unwrap();
    assert_eq!(claim().await.unwrap().export.job_id, first);
    assert!(claim().await.is_none());
}

/// How many jobs are claimed where it is counted what that takes.
const CLAIMS: u64 = 20;

async fn claim_some(home: &Installation, ledger: &dyn Ledger) {
    let mut times = Vec::new();
    for _ in 0..CLAIMS {
        home.clock.advance(Duration::from_millis(1));
        let started = tokio::time::Instant::now();
        ledger.claim(offer(0)).await.unwrap().unwrap();
        times.push(started.elapsed());
    }
    times.sort();
    eprintln!(
        "half of the claims took less than {:?}",
        times[times.len() / 2]
    );
}

/// What the planner knows of the jobs: an automatic ANALYZE comes some time after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    OfFewJobs,
    All,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_takes_no_more_rows_and_few_more_pages_when_one_user_has_ten_thousand_jobs() {
    let name = "a_claim_takes_no_more_rows_and_few_more_pages_when_one_user_has_ten_thousand_jobs";
    let Some(server) = PgServer::start(name) else {
        return;
    };
    let on = &On::Postgres(server.into());
    for known in [Known::Nothing, Known::OfFewJobs, Known::All] {
        let (mut rows, mut pages) = (Vec::new(), Vec::new());
        for (count, over) in [(25, 0), (10_000, 0), (10_000, 10_000)] {
            let (home, first, _) = with_queue(on, 25).await;
            let client = home.postgres().client().await;
            // What that reads is not to be counted, so it is not left to the server.
            let alone = "ALTER TABLE ibid.export SET (autovacuum_enabled = off)";
            client.batch_execute(alone).await.unwrap();
            let analyze = "VACUUM ANALYZE";
            if known == Known::OfFewJobs {
                client.batch_execute(analyze).await.unwrap();
            }
            home.queue_more(first, count - 25).await;
            let jobs = home.queue_more(first, over).await;
            end_long_ago(&home, &jobs).await;
            if known == Known::All {
                client.batch_execute(analyze).await.unwrap();
            }
            let flush = "SELECT pg_stat_force_next_flush()";
            client.query_typed_one(flush, &[]).await.unwrap();
            let counted = async || {
                let sum = "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint,
                                  sum(n_tup_upd)::bigint,
                                  (SELECT sum(heap_blks_read + heap_blks_hit
                                              + coalesce(idx_blks_read + idx_blks_hit, 0))::bigint
                                   FROM pg_statio_user_tables WHERE schemaname = 'ibid')
                           FROM pg_stat_user_tables WHERE schemaname = 'ibid'";
                let row = client.query_typed_one(sum, &[]).await.unwrap();
                [0, 1, 2].map(|at| row.get::<_, i64>(at))
            };
            let before = settled(&counted).await;
            let another = home.another_exporter().await;
            claim_some(&home, another.ledger.as_ref()).await;
            // A connection tells what it has done when it ends, at the latest.
            drop(another);
            until("the claims are counted", async || {
                counted().await[1] >= before[1] + 2 * CLAIMS as i64
            })
            .await;
            let after = settled(&counted).await;
            rows.push((after[0] - before[0]) / CLAIMS as i64);
            pages.push((after[2] - before[2]) / CLAIMS as i64);
        }
        eprintln!("{known:?}: {rows:?} rows and {pages:?} pages a claim");
        for more in 1..=2 {
            assert!(rows[more] <= rows[0] + 10, "{known:?}: {rows:?}");
            assert!(pages[more] <= 3 * pages[0], "{known:?}: {pages:?}");
        }
    }
}

/// Makes old ones of another user of these jobs, which are over.
async fn end_long_ago(home: &Installation, jobs: &[JobId]) {
    if jobs.is_empty() {
        return;
    }
    let jobs: Vec<String> = jobs.iter().map(|job| format!("'{job}'")).collect();
    home.change_all(&format!(
        "UPDATE export SET state = 'expired', user_id = 'bob', purging = true, purged = true,
                created_at = created_at - 1000000000
         WHERE job_id IN ({})",
        jobs.join(", ")
    ))
    .await;
}

/// What is counted once nobody has anything to add: connections report some time after their work.
async fn settled(counted: &impl AsyncFn() -> [i64; 3]) -> [i64; 3] {
    let mut last = counted().await;
    let mut same = 0;
    while same < 20 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let next = counted().await;
        same = if next == last { same + 1 } else { 0 };
        last = next;
    }
    last
}
