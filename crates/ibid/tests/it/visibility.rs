//! Who sees what: stays, policies, edits, recalls. All expectations are written by hand.

use serde_json::Value;

use crate::events::{edit, join, leave, policy, recall, restore, say, with_id};
use crate::harness::Installation;

/// A line of an export: seq, body, edited, recalled.
type Row = (u64, String, u64, u64);

fn row(seq: u64, body: &str, edited: u64, recalled: u64) -> Row {
    (seq, body.to_owned(), edited, recalled)
}

/// What ann's export of everything holds after these events.
async fn ann_sees<S: AsRef<str>>(lines: &[S]) -> Vec<Row> {
    let home = Installation::new();
    home.import(lines).await;
    rows(&home.export_now("ann", "all").await)
}

fn rows(lines: &[u8]) -> Vec<Row> {
    let row = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let number = |name: &str| line[name].as_u64().unwrap();
        let body = line["body"].as_str().unwrap().to_owned();
        (number("seq"), body, number("edited"), number("recalled"))
    };
    std::str::from_utf8(lines)
        .unwrap()
        .lines()
        .map(row)
        .collect()
}

#[tokio::test]
async fn an_edit_counts_inside_a_stay_and_not_after_the_leave() {
    let lines = [
        join("c", "ann"),
        say("c", "one"),
        say("c", "two"),
        edit("c", 1, "ONE"),
        leave("c", "ann"),
        edit("c", 1, "One, unseen"),
        edit("c", 2, "TWO, unseen"),
    ];
    let expected = [row(1, "ONE", 1, 0), row(2, "two", 0, 0)];
    assert_eq!(ann_sees(&lines).await, expected);
}

#[tokio::test]
async fn an_edit_in_a_later_stay_counts_although_that_stay_holds_no_message() {
    let mut lines = vec![
        join("c", "ann"),
        say("c", "one"),
        leave("c", "ann"),
        edit("c", 1, "unseen"),
        join("c", "ann"),
    ];
    assert_eq!(ann_sees(&lines).await, [row(1, "one", 0, 0)]);
    lines.push(edit("c", 1, "seen"));
    assert_eq!(ann_sees(&lines).await, [row(1, "seen", 1, 0)]);
}

#[tokio::test]
async fn the_newest_of_several_edits_counts() {
    let lines = [
        join("c", "ann"),
        say("c", "a"),
        say("c", "x"),
        edit("c", 1, "b"),
        edit("c", 2, "y"),
        edit("c", 1, "c"),
    ];
    let expected = [row(1, "c", 1, 0), row(2, "y", 1, 0)];
    assert_eq!(ann_sees(&lines).await, expected);
}

#[tokio::test]
async fn a_recall_counts_always_and_a_restore_takes_it_back() {
    let mut lines = vec![
        join("c", "ann"),
        say("c", "text"),
        edit("c", 1, "edited"),
        leave("c", "ann"),
        recall("c", 1),
    ];
    assert_eq!(ann_sees(&lines).await, [row(1, "", 1, 1)]);
    lines.push(restore("c", 1));
    assert_eq!(ann_sees(&lines).await, [row(1, "edited", 1, 0)]);
    lines.push(recall("c", 1));
    assert_eq!(ann_sees(&lines).await, [row(1, "", 1, 1)]);
}

#[tokio::test]
async fn an_edit_after_a_recall_sets_the_flag_and_waits_for_a_restore() {
    let mut lines = vec![
        join("c", "ann"),
        say("c", "old"),
        recall("c", 1),
        edit("c", 1, "new"),
    ];
    assert_eq!(ann_sees(&lines).await, [row(1, "", 1, 1)]);
    lines.push(restore("c", 1));
    assert_eq!(ann_sees(&lines).await, [row(1, "new", 1, 0)]);
}

#[tokio::test]
async fn a_second_recall_and_a_restore_of_what_is_not_recalled_change_nothing() {
    let home = Installation::new();
    let lines = [
        join("c", "ann"),
        say("c", "text"),
        restore("c", 1),
        recall("c", 1),
        recall("c", 1),
        restore("c", 1),
        restore("c", 1),
    ];
    let report = home.import(&lines).await;
    assert_eq!((report.accepted, report.unchanged), (4, 3));
    let lines = home.export_now("ann", "all").await;
    assert_eq!(rows(&lines), [row(1, "text", 0, 0)]);
}

#[tokio::test]
async fn revisions_may_name_their_message_by_its_own_id() {
    let by_id = |kind: &str, rest: &str| {
        format!(r#"{{"kind":"{kind}","message":"m1","ts":"2026-01-05T09:30:00Z"{rest}}}"#)
    };
    let lines = [
        join("c", "ann"),
        say("c", "zero"),
        with_id("m1", &say("c", "one")),
        by_id("edit", r#","body":"ONE""#),
        by_id("recall", ""),
        by_id("restore", ""),
    ];
    let expected = [row(1, "zero", 0, 0), row(2, "ONE", 1, 0)];
    assert_eq!(ann_sees(&lines).await, expected);
}

#[tokio::test]
async fn repeated_stays_and_joins_of_someone_inside_give_each_message_once() {
    let home = Installation::new();
    let lines = [
        say("c", "1"),
        join("c", "ann"),
        say("c", "2"),
        join("c", "ann"),
        say("c", "3"),
        leave("c", "ann"),
        leave("c", "ann"),
        say("c", "4"),
        join("c", "ann"),
        say("c", "5"),
        leave("c", "ann"),
        join("c", "ann"),
        say("c", "6"),
    ];
    let report = home.import(&lines).await;
    assert_eq!((report.accepted, report.unchanged), (11, 2));
    let seqs: Vec<u64> = rows(&home.export_now("ann", "all").await)
        .into_iter()
        .map(|row| row.0)
        .collect();
    assert_eq!(seqs, [2, 3, 5, 6]);
}

#[tokio::test]
async fn stays_that_another_program_made_overlap_give_each_message_once() {
    let home = Installation::new();
    let lines = [
        join("c", "ann"),
        say("c", "1"),
        say("c", "2"),
        leave("c", "ann"),
        say("c", "3"),
        say("c", "4"),
    ];
    home.import(&lines).await;
    // From the second message to the third; gseq 1 is the join, 3 the second message.
    home.tamper(
        "INSERT INTO stay (user_id, conv, from_gseq, to_gseq, first_seq, last_seq)
         VALUES ('ann', 'c', 3, 6, 2, 3)",
        [],
    );
    let lines = home.export_now("ann", "all").await;
    let expected = [row(1, "1", 0, 0), row(2, "2", 0, 0), row(3, "3", 0, 0)];
    assert_eq!(rows(&lines), expected);
}

/// | | inside since the second | left after the second | left then, and came back for the fourth |
/// |---|---|---|---|
/// | joined, keep | 2 3 4 5 | 2 | 2 4 5 |
/// | all, keep | 1 2 3 4 5 | 1 2 | 1 2 3 4 5 |
/// | joined, none | 2 3 4 5 | | 2 4 5 |
/// | all, none | 1 2 3 4 5 | | 1 2 3 4 5 |
#[tokio::test]
async fn each_policy_shows_a_member_and_an_ex_member_what_its_row_says() {
    for (history, ex_members, inside, left, came_back) in [
        (
            "joined",
            "keep",
            &[2, 3, 4, 5][..],
            &[2][..],
            &[2, 4, 5][..],
        ),
        ("all", "keep", &[1, 2, 3, 4, 5], &[1, 2], &[1, 2, 3, 4, 5]),
        ("joined", "none", &[2, 3, 4, 5], &[], &[2, 4, 5]),
        ("all", "none", &[1, 2, 3, 4, 5], &[], &[1, 2, 3, 4, 5]),
    ] {
        let home = Installation::new();
        let lines = [
            say("c", "1"),
            join("c", "inside"),
            join("c", "left"),
            join("c", "back"),
            say("c", "2"),
            leave("c", "left"),
            leave("c", "back"),
            say("c", "3"),
            join("c", "back"),
            say("c", "4"),
            policy("c", history, ex_members),
            say("c", "5"),
            say("d", "another conversation"),
        ];
        home.import(&lines).await;
        for (user, expected) in [("inside", inside), ("left", left), ("back", came_back)] {
            for scope in ["all", "conv:c"] {
                let rows = rows(&home.export_now(user, scope).await);
                let seqs: Vec<u64> = rows.into_iter().map(|row| row.0).collect();
                assert_eq!(seqs, expected, "{history} {ex_members} {user} {scope}");
            }
        }
    }
}

#[tokio::test]
async fn a_policy_widens_which_edits_count() {
    let lines = [
        say("c", "old"),
        edit("c", 1, "before the join"),
        join("c", "ann"),
        policy("c", "all", "keep"),
        leave("c", "ann"),
        edit("c", 1, "after the leave"),
    ];
    assert_eq!(ann_sees(&lines).await, [row(1, "before the join", 1, 0)]);
}

#[tokio::test]
async fn the_policy_at_creation_rules_and_not_a_later_one() {
    let home = Installation::new();
    let lines = [say("c", "1"), join("c", "ann"), say("c", "2")];
    home.import(&lines).await;
    let before = home.export("ann", "all").await;
    home.import(&[policy("c", "all", "none"), leave("c", "ann")])
        .await;
    let after = home.export("ann", "all").await;
    home.work().await;
    assert_eq!(rows(&home.lines(before).await), [row(2, "2", 0, 0)]);
    assert_eq!(home.lines(after).await, b"");
}

#[tokio::test]
async fn files_are_repeated_and_a_recall_takes_them_away() {
    let files = r#"[{"type":"image/png","name":"a.png","id":"f1","bytes":12}]"#;
    let message = say("c", "see").replace("\"ts\"", &format!("\"files\":{files},\"ts\""));
    let mut lines = vec![join("c", "ann"), message];
    let home = Installation::new();
    home.import(&lines).await;
    let shown = String::from_utf8(home.export_now("ann", "all").await).unwrap();
    let canonical = r#","files":[{"bytes":12,"id":"f1","name":"a.png","type":"image/png"}],"#;
    assert!(shown.contains(canonical), "{shown}");

    lines.push(recall("c", 1));
    let home = Installation::new();
    home.import(&lines).await;
    let shown = String::from_utf8(home.export_now("ann", "all").await).unwrap();
    assert!(!shown.contains("files"), "{shown}");
}

#[tokio::test]
async fn long_edits_of_short_messages_fill_a_page_too() {
    let home = Installation::new();
    let mut lines = vec![join("c", "ann")];
    lines.extend((0..40).map(|n| say("c", &format!("{n}"))));
    lines.extend((1..=40).map(|seq| edit("c", seq, &format!("{seq:06}").repeat(50_000))));
    home.import(&lines).await;
    let job = home.export("ann", "all").await;
    let windows = std::sync::Arc::new(home.exporter.ledger.windows(job).await.unwrap());
    let snapshot = home.find(job).await.export.snapshot;
    let (mut place, mut pages, mut messages) = (windows.first(), 0, 0);
    while let Some(at) = place {
        let page = ibid::source::Page::default();
        let reading = home.exporter.source.page(&snapshot, &windows, at, page);
        let page = reading.await.unwrap();
        assert!(page.bytes() < 2_000_000, "{} bytes", page.bytes());
        messages += page.len();
        pages += 1;
        place = windows.after(page.last().unwrap());
    }
    assert_eq!(messages, 40);
    assert!(pages > 5, "{pages}");
    home.work().await;
    let mut reference = crate::reference::Log::new();
    for line in &lines {
        reference.apply(line);
    }
    crate::harness::assert_same_lines(
        "long edits",
        &home.lines(job).await,
        &reference.export("ann", "all"),
    );
}
