//! Lines of the log, as short as a test wants to say them.

use serde_json::{Value, json};

pub const TS: &str = "2026-01-05T09:30:00Z";

pub fn join(conv: &str, user: &str) -> String {
    json!({"kind": "join", "conv": conv, "user": user, "ts": TS}).to_string()
}

pub fn leave(conv: &str, user: &str) -> String {
    json!({"kind": "leave", "conv": conv, "user": user, "ts": TS}).to_string()
}

/// A message by bob, who need not be inside.
pub fn say(conv: &str, body: &str) -> String {
    json!({"kind": "message", "conv": conv, "user": "bob", "ts": TS, "body": body}).to_string()
}

pub fn edit(conv: &str, seq: u64, body: &str) -> String {
    json!({"kind": "edit", "conv": conv, "seq": seq, "ts": TS, "body": body}).to_string()
}

pub fn recall(conv: &str, seq: u64) -> String {
    json!({"kind": "recall", "conv": conv, "seq": seq, "ts": TS}).to_string()
}

pub fn restore(conv: &str, seq: u64) -> String {
    json!({"kind": "restore", "conv": conv, "seq": seq, "ts": TS}).to_string()
}

pub fn policy(conv: &str, history: &str, ex_members: &str) -> String {
    json!({"kind": "conv", "conv": conv, "history": history, "ex_members": ex_members}).to_string()
}

/// The same event with an id of its own.
pub fn with_id(id: &str, line: &str) -> String {
    let mut event: Value = serde_json::from_str(line).unwrap();
    event["id"] = id.into();
    event.to_string()
}

/// Ann joins `c`, and so many messages follow, each of them another.
pub fn chat(messages: u64) -> Vec<String> {
    let mut lines = vec![join("c", "ann")];
    lines.extend((1..=messages).map(|number| say("c", &body(number))));
    lines
}

/// Some words that differ from number to number and compress like words.
fn body(number: u64) -> String {
    const WORDS: [&str; 8] = [
        "the", "same", "place", "again", "and", "again", "ibidem", "page",
    ];
    let mut noise = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = (0..4 + noise % 9).map(|_| {
        noise = noise.rotate_left(7).wrapping_mul(0x2545_f491_4f6c_dd1d);
        WORDS[(noise >> 61) as usize]
    });
    let words: Vec<&str> = words.collect();
    format!("{number} {}", words.join(" "))
}
