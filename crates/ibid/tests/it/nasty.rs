//! Bodies that broke other exporters.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::events::{TS, join, say};
use crate::harness::Installation;
use crate::shared::shared;

/// A case as it stands in the file, without mending what a JSON library would refuse.
enum Case {
    /// The body as JSON text, quotes and all.
    Json {
        id: String,
        body: String,
    },
    Bytes(Vec<u8>),
}

fn cases(test: &str) -> Option<Vec<Case>> {
    let text = std::fs::read_to_string(shared(test, "cases/nasty.jsonl")?).unwrap();
    let cases = text.lines().map(|line| {
        let text = |name: &str| serde_json::from_str::<String>(member(line, name)?).ok();
        if let Some(base64) = text("body_b64") {
            let body = STANDARD.decode(base64).unwrap();
            return Case::Bytes(body);
        }
        let body = text("raw_json").unwrap_or_else(|| member(line, "body").unwrap().to_owned());
        let id = text("id").unwrap();
        Case::Json { id, body }
    });
    let cases: Vec<Case> = cases.collect();
    assert!(cases.len() > 100, "only {} cases", cases.len());
    Some(cases)
}

/// The JSON text of a member whose value is a string.
fn member<'l>(line: &'l str, name: &str) -> Option<&'l str> {
    let mut rest = line;
    let mut previous = None;
    loop {
        let from = rest.find('"')?;
        let is_value = rest[..from].trim() == ":";
        rest = &rest[from..];
        let to = closing_quote(rest)?;
        if is_value && previous == Some(name) {
            return Some(&rest[..=to]);
        }
        previous = (!is_value).then(|| &rest[1..to]);
        rest = &rest[to + 1..];
    }
}

fn closing_quote(json: &str) -> Option<usize> {
    let mut escaped = false;
    json.bytes().enumerate().skip(1).find_map(|(at, byte)| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends.then_some(at)
    })
}

fn message(body: &[u8]) -> Vec<u8> {
    let head = format!(r#"{{"kind":"message","conv":"c","user":"bob","ts":"{TS}","body":"#);
    [head.as_bytes(), body, b"}"].concat()
}

#[tokio::test]
async fn every_nasty_body_comes_out_equal_or_is_refused_with_its_reason() {
    let test = "every_nasty_body_comes_out_equal_or_is_refused_with_its_reason";
    let Some(cases) = cases(test) else { return };
    let mut file = join("c", "ann").into_bytes();
    let (mut expected, mut refusals) = (Vec::new(), Vec::new());
    for (line, case) in (2..).zip(&cases) {
        file.push(b'\n');
        match case {
            Case::Json { id, body } => {
                file.extend(message(body.as_bytes()));
                match serde_json::from_str::<String>(body) {
                    Ok(body) => expected.push((id, body)),
                    Err(_) => refusals.push((line, "surrogate")),
                }
            }
            Case::Bytes(body) => {
                file.extend(message(&[b"\"", body.as_slice(), b"\""].concat()));
                refusals.push((line, "invalid UTF-8 at byte "));
            }
        }
    }
    file.push(b'\n');

    let home = Installation::new();
    let (nothing_written, _) = home.try_import(&file, false).await;
    nothing_written.unwrap_err();
    assert_eq!(home.export_now("ann", "all").await, b"");

    let (report, refused) = home.try_import(&file, true).await;
    let report = report.unwrap();
    assert_eq!(report.skipped as usize, refusals.len());
    assert_eq!(refused.len(), refusals.len());
    for ((line, invalid), (expected_line, reason)) in refused.iter().zip(&refusals) {
        assert_eq!(line, expected_line);
        assert!(says(&invalid.reason, reason), "line {line}: {invalid}");
    }
    assert!(!refusals.is_empty() && expected.len() > 90);

    let lines = String::from_utf8(home.export_now("ann", "all").await).unwrap();
    assert_eq!(lines.matches('\n').count(), expected.len());
    for (line, (id, body)) in lines.split_terminator('\n').zip(&expected) {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["body"].as_str(), Some(body.as_str()), "{id}");
        assert_eq!(line.get("body_base64"), None, "{id}");
    }
}

/// The JSON library has two sentences for a surrogate that stands alone.
fn says(reason: &str, expected: &str) -> bool {
    reason.contains(expected)
        || (expected == "surrogate" && reason.contains("unexpected end of hex escape"))
}

#[tokio::test]
async fn bytes_that_another_program_wrote_are_shown_replaced_and_kept_in_base64() {
    let test = "bytes_that_another_program_wrote_are_shown_replaced_and_kept_in_base64";
    let of_the_file = cases(test).unwrap_or_default();
    let mut bodies: Vec<Vec<u8>> = of_the_file
        .into_iter()
        .filter_map(|case| match case {
            Case::Bytes(body) => Some(body),
            Case::Json { .. } => None,
        })
        .collect();
    // The sequences of the Unicode Standard, section 3.9, tables 3-8 to 3-11.
    for bytes in [
        b"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82A".as_slice(),
        b"\xed\xa0\x80\xed\xbf\xbf\xed\xafA",
        b"\xf4\x91\x92\x93\xffA\x80\xbfB",
        b"\xe1\x80\xe2\xf0\x91\x92\xf1\xbfA",
        b"\xf0\x9f\x98",
        b"\x00\xff\"\\\n",
    ] {
        bodies.push(bytes.to_vec());
    }

    let home = Installation::new();
    let mut log = vec![join("c", "ann")];
    log.extend(bodies.iter().map(|_| say("c", "placeholder")));
    home.import(&log).await;
    let sql = home.sql();
    for (seq, body) in (1_i64..).zip(&bodies) {
        // Half of them as text that is no text, half as a blob.
        let value = if seq % 2 == 0 {
            "CAST(?1 AS TEXT)"
        } else {
            "?1"
        };
        let sql_text = format!("UPDATE message SET body = {value} WHERE seq = ?2");
        sql.execute(&sql_text, rusqlite::params![body, seq])
            .unwrap();
    }
    drop(sql);

    let lines = String::from_utf8(home.export_now("ann", "all").await).unwrap();
    assert_eq!(lines.lines().count(), bodies.len());
    for (line, body) in lines.lines().zip(&bodies) {
        let line: Value = serde_json::from_str(line).unwrap();
        let replaced = replace_maximal_subparts(body);
        assert_eq!(line["body"].as_str(), Some(replaced.as_str()), "{body:x?}");
        let kept = STANDARD.decode(line["body_base64"].as_str().unwrap());
        assert_eq!(kept.as_ref(), Ok(body));
    }
}

#[test]
fn replacements_are_those_of_the_unicode_standard() {
    for (bytes, replaced) in [
        (b"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82A".as_slice(), "????????A"),
        (b"\xed\xa0\x80\xed\xbf\xbf\xed\xafA", "????????A"),
        (b"\xf4\x91\x92\x93\xffA\x80\xbfB", "?????A??B"),
        (b"\xe1\x80\xe2\xf0\x91\x92\xf1\xbfA", "????A"),
        ("é€😀".as_bytes(), "é€😀"),
    ] {
        let expected = replaced.replace('?', "\u{fffd}");
        assert_eq!(replace_maximal_subparts(bytes), expected, "{bytes:x?}");
    }
}

/// One U+FFFD for each maximal subpart of an ill-formed sequence, after table 3-7 of the Unicode
/// Standard, section 3.9.
fn replace_maximal_subparts(mut bytes: &[u8]) -> String {
    let mut text = String::new();
    while let Some(lead) = bytes.first() {
        let (length, second) = match lead {
            0x00..=0x7f => (1, 0..=0),
            0xc2..=0xdf => (2, 0x80..=0xbf),
            0xe0 => (3, 0xa0..=0xbf),
            0xed => (3, 0x80..=0x9f),
            0xe1..=0xef => (3, 0x80..=0xbf),
            0xf0 => (4, 0x90..=0xbf),
            0xf1..=0xf3 => (4, 0x80..=0xbf),
            0xf4 => (4, 0x80..=0x8f),
            _ => (0, 0..=0),
        };
        let follows = |at: usize| match (at, bytes.get(at)) {
            (_, None) => false,
            (1, Some(byte)) => second.contains(byte),
            (_, Some(byte)) => (0x80..=0xbf).contains(byte),
        };
        let good = 1 + (1..length).take_while(|at| follows(*at)).count();
        match (good == length, std::str::from_utf8(&bytes[..good])) {
            (true, Ok(character)) => text.push_str(character),
            _ => text.push('\u{fffd}'),
        }
        bytes = &bytes[good..];
    }
    text
}

#[tokio::test]
async fn every_character_below_a_space_survives() {
    let body: String = (0..0x20_u8).chain([0x7f]).map(char::from).collect();
    let home = Installation::new();
    home.import(&[join("c", "ann"), say("c", &body)]).await;
    let lines = String::from_utf8(home.export_now("ann", "all").await).unwrap();
    assert!(lines.starts_with(r#"{"body":"\u0000\u0001"#), "{lines}");
    let line: Value = serde_json::from_str(&lines).unwrap();
    assert_eq!(line["body"].as_str(), Some(body.as_str()));
}
