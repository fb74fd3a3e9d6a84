//! Asking for an export: keys, limits, scopes.

use std::collections::HashSet;
use std::time::Duration;

use ibid::event::Event;
use ibid::export::State;
use ibid::ids::JobId;
use ibid::ledger::{CreateError, Created, Cursor, Filter};
use ibid::limits::{LimitReached, Limits};
use ibid::source::{Batch, Progress};

use crate::events::{chat, join, leave, policy, say};
use crate::harness::{Installation, NO_LIMITS, On, TERMS, create, on_both};

on_both! {
    the_same_request_is_replayed_whatever_state_its_job_is_in,
    a_key_with_another_request_is_refused_and_the_job_stays_as_it_is,
    two_users_with_the_same_key_have_two_jobs,
    of_64_concurrent_requests_with_one_key_one_creates_the_job_and_all_get_it,
    of_64_concurrent_requests_with_one_key_and_other_bodies_all_but_one_are_refused,
    of_32_concurrent_requests_under_a_limit_of_three_exactly_three_are_taken,
    a_replay_counts_for_no_limit_and_a_refused_request_uses_up_no_key,
    the_daily_limit_says_when_it_ends_and_ends_then,
    one_who_could_once_see_a_conversation_may_ask_for_it_though_nothing_is_left,
    nothing_is_created_while_a_first_load_is_not_finished,
    a_first_load_lasts_until_it_is_finished_or_given_up,
    a_users_jobs_are_listed_newest_first_a_page_at_a_time,
    jobs_are_found_by_their_user_and_by_the_state_that_they_are_in_now,
}

/// The job that was created or found, and whether it was created.
fn job(created: Result<Created, CreateError>) -> (JobId, bool) {
    match created {
        Ok(Created::New(export)) => (export.job_id, true),
        Ok(Created::Replayed(export)) => (export.job_id, false),
        Err(error) => panic!("{error}"),
    }
}

async fn with_chat(on: &On, limits: Limits) -> Installation {
    let home = Installation::with(on, 0, limits).await;
    home.import(&chat(10)).await;
    home.import(&[join("c", "eve"), say("c", "eleven")]).await;
    home
}

async fn the_same_request_is_replayed_whatever_state_its_job_is_in(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    let (first, new) = job(home.create("ann", "all", "key").await);
    assert!(new);
    assert_eq!(job(home.create("ann", "all", "key").await), (first, false));
    // The other spelling of the same key.
    assert_eq!(
        job(home.create("ann", "all", "\"key\"").await),
        (first, false)
    );
    home.work().await;
    home.import(&[say("c", "later")]).await;
    for expected in [State::Done, State::Revoked] {
        match home.create("ann", "all", "key").await {
            Ok(Created::Replayed(export)) => {
                assert_eq!((export.job_id, export.state), (first, expected));
            }
            other => panic!("{other:?}"),
        }
        home.exporter
            .revoke(first, "test".to_owned())
            .await
            .unwrap();
    }
    assert_ne!(job(home.create("ann", "all", "KEY").await).0, first);
}

async fn a_key_with_another_request_is_refused_and_the_job_stays_as_it_is(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    let (first, _) = job(home.create("ann", "all", "key").await);
    // Refused before it is looked at whether the conversation can be seen.
    for scope in ["conv:c", "conv:nowhere"] {
        let refused = home.create("ann", scope, "key").await;
        assert!(
            matches!(refused, Err(CreateError::KeyReused)),
            "{refused:?}"
        );
    }
    assert_eq!(job(home.create("ann", "all", "key").await), (first, false));
}

async fn two_users_with_the_same_key_have_two_jobs(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    let (anns, _) = job(home.create("ann", "all", "key").await);
    let (eves, new) = job(home.create("eve", "conv:c", "key").await);
    assert!(new);
    assert_ne!(anns, eves);
    let ann = ibid::ids::UserId::parse("ann").unwrap();
    assert!(home.exporter.find(&ann, anns).await.unwrap().is_some());
    assert!(home.exporter.find(&ann, eves).await.unwrap().is_none());
}

/// Lets so many requests, made by `request` from their number, come at once from three processes.
async fn at_once<F>(
    home: &Installation,
    count: usize,
    request: impl Fn(usize) -> (String, String),
    judge: F,
) where
    F: FnOnce(Vec<Result<Created, CreateError>>),
{
    let mut exporters = Vec::new();
    for _ in 0..3 {
        exporters.push(home.another_exporter().await);
    }
    let requests = (0..count).map(|number| {
        let exporter = exporters[number % exporters.len()].clone();
        let (scope, key) = request(number);
        tokio::spawn(async move { create(&exporter, "ann", &scope, &key).await })
    });
    let requests: Vec<_> = requests.collect();
    let answers = futures::future::join_all(requests).await;
    judge(answers.into_iter().map(Result::unwrap).collect());
}

async fn of_64_concurrent_requests_with_one_key_one_creates_the_job_and_all_get_it(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    let same = |_| ("all".to_owned(), "key".to_owned());
    at_once(&home, 64, same, |answers| {
        let jobs: Vec<_> = answers.into_iter().map(job).collect();
        assert_eq!(jobs.iter().filter(|(_, new)| *new).count(), 1);
        let ids: HashSet<JobId> = jobs.into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids.len(), 1);
    })
    .await;
}

async fn of_64_concurrent_requests_with_one_key_and_other_bodies_all_but_one_are_refused(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    let convs: Vec<String> = (0..64)
        .map(|number| join(&format!("c{number}"), "ann"))
        .collect();
    home.import(&convs).await;
    let other = |number| (format!("conv:c{number}"), "key".to_owned());
    at_once(&home, 64, other, |answers| {
        let new = answers
            .iter()
            .filter(|answer| matches!(answer, Ok(Created::New(_))));
        assert_eq!(new.count(), 1);
        let reused = answers
            .iter()
            .filter(|it| matches!(it, Err(CreateError::KeyReused)));
        assert_eq!(reused.count(), 63);
    })
    .await;
}

async fn of_32_concurrent_requests_under_a_limit_of_three_exactly_three_are_taken(on: &On) {
    let limits = Limits {
        unfinished_per_user: 3,
        ..NO_LIMITS
    };
    let home = with_chat(on, limits).await;
    let other_key = |number| ("all".to_owned(), format!("key-{number}"));
    at_once(&home, 32, other_key, |answers| {
        let new = answers
            .iter()
            .filter(|answer| matches!(answer, Ok(Created::New(_))));
        assert_eq!(new.count(), 3);
        let refused = answers.iter().filter(|answer| {
            let limit = LimitReached::Unfinished {
                limit: 3,
                retry_after: Duration::from_secs(10),
            };
            matches!(answer, Err(CreateError::Limit(reached)) if *reached == limit)
        });
        assert_eq!(refused.count(), 29);
    })
    .await;
    // The limit is each user's own, and ends with the jobs that reached it.
    job(home.create("eve", "all", "key").await);
    home.work().await;
    job(home.create("ann", "all", "afterwards").await);
}

async fn a_replay_counts_for_no_limit_and_a_refused_request_uses_up_no_key(on: &On) {
    let limits = Limits {
        unfinished_per_user: 1,
        ..NO_LIMITS
    };
    let home = with_chat(on, limits).await;
    let (first, _) = job(home.create("ann", "all", "one").await);
    assert_eq!(job(home.create("ann", "all", "one").await), (first, false));
    let refused = home.create("ann", "all", "two").await;
    assert!(matches!(refused, Err(CreateError::Limit(_))), "{refused:?}");
    home.work().await;
    // Neither key is bound to what was refused under it.
    let refused = home.create("ann", "conv:nowhere", "three").await;
    assert!(
        matches!(refused, Err(CreateError::ScopeInvalid)),
        "{refused:?}"
    );
    assert!(job(home.create("ann", "conv:c", "two").await).1);
    home.work().await;
    assert!(job(home.create("ann", "all", "three").await).1);
}

async fn the_daily_limit_says_when_it_ends_and_ends_then(on: &On) {
    let limits = Limits {
        exports_per_user_per_day: 2,
        ..NO_LIMITS
    };
    let home = with_chat(on, limits).await;
    let day = Duration::from_secs(86_400);
    let start = home.clock.now();
    job(home.create("ann", "all", "one").await);
    home.clock.advance(Duration::from_secs(3_600));
    job(home.create("ann", "all", "two").await);
    home.work().await;
    home.clock.advance(Duration::from_secs(60));

    let refused = |until, retry_after| LimitReached::PerDay {
        limit: 2,
        until,
        retry_after,
    };
    match home.create("ann", "all", "three").await {
        Err(CreateError::Limit(reached)) => {
            let left = day - Duration::from_secs(3_660);
            assert_eq!(reached, refused(start.plus(day), left));
        }
        other => panic!("{other:?}"),
    }
    home.clock
        .advance(day - Duration::from_secs(3_660) - Duration::from_micros(1));
    let still = home.create("ann", "all", "three").await;
    assert!(matches!(still, Err(CreateError::Limit(_))), "{still:?}");
    home.clock.advance(Duration::from_micros(1));
    assert!(job(home.create("ann", "all", "three").await).1);
    // The second of the two is what keeps the user at the limit now.
    match home.create("ann", "all", "four").await {
        Err(CreateError::Limit(reached)) => {
            let until = start.plus(day).plus(Duration::from_secs(3_600));
            assert_eq!(reached, refused(until, Duration::from_secs(3_600)));
        }
        other => panic!("{other:?}"),
    }
    // Others have their own day, and a replay still answers.
    job(home.create("eve", "all", "one").await);
    assert!(!job(home.create("ann", "all", "one").await).1);
}

async fn one_who_could_once_see_a_conversation_may_ask_for_it_though_nothing_is_left(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    home.import(&[policy("c", "joined", "none"), leave("c", "eve")])
        .await;
    assert_eq!(home.export_now("eve", "conv:c").await, b"");
    let refused = home.create("zoe", "conv:c", "key").await;
    assert!(
        matches!(refused, Err(CreateError::ScopeInvalid)),
        "{refused:?}"
    );
    // Asking for everything is right for everybody, also for whom there is nothing.
    assert_eq!(home.export_now("zoe", "all").await, b"");
}

async fn nothing_is_created_while_a_first_load_is_not_finished(on: &On) {
    let home = Installation::on(on).await;
    let line = |finished| {
        let event = |line: String| Event::parse(line.as_bytes()).unwrap();
        Batch {
            events: vec![(1, event(join("c", "ann"))), (2, event(say("c", "hi")))],
            skip_invalid: false,
            import: Some(Progress {
                digest: [1; 32],
                after_line: if finished { 2 } else { 0 },
                lines: 2,
                finished,
                again: false,
            }),
        }
    };
    let source = &home.exporter.source;
    source.append(line(false)).await.unwrap();
    let refused = home.create("ann", "all", "key").await;
    assert!(
        matches!(refused, Err(CreateError::SourceLoading)),
        "{refused:?}"
    );
    source.append(line(true)).await.unwrap();
    let (first, new) = job(home.create("ann", "all", "key").await);
    assert!(new, "the refusal used up the key");

    // Another file, begun on a log that has something in it, bars nobody.
    let mut later = line(false);
    later.import = later.import.map(|progress| Progress {
        digest: [2; 32],
        ..progress
    });
    source.append(later).await.unwrap();
    assert!(job(home.create("ann", "all", "another").await).1);
    assert_eq!(job(home.create("ann", "all", "key").await), (first, false));
}

async fn a_first_load_lasts_until_it_is_finished_or_given_up(on: &On) {
    let home = Installation::on(on).await;
    // That somebody's account was disabled before makes the log no less empty.
    let eve = ibid::ids::UserId::parse("eve").unwrap();
    home.exporter.source.set_account(&eve, false).await.unwrap();
    let begun = Batch {
        events: vec![(1, Event::parse(join("c", "ann").as_bytes()).unwrap())],
        skip_invalid: false,
        import: Some(Progress {
            digest: [1; 32],
            after_line: 0,
            lines: 1,
            finished: false,
            again: false,
        }),
    };
    home.exporter.source.append(begun).await.unwrap();
    let refused = async || {
        let refused = home.create("ann", "all", "key").await;
        assert!(
            matches!(refused, Err(CreateError::SourceLoading)),
            "{refused:?}"
        );
    };
    refused().await;
    // Another file that was imported whole does not make this one whole.
    home.import(&chat(3)).await;
    refused().await;
    home.exporter.source.end_load().await.unwrap();
    assert!(job(home.create("ann", "all", "key").await).1);
}

async fn a_users_jobs_are_listed_newest_first_a_page_at_a_time(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    let mut jobs = Vec::new();
    for number in 0..7 {
        // Three of them in the same microsecond.
        if number > 3 {
            home.clock.advance(Duration::from_secs(1));
        }
        jobs.push(home.export("ann", "all").await);
        home.export("eve", "all").await;
    }
    let ann = ibid::ids::UserId::parse("ann").unwrap();
    let (mut before, mut listed) = (None, Vec::new());
    loop {
        let page = home.exporter.list(&ann, before, 2).await.unwrap();
        let Some(last) = page.last() else { break };
        assert!(page.len() <= 2);
        before = Some(Cursor {
            created_at: last.export.created_at,
            job_id: last.export.job_id,
        });
        listed.extend(page.into_iter().map(|found| found.export));
        assert!(listed.len() <= jobs.len(), "some stand twice");
    }
    let place = |at: usize| (listed[at].created_at, listed[at].job_id.to_string());
    assert!((1..listed.len()).all(|at| place(at - 1) > place(at)));
    let ids = |ids: &mut dyn Iterator<Item = JobId>| ids.collect::<HashSet<_>>();
    assert_eq!(listed.len(), 7);
    let listed = ids(&mut listed.iter().map(|export| export.job_id));
    assert_eq!(listed, ids(&mut jobs.into_iter()));
}

async fn jobs_are_found_by_their_user_and_by_the_state_that_they_are_in_now(on: &On) {
    let home = with_chat(on, NO_LIMITS).await;
    let old = home.export("ann", "all").await;
    home.work().await;
    home.clock.advance(TERMS.retention);
    let done = home.export("ann", "all").await;
    home.work().await;
    home.clock.advance(Duration::from_secs(1));
    let anns = home.export("ann", "all").await;
    home.clock.advance(Duration::from_secs(1));
    let eves = home.export("eve", "all").await;

    let ann = Some(ibid::ids::UserId::parse("ann").unwrap());
    let search = async |user: &Option<_>, state, before, limit| {
        let filter = Filter {
            user: user.clone(),
            state,
        };
        let found = home.exporter.ledger.search(filter, before, limit).await;
        let found = found.unwrap().into_iter().map(|found| found.export.job_id);
        found.collect::<Vec<_>>()
    };
    assert_eq!(search(&None, None, None, 9).await, [eves, anns, done, old]);
    assert_eq!(search(&ann, None, None, 9).await, [anns, done, old]);
    let queued = Some(State::Queued);
    assert_eq!(search(&None, queued, None, 9).await, [eves, anns]);
    assert_eq!(search(&ann, queued, None, 9).await, [anns]);
    // Nobody has swept yet.
    assert_eq!(search(&None, Some(State::Expired), None, 9).await, [old]);
    assert_eq!(search(&None, Some(State::Done), None, 9).await, [done]);
    let export = home.find(anns).await.export;
    let before = Cursor {
        created_at: export.created_at,
        job_id: anns,
    };
    assert_eq!(search(&None, None, Some(before), 1).await, [done]);
}
