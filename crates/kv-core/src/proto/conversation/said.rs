//! What is said to peers, and repeated until it is acknowledged.

use std::time::Duration;

use crate::id::{Attempt, PeerId};
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::run_set::{self, is_rising};
use crate::proto::timer::Timer;
use crate::trace::Dropped;
use crate::wire::{Body, Heartbeat, HeartbeatAck, Release, Released};

/// Most attempts that one heartbeat asks about, and that one heartbeat is answered for.
pub(in crate::proto) const MAX_ASKED: usize = 256;
/// Most heartbeats that ask about attempts at once.
pub(in crate::proto) const MAX_ASKING: usize = 16;

/// What a heartbeat asks for, beside a sign of life.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::proto) struct Asks {
    /// Runs of attempts whose leases are to be extended.
    pub(in crate::proto) leases: Vec<(u64, u32)>,
    /// Runs of attempts that have been quiet.
    pub(in crate::proto) asked: Vec<(u64, u32)>,
    /// Whether this worker may write.
    pub(in crate::proto) writes: bool,
}

/// Leases that a heartbeat has found alive.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::proto) struct Extended {
    /// Runs of attempts.
    pub(in crate::proto) leases: Vec<(u64, u32)>,
    /// For how long all of them hold, in milliseconds.
    pub(in crate::proto) lease_ms: u64,
}

impl Context {
    /// The number of a question that the peer is asked now.
    pub(in crate::proto) fn number(&mut self, id: PeerId) -> u64 {
        let now = self.fx.now();
        self.peers.get_mut(id).map_or(0, |peer| peer.number(now))
    }

    // ---- heartbeats -----------------------------------------------------------------------------

    /// Makes sure that heartbeats come at least this often.
    pub(in crate::proto) fn keep_beating(&mut self, id: PeerId, interval: Option<Duration>) {
        let Some(interval) = interval else { return };
        if self.peers.get_mut(id).is_some_and(|peer| peer.outgoing.quicken(interval)) {
            self.fx.arm(Timer::Heartbeat(id), self.fx.now() + interval);
        }
    }

    /// Without an open attempt there is nothing to keep alive.
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

    /// Answers the heartbeat with this number: these leases hold for so long, and writes may begin for so long. One
    /// run that came may be many that are left: more than fit into a frame.
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

    /// An attempt that holds nothing of the peer's is over. Lost? Then the low watermark of a later frame says it.
    pub(in crate::proto) fn say_over(&mut self, id: PeerId, attempt: Attempt) {
        if let Some(peer) = self.peers.get(id)
            && peer.outgoing.was_made(attempt)
        {
            let (low_watermark, attempts) = (peer.outgoing.low_watermark(), vec![(attempt.0, 1)]);
            self.send(id, Body::Release(Release { low_watermark, attempts, answer: false }));
        }
    }

    /// Everything of an attempt was read: says so, until the peer acknowledges it.
    pub(in crate::proto) fn release_read(&mut self, id: PeerId, attempt: Attempt) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.outgoing.end_read(attempt);
        let low_watermark = peer.outgoing.low_watermark();
        self.watch_peer(id);
        self.send(id, Body::Release(Release { low_watermark, attempts: vec![(attempt.0, 1)], answer: true }));
    }

    /// Repeats what a peer has not acknowledged. Called by its timer.
    pub(in crate::proto) fn say_releases(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        let (read, aborted) = peer.outgoing.unacknowledged();
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
