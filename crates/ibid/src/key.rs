//! The idempotency key of a request (draft-ietf-httpapi-idempotency-key-header-07).

use std::fmt;

/// A key by which a repeated request is recognised: 1 to 255 characters, case counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey(String);

/// The longest key, in characters.
pub const MAX_KEY_CHARS: usize = 255;

impl IdempotencyKey {
    /// Reads the value of one `Idempotency-Key` header line.
    ///
    /// A value that starts with `"` is a structured-field string (RFC 9651 section 3.3.3)
    /// without parameters; any other is taken as it stands, if it is visible ASCII without
    /// `"` `,` `;` `\`. So `"abc"` and `abc` are the same key.
    ///
    /// # Errors
    /// What is wrong with the value.
    pub fn parse(value: &[u8]) -> Result<IdempotencyKey, &'static str> {
        // RFC 9110 section 5.5: white space around a field value is not part of it.
        let value = value.trim_ascii();
        let key = match value.first() {
            None => return Err("it is empty"),
            Some(b'"') => structured_string(value)?,
            Some(_) => bare(value)?,
        };
        if key.is_empty() {
            return Err("it is empty");
        }
        if key.len() > MAX_KEY_CHARS {
            return Err("it is longer than 255 characters");
        }
        Ok(IdempotencyKey(key))
    }

    /// A key that nobody has used: 128 random bits.
    ///
    /// # Errors
    /// The operating system gives no random numbers.
    pub fn random() -> Result<IdempotencyKey, getrandom::Error> {
        let mut bits = [0; 16];
        getrandom::fill(&mut bits)?;
        Ok(IdempotencyKey(hex::encode(bits)))
    }

    /// The key as the value of a header line: a structured-field string, which any key can be.
    pub fn header_value(&self) -> String {
        let mut value = String::from("\"");
        for character in self.0.chars() {
            if matches!(character, '"' | '\\') {
                value.push('\\');
            }
            value.push(character);
        }
        value.push('"');
        value
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn structured_string(value: &[u8]) -> Result<String, &'static str> {
    let mut key = String::new();
    let mut rest = value[1..].iter();
    loop {
        match rest.next() {
            None => return Err("its quoted string has no end"),
            Some(b'"') => break,
            Some(b'\\') => match rest.next() {
                Some(escaped @ (b'"' | b'\\')) => key.push(char::from(*escaped)),
                _ => return Err("a backslash stands before something else than \" or \\"),
            },
            Some(plain @ 0x20..=0x7e) => key.push(char::from(*plain)),
            Some(_) => return Err("it holds characters that are not printable ASCII"),
        }
    }
    if rest.next().is_some() {
        return Err("something stands after the quoted string: one key, without parameters");
    }
    Ok(key)
}

fn bare(value: &[u8]) -> Result<String, &'static str> {
    let mut key = String::new();
    for byte in value {
        match byte {
            b'"' | b',' | b';' | b'\\' => {
                return Err("it holds one of \" , ; \\ without being a quoted string");
            }
            0x21..=0x7e => key.push(char::from(*byte)),
            _ => return Err("it holds characters that are not visible ASCII"),
        }
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(value: &str) -> Option<String> {
        IdempotencyKey::parse(value.as_bytes())
            .ok()
            .map(|key| key.to_string())
    }

    #[test]
    fn quoted_and_bare_spellings_are_the_same_key() {
        assert_eq!(key("abc").as_deref(), Some("abc"));
        assert_eq!(key("\"abc\"").as_deref(), Some("abc"));
        assert_eq!(key("  \"abc\"\t").as_deref(), Some("abc"));
        assert_eq!(key("ABC").as_deref(), Some("ABC"));
        assert_eq!(key(r#""a\"b\\c, d;e""#).as_deref(), Some(r#"a"b\c, d;e"#));
        assert_eq!(key(&"k".repeat(255)).map(|k| k.len()), Some(255));
        assert_eq!(
            key(&format!("\"{}\"", "k".repeat(255))).map(|k| k.len()),
            Some(255)
        );
    }

    #[test]
    fn a_header_value_reads_back_as_the_same_key() {
        for text in ["abc", r#""a\"b\\c, d;e""#] {
            let key = IdempotencyKey::parse(text.as_bytes()).unwrap();
            let again = IdempotencyKey::parse(key.header_value().as_bytes());
            assert_eq!(again, Ok(key));
        }
        let random = IdempotencyKey::random().unwrap();
        assert_eq!(key(random.as_str()), Some(random.to_string()));
        assert_ne!(random, IdempotencyKey::random().unwrap());
    }

    #[test]
    fn malformed_keys_are_refused() {
        for bad in [
            "",
            "   ",
            "\"\"",
            "\"abc",
            "abc\"",
            "\"a\";x=1",
            "\"a\", \"b\"",
            "a,b",
            "a;b",
            "a b",
            "a\\b",
            "\"a\\b\"",
            "é",
            "\"é\"",
            "\"a\tb\"",
            "a\u{7f}",
        ] {
            assert_eq!(key(bad), None, "{bad:?}");
        }
        assert_eq!(key(&"k".repeat(256)), None);
    }
}
