//! The HTTP client of the commands that speak to a server on this machine.

use std::time::Duration;

use super::Failure;

/// How long a server may take to be reached.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a server may be silent in the middle of an answer.
const SILENCE: Duration = Duration::from_secs(60);

/// A client for servers on this machine. It follows no redirect and uses no proxy.
///
/// # Errors
/// The client cannot be built.
pub fn http_client() -> Result<reqwest::Client, Failure> {
    // Only a second installation fails, and then it is there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = || {
        reqwest::Client::builder()
            .no_proxy()
            .user_agent(concat!("ibid/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
    };
    // A machine without certificates of authorities (a small container) trusts nobody, but
    // plain HTTP needs none.
    builder()
        .build()
        .or_else(|_| builder().tls_certs_only([]).build())
        .map_err(|e| Failure::failed(format!("the HTTP client cannot be made: {e}")))
}
