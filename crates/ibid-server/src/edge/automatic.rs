//! The answers of HTTP/1 that no route makes: what hyper says by itself, and what is said in its
//! place.

use std::time::{Duration, UNIX_EPOCH};

use http::header::{CONNECTION, DATE};
use http::{HeaderMap, HeaderValue};
use ibid::ids::RequestId;
use ibid::time::Clock;

use crate::api::carry;
use crate::api::problem::{Problem, kinds};

/// Why a request was answered before it was one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Automatic {
    Malformed,
    UriTooLong,
    HeadersTooLarge,
    Late,
}

/// The longest head that hyper writes by itself.
const LONGEST_BYTES: usize = 200;

/// Where in `written` the answer of hyper's own begins with which it ends, if it does, and what
/// it is. No head of ours is taken for one: they all have a request id.
pub fn at_end_of(written: &[u8]) -> Option<(usize, Automatic)> {
    if !written.ends_with(b"\r\n\r\n") {
        return None;
    }
    let from = written.len().saturating_sub(LONGEST_BYTES);
    let end = &written[from..];
    let at = end.windows(7).rposition(|start| start == b"HTTP/1.")?;
    let head = std::str::from_utf8(&end[at..]).ok()?;
    let mut lines = head.strip_suffix("\r\n\r\n")?.split("\r\n");
    let what = match lines.next()?.get(8..)? {
        " 400 Bad Request" => Automatic::Malformed,
        " 414 URI Too Long" => Automatic::UriTooLong,
        " 431 Request Header Fields Too Large" => Automatic::HeadersTooLarge,
        _ => return None,
    };
    let is_automatic = |line: &str| {
        matches!(line, "content-length: 0" | "connection: close") || line.starts_with("date: ")
    };
    lines.all(is_automatic).then_some((from + at, what))
}

/// The whole answer, after which the connection is closed.
pub fn words(what: Automatic) -> Vec<u8> {
    let problem = match what {
        Automatic::Malformed => Problem::malformed(
            "This is not a request of HTTP/1.1 or HTTP/2 as the server understands them; look at \
             what the client sends.",
        ),
        Automatic::UriTooLong => Problem::new(
            &kinds::URI_TOO_LONG,
            "The address of the request is longer than 64 KiB; no address of this service is.",
        ),
        Automatic::HeadersTooLarge => Problem::new(
            &kinds::HEADERS_TOO_LARGE,
            "Send at most 100 headers, and at most 64 KiB of them.",
        ),
        Automatic::Late => Problem::request_timeout(),
    };
    let Ok(id) = RequestId::random() else {
        return b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            .to_vec();
    };
    let id = id.to_string();
    tracing::debug!(?what, request_id = id, "answered what was no request");
    let mut headers = HeaderMap::new();
    let body = problem.write(&mut headers, &id);
    carry(&mut headers, &id);
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    if let Ok(date) = HeaderValue::from_str(&date()) {
        headers.insert(DATE, date);
    }
    let mut text = format!("HTTP/1.1 {}\r\n", problem.status()).into_bytes();
    for (name, value) in &headers {
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            text.extend_from_slice(piece);
        }
    }
    text.extend_from_slice(b"\r\n");
    text.extend_from_slice(body.as_bytes());
    text
}

fn date() -> String {
    let now = Clock::system().now().seconds();
    let since = Duration::from_secs(now.try_into().unwrap_or(0));
    httpdate::fmt_http_date(UNIX_EPOCH + since)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\n\
                       connection: close\r\ndate: Fri, 15 Jan 2027 12:00:00 GMT\r\n\r\n";

    #[test]
    fn only_a_whole_head_of_hypers_own_at_the_end_is_one() {
        let found = Some((0, Automatic::HeadersTooLarge));
        assert_eq!(at_end_of(OWN.as_bytes()), found);
        let behind = format!("HTTP/1.1 200 OK\r\nx-request-id: a\r\n\r\nbody{OWN}");
        let found = Some((behind.len() - OWN.len(), Automatic::HeadersTooLarge));
        assert_eq!(at_end_of(behind.as_bytes()), found);
        let padding = "x".repeat(1000);
        for other in [
            String::new(),
            "\r\n\r\n".to_owned(),
            OWN[1..].to_owned(),
            OWN[..OWN.len() - 1].to_owned(),
            format!("{OWN}x"),
            OWN.replace("431 Request Header Fields Too Large", "400 Request Header"),
            OWN.replace("431", "200"),
            OWN.replace("content-length: 0", "content-length: 10"),
            OWN.replace("date:", "x-request-id: a\r\ndate:"),
            OWN.replace("date:", &format!("x: {padding}\r\ndate:")),
            OWN.replace("date:", "\r\ndate:"),
        ] {
            assert_eq!(at_end_of(other.as_bytes()), None, "{other:?}");
        }
    }

    #[test]
    fn what_is_said_in_its_place_is_never_taken_for_one() {
        use Automatic::{HeadersTooLarge, Late, Malformed, UriTooLong};
        for what in [Malformed, UriTooLong, HeadersTooLarge, Late] {
            let words = words(what);
            let head = words.windows(4).position(|end| end == b"\r\n\r\n");
            let head = &words[..head.expect("a head") + 4];
            assert_eq!(at_end_of(head), None);
        }
    }
}
