//! Answers that refuse.

use std::fmt;
use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde::Deserialize;

use super::http::read_short;

/// The bounds of what a server can ask for with `Retry-After`.
const PAUSES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(200)..=Duration::from_secs(60);

/// An answer that was not the one hoped for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The status of the answer.
    pub status: u16,
    /// The name of the problem (`link-expired`), if the server says one (RFC 9457).
    pub problem: Option<String>,
    /// How long to wait before the next try, where the server says that: 200 ms to a minute.
    pub retry_after: Option<Duration>,
    sentence: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

#[derive(Deserialize)]
struct Problem {
    #[serde(rename = "type", default)]
    kind: String,
    detail: String,
}

impl Refusal {
    /// Whether it may be otherwise soon.
    pub fn is_passing(&self) -> bool {
        matches!(self.status, 408 | 425 | 429 | 500..)
    }

    pub(super) async fn read(response: Response) -> Refusal {
        let status = response.status();
        let retry_after = retry_after(response.headers());
        let is_problem = response
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/problem+json"));
        let location = response
            .headers()
            .get(LOCATION)
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        let body = read_short(response).await.unwrap_or_default();
        let problem = serde_json::from_slice::<Problem>(&body)
            .ok()
            .filter(|_| is_problem);
        let sentence = sentence(status, problem.as_ref(), location);
        let name = |problem: Problem| Some(problem.kind.strip_prefix("/problems/")?.to_owned());
        Refusal {
            status: status.as_u16(),
            problem: problem.and_then(name),
            retry_after,
            sentence,
        }
    }
}

fn sentence(status: StatusCode, problem: Option<&Problem>, location: Option<String>) -> String {
    match (problem, location) {
        (Some(problem), _) => format!("the server says: {}", problem.detail),
        (None, Some(location)) if status.is_redirection() => {
            let location = location.split(['?', '#']).next().unwrap_or_default();
            format!("the server sends elsewhere; if it can be trusted, ask {location}")
        }
        (None, _) => format!(
            "the server answered {status}, which is not an answer of ibid's; look whether this \
             is its address"
        ),
    }
}

/// How long the server asks to wait, within bounds.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).clamp(*PAUSES.start(), *PAUSES.end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_what_the_server_asks_for_within_bounds() {
        let pause = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, value.parse().unwrap());
            retry_after(&headers)
        };
        assert_eq!(pause("5"), Some(Duration::from_secs(5)));
        assert_eq!(pause("0"), Some(Duration::from_millis(200)));
        assert_eq!(pause("86400"), Some(Duration::from_secs(60)));
        assert_eq!(pause("soon"), None);
    }

    #[test]
    fn a_redirect_is_named_without_what_may_be_secret_in_it() {
        let to = Some("https://elsewhere.example/x?sig=hunter2".to_owned());
        let sentence = sentence(StatusCode::FOUND, None, to);
        assert!(
            sentence.ends_with("ask https://elsewhere.example/x"),
            "{sentence}"
        );
    }
}
