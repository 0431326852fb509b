//! What is said to peers, and repeated until it is acknowledged.

use std::time::Duration;

use crate::id::{Attempt, PeerId};
use crate::lease::GrantRef;
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::io::Output;
use crate::proto::run_set::is_rising;
use crate::proto::timer::Timer;
use crate::wire::{
    Body, Claim, Codec, Finish, Heartbeat, Link, Ping, Pong, Register, Release, Released, Unspeakable,
};

impl Context {
    /// Sends a frame to a peer that is up; otherwise it is lost, as frames may be.
    pub(in crate::proto) fn send(&mut self, peer: PeerId, body: Body) {
        let way = self.peers.get(peer).and_then(|peer| Some((peer.codec, peer.contact.open_link()?)));
        if let Some((codec, link)) = way {
            self.say(peer, codec, link, &body);
        }
    }

    /// Sends a frame to a peer; one that is too long, or in no version that the peer reads, is lost.
    pub(super) fn say(&mut self, peer: PeerId, codec: Codec, link: Link, body: &Body) {
        if let Ok(frame) = codec.encode(link, body) {
            self.fx.output(Output::Send { peer, frame });
        }
    }

    /// Sends a frame that may be too long to be one. False if it is.
    pub(in crate::proto) fn send_long(&mut self, peer: PeerId, body: &Body) -> bool {
        let way = self.peers.get(peer).and_then(|peer| Some((peer.codec, peer.contact.link()?)));
        match way.map(|(codec, link)| codec.encode(link, body)) {
            Some(Ok(frame)) => self.fx.output(Output::Send { peer, frame }),
            Some(Err(Unspeakable::TooLong { .. })) => return false,
            Some(Err(_)) | None => {}
        }
        true
    }

    /// Asks for a sign of life, and about these attempts.
    pub(in crate::proto) fn say_pings(&mut self, id: PeerId, asked: Vec<Vec<(u64, u32)>>) {
        let Some(floor) = self.peers.get(id).map(|peer| peer.outgoing.floor()) else { return };
        for attempts in each(asked) {
            self.send(id, Body::Ping(Ping { floor, attempts }));
        }
    }

    pub(in crate::proto) fn say_pong(&mut self, id: PeerId) {
        if let Some(floor) = self.peers.get(id).map(|peer| peer.outgoing.floor()) {
            self.send(id, Body::Pong(Pong { floor }));
        }
    }

    /// An attempt is over for this worker. Lost? Then the floor of a later frame says it.
    pub(in crate::proto) fn say_finish(&mut self, id: PeerId, attempt: Attempt) {
        if let Some(peer) = self.peers.get(id)
            && peer.outgoing.was_made(attempt)
        {
            let floor = peer.outgoing.floor();
            self.send(id, Body::Finish(Finish { attempt, floor }));
        }
    }

    /// The claim, as it is sent to a source now.
    pub(in crate::proto) fn claim(&mut self, id: PeerId, register: Register, grants: &[GrantRef]) -> Body {
        let Register { attempt, floor, room, ranks, ttl_ms, .. } = register;
        let meant = self.peers.get(id).and_then(|peer| super::of_life(grants, peer.incarnation));
        let grant = meant.map(|grant| grant.nonce);
        let now = self.fx.now();
        let beat = self.peers.get_mut(id).map_or(0, |peer| peer.outgoing.beat(now));
        Body::Claim(Claim { attempt, floor, room, grant, beat, ranks, ttl_ms })
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

    pub(in crate::proto) fn say_heartbeat(&mut self, id: PeerId, attempts: Vec<(u64, u32)>) {
        let now = self.fx.now();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let beat = peer.outgoing.beat(now);
        let floor = peer.outgoing.floor();
        self.send(id, Body::Heartbeat(Heartbeat { beat, floor, attempts }));
    }

    // ---- ends that the peer has not acknowledged --------------------------------------------------

    /// Everything of an attempt was read: says so, until the peer acknowledges it.
    pub(in crate::proto) fn release_read(&mut self, id: PeerId, attempt: Attempt) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.outgoing.end_read(attempt);
        let floor = peer.outgoing.floor();
        self.watch_peer(id);
        self.send(id, Body::Release(Release { floor, attempts: vec![(attempt.0, 1)] }));
    }

    /// Repeats what a peer has not acknowledged. Called by its timer.
    pub(in crate::proto) fn say_releases(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        let (read, aborted) = peer.outgoing.unacknowledged();
        let floor = peer.outgoing.floor();
        if !read.is_empty() {
            self.send(id, Body::Release(Release { floor, attempts: read }));
        }
        for abort in each(aborted) {
            self.send(id, Body::Abort(abort));
        }
    }

    pub(in crate::proto) fn on_released(&mut self, id: PeerId, released: Released) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !is_rising(&released.attempts) {
            self.fx.drop_frame();
            return;
        }
        for (start, count) in each(released.attempts) {
            let end = start.saturating_add(u64::from(count));
            peer.outgoing.acknowledged(Attempt(start)..Attempt(end));
        }
    }
}
