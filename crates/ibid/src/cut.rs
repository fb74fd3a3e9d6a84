//! Where one part ends and the next begins: a pure function of the ordered lines.

use serde::{Deserialize, Serialize};

/// When a part is full. Fixed in the job, because the bytes of the artefact depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CutRule {
    /// A part ends with the line that brings it to this many raw bytes.
    pub part_bytes: u64,
    /// A part ends with this many lines; 0 means no limit.
    pub part_messages: u64,
}

impl CutRule {
    /// Whether a part of `bytes` raw bytes and `messages` lines (at least one) ends here.
    pub fn ends(&self, bytes: u64, messages: u64) -> bool {
        bytes >= self.part_bytes || (self.part_messages != 0 && messages >= self.part_messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_ends_with_the_line_that_fills_it() {
        let rule = CutRule {
            part_bytes: 100,
            part_messages: 0,
        };
        assert!(!rule.ends(99, 50));
        assert!(rule.ends(100, 1));
        let rule = CutRule {
            part_bytes: 100,
            part_messages: 3,
        };
        assert!(!rule.ends(10, 2));
        assert!(rule.ends(10, 3));
    }
}
