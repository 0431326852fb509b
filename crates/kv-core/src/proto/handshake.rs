//! Meeting peers, keeping in touch, and losing them.
//!
//! ```text
//! receiver's node                          sender's node
//!   Hello{to, link, nonce} ──────────────▶   checks incarnation, versions, plane, geometry
//!   repeated with backoff                    draws its own link
//!                          ◀──────────────  Welcome{nonce, link} | Refused{nonce, cause}
//!   Ping{floor, attempts}  ◀────────────▶   Pong{floor}: whenever one depends on the other and has
//!                                           heard nothing for a while
//! ```
//!
//! A peer that stays silent is *given up*: its sessions fail, but nothing is proven, so pages that
//! it may still write stay where they are until it answers or the plane proves it gone.

use std::time::Duration;

use super::grant::is_rising;
use super::incoming::Incoming;
use super::io::Output;
use super::node::Node;
use super::peer::{HelloSaid, Introduction, Peer};
use super::rendezvous::{Latecomers, Named};
use super::run_set;
use super::timer::Timer;
use crate::args::MAX_REGIONS;
use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::each;
use crate::plane::{Directions, Origin, PlaneError, WayEnd, WriteFence};
use crate::time::Time;
use crate::wire::{Body, Codec, Hello, Link, Ping, Pong, Refused, Welcome};

/// Most attempts that one ping asks about, and that one ping is answered for.
pub(super) const MAX_ASKED: usize = 256;
/// Most pings that are said at once.
const MAX_PINGS: usize = 16;
/// Most bytes of a transport's metadata, and how many more for each region.
const MAX_METADATA: usize = 64 << 10;
const METADATA_OF_REGION: usize = 64;

impl Node {
    /// The peer with this incarnation; it is greeted if it is not known. `None` if there are too
    /// many peers and all are busy.
    pub(super) fn meet(&mut self, introduction: Introduction) -> Option<PeerId> {
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
        self.output(Output::Connect { peer, metadata });
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
        let link = self.draw_link();
        let here = self.config.args.geometry();
        let peer = Peer::new(worker, incarnation, metadata, geometry, here, link, self.now);
        Some(self.peers.insert(peer))
    }

    pub(super) fn forget_peer(&mut self, peer: PeerId) {
        self.peers.remove(peer);
        self.directory.forget(peer);
        self.posting.forget(peer);
        for timer in [Timer::Peer, Timer::Heartbeat, Timer::Permission, Timer::Fence, Timer::Sweep] {
            self.timers.cancel(timer(peer));
        }
        self.output(Output::Disconnect { peer });
    }

    fn say_hello(&mut self, id: PeerId) {
        let now = self.now;
        let nonce = self.random.next();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let said = peer.hello.get_or_insert(HelloSaid { nonce, first_said: now, times: 0 });
        // A repetition keeps its nonce: any answer to any of them will do.
        said.times += 1;
        let (nonce, times) = (said.nonce, said.times);
        let (to, link) = (peer.incarnation, peer.ours);
        let args = &self.config.args;
        let hello = Hello {
            versions: self.config.versions,
            metadata: self.config.metadata.clone(),
            plane: self.config.plane.clone(),
            to,
            incarnation: self.config.incarnation,
            link,
            nonce,
            worker: args.worker().clone(),
            geometry: Some(args.geometry().clone()),
            suffixed: args.suffixes_requests(),
        };
        self.say(id, Codec::MEETING, Link::NONE, &Body::Hello(hello));
        let pause = self.backoff(self.config.timing.retry_first, times);
        self.timers.arm(Timer::Peer(id), now + pause);
    }

    pub(super) fn on_hello(&mut self, from: Origin, mut hello: Hello) {
        let codec = Codec::between(self.config.versions, hello.versions);
        if codec.is_none() {
            // Nobody here knows what another version means by it.
            hello.geometry = None;
        }
        let known = self.peers.known(hello.incarnation, &hello.metadata);
        let regions = hello.geometry.as_ref().map_or(MAX_REGIONS, |geometry| geometry.regions.len());
        if hello.geometry.as_ref().is_some_and(|geometry| geometry.validate().is_err())
            || hello.incarnation == self.config.incarnation
            || hello.metadata.len() > MAX_METADATA + METADATA_OF_REGION * regions
            || known.is_some_and(|known| self.is_impostor(known, from))
        {
            self.frames_dropped += 1;
            return;
        }
        // Posts of a former conversation must be over before a new one begins: the welcome tells
        // the peer that its old pages are quiet. It will ask again.
        if self.peers.has_lingering_posts(hello.incarnation, &hello.metadata) {
            return;
        }
        if hello.to != self.config.incarnation {
            return self.refuse_stranger(known, from, hello);
        }
        let refusal = self.refusal(&hello);
        let id = match known {
            Some(id) => {
                if !self.resume(id, &hello) {
                    return;
                }
                id
            }
            None => {
                let Some(id) = self.admit_speaker(from, &hello) else { return };
                id
            }
        };
        let now = self.now;
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.theirs = Some(hello.link);
        peer.codec = codec.unwrap_or(Codec::MEETING);
        peer.origin = Some(from);
        peer.suffixed = hello.suffixed;
        peer.last_heard = now;
        peer.given_up = false;
        let (ours, versions, nonce) = (peer.ours, self.config.versions, hello.nonce);
        match refusal {
            None => {
                peer.refused = false;
                let ask = peer.writes_out.ask(now);
                self.send(id, Body::Welcome(Welcome { versions, nonce, link: ours, ask }));
                self.came_up(id);
            }
            Some(cause) => {
                peer.refused = true;
                self.send(id, Body::Refused(Refused { versions, nonce, link: ours, cause }));
            }
        }
    }

    /// True if a known peer is heard of by another connection than its own, while nothing is wrong with
    /// that.
    fn is_impostor(&self, known: PeerId, from: Origin) -> bool {
        let Some(peer) = self.peers.get(known) else { return false };
        let silent = self.now - peer.last_heard >= self.forgetful();
        peer.origin.is_some_and(|origin| origin != from) && !(silent || peer.given_up || peer.lost)
    }

    /// After such a silence a peer may have lost its way, or what it knew of the conversation.
    fn forgetful(&self) -> Duration {
        (self.config.timing.keepalive * 3).min(self.config.timing.peer_timeout / 2)
    }

    /// Takes whoever says hello among the peers, if there is room.
    fn admit_speaker(&mut self, from: Origin, hello: &Hello) -> Option<PeerId> {
        if self.peers.of_origin(from).count() >= self.config.limits.max_incarnations {
            // Names and incarnations are the speaker's choice: the connection pays for them.
            let idle = self.peers.of_origin(from).find(|(_, peer)| peer.is_idle()).map(|(id, _)| id);
            match idle {
                Some(idle) => self.forget_peer(idle),
                None => {
                    self.frames_dropped += 1;
                    return None;
                }
            }
        }
        // Whoever has a cache that is not understood is refused, and the cache is never looked at.
        let geometry = hello.geometry.as_ref().unwrap_or(self.config.args.geometry());
        let introduction = Introduction {
            worker: hello.worker.clone(),
            incarnation: hello.incarnation,
            geometry: geometry.clone(),
            metadata: hello.metadata.clone(),
        };
        let Some(id) = self.admit(introduction) else {
            self.frames_dropped += 1;
            return None;
        };
        if let Some(peer) = self.peers.get_mut(id) {
            peer.origin = Some(from);
        }
        self.output(Output::Connect { peer: id, metadata: hello.metadata.clone() });
        Some(id)
    }

    /// Answers a hello that is meant for a former life of this worker. What this life has with the
    /// peer, or will have, stays as it is: the number in the hello is that of another conversation,
    /// and may be later than the one in which the peer means this life.
    fn refuse_stranger(&mut self, known: Option<PeerId>, from: Origin, hello: Hello) {
        let Some(id) = known.or_else(|| self.admit_speaker(from, &hello)) else { return };
        let (versions, cause) = (self.config.versions, PeerCause::Unknown);
        let refused = Refused { versions, nonce: hello.nonce, link: Link::NONE, cause };
        self.say(id, Codec::MEETING, hello.link, &Body::Refused(refused));
    }

    fn refusal(&self, hello: &Hello) -> Option<PeerCause> {
        if self.stopping {
            return Some(PeerCause::WorkerStopped);
        }
        if Codec::between(self.config.versions, hello.versions).is_none() {
            return Some(PeerCause::Versions { ours: self.config.versions, theirs: hello.versions });
        }
        if hello.plane != self.config.plane {
            return Some(PeerCause::Incompatible(crate::error::Mismatch {
                field: "plane".to_owned(),
                ours: self.config.plane.clone(),
                theirs: hello.plane.clone(),
            }));
        }
        let Some(geometry) = &hello.geometry else {
            return Some(PeerCause::Incompatible(crate::error::Mismatch {
                field: "geometry".to_owned(),
                ours: format!("version {} of the wire", self.config.versions),
                theirs: "something that is newer".to_owned(),
            }));
        };
        self.config.args.geometry().check(geometry).err().map(PeerCause::Incompatible)
    }

    /// Takes a hello from a peer that is known. False if it is a late one of a former conversation.
    fn resume(&mut self, id: PeerId, hello: &Hello) -> bool {
        let Some(peer) = self.peers.get(id) else { return false };
        match peer.theirs {
            Some(theirs) if hello.link.sequence() < theirs.sequence() => false,
            Some(theirs) if hello.link != theirs => {
                // The peer has lost its side of the conversation: a new one begins. Frames of the
                // old one must not reach it. Whatever read from here has failed there.
                self.fail_peer_sessions(id, Cause::PeerRestarted, None);
                self.readers_have_failed(id);
                if self.peers.get(id).is_some_and(|peer| peer.posts > 0) {
                    return false;
                }
                let link = self.draw_link();
                self.peers.renumber(id, link);
                if let Some(peer) = self.peers.get_mut(id) {
                    peer.incoming = Default::default();
                    // What the peer permitted was for the conversation that is over.
                    peer.writes_out = Default::default();
                    self.output(Output::Permit { peer: id, until: Time::ZERO });
                }
                true
            }
            _ => true,
        }
    }

    /// The peer has answered the hello with this nonce, which nobody else knows. False if it has not.
    fn is_answer(&mut self, from: Origin, id: PeerId, nonce: u64) -> bool {
        let now = self.now;
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

    pub(super) fn on_welcome(&mut self, from: Origin, id: PeerId, welcome: Welcome) {
        let Welcome { versions, nonce, link, .. } = welcome;
        let Some(codec) = Codec::between(self.config.versions, versions) else {
            let cause = PeerCause::Versions { ours: versions, theirs: self.config.versions };
            return self.on_refused(from, id, Refused { versions, nonce, link, cause });
        };
        if !self.is_answer(from, id, nonce) {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.codec = codec;
        peer.refuses = None;
        let before = peer.theirs.replace(link);
        let again = before.is_some_and(|before| before != link);
        if again {
            peer.writes_in.heard = 0;
        }
        peer.writes_in.heard = peer.writes_in.heard.max(welcome.ask);
        if again {
            self.peer_forgot_us(id);
        }
        self.came_up(id);
    }

    /// The peer can be spoken to: whoever waited for that goes on.
    fn came_up(&mut self, id: PeerId) {
        self.timers.arm(Timer::Peer(id), self.now + self.config.timing.keepalive);
        let Some(peer) = self.peers.get(id) else { return };
        for session in each(peer.waiting.clone()) {
            self.source_came_up(session);
        }
        self.say_releases(id);
    }

    pub(super) fn on_refused(&mut self, from: Origin, id: PeerId, refused: Refused) {
        if !self.is_answer(from, id, refused.nonce) {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        let mismatch = peer.mismatch.clone();
        let ours = self.config.versions;
        let cause = match (refused.cause, mismatch) {
            (PeerCause::Unknown, _) => {
                // Another incarnation answers. That proves nothing about writes that the one we knew
                // left in flight.
                self.fail_peer_sessions(id, Cause::PeerRestarted, None);
                if self.peers.get(id).is_some_and(Peer::is_idle) {
                    self.forget_peer(id);
                }
                return;
            }
            (PeerCause::Versions { .. }, _) => Cause::Versions { ours, theirs: refused.versions },
            (PeerCause::Incompatible(_), Some(mismatch)) => Cause::Incompatible(mismatch),
            (cause, _) => Cause::ByPeer(cause),
        };
        peer.refuses = Some(cause);
        peer.codec = Codec::between(ours, refused.versions).unwrap_or(Codec::MEETING);
        let before = peer.theirs.replace(refused.link);
        if before.is_some_and(|before| before != refused.link) {
            self.peer_forgot_us(id);
        }
        // Its receivers here fail, and abort their rooms at its senders. Later ones ask the bootstrap
        // server anew: another incarnation may fit.
        self.directory.forget(id);
        self.came_up(id);
    }

    pub(super) fn heard_from(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.last_heard = self.now;
        if std::mem::take(&mut peer.given_up) {
            self.came_up(id);
        }
    }

    /// Someone begins to depend on the peer.
    pub(super) fn watch_peer(&mut self, id: PeerId) {
        if self.timers.is_armed(Timer::Peer(id)) {
            return;
        }
        self.timers.arm(Timer::Peer(id), self.now + self.config.timing.keepalive);
        // Nobody listened to it until now: that it was silent says nothing.
        if let Some(peer) = self.peers.get_mut(id) {
            peer.last_heard = self.now;
        }
    }

    pub(super) fn on_peer_tick(&mut self, id: PeerId) {
        let timing = self.config.timing;
        let Some(peer) = self.peers.get(id) else { return };
        if peer.lost {
            return self.reconnect(id);
        }
        if peer.writes_in.revoking {
            self.end_waiting(id);
        }
        let Some(peer) = self.peers.get(id) else { return };
        if let Some(said) = peer.hello
            && !peer.is_up()
        {
            let silent_for = self.now - said.first_said;
            if silent_for < timing.peer_timeout {
                return self.say_hello(id);
            }
            self.fail_newcomers(id, Cause::PeerUnresponsive { silent_for });
        }
        let Some(peer) = self.peers.get(id) else { return };
        let silent_for = self.now - peer.last_heard;
        self.say_releases(id);
        let Some(peer) = self.peers.get(id) else { return };
        if !peer.is_needed() && peer.incoming.live_len() + peer.incoming.results_len() == 0 {
            // Nothing depends on it: silence, and no timer.
            if peer.theirs.is_none() {
                self.forget_peer(id);
            }
            return;
        }
        if silent_for >= timing.peer_timeout && !peer.given_up {
            let cause = self.loss(id, Cause::PeerUnresponsive { silent_for });
            if let Some(peer) = self.peers.get_mut(id) {
                peer.given_up = true;
            }
            // The next session asks the bootstrap server anew.
            self.directory.forget(id);
            self.fail_peer_sessions(id, cause, None);
        }
        if self.peers.get(id).is_some_and(|peer| peer.given_up) {
            self.fence_off(id);
        }
        self.ask_peer(id, silent_for);
        let Some(peer) = self.peers.get(id) else { return };
        if peer.given_up && !peer.is_needed() {
            // Only bookkeeping on its behalf is left, and it does not answer: wait for its word.
            self.timers.cancel(Timer::Peer(id));
        } else {
            let pause = if peer.given_up { timing.retry_max.max(timing.keepalive) } else { timing.keepalive };
            self.timers.arm(Timer::Peer(id), self.now + pause);
        }
    }

    /// Fails the receivers that wait for a hello to be answered.
    fn fail_newcomers(&mut self, id: PeerId, cause: Cause) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.hello = None;
        if peer.theirs.is_none() {
            peer.releasing.clear();
        }
        for session in each(peer.waiting.clone()) {
            self.fail_receiver(session, cause.clone());
        }
    }

    /// Asks for a sign of life, and about attempts that have been quiet for a while. A peer that
    /// does not react may have forgotten the conversation: then it is greeted again.
    fn ask_peer(&mut self, id: PeerId, silent_for: Duration) {
        let keepalive = self.config.timing.keepalive;
        let Some(peer) = self.peers.get(id) else { return };
        let mut pings = self.quiet_attempts(peer, self.now, keepalive);
        if pings.is_empty() && silent_for >= keepalive {
            pings.push(Vec::new());
        }
        let floor = peer.outgoing_floor();
        for attempts in each(pings) {
            self.send(id, Body::Ping(Ping { floor, attempts }));
        }
        let Some(peer) = self.peers.get(id) else { return };
        if silent_for >= self.forgetful() && peer.is_needed() {
            self.say_hello(id);
        }
    }

    /// Attempts at the peer about which nothing was heard for `quiet`, as runs, of one ping each.
    fn quiet_attempts(&self, peer: &Peer, now: Time, quiet: Duration) -> Vec<Vec<(u64, u32)>> {
        let asks = |&(_, &(session, source)): &(&Attempt, &(SessionId, usize))| {
            self.receivers.get(&session).is_some_and(|receiver| receiver.is_quiet(source, now, quiet))
        };
        let asked: Vec<u64> = each(&peer.outgoing)
            .filter(asks)
            .map(|(attempt, _)| attempt.0)
            .take(MAX_PINGS * MAX_ASKED)
            .collect();
        let runs = |attempts: &[u64]| {
            let mut runs = Vec::new();
            attempts.iter().for_each(|&attempt| run_set::append(&mut runs, attempt));
            runs
        };
        asked.chunks(MAX_ASKED).map(runs).collect()
    }

    pub(super) fn on_ping(&mut self, id: PeerId, ping: Ping) {
        // Each attempt once: what an answer costs was paid for by this worker's own scheduler, or is small.
        if !is_rising(&ping.attempts) {
            self.frames_dropped += 1;
            return;
        }
        self.on_floor(id, ping.floor);
        let runs = ping.attempts.iter();
        let asked = runs.flat_map(|&(start, count)| start..start.saturating_add(u64::from(count)));
        let asked: Vec<Attempt> = asked.take(MAX_ASKED).map(Attempt).collect();
        for attempt in each(asked) {
            self.tell_about(id, attempt);
        }
        if let Some(peer) = self.peers.get(id) {
            let floor = peer.outgoing_floor();
            self.send(id, Body::Pong(Pong { floor }));
        }
    }

    /// Why a peer is lost: a known successor explains it better.
    pub(super) fn loss(&self, id: PeerId, otherwise: Cause) -> Cause {
        match self.peers.get(id) {
            Some(peer) if self.peers.has_successor(&peer.worker, peer.incarnation) => Cause::PeerRestarted,
            _ => otherwise,
        }
    }

    pub(super) fn on_connected(&mut self, id: PeerId, directions: Directions, fence: WriteFence) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.directions = directions;
        peer.writes_in.fence = fence;
        let until = peer.writes_out.until();
        if until > self.now {
            // The way is another one, and the permission the same.
            self.output(Output::Permit { peer: id, until });
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if std::mem::take(&mut peer.lost) {
            // The conversation goes on where it was, if the peer still knows it.
            peer.hello = None;
            self.say_hello(id);
        }
    }

    pub(super) fn on_connect_failed(&mut self, id: PeerId, error: PlaneError) {
        // A way that was lost is tried again, and what is known of the peer proves nothing.
        if self.peers.get(id).is_some_and(|peer| !peer.lost) {
            self.fail_peer_sessions(id, Cause::Connect(error), Some(self.now));
            self.forget_peer(id);
        }
    }

    pub(super) fn on_peer_gone(&mut self, id: PeerId, end: WayEnd) {
        if self.peers.get(id).is_none() {
            return;
        }
        match end {
            WayEnd::Dead { quiet_after } => {
                let cause = self.loss(id, Cause::PeerLost);
                self.fail_peer_sessions(id, cause, Some(self.now + quiet_after));
                self.forget_peer(id);
            }
            WayEnd::Lost => self.on_way_lost(id),
        }
    }

    /// This side's way to the peer is lost: the peer may live, and go on writing through its own. Pages that
    /// it may write wait for its word, over a new way, or for what the transport knows of its writes.
    fn on_way_lost(&mut self, id: PeerId) {
        let cause = self.loss(id, Cause::WayLost);
        let served = self.served(id);
        self.fail_peer_sessions(id, cause.clone(), None);
        for named in served {
            // Its receiver cannot be told now. It will greet anew, and register again.
            self.remember_failed_sender(named, &cause.for_peer(), Latecomers::Left(1));
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !(peer.greeted && peer.is_needed()) {
            return self.forget_peer(id);
        }
        peer.lost = true;
        peer.origin = None;
        // The next session asks the bootstrap server anew.
        self.directory.forget(id);
        self.fence_off(id);
        let pause = self.backoff(self.config.timing.retry_first, 1);
        self.timers.arm(Timer::Peer(id), self.now + pause);
    }

    /// The rooms in which this worker serves the peer, or lets it read.
    fn served(&self, id: PeerId) -> Vec<Named> {
        let Some(peer) = self.peers.get(id) else { return Vec::new() };
        let sessions = each(peer.incoming.live()).filter_map(|incoming| match incoming {
            Incoming::Active(session, _) | Incoming::Reading { session, .. } => Some(session),
            _ => None,
        });
        let senders = sessions.filter_map(|session| self.senders.get(session));
        senders.filter(|sender| !sender.poll.is_terminal()).map(|sender| sender.named.clone()).collect()
    }

    /// Opens a lost way anew, again and again for as long as pages wait for the peer's word.
    fn reconnect(&mut self, id: PeerId) {
        self.end_waiting(id);
        let Some(peer) = self.peers.get(id) else { return };
        if !peer.is_needed() {
            return self.forget_peer(id);
        }
        // A right to write is taken from the connection that is lost: it must stay known.
        if !peer.writes_in.revoking {
            let metadata = peer.metadata.clone();
            self.output(Output::Disconnect { peer: id });
            self.output(Output::Connect { peer: id, metadata });
        }
        let pause = self.backoff(self.config.timing.retry_max, 1);
        self.timers.arm(Timer::Peer(id), self.now + pause);
    }

    /// Sessions that have waited for a lost way, or for a revocation, as long as for a peer that is silent
    /// wait no more.
    fn end_waiting(&mut self, id: PeerId) {
        let (now, patience) = (self.now, self.config.timing.peer_timeout);
        let Some(peer) = self.peers.get(id) else { return };
        let waited = |session: &&SessionId| {
            self.receivers.get(session).is_some_and(|receiver| now - receiver.opened >= patience)
        };
        let ended: Vec<SessionId> = each(&peer.waiting).filter(waited).copied().collect();
        let cause = self.silence(id);
        for session in ended {
            self.fail_receiver(session, cause.clone());
        }
    }

    /// How long nothing was heard from the peer, as a cause.
    pub(super) fn silence(&self, id: PeerId) -> Cause {
        match self.peers.get(id) {
            Some(peer) if !peer.lost => Cause::PeerUnresponsive { silent_for: self.now - peer.last_heard },
            _ => Cause::WayLost,
        }
    }

    /// The peer has failed all its sessions that read from here: their leases are worth nothing.
    fn readers_have_failed(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        let readers = each(peer.incoming.live()).filter_map(|incoming| match incoming {
            &Incoming::Reading { session, target, .. } => Some((session, target)),
            _ => None,
        });
        let readers: Vec<(SessionId, usize)> = readers.collect();
        for (session, target) in each(readers) {
            self.reader_has_failed(session, target);
        }
    }

    /// Fails every session that depends on the peer. `quiet_at` tells from when on it is proven that
    /// the peer writes no more; `None` if that is not proven.
    pub(super) fn fail_peer_sessions(&mut self, id: PeerId, cause: Cause, quiet_at: Option<Time>) {
        let Some(peer) = self.peers.get(id) else { return };
        let attempts = each(peer.outgoing.values()).map(|&(session, _)| session);
        let receivers: Vec<SessionId> = attempts.chain(peer.waiting.iter().copied()).collect();
        let mut senders = Vec::new();
        let mut waiting = Vec::new();
        for (attempt, incoming) in each(peer.incoming.iter_live()) {
            match incoming {
                Incoming::Reading { session, .. } => senders.push(*session),
                Incoming::Waiting(_) => waiting.push(attempt),
                Incoming::Active(session, _) => senders.push(*session),
                Incoming::Served { .. } | Incoming::Failed { .. } => {}
            }
        }
        for attempt in each(waiting) {
            self.drop_registration(id, attempt, cause.for_peer());
        }
        for session in each(senders) {
            self.fail_sender(session, cause.clone());
        }
        for session in each(receivers) {
            self.fail_receiver(session, cause.clone());
            if let Some(quiet_at) = quiet_at {
                self.source_is_quiet_at(session, id, quiet_at);
            }
        }
    }
}
