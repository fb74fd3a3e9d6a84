//! What the head of an answer to a download says, and whether it can be believed.

use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, HeaderName,
};
use serde::{Deserialize, Serialize};

/// The file that an answer is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct About {
    /// Its complete length in bytes.
    pub(super) length: u64,
    /// Its strong entity-tag, which guards every request for a part of it (`If-Range`).
    pub(super) validator: Option<String>,
    /// SHA-256 of the whole, where the server says that (RFC 9530).
    #[serde(with = "hex_or_none")]
    pub(super) sha256: Option<[u8; 32]>,
}

impl About {
    /// Whether `later` can be about the same file.
    pub(super) fn agrees_with(&self, later: &About) -> bool {
        let same = |ours: &Option<[u8; 32]>, theirs: &Option<[u8; 32]>| match (ours, theirs) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => true,
        };
        self.length == later.length
            && self.validator == later.validator
            && same(&self.sha256, &later.sha256)
    }
}

/// What follows in the body.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Follows {
    /// Every byte.
    Whole(About),
    /// These bytes.
    Part(Range<u64>, About),
}

impl Follows {
    /// The file that they are of.
    pub(super) fn about_mut(&mut self) -> &mut About {
        match self {
            Follows::Whole(about) | Follows::Part(_, about) => about,
        }
    }
}

/// Reads the head of a 200, or of a 206 to a request for the bytes `asked`.
///
/// # Errors
/// It cannot be used, and why.
pub(super) fn read(
    is_partial: bool,
    headers: &HeaderMap,
    asked: Option<&Range<u64>>,
) -> Result<Follows, &'static str> {
    let encoding = sole(headers, &CONTENT_ENCODING)?;
    if encoding.is_some_and(|encoding| !encoding.eq_ignore_ascii_case("identity")) {
        return Err("somebody on the way has encoded the file once more");
    }
    let length = match sole(headers, &CONTENT_LENGTH)? {
        Some(text) => Some(number(text).ok_or("the length is no number")?),
        None => None,
    };
    let about = |length| About {
        length,
        validator: validator(headers),
        sha256: repr_digest(headers),
    };
    if !is_partial {
        // Without it an answer that breaks off could pass for a whole one.
        let length = length.ok_or("the length of the file is not said")?;
        return Ok(Follows::Whole(about(length)));
    }
    let asked = asked.ok_or("a part was sent where the whole was asked for")?;
    let kind = sole(headers, &CONTENT_TYPE)?.unwrap_or_default();
    if kind.starts_with("multipart/") {
        return Err("several parts were sent where one was asked for");
    }
    let range = sole(headers, &CONTENT_RANGE)?.and_then(content_range);
    let (span, complete) = range.ok_or("which part was sent is not said")?;
    if span.start != asked.start || span.end > asked.end {
        return Err("another part was sent than was asked for");
    }
    if length.is_some_and(|length| length != span.end - span.start) {
        return Err("the part and its length contradict each other");
    }
    Ok(Follows::Part(span, about(complete)))
}

/// The value of a field that may stand once.
fn sole<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, &'static str> {
    let mut lines = headers.get_all(name).iter();
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    if lines.next().is_some() {
        return Err("a header field stands twice");
    }
    let text = line.to_str().map_err(|_| "a header field is unreadable")?;
    Ok(Some(text.trim()))
}

/// Reads `bytes FIRST-LAST/LENGTH` (RFC 9110 section 14.4).
fn content_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (unit, rest) = text.split_once(' ')?;
    let (range, complete) = rest.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (number(first)?, number(last)?);
    let complete = number(complete)?;
    let is_one = unit.eq_ignore_ascii_case("bytes") && first <= last && last < complete;
    // A last byte before a length has a successor.
    is_one.then_some((first..last.saturating_add(1), complete))
}

fn number(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_number)
}

/// The entity-tag, if it is a strong one: only that names the same bytes (RFC 9110 section 8.8.1).
fn validator(headers: &HeaderMap) -> Option<String> {
    let tag = sole(headers, &ETAG).ok()??;
    let inside = tag.strip_prefix('"')?.strip_suffix('"')?;
    (!inside.contains('"')).then(|| tag.to_owned())
}

/// The SHA-256 in `Repr-Digest: sha-256=:BASE64:` (RFC 9530 section 3).
pub(super) fn repr_digest(headers: &HeaderMap) -> Option<[u8; 32]> {
    let lines = headers.get_all("repr-digest").iter();
    lines
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(','))
        .filter_map(|member| member.trim().strip_prefix("sha-256=:")?.strip_suffix(':'))
        .find_map(|digest| STANDARD.decode(digest).ok()?.try_into().ok())
}

/// Digests in the file of what is known, as everywhere: in hex.
mod hex_or_none {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(
        digest: &Option<[u8; 32]>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        digest.map(hex::encode).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<[u8; 32]>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else {
            return Ok(None);
        };
        let bytes = hex::decode(text).map_err(serde::de::Error::custom)?;
        let digest = bytes.try_into();
        digest
            .map(Some)
            .map_err(|_| serde::de::Error::custom("no SHA-256"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAG: &str = "\"abc\"";

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    fn about(length: u64) -> About {
        About {
            length,
            validator: Some(TAG.to_owned()),
            sha256: None,
        }
    }

    #[test]
    fn a_whole_file_says_its_length() {
        let head = headers(&[("content-length", "10"), ("etag", TAG)]);
        assert_eq!(read(false, &head, None), Ok(Follows::Whole(about(10))));
        // A server may ignore a range.
        assert_eq!(
            read(false, &head, Some(&(3..10))),
            Ok(Follows::Whole(about(10)))
        );
        for bad in [
            headers(&[("etag", TAG)]),
            headers(&[("content-length", "ten")]),
            headers(&[("content-length", "+1")]),
            headers(&[("content-length", "1"), ("content-length", "2")]),
            headers(&[("content-length", "1"), ("content-encoding", "gzip")]),
        ] {
            assert!(read(false, &bad, None).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_part_is_the_one_that_was_asked_for() {
        let asked = 3..10;
        let part = |range: &str, length: &str| {
            let head = headers(&[
                ("content-range", range),
                ("content-length", length),
                ("etag", TAG),
            ]);
            read(true, &head, Some(&asked))
        };
        assert_eq!(
            part("bytes 3-9/10", "7"),
            Ok(Follows::Part(3..10, about(10)))
        );
        // It may be shorter; then the rest is asked for.
        assert_eq!(
            part("bytes 3-4/10", "2"),
            Ok(Follows::Part(3..5, about(10)))
        );
        for (range, length) in [
            ("bytes 0-9/10", "10"),
            ("bytes 4-9/10", "6"),
            ("bytes 3-10/11", "8"),
            ("bytes 3-9/10", "6"),
            ("bytes 3-9/*", "7"),
            ("bytes 3-9/9", "7"),
            ("bytes */10", "7"),
            ("bytes 9-3/10", "7"),
            ("bytes 3-18446744073709551615/18446744073709551615", "7"),
            ("lines 3-9/10", "7"),
            ("bytes=3-9/10", "7"),
            ("3-9/10", "7"),
            ("", "7"),
        ] {
            assert!(part(range, length).is_err(), "{range}");
        }
        let head = headers(&[("content-length", "7")]);
        assert!(read(true, &head, Some(&asked)).is_err());
        let head = headers(&[
            ("content-range", "bytes 3-9/10"),
            ("content-type", "multipart/byteranges; boundary=x"),
        ]);
        assert!(read(true, &head, Some(&asked)).is_err());
        let head = headers(&[("content-range", "bytes 0-9/10")]);
        assert!(read(true, &head, None).is_err(), "nobody asked for a part");
    }

    #[test]
    fn only_a_strong_tag_guards_a_part() {
        for (tag, strong) in [
            (TAG, true),
            ("\"\"", true),
            ("W/\"abc\"", false),
            ("abc", false),
            ("\"a\", \"b\"", false),
        ] {
            let head = headers(&[("etag", tag)]);
            assert_eq!(validator(&head).is_some(), strong, "{tag}");
        }
    }

    #[test]
    fn the_digest_is_found_among_others() {
        let digest = STANDARD.encode([7; 32]);
        let line = format!("sha-512=:AAAA:, sha-256=:{digest}:");
        assert_eq!(
            repr_digest(&headers(&[("repr-digest", &line)])),
            Some([7; 32])
        );
        for bad in ["", "sha-256=:AAAA:", "sha-256=AAAA", "md5=:AAAA:"] {
            assert_eq!(
                repr_digest(&headers(&[("repr-digest", bad)])),
                None,
                "{bad}"
            );
        }
    }
}
