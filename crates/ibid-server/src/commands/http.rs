//! The HTTP client of the commands that speak to a server on this machine.

use std::time::Duration;

use super::Failure;

/// How long a server may be silent in the middle of an answer.
const SILENCE: Duration = Duration::from_secs(60);

/// A client for servers on this machine. It follows no redirect and uses no proxy.
///
/// # Errors
/// The client cannot be built.
pub fn http_client() -> Result<reqwest::Client, Failure> {
    let near = |builder: reqwest::ClientBuilder| builder.no_proxy().read_timeout(SILENCE);
    ibid::client::http_client(near).map_err(|e| Failure::failed(e.to_string()))
}
