//! A second opinion on what an export holds.
//!
//! [`Log`] keeps every event in order and, for each export, reads the contract of the log and of
//! the artefact aloud over all of them. It shares no code with the product and trades speed for
//! being checkable by eye. Where both agree on generated logs, the product is right or two
//! independent readings of the contract share one mistake.

mod members;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use members::Members;

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
    /// Where the joins and leaves stand, where the edits, recalls and restores, and where the
    /// policies: nothing else is looked for, so nothing else need be looked at.
    moves: Vec<Gseq>,
    revisions: Vec<Gseq>,
    policies: Vec<Gseq>,
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
        match &self.events[gseq - 1] {
            Event::Message(message) => {
                let conv = message.conv.clone();
                self.messages.entry(conv).or_default().push(gseq);
            }
            Event::Join { .. } | Event::Leave { .. } => self.moves.push(gseq),
            Event::Edit { .. } | Event::Recall { .. } | Event::Restore { .. } => {
                self.revisions.push(gseq);
            }
            Event::Policy { .. } => self.policies.push(gseq),
            Event::Account { .. } => {}
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

    /// Whether the user has at least one stay in the conversation, whatever is left to see of it.
    pub fn has_stay(&self, user: &str, conv: &str) -> bool {
        !self.stays(user, conv).is_empty()
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
        for (gseq, event) in self.at(&self.revisions) {
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
        for (gseq, event) in self.at(&self.moves) {
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
        for (_, event) in self.at(&self.policies) {
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

    fn at(&self, gseqs: &[Gseq]) -> impl Iterator<Item = (Gseq, &Event)> {
        gseqs.iter().map(|&gseq| (gseq, self.event(gseq)))
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

#[cfg(test)]
mod tests;
