//! The cases of `ranges.tsv`: what other servers answer, and what we do where RFC 9110 says
//! otherwise.
//!
//! A row may describe its request or its answer in words (`now+60s`, `10 parts`); here they are
//! spelt out. What a row's note says of other fields of the response is for the handler to keep.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use http::HeaderMap;

use super::{ByteRange, ETAG, LAST_MODIFIED_S, Plan, Representation, bytes, header_map};

/// Stands for the length of a file where a row says `N` or nothing.
const ANY_LENGTH: u64 = 2000;

/// One line of the file, in its columns but for `source`, `note` and `rfc9110`.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    pub case_id: &'a str,
    pub method: &'a str,
    resource_size: &'a str,
    request_headers: &'a str,
    expected_status: &'a str,
    expected_content_range: &'a str,
    expected_body_slice: &'a str,
    recommended_answer: &'a str,
}

impl<'a> Row<'a> {
    pub fn parse(line: &'a str) -> Self {
        let columns: Vec<&str> = line.split('\t').collect();
        let [
            case_id,
            _,
            method,
            size,
            headers,
            status,
            content_range,
            slice,
            _,
            _,
            answer,
        ] = columns[..]
        else {
            panic!("{} columns, not 11: {line}", columns.len());
        };
        Self {
            case_id,
            method,
            resource_size: size,
            request_headers: headers,
            expected_status: status,
            expected_content_range: content_range,
            expected_body_slice: slice,
            recommended_answer: answer,
        }
    }

    /// Why a planner cannot judge the row, if it cannot.
    pub fn other_layer(&self) -> Option<&'static str> {
        if self.request_headers.starts_with("query") {
            return Some("the signature in the address is checked before there is a plan");
        }
        if !["GET", "HEAD", "parse"].contains(&self.method) {
            return Some("the router refuses other methods");
        }
        if self.request_headers.contains("plain proxy") {
            return Some("a proxy, which is not the origin and so evaluates no condition");
        }
        match self.case_id {
            "own-001" | "own-003" | "own-004" | "own-005" | "own-013" => {
                Some("the link and the state of the job are checked before there is a plan")
            }
            "ng-r-017" | "ap-m-004" | "ap-m-006" | "ap-m-008" | "ap-m-009" => {
                Some("hangs on that server's own setting for the number of ranges; ours is 16")
            }
            "ct-008" => Some("what a cache asks its origin for when the client wants no range"),
            "rb-008" => Some("no request: says on which statuses Content-Range must be absent"),
            _ => None,
        }
    }

    pub fn representation(&self) -> Representation<'a> {
        let length = match self.resource_size {
            "unknown or 0" => 0,
            size => size.parse().unwrap_or(ANY_LENGTH),
        };
        // Ours are strong tags: that a peer's current one is weak changes none of the answers.
        let current = self.request_headers.split_once("(current ");
        let current = current.and_then(|(_, tag)| tag.strip_suffix(')'));
        let etag = match (self.case_id, current) {
            (_, Some(tag)) => tag.strip_prefix("W/").unwrap_or(tag),
            ("ng-fr-005", None) => "\"59a5401c-8\"",
            ("wz-ir-002", None) => "\"Test\"",
            ("ct-014", None) => "\"abcdefü\"",
            (id, None) if id.starts_with("ct-") => "\"abcdef\"",
            (_, None) => ETAG,
        };
        let last_modified_s = match self.case_id {
            // `Mon, 28 Sep 1970 06:00:00 GMT`
            "ng-fr-004" | "ng-ir-005" => 23_349_600,
            "wz-ir-004" => 0,
            _ => LAST_MODIFIED_S,
        };
        Representation {
            length,
            etag,
            last_modified_s,
        }
    }

    pub fn headers(&self, representation: &Representation) -> HeaderMap {
        let text = match self.case_id {
            // What If-Range means shows only beside a Range.
            "wz-ir-002" | "wz-ir-003" | "wz-ir-004" | "wz-ir-005" => {
                format!("Range: bytes=0-4; {}", self.request_headers)
            }
            // Numbers, to be tried behind the unit.
            "wz-p-014" | "wz-p-015" => self.request_headers.replace(": ", ": bytes="),
            "wz-m-004" => "Range: bytes=0-4; If-Range: $LM-1800s".to_owned(),
            "own-011" => "Range: bytes=<17 disjoint 2-byte ranges at i*100>".to_owned(),
            "own-012" => "Range: bytes=0-4; Range: bytes=0-4".to_owned(),
            _ => self.request_headers.to_owned(),
        };
        let fields: Vec<(&str, Vec<u8>)> = text
            .split("; ")
            .filter_map(|field| field.split_once(':'))
            .map(|(name, value)| (name, spell_value(without_remark(value), representation)))
            .collect();
        let has_none = text == "(none)" || text == "(no Range)";
        assert!(
            has_none || !fields.is_empty(),
            "{}: no field in {text:?}",
            self.case_id
        );
        header_map(&fields)
    }

    pub fn expected(&self) -> Expected {
        let expected = [
            self.expected_status,
            self.expected_content_range,
            self.expected_body_slice,
        ]
        .join(" ");
        let answer = if self.recommended_answer.is_empty() {
            expected.as_str()
        } else {
            self.recommended_answer
        };
        let status = answer.split(' ').find_map(|word| word.parse::<u16>().ok());
        match (status, self.expected_status) {
            (Some(200), _) | (_, "not 304") => Expected::Whole,
            (Some(304), _) => Expected::NotModified,
            (Some(412), _) => Expected::PreconditionFailed,
            (Some(416), _) => Expected::NotSatisfiable,
            (Some(206), _) => Expected::Partial(self.expected_ranges(answer)),
            // Here the peer only parses the field, and this is what it reads.
            (None, "parse") if self.expected_body_slice == "52-99" => {
                Expected::Partial(vec![bytes(52, 99)])
            }
            (None, "parse") if self.expected_body_slice == "date" => {
                Expected::Partial(vec![bytes(0, 4)])
            }
            (None, "parse" | "invalid" | "no ranges" | "modified => full" | "ignored => 200") => {
                Expected::Whole
            }
            _ => panic!("{}: cannot read the answer {answer:?}", self.case_id),
        }
    }

    fn expected_ranges(&self, answer: &str) -> Vec<ByteRange> {
        let slices = match self.case_id {
            "th-006" => "0-0;2-2",
            "ap-7-003" => return (0..10).map(|i| bytes(100 * i, 100 * i + 1)).collect(),
            "ap-m-001" | "ap-m-005" => "0-100",
            "ap-m-007" => "0-100;200-300",
            "wz-w-003" => "0-1999",
            rb if rb.starts_with("rb-") => "100-150",
            _ => {
                let words: Vec<&str> = answer.split(' ').collect();
                let multipart = words
                    .iter()
                    .find_map(|word| word.strip_prefix("multipart:"));
                let after_unit = words.iter().skip_while(|word| **word != "bytes").nth(1);
                let content_range = after_unit.and_then(|word| word.split('/').next());
                multipart
                    .or(content_range)
                    .unwrap_or(self.expected_body_slice)
            }
        };
        let range = |slice: &str| {
            let (first, last) = slice.split_once('-')?;
            Some(bytes(first.parse().ok()?, last.parse().ok()?))
        };
        let ranges: Option<Vec<ByteRange>> = slices.split(';').map(range).collect();
        ranges.unwrap_or_else(|| panic!("{}: cannot read the ranges {slices:?}", self.case_id))
    }
}

/// The answer of a row, with a 206 of one range and of several told apart by their number only.
#[derive(Debug, PartialEq)]
pub enum Expected {
    NotModified,
    PreconditionFailed,
    NotSatisfiable,
    Whole,
    Partial(Vec<ByteRange>),
}

impl From<Plan> for Expected {
    fn from(plan: Plan) -> Self {
        match plan {
            Plan::NotModified => Self::NotModified,
            Plan::PreconditionFailed => Self::PreconditionFailed,
            Plan::NotSatisfiable => Self::NotSatisfiable,
            Plan::Whole => Self::Whole,
            Plan::One(range) => Self::Partial(vec![range]),
            Plan::Many(ranges) => Self::Partial(ranges),
        }
    }
}

/// Takes off a remark in brackets at the end; a value that is all remark is empty.
fn without_remark(value: &str) -> &str {
    let Some(start) = value.find(" (").filter(|_| value.ends_with(')')) else {
        return value.trim();
    };
    value[..start].trim()
}

/// Turns the words and variables of a field value into what a client would send.
fn spell_value(value: &str, representation: &Representation) -> Vec<u8> {
    let last_modified_s = representation.last_modified_s;
    if let Some(shift) = value.strip_prefix("$LM").or(value.strip_prefix("$L")) {
        let shift_s = shift.trim_end_matches('s').parse().unwrap_or(0);
        return date(last_modified_s + shift_s).into_bytes();
    }
    match value {
        "now+60s" => return date(last_modified_s + 60).into_bytes(),
        "= LM" => return date(last_modified_s).into_bytes(),
        "> LM" => return date(last_modified_s + 1).into_bytes(),
        "same instant in RFC 850 form" => return b"Tuesday, 14-Nov-23 22:13:20 GMT".to_vec(),
        "epoch" => return date(0).into_bytes(),
        "1994" | "1996" | "older" => return date(800_000_000).into_bytes(),
        "2100" => return date(4_102_444_800).into_bytes(),
        "<0xFF>" => return b"\xff".to_vec(),
        "bytes=~204 small repeated ranges" => {
            return format!("bytes={}", "0-1,".repeat(204)).into();
        }
        _ => {}
    }
    if let Some((count, _)) = value
        .strip_prefix("bytes=<")
        .and_then(|rest| rest.split_once(" disjoint 2-byte ranges at i*100>"))
    {
        let count: u64 = count.parse().unwrap();
        let specs: Vec<String> = (0..count)
            .map(|i| format!("{}-{}", 100 * i, 100 * i + 1))
            .collect();
        return format!("bytes={}", specs.join(",")).into_bytes();
    }
    let etag = representation.etag;
    let spelt = value
        .replace("$ETAG minus closing quote", etag.trim_end_matches('"'))
        .replace("$ETAG", etag)
        .replace("$E", etag)
        .replace(
            "(N-1)",
            &representation.length.saturating_sub(1).to_string(),
        )
        .replace("<random a>-<a+k>", "100-150")
        .replace("<TAB>", "\t")
        // A tag of ours is text, so here the byte beyond ASCII is two of UTF-8.
        .replace("<0xFC>", "ü")
        .replace("<non-ASCII digits>", "bytes=٣-٥");
    assert!(!spelt.contains(['$', '<', '(']), "cannot spell {value:?}");
    spelt.into_bytes()
}

fn date(second: i64) -> String {
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(second.try_into().unwrap()))
}

/// The file in the shared folder, which stands beside the repository unless `IBID_SHARED` names it.
#[expect(
    clippy::disallowed_methods,
    reason = "a test's own variable, which is no setting"
)]
pub fn table_path() -> PathBuf {
    let beside = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared"));
    std::env::var_os("IBID_SHARED")
        .map_or_else(beside, PathBuf::from)
        .join("cases/ranges.tsv")
}
