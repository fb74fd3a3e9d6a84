//! One event of the log, read from its JSON line.

use sha2::{Digest, Sha256};

use crate::ids::{ConvId, UserId, check_id};
use crate::json::Json;
use crate::time::Time;

/// The longest line that is read, in bytes, without its line end.
pub const MAX_LINE_BYTES: usize = 4 * 1024 * 1024;

/// The largest whole number that every JSON reader keeps exactly (RFC 8785 section 3.2.2.3).
const MAX_EXACT: u64 = (1 << 53) - 1;

/// An event as an application reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The application's own id, unique over the log, by which a repetition is recognised.
    pub id: Option<String>,
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    Message {
        conv: ConvId,
        user: UserId,
        ts: Time,
        body: String,
        files: Vec<File>,
    },
    Edit {
        target: Target,
        ts: Time,
        body: String,
    },
    Recall {
        target: Target,
        ts: Time,
    },
    Restore {
        target: Target,
        ts: Time,
    },
    Join {
        conv: ConvId,
        user: UserId,
        ts: Time,
    },
    Leave {
        conv: ConvId,
        user: UserId,
        ts: Time,
    },
    Account {
        user: UserId,
        enabled: bool,
    },
    /// Sets what members and former members of a conversation see; `None` leaves it as it is.
    Conv {
        conv: ConvId,
        history: Option<History>,
        ex_members: Option<ExMembers>,
    },
}

/// Which message an edit, a recall or a restore is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Seq {
        conv: ConvId,
        seq: u64,
    },
    /// The application's own id of the message.
    Id(String),
}

/// A file that a message mentions; its bytes are kept elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub bytes: u64,
    pub id: String,
    pub name: String,
    pub media_type: String,
}

/// What a member of a conversation sees of the time before the join.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum History {
    /// Nothing: what was sent while the user was inside.
    #[default]
    Joined,
    /// Everything from the beginning.
    All,
}

/// What one who has left a conversation still sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ExMembers {
    /// What could be seen until the leave.
    #[default]
    Keep,
    /// Nothing.
    None,
}

impl History {
    pub const fn as_str(self) -> &'static str {
        match self {
            History::Joined => "joined",
            History::All => "all",
        }
    }

    pub fn parse(text: &str) -> Option<History> {
        match text {
            "joined" => Some(History::Joined),
            "all" => Some(History::All),
            _ => None,
        }
    }
}

impl ExMembers {
    pub const fn as_str(self) -> &'static str {
        match self {
            ExMembers::Keep => "keep",
            ExMembers::None => "none",
        }
    }

    pub fn parse(text: &str) -> Option<ExMembers> {
        match text {
            "keep" => Some(ExMembers::Keep),
            "none" => Some(ExMembers::None),
            _ => None,
        }
    }
}

/// Why a line was refused: the member at fault, where it is one, and a sentence about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    pub field: Option<String>,
    pub reason: String,
}

impl Invalid {
    pub fn line(reason: impl Into<String>) -> Invalid {
        Invalid {
            field: None,
            reason: reason.into(),
        }
    }

    pub fn field(field: &str, reason: impl Into<String>) -> Invalid {
        Invalid {
            field: Some(field.to_owned()),
            reason: reason.into(),
        }
    }
}

impl std::fmt::Display for Invalid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.field {
            Some(field) => write!(f, "{field}: {}", self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

impl Event {
    /// Reads one line. What depends on the log (does the message exist, is the id taken) is
    /// checked where the log is.
    ///
    /// # Errors
    /// The member at fault and why; a line is taken whole or not at all.
    pub fn parse(line: &[u8]) -> Result<Event, Invalid> {
        if line.len() > MAX_LINE_BYTES {
            return Err(Invalid::line("the line is longer than 4 MiB"));
        }
        let members = match Json::parse(line).map_err(Invalid::line)? {
            Json::Object(members) => Members(members),
            other => {
                let reason = format!("an event must be a JSON object, not {}", other.kind());
                return Err(Invalid::line(reason));
            }
        };
        members.into_event()
    }

    /// A digest of the content as parsed, by which an event with a known id is told from
    /// another event with the same id.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let mut put = |part: &[u8]| {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        };
        let target = |target: &Target, put: &mut dyn FnMut(&[u8])| match target {
            Target::Seq { conv, seq } => {
                put(b"seq");
                put(conv.as_str().as_bytes());
                put(&seq.to_be_bytes());
            }
            Target::Id(id) => {
                put(b"id");
                put(id.as_bytes());
            }
        };
        put(b"ibid event 1");
        match &self.kind {
            EventKind::Message {
                conv,
                user,
                ts,
                body,
                files,
            } => {
                put(b"message");
                put(conv.as_str().as_bytes());
                put(user.as_str().as_bytes());
                put(&ts.micros().to_be_bytes());
                put(body.as_bytes());
                put(File::canonical(files).unwrap_or_default().as_bytes());
            }
            EventKind::Edit {
                target: of,
                ts,
                body,
            } => {
                put(b"edit");
                target(of, &mut put);
                put(&ts.micros().to_be_bytes());
                put(body.as_bytes());
            }
            EventKind::Recall { target: of, ts } => {
                put(b"recall");
                target(of, &mut put);
                put(&ts.micros().to_be_bytes());
            }
            EventKind::Restore { target: of, ts } => {
                put(b"restore");
                target(of, &mut put);
                put(&ts.micros().to_be_bytes());
            }
            EventKind::Join { conv, user, ts } | EventKind::Leave { conv, user, ts } => {
                let join = matches!(self.kind, EventKind::Join { .. });
                put(if join { b"join" } else { b"leave" });
                put(conv.as_str().as_bytes());
                put(user.as_str().as_bytes());
                put(&ts.micros().to_be_bytes());
            }
            EventKind::Account { user, enabled } => {
                put(b"account");
                put(user.as_str().as_bytes());
                put(&[u8::from(*enabled)]);
            }
            EventKind::Conv {
                conv,
                history,
                ex_members,
            } => {
                put(b"conv");
                put(conv.as_str().as_bytes());
                put(history.map_or("", History::as_str).as_bytes());
                put(ex_members.map_or("", ExMembers::as_str).as_bytes());
            }
        }
        hash.finalize().into()
    }
}

impl File {
    /// The `files` member of an artefact's line as RFC 8785 spells it, or `None` for no files.
    pub fn canonical(files: &[File]) -> Option<String> {
        if files.is_empty() {
            return None;
        }
        let mut out = Vec::new();
        for file in files {
            out.push(if out.is_empty() { b'[' } else { b',' });
            out.extend_from_slice(b"{\"bytes\":");
            out.extend_from_slice(file.bytes.to_string().as_bytes());
            for (name, value) in [
                ("id", &file.id),
                ("name", &file.name),
                ("type", &file.media_type),
            ] {
                out.extend_from_slice(b",\"");
                out.extend_from_slice(name.as_bytes());
                out.extend_from_slice(b"\":");
                crate::render::write_json_string(value, &mut out);
            }
            out.push(b'}');
        }
        out.push(b']');
        Some(String::from_utf8_lossy(&out).into_owned())
    }
}

/// The members of an event that have not been taken yet.
struct Members(Vec<(String, Json)>);

impl Members {
    fn into_event(mut self) -> Result<Event, Invalid> {
        let kind = self.text("kind")?;
        let id = match self.take("id") {
            Some(_) if matches!(kind.as_str(), "erase") => None,
            Some(value) => Some(id_text("id", value)?),
            None => None,
        };
        let kind = match kind.as_str() {
            "message" => EventKind::Message {
                conv: self.conv()?,
                user: self.user()?,
                ts: self.ts()?,
                body: self.text("body")?,
                files: self.files()?,
            },
            "edit" => EventKind::Edit {
                target: self.target()?,
                ts: self.ts()?,
                body: self.text("body")?,
            },
            "recall" => EventKind::Recall {
                target: self.target()?,
                ts: self.ts()?,
            },
            "restore" => EventKind::Restore {
                target: self.target()?,
                ts: self.ts()?,
            },
            "join" => EventKind::Join {
                conv: self.conv()?,
                user: self.user()?,
                ts: self.ts()?,
            },
            "leave" => EventKind::Leave {
                conv: self.conv()?,
                user: self.user()?,
                ts: self.ts()?,
            },
            "account" => EventKind::Account {
                user: self.user()?,
                enabled: self.enabled()?,
            },
            "conv" => self.policy()?,
            "erase" => {
                let reason = "erasure by an event is not supported yet; \
                              nothing is exported as erased that still exists";
                return Err(Invalid::field("kind", reason));
            }
            other => {
                let reason = format!(
                    "{other:?} is not a kind of event; known are message, edit, recall, restore, \
                     join, leave, account and conv"
                );
                return Err(Invalid::field("kind", reason));
            }
        };
        if let EventKind::Account { .. } | EventKind::Conv { .. } = kind
            && self.0.iter().any(|(name, _)| name == "ts")
        {
            // These kinds carry no time, but an application that stamps every event is right too.
            self.ts()?;
        }
        match self.0.first() {
            Some((name, _)) => {
                let reason = format!("is not a member of this kind of event ({})", kind.name());
                Err(Invalid::field(name, reason))
            }
            None => Ok(Event { id, kind }),
        }
    }

    fn take(&mut self, name: &str) -> Option<Json> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(at).1)
    }

    fn required(&mut self, name: &str) -> Result<Json, Invalid> {
        self.take(name)
            .ok_or_else(|| Invalid::field(name, "is missing"))
    }

    fn text(&mut self, name: &str) -> Result<String, Invalid> {
        let value = self.required(name)?;
        text(name, value)
    }

    fn conv(&mut self) -> Result<ConvId, Invalid> {
        ConvId::parse(self.text("conv")?).map_err(|reason| Invalid::field("conv", reason))
    }

    fn user(&mut self) -> Result<UserId, Invalid> {
        UserId::parse(self.text("user")?).map_err(|reason| Invalid::field("user", reason))
    }

    fn ts(&mut self) -> Result<Time, Invalid> {
        Time::parse(&self.text("ts")?).map_err(|reason| Invalid::field("ts", reason))
    }

    fn enabled(&mut self) -> Result<bool, Invalid> {
        match self.required("enabled")? {
            Json::Bool(enabled) => Ok(enabled),
            other => Err(wrong_kind("enabled", "true or false", &other)),
        }
    }

    fn target(&mut self) -> Result<Target, Invalid> {
        if let Some(id) = self.take("message") {
            for name in ["conv", "seq"] {
                if self.take(name).is_some() {
                    let reason = "must not stand beside message, which names the message already";
                    return Err(Invalid::field(name, reason));
                }
            }
            return Ok(Target::Id(id_text("message", id)?));
        }
        let conv = self.conv()?;
        match self.required("seq")? {
            Json::Unsigned(seq @ 1..=MAX_EXACT) => Ok(Target::Seq { conv, seq }),
            Json::Unsigned(_) | Json::OtherNumber => Err(Invalid::field(
                "seq",
                "must be a whole number from 1 to 2^53 - 1",
            )),
            other => Err(wrong_kind("seq", "a whole number", &other)),
        }
    }

    fn policy(&mut self) -> Result<EventKind, Invalid> {
        let conv = self.conv()?;
        let history = match self.take("history") {
            Some(value) => Some(
                History::parse(&text("history", value)?)
                    .ok_or_else(|| Invalid::field("history", "must be \"joined\" or \"all\""))?,
            ),
            None => None,
        };
        let ex_members = match self.take("ex_members") {
            Some(value) => Some(
                ExMembers::parse(&text("ex_members", value)?)
                    .ok_or_else(|| Invalid::field("ex_members", "must be \"keep\" or \"none\""))?,
            ),
            None => None,
        };
        if history.is_none() && ex_members.is_none() {
            let reason = "is missing, and ex_members too: a conv event must set one of them";
            return Err(Invalid::field("history", reason));
        }
        Ok(EventKind::Conv {
            conv,
            history,
            ex_members,
        })
    }

    fn files(&mut self) -> Result<Vec<File>, Invalid> {
        let items = match self.take("files") {
            None => return Ok(Vec::new()),
            Some(Json::Array(items)) => items,
            Some(other) => return Err(wrong_kind("files", "an array", &other)),
        };
        items
            .into_iter()
            .enumerate()
            .map(|(at, item)| {
                file(item).map_err(|e| Invalid {
                    field: Some(match e.field {
                        Some(field) => format!("files[{at}].{field}"),
                        None => format!("files[{at}]"),
                    }),
                    reason: e.reason,
                })
            })
            .collect()
    }
}

fn file(item: Json) -> Result<File, Invalid> {
    let mut members = match item {
        Json::Object(members) => Members(members),
        other => {
            let reason = format!("must be an object, not {}", other.kind());
            return Err(Invalid::line(reason));
        }
    };
    let bytes = match members.required("bytes")? {
        Json::Unsigned(bytes @ 0..=MAX_EXACT) => bytes,
        other => return Err(wrong_kind("bytes", "a whole number below 2^53", &other)),
    };
    let file = File {
        bytes,
        id: members.text("id")?,
        name: members.text("name")?,
        media_type: members.text("type")?,
    };
    match members.0.first() {
        Some((name, _)) => Err(Invalid::field(name, "is not a member of a file")),
        None => Ok(file),
    }
}

fn text(name: &str, value: Json) -> Result<String, Invalid> {
    match value {
        Json::Text(text) => Ok(text),
        other => Err(wrong_kind(name, "a string", &other)),
    }
}

fn id_text(name: &str, value: Json) -> Result<String, Invalid> {
    let id = text(name, value)?;
    check_id(&id).map_err(|reason| Invalid::field(name, reason))?;
    Ok(id)
}

fn wrong_kind(name: &str, wanted: &str, found: &Json) -> Invalid {
    Invalid::field(name, format!("must be {wanted}, not {}", found.kind()))
}

impl EventKind {
    /// The value of the member `kind`.
    pub fn name(&self) -> &'static str {
        match self {
            EventKind::Message { .. } => "message",
            EventKind::Edit { .. } => "edit",
            EventKind::Recall { .. } => "recall",
            EventKind::Restore { .. } => "restore",
            EventKind::Join { .. } => "join",
            EventKind::Leave { .. } => "leave",
            EventKind::Account { .. } => "account",
            EventKind::Conv { .. } => "conv",
        }
    }
}

#[cfg(test)]
mod tests;
