//! The conditions a request may carry: RFC 9110 section 13.1, for an immutable representation.

use http::HeaderMap;
use http::header::{
    HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE,
};

use super::Representation;

/// Whether the request may go on: steps 1 and 2 of RFC 9110 section 13.2.2.
///
/// `If-Match` compares strongly (section 13.1.1). A date that cannot be read or stands twice is no
/// condition (section 13.1.4).
pub(super) fn hold(headers: &HeaderMap, representation: &Representation) -> bool {
    let is_ours = |tag: &[u8]| tag == representation.etag.as_bytes();
    names(headers, &IF_MATCH, is_ours).unwrap_or_else(|| {
        sole(headers, &IF_UNMODIFIED_SINCE)
            .and_then(http_date)
            .is_none_or(|since_s| representation.last_modified_s <= since_s)
    })
}

/// Whether the client holds this very representation: steps 3 and 4 of RFC 9110 section 13.2.2.
///
/// `If-None-Match` compares weakly (section 13.1.2). A date that cannot be read or stands twice is
/// no condition (section 13.1.3).
pub(super) fn client_is_current(headers: &HeaderMap, representation: &Representation) -> bool {
    let is_ours =
        |tag: &[u8]| tag.strip_prefix(b"W/").unwrap_or(tag) == representation.etag.as_bytes();
    names(headers, &IF_NONE_MATCH, is_ours).unwrap_or_else(|| {
        sole(headers, &IF_MODIFIED_SINCE)
            .and_then(http_date)
            .is_some_and(|since_s| representation.last_modified_s <= since_s)
    })
}

/// Whether `If-Range` lets `Range` apply: absent, or a strong match (RFC 9110 section 13.1.5).
///
/// A weak tag never equals ours, which is strong. A date matches only if it is exactly ours, and
/// then it is a strong validator: section 8.8.2.2 asks that the representation cannot have changed
/// twice within the second, and an immutable one does not change at all. A later date proves
/// nothing, as no answer of ours ever carried it.
pub(super) fn range_applies(headers: &HeaderMap, representation: &Representation) -> bool {
    if !headers.contains_key(IF_RANGE) {
        return true;
    }
    sole(headers, &IF_RANGE).is_some_and(|validator| {
        validator == representation.etag.as_bytes()
            || http_date(validator) == Some(representation.last_modified_s)
    })
}

/// The trimmed value of a field that may stand once; `None` if it is absent or stands more often.
pub(super) fn sole<'a>(headers: &'a HeaderMap, field: &HeaderName) -> Option<&'a [u8]> {
    let mut lines = headers.get_all(field).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => Some(line.as_bytes().trim_ascii()),
        _ => None,
    }
}

/// Whether a field of entity-tags names the representation, or `None` when the field is absent.
///
/// `*` names any representation. A field with a syntax error anywhere names none: `If-Match` then
/// stops the request and `If-None-Match` gets the client the bytes, which errs on the safe side.
fn names(headers: &HeaderMap, field: &HeaderName, is_ours: impl Fn(&[u8]) -> bool) -> Option<bool> {
    if !headers.contains_key(field) {
        return None;
    }
    if sole(headers, field) == Some(b"*") {
        return Some(true);
    }
    // A list may be spread over several lines (RFC 9110 section 5.3).
    let lines = headers.get_all(field).iter();
    let tags = lines
        .map(|line| entity_tags(line.as_bytes()))
        .collect::<Option<Vec<_>>>();
    Some(tags.is_some_and(|tags| tags.into_iter().flatten().any(is_ours)))
}

/// Reads `#entity-tag` (RFC 9110 section 8.8.3), passing over empty elements (section 5.6.1.2).
///
/// The tags keep quotes and weakness mark. Splitting at commas would not do: a tag may contain one.
fn entity_tags(line: &[u8]) -> Option<Vec<&[u8]>> {
    let mut tags = Vec::new();
    let mut rest = line.trim_ascii();
    loop {
        if !matches!(rest, [] | [b',', ..]) {
            let (tag, after) = split_entity_tag(rest)?;
            tags.push(tag);
            rest = after.trim_ascii_start();
        }
        rest = match rest {
            [] => return Some(tags),
            [b',', after @ ..] => after.trim_ascii_start(),
            _ => return None,
        };
    }
}

/// Splits `entity-tag = [ "W/" ] DQUOTE *etagc DQUOTE` off the front.
fn split_entity_tag(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let inside = text
        .strip_prefix(b"W/")
        .unwrap_or(text)
        .strip_prefix(b"\"")?;
    let is_etagc = |byte: &u8| matches!(byte, 0x21 | 0x23..=0x7e | 0x80..);
    let close = inside.iter().position(|byte| !is_etagc(byte))?;
    let after = inside.get(close..)?.strip_prefix(b"\"")?;
    text.split_at_checked(text.len() - after.len())
}

const WEEKDAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];

const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];

/// Reads an `HTTP-date` in any of its three forms (RFC 9110 section 5.6.7) as seconds since the
/// Unix epoch, negative before it.
///
/// The section asks recipients to be robust. So a weekday must be named but need not be the right
/// one, which clients that write a date by hand get wrong, and the forms may be mixed. There is no
/// clock here to say which century a year of two digits means, so they turn over at 70.
fn http_date(field: &[u8]) -> Option<i64> {
    let words: Vec<&str> = str::from_utf8(field).ok()?.split([' ', '-']).collect();
    let (weekday, day, month, year, time) = match words.as_slice() {
        // `Sun, 06 Nov 1994 08:49:37 GMT` or `Sunday, 06-Nov-94 08:49:37 GMT`
        [weekday, day, month, year, time, "GMT"] => {
            (weekday.strip_suffix(',')?, day, month, year, time)
        }
        // `Sun Nov  6 08:49:37 1994`
        [weekday, month, "", day, time, year] | [weekday, month, day, time, year] => {
            (*weekday, day, month, year, time)
        }
        _ => return None,
    };
    let has_this_name = |name: &&str| *name == weekday || name.get(..3) == Some(weekday);
    if !WEEKDAYS.iter().any(has_this_name) {
        return None;
    }
    let year = match (year.len(), digits(year)?) {
        (4, year) => year,
        (2, year @ 70..) => 1900 + year,
        (2, year) => 2000 + year,
        _ => return None,
    };
    let days = days_since_epoch(year, month, digits(day)?)?;
    Some(days * 86_400 + second_of_day(time)?)
}

/// Reads `hh:mm:ss`; the second may be 60, as a leap second is.
fn second_of_day(time: &str) -> Option<i64> {
    let (hour, rest) = time.split_once(':')?;
    let (minute, second) = rest.split_once(':')?;
    if [hour, minute, second].iter().any(|part| part.len() != 2) {
        return None;
    }
    let (hour, minute, second) = (digits(hour)?, digits(minute)?, digits(second)?);
    let exists = hour < 24 && minute < 60 && second <= 60;
    exists.then_some((hour * 60 + minute) * 60 + second)
}

/// The days from 1970-01-01 to a day of the Gregorian calendar, or `None` if there is no such day.
fn days_since_epoch(year: i64, month: &str, day: i64) -> Option<i64> {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let february = if is_leap { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];

    let month = MONTHS.iter().position(|name| *name == month)?;
    if !(1..=*lengths.get(month)?).contains(&day) {
        return None;
    }
    let earlier_months: i64 = lengths.iter().take(month).sum();
    // The leap days of all earlier years since the year 0, itself a leap year.
    let leap_days = |year: i64| (year + 3) / 4 - (year + 99) / 100 + (year + 399) / 400;
    Some((year - 1970) * 365 + leap_days(year) - leap_days(1970) + earlier_months + day - 1)
}

/// Reads one to four digits.
fn digits(text: &str) -> Option<i64> {
    if !(1..=4).contains(&text.len()) {
        return None;
    }
    text.bytes().try_fold(0, |number, digit| {
        digit
            .is_ascii_digit()
            .then(|| number * 10 + i64::from(digit - b'0'))
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use proptest::prelude::*;

    use super::*;

    /// `Sun, 06 Nov 1994 08:49:37 GMT`, the example of RFC 9110 section 5.6.7.
    const EXAMPLE_S: i64 = 784_111_777;

    #[test]
    fn the_three_forms_of_a_date_name_the_same_second() {
        for form in [
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
        ] {
            assert_eq!(http_date(form.as_bytes()), Some(EXAMPLE_S), "{form}");
        }
    }

    #[test]
    fn a_wrong_weekday_does_not_spoil_a_date() {
        assert_eq!(http_date(b"Fri, 06 Nov 1994 08:49:37 GMT"), Some(EXAMPLE_S));
    }

    #[test]
    fn dates_reach_back_before_the_epoch_and_over_leap_days() {
        for (text, expected_s) in [
            ("Sat, 01 Jan 0000 00:00:00 GMT", -62_167_219_200),
            ("Mon, 01 Jan 1900 00:00:00 GMT", -2_208_988_800),
            ("Wed, 31 Dec 1969 23:59:59 GMT", -1),
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Tue, 29 Feb 2000 12:00:00 GMT", 951_825_600),
            ("Sat, 31 Dec 2016 23:59:60 GMT", 1_483_228_800),
            ("Friday, 31-Dec-69 23:59:59 GMT", 3_155_759_999),
            ("Thursday, 01-Jan-70 00:00:00 GMT", 0),
            ("Tue Dec 31 23:59:59 2019", 1_577_836_799),
            ("Mon, 01 Mar 2100 00:00:00 GMT", 4_107_542_400),
            ("Fri, 31 Dec 9999 23:59:59 GMT", 253_402_300_799),
        ] {
            assert_eq!(http_date(text.as_bytes()), Some(expected_s), "{text}");
        }
    }

    #[test]
    fn what_is_no_date_is_not_read_as_one() {
        for text in [
            "",
            "yesterday",
            "784111777",
            "06 Nov 1994 08:49:37 GMT",
            "Xyz, 06 Nov 1994 08:49:37 GMT",
            "Sun 06 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 06 Nov 1994 08:49:37 GMT,",
            "Sun, 06 nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 8:49:37 GMT",
            "Sun, 06 Nov 1994 24:00:00 GMT",
            "Sun, 06 Nov 1994 08:60:00 GMT",
            "Sun, 06 Nov 1994 08:49:61 GMT",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 31 Nov 1994 08:49:37 GMT",
            "Thu, 29 Feb 2100 00:00:00 GMT",
            "Sun, 06 Nov 994 08:49:37 GMT",
            "Sun, 06 Nov 19940 08:49:37 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994 GMT",
        ] {
            assert_eq!(http_date(text.as_bytes()), None, "{text}");
        }
        assert_eq!(http_date(b"Sun, 06 Nov 1994 08:49:37 GMT\xff"), None);
    }

    #[test]
    fn a_list_of_tags_keeps_commas_weakness_and_bytes_beyond_ascii() {
        let line = b" ,W/\"a,b\" ,\t\"\",, \"\xfc*\" ,";
        let tags: [&[u8]; 3] = [b"W/\"a,b\"", b"\"\"", b"\"\xfc*\""];
        assert_eq!(entity_tags(line), Some(tags.to_vec()));
        assert_eq!(entity_tags(b""), Some(Vec::new()));
    }

    #[test]
    fn what_is_no_list_of_tags_is_not_read_as_one() {
        for line in [
            "a",
            "\"a",
            "a\"",
            "\"a\"b",
            "\"a\" \"b\"",
            "w/\"a\"",
            "W/ \"a\"",
            "W\\\"a\"",
            "W/a",
            "\"a b\"",
            "\"a\", *",
            "\"a\"; \"b\"",
            "\"a\tb\"",
            "\"a\", \"b",
        ] {
            assert_eq!(entity_tags(line.as_bytes()), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn every_date_that_is_written_is_read_back(second in 0_u64..253_402_300_800) {
            let written = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(second));
            prop_assert_eq!(http_date(written.as_bytes()), i64::try_from(second).ok());
        }
    }
}
