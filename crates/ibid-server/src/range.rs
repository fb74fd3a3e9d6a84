//! Plans the answer to a GET or HEAD of an artefact: which status, which bytes.
//!
//! Conditional and range requests as RFC 9110 sections 13 and 14 have them, decided from the header
//! fields of the request and three facts about the file. Nothing here reads a byte or a clock.

mod conditions;
#[cfg(test)]
mod tests;

use http::HeaderMap;
use http::header::RANGE;

/// The most ranges of one request, satisfiable or not; a request for more gets the whole.
///
/// A server may ignore any `Range` (RFC 9110 section 14.2) and should ignore one that asks for a
/// great many (section 17.15).
const MAX_SPECS: usize = 16;

/// The most ranges of one request that may share a byte; where more do, the client gets the whole.
///
/// RFC 9110 section 14.2 names "more than two overlapping ranges" as a sign of a broken or hostile
/// client.
const MAX_SHARERS: usize = 2;

/// What the resource is now.
///
/// The representation must be immutable: as long as `last_modified_s` is the same, so are the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Representation<'a> {
    /// Its complete length in bytes.
    pub length: u64,
    /// Its strong entity-tag with the quotes, as it stands in `ETag` (RFC 9110 section 8.8.3).
    pub etag: &'a str,
    /// Its `Last-Modified` in seconds since the Unix epoch (RFC 9110 section 8.8.2).
    pub last_modified_s: i64,
}

/// What to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// 304: the client has this representation (RFC 9110 section 15.4.5).
    NotModified,
    /// 412: the client asked for another representation (RFC 9110 section 15.5.13).
    PreconditionFailed,
    /// 416 with `Content-Range: bytes */LENGTH`: no range holds a byte (RFC 9110 section 15.5.17).
    NotSatisfiable,
    /// 200 with every byte.
    Whole,
    /// 206 with `Content-Range` (RFC 9110 section 15.3.7.1).
    One(ByteRange),
    /// 206 as `multipart/byteranges` (RFC 9110 section 15.3.7.2).
    ///
    /// Two ranges or more, in the client's order, with at least one byte left out between any two.
    Many(Vec<ByteRange>),
}

/// The bytes from `first` to `last`, both included and inside the representation; never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRange {
    /// Offset of the first byte.
    pub first: u64,
    /// Offset of the last byte, at least `first`.
    pub last: u64,
}

impl ByteRange {
    /// The number of bytes, at least 1.
    pub fn length(self) -> u64 {
        self.last.saturating_sub(self.first).saturating_add(1)
    }

    fn contains(self, offset: u64) -> bool {
        (self.first..=self.last).contains(&offset)
    }
}

/// Decides the answer to a GET or HEAD that would otherwise be a 200 with the whole `representation`.
///
/// The order is that of RFC 9110 section 13.2.2; the first that applies answers:
///
/// | Plan | When |
/// |---|---|
/// | `PreconditionFailed` | `If-Match` names other tags (strong comparison); without `If-Match`: `If-Unmodified-Since` is earlier than `Last-Modified` |
/// | `NotModified` | `If-None-Match` names the tag (weak comparison); without `If-None-Match`: `If-Modified-Since` is not earlier than `Last-Modified` |
/// | `Whole` | HEAD; an empty representation; `Range` absent, doubled, malformed, in another unit than bytes or asking too much; `If-Range` doubled, malformed or not a strong match |
/// | `NotSatisfiable` | no range of the set holds a byte |
/// | `One`, `Many` | otherwise |
///
/// "Too much" is more than 16 ranges, or three that share a byte. Ranges that overlap or touch are
/// joined (section 15.3.7.2), the result standing where its first piece stood. An empty
/// representation is sent whole because no `Content-Range` can describe zero bytes (section 14.4).
pub fn plan(method_is_head: bool, headers: &HeaderMap, representation: &Representation) -> Plan {
    if !conditions::hold(headers, representation) {
        return Plan::PreconditionFailed;
    }
    if conditions::client_is_current(headers, representation) {
        return Plan::NotModified;
    }
    // RFC 9110 section 14.2: Range is defined for GET alone, and a server must ignore it elsewhere.
    if method_is_head
        || representation.length == 0
        || !conditions::range_applies(headers, representation)
    {
        return Plan::Whole;
    }
    conditions::sole(headers, &RANGE)
        .and_then(RangeSet::parse)
        .map_or(Plan::Whole, |set| set.resolve(representation.length))
}

/// A well-formed `bytes` range set of 1 to [`MAX_SPECS`] ranges, in the order of the request.
struct RangeSet(Vec<RangeSpec>);

impl RangeSet {
    /// Reads the value of `Range` (RFC 9110 section 14.2), or `None` where the field is to be
    /// ignored: another unit, a syntax error, a range that ends before it begins, or too many.
    ///
    /// One bad range spoils the set (section 14.1.1).
    fn parse(field: &[u8]) -> Option<Self> {
        let (unit, set) = str::from_utf8(field).ok()?.split_once('=')?;
        if !unit.eq_ignore_ascii_case("bytes") {
            return None;
        }
        let specs = set
            .split(',')
            .map(str::trim_ascii)
            // A recipient must pass over empty list elements (RFC 9110 section 5.6.1.2).
            .filter(|element| !element.is_empty())
            // One more than allowed is enough to know that there are too many.
            .take(MAX_SPECS + 1)
            .map(RangeSpec::parse)
            .collect::<Option<Vec<_>>>()?;
        (1..=MAX_SPECS)
            .contains(&specs.len())
            .then_some(Self(specs))
    }

    /// Lays the set over a representation of `length` bytes.
    fn resolve(&self, length: u64) -> Plan {
        let wanted: Vec<ByteRange> = self
            .0
            .iter()
            .filter_map(|spec| spec.resolve(length))
            .collect();
        if shared_too_often(&wanted) {
            return Plan::Whole;
        }
        let joined = join(wanted);
        match joined.as_slice() {
            [] => Plan::NotSatisfiable,
            [one] => Plan::One(*one),
            [_, _, ..] => Plan::Many(joined),
        }
    }
}

/// One element of a `bytes` range set (RFC 9110 section 14.1.2).
#[derive(Clone, Copy)]
enum RangeSpec {
    /// `first-last` with `first <= last`, or `first-`, which ends at `u64::MAX`.
    FromTo { first: u64, last: u64 },
    /// `-length`: so many bytes at the end.
    Suffix { length: u64 },
}

impl RangeSpec {
    fn parse(element: &str) -> Option<Self> {
        match element.split_once('-')? {
            ("", length) => Some(Self::Suffix {
                length: number(length)?,
            }),
            (first, "") => Some(Self::FromTo {
                first: number(first)?,
                last: u64::MAX,
            }),
            (first, last) => {
                // As they are written, so that two beyond `u64::MAX` are told apart too.
                let is_ordered = magnitude(first) <= magnitude(last);
                let (first, last) = (number(first)?, number(last)?);
                is_ordered.then_some(Self::FromTo { first, last })
            }
        }
    }

    /// The bytes meant in a representation of `length` bytes, or `None` when there are none.
    fn resolve(self, length: u64) -> Option<ByteRange> {
        let end = length.checked_sub(1)?;
        match self {
            Self::FromTo { first, last } => (first <= end).then_some(ByteRange {
                first,
                last: last.min(end),
            }),
            Self::Suffix { length: 0 } => None,
            Self::Suffix { length: suffix } => Some(ByteRange {
                first: length.saturating_sub(suffix),
                last: end,
            }),
        }
    }
}

/// Reads `1*DIGIT`.
///
/// A number beyond `u64::MAX` counts as that. No length is greater, so such an offset still lies
/// behind the last byte of anything, and such a suffix is still the whole.
fn number(digits: &str) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.bytes().try_fold(0_u64, |number, digit| {
        let value = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        Some(number.saturating_mul(10).saturating_add(value))
    })
}

/// What orders digits as the numbers that they stand for.
fn magnitude(digits: &str) -> (usize, &str) {
    let significant = digits.trim_start_matches('0');
    (significant.len(), significant)
}

/// Whether more than [`MAX_SHARERS`] of the ranges have a byte in common.
fn shared_too_often(ranges: &[ByteRange]) -> bool {
    // First bytes are all that need be looked at: the ranges that share any byte share the greatest
    // of their first bytes too. Comparing all with all is cheap, there being sixteen at most.
    ranges.iter().any(|range| {
        ranges
            .iter()
            .filter(|other| other.contains(range.first))
            .count()
            > MAX_SHARERS
    })
}

/// Joins ranges that overlap or touch, each result standing where its first piece stood.
fn join(ranges: Vec<ByteRange>) -> Vec<ByteRange> {
    let mut placed: Vec<(usize, ByteRange)> = ranges.into_iter().enumerate().collect();
    placed.sort_by_key(|(_, range)| range.first);

    let mut joined: Vec<(usize, ByteRange)> = Vec::with_capacity(placed.len());
    for (place, range) in placed {
        match joined.last_mut() {
            Some((first_place, before)) if range.first <= before.last.saturating_add(1) => {
                *first_place = place.min(*first_place);
                before.last = range.last.max(before.last);
            }
            _ => joined.push((place, range)),
        }
    }

    joined.sort_by_key(|(place, _)| *place);
    joined.into_iter().map(|(_, range)| range).collect()
}
