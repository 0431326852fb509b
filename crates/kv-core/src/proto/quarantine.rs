//! What the pages of sessions that have ended wait for, as a scheduler is told it.

use crate::id::{PeerId, SessionId};
use crate::plane::WriteFence;
use crate::poll::KvPoll;
use crate::proto::node::Node;
use crate::proto::receiving::{ReceiveSession, SourceState};
use crate::proto::sending::SendSession;
use crate::proto::timer::Timer;
use crate::quarantine::{Quarantine, QuarantineReason};

impl Node {
    /// The pages and items of sessions that have ended and that may not be used again yet, by peer and
    /// reason. A session that waits for several things is counted under the first of them.
    pub fn quarantine(&self) -> Vec<Quarantine> {
        let receivers =
            self.receiving.sessions.iter().filter(|(_, receiver)| receiver.poll == KvPoll::Failed);
        let receivers = receivers.map(|(&session, receiver)| self.receiver_waits(session, receiver));
        let senders = self.sending.sessions.values().filter(|sender| sender.poll == KvPoll::Failed);
        let senders = senders.map(|sender| self.sender_waits(sender));
        Quarantine::gather(receivers.chain(senders), |a, b| a + b)
    }

    fn receiver_waits(&self, session: SessionId, receiver: &ReceiveSession) -> Quarantine {
        let closing = receiver.sources.iter().find(|source| source.state == SourceState::Closing);
        let (peer, reason) = match closing {
            Some(source) => (Some(source.peer), self.why_closing(source.peer)),
            None => {
                let reading = receiver.sources.iter().find(|source| source.reading.is_some());
                (reading.map(|source| source.peer), QuarantineReason::OwnPosts)
            }
        };
        let until = match (reason, peer.and_then(|peer| self.cx.peers.get(peer))) {
            (QuarantineReason::PermissionEnds, Some(peer)) => match peer.writes_in.fence {
                WriteFence::Within(bound) => Some(peer.writes_in.end_of_last(bound)),
                _ => None,
            },
            _ => None,
        };
        // Of a dead peer that is forgotten, the timer knows.
        let quiet = closing.and_then(|source| self.cx.fx.due(Timer::Quiet(session, source.peer)));
        Quarantine {
            peer: peer.and_then(|peer| self.cx.peers.get(peer)).map(|peer| peer.worker.clone()),
            reason,
            pages: receiver.given.as_ref().map_or(0, |(pages, _)| pages.len()),
            items: receiver.groups.as_ref().map_or(0, |groups| groups.len()),
            sessions: 1,
            ends_within: until.or(quiet).map(|until| until - self.cx.fx.now()),
        }
    }

    /// Why a peer that was told to stop still counts as writing.
    fn why_closing(&self, id: PeerId) -> QuarantineReason {
        // Of a dead peer the last writes may still be on their way.
        let Some(peer) = self.cx.peers.get(id) else { return QuarantineReason::PermissionEnds };
        let silent = peer.lost || peer.given_up;
        match peer.writes_in.fence {
            _ if peer.writes_in.revoking => QuarantineReason::Revoking,
            WriteFence::Within(_) if silent => QuarantineReason::PermissionEnds,
            _ if peer.lost => QuarantineReason::WayLost,
            _ => QuarantineReason::Unacknowledged,
        }
    }

    fn sender_waits(&self, sender: &SendSession) -> Quarantine {
        let busy = sender.targets.iter().find(|target| target.outstanding > 0);
        let leased = sender.readers().map(|(_, target)| target).filter(|target| !target.over);
        let until = leased.clone().filter_map(|target| target.fence).max();
        let (target, reason) = match busy {
            Some(target) => (Some(target), QuarantineReason::OwnPosts),
            None => (leased.clone().next(), QuarantineReason::ReaderLease),
        };
        let until = until.filter(|_| reason == QuarantineReason::ReaderLease);
        Quarantine {
            peer: target.and_then(|target| self.cx.peers.get(target.peer)).map(|peer| peer.worker.clone()),
            reason,
            pages: sender.chunks.iter().map(|chunk| chunk.pages.len()).sum(),
            items: sender.groups.as_ref().map_or(0, |groups| groups.len()),
            sessions: 1,
            ends_within: until.map(|until| until - self.cx.fx.now()),
        }
    }
}
