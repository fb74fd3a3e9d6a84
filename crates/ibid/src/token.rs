//! Bearer tokens: shown once, stored as a digest.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};

/// What every token of ours begins with, by which it is told from the application's own.
pub const PREFIX: &str = "ibid_";

/// A token that was just made. Its text is nowhere else.
pub struct FreshToken {
    /// `ibid_` and 43 characters that stand for 256 random bits.
    pub text: String,
    /// What is stored, and looked up by.
    pub sha256: [u8; 32],
    /// A name for it in lists and logs, which gives nothing away.
    pub token_id: String,
}

impl FreshToken {
    /// Makes a token.
    ///
    /// # Errors
    /// The operating system gives no random numbers.
    pub fn generate() -> Result<FreshToken, getrandom::Error> {
        let (mut secret, mut id) = ([0; 32], [0; 6]);
        getrandom::fill(&mut secret)?;
        getrandom::fill(&mut id)?;
        let text = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(secret));
        Ok(FreshToken {
            sha256: digest(&text),
            text,
            token_id: hex::encode(id),
        })
    }
}

/// What a token is looked up by. A digest of 256 random bits needs no salt, and a look-up by it
/// takes no time that tells anything about the token.
pub fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_found_by_its_digest_and_no_two_are_the_same() {
        let (one, other) = (
            FreshToken::generate().unwrap(),
            FreshToken::generate().unwrap(),
        );
        assert_eq!(one.text.len(), 48);
        assert!(one.text.starts_with("ibid_"));
        assert_eq!(digest(&one.text), one.sha256);
        assert_ne!(one.sha256, other.sha256);
    }
}
