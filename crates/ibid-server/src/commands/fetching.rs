//! What the commands that download share.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ibid::client::{ClientError, Fetch, FetchEvent, Fetched, Link};

use super::{BYTES, Exit, Failure, bar, complain};
use crate::config::escape;

/// The most connections of one download; a server allows a user 32 by default.
const MAX_CONNECTIONS: u32 = 32;

/// A token or a link on the command line, which nothing shows: whoever has it can use it.
#[derive(Clone)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Secret {
        Secret(text)
    }
}

/// Reads `--connections`.
pub fn connections(text: &str) -> Result<NonZeroU32, String> {
    let number = text.parse().ok().and_then(NonZeroU32::new);
    number
        .filter(|number| number.get() <= MAX_CONNECTIONS)
        .ok_or_else(|| format!("connections are a number from 1 to {MAX_CONNECTIONS}"))
}

/// Fetches a file with a bar on a terminal.
///
/// # Errors
/// As of [`Fetch::into_file`]; says whether the same command goes on.
pub async fn fetch(
    fetch: &Fetch,
    link: Link<'_>,
    output: &Path,
    bytes: Option<u64>,
) -> Result<Fetched, Failure> {
    let bar = bar(bytes.unwrap_or(0), "downloading", BYTES);
    let has_bytes = AtomicBool::new(false);
    let observe = |event: FetchEvent<'_>| match event {
        FetchEvent::There { bytes, of } => {
            has_bytes.store(true, Ordering::Relaxed);
            bar.set_length(of);
            bar.set_position(bytes);
            bar.set_message("downloading");
        }
        FetchEvent::Waiting(error) => {
            bar.set_message(format!("waiting: {}", escape(&error.to_string())));
        }
        FetchEvent::Anew(why) => {
            bar.suspend(|| complain(&format!("the download begins again: {why}")));
        }
        FetchEvent::Verifying => bar.set_message("verifying"),
    };
    let fetched = fetch.into_file(link, output, &observe).await;
    bar.finish_and_clear();
    fetched.map_err(|error| {
        let goes_on = error.is_passing() && has_bytes.load(Ordering::Relaxed);
        let mut failure = client_failure(error);
        if goes_on {
            let message = failure.message.trim_end_matches('.');
            failure.message = format!(
                "{message}; what was downloaded is kept, and the same command goes on from there"
            );
        }
        failure
    })
}

/// What the client's error means to the one who typed the command.
pub fn client_failure(error: ClientError) -> Failure {
    let exit = match &error {
        ClientError::Invalid(_) => Exit::Usage,
        ClientError::Unreachable { .. } => Exit::Unreachable,
        // A proxy that does not reach the server, or a server that does not reach its database.
        ClientError::Refused(refusal) => match refusal.status {
            502..=504 => Exit::Unreachable,
            400..=499 => Exit::Refused,
            _ => Exit::Failed,
        },
        ClientError::Strange(_)
        | ClientError::Ended(_)
        | ClientError::WrongBytes(_)
        | ClientError::Taken(_)
        | ClientError::File { .. } => Exit::Failed,
    };
    let todo = match &error {
        ClientError::Unreachable { .. } => {
            "; look whether it runs and this is its address, then run the same command again"
        }
        ClientError::Taken(_) => "; name another file with -o, or replace it with --force",
        ClientError::Refused(_)
        | ClientError::Invalid(_)
        | ClientError::Strange(_)
        | ClientError::Ended(_)
        | ClientError::WrongBytes(_)
        | ClientError::File { .. } => "",
    };
    Failure::new(exit, format!("{error}{todo}"))
}
