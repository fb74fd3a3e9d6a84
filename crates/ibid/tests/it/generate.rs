//! Logs for property tests.
//!
//! What is generated is a list of [`Step`]s that name messages and earlier lines by a position in
//! whatever there is at that point. They become lines only at the end, so that every list means a
//! valid log, also one from which shrinking has taken steps out.

use std::fmt::Write as _;

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Bytewise they stand as written here; by locale, by case or by length they would not.
const CONVS: [&str; 5] = ["a", "a-b", "aB", "z", "ä"];
const USERS: [&str; 5] = ["u1", "u10", "u2", "o'neil \"x\\y\"", "Ünal 🦉"];

/// What a reader or a writer of JSON, a database or a terminal may trip over.
const FRAGMENTS: [&str; 20] = [
    "hi",
    "\"",
    "\\",
    "\\u0041",
    "/",
    "</script>",
    "\u{0}",
    "\u{1}",
    "\u{8}\t\n\u{b}\u{c}\r",
    "\u{1f}",
    "\u{7f}",
    "\u{85}",
    "é",
    "e\u{301}",
    "\u{2028}",
    "\u{2029}",
    "\u{feff}",
    "\u{fffd}",
    "😀",
    "👩‍🚀",
];

/// Event lines of a valid log, at most `max_events` of them.
///
/// Lines differ in member order, white space and escapes. Some events have ids, some lines with an
/// id stand again later, and some events change nothing.
pub fn logs(max_events: usize) -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(step(), 0..=max_events).prop_map(|steps| {
        let mut writer = Writer::default();
        for step in &steps {
            writer.take(step);
        }
        writer.lines
    })
}

#[derive(Clone, Debug)]
struct Step {
    act: Act,
    ts: String,
    with_id: bool,
    spelling: Spelling,
}

#[derive(Clone, Debug)]
enum Act {
    Join {
        conv: &'static str,
        user: &'static str,
    },
    Leave {
        conv: &'static str,
        user: &'static str,
    },
    Message {
        conv: &'static str,
        user: &'static str,
        body: String,
        files: Option<Vec<File>>,
    },
    Edit {
        target: Target,
        body: String,
    },
    Recall(Target),
    Restore(Target),
    Policy {
        conv: &'static str,
        policy: Policy,
    },
    Account {
        user: &'static str,
        enabled: bool,
    },
    Repeat(Index),
}

/// One of the messages there are, named by its own id if it has one and `by_id` is set.
#[derive(Clone, Debug)]
struct Target {
    message: Index,
    by_id: bool,
}

#[derive(Clone, Debug)]
struct File {
    bytes: u64,
    id: String,
    name: String,
    kind: String,
}

/// The members that a `conv` event has besides the conversation: one of them or both.
type Policy = Vec<(&'static str, &'static str)>;

fn step() -> impl Strategy<Value = Step> {
    (act(), ts(), prop::bool::weighted(0.4), spelling()).prop_map(|(act, ts, with_id, spelling)| {
        Step {
            act,
            ts,
            with_id,
            spelling,
        }
    })
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (conv(), user(), text(), files()).prop_map(|(conv, user, body, files)| {
            Act::Message { conv, user, body, files }
        }),
        4 => (conv(), user()).prop_map(|(conv, user)| Act::Join { conv, user }),
        3 => (conv(), user()).prop_map(|(conv, user)| Act::Leave { conv, user }),
        4 => (target(), text()).prop_map(|(target, body)| Act::Edit { target, body }),
        2 => target().prop_map(Act::Recall),
        2 => target().prop_map(Act::Restore),
        1 => (conv(), policy()).prop_map(|(conv, policy)| Act::Policy { conv, policy }),
        1 => (user(), any::<bool>()).prop_map(|(user, enabled)| Act::Account { user, enabled }),
        2 => any::<Index>().prop_map(Act::Repeat),
    ]
}

/// Mostly the first, because what happens to one user in one conversation is where the rules meet.
fn conv() -> impl Strategy<Value = &'static str> {
    prop_oneof![2 => Just(CONVS[0]), 1 => select(&CONVS[..])]
}

fn user() -> impl Strategy<Value = &'static str> {
    prop_oneof![2 => Just(USERS[0]), 1 => select(&USERS[..])]
}

fn target() -> impl Strategy<Value = Target> {
    (any::<Index>(), any::<bool>()).prop_map(|(message, by_id)| Target { message, by_id })
}

fn text() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        6 => select(&FRAGMENTS[..]).prop_map(str::to_owned),
        2 => any::<char>().prop_map(String::from),
        1 => (0..300_usize).prop_map(|length| "x".repeat(length)),
    ];
    prop::collection::vec(fragment, 0..5).prop_map(|fragments| fragments.concat())
}

fn files() -> impl Strategy<Value = Option<Vec<File>>> {
    prop_oneof![
        3 => Just(None),
        1 => prop::collection::vec(file(), 0..3).prop_map(Some),
    ]
}

fn file() -> impl Strategy<Value = File> {
    let bytes = prop_oneof![0..100_000_u64, Just((1 << 53) - 1)];
    let name = select(vec![
        "a.txt",
        "\"quoted\" \\ 1.png",
        "übersicht\u{2028}.pdf",
        "😀",
    ]);
    let kind = select(vec!["text/plain", "image/png", "application/x-\"odd\""]);
    (bytes, 0..1000_u32, name, kind).prop_map(|(bytes, id, name, kind)| File {
        bytes,
        id: format!("f{id}"),
        name: name.to_owned(),
        kind: kind.to_owned(),
    })
}

fn policy() -> impl Strategy<Value = Policy> {
    let history = select(vec!["joined", "all"]).prop_map(|it| ("history", it));
    let ex_members = select(vec!["keep", "none"]).prop_map(|it| ("ex_members", it));
    prop_oneof![
        history.clone().prop_map(|it| vec![it]),
        ex_members.clone().prop_map(|it| vec![it]),
        (history, ex_members).prop_map(|(history, ex_members)| vec![history, ex_members]),
    ]
}

/// An RFC 3339 time, in no order with the others: nothing promises that clocks agree.
fn ts() -> impl Strategy<Value = String> {
    // Before 1970 rounding towards zero and cutting digits off are not the same.
    let year = prop_oneof![3 => Just(2026_u16), 1 => 1960..2040_u16];
    let date = (year, 1..=12_u8, 1..=28_u8);
    let time = (0..24_u8, 0..60_u8, 0..60_u8);
    let digit = prop_oneof![1 => 0..10_u8, 1 => Just(9)];
    let fraction = prop::collection::vec(digit, 0..=9).prop_map(|digits| {
        let mut fraction = String::new();
        for digit in &digits {
            write!(
                fraction,
                "{}{digit}",
                if fraction.is_empty() { "." } else { "" }
            )
            .unwrap();
        }
        fraction
    });
    let offset = select(vec![
        "Z", "+00:00", "-00:00", "+01:00", "+05:30", "-03:30", "-08:00", "+14:00", "-12:00",
        "+00:01", "-23:59",
    ]);
    (date, time, fraction, offset).prop_map(
        |((year, month, day), (hour, minute, second), fraction, offset)| {
            format!(
                "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}{offset}"
            )
        },
    )
}

/// Turns steps into lines and knows what there is to refer to.
#[derive(Default)]
struct Writer {
    lines: Vec<String>,
    messages: Vec<Written>,
    /// Which lines have an id.
    with_id: Vec<usize>,
}

struct Written {
    conv: &'static str,
    seq: u64,
    id: Option<String>,
}

impl Writer {
    /// Writes the step's line. A step that refers to something where there is nothing yet writes
    /// none.
    fn take(&mut self, step: &Step) {
        if let Act::Repeat(which) = &step.act {
            if !self.with_id.is_empty() {
                let line = self.lines[*which.get(&self.with_id)].clone();
                self.lines.push(line);
            }
            return;
        }
        let Some(mut members) = self.members(step) else {
            return;
        };
        let id = step.with_id.then(|| self.new_id());
        if let Some(id) = &id {
            members.push(("id", Json::text(id)));
            self.with_id.push(self.lines.len());
        }
        if let Act::Message { conv, .. } = step.act {
            let seq = self.messages.iter().filter(|it| it.conv == conv).count() + 1;
            let seq = seq.try_into().unwrap();
            self.messages.push(Written { conv, seq, id });
        }
        let mut line = String::new();
        step.spelling.write(&Json::Object(members), &mut line);
        self.lines.push(line);
    }

    /// The members of the event, without an id of its own.
    fn members(&self, step: &Step) -> Option<Vec<(&'static str, Json)>> {
        let ts = ("ts", Json::text(&step.ts));
        let members = match &step.act {
            Act::Join { conv, user } => vec![
                ("kind", Json::text("join")),
                ("conv", Json::text(conv)),
                ("user", Json::text(user)),
                ts,
            ],
            Act::Leave { conv, user } => vec![
                ("kind", Json::text("leave")),
                ("conv", Json::text(conv)),
                ("user", Json::text(user)),
                ts,
            ],
            Act::Message {
                conv,
                user,
                body,
                files,
            } => {
                let mut members = vec![
                    ("kind", Json::text("message")),
                    ("conv", Json::text(conv)),
                    ("user", Json::text(user)),
                    ts,
                    ("body", Json::text(body)),
                ];
                if let Some(files) = files {
                    let files = files.iter().map(File::json).collect();
                    members.push(("files", Json::List(files)));
                }
                members
            }
            Act::Edit { target, body } => {
                let mut members = vec![("kind", Json::text("edit"))];
                members.extend(self.name(target)?);
                members.extend([ts, ("body", Json::text(body))]);
                members
            }
            Act::Recall(target) => {
                let mut members = vec![("kind", Json::text("recall"))];
                members.extend(self.name(target)?);
                members.push(ts);
                members
            }
            Act::Restore(target) => {
                let mut members = vec![("kind", Json::text("restore"))];
                members.extend(self.name(target)?);
                members.push(ts);
                members
            }
            Act::Policy { conv, policy } => {
                let mut members = vec![("kind", Json::text("conv")), ("conv", Json::text(conv))];
                members.extend(
                    policy
                        .iter()
                        .map(|(name, value)| (*name, Json::text(value))),
                );
                members
            }
            Act::Account { user, enabled } => vec![
                ("kind", Json::text("account")),
                ("user", Json::text(user)),
                ("enabled", Json::Bool(*enabled)),
            ],
            Act::Repeat(_) => return None,
        };
        Some(members)
    }

    /// The members that name a message, or `None` while there is none.
    fn name(&self, target: &Target) -> Option<Vec<(&'static str, Json)>> {
        if self.messages.is_empty() {
            return None;
        }
        let message = target.message.get(&self.messages);
        Some(match &message.id {
            Some(id) if target.by_id => vec![("message", Json::text(id))],
            _ => vec![
                ("conv", Json::text(message.conv)),
                ("seq", Json::Number(message.seq)),
            ],
        })
    }

    /// An id that no earlier line has. Some differ only in case or accent.
    fn new_id(&self) -> String {
        let number = self.with_id.len();
        let prefix = ["e", "E", "é", "e/ \"", "🦉"][number % 5];
        format!("{prefix}{}", number / 5)
    }
}

impl File {
    fn json(&self) -> Json {
        Json::Object(vec![
            ("bytes", Json::Number(self.bytes)),
            ("id", Json::text(&self.id)),
            ("name", Json::text(&self.name)),
            ("type", Json::text(&self.kind)),
        ])
    }
}

enum Json {
    Text(String),
    Number(u64),
    Bool(bool),
    List(Vec<Json>),
    Object(Vec<(&'static str, Json)>),
}

impl Json {
    fn text(text: &str) -> Json {
        Json::Text(text.to_owned())
    }
}

/// One of the many ways to write the same JSON value.
#[derive(Clone, Debug)]
struct Spelling {
    /// Members are sorted by these numbers; all zero leaves them in their usual order.
    order: [u8; 8],
    /// What stands wherever white space may.
    gap: &'static str,
    escapes: Escapes,
}

#[derive(Clone, Debug)]
enum Escapes {
    /// Only what must be.
    Few,
    /// All but printable ASCII, and the slash.
    Ascii,
    /// Every character, also those of member names.
    All,
}

fn spelling() -> impl Strategy<Value = Spelling> {
    let order = prop_oneof![Just([0; 8]), any::<[u8; 8]>()];
    let gap = select(vec!["", " ", "\t", "  \t "]);
    let escapes = prop_oneof![
        6 => Just(Escapes::Few),
        2 => Just(Escapes::Ascii),
        1 => Just(Escapes::All),
    ];
    (order, gap, escapes).prop_map(|(order, gap, escapes)| Spelling {
        order,
        gap,
        escapes,
    })
}

impl Spelling {
    fn write(&self, json: &Json, out: &mut String) {
        let gap = self.gap;
        out.push_str(gap);
        match json {
            Json::Text(text) => self.write_string(text, out),
            Json::Number(number) => write!(out, "{number}").unwrap(),
            Json::Bool(flag) => write!(out, "{flag}").unwrap(),
            Json::List(values) => {
                out.push('[');
                for (index, value) in values.iter().enumerate() {
                    out.push_str(if index > 0 { "," } else { "" });
                    self.write(value, out);
                }
                write!(out, "{gap}]").unwrap();
            }
            Json::Object(members) => {
                let mut sorted: Vec<_> = self.order.iter().cycle().zip(members).collect();
                sorted.sort_by_key(|(order, _)| **order);
                out.push('{');
                for (index, (_, (name, value))) in sorted.into_iter().enumerate() {
                    out.push_str(if index > 0 { "," } else { "" });
                    out.push_str(gap);
                    self.write_string(name, out);
                    write!(out, "{gap}:").unwrap();
                    self.write(value, out);
                }
                write!(out, "{gap}}}").unwrap();
            }
        }
        out.push_str(gap);
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            let printable = (' '..='~').contains(&c);
            match (&self.escapes, c) {
                (Escapes::Few | Escapes::Ascii, '"' | '\\') => write!(out, "\\{c}").unwrap(),
                (Escapes::Few, '\0'..='\u{1f}') => write!(out, "\\u{:04x}", u32::from(c)).unwrap(),
                (Escapes::Few, _) => out.push(c),
                (Escapes::Ascii, '/') => out.push_str("\\/"),
                (Escapes::Ascii, '\u{8}') => out.push_str("\\b"),
                (Escapes::Ascii, '\t') => out.push_str("\\t"),
                (Escapes::Ascii, '\n') => out.push_str("\\n"),
                (Escapes::Ascii, '\u{c}') => out.push_str("\\f"),
                (Escapes::Ascii, '\r') => out.push_str("\\r"),
                (Escapes::Ascii, _) if printable => out.push(c),
                (Escapes::Ascii | Escapes::All, _) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04X}").unwrap();
                    }
                }
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests;
