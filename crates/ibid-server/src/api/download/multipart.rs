//! Several ranges in one answer: `multipart/byteranges` (RFC 9110 section 14.6).

use bytes::Bytes;
use ibid::ids::RequestId;

use crate::range::ByteRange;

/// What stands between and around the bytes of the ranges.
#[derive(Clone, Debug)]
pub struct Multipart {
    boundary: String,
    /// The length of the whole representation.
    complete: u64,
}

impl Multipart {
    /// `boundary` must be one that nobody can know before, so that none stands in the bytes by
    /// design.
    pub fn new(boundary: RequestId, complete: u64) -> Multipart {
        Multipart {
            boundary: boundary.to_string(),
            complete,
        }
    }

    /// The value of `Content-Type`.
    pub fn content_type(&self) -> String {
        format!("multipart/byteranges; boundary={}", self.boundary)
    }

    /// The length of the whole body in bytes.
    pub fn content_length(&self, ranges: &[ByteRange]) -> u64 {
        let part = |range: &ByteRange| self.head(*range).len() as u64 + range.length();
        ranges.iter().map(part).sum::<u64>() + self.end().len() as u64
    }

    /// What stands before the bytes of a range. The line break in front of a delimiter is part of
    /// it (RFC 2046 section 5.1.1); the first one needs none, but is not harmed by it.
    pub fn head(&self, range: ByteRange) -> Bytes {
        let Multipart { boundary, complete } = self;
        let ByteRange { first, last } = range;
        Bytes::from(format!(
            "\r\n--{boundary}\r\nContent-Type: application/gzip\r\n\
             Content-Range: bytes {first}-{last}/{complete}\r\n\r\n"
        ))
    }

    /// What stands behind the last.
    pub fn end(&self) -> Bytes {
        Bytes::from(format!("\r\n--{}--\r\n", self.boundary))
    }
}
