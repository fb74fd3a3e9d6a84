//! What a user asks for.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::ConvId;

/// Which conversations an export holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everything that the user could see.
    All,
    /// One conversation.
    Conv(ConvId),
}

impl Scope {
    /// Reads `all` or `conv:<id>`.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<Scope, String> {
        if text == "all" {
            return Ok(Scope::All);
        }
        match text.strip_prefix("conv:") {
            Some(id) => ConvId::parse(id)
                .map(Scope::Conv)
                .map_err(|reason| format!("the conversation id {reason}")),
            None => Err("it is neither \"all\" nor \"conv:<id>\"".to_owned()),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::All => f.write_str("all"),
            Scope::Conv(conv) => write!(f, "conv:{conv}"),
        }
    }
}

/// The form of an artefact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Format {
    /// One gzip member of JSON lines.
    #[default]
    #[serde(rename = "jsonl.gz")]
    JsonlGz,
}

impl Format {
    pub const fn as_str(self) -> &'static str {
        match self {
            Format::JsonlGz => "jsonl.gz",
        }
    }

    pub fn parse(text: &str) -> Option<Format> {
        (text == Format::JsonlGz.as_str()).then_some(Format::JsonlGz)
    }
}

/// A request for an export as parsed, with its defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub scope: Scope,
    pub format: Format,
}

impl Request {
    /// A digest by which the same request is told from another one with the same key. What is
    /// compared is the meaning, so white space and the order of members make no difference.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for part in [
            "ibid request 1",
            &self.scope.to_string(),
            self.format.as_str(),
        ] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_all_or_one_conversation() {
        for good in ["all", "conv:c-team", "conv:a:b", "conv:all", "conv:é x"] {
            assert_eq!(Scope::parse(good).expect(good).to_string(), good);
        }
        for bad in [
            "",
            "All",
            "all ",
            "conv:",
            "conv",
            "conversation:c",
            "conv:a\nb",
        ] {
            assert!(Scope::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn different_requests_have_different_fingerprints() {
        let of = |scope: &str| {
            Request {
                scope: Scope::parse(scope).unwrap(),
                format: Format::JsonlGz,
            }
            .fingerprint()
        };
        assert_eq!(of("all"), of("all"));
        assert_ne!(of("all"), of("conv:all"));
        assert_ne!(of("conv:a"), of("conv:b"));
    }
}
