//! What the process runs with: flags, environment, `ibid.toml` and defaults made
//! into one [`Settings`].
//!
//! A setting has one key, `x_y`, and is given as flag `--x-y`, as environment
//! variable `IBID_X_Y` or as `x_y` in the file; the first of these that is there
//! wins, and only the winner is judged. The file is the one named by `--config`
//! (or `IBID_CONFIG`), else `ibid.toml` in the data folder if there is one.
//! Whatever cannot work is refused before anything starts, all of it at once.
//!
//! To add a key: one entry in the table of `keys.rs`, which is also its field in
//! [`Settings`], and its name in the set of flags it belongs to.

mod environment;
mod file;
mod flags;
mod keys;
mod parse;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

pub use environment::Environment;
pub use flags::{Flags, ServeFlags, StoreFlags, WorkFlags};
pub use ibid::exporter::Database;
pub use keys::Settings;

use keys::{Form, Key};

/// Where artefacts are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Artifacts {
    Folder(PathBuf),
    /// An object store, and the variables of the environment by which it is reached.
    Store {
        url: String,
        options: StoreOptions,
    },
}

impl Artifacts {
    /// The folder, if it is one.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Artifacts::Folder(folder) => Some(folder),
            Artifacts::Store { .. } => None,
        }
    }
}

/// Who sends the bytes of a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// This process, which checks on the way whether the download may go on.
    None,
    /// The object store: a download that was checked is sent on to an address that is signed with
    /// the keys to the store.
    Presigned,
}

/// Variables like `AWS_SECRET_ACCESS_KEY`. Its `Debug` names them alone.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct StoreOptions(BTreeMap<String, String>);

impl StoreOptions {
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let options = self.0.iter();
        options.map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// The effective configuration: the settings, and where each came from.
#[derive(Debug, Clone)]
pub struct Config {
    /// Every setting, parsed.
    pub settings: Settings,
    entries: Vec<Entry>,
    warnings: Vec<String>,
}

/// One key of the effective configuration, fit to be shown to anyone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key as `ibid.toml` spells it.
    pub key: &'static str,
    /// The value as it was given, or `None` when the key has none. A secret, or
    /// a URL's credentials, are replaced by a mark.
    pub value: Option<String>,
    /// What gave the value.
    pub origin: Origin,
}

/// What gave a key its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The flag named after the key.
    Flag,
    /// An environment variable.
    Environment {
        /// Its name, as `IBID_PART_BYTES`.
        variable: String,
    },
    /// The configuration file.
    File {
        /// The file as it was named, or as the data folder leads to it.
        path: PathBuf,
        /// The line of the key, from 1.
        line: usize,
    },
    /// Nothing else did.
    Default,
}

/// Why the process cannot start: one sentence for each thing to put right, one
/// to a line, each saying what to do. No secret stands in any of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", problems.join("\n"))]
pub struct ConfigError {
    problems: Vec<String>,
}

impl Config {
    /// Makes the effective configuration, reading at most one file.
    ///
    /// A file that is named must be there; the one in the data folder need not.
    /// Relative paths stay as they were given.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem found: keys that do not exist, values
    /// that cannot work, a file that cannot be read.
    pub fn resolve(flags: &Flags, environment: &Environment) -> Result<Config, ConfigError> {
        let (mut problems, mut warnings) = (Vec::new(), Vec::new());
        let mut given = environment.layer(&mut warnings);
        given.extend(flags.layer(&mut problems));

        let file = match flags.config().or_else(|| environment.config()) {
            Some((path, origin)) => file::named(Path::new(path), &origin, &mut problems),
            None => file::found(&data_folder(&given), &given, &mut problems),
        };
        let file_is_known = file.is_some();
        for (key, value) in file.unwrap_or_default() {
            given.entry(key).or_insert(value);
        }

        let mut reading = Reading {
            data: data_folder(&given),
            given,
            entries: Vec::new(),
            problems,
        };
        let mut settings = Settings::read(&mut reading);
        if let Some(Artifacts::Store { options, .. }) =
            settings.as_mut().map(|settings| &mut settings.artifacts)
        {
            *options = environment.store_options();
        }
        // An unreadable file may hold the very value that makes the two agree.
        if file_is_known {
            reading.compare_days();
            reading.compare_offload();
            reading.compare_tls();
        }

        match settings {
            Some(settings) if reading.problems.is_empty() => Ok(Config {
                settings,
                entries: reading.entries,
                warnings: escaped(warnings),
            }),
            _ => Err(ConfigError::new(reading.problems)),
        }
    }

    /// Every key, in the order of the reference.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    /// What is odd and was left alone, one sentence each, without a line break:
    /// environment variables that begin like settings and are none. For the
    /// caller to log.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The entries as lines of text for a person: key, value and origin in
    /// columns under a heading, each line ended.
    pub fn table(&self) -> String {
        let heading = ["KEY", "VALUE", "ORIGIN"].map(str::to_owned);
        let rows: Vec<[String; 3]> = std::iter::once(heading)
            .chain(self.entries().map(|entry| {
                let value = entry.value.clone().unwrap_or_else(|| "none".to_owned());
                [entry.key.to_owned(), value, entry.origin.to_string()]
            }))
            .collect();
        let width = |column: usize| {
            let widths = rows.iter().map(|row| row[column].chars().count());
            widths.max().unwrap_or(0)
        };
        let (key_width, value_width) = (width(0), width(1));
        rows.iter()
            .map(|[key, value, origin]| {
                format!("{key:key_width$}  {value:value_width$}  {origin}\n")
            })
            .collect()
    }

    /// The entries for a program: an array of `{"key", "value", "origin"}`, the
    /// value a string, or null when the key has none.
    pub fn json(&self) -> Value {
        self.entries()
            .map(|entry| {
                json!({
                    "key": entry.key,
                    "value": entry.value,
                    "origin": entry.origin.to_string(),
                })
            })
            .collect()
    }
}

impl ConfigError {
    fn new(problems: Vec<String>) -> ConfigError {
        ConfigError {
            problems: escaped(problems),
        }
    }

    /// The problems, one sentence each, without a line break; at least one.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag => f.write_str("flag"),
            Origin::Environment { variable } => write!(f, "environment variable {variable}"),
            Origin::File { path, line } => write!(f, "{}, line {line}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// What one source says, by key. Only keys of the table are in it.
type Layer = BTreeMap<&'static str, Given>;

/// A value before it is judged. It may be a secret, so it has no `Debug`.
struct Given {
    value: Written,
    origin: Origin,
}

/// How a value was written.
enum Written {
    /// Text; all that a flag or a variable can say.
    Text(String),
    /// A whole number of the file, in decimal digits.
    Number(String),
    /// A list of texts of the file, with commas between them.
    List(String),
    /// Something else of the file that no key takes: its kind, with an article.
    Other(&'static str),
}

/// Takes the values one by one and collects what is wrong with them.
struct Reading {
    given: Layer,
    data: PathBuf,
    entries: Vec<Entry>,
    problems: Vec<String>,
}

impl Reading {
    /// The parsed value of `key`, or `None` once its problem is noted.
    fn take<T>(&mut self, key: &Key, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let Given { value, origin } = self.given.remove(key.name).unwrap_or_else(|| Given {
            value: Written::Text(key.default.value(&self.data)),
            origin: Origin::Default,
        });
        let text = match &value {
            Written::Text(text) => Ok(text),
            Written::Number(digits) if key.form == Form::Number => Ok(digits),
            Written::List(texts) if key.form == Form::List => Ok(texts),
            Written::List(_) if key.form == Form::Number => {
                Err("it is a list and must be a whole number".to_owned())
            }
            Written::List(_) => Err("it is a list and must be text, in quotes".to_owned()),
            Written::Number(_) => Err("it must be text, in quotes".to_owned()),
            Written::Other(kind) => Err(match key.form {
                Form::Text => format!("it is {kind} and must be text, in quotes"),
                Form::List => format!("it is {kind} and must be a list of texts, each in quotes"),
                Form::Number => format!("it is {kind} and must be a whole number"),
            }),
        };
        match text.and_then(|text| Ok((text, parse(text)?))) {
            Ok((text, parsed)) => {
                self.entries.push(Entry {
                    key: key.name,
                    value: (!text.is_empty()).then(|| key.shown(text)),
                    origin,
                });
                Some(parsed)
            }
            Err(reason) => {
                self.problems.push(refusal(key, &value, &origin, &reason));
                None
            }
        }
    }

    /// Holds the two retention times against each other: a job's record must be
    /// there as long as its artefact is.
    fn compare_days(&mut self) {
        let find = |key: &str| {
            let entry = self.entries.iter().find(|entry| entry.key == key)?;
            let days = entry.value.as_deref()?.parse::<u32>().ok()?;
            Some((entry, days))
        };
        // What is missing here has been refused by itself.
        let (Some((retention, least)), Some((record, days))) =
            (find("retention_days"), find("record_days"))
        else {
            return;
        };
        if days < least {
            let problem = format!(
                "record_days = \"{days}\" ({}) cannot work: it must be at least retention_days, \
                 which is \"{least}\" ({}); raise the one or lower the other",
                place(record.key, &record.origin),
                place(retention.key, &retention.origin),
            );
            self.problems.push(problem);
        }
    }

    /// Holds who sends downloads against where they are.
    fn compare_offload(&mut self) {
        let find = |key: &str| self.entries.iter().find(|entry| entry.key == key);
        let value = |entry: &Entry| entry.value.clone().unwrap_or_default();
        // What is missing here has been refused by itself.
        let (Some(offload), Some(artifacts)) = (find("offload"), find("artifacts")) else {
            return;
        };
        let (sender, store) = (value(offload), value(artifacts));
        if sender != "presigned" || !store.starts_with("file:") {
            return;
        }
        let problem = format!(
            "offload = \"presigned\" ({}) cannot work: artifacts, which is \"{store}\" ({}), is a \
             folder, and only an object store serves downloads by itself; name one (s3://, gs://, \
             az://), or leave offload out",
            place(offload.key, &offload.origin),
            place(artifacts.key, &artifacts.origin),
        );
        self.problems.push(problem);
    }

    /// Holds certificate and key against each other: one is nothing without the other.
    fn compare_tls(&mut self) {
        let find = |key: &str| self.entries.iter().find(|entry| entry.key == key);
        // What is missing here has been refused by itself.
        let (Some(cert), Some(key)) = (find("tls_cert"), find("tls_key")) else {
            return;
        };
        let (given, missing) = match (&cert.value, &key.value) {
            (Some(_), None) => (cert, key),
            (None, Some(_)) => (key, cert),
            _ => return,
        };
        let problem = format!(
            "{} = {:?} ({}) cannot work: {} is not given, and TLS takes both; give it too, or \
             leave both out",
            given.key,
            given.value.as_deref().unwrap_or_default(),
            place(given.key, &given.origin),
            missing.key,
        );
        self.problems.push(problem);
    }
}

/// The data folder that flags, environment and named file lead to. One that is
/// not text is refused when its turn comes.
fn data_folder(given: &Layer) -> PathBuf {
    match given.get("data") {
        Some(Given {
            value: Written::Text(text),
            ..
        }) => PathBuf::from(text),
        _ => PathBuf::from(keys::DATA),
    }
}

/// The sentence that refuses a value. `reason` says what it must be and never
/// repeats it.
fn refusal(key: &Key, value: &Written, origin: &Origin, reason: &str) -> String {
    let shown = match value {
        Written::Text(text) => format!(" = {:?}", key.shown(text)),
        Written::Number(digits) => format!(" = {}", key.shown(digits)),
        Written::List(texts) if key.form == Form::List => format!(" = [{}]", key.shown(texts)),
        Written::List(_) | Written::Other(_) => String::new(),
    };
    let place = place(key.name, origin);
    format!("{}{shown} ({place}) cannot work: {reason}", key.name)
}

/// The sentences as they may be shown: names and paths in them are another's
/// words, so what could break a line or steer a terminal is escaped.
fn escaped(sentences: Vec<String>) -> Vec<String> {
    let sentences = sentences.into_iter();
    sentences.map(|sentence| escape(&sentence)).collect()
}

/// `text` without control characters.
pub fn escape(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() {
                c.escape_default().to_string()
            } else {
                c.into()
            }
        })
        .collect()
}

/// Where the value of `key` stands, for one who wants to change it.
fn place(key: &str, origin: &Origin) -> String {
    match origin {
        Origin::Flag => format!("flag {}", keys::flag(key)),
        Origin::Environment { .. } | Origin::File { .. } | Origin::Default => origin.to_string(),
    }
}

/// The sentence that refuses a name that no key has. `spell` writes a key the
/// way this source does, so that the advice can be copied.
fn unknown(
    place: &str,
    name: &str,
    others: &[&'static str],
    spell: impl Fn(&str) -> String,
) -> String {
    let known = keys::names().chain(others.iter().copied());
    match parse::nearest(name, known) {
        Some(key) => format!(
            "{place} is not a setting: write {} or remove it",
            spell(key)
        ),
        None => format!("{place} is not a setting: remove it (`ibid config` lists all that are)"),
    }
}
