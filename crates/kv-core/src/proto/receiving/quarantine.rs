//! What the pages of failed receiving sessions wait for.

use crate::id::SessionId;
use crate::proto::context::Context;
use crate::proto::conversation::Peer;
use crate::proto::receiving::{ReceiveSession, Receiving};
use crate::proto::timer::Timer;
use crate::quarantine::{Quarantine, QuarantineReason};
use crate::transport::WriteFence;

impl Receiving {
    /// What each failed session waits for whose pages may not be used again yet.
    pub(in crate::proto) fn quarantine(&self, cx: &Context) -> impl Iterator<Item = Quarantine> {
        let failed = self.sessions.iter().filter(|(_, receiver)| !receiver.standing.is_going());
        failed.map(|(session, receiver)| receiver.waits(cx, session))
    }
}

impl ReceiveSession {
    pub(super) fn waits(&self, cx: &Context, session: SessionId) -> Quarantine {
        let closing = self.sources.iter().find(|source| source.closing_attempt().is_some());
        let (peer, reason) = match closing {
            Some(source) => (Some(source.peer), why_closing(cx.peers.get(source.peer))),
            None => {
                let reading = self.sources.iter().find(|source| source.reading.is_some());
                (reading.map(|source| source.peer), QuarantineReason::OwnPosts)
            }
        };
        let peer = peer.and_then(|peer| cx.peers.get(peer));
        let until = match (reason, peer) {
            (QuarantineReason::PermissionEnds, Some(peer)) => match peer.writes_in().fence() {
                WriteFence::Within(bound) => Some(peer.writes_in().end_of_last(bound)),
                _ => None,
            },
            _ => None,
        };
        // For a dead peer that is forgotten, the timer knows the time.
        let quiet = closing.and_then(|source| cx.fx.due(Timer::Quiet(session, source.peer)));
        Quarantine {
            peer: peer.map(|peer| peer.worker().clone()),
            reason,
            pages: self.given.as_ref().map_or(0, |(pages, _)| pages.len()),
            items: self.groups.as_ref().map_or(0, |groups| groups.len()),
            sessions: 1,
            ends_within: until.or(quiet).map(|until| until - cx.fx.now()),
        }
    }
}

/// Why a peer that was told to stop may still be writing.
fn why_closing(peer: Option<&Peer>) -> QuarantineReason {
    // The last writes of a dead peer may still arrive.
    let Some(peer) = peer else { return QuarantineReason::PermissionEnds };
    match peer.writes_in().fence() {
        _ if peer.writes_in().is_revoking() => QuarantineReason::Revoking,
        WriteFence::Within(_) if peer.is_out_of_touch() => QuarantineReason::PermissionEnds,
        _ if peer.is_lost() => QuarantineReason::WayLost,
        _ => QuarantineReason::Unacknowledged,
    }
}
