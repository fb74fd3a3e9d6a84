//! The walls of the crate, as its sources show them.

use std::collections::BTreeSet;
use std::path::Path;

/// No async, no clock, no I/O: decisions that are tested by values.
const PURE: [&str; 15] = [
    "append.rs",
    "cut.rs",
    "event.rs",
    "export.rs",
    "ids.rs",
    "json.rs",
    "key.rs",
    "limits.rs",
    "link.rs",
    "render.rs",
    "scope.rs",
    "segment.rs",
    "snapshot.rs",
    "time.rs",
    "token.rs",
];

const FORBIDDEN: [&str; 20] = [
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::io",
    "std::env",
    "tokio",
    "futures",
    "rusqlite",
    "object_store",
    "async",
    "await",
    "crate::exporter",
    "crate::import",
    "crate::ledger",
    "crate::source",
    "crate::sqlite",
    "crate::vault",
    "crate::work",
    "crate::verify",
];

/// The code of a source without comments and without its tests.
fn code(path: &Path) -> String {
    let source = std::fs::read_to_string(path).unwrap();
    let code = source.split("#[cfg(test)]").next().unwrap();
    let lines = code.lines().map(|line| line.split("//").next().unwrap());
    lines.collect::<Vec<_>>().join("\n")
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))
}

fn uses(code: &str, forbidden: &str) -> bool {
    let path = format!("{forbidden}::");
    words(code).any(|word| word == forbidden || word.starts_with(&path))
}

#[test]
fn the_pure_files_do_no_input_or_output_and_know_none_that_do() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in PURE {
        let code = code(&sources.join(file));
        assert!(code.contains("pub "), "{file} has no code");
        for forbidden in FORBIDDEN {
            assert!(!uses(&code, forbidden), "{file} uses {forbidden}");
        }
        // Braces could hide a path from the words.
        for grouped in ["use std::{", "use crate::{"] {
            assert!(
                !code.contains(grouped),
                "{file} groups what it uses: {grouped}"
            );
        }
        let asks_the_clock =
            uses(&code, "std::time::SystemTime") || uses(&code, "std::time::Instant");
        assert_eq!(asks_the_clock, file == "time.rs", "{file}");
    }
}

#[test]
fn the_search_finds_what_it_looks_for() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let shells = [
        ("vault.rs", "std::fs"),
        ("vault.rs", "object_store"),
        ("worker.rs", "tokio"),
        ("worker.rs", "async"),
        ("source.rs", "crate::sqlite"),
        ("sqlite.rs", "rusqlite"),
    ];
    for (file, forbidden) in shells {
        assert!(
            uses(&code(&sources.join(file)), forbidden),
            "{file} {forbidden}"
        );
    }
}

#[test]
fn every_failpoint_has_a_place_and_every_place_a_name() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut places = BTreeSet::new();
    for file in [
        "janitor.rs",
        "vault.rs",
        "vault/upload.rs",
        "work.rs",
        "worker.rs",
    ] {
        let code = code(&sources.join(file));
        for place in code.split("failpoint!(\"").skip(1) {
            places.insert(place.split('"').next().unwrap().to_owned());
        }
    }
    let list = code(&sources.join("failpoint.rs"));
    let (_, list) = list.split_once("pub const NAMES").unwrap();
    let (list, _) = list
        .split_once(';')
        .map(|(_, list)| list.split_once(';').unwrap())
        .unwrap();
    let names = list.split('"').skip(1).step_by(2).map(str::to_owned);
    assert_eq!(places, names.collect());
}

#[test]
fn no_file_of_the_library_knows_http_or_a_command_line() {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            files += 1;
            for edge in ["axum", "http", "hyper", "clap", "reqwest", "std::env"] {
                assert!(!uses(&code(&path), edge), "{} uses {edge}", path.display());
            }
        }
    }
    assert!(files > PURE.len());
}
