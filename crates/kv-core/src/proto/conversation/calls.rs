//! What is said to peers, and how they are met.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Cause, PeerCause};
use crate::groups::Groups;
use crate::id::{Attempt, PeerId, SessionId};
use crate::lease::GrantRef;
use crate::meter::each;
use crate::plane::Origin;
use crate::proto::context::Context;
use crate::proto::conversation::peer::{HelloSaid, Introduction, Peer, Releasing, of_life};
use crate::proto::io::Output;
use crate::proto::node::encode;
use crate::proto::run_set;
use crate::proto::run_set::is_rising;
use crate::proto::timer::Timer;
use crate::wire::{Body, Claim, Finish, Heartbeat, Hello, Link, Refused, Register, Release, Released};

/// Most attempts that one ping asks about, and that one ping is answered for.
pub(in crate::proto) const MAX_ASKED: usize = 256;
/// Most pings that are said at once.
pub(in crate::proto) const MAX_PINGS: usize = 16;
/// Most runs in one frame.
pub(in crate::proto) const MAX_RUNS: usize = 1 << 16;
/// Most aborts that are repeated at once.
const MAX_ABORTS: usize = 256;
/// Most bytes of a transport's metadata, and how many more for each region.
pub(in crate::proto) const MAX_METADATA: usize = 64 << 10;
pub(in crate::proto) const METADATA_OF_REGION: usize = 64;

impl Context {
    /// Sends a frame to a peer that is up; otherwise it is lost, as frames may be.
    pub(in crate::proto) fn send(&mut self, peer: PeerId, body: Body) {
        let link = match self.peers.get(peer) {
            Some(Peer { theirs: Some(link), lost: false, .. }) => *link,
            Some(_) if matches!(body, Body::Hello(_)) => Link::NONE,
            _ => return,
        };
        if let Some(frame) = encode(link, body) {
            self.fx.output(Output::Send { peer, frame });
        }
    }

    /// The peer with this incarnation; it is greeted if it is not known. `None` if there are too
    /// many peers and all are busy.
    pub(in crate::proto) fn meet(&mut self, introduction: Introduction) -> Option<PeerId> {
        if let Some(known) = self.peers.known(introduction.incarnation, &introduction.metadata) {
            // The time of a hello that no session has waited for does not count.
            if let Some(peer) = self.peers.get_mut(known) {
                peer.greeted = true;
                if !(peer.is_up() || peer.lost) && (peer.hello.is_none() || peer.waiting.is_empty()) {
                    peer.hello = None;
                    self.say_hello(known);
                }
            }
            return Some(known);
        }
        let metadata = introduction.metadata.clone();
        let peer = self.admit(introduction)?;
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.greeted = true;
        }
        self.fx.output(Output::Connect { peer, metadata });
        self.say_hello(peer);
        Some(peer)
    }

    /// Makes room for one more peer and enters it.
    fn admit(&mut self, introduction: Introduction) -> Option<PeerId> {
        if self.peers.len() >= self.config.limits.max_peers {
            let idle = self.peers.oldest_idle()?;
            self.forget_peer(idle);
        }
        let Introduction { worker, incarnation, geometry, metadata } = introduction;
        let link = self.peers.draw_link(&mut self.fx);
        let here = self.config.args.geometry();
        let peer = Peer::new(worker, incarnation, metadata, geometry, here, link, self.fx.now());
        Some(self.peers.insert(peer))
    }

    pub(in crate::proto) fn forget_peer(&mut self, peer: PeerId) {
        self.peers.remove(peer);
        self.lookups.forget(peer);
        self.posts.forget(peer);
        for timer in [Timer::Peer, Timer::Heartbeat, Timer::Permission, Timer::Fence, Timer::Sweep] {
            self.fx.cancel(timer(peer));
        }
        self.fx.output(Output::Disconnect { peer });
    }

    pub(in crate::proto) fn say_hello(&mut self, id: PeerId) {
        let now = self.fx.now();
        let nonce = self.fx.draw();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let said = peer.hello.get_or_insert(HelloSaid { nonce, first_said: now, times: 0 });
        // A repetition keeps its nonce: any answer to any of them will do.
        said.times += 1;
        let (nonce, times) = (said.nonce, said.times);
        let (to, link) = (peer.incarnation, peer.ours);
        let args = &self.config.args;
        let hello = Hello {
            to,
            worker: args.worker().clone(),
            incarnation: self.config.incarnation,
            link,
            nonce,
            plane: self.config.plane.clone(),
            metadata: self.config.metadata.clone(),
            geometry: args.geometry().clone(),
            suffixed: args.suffixes_requests(),
        };
        if let Some(frame) = encode(Link::NONE, Body::Hello(hello)) {
            self.fx.output(Output::Send { peer: id, frame });
        }
        let pause = self.fx.backoff(self.config.timing.retry_first, times);
        self.fx.arm(Timer::Peer(id), now + pause);
    }

    /// True if a known peer is heard of by another connection than its own, while nothing is wrong with
    /// that.
    pub(in crate::proto) fn is_impostor(&self, known: PeerId, from: Origin) -> bool {
        let Some(peer) = self.peers.get(known) else { return false };
        let silent = self.fx.now() - peer.last_heard >= self.forgetful();
        peer.origin.is_some_and(|origin| origin != from) && !(silent || peer.given_up || peer.lost)
    }

    /// After such a silence a peer may have lost its way, or what it knew of the conversation.
    pub(in crate::proto) fn forgetful(&self) -> Duration {
        (self.config.timing.keepalive * 3).min(self.config.timing.peer_timeout / 2)
    }

    /// Takes whoever says hello among the peers, if there is room.
    pub(in crate::proto) fn admit_speaker(&mut self, from: Origin, hello: &Hello) -> Option<PeerId> {
        if self.peers.of_origin(from).count() >= self.config.limits.max_incarnations {
            // Names and incarnations are the speaker's choice: the connection pays for them.
            let idle = self.peers.of_origin(from).find(|(_, peer)| peer.is_idle()).map(|(id, _)| id);
            match idle {
                Some(idle) => self.forget_peer(idle),
                None => {
                    self.fx.drop_frame();
                    return None;
                }
            }
        }
        let introduction = Introduction {
            worker: hello.worker.clone(),
            incarnation: hello.incarnation,
            geometry: hello.geometry.clone(),
            metadata: hello.metadata.clone(),
        };
        let Some(id) = self.admit(introduction) else {
            self.fx.drop_frame();
            return None;
        };
        if let Some(peer) = self.peers.get_mut(id) {
            peer.origin = Some(from);
        }
        self.fx.output(Output::Connect { peer: id, metadata: hello.metadata.clone() });
        Some(id)
    }

    /// Answers a hello that is meant for a former life of this worker. What this life has with the
    /// peer, or will have, stays as it is: the number in the hello is that of another conversation,
    /// and may be later than the one in which the peer means this life.
    pub(in crate::proto) fn refuse_stranger(&mut self, known: Option<PeerId>, from: Origin, hello: Hello) {
        let Some(id) = known.or_else(|| self.admit_speaker(from, &hello)) else { return };
        let refused = Refused { nonce: hello.nonce, cause: PeerCause::Unknown, link: Link::NONE };
        if let Some(frame) = encode(hello.link, Body::Refused(refused)) {
            self.fx.output(Output::Send { peer: id, frame });
        }
    }

    pub(in crate::proto) fn refusal(&self, hello: &Hello) -> Option<PeerCause> {
        if self.stopping {
            return Some(PeerCause::WorkerStopped);
        }
        if hello.plane != self.config.plane {
            return Some(PeerCause::Incompatible(crate::error::Mismatch {
                field: "plane".to_owned(),
                ours: self.config.plane.clone(),
                theirs: hello.plane.clone(),
            }));
        }
        self.config.args.geometry().check(&hello.geometry).err().map(PeerCause::Incompatible)
    }

    /// The peer has answered the hello with this nonce, which nobody else knows. False if it has not.
    pub(in crate::proto) fn is_answer(&mut self, from: Origin, id: PeerId, nonce: u64) -> bool {
        let now = self.fx.now();
        let Some(peer) = self.peers.get_mut(id) else { return false };
        if peer.hello.is_none_or(|said| said.nonce != nonce) {
            return false;
        }
        peer.hello = None;
        peer.origin = Some(from);
        peer.last_heard = now;
        peer.given_up = false;
        true
    }

    /// Someone begins to depend on the peer.
    pub(in crate::proto) fn watch_peer(&mut self, id: PeerId) {
        if self.fx.is_armed(Timer::Peer(id)) {
            return;
        }
        self.fx.arm(Timer::Peer(id), self.fx.now() + self.config.timing.keepalive);
        // Nobody listened to it until now: that it was silent says nothing.
        if let Some(peer) = self.peers.get_mut(id) {
            peer.last_heard = self.fx.now();
        }
    }

    /// Why a peer is lost: a known successor explains it better.
    pub(in crate::proto) fn loss(&self, id: PeerId, otherwise: Cause) -> Cause {
        match self.peers.get(id) {
            Some(peer) if self.peers.has_successor(&peer.worker, peer.incarnation) => Cause::PeerRestarted,
            _ => otherwise,
        }
    }

    /// How long nothing was heard from the peer, as a cause.
    pub(in crate::proto) fn silence(&self, id: PeerId) -> Cause {
        match self.peers.get(id) {
            Some(peer) if !peer.lost => {
                Cause::PeerUnresponsive { silent_for: self.fx.now() - peer.last_heard }
            }
            _ => Cause::WayLost,
        }
    }

    /// The claim, as it is sent to a source now.
    pub(in crate::proto) fn claim(&mut self, id: PeerId, register: Register, grants: &[GrantRef]) -> Body {
        let Register { attempt, floor, room, ranks, ttl_ms, .. } = register;
        let meant = self.peers.get(id).and_then(|peer| of_life(grants, peer.incarnation));
        let grant = meant.map(|grant| grant.nonce);
        let beat = self.peers.get_mut(id).map_or(0, |peer| peer.heart.beats.beat(self.fx.now()));
        Body::Claim(Claim { attempt, floor, room, grant, beat, ranks, ttl_ms })
    }

    /// Makes sure that heartbeats come at least this often.
    pub(in crate::proto) fn keep_beating(&mut self, id: PeerId, interval: Option<Duration>) {
        let Some(interval) = interval else { return };
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.heart.interval.is_some_and(|before| before <= interval) {
            return;
        }
        peer.heart.interval = Some(interval);
        self.fx.arm(Timer::Heartbeat(id), self.fx.now() + interval);
    }

    /// Without an open attempt there is nothing to keep alive.
    pub(in crate::proto) fn stop_beating_if_idle(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(id)
            && peer.outgoing.is_empty()
            && peer.heart.interval.take().is_some()
        {
            self.fx.cancel(Timer::Heartbeat(id));
        }
    }

    pub(in crate::proto) fn say_heartbeat(&mut self, id: PeerId, attempts: Vec<(u64, u32)>) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let beat = peer.heart.beats.beat(self.fx.now());
        let floor = peer.outgoing_floor();
        self.send(id, Body::Heartbeat(Heartbeat { beat, floor, attempts }));
    }

    /// Repeats what a peer has not acknowledged. Called by its timer.
    pub(in crate::proto) fn say_releases(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        if peer.releasing.is_empty() {
            return;
        }
        let mut read: Vec<(u64, u32)> = Vec::new();
        let mut aborted = Vec::new();
        for (&attempt, releasing) in each(&peer.releasing) {
            match releasing {
                Releasing::Read => {
                    run_set::append(&mut read, attempt.0);
                    if read.len() > MAX_RUNS {
                        read.pop();
                        break;
                    }
                }
                Releasing::Aborted(abort) if aborted.len() < MAX_ABORTS => aborted.push(abort.clone()),
                Releasing::Aborted(_) => {}
            }
        }
        let floor = peer.outgoing_floor();
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
            forget_range(&mut peer.releasing, start, count);
        }
    }

    /// Lost? Then the floor of a later frame says it.
    pub(in crate::proto) fn say_finish(&mut self, id: PeerId, attempt: Attempt) {
        if let Some(peer) = self.peers.get(id)
            && attempt.0 < peer.next_attempt
        {
            let floor = peer.outgoing_floor();
            self.send(id, Body::Finish(Finish { attempt, floor }));
        }
    }

    pub(in crate::proto) fn release_groups(&mut self, session: SessionId, groups: Groups, skipped: Vec<u16>) {
        self.fx.output(Output::ReleaseGroups { session, groups, skipped });
    }
}

fn forget_range(releasing: &mut BTreeMap<Attempt, Releasing>, start: u64, count: u32) {
    let end = start.saturating_add(u64::from(count));
    let over: Vec<Attempt> =
        releasing.range(Attempt(start)..Attempt(end)).map(|(&attempt, _)| attempt).collect();
    for attempt in each(over) {
        releasing.remove(&attempt);
    }
}
