//! How requests are sent.

use std::time::Duration;

use reqwest::{ClientBuilder, RequestBuilder, Response, Url};

use super::ClientError;

/// How long a server may take to be reached.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest answer that is read beside files, in bytes; a status is a few hundred.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

/// Two clients: one for servers on this machine, which no proxy stands before, and one for
/// servers anywhere, by the proxy that the environment names. Neither follows a redirect, so that
/// a token that it is given goes to no other host.
#[derive(Clone)]
pub(super) struct Http {
    near: reqwest::Client,
    far: reqwest::Client,
}

impl Http {
    pub(super) fn new() -> Result<Http, ClientError> {
        Ok(Http {
            near: http_client(ClientBuilder::no_proxy)?,
            far: http_client(|builder| builder)?,
        })
    }

    pub(super) fn get(&self, url: &Url) -> RequestBuilder {
        self.of(url).get(url.clone())
    }

    pub(super) fn head(&self, url: &Url) -> RequestBuilder {
        self.of(url).head(url.clone())
    }

    pub(super) fn post(&self, url: &Url) -> RequestBuilder {
        self.of(url).post(url.clone())
    }

    fn of(&self, url: &Url) -> &reqwest::Client {
        if is_this_machine(url) {
            &self.near
        } else {
            &self.far
        }
    }
}

/// An HTTP client that follows no redirect, with what `change` adds.
///
/// # Errors
/// [`ClientError::Invalid`]: it cannot be built so.
pub fn http_client(
    change: impl Fn(ClientBuilder) -> ClientBuilder,
) -> Result<reqwest::Client, ClientError> {
    // Only a second installation fails, and then it is there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = || {
        change(reqwest::Client::builder())
            .user_agent(concat!("ibid/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .connect_timeout(CONNECT)
    };
    // A machine without certificates of authorities (a small container) trusts nobody, but
    // plain HTTP needs none.
    builder()
        .build()
        .or_else(|_| builder().tls_certs_only([]).build())
        .map_err(|error| ClientError::Invalid(format!("the HTTP client cannot be made: {error}")))
}

/// The server did not answer, or not to the end.
pub(super) fn unreachable(error: &reqwest::Error) -> ClientError {
    ClientError::Unreachable {
        why: cause(error),
        undone: error.is_connect(),
    }
}

/// The innermost reason of an error. The outer ones name the URL, in which a signature may be.
pub(super) fn cause(error: &reqwest::Error) -> String {
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

/// The body of an answer that is no file, as far as it is of use.
pub(super) async fn read_short(mut response: Response) -> Result<Vec<u8>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ANSWER_BYTES {
            break;
        }
    }
    Ok(body)
}

pub(super) fn is_this_machine(url: &Url) -> bool {
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
