//! Spans of time as they are typed.

use std::time::Duration;

/// The longest span that is not a slip.
const CENTURY: Duration = Duration::from_secs(36_500 * 86_400);

/// Reads a whole number of days, hours, minutes or seconds: `30d`, `12h`, `90m`, `45s`.
///
/// # Errors
/// What a span must look like.
pub fn parse(text: &str) -> Result<Duration, &'static str> {
    let form = "it must be a whole number with d, h, m or s, such as 30d, 12h, 90m or 45s";
    let unit_seconds = match text.as_bytes().last() {
        Some(b'd') => 86_400,
        Some(b'h') => 3_600,
        Some(b'm') => 60,
        Some(b's') => 1,
        _ => return Err(form),
    };
    let digits = &text[..text.len() - 1];
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(form);
    }
    let seconds = digits
        .parse()
        .ok()
        .and_then(|number: u64| number.checked_mul(unit_seconds))
        .filter(|seconds| *seconds <= CENTURY.as_secs())
        .ok_or("it must not be longer than 36500d")?;
    if seconds == 0 {
        return Err("it must be longer than nothing");
    }
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_a_number_with_its_unit() {
        for (text, seconds) in [
            ("30d", 2_592_000),
            ("12h", 43_200),
            ("90m", 5_400),
            ("45s", 45),
            ("0001s", 1),
            ("36500d", 3_153_600_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
    }

    #[test]
    fn what_is_no_span_is_refused() {
        for bad in [
            "",
            "d",
            "30",
            "30 d",
            "-1d",
            "+1d",
            "1.5h",
            "1D",
            "1d2h",
            "1w",
            "0s",
            "36501d",
            "é",
            "99999999999999999999d",
            "300000000000000000d",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
