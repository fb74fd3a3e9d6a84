use std::collections::BTreeSet;

use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::Value;

use super::*;
use crate::reference::Log;

fn samples(count: usize, max_events: usize) -> Vec<Vec<String>> {
    let mut runner = TestRunner::deterministic();
    let logs = logs(max_events);
    let mut sample = || logs.new_tree(&mut runner).unwrap().current();
    (0..count).map(|_| sample()).collect()
}

fn replay(lines: &[String]) -> Log {
    let mut log = Log::new();
    for line in lines {
        log.apply(line);
    }
    log
}

fn exported(log: &Log) -> String {
    let exports = log.users().into_iter().map(|user| log.export(&user, "all"));
    String::from_utf8(exports.collect::<Vec<_>>().concat()).unwrap()
}

fn parsed(line: &str) -> Value {
    serde_json::from_str(line).unwrap()
}

#[test]
fn every_generated_log_is_valid_and_no_longer_than_asked() {
    for lines in samples(300, 60) {
        assert!(lines.len() <= 60);
        assert!(lines.iter().all(|line| !line.contains(['\n', '\r'])));
        replay(&lines);
    }
}

#[test]
fn a_log_stays_valid_while_it_shrinks() {
    let mut runner = TestRunner::deterministic();
    for _ in 0..20 {
        let mut tree = logs(40).new_tree(&mut runner).unwrap();
        for round in 0..400 {
            replay(&tree.current());
            // Some simplifications are taken back, as when the failure went away with them.
            let moved = if round % 3 == 2 {
                tree.complicate()
            } else {
                tree.simplify()
            };
            if !moved && !tree.simplify() {
                break;
            }
        }
    }
}

#[test]
fn a_failure_shrinks_to_the_events_that_it_needs() {
    let mut runner = TestRunner::deterministic();
    let shows_a_recall = |lines: &[String]| exported(&replay(lines)).contains("\"recalled\":1");
    let logs = logs(60);
    let mut tree = std::iter::repeat_with(|| logs.new_tree(&mut runner).unwrap())
        .find(|tree| shows_a_recall(&tree.current()))
        .unwrap();
    let mut smallest = tree.current();
    let mut moved = tree.simplify();
    while moved {
        let lines = tree.current();
        if shows_a_recall(&lines) {
            smallest = lines;
            moved = tree.simplify();
        } else {
            moved = tree.complicate();
        }
    }
    // Besides these three, a policy may be what lets the message be seen.
    let kinds: BTreeSet<String> = smallest
        .iter()
        .map(|line| parsed(line)["kind"].as_str().unwrap().to_owned())
        .collect();
    let needed = ["join", "message", "recall"].map(str::to_owned);
    assert!(kinds.is_superset(&needed.into()), "{smallest:#?}");
    assert!(smallest.len() <= 4, "{smallest:#?}");
    assert!(
        smallest.iter().all(|line| line.starts_with("{\"kind\":")),
        "{smallest:#?}"
    );
}

#[test]
fn all_kinds_of_events_and_ways_to_write_them_occur() {
    let mut seen = BTreeSet::new();
    for lines in samples(300, 60) {
        for (index, line) in lines.iter().enumerate() {
            let event = parsed(line);
            let mut note = |what: &str, is_so: bool| {
                if is_so {
                    seen.insert(what.to_owned());
                }
            };
            note(event["kind"].as_str().unwrap(), true);
            note("id", event["id"].is_string());
            note("repetition", lines[..index].contains(line));
            note("by message", event["message"].is_string());
            note("by seq", event["seq"].is_u64());
            note("files", event["files"][0].is_object());
            note("no files", event["files"] == Value::Array(Vec::new()));
            note(
                "half a policy",
                event["kind"] == "conv" && event["history"].is_null(),
            );
            note("enabled", event["enabled"] == true);
            note("disabled", event["enabled"] == false);
            note(
                "NUL",
                event["body"].as_str().is_some_and(|it| it.contains('\0')),
            );
            note(
                "odd spelling",
                line.contains("\\u006B\\u0069\\u006E\\u0064"),
            );
            note("white space", line.starts_with('\t'));
            note("other order", line.starts_with("{\"ts\""));
            let conv = event["conv"].as_str().unwrap_or("a");
            note(&format!("conv {conv}"), true);
            let user = event["user"].as_str().unwrap_or("u1");
            note(&format!("user {user}"), true);
            let ts = event["ts"].as_str().unwrap_or_default();
            note(&format!("ts of {} bytes", ts.len()), ts.ends_with('Z'));
            note("before 1970", ts.starts_with("196"));
        }
    }
    let named = [
        "join",
        "leave",
        "message",
        "edit",
        "recall",
        "restore",
        "account",
        "conv",
        "id",
        "repetition",
        "by message",
        "by seq",
        "files",
        "no files",
        "half a policy",
        "enabled",
        "disabled",
        "NUL",
        "odd spelling",
        "white space",
        "other order",
        "before 1970",
    ];
    let mut expected: BTreeSet<String> = named.map(str::to_owned).into();
    expected.extend(CONVS.map(|conv| format!("conv {conv}")));
    expected.extend(USERS.map(|user| format!("user {user}")));
    let lengths = std::iter::once(20).chain(22..=30);
    expected.extend(lengths.map(|length| format!("ts of {length} bytes")));
    assert_eq!(seen, expected);
}

#[test]
fn what_generated_logs_export_shows_every_flag_and_is_canonical() {
    let mut flags = BTreeSet::new();
    for lines in samples(200, 80) {
        for line in exported(&replay(&lines)).lines() {
            let value = parsed(line);
            // The library's maps are sorted and its escapes are those of RFC 8785.
            assert_eq!(value.to_string(), line);
            let flag = |name: &str| value[name].as_u64().unwrap();
            flags.insert((flag("edited"), flag("recalled"), value["files"].is_array()));
        }
    }
    let expected = [(0, false), (0, true), (1, false)]
        .into_iter()
        .flat_map(|(recalled, files)| [(0, recalled, files), (1, recalled, files)]);
    assert_eq!(flags, expected.collect());
}
