//! How many exports one user may have.

use std::time::Duration;

use crate::time::Time;

/// The limits on creating exports; 0 means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub unfinished_per_user: u64,
    pub exports_per_user_per_day: u64,
}

/// What one user has when the next export is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Jobs that are queued or running.
    pub unfinished: u64,
    /// Jobs created in the last 24 hours.
    pub last_day: u64,
    /// When the oldest job that keeps the user at the daily limit was created.
    pub frees_at: Option<Time>,
}

/// A limit that is reached, and when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitReached {
    /// Ends when one of the unfinished exports does; worth asking again after `retry_after`.
    Unfinished { limit: u64, retry_after: Duration },
    /// Ends at `until`.
    PerDay {
        limit: u64,
        until: Time,
        retry_after: Duration,
    },
}

/// The window of [`Limits::exports_per_user_per_day`].
pub const DAY: Duration = Duration::from_secs(86_400);

/// When an unfinished export may have ended; nobody can know.
const UNFINISHED_RETRY: Duration = Duration::from_secs(10);

impl Limits {
    /// Whether one more export may be created at `now`.
    ///
    /// # Errors
    /// The limit that is reached; of both, the one that lasts longer.
    pub fn check(&self, usage: &Usage, now: Time) -> Result<(), LimitReached> {
        if self.exports_per_user_per_day != 0 && usage.last_day >= self.exports_per_user_per_day {
            let until = usage.frees_at.unwrap_or(now).plus(DAY);
            return Err(LimitReached::PerDay {
                limit: self.exports_per_user_per_day,
                until,
                retry_after: now.until(until),
            });
        }
        if self.unfinished_per_user != 0 && usage.unfinished >= self.unfinished_per_user {
            return Err(LimitReached::Unfinished {
                limit: self.unfinished_per_user,
                retry_after: UNFINISHED_RETRY,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_seconds(1_000_000);

    #[test]
    fn a_limit_says_when_it_ends() {
        let limits = Limits {
            unfinished_per_user: 3,
            exports_per_user_per_day: 5,
        };
        let usage = |unfinished, last_day| Usage {
            unfinished,
            last_day,
            frees_at: Some(Time::from_seconds(1_000_000 - 86_000)),
        };
        assert_eq!(limits.check(&usage(2, 4), NOW), Ok(()));
        assert!(matches!(
            limits.check(&usage(3, 4), NOW),
            Err(LimitReached::Unfinished { limit: 3, .. })
        ));
        assert_eq!(
            limits.check(&usage(3, 5), NOW),
            Err(LimitReached::PerDay {
                limit: 5,
                until: Time::from_seconds(1_000_400),
                retry_after: Duration::from_secs(400),
            })
        );
    }

    #[test]
    fn zero_means_no_limit() {
        let limits = Limits {
            unfinished_per_user: 0,
            exports_per_user_per_day: 0,
        };
        let usage = Usage {
            unfinished: 1_000,
            last_day: 1_000,
            frees_at: None,
        };
        assert_eq!(limits.check(&usage, NOW), Ok(()));
    }
}
