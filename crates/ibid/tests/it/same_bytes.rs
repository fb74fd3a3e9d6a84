//! One log in SQLite and in PostgreSQL: the same files, byte for byte.

use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use serde_json::Value;

use crate::events::{TS, join};
use crate::generate::logs;
use crate::harness::{Installation, On, on_postgres};
use crate::reference::Log;
use crate::shared::shared;

const PART_MESSAGES: u64 = 50;

on_postgres!(
    real_chats_give_the_same_files,
    hard_bodies_give_the_same_files,
    random_logs_give_the_same_files,
);

/// Imports a file into an installation on each database, and compares the users' exports.
async fn compare(on: &On, what: &str, file: &[u8], users: &[String]) {
    let homes = [
        Installation::cutting_at(PART_MESSAGES),
        Installation::cutting(on, PART_MESSAGES).await,
    ];
    let mut files = Vec::new();
    for home in &homes {
        home.try_import(file, true).await.0.unwrap();
        let mut jobs = Vec::new();
        for user in users {
            jobs.push(home.export(user, "all").await);
        }
        home.work().await;
        let mut of_home = Vec::new();
        for job in jobs {
            of_home.push(home.file(job).await);
        }
        files.push(of_home);
    }
    for (user, (sqlite, postgres)) in users.iter().zip(files[0].iter().zip(&files[1])) {
        assert!(sqlite == postgres, "{what}: the export of {user:?} differs");
    }
    assert!(files[0].iter().any(|file| file.len() > 20), "{what}");
}

async fn real_chats_give_the_same_files(on: &On) {
    let test = "real_chats_give_the_same_files";
    let Some(path) = shared(test, "data/small.jsonl") else {
        return;
    };
    let file = std::fs::read(path).unwrap();
    let mut log = Log::new();
    for line in std::str::from_utf8(&file).unwrap().lines() {
        log.apply(line);
    }
    let mut users: Vec<String> = log.users().into_iter().step_by(12).collect();
    users.push("archivist".to_owned());
    assert!(users.len() > 20);
    compare(on, "small.jsonl", &file, &users).await;
}

async fn hard_bodies_give_the_same_files(on: &On) {
    let test = "hard_bodies_give_the_same_files";
    let Some(path) = shared(test, "cases/nasty.jsonl") else {
        return;
    };
    let cases = std::fs::read_to_string(path).unwrap();
    let mut file = join("c", "ann");
    // What a JSON library cannot read (lone surrogates) no log can hold.
    let readable = cases
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let bodies = readable.filter_map(|case| case["body"].as_str().map(Value::from));
    for (at, body) in bodies.enumerate() {
        let head = r#"{"kind":"message","conv":"c","user":"bob","ts":"#;
        file += &format!("\n{head}\"{TS}\",\"body\":{body}}}");
        let edit = format!(
            r#"{{"kind":"edit","conv":"c","seq":{},"ts":"{TS}","body":"#,
            at + 1
        );
        if at % 2 == 1 {
            file += &format!("\n{edit}{body}}}");
        }
    }
    compare(on, "nasty.jsonl", file.as_bytes(), &["ann".to_owned()]).await;
}

async fn random_logs_give_the_same_files(on: &On) {
    let mut runner = TestRunner::default();
    for round in 0..8 {
        let lines = logs(150).new_tree(&mut runner).unwrap().current();
        let mut log = Log::new();
        for line in &lines {
            log.apply(line);
        }
        let users = log.users();
        if users.iter().all(|user| log.export(user, "all").is_empty()) {
            continue;
        }
        let what = format!("round {round} of:\n{}\n", lines.join("\n"));
        compare(on, &what, lines.join("\n").as_bytes(), &users).await;
    }
}
