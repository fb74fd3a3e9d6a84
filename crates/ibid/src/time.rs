//! Points in time, their one spelling, and the clock that everything is told by.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// A point in time in microseconds since 1970-01-01T00:00:00Z, within the years 0000 to 9999.
///
/// Its text is RFC 3339 in UTC with six digits after the point: `2026-01-05T09:30:00.000000Z`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(i64);

const MICROS_PER_SECOND: i64 = 1_000_000;
const SECONDS_PER_DAY: i64 = 86_400;

impl Time {
    /// Microseconds since the epoch as a time, whatever the year.
    pub const fn from_micros(micros: i64) -> Time {
        Time(micros)
    }

    /// Whole seconds since the epoch as a time.
    pub const fn from_seconds(seconds: i64) -> Time {
        Time(seconds.saturating_mul(MICROS_PER_SECOND))
    }

    /// Microseconds since the epoch.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// Whole seconds since the epoch, cut towards the past.
    pub const fn seconds(self) -> i64 {
        self.0.div_euclid(MICROS_PER_SECOND)
    }

    /// This time and `span` more.
    pub fn plus(self, span: Duration) -> Time {
        let span = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Time(self.0.saturating_add(span))
    }

    /// This time less `span`.
    pub fn minus(self, span: Duration) -> Time {
        let span = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Time(self.0.saturating_sub(span))
    }

    /// How long it is from this time until `later`; zero when that is not later.
    pub fn until(self, later: Time) -> Duration {
        Duration::from_micros(u64::try_from(later.0.saturating_sub(self.0)).unwrap_or(0))
    }

    /// Reads an RFC 3339 `date-time` (section 5.6): an offset is required, digits beyond the
    /// microsecond are cut, and a leap second counts as the last microsecond of its minute.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the text.
    pub fn parse(text: &str) -> Result<Time, &'static str> {
        const FORM: &str = "must be an RFC 3339 time with an offset, such as 2026-01-05T09:30:00Z";
        let bytes = text.as_bytes();
        if bytes.len() < 20 || !bytes.is_ascii() {
            return Err(FORM);
        }
        let number = |from: usize, to: usize| -> Result<i64, &'static str> {
            let mut value = 0;
            for byte in &bytes[from..to] {
                if !byte.is_ascii_digit() {
                    return Err(FORM);
                }
                value = value * 10 + i64::from(byte - b'0');
            }
            Ok(value)
        };
        let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
        let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
        if bytes[4] != b'-'
            || bytes[7] != b'-'
            || !matches!(bytes[10], b'T' | b't')
            || bytes[13] != b':'
            || bytes[16] != b':'
        {
            return Err(FORM);
        }
        let mut at = 19;
        let mut fraction = 0;
        if bytes[at] == b'.' {
            let digits = bytes[at + 1..]
                .iter()
                .take_while(|b| b.is_ascii_digit())
                .count();
            if digits == 0 {
                return Err(FORM);
            }
            let kept = digits.min(6);
            fraction = number(at + 1, at + 1 + kept)? * 10_i64.pow(6 - kept as u32);
            at += 1 + digits;
        }
        let offset_seconds = match bytes.get(at) {
            Some(b'Z' | b'z') if bytes.len() == at + 1 => 0,
            Some(sign @ (b'+' | b'-')) if bytes.len() == at + 6 && bytes[at + 3] == b':' => {
                let (hours, minutes) = (number(at + 1, at + 3)?, number(at + 4, at + 6)?);
                if hours > 23 || minutes > 59 {
                    return Err("has an offset that does not exist");
                }
                let offset = hours * 3600 + minutes * 60;
                if *sign == b'+' { offset } else { -offset }
            }
            _ => return Err(FORM),
        };
        if hour > 23 || minute > 59 || second > 60 {
            return Err("has a time of day that does not exist");
        }
        let date = jiff::civil::Date::new(year as i16, month as i8, day as i8)
            .map_err(|_| "has a date that does not exist")?;
        let (second, fraction) = if second == 60 {
            (59, MICROS_PER_SECOND - 1)
        } else {
            (second, fraction)
        };
        let seconds = days_since_epoch(date) * SECONDS_PER_DAY + hour * 3600 + minute * 60 + second
            - offset_seconds;
        let time = Time(seconds * MICROS_PER_SECOND + fraction);
        if !(Time::FIRST..=Time::LAST).contains(&time) {
            return Err("lies outside the years 0000 to 9999 in UTC");
        }
        Ok(time)
    }

    /// 0000-01-01T00:00:00Z, the first time that RFC 3339 can spell.
    pub const FIRST: Time = Time(-62_167_219_200 * MICROS_PER_SECOND);
    /// 9999-12-31T23:59:59.999999Z, the last time that RFC 3339 can spell.
    pub const LAST: Time = Time(253_402_300_800 * MICROS_PER_SECOND - 1);

    /// Appends the one spelling of this time, 27 bytes. A time outside the years 0000 to 9999
    /// is written as the nearest that can be spelt.
    pub fn write(self, out: &mut Vec<u8>) {
        let time = self.clamp(Time::FIRST, Time::LAST);
        let seconds = time.seconds();
        let date = date_of_day(seconds.div_euclid(SECONDS_PER_DAY));
        let of_day = seconds.rem_euclid(SECONDS_PER_DAY);
        let fraction = time.0.rem_euclid(MICROS_PER_SECOND);
        let mut text = *b"0000-00-00T00:00:00.000000Z";
        let mut put = |at: usize, digits: usize, mut value: i64| {
            for place in (at..at + digits).rev() {
                text[place] = b'0' + (value % 10) as u8;
                value /= 10;
            }
        };
        put(0, 4, i64::from(date.year()));
        put(5, 2, i64::from(date.month()));
        put(8, 2, i64::from(date.day()));
        put(11, 2, of_day / 3600);
        put(14, 2, of_day / 60 % 60);
        put(17, 2, of_day % 60);
        put(20, 6, fraction);
        out.extend_from_slice(&text);
    }
}

fn days_since_epoch(date: jiff::civil::Date) -> i64 {
    let epoch = jiff::civil::Date::constant(1970, 1, 1);
    i64::from(date.duration_since(epoch).as_hours() as i32) / 24
}

fn date_of_day(day: i64) -> jiff::civil::Date {
    let epoch = jiff::civil::Date::constant(1970, 1, 1);
    epoch.saturating_add(jiff::SignedDuration::from_hours(day * 24))
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Vec::with_capacity(27);
        self.write(&mut text);
        f.write_str(&String::from_utf8_lossy(&text))
    }
}

impl serde::Serialize for Time {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What time it is, as an argument: the system's clock and an offset that tests move.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    frozen_at: Option<Time>,
    offset_micros: Arc<AtomicI64>,
}

impl Clock {
    /// The machine's clock.
    pub fn system() -> Clock {
        Clock::default()
    }

    /// A clock that stands at `time` until it is moved with [`Clock::advance`].
    pub fn frozen_at(time: Time) -> Clock {
        Clock {
            frozen_at: Some(time),
            offset_micros: Arc::default(),
        }
    }

    /// The time now.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that asks the machine"
    )]
    pub fn now(&self) -> Time {
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        self.on(Time(i64::try_from(since.as_micros()).unwrap_or(i64::MAX)))
    }

    /// The time now where another clock, such as a database's, says `base`: this clock's offset
    /// counts there too, and a clock that stands, stands everywhere.
    pub fn on(&self, base: Time) -> Time {
        let base = self.frozen_at.unwrap_or(base);
        Time(base.0 + self.offset_micros.load(Ordering::Relaxed))
    }

    /// Moves this clock and all its clones forward.
    pub fn advance(&self, span: Duration) {
        let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        self.offset_micros.fetch_add(micros, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn utc(text: &str) -> String {
        Time::parse(text).expect(text).to_string()
    }

    #[test]
    fn times_are_kept_in_utc_and_cut_to_microseconds() {
        assert_eq!(utc("2026-01-05T09:30:00Z"), "2026-01-05T09:30:00.000000Z");
        assert_eq!(
            utc("2026-01-05T09:30:00.123456789+02:00"),
            "2026-01-05T07:30:00.123456Z"
        );
        assert_eq!(utc("2024-02-29t23:59:59.9z"), "2024-02-29T23:59:59.900000Z");
        assert_eq!(
            utc("1969-12-31T23:59:59.999999-00:00"),
            "1969-12-31T23:59:59.999999Z"
        );
        assert_eq!(utc("0000-01-01T00:00:00Z"), "0000-01-01T00:00:00.000000Z");
        assert_eq!(
            utc("9999-12-31T23:59:59.999999Z"),
            "9999-12-31T23:59:59.999999Z"
        );
        assert_eq!(utc("2016-12-31T23:59:60Z"), "2016-12-31T23:59:59.999999Z");
        assert_eq!(
            Time::parse("1970-01-02T00:00:00Z").unwrap().micros(),
            86_400_000_000
        );
    }

    #[test]
    fn what_is_not_an_rfc_3339_time_is_refused() {
        for bad in [
            "",
            "2026-01-05",
            "2026-01-05 09:30:00Z",
            "2026-01-05T09:30:00",
            "2026-01-05T09:30Z",
            "2026-01-05T09:30:00.Z",
            "2026-01-05T09:30:00+0200",
            "2026-01-05T09:30:00+24:00",
            "2026-01-05T24:00:00Z",
            "2026-01-05T09:60:00Z",
            "2026-01-05T09:30:61Z",
            "2026-02-29T09:30:00Z",
            "2026-13-01T09:30:00Z",
            "+026-01-05T09:30:00Z",
            "2026-01-05T09:30:00Z ",
            "2026-01-05T09:30:00\u{ff3a}",
            "0000-01-01T00:00:00+00:01",
            "9999-12-31T23:59:59-00:01",
        ] {
            assert!(Time::parse(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn a_clock_moves_with_all_its_clones() {
        let clock = Clock::frozen_at(Time::from_seconds(100));
        let same = clock.clone();
        clock.advance(Duration::from_secs(5));
        assert_eq!(same.now(), Time::from_seconds(105));
        assert_eq!(
            same.now().until(Time::from_seconds(106)),
            Duration::from_secs(1)
        );
        assert_eq!(same.now().until(Time::from_seconds(1)), Duration::ZERO);
    }
}
