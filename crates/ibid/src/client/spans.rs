//! Which bytes of a file are there.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A set of byte offsets as sorted ranges, none empty, with a gap between any two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Spans(Vec<(u64, u64)>);

impl Spans {
    /// Whether they are as they must be and end by `length`: they may have been read from a file.
    pub(super) fn are_within(&self, length: u64) -> bool {
        let ordered = self.0.windows(2).all(|pair| match pair {
            [(_, end), (start, _)] => end < start,
            _ => true,
        });
        ordered
            && self
                .0
                .iter()
                .all(|(start, end)| start < end && *end <= length)
    }

    /// Adds the bytes of `span`.
    pub(super) fn add(&mut self, span: Range<u64>) {
        if span.is_empty() {
            return;
        }
        let (mut start, mut end) = (span.start, span.end);
        // All that touch it become one with it.
        let from = self.0.partition_point(|(_, before)| *before < start);
        let to = self.0.partition_point(|(after, _)| *after <= end);
        if let Some((first, _)) = self.0.get(from).filter(|_| from < to) {
            start = start.min(*first);
        }
        if let Some((_, last)) = to
            .checked_sub(1)
            .and_then(|to| self.0.get(to))
            .filter(|_| from < to)
        {
            end = end.max(*last);
        }
        self.0.splice(from..to, [(start, end)]);
    }

    /// How many bytes they are.
    pub(super) fn total(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Where the last one ends; 0 if there is none.
    pub(super) fn end(&self) -> u64 {
        self.0.last().map_or(0, |(_, end)| *end)
    }

    /// What is missing of a file of `length` bytes, in order.
    pub(super) fn missing(&self, length: u64) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = 0;
        for (start, end) in self.0.iter().copied().chain([(length, length)]) {
            if at < start {
                missing.push(at..start);
            }
            at = end;
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn spans_hold_what_was_added(added in prop::collection::vec((0_u64..60, 0_u64..12), 0..20)) {
            let mut spans = Spans::default();
            let mut bytes = BTreeSet::new();
            for (start, length) in added {
                spans.add(start..start + length);
                bytes.extend(start..start + length);
                prop_assert!(spans.are_within(72));
            }
            prop_assert_eq!(spans.total(), bytes.len() as u64);
            prop_assert_eq!(spans.end(), bytes.last().map_or(0, |last| last + 1));
            let missing: Vec<u64> = spans.missing(72).into_iter().flatten().collect();
            let expected: Vec<u64> = (0..72).filter(|byte| !bytes.contains(byte)).collect();
            prop_assert_eq!(missing, expected);
        }
    }

    #[test]
    fn what_is_no_set_of_spans_is_noticed() {
        for bad in [
            "[[0,0]]",
            "[[5,4]]",
            "[[0,5],[5,6]]",
            "[[4,5],[0,1]]",
            "[[0,11]]",
        ] {
            let spans: Spans = serde_json::from_str(bad).unwrap();
            assert!(!spans.are_within(10), "{bad}");
        }
        let spans: Spans = serde_json::from_str("[[0,5],[6,10]]").unwrap();
        assert!(spans.are_within(10));
    }
}
