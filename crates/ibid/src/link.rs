//! Download links: signed, short-lived, bound to job and user. A link proves who asked for it
//! and for what; whether they still may is asked again at every download.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

use crate::ids::{JobId, UserId};
use crate::time::Time;

/// The longest life of a link, and how long a key is accepted after it was replaced.
pub const MAX_LINK_LIFE: Duration = Duration::from_secs(3600);

/// How far the clocks of two nodes may differ.
const LEEWAY: Duration = Duration::from_secs(5);

/// The shortest secret of a signing key, in bytes: as long as the digest (RFC 2104 section 3).
pub const MIN_SECRET_BYTES: usize = 32;

/// What a link says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub job: JobId,
    pub user: UserId,
    /// Good until this second, seconds since the epoch.
    pub exp: i64,
}

/// Why a link is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("the link is not one that this service made")]
    Invalid,
    #[error("the link has expired")]
    Expired,
}

impl Link {
    /// The bytes that are signed: versioned, each part with its length in front, so that no
    /// two links have the same.
    fn signed_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        let job = self.job.to_string();
        let exp = self.exp.to_be_bytes();
        for part in [
            b"ibid link 1".as_slice(),
            job.as_bytes(),
            self.user.as_str().as_bytes(),
            exp.as_slice(),
        ] {
            out.extend_from_slice(&(part.len() as u64).to_be_bytes());
            out.extend_from_slice(part);
        }
        out
    }
}

/// The keys that links are signed with: the newest signs, older ones are accepted for
/// [`MAX_LINK_LIFE`] after they were replaced.
pub struct KeyRing {
    /// Oldest first, at least one.
    keys: Vec<SigningKey>,
}

struct SigningKey {
    id: String,
    created_at: Time,
    mac: Hmac<Sha256>,
}

impl std::fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A secret must never reach a log.
        let ids: Vec<&str> = self.keys.iter().map(|key| key.id.as_str()).collect();
        f.debug_tuple("KeyRing").field(&ids).finish()
    }
}

/// What is wrong with the text of a key ring; never holds any of its secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct KeyRingError {
    pub line: usize,
    pub reason: &'static str,
}

impl KeyRing {
    /// Reads a key ring: a key a line, oldest first, as `id created secret`; the id is 1 to 32
    /// letters, digits, `-` or `_`, the time RFC 3339, the secret at least 32 bytes in
    /// unpadded base64url. Empty lines and lines that start with `#` say nothing.
    ///
    /// # Errors
    /// The first line that is not so, or a ring without keys.
    pub fn parse(text: &str) -> Result<KeyRing, KeyRingError> {
        let mut keys: Vec<SigningKey> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let wrong = |reason| KeyRingError {
                line: at + 1,
                reason,
            };
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_ascii_whitespace();
            let (Some(id), Some(created), Some(secret), None) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                return Err(wrong("a key is three words: id, time of creation, secret"));
            };
            let id_chars = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            if id.len() > 32 || !id.chars().all(id_chars) {
                return Err(wrong("the id must be 1 to 32 letters, digits, - or _"));
            }
            if keys.iter().any(|key| key.id == id) {
                return Err(wrong("the id stands twice"));
            }
            let created_at = Time::parse(created)
                .map_err(|_| wrong("the time of creation must be an RFC 3339 time"))?;
            if keys.last().is_some_and(|last| last.created_at > created_at) {
                return Err(wrong("the keys must stand oldest first"));
            }
            let secret = URL_SAFE_NO_PAD
                .decode(secret)
                .map_err(|_| wrong("the secret must be unpadded base64url"))?;
            if secret.len() < MIN_SECRET_BYTES {
                return Err(wrong("the secret must be at least 32 bytes long"));
            }
            let mac = Hmac::new_from_slice(&secret)
                .map_err(|_| wrong("the secret cannot be used as a key"))?;
            keys.push(SigningKey {
                id: id.to_owned(),
                created_at,
                mac,
            });
        }
        if keys.is_empty() {
            return Err(KeyRingError {
                line: 1,
                reason: "there is no key",
            });
        }
        Ok(KeyRing { keys })
    }

    /// The text of a ring with one new key.
    ///
    /// # Errors
    /// The operating system gives no random numbers.
    pub fn generate(now: Time) -> Result<String, getrandom::Error> {
        let (mut id, mut secret) = ([0; 6], [0; 32]);
        getrandom::fill(&mut id)?;
        getrandom::fill(&mut secret)?;
        Ok(format!(
            "# Keys that sign ibid's download links: id, time of creation, secret; newest last.\n\
             {} {now} {}\n",
            URL_SAFE_NO_PAD.encode(id),
            URL_SAFE_NO_PAD.encode(secret)
        ))
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Never true: a ring has at least one key.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The query of the signed link: `u=..&exp=..&k=..&sig=..`.
    pub fn sign(&self, link: &Link) -> String {
        let Some(key) = self.keys.last() else {
            return String::new();
        };
        format!(
            "u={}&exp={}&k={}&sig={}",
            percent_encode(link.user.as_str()),
            link.exp,
            key.id,
            URL_SAFE_NO_PAD.encode(key.sign(link))
        )
    }

    /// Checks the query of a download of `job` at `now`.
    ///
    /// # Errors
    /// [`LinkError::Invalid`] if a parameter is missing, doubled, unknown or malformed, the
    /// key is unknown or retired, the signature is another, or `exp` is further ahead than a
    /// link can live; [`LinkError::Expired`] if it is authentic and `exp` has passed.
    pub fn verify(&self, job: JobId, query: &str, now: Time) -> Result<Link, LinkError> {
        let parameters = Parameters::parse(query).ok_or(LinkError::Invalid)?;
        let link = Link {
            job,
            user: parameters.user,
            exp: parameters.exp,
        };
        let key = self
            .accepted(&parameters.key_id, now)
            .ok_or(LinkError::Invalid)?;
        if !bool::from(key.sign(&link).ct_eq(&parameters.signature)) {
            return Err(LinkError::Invalid);
        }
        let exp = Time::from_seconds(link.exp);
        if exp > now.plus(MAX_LINK_LIFE).plus(LEEWAY) {
            return Err(LinkError::Invalid);
        }
        if exp < now {
            return Err(LinkError::Expired);
        }
        Ok(link)
    }

    fn accepted(&self, id: &str, now: Time) -> Option<&SigningKey> {
        let at = self.keys.iter().position(|key| key.id == id)?;
        let replaced = self.keys.get(at + 1).map(|next| next.created_at);
        let retired = replaced.is_some_and(|since| since.plus(MAX_LINK_LIFE).plus(LEEWAY) < now);
        (!retired).then(|| &self.keys[at])
    }
}

impl SigningKey {
    fn sign(&self, link: &Link) -> [u8; 32] {
        let mut mac = self.mac.clone();
        mac.update(&link.signed_bytes());
        mac.finalize().into_bytes().into()
    }
}

struct Parameters {
    user: UserId,
    exp: i64,
    key_id: String,
    signature: [u8; 32],
}

impl Parameters {
    /// Exactly `u`, `exp`, `k` and `sig`, each once.
    fn parse(query: &str) -> Option<Parameters> {
        let (mut user, mut exp, mut key_id, mut signature) = (None, None, None, None);
        for pair in query.split('&') {
            let (name, value) = pair.split_once('=')?;
            let value = percent_decode(value)?;
            let slot = match name {
                "u" => &mut user,
                "exp" => &mut exp,
                "k" => &mut key_id,
                "sig" => &mut signature,
                _ => return None,
            };
            if slot.replace(value).is_some() {
                return None;
            }
        }
        let exp_text = exp?;
        let exp: i64 = exp_text.parse().ok()?;
        // One number has one spelling: no sign, no leading zeros.
        if exp < 0 || exp.to_string() != exp_text {
            return None;
        }
        // The decoder refuses padding and bits that stand for nothing: one spelling here too.
        let signature = URL_SAFE_NO_PAD.decode(signature?).ok()?;
        Some(Parameters {
            user: UserId::parse(user?).ok()?,
            exp,
            key_id: key_id?,
            signature: signature.try_into().ok()?,
        })
    }
}

/// Encodes everything but the unreserved characters of RFC 3986 section 2.3.
pub fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Decodes `%XX`, and nothing else: a `+` is a plus. `None` if it is malformed or not UTF-8.
pub fn percent_decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let high = char::from(bytes.next()?).to_digit(16)?;
            let low = char::from(bytes.next()?).to_digit(16)?;
            out.push((high * 16 + low) as u8);
        } else {
            out.push(byte);
        }
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_seconds(1_800_000_000);

    fn ring() -> KeyRing {
        let text = format!(
            "# comment\n\nold 2020-01-01T00:00:00Z {}\nnew 2026-01-01T00:00:00Z {}\n",
            URL_SAFE_NO_PAD.encode([1; 32]),
            URL_SAFE_NO_PAD.encode([2; 40]),
        );
        KeyRing::parse(&text).expect("a ring")
    }

    fn link(exp: i64) -> Link {
        Link {
            job: JobId::from_bytes([7; 16]),
            user: UserId::parse("Zoë & co+").unwrap(),
            exp,
        }
    }

    #[test]
    fn a_signed_link_verifies_for_its_job_until_its_second() {
        let (ring, link) = (ring(), link(1_800_000_300));
        let query = ring.sign(&link);
        assert!(query.starts_with("u=Zo%C3%AB%20%26%20co%2B&exp=1800000300&k=new&sig="));
        assert_eq!(query.rsplit('=').next().map(str::len), Some(43));
        assert_eq!(ring.verify(link.job, &query, NOW), Ok(link.clone()));
        let last = Time::from_seconds(1_800_000_300);
        assert!(ring.verify(link.job, &query, last).is_ok());
        let late = last.plus(Duration::from_micros(1));
        assert_eq!(ring.verify(link.job, &query, late), Err(LinkError::Expired));
        let other = JobId::from_bytes([8; 16]);
        assert_eq!(ring.verify(other, &query, NOW), Err(LinkError::Invalid));
    }

    #[test]
    fn every_altered_byte_is_refused() {
        let (ring, link) = (ring(), link(1_800_000_300));
        let query = ring.sign(&link);
        for at in 0..query.len() {
            for with in ["A", "B", "0", "&", "=", "%", "", "~"] {
                let mut altered = query.clone();
                altered.replace_range(at..=at, with);
                if altered != query {
                    let answer = ring.verify(link.job, &altered, NOW);
                    assert_eq!(answer, Err(LinkError::Invalid), "{altered}");
                }
            }
        }
    }

    #[test]
    fn parameters_stand_once_each_and_no_others() {
        let (ring, link) = (ring(), link(1_800_000_300));
        let query = ring.sign(&link);
        for bad in [
            String::new(),
            format!("{query}&x=1"),
            format!("{query}&u=a"),
            format!("{query}&"),
            format!("{query}="),
            query.replace("exp=", "exp=+"),
            query.replace("exp=", "exp=0"),
            query.split_once('&').unwrap().1.to_owned(),
            query.rsplit_once('&').unwrap().0.to_owned(),
        ] {
            assert_eq!(
                ring.verify(link.job, &bad, NOW),
                Err(LinkError::Invalid),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_link_cannot_live_longer_than_an_hour() {
        let ring = ring();
        for (ahead, good) in [
            (3600, true),
            (3605, true),
            (3606, false),
            (i64::MAX / 2, false),
        ] {
            let link = link(1_800_000_000 + ahead);
            let answer = ring.verify(link.job, &ring.sign(&link), NOW);
            assert_eq!(answer.is_ok(), good, "{ahead}");
        }
    }

    #[test]
    fn a_replaced_key_is_accepted_for_an_hour() {
        let old = KeyRing::parse(&format!(
            "old 2020-01-01T00:00:00Z {}",
            URL_SAFE_NO_PAD.encode([1; 32])
        ))
        .unwrap();
        let replaced = Time::parse("2026-01-01T00:00:00Z").unwrap();
        let link = link(replaced.seconds() + 3500);
        let query = old.sign(&link);
        let soon = replaced.plus(Duration::from_secs(3500));
        assert!(ring().verify(link.job, &query, soon).is_ok());
        assert_eq!(
            ring().verify(link.job, &query, NOW),
            Err(LinkError::Invalid)
        );
    }

    #[test]
    fn a_wrong_key_file_is_refused_without_showing_secrets() {
        let secret = URL_SAFE_NO_PAD.encode([9; 32]);
        let short = URL_SAFE_NO_PAD.encode([9; 31]);
        for (text, line) in [
            (String::new(), 1),
            ("# only a comment\n".to_owned(), 1),
            (format!("a 2026-01-01T00:00:00Z {short}"), 1),
            (format!("a 2026-01-01T00:00:00Z {secret}=="), 1),
            (format!("\na b 2026-01-01T00:00:00Z {secret}"), 2),
            (format!("a yesterday {secret}"), 1),
            (format!("a! 2026-01-01T00:00:00Z {secret}"), 1),
            (secret.clone(), 1),
            (
                format!("a 2026-01-01T00:00:00Z {secret}\na 2026-01-02T00:00:00Z {secret}"),
                2,
            ),
            (
                format!("a 2026-01-02T00:00:00Z {secret}\nb 2026-01-01T00:00:00Z {secret}"),
                2,
            ),
        ] {
            let error = KeyRing::parse(&text).expect_err(&text);
            assert_eq!(error.line, line, "{text}");
            assert!(!error.to_string().contains(&short[..8]));
        }
        assert!(!format!("{:?}", ring()).contains("AQEB"));
        let made = KeyRing::generate(NOW).unwrap();
        assert_eq!(KeyRing::parse(&made).unwrap().len(), 1);
    }
}
