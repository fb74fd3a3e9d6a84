use serde_json::Value;

use super::members::utc_micros;
use super::*;

const TS: &str = "2026-01-05T09:30:00Z";

fn join(user: &str) -> String {
    format!(r#"{{"kind":"join","conv":"c","user":"{user}","ts":"{TS}"}}"#)
}

fn leave(user: &str) -> String {
    format!(r#"{{"kind":"leave","conv":"c","user":"{user}","ts":"{TS}"}}"#)
}

fn say(body: &str) -> String {
    format!(r#"{{"kind":"message","conv":"c","user":"bob","ts":"{TS}","body":"{body}"}}"#)
}

fn edit(seq: u64, body: &str) -> String {
    format!(r#"{{"kind":"edit","conv":"c","seq":{seq},"ts":"{TS}","body":"{body}"}}"#)
}

fn recall(seq: u64) -> String {
    format!(r#"{{"kind":"recall","conv":"c","seq":{seq},"ts":"{TS}"}}"#)
}

fn restore(seq: u64) -> String {
    format!(r#"{{"kind":"restore","conv":"c","seq":{seq},"ts":"{TS}"}}"#)
}

fn policy(history: &str, ex_members: &str) -> String {
    format!(r#"{{"kind":"conv","conv":"c","history":"{history}","ex_members":"{ex_members}"}}"#)
}

/// The same event with an id of its own.
fn with_id(id: &str, line: &str) -> String {
    line.replacen('{', &format!(r#"{{"id":"{id}","#), 1)
}

fn log<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> Log {
    let mut log = Log::new();
    for line in lines {
        log.apply(line.as_ref());
    }
    log
}

fn export(log: &Log, user: &str) -> String {
    String::from_utf8(log.export(user, "all")).unwrap()
}

/// What ann sees after these events, line by line as (seq, body, edited, recalled).
fn ann_sees<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> Vec<(u64, String, u64, u64)> {
    let row = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        (
            line["seq"].as_u64().unwrap(),
            line["body"].as_str().unwrap().to_owned(),
            line["edited"].as_u64().unwrap(),
            line["recalled"].as_u64().unwrap(),
        )
    };
    export(&log(lines), "ann").lines().map(row).collect()
}

fn row(seq: u64, body: &str, edited: u64, recalled: u64) -> (u64, String, u64, u64) {
    (seq, body.to_owned(), edited, recalled)
}

fn refuses(line: &str, before: &[String]) -> bool {
    let mut log = log(before);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| log.apply(line))).is_err()
}

#[test]
fn the_example_of_the_artefact_is_met_byte_for_byte() {
    let mut log = Log::new();
    log.apply(r#"{"kind":"join","conv":"c-team","user":"u0007","ts":"2026-01-05T09:00:00Z"}"#);
    for _ in 0..51 {
        log.apply(
            r#"{"kind":"message","conv":"c-team","user":"u0007","ts":"2026-01-05T09:30:00Z","body":"hi"}"#,
        );
    }
    let all = export(&log, "u0007");
    assert_eq!(all.lines().count(), 51);
    assert!(all.ends_with("\n{\"body\":\"hi\",\"conv\":\"c-team\",\"edited\":0,\"recalled\":0,\"seq\":51,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"u0007\"}\n"));
}

#[test]
fn each_policy_shows_a_member_and_an_ex_member_what_its_row_says() {
    let came_twice = [
        say("before"),
        join("ann"),
        say("first stay"),
        leave("ann"),
        say("between"),
        join("ann"),
        say("second stay"),
    ];
    let seqs = |history, ex_members, leaves: bool| {
        let mut lines = came_twice.to_vec();
        if leaves {
            lines.push(leave("ann"));
        }
        lines.extend([say("after"), policy(history, ex_members)]);
        let rows = ann_sees(lines);
        rows.into_iter().map(|row| row.0).collect::<Vec<_>>()
    };

    assert_eq!(seqs("joined", "keep", false), [2, 4, 5]);
    assert_eq!(seqs("joined", "keep", true), [2, 4]);
    assert_eq!(seqs("all", "keep", false), [1, 2, 3, 4, 5]);
    assert_eq!(seqs("all", "keep", true), [1, 2, 3, 4]);
    assert_eq!(seqs("joined", "none", false), [2, 4, 5]);
    assert_eq!(seqs("joined", "none", true), [0; 0]);
    assert_eq!(seqs("all", "none", false), [1, 2, 3, 4, 5]);
    assert_eq!(seqs("all", "none", true), [0; 0]);
}

#[test]
fn without_a_policy_event_stays_are_kept_as_they_were() {
    let lines = [say("1"), join("ann"), say("2"), leave("ann"), say("3")];
    assert_eq!(ann_sees(lines), [row(2, "2", 0, 0)]);
}

#[test]
fn someone_who_never_joined_sees_nothing_under_any_policy() {
    for history in ["joined", "all"] {
        for ex_members in ["keep", "none"] {
            let lines = [say("1"), policy(history, ex_members), leave("ann")];
            assert_eq!(ann_sees(lines), []);
        }
    }
}

#[test]
fn the_newest_policy_rules_and_a_member_left_out_keeps_its_value() {
    let all = r#"{"kind":"conv","conv":"c","history":"all"}"#.to_owned();
    let none = r#"{"kind":"conv","conv":"c","ex_members":"none"}"#.to_owned();
    let keep = r#"{"kind":"conv","conv":"c","ex_members":"keep"}"#.to_owned();
    let left = [say("1"), join("ann"), say("2"), leave("ann"), say("3")];
    let after = |policies: &[&String]| ann_sees(left.iter().chain(policies.iter().copied()));

    assert_eq!(after(&[&all]), [row(1, "1", 0, 0), row(2, "2", 0, 0)]);
    assert_eq!(after(&[&none]), []);
    assert_eq!(after(&[&all, &none]), []);
    assert_eq!(after(&[&none, &all]), []);
    assert_eq!(
        after(&[&all, &none, &keep]),
        [row(1, "1", 0, 0), row(2, "2", 0, 0)]
    );
    assert_eq!(after(&[&none, &keep]), [row(2, "2", 0, 0)]);
}

#[test]
fn a_policy_rules_its_own_conversation_only() {
    let elsewhere = r#"{"kind":"conv","conv":"d","history":"all"}"#;
    let lines = [say("1"), join("ann"), say("2"), elsewhere.to_owned()];
    assert_eq!(ann_sees(lines), [row(2, "2", 0, 0)]);
}

#[test]
fn a_join_of_someone_inside_and_a_leave_of_someone_outside_change_nothing() {
    let lines = [
        leave("ann"),
        say("1"),
        join("ann"),
        say("2"),
        join("ann"),
        say("3"),
        leave("ann"),
        say("4"),
        leave("ann"),
        say("5"),
    ];
    assert_eq!(ann_sees(&lines), [row(2, "2", 0, 0), row(3, "3", 0, 0)]);

    // The second leave must not move the end of what an ex-member keeps.
    let shown_all = lines.iter().cloned().chain([policy("all", "keep")]);
    let seqs: Vec<u64> = ann_sees(shown_all).iter().map(|row| row.0).collect();
    assert_eq!(seqs, [1, 2, 3]);
}

#[test]
fn one_users_leave_ends_nobody_elses_stay() {
    let lines = [join("ann"), join("eve"), say("1"), leave("eve"), say("2")];
    assert_eq!(ann_sees(&lines), [row(1, "1", 0, 0), row(2, "2", 0, 0)]);
    assert_eq!(
        export(&log(&lines), "eve"),
        "{\"body\":\"1\",\"conv\":\"c\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n"
    );
}

#[test]
fn an_edit_counts_only_inside_a_stay() {
    let here = [join("ann"), say("old"), edit(1, "new")];
    assert_eq!(ann_sees(&here), [row(1, "new", 1, 0)]);

    let after = [join("ann"), say("old"), leave("ann"), edit(1, "new")];
    assert_eq!(ann_sees(&after), [row(1, "old", 0, 0)]);

    let mixed = here
        .iter()
        .cloned()
        .chain([leave("ann"), edit(1, "newest")]);
    assert_eq!(ann_sees(mixed), [row(1, "new", 1, 0)]);
}

#[test]
fn an_edit_made_in_a_later_stay_counts_for_a_message_of_an_earlier_one() {
    let lines = [
        join("ann"),
        say("old"),
        leave("ann"),
        edit(1, "unseen"),
        join("ann"),
    ];
    assert_eq!(ann_sees(&lines), [row(1, "old", 0, 0)]);
    let later = lines.iter().cloned().chain([edit(1, "seen")]);
    assert_eq!(ann_sees(later), [row(1, "seen", 1, 0)]);
}

#[test]
fn an_edit_made_outside_a_stay_counts_when_the_policy_widens_the_stay_over_it() {
    let lines = [
        say("old"),
        edit(1, "before the join"),
        join("ann"),
        policy("all", "keep"),
    ];
    assert_eq!(ann_sees(&lines), [row(1, "before the join", 1, 0)]);

    let left = lines
        .iter()
        .cloned()
        .chain([leave("ann"), edit(1, "after")]);
    assert_eq!(ann_sees(left), [row(1, "before the join", 1, 0)]);
}

#[test]
fn a_recall_counts_also_after_a_leave() {
    let lines = [join("ann"), say("text"), leave("ann"), recall(1)];
    assert_eq!(ann_sees(&lines), [row(1, "", 0, 1)]);
    let restored = lines.iter().cloned().chain([restore(1)]);
    assert_eq!(ann_sees(restored), [row(1, "text", 0, 0)]);
}

#[test]
fn an_edit_after_a_recall_sets_the_flag_but_does_not_bring_the_text_back() {
    let lines = [join("ann"), say("old"), recall(1), edit(1, "new")];
    assert_eq!(ann_sees(lines), [row(1, "", 1, 1)]);
}

#[test]
fn an_edit_before_a_recall_still_sets_the_flag() {
    let lines = [join("ann"), say("old"), edit(1, "new"), recall(1)];
    assert_eq!(ann_sees(lines), [row(1, "", 1, 1)]);
}

#[test]
fn a_recalled_message_does_not_show_an_edit_that_is_not_for_the_user() {
    let lines = [
        join("ann"),
        say("old"),
        leave("ann"),
        edit(1, "unseen"),
        recall(1),
    ];
    assert_eq!(ann_sees(lines), [row(1, "", 0, 1)]);
}

#[test]
fn a_restore_shows_the_newest_edit_also_one_made_while_recalled() {
    let lines = [
        join("ann"),
        say("old"),
        edit(1, "new"),
        recall(1),
        edit(1, "newest"),
        restore(1),
    ];
    assert_eq!(ann_sees(lines), [row(1, "newest", 1, 0)]);
}

#[test]
fn the_last_of_recalls_and_restores_decides() {
    let recalls = [join("ann"), say("text"), recall(1), recall(1), restore(1)];
    assert_eq!(ann_sees(&recalls), [row(1, "text", 0, 0)]);
    let again = recalls.iter().cloned().chain([restore(1), recall(1)]);
    assert_eq!(ann_sees(again), [row(1, "", 0, 1)]);
}

#[test]
fn a_revision_may_name_its_message_by_id() {
    let lines = [
        join("ann"),
        with_id("m1", &say("one")),
        with_id("m2", &say("two")),
        format!(r#"{{"kind":"edit","message":"m2","ts":"{TS}","body":"TWO"}}"#),
        format!(r#"{{"kind":"recall","message":"m1","ts":"{TS}"}}"#),
    ];
    assert_eq!(ann_sees(&lines), [row(1, "", 0, 1), row(2, "TWO", 1, 0)]);
    let restore = format!(r#"{{"kind":"restore","message":"m1","ts":"{TS}"}}"#);
    assert_eq!(
        ann_sees(lines.iter().cloned().chain([restore])),
        [row(1, "one", 0, 0), row(2, "TWO", 1, 0)]
    );
}

#[test]
fn an_event_whose_id_was_seen_is_ignored_entirely() {
    let first = with_id("m1", &say("one"));
    let shout = with_id("e1", &edit(1, "ONE"));
    let lines = [
        join("ann"),
        first.clone(),
        shout.clone(),
        edit(1, "One"),
        first,
        shout,
        say("two"),
    ];
    assert_eq!(ann_sees(lines), [row(1, "One", 1, 0), row(2, "two", 0, 0)]);
}

#[test]
fn the_id_of_an_event_that_changed_nothing_was_seen_all_the_same() {
    let again = with_id("j2", &join("ann"));
    let lines = [
        join("ann"),
        again.clone(),
        say("1"),
        leave("ann"),
        again,
        say("2"),
    ];
    assert_eq!(ann_sees(lines), [row(1, "1", 0, 0)]);
}

#[test]
fn another_spelling_of_the_same_content_is_a_repetition() {
    let lines = [
        join("ann"),
        r#"{"kind":"message","id":"m","conv":"c","user":"bob","ts":"2026-01-05T09:30:00Z","body":"hi"}"#.to_owned(),
        r#" { "body": "h\u0069", "files": [], "ts": "2026-01-05T10:30:00.0000009+01:00", "user": "bob", "conv": "c", "id": "m", "kind": "message" } "#.to_owned(),
    ];
    assert_eq!(ann_sees(lines), [row(1, "hi", 0, 0)]);
}

#[test]
fn each_conversation_counts_its_own_messages_and_ids_are_ordered_bytewise() {
    let mut log = Log::new();
    for conv in ["z", "ä", "aB", "a", "a-b"] {
        log.apply(&join("ann").replace("\"c\"", &format!("\"{conv}\"")));
        log.apply(&say(conv).replace("\"c\"", &format!("\"{conv}\"")));
    }
    let line = |conv| {
        format!(
            "{{\"body\":\"{conv}\",\"conv\":\"{conv}\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}}\n"
        )
    };
    let order = ["a", "a-b", "aB", "z", "ä"];
    assert_eq!(log.convs(), order);
    assert_eq!(export(&log, "ann"), order.map(line).concat());
    assert_eq!(log.export("ann", "conv:aB"), line("aB").into_bytes());
    assert_eq!(log.export("ann", "conv:b"), b"");
}

#[test]
fn users_are_those_with_a_stay_and_conversations_those_that_were_named() {
    let log = log([
        join("eve"),
        leave("eve"),
        say("by bob, who is not inside"),
        join("ann"),
        leave("zoe"),
        r#"{"kind":"account","user":"max","enabled":true}"#.to_owned(),
        r#"{"kind":"conv","conv":"b","history":"all"}"#.to_owned(),
    ]);
    assert_eq!(log.users(), ["ann", "eve"]);
    assert_eq!(log.convs(), ["b", "c"]);
}

#[test]
fn an_account_event_changes_no_byte() {
    let disabled = r#"{"kind":"account","user":"ann","enabled":false}"#;
    let lines = [join("ann"), say("1"), disabled.to_owned(), say("2")];
    assert_eq!(ann_sees(lines), [row(1, "1", 0, 0), row(2, "2", 0, 0)]);
}

#[test]
fn files_are_repeated_with_sorted_members_unless_recalled() {
    let message = format!(
        r#"{{"kind":"message","conv":"c","user":"bob","ts":"{TS}","body":"","files":[{{"type":"image/png","name":"a \"b\".png","id":"f2","bytes":9007199254740991}},{{"id":"f1","bytes":0,"type":"","name":"ä"}}]}}"#
    );
    let with_files = "{\"body\":\"\",\"conv\":\"c\",\"edited\":0,\"files\":[{\"bytes\":9007199254740991,\"id\":\"f2\",\"name\":\"a \\\"b\\\".png\",\"type\":\"image/png\"},{\"bytes\":0,\"id\":\"f1\",\"name\":\"ä\",\"type\":\"\"}],\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n";
    let without = "{\"body\":\"\",\"conv\":\"c\",\"edited\":0,\"recalled\":1,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n";

    let mut log = log([join("ann"), message]);
    assert_eq!(export(&log, "ann"), with_files);
    log.apply(&recall(1));
    assert_eq!(export(&log, "ann"), without);
    log.apply(&restore(1));
    assert_eq!(export(&log, "ann"), with_files);
}

#[test]
fn an_empty_list_of_files_is_as_if_absent() {
    let message = say("hi").replace("}", r#","files":[]}"#);
    assert_eq!(
        export(&log([join("ann"), message]), "ann"),
        "{\"body\":\"hi\",\"conv\":\"c\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n"
    );
}

#[test]
fn times_are_converted_to_utc_and_cut_to_microseconds() {
    for (given, kept) in [
        ("2026-01-05T09:30:00Z", "2026-01-05T09:30:00.000000Z"),
        ("2026-01-05T09:30:00.5Z", "2026-01-05T09:30:00.500000Z"),
        (
            "2026-01-05T09:30:00.123456999Z",
            "2026-01-05T09:30:00.123456Z",
        ),
        (
            "2026-01-05T09:30:59.9999999Z",
            "2026-01-05T09:30:59.999999Z",
        ),
        (
            "2026-01-05T09:30:00.1234567890123Z",
            "2026-01-05T09:30:00.123456Z",
        ),
        ("2026-01-01T00:15:00+05:30", "2025-12-31T18:45:00.000000Z"),
        ("2025-12-31T20:00:00-08:00", "2026-01-01T04:00:00.000000Z"),
        ("2024-02-29T23:59:59-00:01", "2024-03-01T00:00:59.000000Z"),
        ("2026-01-05T09:30:00-00:00", "2026-01-05T09:30:00.000000Z"),
        ("2026-01-05t09:30:00z", "2026-01-05T09:30:00.000000Z"),
    ] {
        assert_eq!(utc_micros(given), kept, "{given}");
    }
}

#[test]
fn a_time_before_1970_is_cut_and_not_rounded_forwards() {
    assert_eq!(
        utc_micros("1969-12-31T23:59:59.9999999Z"),
        "1969-12-31T23:59:59.999999Z"
    );
    assert_eq!(
        utc_micros("1960-01-01T00:00:00.0000001+00:00"),
        "1960-01-01T00:00:00.000000Z"
    );
}

#[test]
fn strings_are_escaped_in_the_one_canonical_way() {
    assert_eq!(
        string("\u{0}\u{1}\u{7}\u{8}\t\n\u{b}\u{c}\r\u{e}\u{1b}\u{1f}"),
        r#""\u0000\u0001\u0007\b\t\n\u000b\f\r\u000e\u001b\u001f""#
    );
    assert_eq!(string(r#"say "\" / 'it'"#), r#""say \"\\\" / 'it'""#);
    assert_eq!(
        string("\u{7f}\u{80}\u{2028}\u{2029}\u{feff}\u{fffd}é😀"),
        "\"\u{7f}\u{80}\u{2028}\u{2029}\u{feff}\u{fffd}é😀\""
    );
    assert_eq!(string(""), "\"\"");
}

#[test]
fn escapes_in_an_event_do_not_survive_into_the_artefact() {
    let body = r#"\u0041\/\uD83D\uDE00\u0000\u000A\u00e9\u2028\""#;
    assert_eq!(
        export(&log([join("ann"), say(body)]), "ann"),
        "{\"body\":\"A/😀\\u0000\\né\u{2028}\\\"\",\"conv\":\"c\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n"
    );
}

#[test]
fn an_export_of_nothing_has_no_bytes() {
    assert_eq!(Log::new().export("ann", "all"), b"");
    assert_eq!(log([say("1"), join("ann")]).export("ann", "conv:c"), b"");
}

#[test]
fn invalid_events_are_refused() {
    let before = [with_id("m1", &say("one")), with_id("e1", &edit(1, "x"))];
    for line in [
        "",
        "[]",
        r#"{"kind":"sing"}"#,
        r#"{"kind":"account","user":"ann","enabled":"yes"}"#,
        r#"{"kind":"account","user":"ann","enabled":true,"enabled":true}"#,
        r#"{"kind":"account","user":"ann","enabled":true,"why":":"}"#,
        r#"{"kind":"account","user":"","enabled":true}"#,
        r#"{"kind":"account","user":"a\u0000","enabled":true}"#,
        r#"{"kind":"conv","conv":"c","history":"some"}"#,
        r#"{"kind":"conv","conv":"c","ex_members":"some"}"#,
        &say(r"\ud83d"),
        &say("hi").replace("Z", ""),
        &say("hi").replace("T09", " 09"),
        &say("hi").replace("}", r#","files":[{"bytes":1,"id":"f","name":"n"}]}"#),
        &edit(0, "x"),
        &edit(2, "x"),
        &recall(2),
        &restore(2),
        &recall(1).replace("\"c\"", "\"d\""),
        &format!(r#"{{"kind":"recall","message":"m2","ts":"{TS}"}}"#),
        &format!(r#"{{"kind":"recall","message":"e1","ts":"{TS}"}}"#),
        &format!(r#"{{"kind":"recall","message":"m1","conv":"c","seq":1,"ts":"{TS}"}}"#),
        &with_id("m1", &say("two")),
        &with_id("m1", &edit(1, "one")),
    ] {
        assert!(refuses(line, &before), "{line}");
    }
    assert!(!refuses(&say(r#"\"kind\":\"x\""#), &before));
}
