//! A second opinion on what an export holds.
//!
//! [`Log`] keeps every event in order and, for each export, reads the contract of the log and of
//! the artefact aloud over all of them. It shares no code with the product and trades speed for
//! being checkable by eye. Where both agree on generated logs, the product is right or two
//! independent readings of the contract share one mistake.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::{Map, Value};

/// A position in the log, counted from 1 over all conversations.
///
/// The product may leave gaps; only the order is ever seen from outside.
type Gseq = usize;

/// All events so far, in order.
#[derive(Default)]
pub struct Log {
    /// The event with gseq `n` stands at `n - 1`. Repetitions are not in here.
    events: Vec<Event>,
    /// Where the event with this id stands.
    ids: BTreeMap<String, Gseq>,
    /// The messages of each conversation; the one with seq `n` stands at `n - 1`.
    messages: BTreeMap<String, Vec<Gseq>>,
}

/// One event as it was meant, so that two spellings of the same content are equal.
#[derive(Debug, PartialEq)]
enum Event {
    Join {
        conv: String,
        user: String,
        ts: String,
    },
    Leave {
        conv: String,
        user: String,
        ts: String,
    },
    Message(Message),
    Edit {
        target: Gseq,
        ts: String,
        body: String,
    },
    Recall {
        target: Gseq,
        ts: String,
    },
    Restore {
        target: Gseq,
        ts: String,
    },
    Account {
        user: String,
        enabled: bool,
    },
    Policy {
        conv: String,
        history: Option<History>,
        ex_members: Option<ExMembers>,
    },
}

#[derive(Debug, PartialEq)]
struct Message {
    conv: String,
    user: String,
    ts: String,
    body: String,
    files: Vec<File>,
}

#[derive(Debug, PartialEq)]
struct File {
    bytes: u64,
    id: String,
    name: String,
    kind: String,
}

/// What lies from a join up to the leave, if there was one. The leave itself is outside.
#[derive(Clone, Copy)]
struct Stay {
    join: Gseq,
    leave: Option<Gseq>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum History {
    Joined,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ExMembers {
    Keep,
    None,
}

impl Log {
    /// The empty log.
    pub fn new() -> Log {
        Log::default()
    }

    /// Appends one event, given in its JSON form.
    ///
    /// An event whose id is already there changes nothing, also when the first one with that id
    /// changed nothing itself.
    ///
    /// # Panics
    ///
    /// On an event that the contract calls invalid, and on `erase`, which this reference leaves
    /// out.
    pub fn apply(&mut self, line: &str) {
        let mut members = Members::parse(line);
        let id = members.optional_text("id");
        let event = self.read(members);
        if let Some(id) = id {
            if let Some(&gseq) = self.ids.get(&id) {
                assert_eq!(
                    *self.event(gseq),
                    event,
                    "the id {id:?} is already used with other content"
                );
                return;
            }
            self.ids.insert(id, self.events.len() + 1);
        }
        self.events.push(event);
        let gseq = self.events.len();
        if let Event::Message(message) = &self.events[gseq - 1] {
            let conv = message.conv.clone();
            self.messages.entry(conv).or_default().push(gseq);
        }
    }

    /// The raw lines of the artefact if `user` created an export at this moment.
    ///
    /// `scope` is `all` or `conv:<id>`. A conversation that does not exist, or that the user never
    /// could see, gives no bytes here; whether such a request is refused is not the log's matter.
    ///
    /// # Panics
    ///
    /// On any other scope.
    pub fn export(&self, user: &str, scope: &str) -> Vec<u8> {
        let convs = match scope {
            "all" => self.convs(),
            _ => match scope.strip_prefix("conv:") {
                Some(conv) => vec![conv.to_owned()],
                None => panic!("{scope:?} is not a scope"),
            },
        };
        let mut lines = String::new();
        for conv in &convs {
            self.export_conv(user, conv, &mut lines);
        }
        lines.into_bytes()
    }

    /// Every user with at least one stay, sorted bytewise.
    pub fn users(&self) -> Vec<String> {
        let joined = self.events.iter().filter_map(|event| match event {
            Event::Join { user, .. } => Some(user.clone()),
            _ => None,
        });
        joined.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Every conversation that an event has named, sorted bytewise.
    pub fn convs(&self) -> Vec<String> {
        let named = self.events.iter().filter_map(Event::conv);
        let named: BTreeSet<&str> = named.collect();
        named.into_iter().map(str::to_owned).collect()
    }

    fn export_conv(&self, user: &str, conv: &str, lines: &mut String) {
        let stays = self.effective_stays(user, conv);
        if stays.is_empty() {
            return;
        }
        let revisions = self.revisions();
        let messages = self.messages.get(conv).map_or(&[][..], Vec::as_slice);
        for (index, &gseq) in messages.iter().enumerate() {
            if holds(&stays, gseq) {
                let Event::Message(message) = self.event(gseq) else {
                    unreachable!("only messages are listed as messages");
                };
                let of_message = revisions.get(&gseq).map_or(&[][..], Vec::as_slice);
                lines.push_str(&line(message, index + 1, of_message, &stays));
                lines.push('\n');
            }
        }
    }

    /// Edits, recalls and restores by the message they are about, oldest first.
    fn revisions(&self) -> BTreeMap<Gseq, Vec<(Gseq, &Event)>> {
        let mut revisions: BTreeMap<Gseq, Vec<(Gseq, &Event)>> = BTreeMap::new();
        for (gseq, event) in self.numbered() {
            if let Event::Edit { target, .. }
            | Event::Recall { target, .. }
            | Event::Restore { target, .. } = event
            {
                revisions.entry(*target).or_default().push((gseq, event));
            }
        }
        revisions
    }

    /// What of the conversation the policy in force lets the user see.
    fn effective_stays(&self, user: &str, conv: &str) -> Vec<Stay> {
        let stays = self.stays(user, conv);
        // Only the last can be open: to join again one must have left.
        let Some(&last) = stays.last() else {
            return Vec::new();
        };
        let since_the_beginning = Stay {
            join: 1,
            leave: last.leave,
        };
        let inside = last.leave.is_none();
        match self.policy(conv) {
            (_, ExMembers::None) if !inside => Vec::new(),
            (History::Joined, ExMembers::Keep | ExMembers::None) => stays,
            (History::All, ExMembers::Keep | ExMembers::None) => vec![since_the_beginning],
        }
    }

    /// Every stay there was, in order.
    fn stays(&self, user: &str, conv: &str) -> Vec<Stay> {
        let mut stays: Vec<Stay> = Vec::new();
        for (gseq, event) in self.numbered() {
            let open = stays.last_mut().filter(|stay| stay.leave.is_none());
            match (event, open) {
                (
                    Event::Join {
                        conv: c, user: u, ..
                    },
                    None,
                ) if c == conv && u == user => {
                    stays.push(Stay {
                        join: gseq,
                        leave: None,
                    });
                }
                (
                    Event::Leave {
                        conv: c, user: u, ..
                    },
                    Some(stay),
                ) if c == conv && u == user => {
                    stay.leave = Some(gseq);
                }
                _ => {}
            }
        }
        stays
    }

    /// The policy in force now. A member that a later event leaves out keeps its value.
    fn policy(&self, conv: &str) -> (History, ExMembers) {
        let mut policy = (History::Joined, ExMembers::Keep);
        for event in &self.events {
            if let Event::Policy {
                conv: of,
                history,
                ex_members,
            } = event
                && of == conv
            {
                policy.0 = history.unwrap_or(policy.0);
                policy.1 = ex_members.unwrap_or(policy.1);
            }
        }
        policy
    }

    fn numbered(&self) -> impl Iterator<Item = (Gseq, &Event)> {
        (1..).zip(&self.events)
    }

    fn event(&self, gseq: Gseq) -> &Event {
        &self.events[gseq - 1]
    }

    fn read(&self, mut members: Members) -> Event {
        let event = match members.text("kind").as_str() {
            "join" => Event::Join {
                conv: members.name("conv"),
                user: members.name("user"),
                ts: members.ts(),
            },
            "leave" => Event::Leave {
                conv: members.name("conv"),
                user: members.name("user"),
                ts: members.ts(),
            },
            "message" => Event::Message(Message {
                conv: members.name("conv"),
                user: members.name("user"),
                ts: members.ts(),
                body: members.text("body"),
                files: members.files(),
            }),
            "edit" => Event::Edit {
                target: self.target(&mut members),
                ts: members.ts(),
                body: members.text("body"),
            },
            "recall" => Event::Recall {
                target: self.target(&mut members),
                ts: members.ts(),
            },
            "restore" => Event::Restore {
                target: self.target(&mut members),
                ts: members.ts(),
            },
            "account" => Event::Account {
                user: members.name("user"),
                enabled: members.flag("enabled"),
            },
            "conv" => Event::Policy {
                conv: members.name("conv"),
                history: members.optional_text("history").map(|it| match &*it {
                    "joined" => History::Joined,
                    "all" => History::All,
                    _ => panic!("{it:?} is not a history"),
                }),
                ex_members: members.optional_text("ex_members").map(|it| match &*it {
                    "keep" => ExMembers::Keep,
                    "none" => ExMembers::None,
                    _ => panic!("{it:?} does not say what ex-members see"),
                }),
            },
            kind => panic!("{kind:?} is not a kind of event this reference knows"),
        };
        members.end();
        event
    }

    /// The message that a revision names, by its id or by its place in its conversation.
    fn target(&self, members: &mut Members) -> Gseq {
        if let Some(id) = members.optional_text("message") {
            let gseq = self.ids.get(&id).copied();
            let gseq = gseq.filter(|&gseq| matches!(self.event(gseq), Event::Message(_)));
            return gseq.unwrap_or_else(|| panic!("there is no message with the id {id:?}"));
        }
        let conv = members.name("conv");
        let seq = members.number("seq");
        let index = usize::try_from(seq).unwrap().checked_sub(1);
        let messages = self.messages.get(&conv);
        let gseq = index.and_then(|index| messages?.get(index));
        *gseq.unwrap_or_else(|| panic!("there is no message {seq} in {conv:?}"))
    }
}

impl Event {
    fn conv(&self) -> Option<&str> {
        match self {
            Event::Join { conv, .. }
            | Event::Leave { conv, .. }
            | Event::Policy { conv, .. }
            | Event::Message(Message { conv, .. }) => Some(conv),
            // Their conversation has been named by the message they are about.
            Event::Edit { .. } | Event::Recall { .. } | Event::Restore { .. } => None,
            Event::Account { .. } => None,
        }
    }
}

fn holds(stays: &[Stay], gseq: Gseq) -> bool {
    stays
        .iter()
        .any(|stay| stay.join <= gseq && stay.leave.is_none_or(|leave| gseq < leave))
}

fn line(message: &Message, seq: usize, revisions: &[(Gseq, &Event)], stays: &[Stay]) -> String {
    let mut body = message.body.as_str();
    let mut edited = false;
    let mut recalled = false;
    for (gseq, revision) in revisions {
        match revision {
            // An edit that the user was not there to see is not for this user.
            Event::Edit { body: newer, .. } => {
                if holds(stays, *gseq) {
                    body = newer;
                    edited = true;
                }
            }
            // A recall and its restore are for everyone, whenever they were made.
            Event::Recall { .. } => recalled = true,
            Event::Restore { .. } => recalled = false,
            _ => unreachable!("only revisions are listed as revisions"),
        }
    }
    let mut members = BTreeMap::from([
        ("body", string(if recalled { "" } else { body })),
        ("conv", string(&message.conv)),
        ("edited", u8::from(edited).to_string()),
        ("recalled", u8::from(recalled).to_string()),
        ("seq", seq.to_string()),
        ("ts", string(&message.ts)),
        ("user", string(&message.user)),
    ]);
    if !recalled && !message.files.is_empty() {
        let files: Vec<String> = message.files.iter().map(file).collect();
        members.insert("files", format!("[{}]", files.join(",")));
    }
    object(&members)
}

fn file(file: &File) -> String {
    object(&BTreeMap::from([
        ("bytes", file.bytes.to_string()),
        ("id", string(&file.id)),
        ("name", string(&file.name)),
        ("type", string(&file.kind)),
    ]))
}

/// An object of values that are already JSON.
///
/// RFC 8785, section 3.2.3 sorts names by UTF-16 code units. All of ours are ASCII, for which the
/// map's order is the same.
fn object(members: &BTreeMap<&str, String>) -> String {
    let members: Vec<String> = members
        .iter()
        .map(|(name, value)| format!("\"{name}\":{value}"))
        .collect();
    format!("{{{}}}", members.join(","))
}

/// A string in the one spelling of RFC 8785, section 3.2.2.2.
fn string(text: &str) -> String {
    let mut json = String::from("\"");
    for c in text.chars() {
        match c {
            '\u{8}' => json.push_str("\\b"),
            '\t' => json.push_str("\\t"),
            '\n' => json.push_str("\\n"),
            '\u{c}' => json.push_str("\\f"),
            '\r' => json.push_str("\\r"),
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\0'..='\u{1f}' => write!(json, "\\u{:04x}", u32::from(c)).unwrap(),
            _ => json.push(c),
        }
    }
    json.push('"');
    json
}

/// The members of one object that nobody has asked for yet.
struct Members(Map<String, Value>);

impl Members {
    fn parse(line: &str) -> Members {
        assert!(line.len() <= 4 << 20, "the line is over 4 MiB");
        let value: Value = serde_json::from_str(line).expect("a line is JSON");
        // The parser keeps the last of two members with one name. Outside strings JSON has one
        // colon for each member, so a doubled one shows as a colon too many.
        assert_eq!(
            colons(line),
            members_within(&value),
            "a member is doubled in {line}"
        );
        Members::of(value)
    }

    fn of(value: Value) -> Members {
        match value {
            Value::Object(members) => Members(members),
            other => panic!("{other} is not an object"),
        }
    }

    fn text(&mut self, name: &str) -> String {
        let text = self.optional_text(name);
        text.unwrap_or_else(|| panic!("{name} is missing"))
    }

    fn optional_text(&mut self, name: &str) -> Option<String> {
        self.0.remove(name).map(|value| match value {
            Value::String(text) => text,
            other => panic!("{name} is {other}, not a string"),
        })
    }

    /// The id of a user or a conversation.
    fn name(&mut self, name: &str) -> String {
        let id = self.text(name);
        assert!(
            (1..=200).contains(&id.len()) && !id.contains(char::is_control),
            "{id:?} is not an id of a user or a conversation"
        );
        id
    }

    /// A whole number that every JSON implementation keeps (RFC 8259, section 6).
    fn number(&mut self, name: &str) -> u64 {
        let number = self.0.remove(name).and_then(|value| value.as_u64());
        let number = number.filter(|&number| number < 1 << 53);
        number.unwrap_or_else(|| panic!("{name} is missing or not a whole number"))
    }

    fn flag(&mut self, name: &str) -> bool {
        let flag = self.0.remove(name).and_then(|value| value.as_bool());
        flag.unwrap_or_else(|| panic!("{name} is missing or neither true nor false"))
    }

    fn ts(&mut self) -> String {
        utc_micros(&self.text("ts"))
    }

    fn files(&mut self) -> Vec<File> {
        let files = match self.0.remove("files") {
            None => Vec::new(),
            Some(Value::Array(files)) => files,
            Some(other) => panic!("files is {other}, not a list"),
        };
        let read = |value| {
            let mut members = Members::of(value);
            let file = File {
                bytes: members.number("bytes"),
                id: members.text("id"),
                name: members.text("name"),
                kind: members.text("type"),
            };
            members.end();
            file
        };
        files.into_iter().map(read).collect()
    }

    fn end(self) {
        let unknown: Vec<String> = self.0.into_iter().map(|(name, _)| name).collect();
        assert!(unknown.is_empty(), "unknown members {unknown:?}");
    }
}

fn colons(json: &str) -> usize {
    let mut count = 0;
    let mut in_string = false;
    let mut bytes = json.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' => _ = bytes.next(),
            b':' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

fn members_within(value: &Value) -> usize {
    match value {
        Value::Object(members) => {
            members.len() + members.values().map(members_within).sum::<usize>()
        }
        Value::Array(values) => values.iter().map(members_within).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// An RFC 3339 time with offset, in UTC with exactly six digits of fraction.
///
/// Digits are cut off the text before anything is converted: cutting the number would round
/// towards 1970 and so move times before it forwards.
fn utc_micros(ts: &str) -> String {
    let (to_seconds, rest) = ts
        .split_at_checked("2026-01-05T09:30:00".len())
        .unwrap_or_else(|| panic!("{ts:?} is too short for a time with offset"));
    let digits_end = |text: &str| text.find(|c: char| !c.is_ascii_digit());
    let (fraction, offset) = match rest.strip_prefix('.') {
        None => ("0", rest),
        Some(rest) => rest.split_at(digits_end(rest).unwrap_or(rest.len())),
    };
    let pattern = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "0");
    assert!(
        pattern(to_seconds).eq_ignore_ascii_case("0000-00-00T00:00:00")
            && !fraction.is_empty()
            && matches!(&*pattern(offset), "Z" | "z" | "+00:00" | "-00:00"),
        "{ts:?} is not an RFC 3339 time with offset"
    );
    let fraction = &fraction[..fraction.len().min(6)];
    let cut: Timestamp = format!("{to_seconds}.{fraction}{offset}")
        .parse()
        .unwrap_or_else(|error| panic!("{ts:?}: {error}"));
    format!("{cut:.6}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TS: &str = "2026-01-05T09:30:00Z";

    fn join(user: &str) -> String {
        format!(r#"{{"kind":"join","conv":"c","user":"{user}","ts":"{TS}"}}"#)
    }

    fn leave(user: &str) -> String {
        format!(r#"{{"kind":"leave","conv":"c","user":"{user}","ts":"{TS}"}}"#)
    }

    fn say(body: &str) -> String {
        format!(r#"{{"kind":"message","conv":"c","user":"bob","ts":"{TS}","body":"{body}"}}"#)
    }

    fn edit(seq: u64, body: &str) -> String {
        format!(r#"{{"kind":"edit","conv":"c","seq":{seq},"ts":"{TS}","body":"{body}"}}"#)
    }

    fn recall(seq: u64) -> String {
        format!(r#"{{"kind":"recall","conv":"c","seq":{seq},"ts":"{TS}"}}"#)
    }

    fn restore(seq: u64) -> String {
        format!(r#"{{"kind":"restore","conv":"c","seq":{seq},"ts":"{TS}"}}"#)
    }

    fn policy(history: &str, ex_members: &str) -> String {
        format!(r#"{{"kind":"conv","conv":"c","history":"{history}","ex_members":"{ex_members}"}}"#)
    }

    /// The same event with an id of its own.
    fn with_id(id: &str, line: &str) -> String {
        line.replacen('{', &format!(r#"{{"id":"{id}","#), 1)
    }

    fn log<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> Log {
        let mut log = Log::new();
        for line in lines {
            log.apply(line.as_ref());
        }
        log
    }

    fn export(log: &Log, user: &str) -> String {
        String::from_utf8(log.export(user, "all")).unwrap()
    }

    /// What ann sees after these events, line by line as (seq, body, edited, recalled).
    fn ann_sees<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> Vec<(u64, String, u64, u64)> {
        let row = |line: &str| {
            let line: Value = serde_json::from_str(line).unwrap();
            (
                line["seq"].as_u64().unwrap(),
                line["body"].as_str().unwrap().to_owned(),
                line["edited"].as_u64().unwrap(),
                line["recalled"].as_u64().unwrap(),
            )
        };
        export(&log(lines), "ann").lines().map(row).collect()
    }

    fn row(seq: u64, body: &str, edited: u64, recalled: u64) -> (u64, String, u64, u64) {
        (seq, body.to_owned(), edited, recalled)
    }

    fn refuses(line: &str, before: &[String]) -> bool {
        let mut log = log(before);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| log.apply(line))).is_err()
    }

    #[test]
    fn the_example_of_the_artefact_is_met_byte_for_byte() {
        let mut log = Log::new();
        log.apply(r#"{"kind":"join","conv":"c-team","user":"u0007","ts":"2026-01-05T09:00:00Z"}"#);
        for _ in 0..51 {
            log.apply(
                r#"{"kind":"message","conv":"c-team","user":"u0007","ts":"2026-01-05T09:30:00Z","body":"hi"}"#,
            );
        }
        let all = export(&log, "u0007");
        assert_eq!(all.lines().count(), 51);
        assert!(all.ends_with("\n{\"body\":\"hi\",\"conv\":\"c-team\",\"edited\":0,\"recalled\":0,\"seq\":51,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"u0007\"}\n"));
    }

    #[test]
    fn each_policy_shows_a_member_and_an_ex_member_what_its_row_says() {
        let came_twice = [
            say("before"),
            join("ann"),
            say("first stay"),
            leave("ann"),
            say("between"),
            join("ann"),
            say("second stay"),
        ];
        let seqs = |history, ex_members, leaves: bool| {
            let mut lines = came_twice.to_vec();
            if leaves {
                lines.push(leave("ann"));
            }
            lines.extend([say("after"), policy(history, ex_members)]);
            let rows = ann_sees(lines);
            rows.into_iter().map(|row| row.0).collect::<Vec<_>>()
        };

        assert_eq!(seqs("joined", "keep", false), [2, 4, 5]);
        assert_eq!(seqs("joined", "keep", true), [2, 4]);
        assert_eq!(seqs("all", "keep", false), [1, 2, 3, 4, 5]);
        assert_eq!(seqs("all", "keep", true), [1, 2, 3, 4]);
        assert_eq!(seqs("joined", "none", false), [2, 4, 5]);
        assert_eq!(seqs("joined", "none", true), [0; 0]);
        assert_eq!(seqs("all", "none", false), [1, 2, 3, 4, 5]);
        assert_eq!(seqs("all", "none", true), [0; 0]);
    }

    #[test]
    fn without_a_policy_event_stays_are_kept_as_they_were() {
        let lines = [say("1"), join("ann"), say("2"), leave("ann"), say("3")];
        assert_eq!(ann_sees(lines), [row(2, "2", 0, 0)]);
    }

    #[test]
    fn someone_who_never_joined_sees_nothing_under_any_policy() {
        for history in ["joined", "all"] {
            for ex_members in ["keep", "none"] {
                let lines = [say("1"), policy(history, ex_members), leave("ann")];
                assert_eq!(ann_sees(lines), []);
            }
        }
    }

    #[test]
    fn the_newest_policy_rules_and_a_member_left_out_keeps_its_value() {
        let all = r#"{"kind":"conv","conv":"c","history":"all"}"#.to_owned();
        let none = r#"{"kind":"conv","conv":"c","ex_members":"none"}"#.to_owned();
        let keep = r#"{"kind":"conv","conv":"c","ex_members":"keep"}"#.to_owned();
        let left = [say("1"), join("ann"), say("2"), leave("ann"), say("3")];
        let after = |policies: &[&String]| ann_sees(left.iter().chain(policies.iter().copied()));

        assert_eq!(after(&[&all]), [row(1, "1", 0, 0), row(2, "2", 0, 0)]);
        assert_eq!(after(&[&none]), []);
        assert_eq!(after(&[&all, &none]), []);
        assert_eq!(after(&[&none, &all]), []);
        assert_eq!(
            after(&[&all, &none, &keep]),
            [row(1, "1", 0, 0), row(2, "2", 0, 0)]
        );
        assert_eq!(after(&[&none, &keep]), [row(2, "2", 0, 0)]);
    }

    #[test]
    fn a_policy_rules_its_own_conversation_only() {
        let elsewhere = r#"{"kind":"conv","conv":"d","history":"all"}"#;
        let lines = [say("1"), join("ann"), say("2"), elsewhere.to_owned()];
        assert_eq!(ann_sees(lines), [row(2, "2", 0, 0)]);
    }

    #[test]
    fn a_join_of_someone_inside_and_a_leave_of_someone_outside_change_nothing() {
        let lines = [
            leave("ann"),
            say("1"),
            join("ann"),
            say("2"),
            join("ann"),
            say("3"),
            leave("ann"),
            say("4"),
            leave("ann"),
            say("5"),
        ];
        assert_eq!(ann_sees(&lines), [row(2, "2", 0, 0), row(3, "3", 0, 0)]);

        // The second leave must not move the end of what an ex-member keeps.
        let shown_all = lines.iter().cloned().chain([policy("all", "keep")]);
        let seqs: Vec<u64> = ann_sees(shown_all).iter().map(|row| row.0).collect();
        assert_eq!(seqs, [1, 2, 3]);
    }

    #[test]
    fn one_users_leave_ends_nobody_elses_stay() {
        let lines = [join("ann"), join("eve"), say("1"), leave("eve"), say("2")];
        assert_eq!(ann_sees(&lines), [row(1, "1", 0, 0), row(2, "2", 0, 0)]);
        assert_eq!(
            export(&log(&lines), "eve"),
            "{\"body\":\"1\",\"conv\":\"c\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n"
        );
    }

    #[test]
    fn an_edit_counts_only_inside_a_stay() {
        let here = [join("ann"), say("old"), edit(1, "new")];
        assert_eq!(ann_sees(&here), [row(1, "new", 1, 0)]);

        let after = [join("ann"), say("old"), leave("ann"), edit(1, "new")];
        assert_eq!(ann_sees(&after), [row(1, "old", 0, 0)]);

        let mixed = here
            .iter()
            .cloned()
            .chain([leave("ann"), edit(1, "newest")]);
        assert_eq!(ann_sees(mixed), [row(1, "new", 1, 0)]);
    }

    #[test]
    fn an_edit_made_in_a_later_stay_counts_for_a_message_of_an_earlier_one() {
        let lines = [
            join("ann"),
            say("old"),
            leave("ann"),
            edit(1, "unseen"),
            join("ann"),
        ];
        assert_eq!(ann_sees(&lines), [row(1, "old", 0, 0)]);
        let later = lines.iter().cloned().chain([edit(1, "seen")]);
        assert_eq!(ann_sees(later), [row(1, "seen", 1, 0)]);
    }

    #[test]
    fn an_edit_made_outside_a_stay_counts_when_the_policy_widens_the_stay_over_it() {
        let lines = [
            say("old"),
            edit(1, "before the join"),
            join("ann"),
            policy("all", "keep"),
        ];
        assert_eq!(ann_sees(&lines), [row(1, "before the join", 1, 0)]);

        let left = lines
            .iter()
            .cloned()
            .chain([leave("ann"), edit(1, "after")]);
        assert_eq!(ann_sees(left), [row(1, "before the join", 1, 0)]);
    }

    #[test]
    fn a_recall_counts_also_after_a_leave() {
        let lines = [join("ann"), say("text"), leave("ann"), recall(1)];
        assert_eq!(ann_sees(&lines), [row(1, "", 0, 1)]);
        let restored = lines.iter().cloned().chain([restore(1)]);
        assert_eq!(ann_sees(restored), [row(1, "text", 0, 0)]);
    }

    #[test]
    fn an_edit_after_a_recall_sets_the_flag_but_does_not_bring_the_text_back() {
        let lines = [join("ann"), say("old"), recall(1), edit(1, "new")];
        assert_eq!(ann_sees(lines), [row(1, "", 1, 1)]);
    }

    #[test]
    fn an_edit_before_a_recall_still_sets_the_flag() {
        let lines = [join("ann"), say("old"), edit(1, "new"), recall(1)];
        assert_eq!(ann_sees(lines), [row(1, "", 1, 1)]);
    }

    #[test]
    fn a_recalled_message_does_not_show_an_edit_that_is_not_for_the_user() {
        let lines = [
            join("ann"),
            say("old"),
            leave("ann"),
            edit(1, "unseen"),
            recall(1),
        ];
        assert_eq!(ann_sees(lines), [row(1, "", 0, 1)]);
    }

    #[test]
    fn a_restore_shows_the_newest_edit_also_one_made_while_recalled() {
        let lines = [
            join("ann"),
            say("old"),
            edit(1, "new"),
            recall(1),
            edit(1, "newest"),
            restore(1),
        ];
        assert_eq!(ann_sees(lines), [row(1, "newest", 1, 0)]);
    }

    #[test]
    fn the_last_of_recalls_and_restores_decides() {
        let recalls = [join("ann"), say("text"), recall(1), recall(1), restore(1)];
        assert_eq!(ann_sees(&recalls), [row(1, "text", 0, 0)]);
        let again = recalls.iter().cloned().chain([restore(1), recall(1)]);
        assert_eq!(ann_sees(again), [row(1, "", 0, 1)]);
    }

    #[test]
    fn a_revision_may_name_its_message_by_id() {
        let lines = [
            join("ann"),
            with_id("m1", &say("one")),
            with_id("m2", &say("two")),
            format!(r#"{{"kind":"edit","message":"m2","ts":"{TS}","body":"TWO"}}"#),
            format!(r#"{{"kind":"recall","message":"m1","ts":"{TS}"}}"#),
        ];
        assert_eq!(ann_sees(&lines), [row(1, "", 0, 1), row(2, "TWO", 1, 0)]);
        let restore = format!(r#"{{"kind":"restore","message":"m1","ts":"{TS}"}}"#);
        assert_eq!(
            ann_sees(lines.iter().cloned().chain([restore])),
            [row(1, "one", 0, 0), row(2, "TWO", 1, 0)]
        );
    }

    #[test]
    fn an_event_whose_id_was_seen_is_ignored_entirely() {
        let first = with_id("m1", &say("one"));
        let shout = with_id("e1", &edit(1, "ONE"));
        let lines = [
            join("ann"),
            first.clone(),
            shout.clone(),
            edit(1, "One"),
            first,
            shout,
            say("two"),
        ];
        assert_eq!(ann_sees(lines), [row(1, "One", 1, 0), row(2, "two", 0, 0)]);
    }

    #[test]
    fn the_id_of_an_event_that_changed_nothing_was_seen_all_the_same() {
        let again = with_id("j2", &join("ann"));
        let lines = [
            join("ann"),
            again.clone(),
            say("1"),
            leave("ann"),
            again,
            say("2"),
        ];
        assert_eq!(ann_sees(lines), [row(1, "1", 0, 0)]);
    }

    #[test]
    fn another_spelling_of_the_same_content_is_a_repetition() {
        let lines = [
            join("ann"),
            r#"{"kind":"message","id":"m","conv":"c","user":"bob","ts":"2026-01-05T09:30:00Z","body":"hi"}"#.to_owned(),
            r#" { "body": "h\u0069", "files": [], "ts": "2026-01-05T10:30:00.0000009+01:00", "user": "bob", "conv": "c", "id": "m", "kind": "message" } "#.to_owned(),
        ];
        assert_eq!(ann_sees(lines), [row(1, "hi", 0, 0)]);
    }

    #[test]
    fn each_conversation_counts_its_own_messages_and_ids_are_ordered_bytewise() {
        let mut log = Log::new();
        for conv in ["z", "ä", "aB", "a", "a-b"] {
            log.apply(&join("ann").replace("\"c\"", &format!("\"{conv}\"")));
            log.apply(&say(conv).replace("\"c\"", &format!("\"{conv}\"")));
        }
        let line = |conv| {
            format!(
                "{{\"body\":\"{conv}\",\"conv\":\"{conv}\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}}\n"
            )
        };
        let order = ["a", "a-b", "aB", "z", "ä"];
        assert_eq!(log.convs(), order);
        assert_eq!(export(&log, "ann"), order.map(line).concat());
        assert_eq!(log.export("ann", "conv:aB"), line("aB").into_bytes());
        assert_eq!(log.export("ann", "conv:b"), b"");
    }

    #[test]
    fn users_are_those_with_a_stay_and_conversations_those_that_were_named() {
        let log = log([
            join("eve"),
            leave("eve"),
            say("by bob, who is not inside"),
            join("ann"),
            leave("zoe"),
            r#"{"kind":"account","user":"max","enabled":true}"#.to_owned(),
            r#"{"kind":"conv","conv":"b","history":"all"}"#.to_owned(),
        ]);
        assert_eq!(log.users(), ["ann", "eve"]);
        assert_eq!(log.convs(), ["b", "c"]);
    }

    #[test]
    fn an_account_event_changes_no_byte() {
        let disabled = r#"{"kind":"account","user":"ann","enabled":false}"#;
        let lines = [join("ann"), say("1"), disabled.to_owned(), say("2")];
        assert_eq!(ann_sees(lines), [row(1, "1", 0, 0), row(2, "2", 0, 0)]);
    }

    #[test]
    fn files_are_repeated_with_sorted_members_unless_recalled() {
        let message = format!(
            r#"{{"kind":"message","conv":"c","user":"bob","ts":"{TS}","body":"","files":[{{"type":"image/png","name":"a \"b\".png","id":"f2","bytes":9007199254740991}},{{"id":"f1","bytes":0,"type":"","name":"ä"}}]}}"#
        );
        let with_files = "{\"body\":\"\",\"conv\":\"c\",\"edited\":0,\"files\":[{\"bytes\":9007199254740991,\"id\":\"f2\",\"name\":\"a \\\"b\\\".png\",\"type\":\"image/png\"},{\"bytes\":0,\"id\":\"f1\",\"name\":\"ä\",\"type\":\"\"}],\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n";
        let without = "{\"body\":\"\",\"conv\":\"c\",\"edited\":0,\"recalled\":1,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n";

        let mut log = log([join("ann"), message]);
        assert_eq!(export(&log, "ann"), with_files);
        log.apply(&recall(1));
        assert_eq!(export(&log, "ann"), without);
        log.apply(&restore(1));
        assert_eq!(export(&log, "ann"), with_files);
    }

    #[test]
    fn an_empty_list_of_files_is_as_if_absent() {
        let message = say("hi").replace("}", r#","files":[]}"#);
        assert_eq!(
            export(&log([join("ann"), message]), "ann"),
            "{\"body\":\"hi\",\"conv\":\"c\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n"
        );
    }

    #[test]
    fn times_are_converted_to_utc_and_cut_to_microseconds() {
        for (given, kept) in [
            ("2026-01-05T09:30:00Z", "2026-01-05T09:30:00.000000Z"),
            ("2026-01-05T09:30:00.5Z", "2026-01-05T09:30:00.500000Z"),
            (
                "2026-01-05T09:30:00.123456999Z",
                "2026-01-05T09:30:00.123456Z",
            ),
            (
                "2026-01-05T09:30:59.9999999Z",
                "2026-01-05T09:30:59.999999Z",
            ),
            (
                "2026-01-05T09:30:00.1234567890123Z",
                "2026-01-05T09:30:00.123456Z",
            ),
            ("2026-01-01T00:15:00+05:30", "2025-12-31T18:45:00.000000Z"),
            ("2025-12-31T20:00:00-08:00", "2026-01-01T04:00:00.000000Z"),
            ("2024-02-29T23:59:59-00:01", "2024-03-01T00:00:59.000000Z"),
            ("2026-01-05T09:30:00-00:00", "2026-01-05T09:30:00.000000Z"),
            ("2026-01-05t09:30:00z", "2026-01-05T09:30:00.000000Z"),
        ] {
            assert_eq!(utc_micros(given), kept, "{given}");
        }
    }

    #[test]
    fn a_time_before_1970_is_cut_and_not_rounded_forwards() {
        assert_eq!(
            utc_micros("1969-12-31T23:59:59.9999999Z"),
            "1969-12-31T23:59:59.999999Z"
        );
        assert_eq!(
            utc_micros("1960-01-01T00:00:00.0000001+00:00"),
            "1960-01-01T00:00:00.000000Z"
        );
    }

    #[test]
    fn strings_are_escaped_in_the_one_canonical_way() {
        assert_eq!(
            string("\u{0}\u{1}\u{7}\u{8}\t\n\u{b}\u{c}\r\u{e}\u{1b}\u{1f}"),
            r#""\u0000\u0001\u0007\b\t\n\u000b\f\r\u000e\u001b\u001f""#
        );
        assert_eq!(string(r#"say "\" / 'it'"#), r#""say \"\\\" / 'it'""#);
        assert_eq!(
            string("\u{7f}\u{80}\u{2028}\u{2029}\u{feff}\u{fffd}é😀"),
            "\"\u{7f}\u{80}\u{2028}\u{2029}\u{feff}\u{fffd}é😀\""
        );
        assert_eq!(string(""), "\"\"");
    }

    #[test]
    fn escapes_in_an_event_do_not_survive_into_the_artefact() {
        let body = r#"\u0041\/\uD83D\uDE00\u0000\u000A\u00e9\u2028\""#;
        assert_eq!(
            export(&log([join("ann"), say(body)]), "ann"),
            "{\"body\":\"A/😀\\u0000\\né\u{2028}\\\"\",\"conv\":\"c\",\"edited\":0,\"recalled\":0,\"seq\":1,\"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"bob\"}\n"
        );
    }

    #[test]
    fn an_export_of_nothing_has_no_bytes() {
        assert_eq!(Log::new().export("ann", "all"), b"");
        assert_eq!(log([say("1"), join("ann")]).export("ann", "conv:c"), b"");
    }

    #[test]
    fn invalid_events_are_refused() {
        let before = [with_id("m1", &say("one")), with_id("e1", &edit(1, "x"))];
        for line in [
            "",
            "[]",
            r#"{"kind":"sing"}"#,
            r#"{"kind":"account","user":"ann","enabled":"yes"}"#,
            r#"{"kind":"account","user":"ann","enabled":true,"enabled":true}"#,
            r#"{"kind":"account","user":"ann","enabled":true,"why":":"}"#,
            r#"{"kind":"account","user":"","enabled":true}"#,
            r#"{"kind":"account","user":"a\u0000","enabled":true}"#,
            r#"{"kind":"conv","conv":"c","history":"some"}"#,
            r#"{"kind":"conv","conv":"c","ex_members":"some"}"#,
            &say(r"\ud83d"),
            &say("hi").replace("Z", ""),
            &say("hi").replace("T09", " 09"),
            &say("hi").replace("}", r#","files":[{"bytes":1,"id":"f","name":"n"}]}"#),
            &edit(0, "x"),
            &edit(2, "x"),
            &recall(2),
            &restore(2),
            &recall(1).replace("\"c\"", "\"d\""),
            &format!(r#"{{"kind":"recall","message":"m2","ts":"{TS}"}}"#),
            &format!(r#"{{"kind":"recall","message":"e1","ts":"{TS}"}}"#),
            &format!(r#"{{"kind":"recall","message":"m1","conv":"c","seq":1,"ts":"{TS}"}}"#),
            &with_id("m1", &say("two")),
            &with_id("m1", &edit(1, "one")),
        ] {
            assert!(refuses(line, &before), "{line}");
        }
        assert!(!refuses(&say(r#"\"kind\":\"x\""#), &before));
    }
}
