//! One event's JSON line, read member by member.

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::File;

/// The members of one object that nobody has asked for yet.
pub(super) struct Members(Map<String, Value>);

impl Members {
    pub(super) fn parse(line: &str) -> Members {
        assert!(line.len() <= 4 << 20, "the line is over 4 MiB");
        let value: Value = serde_json::from_str(line).expect("a line is JSON");
        // The parser keeps the last of two members with one name. Outside strings JSON has one
        // colon for each member, so a doubled one shows as a colon too many.
        assert_eq!(
            colons(line),
            members_within(&value),
            "a member is doubled in {line}"
        );
        Members::of(value)
    }

    fn of(value: Value) -> Members {
        match value {
            Value::Object(members) => Members(members),
            other => panic!("{other} is not an object"),
        }
    }

    pub(super) fn text(&mut self, name: &str) -> String {
        let text = self.optional_text(name);
        text.unwrap_or_else(|| panic!("{name} is missing"))
    }

    pub(super) fn optional_text(&mut self, name: &str) -> Option<String> {
        self.0.remove(name).map(|value| match value {
            Value::String(text) => text,
            other => panic!("{name} is {other}, not a string"),
        })
    }

    /// The id of a user or a conversation.
    pub(super) fn name(&mut self, name: &str) -> String {
        let id = self.text(name);
        assert!(
            (1..=200).contains(&id.len()) && !id.contains(char::is_control),
            "{id:?} is not an id of a user or a conversation"
        );
        id
    }

    /// A whole number that every JSON implementation keeps (RFC 8259, section 6).
    pub(super) fn number(&mut self, name: &str) -> u64 {
        let number = self.0.remove(name).and_then(|value| value.as_u64());
        let number = number.filter(|&number| number < 1 << 53);
        number.unwrap_or_else(|| panic!("{name} is missing or not a whole number"))
    }

    pub(super) fn flag(&mut self, name: &str) -> bool {
        let flag = self.0.remove(name).and_then(|value| value.as_bool());
        flag.unwrap_or_else(|| panic!("{name} is missing or neither true nor false"))
    }

    pub(super) fn ts(&mut self) -> String {
        utc_micros(&self.text("ts"))
    }

    pub(super) fn files(&mut self) -> Vec<File> {
        let files = match self.0.remove("files") {
            None => Vec::new(),
            Some(Value::Array(files)) => files,
            Some(other) => panic!("files is {other}, not a list"),
        };
        let read = |value| {
            let mut members = Members::of(value);
            let file = File {
                bytes: members.number("bytes"),
                id: members.text("id"),
                name: members.text("name"),
                kind: members.text("type"),
            };
            members.end();
            file
        };
        files.into_iter().map(read).collect()
    }

    pub(super) fn end(self) {
        let unknown: Vec<String> = self.0.into_iter().map(|(name, _)| name).collect();
        assert!(unknown.is_empty(), "unknown members {unknown:?}");
    }
}

fn colons(json: &str) -> usize {
    let mut count = 0;
    let mut in_string = false;
    let mut bytes = json.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' => _ = bytes.next(),
            b':' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

fn members_within(value: &Value) -> usize {
    match value {
        Value::Object(members) => {
            members.len() + members.values().map(members_within).sum::<usize>()
        }
        Value::Array(values) => values.iter().map(members_within).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// An RFC 3339 time with offset, in UTC with exactly six digits of fraction.
///
/// Digits are cut off the text before anything is converted: cutting the number would round
/// towards 1970 and so move times before it forwards.
pub(super) fn utc_micros(ts: &str) -> String {
    let (to_seconds, rest) = ts
        .split_at_checked("2026-01-05T09:30:00".len())
        .unwrap_or_else(|| panic!("{ts:?} is too short for a time with offset"));
    let digits_end = |text: &str| text.find(|c: char| !c.is_ascii_digit());
    let (fraction, offset) = match rest.strip_prefix('.') {
        None => ("0", rest),
        Some(rest) => rest.split_at(digits_end(rest).unwrap_or(rest.len())),
    };
    let pattern = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "0");
    assert!(
        pattern(to_seconds).eq_ignore_ascii_case("0000-00-00T00:00:00")
            && !fraction.is_empty()
            && matches!(&*pattern(offset), "Z" | "z" | "+00:00" | "-00:00"),
        "{ts:?} is not an RFC 3339 time with offset"
    );
    let fraction = &fraction[..fraction.len().min(6)];
    let cut: Timestamp = format!("{to_seconds}.{fraction}{offset}")
        .parse()
        .unwrap_or_else(|error| panic!("{ts:?}: {error}"));
    format!("{cut:.6}")
}
