//! Messages to peers, and their repetition until the peer acknowledges them.

use std::time::Duration;

use crate::error::PeerCause;
use crate::id::{Attempt, PeerId};
use crate::meter::each;
use crate::proto::context::{Admits, Context};
use crate::proto::run_set::{self, is_rising};
use crate::proto::timer::Timer;
use crate::trace::Dropped;
use crate::wire::{Body, Failed, Heartbeat, HeartbeatAck, Release, Released};

/// Most attempts that one heartbeat asks about, and most attempts about which one heartbeat is
/// answered.
pub(in crate::proto) const MAX_ASKED: usize = 256;
/// Most heartbeats that ask about attempts at one time.
pub(in crate::proto) const MAX_ASKING: usize = 16;

/// What a heartbeat asks for, beside an answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::proto) struct Asks {
    /// Runs of attempts whose leases are to be extended.
    pub(in crate::proto) leases: Vec<(u64, u32)>,
    /// Runs of attempts of which nothing was heard for a while.
    pub(in crate::proto) asked: Vec<(u64, u32)>,
    /// True if this worker asks for permission to write.
    pub(in crate::proto) writes: bool,
}

/// The leases that a heartbeat has extended.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::proto) struct Extended {
    /// Runs of attempts whose leases hold.
    pub(in crate::proto) leases: Vec<(u64, u32)>,
    /// How long all of these leases hold, in milliseconds.
    pub(in crate::proto) lease_ms: u64,
}

impl Context {
    /// The number for a question that is sent to the peer now.
    pub(in crate::proto) fn number(&mut self, id: PeerId) -> u64 {
        let now = self.fx.now();
        self.peers.get_mut(id).map_or(0, |peer| peer.number(now))
    }

    // ---- heartbeats -----------------------------------------------------------------------------

    /// Makes sure that heartbeats are sent at least this often.
    pub(in crate::proto) fn keep_beating(&mut self, id: PeerId, interval: Option<Duration>) {
        let Some(interval) = interval else { return };
        if self.peers.get_mut(id).is_some_and(|peer| peer.outgoing.quicken(interval)) {
            self.fx.arm(Timer::Heartbeat(id), self.fx.now() + interval);
        }
    }

    /// Stops heartbeats if no attempt is open, because there is no lease to keep alive.
    pub(in crate::proto) fn stop_beating_if_idle(&mut self, id: PeerId) {
        if self.peers.get_mut(id).is_some_and(|peer| peer.outgoing.falls_silent()) {
            self.fx.cancel(Timer::Heartbeat(id));
        }
    }

    pub(in crate::proto) fn say_heartbeat(&mut self, id: PeerId, asks: Asks) {
        let now = self.fx.now();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let (number, low_watermark) = (peer.number(now), peer.outgoing.low_watermark());
        let Asks { leases, asked, writes } = asks;
        self.send(id, Body::Heartbeat(Heartbeat { number, low_watermark, leases, asked, writes }));
    }

    /// Answers the heartbeat with this number: how long the leases hold, and for how long writes
    /// may begin. A run in the heartbeat may have become many runs, more than fit into a frame.
    pub(in crate::proto) fn say_heartbeat_ack(
        &mut self,
        id: PeerId,
        number: u64,
        extended: Extended,
        permit_ms: u64,
    ) {
        let Some(low_watermark) = self.peers.get(id).map(|peer| peer.outgoing.low_watermark()) else {
            return;
        };
        let Extended { leases, lease_ms } = extended;
        for leases in run_set::frames(leases) {
            self.send(
                id,
                Body::HeartbeatAck(HeartbeatAck { number, low_watermark, lease_ms, leases, permit_ms }),
            );
        }
    }

    // ---- ends -------------------------------------------------------------------------------------

    /// Tells a peer that this worker takes no new requests, if that is so: the peer then asks its bootstrap
    /// server for each later request, and finds the worker's successor there. The message is not
    /// acknowledged. A peer that has missed it is told when it asks for a room that is not open.
    pub(in crate::proto) fn say_if_draining(&mut self, id: PeerId) {
        if self.admits == Admits::OpenRooms {
            let cause = PeerCause::WorkerStopped;
            self.send(id, Body::Failed(Failed { attempt: Attempt::LATER, cause, quiet: true }));
        }
    }

    /// An attempt is over for which the peer holds nothing. If this message is lost, the low
    /// watermark of a later frame says the same.
    pub(in crate::proto) fn say_over(&mut self, id: PeerId, attempt: Attempt) {
        if let Some(peer) = self.peers.get(id)
            && peer.outgoing.was_made(attempt)
        {
            let (low_watermark, attempts) = (peer.outgoing.low_watermark(), vec![(attempt.0, 1)]);
            self.send(id, Body::Release(Release { low_watermark, attempts, answer: false }));
        }
    }

    /// Everything of an attempt was read. Tells the peer until it acknowledges.
    pub(in crate::proto) fn release_read(&mut self, id: PeerId, attempt: Attempt) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.outgoing.end_read(attempt);
        let low_watermark = peer.outgoing.low_watermark();
        self.watch_peer(id);
        self.send(id, Body::Release(Release { low_watermark, attempts: vec![(attempt.0, 1)], answer: true }));
    }

    /// Repeats what a peer has not acknowledged. Called by the peer's timer.
    pub(in crate::proto) fn say_releases(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        let (read, aborted) = peer.outgoing.unacknowledged(self.fx.now());
        let low_watermark = peer.outgoing.low_watermark();
        if !read.is_empty() {
            self.send(id, Body::Release(Release { low_watermark, attempts: read, answer: true }));
        }
        for abort in each(aborted) {
            self.send(id, Body::Abort(abort));
        }
    }

    pub(in crate::proto) fn on_released(&mut self, id: PeerId, released: Released) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !is_rising(&released.attempts) {
            self.fx.drop_frame(Some(id), Dropped::Disordered);
            return;
        }
        for (start, count) in each(released.attempts) {
            let end = start.saturating_add(u64::from(count));
            peer.outgoing.acknowledged(Attempt(start)..Attempt(end));
        }
    }
}
