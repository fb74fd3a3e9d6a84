//! The planner for ranges against a slow one that is written from RFC 9110 section 14 alone.
//!
//! An input is the length of the file in eight bytes, and what stands in `Range`.

#![no_main]

use http::header::RANGE;
use http::{HeaderMap, HeaderValue};
use libfuzzer_sys::fuzz_target;
use server::range::{ByteRange, Plan, Representation, plan};

// The file itself and not its crate, of which nothing else is needed: it builds in seconds.
#[allow(dead_code, reason = "the server uses the rest")]
#[path = "../../crates/ibid-server/src"]
mod server {
    pub mod range;
}

fuzz_target!(|input: &[u8]| {
    let Some((length, field)) = input.split_first_chunk::<8>() else {
        return;
    };
    let length = u64::from_le_bytes(*length);
    // What is no value of a header does not get as far as the planner.
    let Ok(value) = HeaderValue::from_bytes(field) else {
        return;
    };
    let representation = Representation {
        length,
        etag: "\"0b5c\"",
        last_modified_s: 1_700_000_000,
    };
    let mut headers = HeaderMap::new();
    headers.insert(RANGE, value);
    let planned = plan(false, &headers, &representation);
    assert_eq!(planned, slowly(field, length), "{length} {field:?}");
    assert_eq!(plan(true, &headers, &representation), Plan::Whole);
    // Twice is as good as never.
    let again = headers[RANGE].clone();
    headers.append(RANGE, again);
    assert_eq!(plan(false, &headers, &representation), Plan::Whole);
});

/// The bytes from the first to the last, both included.
type Span = (u128, u128);

fn slowly(field: &[u8], length: u64) -> Plan {
    let Some(asked) = asked(field) else {
        return Plan::Whole;
    };
    if length == 0 || asked.is_empty() || asked.len() > 16 {
        return Plan::Whole;
    }
    let length = u128::from(length);
    let mut spans: Vec<Span> = Vec::new();
    for ask in asked {
        let span = match ask {
            (Some(first), last) => (first, last.unwrap_or(length).min(length - 1)),
            (None, Some(suffix)) => (length.saturating_sub(suffix), length - 1),
            (None, None) => return Plan::Whole,
        };
        let is_empty_suffix = ask == (None, Some(0));
        if span.0 < length && !is_empty_suffix {
            spans.push(span);
        }
    }
    // Where anything begins or ends is where the number of those who share a byte is greatest.
    let shared = |at: u128| {
        let sharers = spans.iter().filter(|it| it.0 <= at && at <= it.1);
        sharers.count()
    };
    if spans.iter().any(|it| shared(it.0) > 2 || shared(it.1) > 2) {
        return Plan::Whole;
    }
    let spans = joined(spans);
    let ranges: Vec<ByteRange> = spans.into_iter().map(byte_range).collect();
    match ranges.as_slice() {
        [] => Plan::NotSatisfiable,
        [one] => Plan::One(*one),
        _ => Plan::Many(ranges),
    }
}

/// Joins any two that overlap or touch, the result standing where the first of them stood, until
/// there are none.
fn joined(mut spans: Vec<Span>) -> Vec<Span> {
    'again: loop {
        for one in 0..spans.len() {
            for other in one + 1..spans.len() {
                let (a, b) = (spans[one], spans[other]);
                if a.0 <= b.1 + 1 && b.0 <= a.1 + 1 {
                    spans[one] = (a.0.min(b.0), a.1.max(b.1));
                    spans.remove(other);
                    continue 'again;
                }
            }
        }
        return spans;
    }
}

fn byte_range(span: Span) -> ByteRange {
    let end = |it: u128| u64::try_from(it).expect("inside the file");
    ByteRange {
        first: end(span.0),
        last: end(span.1),
    }
}

/// What is asked for: first and last byte, or no first and the length of a suffix.
fn asked(field: &[u8]) -> Option<Vec<(Option<u128>, Option<u128>)>> {
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\t']);
    let at = text.find('=')?;
    if text[..at].to_ascii_lowercase() != "bytes" {
        return None;
    }
    let mut asked = Vec::new();
    for element in text[at + 1..].split(',') {
        let element = element.trim_matches([' ', '\t']);
        if element.is_empty() {
            continue;
        }
        let at = element.find('-')?;
        let (first, last) = (&element[..at], &element[at + 1..]);
        if !first.is_empty() && !last.is_empty() && is_less(last, first) {
            return None;
        }
        let (first, last) = (number(first)?, number(last)?);
        if first.is_none() && last.is_none() {
            return None;
        }
        asked.push((first, last));
    }
    Some(asked)
}

/// Compares two numbers digit by digit, however long they are.
fn is_less(one: &str, other: &str) -> bool {
    let width = one.len().max(other.len());
    format!("{one:0>width$}") < format!("{other:0>width$}")
}

/// A number, or nothing; no number at all where something else stands.
fn number(text: &str) -> Option<Option<u128>> {
    if text.is_empty() {
        return Some(None);
    }
    let mut value = 0_u128;
    for digit in text.chars() {
        // No file is longer, so a number beyond says no more than this one.
        value = (value * 10 + u128::from(digit.to_digit(10)?)).min(u64::MAX.into());
    }
    Some(Some(value))
}
