//! The log into the raw parts of an export, in order: the same for a worker that writes them
//! and for a check that compares them.

use std::sync::Arc;

use crate::cut::CutRule;
use crate::render::write_line;
use crate::snapshot::Snapshot;
use crate::source::{Page, Place, Source, SourceError, Windows};

/// One part before it is compressed.
pub struct RawPart {
    /// From 0.
    pub number: u64,
    pub first: Place,
    pub last: Place,
    pub messages: u64,
    pub lines: Vec<u8>,
}

/// Runs through the messages of an export once, in order, and cuts them into parts.
pub struct PartReader<'a> {
    source: &'a dyn Source,
    snapshot: &'a Snapshot,
    windows: &'a Arc<Windows>,
    cut: CutRule,
    page: Page,
    /// How many messages of the page are rendered.
    rendered: usize,
    /// The message that the next part begins with.
    next: Option<Place>,
    number: u64,
}

impl<'a> PartReader<'a> {
    pub fn new(
        source: &'a dyn Source,
        snapshot: &'a Snapshot,
        windows: &'a Arc<Windows>,
        cut: CutRule,
    ) -> PartReader<'a> {
        PartReader {
            source,
            snapshot,
            windows,
            cut,
            page: Page::default(),
            rendered: 0,
            next: windows.first(),
            number: 0,
        }
    }

    /// The message that the next part begins with, or `None` after the last part.
    pub fn place(&self) -> Option<Place> {
        self.next
    }

    /// The number of the next part.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Takes the next part for done: it ends with the message at `last`.
    pub fn skip(&mut self, last: Place) {
        self.next = self.windows.after(last);
        self.number += 1;
        while let Some((place, _)) = self.page.get(self.rendered)
            && place <= last
        {
            self.rendered += 1;
        }
    }

    /// Renders the next part into `lines`, whose content is overwritten, or gives `None` after
    /// the last one.
    pub async fn read(&mut self, mut lines: Vec<u8>) -> Result<Option<RawPart>, SourceError> {
        let Some(first) = self.next else {
            return Ok(None);
        };
        lines.clear();
        let mut part = RawPart {
            number: self.number,
            first,
            last: first,
            messages: 0,
            lines,
        };
        while let Some(at) = self.next {
            if self.rendered == self.page.len() {
                let page = std::mem::take(&mut self.page);
                let reading = self.source.page(self.snapshot, self.windows, at, page);
                self.page = reading.await?;
                self.rendered = 0;
            }
            let next = self.page.get(self.rendered);
            let Some((place, message)) = next.filter(|(place, _)| *place == at) else {
                return Err(SourceError::LogChanged(format!(
                    "message {} was not where it belongs",
                    at.seq
                )));
            };
            let conv = self
                .windows
                .get(place.window)
                .map_or("", |window| window.conv.as_str());
            write_line(conv, &message, &mut part.lines);
            part.last = place;
            part.messages += 1;
            self.rendered += 1;
            self.next = self.windows.after(place);
            if self.cut.ends(part.lines.len() as u64, part.messages) {
                break;
            }
        }
        self.number += 1;
        Ok(Some(part))
    }
}
