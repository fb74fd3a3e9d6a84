//! Identifiers, which can only exist when they are right.

use std::fmt;

/// The longest id of a user, a conversation or an event, in bytes.
pub const MAX_ID_BYTES: usize = 200;

/// Whether `text` can be the id of a user, a conversation or an event: 1 to 200 bytes of UTF-8
/// without control characters.
///
/// # Errors
/// What is wrong with it, to follow the name of the field.
pub fn check_id(text: &str) -> Result<(), &'static str> {
    if text.is_empty() {
        return Err("must not be empty");
    }
    if text.len() > MAX_ID_BYTES {
        return Err("must not be longer than 200 bytes");
    }
    if text.chars().any(char::is_control) {
        return Err("must not hold control characters");
    }
    Ok(())
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Takes 1 to 200 bytes of UTF-8 without control characters.
            ///
            /// # Errors
            /// What is wrong with the text.
            pub fn parse(text: impl Into<String>) -> Result<$name, &'static str> {
                let text = text.into();
                check_id(&text)?;
                Ok($name(text))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }
    };
}

text_id! {
    /// A user of the application whose chats are exported.
    UserId
}
text_id! {
    /// A conversation. Ordered bytewise, which is the order of conversations in an artefact.
    ConvId
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; 16]);

        impl $name {
            /// The id of these 128 bits.
            pub const fn from_bytes(bytes: [u8; 16]) -> $name {
                $name(bytes)
            }

            /// A new id of 128 random bits.
            ///
            /// # Errors
            /// The operating system gives no random numbers.
            pub fn random() -> Result<$name, getrandom::Error> {
                let mut bytes = [0; 16];
                getrandom::fill(&mut bytes)?;
                Ok($name(bytes))
            }

            /// Reads the 26 characters that [`fmt::Display`] writes, and nothing else.
            pub fn parse(text: &str) -> Option<$name> {
                decode_base32(text).map($name)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&encode_base32(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    };
}

random_id! {
    /// An export job: 128 random bits as 26 lower-case base32 characters (RFC 4648, no padding).
    JobId
}
random_id! {
    /// One claim of a job by one worker: the fence that every write of that worker carries.
    ClaimId
}

random_id! {
    /// One request over HTTP, by which an answer is found in the logs.
    RequestId
}

const BASE32: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

fn encode_base32(bytes: [u8; 16]) -> String {
    // 128 bits are 25 characters and 3 bits; the last character carries two zero bits.
    let bits = u128::from_be_bytes(bytes);
    let mut text = String::with_capacity(26);
    for place in 0..25 {
        let shift = 128 - 5 * (place + 1);
        text.push(char::from(BASE32[(bits >> shift) as usize & 31]));
    }
    text.push(char::from(BASE32[(bits << 2) as usize & 31]));
    text
}

fn decode_base32(text: &str) -> Option<[u8; 16]> {
    let digits = text.as_bytes();
    if digits.len() != 26 {
        return None;
    }
    let mut bits: u128 = 0;
    for (place, digit) in digits.iter().enumerate() {
        let value = match digit {
            b'a'..=b'z' => digit - b'a',
            b'2'..=b'7' => digit - b'2' + 26,
            _ => return None,
        };
        if place == 25 {
            // One id has one spelling: bits that stand for nothing must be zero.
            if value & 0b11 != 0 {
                return None;
            }
            bits = bits << 3 | u128::from(value >> 2);
        } else {
            bits = bits << 5 | u128::from(value);
        }
    }
    Some(bits.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_id_is_26_lower_case_base32_characters_and_reads_back() {
        let id = JobId::from_bytes([0xff; 16]);
        assert_eq!(id.to_string(), "7777777777777777777777777".to_owned() + "4");
        assert_eq!(JobId::parse(&id.to_string()), Some(id));
        let id =
            JobId::from_bytes(*b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f");
        assert_eq!(id.to_string(), "aaaqeayeaudaocajbifqydiob4");
        assert_eq!(JobId::parse("aaaqeayeaudaocajbifqydiob4"), Some(id));
    }

    #[test]
    fn one_job_id_has_one_spelling() {
        for bad in [
            "",
            "aaaqeayeaudaocajbifqydiob",
            "aaaqeayeaudaocajbifqydiob44",
            "AAAQEAYEAUDAOCAJBIFQYDIOB4",
            "aaaqeayeaudaocajbifqydiob5",
            "aaaqeayeaudaocajbifqydiob1",
            "../../../../../etc/passwd0",
        ] {
            assert_eq!(JobId::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn ids_of_people_and_conversations_have_a_length_and_no_control_characters() {
        assert!(UserId::parse("u").is_ok());
        assert!(ConvId::parse("é".repeat(100)).is_ok());
        assert!(ConvId::parse("é".repeat(101)).is_err());
        for bad in ["", "a\nb", "a\u{7f}", "a\u{85}", "a\0"] {
            assert!(UserId::parse(bad).is_err(), "{bad:?}");
        }
    }
}
