//! JSON as it comes in from outside, read strictly: a member that stands twice is refused.
//!
//! RFC 8259 section 4 leaves doubled names to the reader; a reader that picks one silently
//! would take another request, or another message, than the one its author looked at.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A JSON value whose objects keep the order of their members, each name once.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    /// A whole number from 0 to 2^64 - 1, written without point and exponent.
    Unsigned(u64),
    /// Any other number.
    OtherNumber,
    Text(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads one JSON text and nothing after it.
    ///
    /// # Errors
    /// Where the text stops being JSON, and why: with the column, without the line.
    pub fn parse(text: &[u8]) -> Result<Json, String> {
        let text = std::str::from_utf8(text)
            .map_err(|e| format!("invalid UTF-8 at byte {}", e.valid_up_to() + 1))?;
        serde_json::from_str(text).map_err(|e| {
            let message = e.to_string();
            let place = format!(" at line {} column {}", e.line(), e.column());
            let reason = message.strip_suffix(&place).unwrap_or(&message);
            format!("not valid JSON: {reason} (at column {})", e.column())
        })
    }

    /// The name of this kind of value, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "a boolean",
            Json::Unsigned(_) | Json::OtherNumber => "a number",
            Json::Text(_) => "a string",
            Json::Array(_) => "an array",
            Json::Object(_) => "an object",
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Unsigned(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Json, E> {
        Ok(u64::try_from(value).map_or(Json::OtherNumber, Json::Unsigned))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Json, E> {
        Ok(Json::OtherNumber)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Json, E> {
        Ok(Json::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut array = Vec::new();
        while let Some(item) = items.next_element()? {
            array.push(item);
        }
        Ok(Json::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut members: Vec<(String, Json)> = Vec::new();
        // Only few members are looked through one by one, so that an object of a hundred
        // thousand members costs no more than its length.
        let mut names = std::collections::HashSet::new();
        while let Some(name) = entries.next_key::<String>()? {
            let doubled = if members.len() < 16 {
                members.iter().any(|(known, _)| *known == name)
            } else {
                if names.is_empty() {
                    names.extend(members.iter().map(|(known, _)| known.clone()));
                }
                !names.insert(name.clone())
            };
            if doubled {
                return Err(A::Error::custom(format_args!(
                    "member {name:?} stands twice"
                )));
            }
            members.push((name, entries.next_value()?));
        }
        Ok(Json::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_stands_twice_is_refused_at_any_depth() {
        assert!(Json::parse(br#"{"a":1,"b":{"a":1}}"#).is_ok());
        for bad in [r#"{"a":1,"a":1}"#, r#"[{"x":{"a":1,"\u0061":2}}]"#] {
            let error = Json::parse(bad.as_bytes()).unwrap_err();
            assert!(error.contains(r#"member "a" stands twice"#), "{error}");
        }
        let many: Vec<String> = (0..40).map(|n| format!("\"m{n}\":0")).collect();
        assert!(Json::parse(format!("{{{}}}", many.join(",")).as_bytes()).is_ok());
        let doubled = format!("{{{},\"m3\":0}}", many.join(","));
        assert!(Json::parse(doubled.as_bytes()).is_err());
    }

    #[test]
    fn the_reason_names_the_column() {
        let error = Json::parse(br#"{"a":"\ud800"}"#).unwrap_err();
        assert!(
            error.contains("surrogate") || error.contains("hex escape"),
            "{error}"
        );
        assert!(error.contains("column"), "{error}");
        assert_eq!(
            Json::parse(b"{\"a\":\"\xff\"}").unwrap_err(),
            "invalid UTF-8 at byte 7"
        );
        assert!(Json::parse(b"{\"a\":1} x").is_err());
        assert!(Json::parse(b"").is_err());
        assert!(Json::parse("[".repeat(100_000).as_bytes()).is_err());
    }
}
