//! A file of events into the log: checked whole, then written in short transactions, and gone
//! on with where it was interrupted.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek as _};

use sha2::{Digest as _, Sha256};

use crate::append::{Names, Outcome};
use crate::event::{Event, Invalid, MAX_LINE_BYTES};
use crate::source::{Batch, Progress, Source, SourceError};

/// The most events in one transaction: another writer waits no longer than that.
const BATCH_EVENTS: usize = 5_000;
/// The most bytes of lines in one batch, so that memory stays small for long lines.
const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// How long the lock is left to others between two transactions.
const BREATH: std::time::Duration = std::time::Duration::from_millis(2);

/// What a program of Windows writes at the head of a file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const TOO_LONG: &str = "the line is longer than 4 MiB";

/// How an import is done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// Leaves invalid lines out instead of refusing the file.
    pub skip_invalid: bool,
    /// Imports a file again that was imported whole before.
    pub again: bool,
}

/// What an import did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub accepted: u64,
    pub duplicates: u64,
    pub unchanged: u64,
    /// Invalid lines that were left out.
    pub skipped: u64,
    /// Lines that an earlier run of the same import had written.
    pub continued_after_line: u64,
    /// Whether the earlier run had written all of it, so that this one wrote nothing.
    pub finished_before: bool,
}

/// What an import is at.
#[derive(Debug)]
pub enum Note<'a> {
    /// So many bytes of the file are checked.
    Checked(u64),
    /// So many bytes of the file are in the log.
    Written(u64),
    /// A line is invalid: refused, or skipped if that was asked for.
    Refused { line: u64, invalid: &'a Invalid },
}

/// Why an import ended without writing everything.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot read the file: {0}")]
    Read(#[from] io::Error),
    /// Each was told as a [`Note::Refused`]; this run wrote nothing.
    #[error("{count} lines are invalid")]
    Refused {
        count: u64,
        /// Lines that an earlier, interrupted run of the same import had written.
        written_before: u64,
    },
    #[error(
        "the file changed while it was read; what is written stays, so import the rest as \
         another file"
    )]
    FileChanged,
    #[error(
        "line {line} was valid when the file was checked and is not any more, because the log \
         was written to meanwhile ({invalid}); the lines before its batch are written: go on with \
         --skip-invalid on the same file, or put what is missing into a file of its own"
    )]
    Overtaken { line: u64, invalid: Invalid },
    #[error(transparent)]
    Source(SourceError),
}

impl From<SourceError> for ImportError {
    fn from(error: SourceError) -> ImportError {
        match error {
            SourceError::Invalid { line, invalid } => ImportError::Overtaken { line, invalid },
            other => ImportError::Source(other),
        }
    }
}

/// Imports `file`, which must be one that can be read again from its beginning.
///
/// The whole file is checked first; unless `skip_invalid`, one invalid line means that nothing
/// is written. A file is known by its digest: one that was interrupted is gone on with, one that
/// is finished is left alone unless `again`. Memory grows with the number of conversations and of ids in the file, not with
/// its length.
///
/// # Errors
/// See [`ImportError`]. What was written stays, and the same call goes on after it.
pub async fn import(
    source: &dyn Source,
    file: &mut File,
    manner: Manner,
    note: &mut (dyn FnMut(Note<'_>) + Send),
) -> Result<Report, ImportError> {
    let digest = digest(file)?;
    let done = source.imported(digest).await?;
    let done = done.filter(|done| !(done.finished && manner.again));
    let mut report = Report {
        continued_after_line: done.map_or(0, |done| done.lines),
        finished_before: done.is_some_and(|done| done.finished),
        ..Report::default()
    };
    if report.finished_before {
        return Ok(report);
    }
    let refused = check(source, file, report.continued_after_line, note).await?;
    if refused > 0 && !manner.skip_invalid {
        return Err(ImportError::Refused {
            count: refused,
            written_before: report.continued_after_line,
        });
    }
    write(source, file, digest, manner, &mut report, note).await?;
    Ok(report)
}

/// What became of the lines of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Appended {
    /// Each line that holds an event, by its number from 1.
    pub outcomes: Vec<(u64, Outcome)>,
}

/// Why a text was not appended. Nothing of it is written.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// These lines are invalid.
    #[error("{} lines are invalid", .0.len())]
    Refused(Vec<(u64, Invalid)>),
    #[error(transparent)]
    Source(SourceError),
}

/// Appends the events of `text`, one a line, in one transaction.
///
/// Lines of white space count and say nothing. Unless `skip_invalid`, one invalid line means that
/// nothing is written, and all of them are named.
///
/// # Errors
/// See [`AppendError`].
pub async fn append(
    source: &dyn Source,
    text: &[u8],
    skip_invalid: bool,
) -> Result<Appended, AppendError> {
    let mut refused = Vec::new();
    let mut events = Vec::new();
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    for (number, line) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let event = if line.len() > MAX_LINE_BYTES {
            Err(Invalid::line(TOO_LONG))
        } else {
            Event::parse(line)
        };
        match event {
            Ok(event) => events.push((number, event)),
            Err(invalid) => refused.push((number, invalid)),
        }
    }
    if !skip_invalid {
        let names = Names::default();
        let (convs, ids) = names.unknown(events.iter().map(|(_, event)| event));
        let learnt = source.learn(names, convs, ids).await;
        let mut names = learnt.map_err(AppendError::Source)?;
        for (line, event) in &events {
            if let Err(invalid) = names.check(event) {
                refused.push((*line, invalid));
            }
        }
        if !refused.is_empty() {
            refused.sort_by_key(|(line, _)| *line);
            return Err(AppendError::Refused(refused));
        }
    }
    let lines: Vec<u64> = events.iter().map(|(line, _)| *line).collect();
    let batch = Batch {
        events,
        skip_invalid,
        import: None,
    };
    let appended = source.append(batch).await.map_err(|error| match error {
        // The log was written to since it was checked.
        SourceError::Invalid { line, invalid } => AppendError::Refused(vec![(line, invalid)]),
        other => AppendError::Source(other),
    })?;
    let skipped = refused
        .into_iter()
        .map(|(line, it)| (line, Outcome::Invalid(it)));
    let mut outcomes: Vec<_> = lines.into_iter().zip(appended).chain(skipped).collect();
    outcomes.sort_by_key(|(line, _)| *line);
    Ok(Appended { outcomes })
}

fn digest(file: &mut File) -> io::Result<[u8; 32]> {
    file.rewind()?;
    let mut reader = BufReader::with_capacity(256 * 1024, file);
    let mut hash = Sha256::new();
    loop {
        let chunk = reader.fill_buf()?;
        if chunk.is_empty() {
            return Ok(hash.finalize().into());
        }
        hash.update(chunk);
        let length = chunk.len();
        reader.consume(length);
    }
}

/// Checks the lines after `skip`; gives how many are invalid.
async fn check(
    source: &dyn Source,
    file: &mut File,
    skip: u64,
    note: &mut (dyn FnMut(Note<'_>) + Send),
) -> Result<u64, ImportError> {
    file.rewind()?;
    let mut lines = Lines::new(file, skip);
    let mut names = Names::default();
    let mut refused = 0;
    loop {
        let batch = lines.next_batch()?;
        if batch.is_empty() {
            return Ok(refused);
        }
        let valid = batch.iter().filter_map(|(_, event)| event.as_ref().ok());
        let (convs, ids) = names.unknown(valid);
        names = source.learn(names, convs, ids).await?;
        for (line, event) in &batch {
            let verdict = match event {
                Ok(event) => names.check(event),
                Err(invalid) => Err(invalid.clone()),
            };
            if let Err(invalid) = &verdict {
                refused += 1;
                note(Note::Refused {
                    line: *line,
                    invalid,
                });
            }
        }
        note(Note::Checked(lines.bytes));
    }
}

async fn write(
    source: &dyn Source,
    file: &mut File,
    digest: [u8; 32],
    manner: Manner,
    report: &mut Report,
    note: &mut (dyn FnMut(Note<'_>) + Send),
) -> Result<(), ImportError> {
    file.rewind()?;
    let mut lines = Lines::new(file, report.continued_after_line);
    let mut after_line = report.continued_after_line;
    loop {
        let batch = lines.next_batch()?;
        let finished = batch.is_empty();
        if finished && lines.digest() != digest {
            return Err(ImportError::FileChanged);
        }
        let mut events = Vec::with_capacity(batch.len());
        for (line, event) in batch {
            match event {
                Ok(event) => events.push((line, event)),
                Err(_) if manner.skip_invalid => report.skipped += 1,
                Err(invalid) => return Err(ImportError::Overtaken { line, invalid }),
            }
        }
        let outcomes = source
            .append(Batch {
                events,
                skip_invalid: manner.skip_invalid,
                import: Some(Progress {
                    digest,
                    after_line,
                    lines: lines.number,
                    finished,
                    again: manner.again,
                }),
            })
            .await?;
        for outcome in outcomes {
            match outcome {
                Outcome::Accepted { .. } => report.accepted += 1,
                Outcome::Duplicate => report.duplicates += 1,
                Outcome::Unchanged => report.unchanged += 1,
                Outcome::Invalid(_) => report.skipped += 1,
            }
        }
        after_line = lines.number;
        note(Note::Written(lines.bytes));
        if finished {
            return Ok(());
        }
        tokio::time::sleep(BREATH).await;
    }
}

/// The lines of a file with their numbers, read in bounded memory.
struct Lines<'a> {
    reader: BufReader<&'a mut File>,
    hash: Sha256,
    /// The number of the line read last, from 1.
    number: u64,
    bytes: u64,
    skip: u64,
}

impl<'a> Lines<'a> {
    fn new(file: &'a mut File, skip: u64) -> Lines<'a> {
        Lines {
            reader: BufReader::with_capacity(256 * 1024, file),
            hash: Sha256::new(),
            number: 0,
            bytes: 0,
            skip,
        }
    }

    /// The digest of what has been read so far.
    fn digest(&self) -> [u8; 32] {
        self.hash.clone().finalize().into()
    }

    /// The next events, or none at the end of the file. Lines of white space count and say
    /// nothing.
    fn next_batch(&mut self) -> io::Result<Vec<(u64, Result<Event, Invalid>)>> {
        let mut batch = Vec::new();
        let mut line = Vec::new();
        let mut bytes = 0;
        while batch.len() < BATCH_EVENTS && bytes < BATCH_BYTES {
            let Some(fits) = self.read_line(&mut line)? else {
                break;
            };
            if self.number <= self.skip {
                continue;
            }
            let text = self.without_mark(&line);
            if !fits {
                let invalid = Invalid::line(TOO_LONG);
                batch.push((self.number, Err(invalid)));
            } else if !text.iter().all(u8::is_ascii_whitespace) {
                batch.push((self.number, Event::parse(text)));
                // Lines that give no event do not count: a batch without events is the end.
                bytes += line.len();
            }
        }
        Ok(batch)
    }

    /// A byte order mark at the head of the file is not part of its first line.
    fn without_mark<'l>(&self, line: &'l [u8]) -> &'l [u8] {
        match line.strip_prefix(BYTE_ORDER_MARK) {
            Some(rest) if self.number == 1 => rest,
            _ => line,
        }
    }

    /// Reads one line without its end; `Some(false)` if it was too long to keep, `None` at the
    /// end of the file.
    fn read_line(&mut self, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
        line.clear();
        let mut fits = true;
        let mut any = false;
        loop {
            let chunk = self.reader.fill_buf()?;
            if chunk.is_empty() {
                break;
            }
            any = true;
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(chunk.len(), |at| at + 1);
            let text = &chunk[..end.unwrap_or(chunk.len())];
            // One more may be the first byte of a line end of Windows.
            if line.len() + text.len() > MAX_LINE_BYTES + 1 {
                fits = false;
            } else {
                line.extend_from_slice(text);
            }
            self.hash.update(&chunk[..taken]);
            self.bytes += taken as u64;
            self.reader.consume(taken);
            if end.is_some() {
                break;
            }
        }
        if !any {
            return Ok(None);
        }
        self.number += 1;
        if line.ends_with(b"\r") {
            line.pop();
        }
        Ok(Some(fits && line.len() <= MAX_LINE_BYTES))
    }
}
