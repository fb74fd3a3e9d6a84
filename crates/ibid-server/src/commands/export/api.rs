//! What the client says to the API, and how it takes the answers.

use std::time::Duration;

use ibid::export::State;
use reqwest::header::{
    AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER,
};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::sidecar::Remembered;
use crate::commands::http::{http_client, remote_client};
use crate::commands::{Exit, Failure};

/// The longest answer that is read, in bytes; a status is a few hundred.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

/// The bounds of what a server can ask for with `Retry-After`.
const PAUSES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(200)..=Duration::from_secs(60);

/// A server, and the token that is for it alone.
pub struct Api {
    base: Url,
    /// As `base`, without a slash at its end.
    text: String,
    token: HeaderValue,
    client: Client,
}

/// An answer that was not the one hoped for.
#[derive(Debug)]
pub struct Refusal {
    pub failure: Failure,
    /// Whether the server has certainly not done what it was asked for.
    pub undone: bool,
    /// Whether it may be another one soon.
    pub passing: bool,
    pub retry_after: Option<Duration>,
}

/// The answer to a request for an export.
#[derive(Debug, Deserialize)]
pub struct Created {
    pub job_id: String,
    pub replayed: bool,
}

/// How far an export is. Members that are not needed here may come and go.
#[derive(Deserialize)]
pub struct Status {
    pub state: State,
    pub progress: Progress,
    pub error: Option<Reason>,
    pub waiting: Option<Reason>,
    pub revoked: Option<Revoked>,
    sha256: Option<String>,
    bytes: Option<u64>,
    messages: Option<u64>,
    download: Option<Link>,
}

#[derive(Debug, Deserialize)]
pub struct Progress {
    pub messages_done: u64,
    pub messages_total: Option<u64>,
}

#[derive(Debug, Deserialize)]
pub struct Reason {
    pub detail: String,
}

#[derive(Debug, Deserialize)]
pub struct Revoked {
    pub by: String,
    pub reason: String,
}

/// Has no `Debug`: whoever has it can download.
#[derive(Deserialize)]
struct Link {
    url: String,
}

/// What is to be downloaded.
/// Has no `Debug`, because of the link.
#[derive(Clone)]
pub struct Artefact {
    pub sha256: String,
    pub bytes: u64,
    pub messages: u64,
    /// Absolute, or a path of the server.
    pub url: String,
}

impl Status {
    /// The artefact of an export that is done.
    pub fn artefact(&self) -> Option<Artefact> {
        Some(Artefact {
            sha256: self.sha256.clone()?,
            bytes: self.bytes?,
            messages: self.messages?,
            url: self.download.as_ref()?.url.clone(),
        })
    }
}

impl Api {
    /// The API at `server`.
    ///
    /// # Errors
    /// `server` is no address of one, or `token` cannot be one.
    pub fn new(server: &str, token: &str) -> Result<Api, Failure> {
        let base = parse_server(server).ok_or_else(|| {
            Failure::usage(
                "the server must be an http or https URL without user, query and fragment, such \
                 as https://chat.example; correct --server",
            )
        })?;
        let token_is_good = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        let mut bearer = HeaderValue::from_str(&format!("Bearer {token}"))
            .ok()
            .filter(|_| token_is_good)
            .ok_or_else(|| {
                Failure::usage(
                    "the token must be visible ASCII without spaces; copy it again, or make one \
                     with `ibid token create`",
                )
            })?;
        bearer.set_sensitive(true);
        Ok(Api {
            text: base.as_str().trim_end_matches('/').to_owned(),
            client: client_for(&base)?,
            base,
            token: bearer,
        })
    }

    /// The address of the server in its one spelling.
    pub fn base(&self) -> &str {
        &self.text
    }

    /// Whether the token can be read on its way.
    pub fn is_exposed(&self) -> bool {
        self.base.scheme() == "http" && !is_this_machine(&self.base)
    }

    /// Asks for an export.
    ///
    /// # Errors
    /// The server refuses or does not answer.
    pub async fn create(&self, request: &Remembered) -> Result<Created, Refusal> {
        let body = json!({"scope": request.scope}).to_string();
        let sent = self
            .client
            .post(format!("{}/exports", self.text))
            .header(AUTHORIZATION, self.token.clone())
            .header("Idempotency-Key", &request.key)
            .header(CONTENT_TYPE, "application/json")
            .body(body);
        let (created, _) = self.ask(sent).await?;
        Ok(created)
    }

    /// Asks how far a job is; also gives when to ask again.
    ///
    /// # Errors
    /// The server refuses or does not answer.
    pub async fn status(&self, job: &str) -> Result<(Status, Option<Duration>), Refusal> {
        let job = ibid::link::percent_encode(job);
        let sent = self
            .client
            .get(format!("{}/exports/{job}", self.text))
            .header(AUTHORIZATION, self.token.clone());
        self.ask(sent).await
    }

    /// Begins to download. The link says all that the server has to know, and may lead to
    /// another host, so the token is not sent. The server may send on to the store of its files,
    /// once; that gets nothing but what is in the address.
    ///
    /// # Errors
    /// The server or the store refuses, does not answer, or offers another file.
    pub async fn download(&self, artefact: &Artefact) -> Result<Response, Failure> {
        let url = resolve(&self.text, &artefact.url).ok_or_else(|| {
            Failure::failed("the server gave a download link that is none; look at its public_url")
        })?;
        let client = client_for(&url)?;
        let mut response = send(client.get(url.clone())).await.map_err(|e| e.failure)?;
        if response.status() == StatusCode::TEMPORARY_REDIRECT {
            response = from_store(&url, &response).await?;
        } else if response.status() != StatusCode::OK {
            return Err(refusal(response).await.failure);
        }
        let length = number(response.headers(), CONTENT_LENGTH.as_str());
        if length != Some(artefact.bytes) {
            return Err(Failure::failed(format!(
                "the server offers another file than the export, which has {} bytes; run the \
                 same command again",
                artefact.bytes
            )));
        }
        Ok(response)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
    ) -> Result<(T, Option<Duration>), Refusal> {
        let response = send(request.timeout(Duration::from_secs(60))).await?;
        if !response.status().is_success() {
            return Err(refusal(response).await);
        }
        let pause = retry_after(response.headers());
        let body = read(response).await.map_err(|e| silent(&e))?;
        let answer = serde_json::from_slice(&body).map_err(|_| Refusal {
            failure: Failure::failed(
                "the server's answer is not one of ibid's; look whether --server is its address",
            ),
            undone: false,
            passing: false,
            retry_after: None,
        })?;
        Ok((answer, pause))
    }
}

/// Begins to download where the server sends on to. What the store answers is not shown: it may
/// say how the address was signed.
async fn from_store(link: &Url, response: &Response) -> Result<Response, Failure> {
    let place = elsewhere(link, response.headers()).ok_or_else(|| {
        Failure::failed(
            "the server sends on to an address that is none or is not safe (https must not lead \
             to http); look at how it reaches its object store",
        )
    })?;
    let host = place.host_str().unwrap_or_default().to_owned();
    let response = client_for(&place)?.get(place).send().await.map_err(|e| {
        let message = format!(
            "the store at {host}, to which the server sends on, cannot be reached: {}; look \
             whether this machine can reach it, then run the same command again",
            cause(&e)
        );
        Failure::new(Exit::Unreachable, message)
    })?;
    let status = response.status();
    if status == StatusCode::OK {
        return Ok(response);
    }
    let exit = match status.is_server_error() {
        true => Exit::Unreachable,
        false => Exit::Refused,
    };
    let message = format!(
        "the store at {host}, to which the server sends on, answered {status}; run the same \
         command again"
    );
    Err(Failure::new(exit, message))
}

/// Where an answer to `link` sends on to: an address of its own, whoever's it is, that is at least
/// as private.
fn elsewhere(link: &Url, headers: &HeaderMap) -> Option<Url> {
    let place = Url::parse(headers.get(LOCATION)?.to_str().ok()?).ok()?;
    let private = place.scheme() == "https" || link.scheme() == "http";
    let plain = matches!(place.scheme(), "http" | "https")
        && place.username().is_empty()
        && place.password().is_none();
    (private && plain).then_some(place)
}

async fn send(request: RequestBuilder) -> Result<Response, Refusal> {
    request.send().await.map_err(|e| silent(&e))
}

/// The server did not answer.
fn silent(error: &reqwest::Error) -> Refusal {
    let message = format!(
        "the server cannot be reached: {}; look whether it runs and --server is its address, \
         then run the same command again",
        cause(error)
    );
    Refusal {
        failure: Failure::new(Exit::Unreachable, message),
        undone: error.is_connect(),
        passing: true,
        retry_after: None,
    }
}

/// The innermost reason of an error. The outer ones name the URL, in which a signature may be.
pub fn cause(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "no answer in time".to_owned();
    }
    let mut innermost = std::error::Error::source(error);
    while let Some(source) = innermost.and_then(std::error::Error::source) {
        innermost = Some(source);
    }
    innermost.map_or_else(
        || "the connection failed".to_owned(),
        std::string::ToString::to_string,
    )
}

/// The server answered with something else than what was asked for.
async fn refusal(response: Response) -> Refusal {
    let status = response.status();
    let pause = retry_after(response.headers());
    let is_problem = response
        .headers()
        .get(CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/problem+json"));
    let location = response
        .headers()
        .get(LOCATION)
        .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
        // What stands behind it may be a signature.
        .map(|place| {
            place
                .split(['?', '#'])
                .next()
                .unwrap_or_default()
                .to_owned()
        });
    let body = read(response).await.unwrap_or_default();
    let detail = serde_json::from_slice::<Reason>(&body)
        .ok()
        .filter(|_| is_problem)
        .map(|problem| problem.detail);
    let message = match (detail, location) {
        (Some(detail), _) => format!("the server says: {detail}"),
        (None, Some(location)) if status.is_redirection() => {
            format!("the server sends elsewhere; if it can be trusted, use --server for {location}")
        }
        (None, _) => format!(
            "the server answered {status}, which is not an answer of ibid's; look whether \
             --server is its address"
        ),
    };
    let exit = match status {
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
            Exit::Unreachable
        }
        _ if status.is_client_error() => Exit::Refused,
        _ => Exit::Failed,
    };
    Refusal {
        failure: Failure::new(exit, message),
        undone: status.is_redirection() || status.is_client_error(),
        passing: status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS,
        retry_after: pause,
    }
}

/// The body of an answer, as far as it is of use.
async fn read(mut response: Response) -> Result<Vec<u8>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ANSWER_BYTES {
            break;
        }
    }
    Ok(body)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let pause = Duration::from_secs(number(headers, RETRY_AFTER.as_str())?);
    Some(pause.clamp(*PAUSES.start(), *PAUSES.end()))
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

fn parse_server(text: &str) -> Option<Url> {
    let url = Url::parse(text).ok()?;
    let plain = matches!(url.scheme(), "http" | "https")
        && url.has_host()
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    plain.then_some(url)
}

/// Where `link` leads: it is absolute, or a path behind the address of the server.
fn resolve(base: &str, link: &str) -> Option<Url> {
    let url = if link.starts_with('/') {
        Url::parse(&format!("{base}{link}")).ok()?
    } else {
        Url::parse(link).ok()?
    };
    matches!(url.scheme(), "http" | "https").then_some(url)
}

fn client_for(url: &Url) -> Result<Client, Failure> {
    if is_this_machine(url) {
        http_client()
    } else {
        remote_client()
    }
}

fn is_this_machine(url: &Url) -> bool {
    let Some(host) = url.host_str() else {
        return false;
    };
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || address
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_one_spelling() {
        for (given, base) in [
            ("http://127.0.0.1:8787", "http://127.0.0.1:8787"),
            ("HTTPS://Chat.Example:443/", "https://chat.example"),
            (
                "https://chat.example/exports/",
                "https://chat.example/exports",
            ),
        ] {
            assert_eq!(Api::new(given, "ibid_x").unwrap().base(), base);
        }
        for bad in [
            "",
            "chat.example",
            "ftp://chat.example",
            "https://",
            "https://me@chat.example",
            "https://chat.example?x",
            "https://chat.example#x",
            "file:///etc/passwd",
        ] {
            assert!(parse_server(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn what_cannot_be_a_token_is_refused_and_not_shown() {
        for bad in ["", "hunter2 x", "hunter2\n", "hunter2\u{e9}"] {
            let Err(failure) = Api::new("http://localhost", bad) else {
                panic!("{bad:?} was taken");
            };
            assert_eq!(failure.exit, Exit::Usage);
            assert!(!failure.message.contains("hunter2"));
        }
    }

    #[test]
    fn a_link_is_absolute_or_a_path_of_the_server() {
        let resolved = |base: &str, link: &str| resolve(base, link).map(String::from);
        let query = "/download/x?u=a%20b&sig=_-";
        assert_eq!(
            resolved("http://h:1", query).as_deref(),
            Some("http://h:1/download/x?u=a%20b&sig=_-")
        );
        assert_eq!(
            resolved("https://h/exports", "/download/x").as_deref(),
            Some("https://h/exports/download/x")
        );
        assert_eq!(
            resolved("http://h", "https://other/x").as_deref(),
            Some("https://other/x")
        );
        for bad in ["", "download/x", "file:///etc/passwd"] {
            assert_eq!(resolved("http://h", bad), None, "{bad}");
        }
    }

    #[test]
    fn a_download_is_sent_on_to_any_host_and_never_from_https_to_http() {
        let sent = |link: &str, location: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(LOCATION, location.parse().unwrap());
            elsewhere(&Url::parse(link).unwrap(), &headers).map(String::from)
        };
        for link in ["http://h/download/x", "https://h/download/x"] {
            let store = "https://s3.example/b/x?X-Amz-Signature=0";
            assert_eq!(sent(link, store).as_deref(), Some(store));
            for bad in [
                "",
                "/b/x",
                "file:///etc/passwd",
                "https://me@s3.example/x",
                "https://me:pw@s3.example/x",
            ] {
                assert_eq!(sent(link, bad), None, "{bad}");
            }
        }
        let plain = "http://s3.example/x";
        assert_eq!(sent("http://h/x", plain).as_deref(), Some(plain));
        assert_eq!(sent("https://h/x", plain), None);
    }

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
    fn only_loopback_is_this_machine() {
        for (url, this) in [
            ("http://localhost:1", true),
            ("http://127.8.9.1", true),
            ("http://[::1]:80", true),
            ("http://localhost.example", false),
            ("http://10.0.0.1", false),
        ] {
            assert_eq!(is_this_machine(&Url::parse(url).unwrap()), this, "{url}");
        }
    }
}
