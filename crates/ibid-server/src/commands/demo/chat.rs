//! The chat of the demo: 930 messages that alice can see, and some that she cannot.

use serde_json::json;

const WORDS: [&str; 12] = [
    "the", "release", "is", "ready", "who", "checks", "logs", "tomorrow", "coffee", "and", "tests",
    "today",
];

/// What happens before alice asks for her export.
pub fn before() -> Vec<String> {
    let mut events = vec![
        join("c-team", "bob"),
        join("c-big", "bob"),
        join("c-private", "bob"),
    ];
    events.extend((1..=50).map(|seq| message("c-team", seq)));
    events.push(join("c-team", "alice"));
    events.push(join("c-big", "alice"));
    events.extend((51..=550).map(|seq| message("c-team", seq)));
    events.extend((1..=430).map(|seq| message("c-big", seq)));
    events.push(event(
        json!({"kind": "leave", "conv": "c-big", "user": "alice"}),
    ));
    events.extend((431..=440).map(|seq| message("c-big", seq)));
    events.extend((1..=25).map(|seq| message("c-private", seq)));
    events.push(event(
        json!({"kind": "recall", "conv": "c-team", "seq": 60}),
    ));
    events
}

/// What happens after.
pub fn after() -> Vec<String> {
    vec![
        event(json!({"kind": "recall", "conv": "c-team", "seq": 70})),
        message("c-team", 551),
    ]
}

fn join(conv: &str, user: &str) -> String {
    event(json!({"kind": "join", "conv": conv, "user": user}))
}

fn message(conv: &str, seq: usize) -> String {
    let words: Vec<&str> = (0..5 + seq % 7)
        .map(|at| WORDS[(seq * 7 + at * at * 5 + conv.len()) % WORDS.len()])
        .collect();
    let body = format!("{} #{seq}", words.join(" "));
    event(json!({"kind": "message", "conv": conv, "user": "bob", "body": body}))
}

fn event(mut event: serde_json::Value) -> String {
    event["ts"] = json!("2026-01-05T09:30:00Z");
    event.to_string()
}
