//! What events make of the log: judged and numbered here, the same for every database, which
//! only loads what has to be known and stores what comes out.

use std::collections::{HashMap, HashSet};

use crate::event::{Event, EventKind, File, Invalid, Target};
use crate::ids::{ConvId, UserId};
use crate::snapshot::Policy;
use crate::time::Time;

/// What became of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Taken; a message has its number.
    Accepted { assigned: Option<(ConvId, u64)> },
    /// The same event with the same id is there already.
    Duplicate,
    /// It would change nothing.
    Unchanged,
    /// Skipped.
    Invalid(Invalid),
}

/// An id that an event has used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownId {
    pub digest: [u8; 32],
    /// The message, if the event was one.
    pub message: Option<(ConvId, u64)>,
}

/// What the log knows of the conversations and ids that events name: all that it takes to say
/// whether they are valid. What was asked for and does not exist is `None`.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// The number of the newest message.
    last_seq: HashMap<ConvId, Option<u64>>,
    ids: HashMap<String, Option<KnownId>>,
}

/// An event that is valid, with what it is about.
enum Judged {
    Duplicate,
    Message { seq: u64 },
    Revision { conv: ConvId, seq: u64 },
    Other,
}

impl Names {
    /// The conversations and ids that `events` name and that nobody has asked for yet.
    pub fn unknown<'e>(
        &self,
        events: impl IntoIterator<Item = &'e Event>,
    ) -> (Vec<ConvId>, Vec<String>) {
        let (mut convs, mut ids) = (HashSet::new(), HashSet::new());
        for event in events {
            let (conv, message) = match &event.kind {
                EventKind::Message { conv, .. }
                | EventKind::Join { conv, .. }
                | EventKind::Leave { conv, .. }
                | EventKind::Conv { conv, .. } => (Some(conv), None),
                EventKind::Edit { target, .. }
                | EventKind::Recall { target, .. }
                | EventKind::Restore { target, .. } => match target {
                    Target::Seq { conv, .. } => (Some(conv), None),
                    Target::Id(id) => (None, Some(id)),
                },
                EventKind::Account { .. } => (None, None),
            };
            convs.extend(conv.filter(|conv| !self.last_seq.contains_key(conv)));
            let named = [event.id.as_ref(), message].into_iter().flatten();
            ids.extend(named.filter(|id| !self.ids.contains_key(*id)));
        }
        (
            convs.into_iter().cloned().collect(),
            ids.into_iter().cloned().collect(),
        )
    }

    /// Takes in what the log answered for a conversation.
    pub fn learn_conv(&mut self, conv: ConvId, last_seq: Option<u64>) {
        self.last_seq.insert(conv, last_seq);
    }

    /// Takes in what the log answered for an id.
    pub fn learn_id(&mut self, id: String, known: Option<KnownId>) {
        self.ids.insert(id, known);
    }

    /// Whether the log would take `event` after all that were checked before.
    ///
    /// # Errors
    /// The member at fault and why.
    pub fn check(&mut self, event: &Event) -> Result<(), Invalid> {
        self.judge(event).map(drop)
    }

    fn judge(&mut self, event: &Event) -> Result<Judged, Invalid> {
        let id = event.id.as_ref().map(|id| (id, event.digest()));
        if let Some((id, digest)) = &id
            && let Some(Some(known)) = self.ids.get(*id)
        {
            return if known.digest == *digest {
                Ok(Judged::Duplicate)
            } else {
                let reason = "is already used by an event with other content";
                Err(Invalid::field("id", reason))
            };
        }
        let (judged, message) = match &event.kind {
            EventKind::Message { conv, .. } => {
                let last = self.last_seq.entry(conv.clone()).or_default();
                let seq = last.unwrap_or(0) + 1;
                *last = Some(seq);
                (Judged::Message { seq }, Some((conv.clone(), seq)))
            }
            EventKind::Edit { target, .. }
            | EventKind::Recall { target, .. }
            | EventKind::Restore { target, .. } => {
                let (conv, seq) = self.resolve(target)?;
                (Judged::Revision { conv, seq }, None)
            }
            EventKind::Join { conv, .. }
            | EventKind::Leave { conv, .. }
            | EventKind::Conv { conv, .. } => {
                // A conversation begins with its first event.
                self.last_seq
                    .entry(conv.clone())
                    .or_default()
                    .get_or_insert(0);
                (Judged::Other, None)
            }
            EventKind::Account { .. } => (Judged::Other, None),
        };
        if let Some((id, digest)) = id {
            let known = KnownId { digest, message };
            self.ids.insert(id.clone(), Some(known));
        }
        Ok(judged)
    }

    fn resolve(&self, target: &Target) -> Result<(ConvId, u64), Invalid> {
        match target {
            Target::Seq { conv, seq } => match self.last_seq.get(conv) {
                Some(Some(last)) if seq <= last => Ok((conv.clone(), *seq)),
                _ => Err(Invalid::field(
                    "seq",
                    format!("conversation {:?} has no message {seq}", conv.as_str()),
                )),
            },
            Target::Id(id) => match self.ids.get(id) {
                Some(Some(KnownId {
                    message: Some(message),
                    ..
                })) => Ok(message.clone()),
                Some(Some(_)) => Err(Invalid::field(
                    "message",
                    format!("{id:?} is the id of an event that is not a message"),
                )),
                _ => Err(Invalid::field(
                    "message",
                    format!("no message has the id {id:?}"),
                )),
            },
        }
    }
}

/// What a batch of events needs to know of the log besides names.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub names: Names,
    /// The policies of conversations that exist.
    pub policies: HashMap<ConvId, Policy>,
    /// Who is inside where.
    pub inside: HashSet<(ConvId, UserId)>,
    /// The messages that are recalled.
    pub recalled: HashSet<(ConvId, u64)>,
    /// The accounts that are disabled.
    pub disabled: HashSet<UserId>,
}

/// What else a batch asks of the log once its names are known.
#[derive(Clone, Debug, Default)]
pub struct Questions {
    /// Is this user inside this conversation?
    pub inside: HashSet<(ConvId, UserId)>,
    /// Is this message recalled?
    pub recalled: HashSet<(ConvId, u64)>,
    /// Is this account disabled?
    pub disabled: HashSet<UserId>,
}

impl Known {
    /// What has to be asked before `events` can be applied; names must be known by now.
    pub fn questions<'e>(&self, events: impl IntoIterator<Item = &'e Event>) -> Questions {
        let mut questions = Questions::default();
        for event in events {
            match &event.kind {
                EventKind::Join { conv, user, .. } | EventKind::Leave { conv, user, .. } => {
                    questions.inside.insert((conv.clone(), user.clone()));
                }
                EventKind::Recall { target, .. } | EventKind::Restore { target, .. } => {
                    // One that is not there yet is a message of this batch, which is not recalled.
                    questions.recalled.extend(self.names.resolve(target).ok());
                }
                EventKind::Account { user, .. } => {
                    questions.disabled.insert(user.clone());
                }
                EventKind::Message { .. } | EventKind::Edit { .. } | EventKind::Conv { .. } => {}
            }
        }
        questions
    }
}

/// Rows to be written.
#[derive(Debug, Default)]
pub struct Writes<'e> {
    pub messages: Vec<NewMessage<'e>>,
    pub revisions: Vec<NewRevision<'e>>,
    /// Stays that are ended, to be written before those that begin.
    pub ended: Vec<EndedStay>,
    pub begun: Vec<BegunStay>,
    pub accounts: HashMap<UserId, bool>,
    pub ids: Vec<(&'e str, KnownId)>,
    /// Conversations that are new or were changed: newest message and policy.
    pub convs: HashMap<ConvId, (u64, Policy)>,
}

#[derive(Debug)]
pub struct NewMessage<'e> {
    pub conv: &'e ConvId,
    pub seq: u64,
    pub gseq: u64,
    pub ts: Time,
    pub user: &'e UserId,
    pub body: &'e str,
    pub files: Option<String>,
}

#[derive(Debug)]
pub struct NewRevision<'e> {
    pub conv: ConvId,
    pub seq: u64,
    pub gseq: u64,
    pub ts: Time,
    pub kind: &'static str,
    /// Of an edit.
    pub body: Option<&'e str>,
}

#[derive(Debug)]
pub struct EndedStay {
    pub conv: ConvId,
    pub user: UserId,
    pub to_gseq: u64,
    pub last_seq: u64,
}

/// A stay that begins, and may end in the same batch.
#[derive(Debug)]
pub struct BegunStay {
    pub conv: ConvId,
    pub user: UserId,
    pub from_gseq: u64,
    pub first_seq: u64,
    pub end: Option<(u64, u64)>,
}

/// Applies events, one after the other.
pub struct Appender<'e> {
    known: Known,
    /// Stays that began in this batch and are open, by their place in the writes.
    open: HashMap<(ConvId, UserId), usize>,
    /// Conversations whose row must be written.
    touched: HashSet<ConvId>,
    writes: Writes<'e>,
}

impl<'e> Appender<'e> {
    pub fn new(known: Known) -> Appender<'e> {
        Appender {
            known,
            open: HashMap::new(),
            touched: HashSet::new(),
            writes: Writes::default(),
        }
    }

    /// The rows that the events so far have made.
    pub fn finish(mut self) -> Writes<'e> {
        for conv in std::mem::take(&mut self.touched) {
            let row = (self.last_seq(&conv), self.policy(&conv));
            self.writes.convs.insert(conv, row);
        }
        self.writes
    }

    /// Applies `event`; `gseq` is its place in the log if it makes an entry.
    pub fn apply(&mut self, event: &'e Event, gseq: u64) -> Outcome {
        let judged = match self.known.names.judge(event) {
            Ok(Judged::Duplicate) => return Outcome::Duplicate,
            Ok(judged) => judged,
            Err(invalid) => return Outcome::Invalid(invalid),
        };
        if let Some(id) = &event.id
            && let Some(Some(known)) = self.known.names.ids.get(id)
        {
            self.writes.ids.push((id, known.clone()));
        }
        let mut assigned = None;
        let changed = match (&event.kind, judged) {
            (
                EventKind::Message {
                    conv,
                    user,
                    ts,
                    body,
                    files,
                },
                Judged::Message { seq },
            ) => {
                self.writes.messages.push(NewMessage {
                    conv,
                    seq,
                    gseq,
                    ts: *ts,
                    user,
                    body,
                    files: File::canonical(files),
                });
                self.touch(conv);
                assigned = Some((conv.clone(), seq));
                true
            }
            (EventKind::Edit { ts, body, .. }, Judged::Revision { conv, seq }) => {
                self.revise(conv, seq, gseq, *ts, "edit", Some(body));
                true
            }
            (EventKind::Recall { ts, .. }, Judged::Revision { conv, seq }) => {
                let changed = self.known.recalled.insert((conv.clone(), seq));
                if changed {
                    self.revise(conv, seq, gseq, *ts, "recall", None);
                }
                changed
            }
            (EventKind::Restore { ts, .. }, Judged::Revision { conv, seq }) => {
                let changed = self.known.recalled.remove(&(conv.clone(), seq));
                if changed {
                    self.revise(conv, seq, gseq, *ts, "restore", None);
                }
                changed
            }
            (EventKind::Join { conv, user, .. }, _) => self.join(conv, user, gseq),
            (EventKind::Leave { conv, user, .. }, _) => self.leave(conv, user, gseq),
            (EventKind::Account { user, enabled }, _) => {
                let changed = if *enabled {
                    self.known.disabled.remove(user)
                } else {
                    self.known.disabled.insert(user.clone())
                };
                if changed {
                    self.writes.accounts.insert(user.clone(), *enabled);
                }
                changed
            }
            (
                EventKind::Conv {
                    conv,
                    history,
                    ex_members,
                },
                _,
            ) => {
                let old = self.policy(conv);
                let new = Policy {
                    history: history.unwrap_or(old.history),
                    ex_members: ex_members.unwrap_or(old.ex_members),
                };
                self.known.policies.insert(conv.clone(), new);
                self.touch(conv);
                new != old
            }
            (
                EventKind::Message { .. }
                | EventKind::Edit { .. }
                | EventKind::Recall { .. }
                | EventKind::Restore { .. },
                _,
            ) => false,
        };
        if changed {
            Outcome::Accepted { assigned }
        } else {
            Outcome::Unchanged
        }
    }

    fn revise(
        &mut self,
        conv: ConvId,
        seq: u64,
        gseq: u64,
        ts: Time,
        kind: &'static str,
        body: Option<&'e str>,
    ) {
        self.writes.revisions.push(NewRevision {
            conv,
            seq,
            gseq,
            ts,
            kind,
            body,
        });
    }

    fn join(&mut self, conv: &ConvId, user: &UserId, gseq: u64) -> bool {
        self.touch(conv);
        let who = (conv.clone(), user.clone());
        if !self.known.inside.insert(who.clone()) {
            return false;
        }
        self.open.insert(who, self.writes.begun.len());
        self.writes.begun.push(BegunStay {
            conv: conv.clone(),
            user: user.clone(),
            from_gseq: gseq,
            first_seq: self.last_seq(conv) + 1,
            end: None,
        });
        true
    }

    fn leave(&mut self, conv: &ConvId, user: &UserId, gseq: u64) -> bool {
        self.touch(conv);
        let who = (conv.clone(), user.clone());
        if !self.known.inside.remove(&who) {
            return false;
        }
        let last_seq = self.last_seq(conv);
        match self.open.remove(&who) {
            Some(at) => self.writes.begun[at].end = Some((gseq, last_seq)),
            None => self.writes.ended.push(EndedStay {
                conv: conv.clone(),
                user: user.clone(),
                to_gseq: gseq,
                last_seq,
            }),
        }
        true
    }

    fn touch(&mut self, conv: &ConvId) {
        if !self.touched.contains(conv) {
            self.touched.insert(conv.clone());
        }
    }

    fn last_seq(&self, conv: &ConvId) -> u64 {
        let known = self.known.names.last_seq.get(conv).copied().flatten();
        known.unwrap_or(0)
    }

    fn policy(&self, conv: &ConvId) -> Policy {
        self.known.policies.get(conv).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(lines: &[&str]) -> Vec<Event> {
        lines
            .iter()
            .map(|line| {
                let line = line
                    .replace('\'', "\"")
                    .replace("TS", "\"ts\":\"2026-01-05T09:00:00Z\"");
                Event::parse(line.as_bytes()).expect("valid")
            })
            .collect()
    }

    #[test]
    fn stays_that_begin_and_end_in_one_batch_are_whole_rows() {
        let events = events(&[
            "{'kind':'leave','conv':'c','user':'u',TS}",
            "{'kind':'join','conv':'c','user':'u',TS}",
            "{'kind':'join','conv':'c','user':'u',TS}",
            "{'kind':'message','conv':'c','user':'v',TS,'body':'x'}",
            "{'kind':'leave','conv':'c','user':'u',TS}",
            "{'kind':'join','conv':'c','user':'u',TS}",
        ]);
        let c = ConvId::parse("c").unwrap();
        let mut known = Known::default();
        known.names.learn_conv(c.clone(), Some(7));
        known.inside.insert((c, UserId::parse("u").unwrap()));
        let mut appender = Appender::new(known);
        let outcomes: Vec<Outcome> = events
            .iter()
            .zip(100..)
            .map(|(event, gseq)| appender.apply(event, gseq))
            .collect();
        assert_eq!(outcomes[2], Outcome::Unchanged);
        let writes = appender.finish();
        assert_eq!(
            (writes.ended[0].to_gseq, writes.ended[0].last_seq),
            (100, 7)
        );
        let begun: Vec<_> = writes
            .begun
            .iter()
            .map(|stay| (stay.from_gseq, stay.first_seq, stay.end))
            .collect();
        assert_eq!(begun, [(101, 8, Some((104, 8))), (105, 9, None)]);
        assert_eq!(writes.messages[0].seq, 8);
        assert_eq!(writes.convs.values().next().unwrap().0, 8);
    }

    #[test]
    fn what_was_refused_leaves_no_trace() {
        let events = events(&[
            "{'kind':'recall','conv':'new','seq':1,TS,'id':'r'}",
            "{'kind':'message','conv':'c','user':'v',TS,'body':'x','id':'r'}",
            "{'kind':'recall','message':'r',TS}",
            "{'kind':'recall','message':'r',TS}",
            "{'kind':'restore','conv':'c','seq':1,TS}",
        ]);
        let mut appender = Appender::new(Known::default());
        let outcomes: Vec<Outcome> = events
            .iter()
            .zip(1..)
            .map(|(event, gseq)| appender.apply(event, gseq))
            .collect();
        assert!(
            matches!(&outcomes[0], Outcome::Invalid(invalid) if invalid.field.as_deref() == Some("seq"))
        );
        assert!(matches!(
            &outcomes[1],
            Outcome::Accepted {
                assigned: Some((_, 1))
            }
        ));
        assert_eq!(outcomes[3], Outcome::Unchanged);
        let writes = appender.finish();
        assert_eq!(writes.ids.len(), 1);
        assert_eq!(writes.convs.len(), 1);
        let kinds: Vec<_> = writes.revisions.iter().map(|r| (r.gseq, r.kind)).collect();
        assert_eq!(kinds, [(3, "recall"), (5, "restore")]);
    }
}
