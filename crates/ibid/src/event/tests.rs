use super::*;

fn refused(line: &str) -> (String, String) {
    let e = Event::parse(line.as_bytes()).expect_err(line);
    (e.field.unwrap_or_default(), e.reason)
}

#[test]
fn every_kind_of_event_is_read() {
    for line in [
        r#"{"kind":"join","conv":"c","user":"u","ts":"2026-01-05T09:00:00Z"}"#,
        r#"{"kind":"leave","conv":"c","user":"u","ts":"2026-01-05T09:00:00Z","id":"x"}"#,
        r#"{"kind":"message","conv":"c","user":"u","ts":"2026-01-05T09:00:00Z","body":""}"#,
        r#"{"kind":"edit","conv":"c","seq":1,"ts":"2026-01-05T09:00:00Z","body":"b"}"#,
        r#"{"kind":"edit","message":"m1","ts":"2026-01-05T09:00:00Z","body":"b"}"#,
        r#"{"kind":"recall","conv":"c","seq":1,"ts":"2026-01-05T09:00:00Z"}"#,
        r#"{"kind":"restore","message":"m1","ts":"2026-01-05T09:00:00Z"}"#,
        r#"{"kind":"account","user":"u","enabled":false}"#,
        r#"{"kind":"conv","conv":"c","history":"all"}"#,
        r#"{"kind":"conv","conv":"c","history":"joined","ex_members":"none","ts":"2026-01-05T09:00:00Z"}"#,
    ] {
        Event::parse(line.as_bytes()).expect(line);
    }
}

#[test]
fn what_is_wrong_names_its_field() {
    const TS: &str = r#""ts":"2026-01-05T09:00:00Z""#;
    for (line, field, part) in [
        (r#"{"conv":"c"}"#.to_owned(), "kind", "is missing"),
        (r#"{"kind":"mesage"}"#.to_owned(), "kind", "not a kind"),
        (
            format!(r#"{{"kind":"join","conv":"c",{TS}}}"#),
            "user",
            "is missing",
        ),
        (
            format!(r#"{{"kind":"join","conv":"c","user":"",{TS}}}"#),
            "user",
            "empty",
        ),
        (
            format!(r#"{{"kind":"join","conv":7,"user":"u",{TS}}}"#),
            "conv",
            "not a number",
        ),
        (
            format!(r#"{{"kind":"join","conv":"c","user":"u",{TS},"body":"x"}}"#),
            "body",
            "not a member",
        ),
        (
            r#"{"kind":"join","conv":"c","user":"u","ts":"yesterday"}"#.to_owned(),
            "ts",
            "RFC 3339",
        ),
        (
            format!(r#"{{"kind":"recall","conv":"c","seq":0,{TS}}}"#),
            "seq",
            "from 1",
        ),
        (
            format!(r#"{{"kind":"recall","conv":"c","seq":1.5,{TS}}}"#),
            "seq",
            "from 1",
        ),
        (
            format!(r#"{{"kind":"recall","conv":"c","seq":"1",{TS}}}"#),
            "seq",
            "not a string",
        ),
        (
            format!(r#"{{"kind":"recall","conv":"c","seq":1,"message":"m",{TS}}}"#),
            "conv",
            "beside message",
        ),
        (
            r#"{"kind":"account","user":"u","enabled":"no"}"#.to_owned(),
            "enabled",
            "true or false",
        ),
        (
            r#"{"kind":"conv","conv":"c"}"#.to_owned(),
            "history",
            "must set one",
        ),
        (
            r#"{"kind":"conv","conv":"c","history":"some"}"#.to_owned(),
            "history",
            "joined",
        ),
        (
            format!(r#"{{"kind":"erase","conv":"c","seq":1,{TS}}}"#),
            "kind",
            "not supported yet",
        ),
        (
            format!(
                r#"{{"kind":"message","conv":"c","user":"u","body":"b",{TS},"files":[{{"bytes":1,"id":"f","name":"n"}}]}}"#
            ),
            "files[0].type",
            "is missing",
        ),
        (
            format!(r#"{{"kind":"message","conv":"c","user":"u","body":null,{TS}}}"#),
            "body",
            "not null",
        ),
        (
            format!(r#"{{"kind":"message","conv":"c","user":"u","body":"b",{TS},"id":null}}"#),
            "id",
            "not null",
        ),
        ("[]".to_owned(), "", "must be a JSON object"),
        (
            format!(r#"{{"kind":"join","conv":"c","conv":"c","user":"u",{TS}}}"#),
            "",
            "stands twice",
        ),
    ] {
        let (at, reason) = refused(&line);
        assert_eq!(at, field, "{line}: {reason}");
        assert!(reason.contains(part), "{line}: {reason}");
    }
}

#[test]
fn the_digest_is_of_the_content_and_not_of_the_spelling() {
    let one = br#"{"kind":"message","conv":"c","user":"u","ts":"2026-01-05T09:00:00Z","body":"A","id":"m"}"#;
    let same = br#" {"id":"m", "body":"\u0041","ts":"2026-01-05T10:00:00+01:00","user":"u","conv":"c","kind":"message","files":[]}"#;
    let other = br#"{"kind":"message","conv":"c","user":"u","ts":"2026-01-05T09:00:00Z","body":"B","id":"m"}"#;
    let digest = |line: &[u8]| Event::parse(line).expect("valid").digest();
    assert_eq!(digest(one), digest(same));
    assert_ne!(digest(one), digest(other));
}
