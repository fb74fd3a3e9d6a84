//! What a look at a database finds in it.

use std::collections::HashMap;

use crate::time::Time;

/// What is in a database, in numbers.
#[derive(Clone, Debug)]
pub struct Contents {
    pub conversations: u64,
    pub messages: u64,
    pub exports: u64,
    /// Exports that are done and still kept.
    pub kept: u64,
    /// A first load of the log has begun and is not finished.
    pub loading: bool,
    /// The latest time that the ledger has recorded as past, where it goes by the clock of this
    /// machine.
    pub latest: Option<Time>,
    pub pins: Pins,
}

/// What the ledger needs of the log, and what the log knows of the ledger.
#[derive(Clone, Debug, Default)]
pub struct Pins {
    /// Exports of the ledger for which the log may still have to be read, with their snapshots.
    pub needed: Vec<(String, String)>,
    /// Snapshots that the log has pinned, by export.
    pub there: HashMap<String, String>,
}

impl Pins {
    /// The exports that the ledger of these pins needs and the log of `log` has lost.
    pub fn lost<'a>(&'a self, log: &Pins) -> Vec<&'a str> {
        let lost = self
            .needed
            .iter()
            .filter(|(job, snapshot)| log.there.get(job) != Some(snapshot));
        lost.map(|(job, _)| job.as_str()).collect()
    }
}
