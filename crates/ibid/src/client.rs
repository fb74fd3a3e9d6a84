//! The other end of the wire: asks a server of ibid for an export, waits for it, and fetches the
//! file, whatever happens to the connection.
//!
//! ```no_run
//! use ibid::client::{Client, Fetch, Link};
//! use ibid::key::IdempotencyKey;
//! use ibid::scope::Scope;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::new("https://chat.example", "ibid_...")?;
//! // Keep the key until the file is there: the same key never makes a second export.
//! let key = IdempotencyKey::random()?;
//! let created = client.create(&key, &Scope::All).await?;
//! let artefact = client.wait(created.job_id, &|status| println!("{:?}", status.state)).await?;
//! let fetch = Fetch { expected: Some(artefact.expected()), ..Fetch::default() };
//! let link = Link::of_job(&client, created.job_id, &artefact)?;
//! fetch.into_file(link, "alice.jsonl.gz".as_ref(), &|_| {}).await?;
//! # Ok(())
//! # }
//! ```
//!
//! Nothing here needs a database or the rest of the library.

mod answer;
mod fetch;
pub mod files;
mod http;
mod part_file;
mod refusal;
mod spans;

use std::path::PathBuf;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{RequestBuilder, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::export::State;
use crate::ids::JobId;
use crate::key::IdempotencyKey;
use crate::scope::Scope;

pub use fetch::{Expected, Fetch, FetchEvent, Fetched, Link};

pub use http::http_client;
pub use refusal::Refusal;

/// How long a server may be gone while an export is waited for: it may be starting anew.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait between two looks when the server does not say.
const POLL: Duration = Duration::from_secs(1);
/// How long an answer other than a file may take.
const ANSWER: Duration = Duration::from_secs(60);

/// Why the client could not do what it was asked for, by what its caller can do.
///
/// The texts are sentences that say what to do next. No link and no token is in them.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// An argument cannot be what it should be.
    #[error("{0}")]
    Invalid(String),
    /// The server does not answer. `undone` says that the request certainly did not reach it.
    #[error("the server cannot be reached: {why}")]
    Unreachable {
        /// The innermost reason.
        why: String,
        /// Whether the server has certainly not done what it was asked for.
        undone: bool,
    },
    /// The server answers, and refuses.
    #[error("{0}")]
    Refused(Refusal),
    /// The answer is not one of ibid's, or contradicts itself.
    #[error("{0}")]
    Strange(String),
    /// The export has come to an end without a file.
    #[error("{0}")]
    Ended(String),
    /// What was fetched is not the file. Nothing of it is kept.
    #[error("{0}")]
    WrongBytes(String),
    /// There is a file already, which must not be replaced.
    #[error("{} is there already", .0.display())]
    Taken(PathBuf),
    /// A file cannot be written.
    #[error("{}: {why}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it and what to do.
        why: String,
    },
}

/// A server, and the token of the user who is asking, which goes to that server alone.
pub struct Client {
    http: http::Http,
    /// The address in its one spelling, without a slash at its end.
    server: String,
    token: HeaderValue,
}

/// The answer to a request for an export.
#[derive(Clone, Debug, Deserialize)]
pub struct Created {
    /// The job, be it new or not.
    #[serde(deserialize_with = "job_id")]
    pub job_id: JobId,
    /// Whether it was there before, made with the same key.
    pub replayed: bool,
}

/// How far an export is. Members that are not needed here may come and go.
#[derive(Deserialize)]
pub struct Status {
    /// Its state.
    pub state: State,
    /// How much of it is rendered.
    pub progress: Progress,
    /// Why it failed.
    pub error: Option<Reason>,
    /// Why it cannot go on for now.
    pub waiting: Option<Reason>,
    /// Who revoked it, and why.
    pub revoked: Option<Revoked>,
    sha256: Option<String>,
    bytes: Option<u64>,
    messages: Option<u64>,
    download: Option<Download>,
}

/// How much of an export is rendered.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Progress {
    /// Messages so far.
    pub messages_done: u64,
    /// Messages in all, once that is known.
    pub messages_total: Option<u64>,
}

/// Why something is as it is.
#[derive(Clone, Debug, Deserialize)]
pub struct Reason {
    /// A sentence.
    pub detail: String,
}

/// Who revoked an export, and why.
#[derive(Clone, Debug, Deserialize)]
pub struct Revoked {
    /// `owner`, `admin` or `erasure`.
    pub by: String,
    /// As it was given.
    pub reason: String,
}

/// Has no `Debug`: whoever has the link can download.
#[derive(Deserialize)]
struct Download {
    url: String,
}

/// The file of an export that is done. Has no `Debug`, because of the link.
#[derive(Clone)]
pub struct Artefact {
    /// SHA-256 of its bytes.
    pub sha256: [u8; 32],
    /// Its length in bytes.
    pub bytes: u64,
    /// Messages in it.
    pub messages: u64,
    url: String,
}

impl Artefact {
    /// What a download of it must be.
    pub fn expected(&self) -> Expected {
        Expected {
            sha256: self.sha256,
            bytes: Some(self.bytes),
        }
    }
}

impl Status {
    /// The file, if the export is done and the server says all that it should.
    pub fn artefact(&self) -> Option<Artefact> {
        Some(Artefact {
            sha256: hex::decode(self.sha256.as_ref()?).ok()?.try_into().ok()?,
            bytes: self.bytes?,
            messages: self.messages?,
            url: self.download.as_ref()?.url.clone(),
        })
    }
}

impl Client {
    /// A client of the API at `server`, an `http` or `https` URL, for the user of `token`.
    ///
    /// # Errors
    /// [`ClientError::Invalid`]: `server` is no address of one, or `token` cannot be one.
    pub fn new(server: &str, token: &str) -> Result<Client, ClientError> {
        let base = parse_server(server).ok_or_else(|| {
            ClientError::Invalid(
                "the server must be an http or https URL without user, query and fragment, such \
                 as https://chat.example"
                    .to_owned(),
            )
        })?;
        let token_is_good = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        let mut bearer = HeaderValue::from_str(&format!("Bearer {token}"))
            .ok()
            .filter(|_| token_is_good)
            .ok_or_else(|| {
                ClientError::Invalid(
                    "the token must be visible ASCII without spaces; copy it again, or make one \
                     with `ibid token create`"
                        .to_owned(),
                )
            })?;
        bearer.set_sensitive(true);
        Ok(Client {
            http: http::Http::new()?,
            server: base.as_str().trim_end_matches('/').to_owned(),
            token: bearer,
        })
    }

    /// The address of the server in its one spelling.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Whether the token can be read on its way: not encrypted, and to another machine.
    pub fn is_exposed(&self) -> bool {
        Url::parse(&self.server)
            .is_ok_and(|url| url.scheme() == "http" && !http::is_this_machine(&url))
    }

    /// Asks for an export. However often it is asked with one key, it is one export.
    ///
    /// # Errors
    /// The server refuses or does not answer; [`ClientError::is_undone`] says whether a job may
    /// have been made all the same.
    pub async fn create(
        &self,
        key: &IdempotencyKey,
        scope: &Scope,
    ) -> Result<Created, ClientError> {
        let body = serde_json::json!({"scope": scope.to_string()}).to_string();
        let request = self.http.post(&self.address("/exports")?);
        let request = request
            .header("Idempotency-Key", key.header_value())
            .header(CONTENT_TYPE, "application/json")
            .body(body);
        let (created, _) = self.ask(request).await?;
        Ok(created)
    }

    /// Asks how far a job is; also gives how long to wait before the next look, where the server
    /// says that.
    ///
    /// # Errors
    /// The server refuses or does not answer.
    pub async fn status(&self, job: JobId) -> Result<(Status, Option<Duration>), ClientError> {
        let address = self.address(&format!("/exports/{job}"))?;
        self.ask(self.http.get(&address)).await
    }

    /// Waits until a job is done and gives its file. `observe` is shown every status.
    ///
    /// A server that is gone for a minute is waited for.
    ///
    /// # Errors
    /// [`ClientError::Ended`]: it ended otherwise. Else the server refuses or does not answer.
    pub async fn wait(
        &self,
        job: JobId,
        observe: &(dyn Fn(&Status) + Sync),
    ) -> Result<Artefact, ClientError> {
        let mut answered = Instant::now();
        loop {
            let pause = match self.status(job).await {
                Ok((status, pause)) => {
                    answered = Instant::now();
                    observe(&status);
                    if let Some(artefact) = ended(&status)? {
                        return Ok(artefact);
                    }
                    pause
                }
                Err(error) if error.is_passing() && answered.elapsed() < PATIENCE => {
                    error.retry_after()
                }
                Err(error) => return Err(error),
            };
            tokio::time::sleep(pause.unwrap_or(POLL)).await;
        }
    }

    fn address(&self, path: &str) -> Result<Url, ClientError> {
        resolve(&self.server, path)
            .ok_or_else(|| ClientError::Invalid(format!("{} is no address", self.server)))
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
    ) -> Result<(T, Option<Duration>), ClientError> {
        let request = request.header(AUTHORIZATION, self.token.clone());
        let sent = request.timeout(ANSWER).send().await;
        let response = sent.map_err(|error| http::unreachable(&error))?;
        if !response.status().is_success() {
            return Err(ClientError::Refused(Refusal::read(response).await));
        }
        let pause = refusal::retry_after(response.headers());
        let body = http::read_short(response).await;
        let body = body.map_err(|error| http::unreachable(&error))?;
        let answer = serde_json::from_slice(&body).map_err(|_| {
            ClientError::Strange(
                "the server's answer is not one of ibid's; look whether this is its address"
                    .to_owned(),
            )
        })?;
        Ok((answer, pause))
    }
}

impl ClientError {
    /// Whether it may be otherwise soon.
    pub fn is_passing(&self) -> bool {
        match self {
            ClientError::Unreachable { .. } => true,
            ClientError::Refused(refusal) => refusal.is_passing(),
            ClientError::Invalid(_)
            | ClientError::Strange(_)
            | ClientError::Ended(_)
            | ClientError::WrongBytes(_)
            | ClientError::Taken(_)
            | ClientError::File { .. } => false,
        }
    }

    /// Whether the server has certainly not done what it was asked for.
    pub fn is_undone(&self) -> bool {
        match self {
            ClientError::Unreachable { undone, .. } => *undone,
            ClientError::Refused(refusal) => refusal.status < 500,
            ClientError::Invalid(_) => true,
            ClientError::Strange(_)
            | ClientError::Ended(_)
            | ClientError::WrongBytes(_)
            | ClientError::Taken(_)
            | ClientError::File { .. } => false,
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            ClientError::Refused(refusal) => refusal.retry_after,
            _ => None,
        }
    }
}

/// The artefact, if the job is done; an error if it has ended otherwise.
fn ended(status: &Status) -> Result<Option<Artefact>, ClientError> {
    let ending = match status.state {
        State::Queued | State::Running => return Ok(None),
        State::Done => {
            let artefact = status.artefact().ok_or_else(|| {
                ClientError::Strange(
                    "the server says that the export is done but not where it is; its version \
                     may be another one than this program's"
                        .to_owned(),
                )
            })?;
            return Ok(Some(artefact));
        }
        State::Failed => {
            let detail = status.error.as_ref().map(|error| error.detail.as_str());
            format!("the export failed: {}", detail.unwrap_or("no reason given"))
        }
        State::Revoked => match &status.revoked {
            Some(Revoked { by, reason }) => format!("the export was revoked by {by}: {reason}"),
            None => "the export was revoked".to_owned(),
        },
        State::Expired => "the export has expired and its file is deleted".to_owned(),
    };
    Err(ClientError::Ended(ending))
}

fn job_id<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<JobId, D::Error> {
    let text = String::deserialize(deserializer)?;
    JobId::parse(&text).ok_or_else(|| serde::de::Error::custom("no id of a job"))
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
fn resolve(server: &str, link: &str) -> Option<Url> {
    let url = if link.starts_with('/') {
        Url::parse(&format!("{server}{link}")).ok()?
    } else {
        Url::parse(link).ok()?
    };
    matches!(url.scheme(), "http" | "https").then_some(url)
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
            assert_eq!(Client::new(given, "ibid_x").unwrap().server(), base);
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
            let Err(error) = Client::new("http://localhost", bad) else {
                panic!("{bad:?} was taken");
            };
            assert!(matches!(error, ClientError::Invalid(_)));
            assert!(!error.to_string().contains("hunter2"));
        }
    }

    #[test]
    fn a_token_is_exposed_only_unencrypted_and_elsewhere() {
        for (server, exposed) in [
            ("http://chat.example", true),
            ("https://chat.example", false),
            ("http://127.0.0.1:8787", false),
            ("http://localhost", false),
        ] {
            let client = Client::new(server, "ibid_x").unwrap();
            assert_eq!(client.is_exposed(), exposed, "{server}");
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
}
