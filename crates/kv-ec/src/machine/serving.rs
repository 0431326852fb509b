//! The producer's part: answers to peers that ask for entries.
//!
//! An answer is one sending session of the inner machine, over the blocks of the pinned entry. The pin ends
//! when the session has given the blocks back: when no post writes from them any more, and when the reader has
//! released or given up the entry, or has lost its lease. A read of such a reader may still be under way. The read
//! fills blocks that the reader keeps from everybody, and the reader commits nothing of it.

use std::collections::BTreeMap;

use kv_core::proto::Command;
use kv_core::{Asked, KvPoll, Lease, Mismatch, PeerCause, PeerId, SessionId, SessionOptions, TransferMode};

use super::context::Context;
use crate::cache::{Absent, Pin};

/// The answers under way.
#[derive(Debug, Default)]
pub(super) struct Serving {
    /// By the inner machine's session: the peer, and the pin of the entry that is given away.
    pins: BTreeMap<SessionId, (PeerId, Pin)>,
    /// How many answers each peer has under way.
    of_peer: BTreeMap<PeerId, usize>,
}

/// One peer may have one in this many of the answers, once half of them are under way.
const PEER_SHARE: usize = 8;

impl Serving {
    /// Answers one request.
    pub(super) fn answer(&mut self, cx: &mut Context, asked: &Asked) {
        match self.admit(cx, asked) {
            Ok(pin) => self.serve(cx, asked, pin),
            Err(cause) => {
                cx.store.counters().refused.add(1);
                cx.refuse(asked, cause);
            }
        }
    }

    /// Pins the entry that is asked for, if it may be given away now.
    fn admit(&self, cx: &mut Context, asked: &Asked) -> Result<Pin, PeerCause> {
        if cx.config.compatibility != asked.content.compatibility {
            return Err(PeerCause::Incompatible(Mismatch {
                field: "compatibility".to_owned(),
                ours: cx.config.compatibility.clone(),
                theirs: asked.content.compatibility.clone(),
            }));
        }
        if !self.has_room(asked.peer, cx.config.max_answers) {
            return Err(PeerCause::Overloaded);
        }
        let pin = cx.store.pin(&asked.content.hash).map_err(|absent| match absent {
            Absent::Missing => PeerCause::EntryMissing,
            Absent::NotReady => PeerCause::EntryNotReady,
        })?;
        let (held, asked) = (pin.bytes(), asked.content.bytes);
        if held != asked {
            cx.store.unpin(pin);
            return Err(PeerCause::EntrySize { held, asked });
        }
        Ok(pin)
    }

    /// True if a peer may have one more answer of `max`: one peer alone never takes what others need.
    fn has_room(&self, peer: PeerId, max: usize) -> bool {
        let of_peer = self.of_peer.get(&peer).copied().unwrap_or(0);
        self.pins.len() < max && (self.pins.len() < max / 2 || of_peer < (max / PEER_SHARE).max(1))
    }

    fn serve(&mut self, cx: &mut Context, asked: &Asked, pin: Pin) {
        let session = cx.inner_session();
        let (pages, chunk) = (pin.pages().len(), pin.mirror());
        self.pins.insert(session, (asked.peer, pin));
        *self.of_peer.entry(asked.peer).or_default() += 1;
        let options = SessionOptions::default().with(|options| {
            options.mode = Some(TransferMode::Auto);
            options.lease = Some(Lease::Renewable(cx.config.lease));
            options.deadline = Some(cx.config.answer_deadline);
        });
        let (room, options) = (asked.room.clone(), Box::new(options));
        cx.command(Command::OpenSender { session, room, receivers: 1, options });
        cx.command(Command::InitSender { session, num_pages: pages, aux: None });
        cx.command(Command::Send { session, chunk });
    }

    /// The inner machine reports the state of a session. False if the session is none of an answer.
    pub(super) fn progressed(&self, cx: &Context, session: SessionId, poll: KvPoll) -> bool {
        let found = self.pins.contains_key(&session);
        if found && poll == KvPoll::Success {
            cx.store.counters().served.add(1);
        }
        found
    }

    /// The inner machine has given the blocks of an answer back. False if the session is none of an answer.
    pub(super) fn released(&mut self, cx: &mut Context, session: SessionId) -> bool {
        let Some((peer, pin)) = self.pins.remove(&session) else { return false };
        cx.store.unpin(pin);
        if let Some(answers) = self.of_peer.get_mut(&peer) {
            *answers -= 1;
            if *answers == 0 {
                self.of_peer.remove(&peer);
            }
        }
        true
    }

    /// How many answers are under way.
    pub(super) fn len(&self) -> usize {
        self.pins.len()
    }
}
