//! `ibid import`: files of events into the log.

use std::fs::File;
use std::io::Seek as _;
use std::path::{Path, PathBuf};

use clap::Args;
use ibid::event::Invalid;
use ibid::import::{ImportError, Manner, Note, Report, import};
use ibid::source::{Source, SourceError};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::{BYTES, Failure, bar, complain, create_folder, load, open, say};
use crate::config::{Settings, StoreFlags};

/// The most invalid lines that are shown when they are refused: after so many, the file is to
/// be mended at its source.
const MOST_SHOWN: usize = 100;

/// Put events from files into the log
///
/// Each file holds one JSON event a line. It is checked whole before anything of it is written;
/// when it is interrupted, the same command goes on where it stopped. A file that was imported
/// whole is left alone; if it grows, give its events ids, so that those that are known are skipped.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid import chat.jsonl
  ibid import --skip-invalid january.jsonl february.jsonl
  zcat chat.jsonl.gz | ibid import -

An event a line; ts stands for \"ts\":\"2026-01-05T09:00:00Z\":
  {\"kind\":\"conv\",\"conv\":\"c-team\",\"history\":\"joined\",\"ex_members\":\"keep\"}
  {\"kind\":\"join\",\"conv\":\"c-team\",\"user\":\"alice\",ts}
  {\"kind\":\"message\",\"conv\":\"c-team\",\"user\":\"alice\",ts,\"body\":\"hi\",\"id\":\"m-1\",
   \"files\":[{\"id\":\"f-1\",\"name\":\"cat.png\",\"type\":\"image/png\",\"bytes\":1024}]}
  {\"kind\":\"edit\",\"message\":\"m-1\",ts,\"body\":\"hello\"}
  {\"kind\":\"recall\",\"conv\":\"c-team\",\"seq\":1,ts}
  {\"kind\":\"restore\",\"conv\":\"c-team\",\"seq\":1,ts}
  {\"kind\":\"leave\",\"conv\":\"c-team\",\"user\":\"alice\",ts}
  {\"kind\":\"account\",\"user\":\"alice\",\"enabled\":false}

Edits, recalls and restores name their message by conv and seq, or by its id. Any event may have
an id; files are optional.")]
pub struct ImportArgs {
    /// Files of events, taken in order; - is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Leave invalid lines out and write the rest
    #[arg(long)]
    skip_invalid: bool,
    /// Import a file once more that was imported whole before
    #[arg(long)]
    again: bool,
    /// Print a JSON object for each file
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreFlags,
}

/// Imports the files in order, up to the first that is refused.
///
/// # Errors
/// A file cannot be read, holds invalid lines, or the log cannot be written.
pub async fn run(args: ImportArgs) -> Result<(), Failure> {
    let standard_input = |file: &&PathBuf| is_standard_input(file);
    if args.files.iter().filter(standard_input).count() > 1 {
        return Err(Failure::usage(
            "standard input can be read only once; name - once",
        ));
    }
    let config = load(&args.store.flags())?;
    let exporter = open(&config.settings).await?;
    for (at, path) in args.files.iter().enumerate() {
        let import = Import {
            name: path.display().to_string(),
            manner: Manner {
                skip_invalid: args.skip_invalid,
                again: args.again,
            },
            json: args.json,
        };
        if let Err(mut failure) = import.run(&config.settings, &*exporter.source, path).await {
            let rest: Vec<String> = args.files[at + 1..]
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            if !rest.is_empty() {
                let rest = rest.join(", ");
                failure.message += &format!("\nnot touched, import again: {rest}");
            }
            return Err(failure);
        }
    }
    Ok(())
}

fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// One file.
struct Import {
    name: String,
    manner: Manner,
    json: bool,
}

impl Import {
    async fn run(
        &self,
        settings: &Settings,
        source: &dyn Source,
        path: &Path,
    ) -> Result<(), Failure> {
        let mut file = rereadable(settings, path)
            .await
            .map_err(|e| self.unreadable(&e))?;
        let length = file.metadata().map_err(|e| self.unreadable(&e))?.len();
        let bar = bar(length, &format!("checking {}", self.name), BYTES);
        let mut told = Told {
            import: self,
            bar: bar.clone(),
            refused: Vec::new(),
            count: 0,
            writing: false,
        };
        let result = import(source, &mut file, self.manner, &mut |note| {
            told.note(&note);
        })
        .await;
        bar.finish_and_clear();
        match result {
            Ok(report) => {
                self.say_done(&report, &told.refused);
                Ok(())
            }
            Err(error) => Err(self.failure(&error, &told)),
        }
    }

    fn unreadable(&self, error: &std::io::Error) -> Failure {
        let name = &self.name;
        Failure::failed(format!(
            "cannot read {name}: {error}; name a file of events"
        ))
    }

    fn say_done(&self, report: &Report, skipped: &[Value]) {
        if self.json {
            let line = json!({
                "file": self.name,
                "accepted": report.accepted,
                "duplicates": report.duplicates,
                "unchanged": report.unchanged,
                "skipped": skipped,
                "continued_after_line": report.continued_after_line,
            });
            say(&line.to_string());
            return;
        }
        let mut line = format!(
            "{}: {} accepted, {} duplicates, {} unchanged, {} skipped",
            self.name, report.accepted, report.duplicates, report.unchanged, report.skipped
        );
        if report.finished_before {
            line += "; it was imported whole before (--again imports it once more)";
        } else if report.continued_after_line > 0 {
            line += &format!(
                "; lines 1 to {} had been imported before",
                report.continued_after_line
            );
        }
        say(&line);
    }

    fn failure(&self, error: &ImportError, told: &Told<'_>) -> Failure {
        let name = &self.name;
        match error {
            ImportError::Refused {
                count,
                written_before,
            } => {
                if self.json {
                    let line = json!({
                        "file": name,
                        "error": "log-invalid",
                        "errors": told.refused,
                        "errors_total": count,
                    });
                    say(&line.to_string());
                }
                let lines = if *count == 1 {
                    "1 line is".to_owned()
                } else {
                    format!("{count} lines are")
                };
                if *written_before > 0 {
                    // A corrected file would be another one, and begin at its first line.
                    return Failure::failed(format!(
                        "{name}: {lines} invalid; lines 1 to {written_before} of it are in the \
                         log already: go on with --skip-invalid on the same file, or import the \
                         corrected rest, from line {} on, as a file of its own",
                        written_before + 1
                    ));
                }
                Failure::failed(format!(
                    "{name}: {lines} invalid and nothing was written; correct the file, or leave \
                     invalid lines out with --skip-invalid"
                ))
            }
            ImportError::Read(error) => self.unreadable(error),
            ImportError::FileChanged
            | ImportError::Overtaken { .. }
            | ImportError::Source(SourceError::ImportElsewhere | SourceError::Refused(_)) => {
                Failure::failed(format!("{name}: {error}"))
            }
            ImportError::Source(error) => Failure::failed(format!(
                "{name}: {error}; once that is mended, the same command goes on where it stopped"
            )),
        }
    }
}

/// What the import has told so far.
struct Told<'a> {
    import: &'a Import,
    bar: ProgressBar,
    /// The invalid lines, as they are shown.
    refused: Vec<Value>,
    count: usize,
    writing: bool,
}

impl Told<'_> {
    fn note(&mut self, note: &Note<'_>) {
        match note {
            Note::Checked(bytes) => self.bar.set_position(*bytes),
            Note::Written(bytes) => {
                if !self.writing {
                    self.writing = true;
                    self.bar.reset();
                    self.bar
                        .set_message(format!("writing {}", self.import.name));
                }
                self.bar.set_position(*bytes);
            }
            Note::Refused { line, invalid } => self.refuse(*line, invalid),
        }
    }

    fn refuse(&mut self, line: u64, invalid: &Invalid) {
        self.count += 1;
        if !self.import.manner.skip_invalid && self.count > MOST_SHOWN {
            if self.count == MOST_SHOWN + 1 {
                let text = format!("{}: more lines are invalid", self.import.name);
                self.bar.suspend(|| complain(&text));
            }
            return;
        }
        let text = format!("{}:{line}: {invalid}", self.import.name);
        self.bar.suspend(|| complain(&text));
        // Shown in full only where it is printed.
        if self.import.json {
            self.refused.push(json!({
                "line": line,
                "field": invalid.field,
                "reason": invalid.reason,
            }));
        }
    }
}

/// Opens a file that can be read twice. What cannot (a pipe) is first copied into a file of the
/// data folder that has no name, so that nothing of it stays.
async fn rereadable(settings: &Settings, path: &Path) -> std::io::Result<File> {
    let mut input: Box<dyn std::io::Read + Send> = if is_standard_input(path) {
        Box::new(std::io::stdin())
    } else {
        let file = File::open(path)?;
        let kind = file.metadata()?.file_type();
        if kind.is_file() || kind.is_dir() {
            return Ok(file);
        }
        Box::new(file)
    };
    create_folder(&settings.data).map_err(|failure| std::io::Error::other(failure.message))?;
    let folder = settings.data.clone();
    let copying = tokio::task::spawn_blocking(move || {
        let mut copy = tempfile::tempfile_in(folder)?;
        std::io::copy(&mut input, &mut copy)?;
        copy.rewind()?;
        Ok(copy)
    });
    copying.await.map_err(std::io::Error::other)?
}
