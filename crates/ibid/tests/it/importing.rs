//! Files of events into the log: what is refused, what is repeated, what is gone on with.

use ibid::event::{Invalid, MAX_LINE_BYTES};
use ibid::import::{ImportError, Report};

use crate::events::{TS, edit, join, leave, policy, recall, say, with_id};
use crate::harness::Installation;

fn file<S: AsRef<str>>(lines: &[S]) -> Vec<u8> {
    let mut file = String::new();
    for line in lines {
        file.push_str(line.as_ref());
        file.push('\n');
    }
    file.into_bytes()
}

/// All that an import could have written.
fn rows(home: &Installation) -> Vec<(String, i64)> {
    let sql = home.sql();
    let count = |table: &str| {
        let query = format!("SELECT count(*) FROM {table}");
        let rows = sql.query_row(&query, [], |row| row.get(0)).unwrap();
        (table.to_owned(), rows)
    };
    let tables = [
        "message", "revision", "stay", "conv", "account", "event_id", "import",
    ];
    let mut rows: Vec<_> = tables.into_iter().map(count).collect();
    let gseq = sql.query_row("SELECT gseq FROM log_counter", [], |row| row.get(0));
    rows.push(("gseq".to_owned(), gseq.unwrap()));
    rows
}

/// The refusals of a file of which nothing may be written.
async fn refusals(home: &Installation, bytes: &[u8]) -> Vec<(u64, Invalid)> {
    let before = rows(home);
    let (result, refused) = home.try_import(bytes, false).await;
    match result {
        Err(ImportError::Refused { count, .. }) => assert_eq!(count, refused.len() as u64),
        other => panic!("{other:?}"),
    }
    assert_eq!(rows(home), before, "something was written");
    refused
}

/// The one refusal, as field and reason.
async fn refusal(home: &Installation, line: u64, bytes: &[u8]) -> (String, String) {
    let mut refused = refusals(home, bytes).await;
    assert_eq!(refused.len(), 1, "{refused:?}");
    let (at, invalid) = refused.remove(0);
    assert_eq!(at, line, "{invalid}");
    (invalid.field.unwrap_or_default(), invalid.reason)
}

fn body_lines(lines: &[u8]) -> Vec<String> {
    let body = |line: &str| -> String {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["body"].as_str().unwrap().to_owned()
    };
    std::str::from_utf8(lines)
        .unwrap()
        .lines()
        .map(body)
        .collect()
}

#[tokio::test]
async fn a_truncated_last_line_is_refused_with_its_number_and_nothing_is_written() {
    let home = Installation::new();
    let whole = file(&[join("c", "ann"), say("c", "one"), say("c", "two")]);
    let cut = &whole[..whole.len() - 5];
    let (field, reason) = refusal(&home, 3, cut).await;
    assert_eq!(field, "");
    assert!(reason.starts_with("not valid JSON: EOF"), "{reason}");

    // Only the line end is missing: the line is whole.
    let (report, _) = home.try_import(&whole[..whole.len() - 1], false).await;
    assert_eq!(report.unwrap().accepted, 3);
}

#[tokio::test]
async fn of_a_half_valid_file_nothing_is_written_unless_that_is_asked_for() {
    let home = Installation::new();
    let bytes = file(&[
        join("c", "ann"),
        r#"{"kind":"mesage"}"#.to_owned(),
        say("c", "one"),
        String::new(),
        edit("c", 2, "of a message that is not there yet"),
        say("c", "two"),
        "nonsense".to_owned(),
        edit("c", 2, "TWO"),
    ]);
    let refused = refusals(&home, &bytes).await;
    let told = |refused: &[(u64, Invalid)]| -> Vec<(u64, Option<String>)> {
        refused
            .iter()
            .map(|(line, invalid)| (*line, invalid.field.clone()))
            .collect()
    };
    let expected = [
        (2, Some("kind".to_owned())),
        (5, Some("seq".to_owned())),
        (7, None),
    ];
    assert_eq!(told(&refused), expected);
    assert!(
        refused[0]
            .1
            .reason
            .starts_with("\"mesage\" is not a kind of event")
    );
    assert_eq!(refused[1].1.reason, "conversation \"c\" has no message 2");

    let (report, refused) = home.try_import(&bytes, true).await;
    assert_eq!(told(&refused), expected);
    let expected = Report {
        accepted: 4,
        skipped: 3,
        ..Report::default()
    };
    assert_eq!(report.unwrap(), expected);
    let lines = home.export_now("ann", "all").await;
    assert_eq!(body_lines(&lines), ["one", "TWO"]);
}

#[tokio::test]
async fn unknown_and_doubled_members_and_missing_ones_are_refused_by_name() {
    let home = Installation::new();
    let message = say("c", "hi");
    for (line, field, reason) in [
        (message.replace("\"body\"", "\"bdy\""), "body", "is missing"),
        (
            message.replace('{', "{\"colour\":1,"),
            "colour",
            "is not a member of this kind of event (message)",
        ),
        (
            message.replace('{', "{\"body\":\"\","),
            "",
            "not valid JSON: member \"body\" stands twice (at column",
        ),
        (
            message.replace(TS, "2026-01-05T09:30:00"),
            "ts",
            "must be an RFC 3339 time",
        ),
        (
            message.replace("\"hi\"", "7"),
            "body",
            "must be a string, not a number",
        ),
        (
            message.replace("\"c\"", "\"\""),
            "conv",
            "must not be empty",
        ),
        (
            message.replace("\"bob\"", "\"a\\nb\""),
            "user",
            "must not hold control characters",
        ),
        (
            message.replace("\"hi\"", "\"\\ud800\""),
            "",
            "not valid JSON: ",
        ),
        (
            r#"{"kind":"erase","conv":"c","seq":1}"#.to_owned(),
            "kind",
            "erasure by an event is not supported yet",
        ),
        (
            "[]".to_owned(),
            "",
            "an event must be a JSON object, not an array",
        ),
        ("{}".to_owned(), "kind", "is missing"),
        (
            recall("c", 1).replace(":1,", ":0,"),
            "seq",
            "must be a whole number from 1 to 2^53 - 1",
        ),
    ] {
        let bytes = file(&[join("c", "ann"), say("c", "1"), line.clone()]);
        let (at, why) = refusal(&home, 3, &bytes).await;
        assert_eq!(at, field, "{line}");
        assert!(why.starts_with(reason), "{line}: {why}");
    }
}

#[tokio::test]
async fn invalid_utf_8_is_refused_with_its_place() {
    let home = Installation::new();
    let mut bytes = file(&[join("c", "ann"), say("c", "h?")]);
    let at = bytes.iter().position(|byte| *byte == b'?').unwrap();
    bytes[at] = 0xff;
    let (_, reason) = refusal(&home, 2, &bytes).await;
    let column = at - bytes.iter().position(|byte| *byte == b'\n').unwrap();
    assert_eq!(reason, format!("invalid UTF-8 at byte {column}"));
}

#[tokio::test]
async fn a_line_may_have_4_mib_and_not_a_byte_more() {
    let home = Installation::new();
    let fill = MAX_LINE_BYTES - say("c", "").len();
    for end in ["\n", "\r\n"] {
        let too_long = say("c", &"x".repeat(fill + 1));
        let text = [join("c", "ann"), too_long, say("c", "after")].join(end);
        let (_, reason) = refusal(&home, 2, text.as_bytes()).await;
        assert_eq!(reason, "the line is longer than 4 MiB");

        let longest = say("c", &"x".repeat(fill));
        assert_eq!(longest.len(), MAX_LINE_BYTES);
        let home = Installation::new();
        let text = [join("c", "ann"), longest, say("c", "after")].join(end);
        let (report, refused) = home.try_import(text.as_bytes(), false).await;
        assert_eq!(
            report.ok().map(|report| report.accepted),
            Some(3),
            "{end:?} {refused:?}"
        );
        let lines = home.export_now("ann", "all").await;
        assert_eq!(body_lines(&lines)[0].len(), fill);
    }
}

#[tokio::test]
async fn line_ends_of_windows_a_byte_order_mark_and_empty_lines_are_taken() {
    let home = Installation::new();
    let lines = [
        join("c", "ann"),
        String::new(),
        say("c", "one"),
        " \t".to_owned(),
        say("c", "two"),
    ];
    let text = format!("\u{feff}{}\r\n\r\n", lines.join("\r\n"));
    let (report, refused) = home.try_import(text.as_bytes(), false).await;
    assert_eq!(report.unwrap().accepted, 3, "{refused:?}");
    let lines = home.export_now("ann", "all").await;
    assert_eq!(body_lines(&lines), ["one", "two"]);

    // Anywhere else the mark is not one.
    let text = format!("{}\n\u{feff}{}\n", say("c", "three"), say("c", "four"));
    refusal(&home, 2, text.as_bytes()).await;
}

#[tokio::test]
async fn what_follows_megabytes_of_blank_lines_is_not_forgotten() {
    let home = Installation::new();
    let blank = format!("{}\n", " ".repeat(1024 * 1024)).repeat(9);
    let text = format!("{}\n{blank}{}\n", join("c", "ann"), say("c", "after"));
    // In front of what is valid and in front of what is not.
    let invalid = format!("{blank}nonsense\n");
    refusal(&home, 10, invalid.as_bytes()).await;
    let (report, _) = home.try_import(text.as_bytes(), false).await;
    assert_eq!(report.unwrap().accepted, 2);
    let (again, _) = home.try_import(text.as_bytes(), false).await;
    assert_eq!(again.unwrap().continued_after_line, 11);
}

#[tokio::test]
async fn an_empty_file_is_imported_and_an_empty_log_stays_usable() {
    let home = Installation::new();
    for text in ["", "\n", "\u{feff}"] {
        let (report, _) = home.try_import(text.as_bytes(), false).await;
        assert_eq!(report.unwrap().accepted, 0, "{text:?}");
    }
    assert_eq!(home.export_now("ann", "all").await, b"");
}

#[tokio::test]
async fn events_with_a_known_id_are_skipped_and_other_content_under_it_is_refused() {
    let home = Installation::new();
    let hi = with_id("m1", &say("c", "hi"));
    let lines = [
        with_id("j1", &join("c", "ann")),
        hi.clone(),
        hi.clone(),
        with_id("e1", &edit("c", 1, "HI")),
        with_id("j2", &join("c", "ann")),
    ];
    let report = home.import(&lines).await;
    assert_eq!(
        (report.accepted, report.duplicates, report.unchanged),
        (3, 1, 1)
    );

    // Another file, so that it is not the file that is known.
    let respelt = hi
        .replace("\"hi\"", "\"h\\u0069\"")
        .replace(TS, "2026-01-05T10:30:00+01:00");
    assert_ne!(respelt, hi);
    let mut again = lines.to_vec();
    again.extend([respelt, say("c", "new")]);
    let report = home.import(&again).await;
    assert_eq!(
        (report.accepted, report.duplicates, report.unchanged),
        (1, 6, 0)
    );
    let lines = home.export_now("ann", "all").await;
    assert_eq!(body_lines(&lines), ["HI", "new"]);

    for other in [
        with_id("m1", &say("c", "ho")),
        with_id("m1", &say("d", "hi")),
        with_id("m1", &leave("c", "ann")),
        with_id("j1", &leave("c", "ann")),
    ] {
        let refused = refusal(&home, 2, &file(&[say("c", "x"), other])).await;
        let reason = "is already used by an event with other content";
        assert_eq!(refused, ("id".to_owned(), reason.to_owned()));
    }
    // The same inside one file.
    let twice = file(&[with_id("m2", &say("c", "x")), with_id("m2", &say("c", "y"))]);
    assert_eq!(refusal(&home, 2, &twice).await.0, "id");
}

#[tokio::test]
async fn a_revision_of_a_message_that_is_not_there_is_refused() {
    let home = Installation::new();
    home.import(&[join("c", "ann"), with_id("m1", &say("c", "one"))])
        .await;
    home.import(&[with_id("p1", &policy("c", "all", "keep"))])
        .await;
    let by_id = |id: &str| format!(r#"{{"kind":"recall","message":"{id}","ts":"{TS}"}}"#);
    for (line, field, reason) in [
        (
            edit("c", 2, "x"),
            "seq",
            "conversation \"c\" has no message 2",
        ),
        (recall("d", 1), "seq", "conversation \"d\" has no message 1"),
        (by_id("m9"), "message", "no message has the id \"m9\""),
        (
            by_id("p1"),
            "message",
            "\"p1\" is the id of an event that is not a message",
        ),
    ] {
        let refused = refusal(&home, 1, &file(&[line])).await;
        assert_eq!(refused, (field.to_owned(), reason.to_owned()));
    }
    // Messages of the same file count, from their line on.
    let lines = [
        by_id("m2"),
        with_id("m2", &say("c", "two")),
        by_id("m2"),
        edit("c", 2, "x"),
    ];
    assert_eq!(refusal(&home, 1, &file(&lines)).await.0, "message");
    assert_eq!(home.import(&lines[1..]).await.accepted, 3);
}

#[tokio::test]
async fn a_file_that_was_imported_whole_is_not_imported_again() {
    let home = Installation::new();
    let lines = [
        join("c", "ann"),
        say("c", "without an id"),
        leave("c", "ann"),
    ];
    home.import(&lines).await;
    let before = rows(&home);
    let again = home.import(&lines).await;
    let expected = Report {
        continued_after_line: 3,
        finished_before: true,
        ..Report::default()
    };
    assert_eq!(again, expected);
    assert_eq!(rows(&home), before);
}
