//! What comes of a vault that does not do what it was asked.

/// Why the vault did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    #[error("the store has no such object")]
    Missing,
    /// The store does not answer or refuses; it may later.
    #[error("the store failed: {0}")]
    Unavailable(String),
    /// The disk would have less room than is to be left on it.
    #[error("only {free} bytes are free; {bytes} are to be written and {least} to be left")]
    Full { bytes: u64, free: u64, least: u64 },
    /// The disk has no room at all.
    #[error("the disk is full: {0}")]
    NoRoom(String),
}

impl From<object_store::Error> for VaultError {
    fn from(error: object_store::Error) -> VaultError {
        match error {
            object_store::Error::NotFound { .. } => VaultError::Missing,
            other if is_of_full_disk(&other) => VaultError::NoRoom(describe(&other)),
            other => VaultError::Unavailable(without_body(&describe(&other))),
        }
    }
}

/// Whether a disk, or the share of it that this user may have, was full.
fn is_of_full_disk(error: &object_store::Error) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            return matches!(error.kind(), QuotaExceeded | StorageFull);
        }
        cause = error.source();
    }
    false
}

/// An error with its causes, which `Display` of most of them leaves out.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let next_text = next.to_string();
        if !text.contains(&next_text) {
            text.push_str(": ");
            text.push_str(&next_text);
        }
        cause = next.source();
    }
    text
}

/// What a store's error says, without the body of the store's answer, of which only the name of
/// the error is kept: a store may put into it how the request was signed, and with it the token of
/// a session, and the owner of an export reads why it has to wait.
fn without_body(text: &str) -> String {
    let Some((before, body)) = text.split_once('<') else {
        return text.to_owned();
    };
    let before = before.trim_end_matches([' ', ':']);
    let name = body.split_once("<Code>").and_then(|(_, rest)| {
        let (name, _) = rest.split_once("</Code>")?;
        let plain = name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric());
        plain.then_some(name)
    });
    match name {
        Some(name) => format!("{before} ({name})"),
        None => before.to_owned(),
    }
}
