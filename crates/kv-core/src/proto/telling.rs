//! Messages as events for the listener: without their lists, and with the session that they are
//! about.

use std::time::Duration;

use super::context::Context;
use super::conversation::Incoming;
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::each;
use crate::trace::{KvWhat, Message, Who};
use crate::wire::{Body, Delivery, Register};

impl Context {
    /// Tells that a message was sent to a peer.
    #[inline(always)]
    pub(super) fn tell_said(&mut self, peer: PeerId, body: &Body) {
        if self.fx.is_heard() {
            let who = self.who(peer, body, true);
            self.fx.tell(who, || KvWhat::Said(message(body)));
        }
    }

    /// Tells that a peer's message has arrived, before the message is handled.
    #[inline(always)]
    pub(super) fn tell_heard(&mut self, peer: PeerId, body: &Body) {
        if self.fx.is_heard() {
            let who = self.who(peer, body, false);
            self.fx.tell(who, || KvWhat::Heard(message(body)));
        }
    }

    /// The session, peer and attempt of a message that this worker has sent or received. The
    /// session is not known any more once the attempt is over.
    fn who(&self, peer: PeerId, body: &Body, said_here: bool) -> Who {
        let Some((of_speaker, attempt)) = attempt(body) else { return peer.into() };
        let session = match self.peers.get(peer) {
            // Either an attempt of this worker at the peer, or one of the peer at this worker.
            Some(known) if of_speaker == said_here => {
                known.outgoing().of(attempt).map(|(session, _)| session)
            }
            Some(known) => known.incoming().get(attempt).and_then(served_by),
            None => None,
        };
        Who { session, peer: Some(peer), attempt: Some(attempt) }
    }
}

fn served_by(incoming: &Incoming) -> Option<SessionId> {
    match incoming {
        Incoming::Active(session, _) | Incoming::Reading { session, .. } => Some(*session),
        Incoming::Waiting(_) | Incoming::Served { .. } | Incoming::Failed { .. } => None,
    }
}

/// The attempt that a message is about, and whether the speaker of the message has made that
/// attempt. Receivers make attempts, and senders speak of attempts that were made at them. `None`
/// if the message is not about one attempt.
fn attempt(body: &Body) -> Option<(bool, Attempt)> {
    Some(match body {
        Body::Register(body) => (true, body.attempt),
        Body::XferReq(body) => (true, body.attempt),
        Body::Abort(body) => (true, body.attempt),
        Body::Registered(body) => (false, body.attempt),
        Body::Progress(body) => (false, body.attempt),
        Body::Failed(body) => (false, body.attempt),
        Body::AbortAck(body) => (false, body.attempt),
        Body::Granted(body) => (false, body.attempt),
        _ => return None,
    })
}

/// The message as ids and counts.
fn message(body: &Body) -> Message {
    let millis = Duration::from_millis;
    match body {
        Body::Hello(_) => Message::Hello,
        Body::Welcome(_) => Message::Welcome,
        Body::Refused(refused) => Message::Refused(Box::new(refused.cause.clone())),
        Body::Register(Register { room, delivery: Delivery::Write(to), .. }) => Message::Register {
            room: room.clone(),
            pages: to.pages.len(),
            permission: (to.ask != 0).then(|| millis(to.permit_ms)),
        },
        Body::Register(Register { room, delivery: Delivery::Read(_), .. }) => {
            Message::Acquire { room: room.clone() }
        }
        Body::XferReq(request) => Message::AskedForEntry { hash: request.hash.clone(), bytes: request.bytes },
        Body::Registered(_) => Message::Registered,
        Body::Progress(progress) => Message::InPlace {
            parts: each(&progress.done).map(|&(_, count)| u64::from(count)).sum(),
            total: progress.total,
        },
        Body::Failed(failed) => {
            Message::Failed { cause: Box::new(failed.cause.clone()), quiet: failed.quiet }
        }
        Body::Abort(abort) => Message::Abort(Box::new(abort.cause.clone())),
        Body::AbortAck(_) => Message::AbortAcknowledged,
        Body::Granted(granted) => {
            Message::Granted { pages: granted.pages.len(), lease: millis(granted.lease_ms) }
        }
        Body::Heartbeat(heartbeat) => Message::Heartbeat {
            number: heartbeat.number,
            leases: count(&heartbeat.leases),
            asked: count(&heartbeat.asked),
            writes: heartbeat.writes,
        },
        Body::HeartbeatAck(ack) => Message::HeartbeatAnswered {
            number: ack.number,
            leases: count(&ack.leases),
            lease: millis(ack.lease_ms),
            permission: millis(ack.permit_ms),
        },
        Body::Release(release) => Message::Release { attempts: count(&release.attempts) },
        Body::Released(released) => Message::Released { attempts: count(&released.attempts) },
    }
}

fn count(runs: &[(u64, u32)]) -> u64 {
    each(runs).map(|&(_, count)| u64::from(count)).sum()
}
