//! Logs that nobody thought of, with exports created while they grow.

use std::collections::HashSet;

use ibid::export::State;
use ibid::ids::JobId;
use ibid::ledger::CreateError;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::Value;

use crate::generate::logs;
use crate::harness::{Installation, UNTIL_IDLE, assert_same_lines, work};
use crate::reference::Log;

/// What happens after a stretch of the log is written.
#[derive(Clone, Debug)]
struct Turn {
    /// How many lines the stretch has.
    lines: usize,
    /// Whose export of what is created then; a scope that is not "all" is one of the
    /// conversations.
    asks: Vec<(Index, Option<Index>)>,
    /// Whether workers get to work before the log goes on.
    works: bool,
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let ask = (any::<Index>(), prop::option::of(any::<Index>()));
    let turn = (1..25_usize, prop::collection::vec(ask, 0..3), any::<bool>());
    let turn = turn.prop_map(|(lines, asks, works)| Turn { lines, asks, works });
    prop::collection::vec(turn, 1..6)
}

/// What is expected of a job.
struct Expected {
    job: JobId,
    what: String,
    lines: Vec<u8>,
}

/// Writes the log into an installation turn by turn, and gives what each export must be.
async fn play(
    home: &Installation,
    lines: &[String],
    turns: &[Turn],
    threads: usize,
) -> Vec<Expected> {
    let mut log = Log::new();
    let (mut rest, mut ids) = (lines, HashSet::new());
    let mut expected = Vec::new();
    for (number, turn) in turns.iter().enumerate() {
        let last = number + 1 == turns.len();
        let taken = if last {
            rest.len()
        } else {
            turn.lines.min(rest.len())
        };
        let (stretch, after) = rest.split_at(taken);
        rest = after;
        write(home, stretch, number, &mut ids).await;
        stretch.iter().for_each(|line| log.apply(line));
        let (users, convs) = (log.users(), log.convs());
        for (user, conv) in turn.asks.iter().filter(|_| !users.is_empty()) {
            let user = user.get(&users).as_str();
            let scope = conv.map_or("all".to_owned(), |conv| {
                format!("conv:{}", conv.get(&convs))
            });
            let what = format!("{user} {scope} in turn {number}");
            if scope
                .strip_prefix("conv:")
                .is_some_and(|conv| !log.has_stay(user, conv))
            {
                let refused = home.create(user, &scope, "refused").await;
                assert!(
                    matches!(refused, Err(CreateError::ScopeInvalid)),
                    "{what}: {refused:?}"
                );
                continue;
            }
            expected.push(Expected {
                job: home.export(user, &scope).await,
                lines: log.export(user, &scope),
                what,
            });
        }
        if turn.works {
            work(home.exporter.workshop(threads, None), UNTIL_IDLE).await;
        }
    }
    work(home.exporter.workshop(threads, None), UNTIL_IDLE).await;
    expected
}

async fn write(home: &Installation, lines: &[String], number: usize, ids: &mut HashSet<String>) {
    // Another number of empty lines makes another file of it, however short it is: a file that
    // was imported before is not imported again.
    let text = lines.join("\n") + &"\n".repeat(number + 1);
    let (report, refused) = home.try_import(text.as_bytes(), false).await;
    let report = report.unwrap_or_else(|error| panic!("{error}: {refused:?}"));
    let repeated = lines.iter().filter(|line| {
        let event: Value = serde_json::from_str(line).unwrap();
        let id = event["id"].as_str().map(str::to_owned);
        id.is_some_and(|id| !ids.insert(id))
    });
    assert_eq!(report.duplicates, repeated.count() as u64, "{report:?}");
    let counted = report.accepted + report.unchanged + report.duplicates;
    assert_eq!(counted, lines.len() as u64, "{report:?}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_export_is_what_the_reference_says_at_the_moment_it_was_created(
        lines in logs(80),
        turns in turns(),
        part_messages in 0..6_u64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let homes = [(part_messages, 1), (part_messages, 3), (7, 2)];
            let mut digests: [Vec<[u8; 32]>; 3] = Default::default();
            for ((part_messages, threads), digests) in homes.into_iter().zip(&mut digests) {
                let home = Installation::cutting_at(part_messages);
                for Expected { job, what, lines } in play(&home, &lines, &turns, threads).await {
                    assert_same_lines(&what, &home.lines(job).await, &lines);
                    let artefact = home.artefact(job).await;
                    assert_eq!(home.state(job).await, State::Done);
                    let parts = match (artefact.messages, part_messages) {
                        (0, _) => 0,
                        (_, 0) => 1,
                        (messages, at) => messages.div_ceil(at),
                    };
                    assert_eq!(artefact.parts, parts, "{what}");
                    digests.push(artefact.sha256);
                }
            }
            // The same log and recipe, another folder and other threads: the same bytes.
            assert_eq!(digests[0], digests[1]);
        });
    }
}
