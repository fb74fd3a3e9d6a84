//! Chats that people really had.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{BufRead as _, BufReader};

use ibid::export::State;
use ibid::import::Report;
use serde::Deserialize;

use crate::harness::{Installation, UNTIL_IDLE, assert_same_lines, work};
use crate::reference::Log;
use crate::shared::shared;

/// What a message of a file, or a line of an artefact, says.
#[derive(Debug, PartialEq, Deserialize)]
struct Said {
    conv: String,
    seq: u64,
    user: String,
    body: String,
}

#[derive(Deserialize)]
struct Event<'l> {
    kind: &'l str,
    conv: String,
    #[serde(default)]
    seq: u64,
    #[serde(default)]
    user: String,
    #[serde(default)]
    body: String,
}

/// The messages of a log in the order of an artefact; a recalled one without its body.
fn said(lines: &[String]) -> Vec<Said> {
    let mut convs: BTreeMap<String, Vec<Said>> = BTreeMap::new();
    for line in lines {
        let event: Event<'_> = serde_json::from_str(line).unwrap();
        let messages = convs.entry(event.conv.clone()).or_default();
        match event.kind {
            "message" => messages.push(Said {
                conv: event.conv,
                seq: messages.len() as u64 + 1,
                user: event.user,
                body: event.body,
            }),
            "recall" => messages[event.seq as usize - 1].body.clear(),
            _ => {}
        }
    }
    convs.into_values().flatten().collect()
}

fn said_in_artefact(lines: &[u8]) -> Vec<Said> {
    let lines = std::str::from_utf8(lines).unwrap();
    let said = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    said.collect()
}

fn replay(lines: &[String]) -> Log {
    let mut log = Log::new();
    for line in lines {
        log.apply(line);
    }
    log
}

/// Nothing of a file of `lines` lines got lost on its way into the log.
fn assert_without_loss(report: &Report, lines: usize) {
    let counted = report.accepted + report.unchanged;
    assert_eq!(counted, lines as u64, "{report:?}");
    assert_eq!((report.duplicates, report.skipped), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_user_of_the_small_chats_gets_what_the_reference_says() {
    let test = "every_user_of_the_small_chats_gets_what_the_reference_says";
    let Some(path) = shared(test, "data/small.jsonl") else {
        return;
    };
    let file = std::fs::read_to_string(path).unwrap();
    let lines: Vec<String> = file.lines().map(str::to_owned).collect();
    let log = replay(&lines);

    let home = Installation::cutting_at(200);
    let (report, _) = home.try_import(file.as_bytes(), false).await;
    assert_without_loss(&report.unwrap(), lines.len());

    let (users, convs) = (log.users(), log.convs());
    assert!(users.len() > 300 && convs.len() == 150);
    let mut asked = Vec::new();
    for (index, user) in users.iter().enumerate() {
        asked.push((home.export(user, "all").await, user, "all".to_owned()));
        let some = convs.iter().skip(index % convs.len());
        if let Some(conv) = some.into_iter().find(|conv| log.has_stay(user, conv)) {
            let scope = format!("conv:{conv}");
            asked.push((home.export(user, &scope).await, user, scope));
        }
    }
    home.work().await;
    for (job, user, scope) in &asked {
        let what = format!("{user} {scope}");
        let expected = log.export(user, scope);
        assert_same_lines(&what, &home.lines(*job).await, &expected);
        if *user == "archivist" && scope == "all" {
            let messages = said(&lines);
            assert_eq!(messages.len(), 3_296);
            assert!(said_in_artefact(&expected) == messages);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_channel_of_a_quarter_million_events_comes_out_whole() {
    let test = "a_channel_of_a_quarter_million_events_comes_out_whole";
    let Some(path) = shared(test, "data/ubuntu.jsonl.zst") else {
        return;
    };
    let mut decoder = zstd::Decoder::new(File::open(path).unwrap()).unwrap();
    decoder.window_log_max(31).unwrap();
    let lines: Vec<String> = BufReader::new(decoder)
        .lines()
        .map(Result::unwrap)
        .collect();
    assert_eq!(lines.len(), 240_960);

    let home = Installation::new();
    let report = home.import(&lines).await;
    assert_without_loss(&report, lines.len());

    let users = several_stays(&lines, 12);
    let archive = home.export("archivist", "all").await;
    let mut asked = Vec::new();
    for user in &users {
        asked.push((home.export(user, "all").await, user));
    }
    let reports = work(home.exporter.workshop(2, None), UNTIL_IDLE).await;
    assert!(
        reports
            .iter()
            .all(|report| report.state == Some(State::Done))
    );

    let messages = said(&lines);
    assert_eq!(messages.len(), 221_508);
    assert!(said_in_artefact(&home.lines(archive).await) == messages);
    let log = replay(&lines);
    let (one_half, other_half) = users.split_at(users.len() / 2);
    let expected = std::thread::scope(|threads| {
        let exports = |users: &[String]| -> Vec<Vec<u8>> {
            // There is but one conversation, and asking for it is quicker than for all.
            let export = |user: &String| log.export(user, "conv:irc.ubuntu");
            users.iter().map(export).collect()
        };
        let other_half = threads.spawn(move || exports(other_half));
        let mut expected = exports(one_half);
        expected.extend(other_half.join().unwrap());
        expected
    });
    for ((job, user), expected) in asked.into_iter().zip(&expected) {
        assert!(!expected.is_empty());
        assert_same_lines(user, &home.lines(job).await, expected);
    }
}

/// The first users who joined at least three times and left at least twice.
fn several_stays(lines: &[String], count: usize) -> Vec<String> {
    #[derive(Deserialize)]
    struct Moved {
        kind: String,
        user: String,
    }
    let mut moves: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    let (mut chosen, mut known) = (Vec::new(), HashSet::new());
    for line in lines.iter().filter(|line| !line.contains("\"message\"")) {
        let Moved { kind, user } = serde_json::from_str(line).unwrap();
        let (joins, leaves) = moves.entry(user.clone()).or_default();
        *joins += u32::from(kind == "join");
        *leaves += u32::from(kind == "leave");
        if *joins >= 3 && *leaves >= 2 && known.insert(user.clone()) {
            chosen.push(user);
        }
        if chosen.len() == count {
            break;
        }
    }
    assert_eq!(chosen.len(), count);
    chosen
}
