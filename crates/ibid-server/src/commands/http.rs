//! The HTTP client of the commands.

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
    build(reqwest::ClientBuilder::no_proxy)
}

/// A client for servers anywhere, by the proxy that the environment names. It follows no
/// redirect, so that a token that it is given goes to no other host.
///
/// # Errors
/// The client cannot be built.
pub fn remote_client() -> Result<reqwest::Client, Failure> {
    build(|builder| builder)
}

fn build(
    change: impl Fn(reqwest::ClientBuilder) -> reqwest::ClientBuilder,
) -> Result<reqwest::Client, Failure> {
    // Only a second installation fails, and then it is there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = || {
        change(reqwest::Client::builder())
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
