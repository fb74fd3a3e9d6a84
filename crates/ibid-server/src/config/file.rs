//! `ibid.toml`.

use std::io::ErrorKind;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::{Given, Layer, Origin, Written, keys, place, refusal, unknown};

/// What the file says that a flag or variable named, or `None` once the reason
/// is noted why it says nothing.
pub(super) fn named(path: &Path, origin: &Origin, problems: &mut Vec<String>) -> Option<Layer> {
    match std::fs::read(path) {
        Ok(bytes) => layer(path, bytes, problems),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            problems.push(format!(
                "the configuration file {path:?} ({}) does not exist: correct its path or name none",
                place("config", origin),
            ));
            None
        }
        Err(error) => unreadable(path, &error, problems),
    }
}

/// Whether there is no file: a folder on the way that is none makes none either, and whoever
/// opens the data folder says that better.
fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// What `ibid.toml` in the folder `data` says: nothing when it is not there. As
/// [`named`] otherwise. `given` is what wins over the file.
pub(super) fn found(data: &Path, given: &Layer, problems: &mut Vec<String>) -> Option<Layer> {
    let path = data.join("ibid.toml");
    let layer = match std::fs::read(&path) {
        Ok(bytes) => layer(&path, bytes, problems)?,
        Err(error) if is_absent(&error) => Layer::new(),
        Err(error) => return unreadable(&path, &error, problems),
    };
    if !given.contains_key("data") {
        problems.extend(moved_data(&layer, data));
    }
    Some(layer)
}

/// Refuses to be led from the data folder where the file was found to another:
/// which of the two holds the settings would be anyone's guess.
fn moved_data(layer: &Layer, data: &Path) -> Option<String> {
    let key = keys::find("data")?;
    let Given { value, origin } = layer.get(key.name)?;
    let reason = "a file found in the data folder cannot name another one; use --data or \
                  IBID_DATA, or name the file with --config";
    match value {
        Written::Text(text) if Path::new(text) != data => Some(refusal(key, value, origin, reason)),
        Written::Text(_) | Written::Number(_) | Written::List(_) | Written::Other(_) => None,
    }
}

fn unreadable(path: &Path, error: &std::io::Error, problems: &mut Vec<String>) -> Option<Layer> {
    problems.push(format!(
        "the configuration file {path:?} cannot be read: {error}; it must be a file that this \
         user may read"
    ));
    None
}

fn layer(path: &Path, bytes: Vec<u8>, problems: &mut Vec<String>) -> Option<Layer> {
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let origin = origin(path, error.as_bytes(), error.utf8_error().valid_up_to());
            problems.push(format!(
                "{origin}: this is not UTF-8; save the file as UTF-8"
            ));
            return None;
        }
    };
    let table = match DeTable::parse(&text) {
        Ok(table) => table.into_inner(),
        Err(error) => {
            // Its message alone: its full form quotes the line, which may hold a secret.
            let reason = error.message().replace('\n', " ");
            let offset = error.span().map_or(0, |span| span.start);
            let origin = origin(path, text.as_bytes(), offset);
            problems.push(format!(
                "{origin}: this is not TOML ({reason}); correct the line"
            ));
            return None;
        }
    };

    let mut layer = Layer::new();
    for (name, value) in in_order(table) {
        let origin = origin(path, text.as_bytes(), name.span().start);
        let Some(key) = keys::find(name.get_ref()) else {
            let place = format!("{} ({origin})", name.get_ref());
            problems.push(unknown(&place, name.get_ref(), &[], str::to_owned));
            continue;
        };
        let value = written(value.into_inner());
        layer.insert(key.name, Given { value, origin });
    }
    Some(layer)
}

/// The members as they stand in the file, for messages in that order.
fn in_order<'a>(table: DeTable<'a>) -> Vec<Member<'a>> {
    let mut members: Vec<Member<'a>> = table.into_iter().collect();
    members.sort_by_key(|(name, _)| name.span().start);
    members
}

type Member<'a> = (Spanned<toml::de::DeString<'a>>, Spanned<DeValue<'a>>);

fn written(value: DeValue<'_>) -> Written {
    match value {
        DeValue::String(text) => Written::Text(text.into_owned()),
        DeValue::Integer(integer) => {
            let number = i128::from_str_radix(integer.as_str(), integer.radix());
            // Too long for any key, so its spelling is as good as its value.
            Written::Number(number.map_or_else(|_| integer.to_string(), |n| n.to_string()))
        }
        DeValue::Float(_) => Written::Other("a fraction"),
        DeValue::Boolean(_) => Written::Other("a boolean"),
        DeValue::Datetime(_) => Written::Other("a date"),
        DeValue::Array(items) => list(items),
        DeValue::Table(_) => Written::Other("a table"),
    }
}

/// A list of texts in the one form of the other sources. Where a text holds a comma, that would
/// be another list.
fn list(items: DeArray<'_>) -> Written {
    let mut texts = Vec::new();
    for item in items {
        match item.into_inner() {
            DeValue::String(text) if !text.contains(',') => texts.push(text.into_owned()),
            _ => return Written::Other("a list, but not one of such texts,"),
        }
    }
    Written::List(texts.join(", "))
}

/// The place in the file of the byte at `offset`.
fn origin(path: &Path, text: &[u8], offset: usize) -> Origin {
    let before = text.get(..offset).unwrap_or(text);
    Origin::File {
        path: path.to_owned(),
        line: 1 + before.iter().filter(|byte| **byte == b'\n').count(),
    }
}
