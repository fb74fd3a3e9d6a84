//! Points at which a process can be made to die or to stand still, for tests of what it leaves
//! behind. Without the feature `failpoints`, which only tests have, nothing of this is compiled.

/// Passes a point. Its name is one of `NAMES`; a test looks for every one of them.
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        fail::fail_point!($name);
    };
}
pub(crate) use failpoint;

#[cfg(feature = "failpoints")]
pub use armed::{Deed, NAMES, arm};

#[cfg(feature = "failpoints")]
mod armed {
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::process::{Signal, getpid, kill_process};

    /// All points, in the order of an attempt's life, then those of a sweep.
    pub const NAMES: [&str; 26] = [
        "claim.locked",
        "attempt.claimed",
        "lease.renewed",
        "part.encoded",
        "part.put",
        "part.recorded",
        "upload.before",
        "upload.begun",
        "upload.noted",
        "piece.before",
        "piece.sent",
        "upload.sent",
        "upload.finished",
        "attempt.worked",
        "attempt.settled",
        "attempt.tidied",
        "tidy.listed",
        "tidy.read",
        "delete.object",
        "delete.deleted",
        "give-up.before",
        "give-up.done",
        "give-up.forgotten",
        "sweep.expired",
        "purge.tidied",
        "purge.noted",
    ];

    /// What a process does to itself at a point.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Deed {
        /// SIGKILL: nothing is unwound, nothing flushed.
        Dies,
        /// SIGSTOP, until somebody else sends SIGCONT.
        StandsStill,
    }

    impl Deed {
        pub const fn as_str(self) -> &'static str {
            match self {
                Deed::Dies => "dies",
                Deed::StandsStill => "stands-still",
            }
        }

        fn parse(text: &str) -> Option<Deed> {
            let deeds = [Deed::Dies, Deed::StandsStill];
            deeds.into_iter().find(|deed| deed.as_str() == text)
        }
    }

    /// Lets this process do a deed to itself, once: `NAME:PASSES:DEED`, where PASSES is how often
    /// the point is passed before.
    ///
    /// # Errors
    /// The text is of another form, or there is no such point.
    pub fn arm(text: &str) -> Result<(), String> {
        let wrong = || format!("{text:?} is not NAME:PASSES:DEED of a point");
        let (name, rest) = text.split_once(':').ok_or_else(wrong)?;
        let (passes, deed) = rest.split_once(':').ok_or_else(wrong)?;
        let passes: u64 = passes.parse().map_err(|_| wrong())?;
        let deed = Deed::parse(deed).ok_or_else(wrong)?;
        if !NAMES.contains(&name) {
            return Err(wrong());
        }
        let passed = AtomicU64::new(0);
        fail::cfg_callback(name, move || {
            if passed.fetch_add(1, Ordering::SeqCst) == passes {
                let signal = match deed {
                    Deed::Dies => Signal::KILL,
                    Deed::StandsStill => Signal::STOP,
                };
                // Signalling oneself needs no permission.
                let _ = kill_process(getpid(), signal);
            }
        })
    }
}
