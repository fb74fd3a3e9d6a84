//! What is in an export and what is out: the data snapshot, the stays, and the policies that
//! turn stays into effective stays.

use serde::{Deserialize, Serialize};

use crate::event::{ExMembers, History};
use crate::ids::ConvId;

/// A data snapshot as a value, which outlives processes, connections and restarts.
///
/// A log entry is in it iff `gseq <= low`, or `gseq <= high` and its transaction `xid` was
/// committed: `xid < xmax` and `xid` not in `xip`. On a database with one writer the order of
/// gseq is the order of commits, so `low = high` and the rest is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    pub low: u64,
    pub high: u64,
    pub xmax: u64,
    pub xip: Vec<u64>,
}

impl Snapshot {
    /// The snapshot of everything up to `gseq` on a database with one writer.
    pub fn up_to(gseq: u64) -> Snapshot {
        Snapshot {
            low: gseq,
            high: gseq,
            xmax: 0,
            xip: Vec::new(),
        }
    }

    /// Whether an entry written by transaction `xid` is in; a database with one writer has 0.
    pub fn contains(&self, gseq: u64, xid: u64) -> bool {
        gseq <= self.low || (gseq <= self.high && xid < self.xmax && !self.xip.contains(&xid))
    }
}

/// What members and former members of a conversation see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Policy {
    pub history: History,
    pub ex_members: ExMembers,
}

/// A stretch of one conversation: the gseqs `from_gseq <= gseq < to_gseq` (no end: still
/// inside), whose messages are those with `first_seq <= seq <= last_seq`.
///
/// Inside a conversation gseq order is seq order, so both pairs say the same. The first rules
/// what is in; the second says how many messages there must be, so that a log from which one
/// was removed gives an error and not a shorter file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stay {
    pub from_gseq: u64,
    pub to_gseq: Option<u64>,
    pub first_seq: u64,
    /// Below `first_seq` when the stay holds no message.
    pub last_seq: u64,
}

impl Stay {
    pub fn contains(&self, gseq: u64) -> bool {
        self.from_gseq <= gseq && self.to_gseq.is_none_or(|to| gseq < to)
    }

    pub fn messages(&self) -> u64 {
        (self.last_seq + 1).saturating_sub(self.first_seq)
    }
}

/// What a user may see of one conversation: stays in ascending order that do not touch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub conv: ConvId,
    pub stays: Vec<Stay>,
}

impl Window {
    pub fn messages(&self) -> u64 {
        self.stays.iter().map(Stay::messages).sum()
    }

    /// The stay that holds the message `seq`, or else the next one that holds any.
    pub fn stay_at_or_after(&self, seq: u64) -> Option<&Stay> {
        let from = self.stays.partition_point(|stay| stay.last_seq < seq);
        self.stays[from..].iter().find(|stay| stay.messages() > 0)
    }

    /// Whether something that was done at `gseq` was done inside.
    pub fn contains(&self, gseq: u64) -> bool {
        self.stays.iter().any(|stay| stay.contains(gseq))
    }
}

/// Turns the stays of one user in one conversation into the effective stays under `policy`.
///
/// `stays` may come in any order and overlap. A user is inside when a stay has no end.
///
/// | history, ex_members | inside | has left |
/// |---|---|---|
/// | joined, keep | the stays | the stays |
/// | all, keep | everything | everything until the last leave |
/// | joined, none | the stays, earlier ones too | nothing |
/// | all, none | everything | nothing |
pub fn effective_stays(mut stays: Vec<Stay>, policy: Policy) -> Vec<Stay> {
    let inside = stays.iter().any(|stay| stay.to_gseq.is_none());
    if stays.is_empty() || (!inside && policy.ex_members == ExMembers::None) {
        return Vec::new();
    }
    match policy.history {
        History::All => {
            let to_gseq = if inside {
                None
            } else {
                stays.iter().filter_map(|stay| stay.to_gseq).max()
            };
            vec![Stay {
                from_gseq: 0,
                to_gseq,
                first_seq: 1,
                last_seq: stays.iter().map(|stay| stay.last_seq).max().unwrap_or(0),
            }]
        }
        History::Joined => {
            stays.sort_by_key(|stay| stay.from_gseq);
            let mut merged: Vec<Stay> = Vec::with_capacity(stays.len());
            for stay in stays {
                match merged.last_mut() {
                    Some(last) if last.to_gseq.is_none_or(|to| stay.from_gseq <= to) => {
                        last.to_gseq = match (last.to_gseq, stay.to_gseq) {
                            (Some(a), Some(b)) => Some(a.max(b)),
                            _ => None,
                        };
                        last.last_seq = last.last_seq.max(stay.last_seq);
                    }
                    _ => merged.push(stay),
                }
            }
            merged
        }
    }
}

/// A revision of a message as the log holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    pub gseq: u64,
    pub kind: RevisionKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevisionKind {
    Edit { body: Vec<u8> },
    Recall,
    Restore,
}

/// What the revisions make of a message: its body and flags as `window` shows them.
///
/// `revisions` are those in the snapshot, in order of gseq. An edit counts only if it was made
/// inside the window; a recall or a restore counts always.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Revised {
    /// The newest body that counts, if there was an edit that does.
    pub body: Option<Vec<u8>>,
    pub edited: bool,
    pub recalled: bool,
}

impl Revised {
    pub fn apply(&mut self, revision: Revision, window: &Window) {
        match revision.kind {
            RevisionKind::Edit { body } => {
                if window.contains(revision.gseq) {
                    self.body = Some(body);
                    self.edited = true;
                }
            }
            RevisionKind::Recall => self.recalled = true,
            RevisionKind::Restore => self.recalled = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stay(from_gseq: u64, to_gseq: Option<u64>, first_seq: u64, last_seq: u64) -> Stay {
        Stay {
            from_gseq,
            to_gseq,
            first_seq,
            last_seq,
        }
    }

    #[test]
    fn a_snapshot_holds_what_was_committed_and_nothing_else() {
        let snapshot = Snapshot {
            low: 10,
            high: 20,
            xmax: 100,
            xip: vec![97, 99],
        };
        for (gseq, xid, inside) in [
            (10, 500, true),
            (11, 96, true),
            (11, 97, false),
            (20, 98, true),
            (20, 99, false),
            (20, 100, false),
            (21, 1, false),
        ] {
            assert_eq!(
                snapshot.contains(gseq, xid),
                inside,
                "gseq {gseq} xid {xid}"
            );
        }
        let one_writer = Snapshot::up_to(7);
        assert!(one_writer.contains(7, 0) && !one_writer.contains(8, 0));
    }

    #[test]
    fn policies_turn_stays_into_effective_stays() {
        let policy = |history, ex_members| Policy {
            history,
            ex_members,
        };
        let inside = vec![stay(5, None, 4, 9)];
        let left = vec![stay(5, Some(8), 4, 6)];
        let came_back = vec![stay(5, Some(8), 4, 6), stay(12, None, 8, 9)];
        use ExMembers::{Keep, None as Nothing};
        use History::{All, Joined};
        for (history, ex_members, stays, expected) in [
            (Joined, Keep, &inside, inside.clone()),
            (Joined, Keep, &left, left.clone()),
            (Joined, Keep, &came_back, came_back.clone()),
            (All, Keep, &inside, vec![stay(0, None, 1, 9)]),
            (All, Keep, &left, vec![stay(0, Some(8), 1, 6)]),
            (All, Keep, &came_back, vec![stay(0, None, 1, 9)]),
            (Joined, Nothing, &inside, inside.clone()),
            (Joined, Nothing, &left, vec![]),
            (Joined, Nothing, &came_back, came_back.clone()),
            (All, Nothing, &inside, vec![stay(0, None, 1, 9)]),
            (All, Nothing, &left, vec![]),
            (All, Nothing, &came_back, vec![stay(0, None, 1, 9)]),
        ] {
            let effective = effective_stays(stays.clone(), policy(history, ex_members));
            assert_eq!(effective, expected, "{history:?} {ex_members:?} {stays:?}");
        }
    }

    #[test]
    fn overlapping_and_touching_stays_become_one() {
        let stays = vec![
            stay(20, Some(30), 15, 20),
            stay(1, Some(10), 1, 5),
            stay(5, Some(12), 3, 7),
            stay(12, Some(13), 8, 8),
        ];
        assert_eq!(
            effective_stays(stays, Policy::default()),
            vec![stay(1, Some(13), 1, 8), stay(20, Some(30), 15, 20)]
        );
        assert_eq!(
            effective_stays(
                vec![stay(1, None, 1, 9), stay(4, Some(6), 3, 4)],
                Policy::default()
            ),
            vec![stay(1, None, 1, 9)]
        );
    }

    #[test]
    fn an_edit_after_a_recall_marks_the_message_and_does_not_bring_it_back() {
        let window = Window {
            conv: ConvId::parse("c").unwrap(),
            stays: vec![stay(1, Some(10), 1, 5)],
        };
        let edit = |gseq, body: &str| Revision {
            gseq,
            kind: RevisionKind::Edit {
                body: body.as_bytes().to_vec(),
            },
        };
        let mut revised = Revised::default();
        revised.apply(
            Revision {
                gseq: 3,
                kind: RevisionKind::Recall,
            },
            &window,
        );
        revised.apply(edit(4, "new"), &window);
        assert!(revised.recalled && revised.edited);
        revised.apply(edit(11, "after the leave"), &window);
        revised.apply(
            Revision {
                gseq: 12,
                kind: RevisionKind::Restore,
            },
            &window,
        );
        assert!(!revised.recalled);
        assert_eq!(revised.body.as_deref(), Some(b"new".as_slice()));
    }
}
