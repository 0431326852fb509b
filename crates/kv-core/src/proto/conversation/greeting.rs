//! How two workers meet: hello, welcome and refusal.
//!
//! ```text
//! receiver's worker                                  sender's worker
//!   Hello{to, conversation, nonce} ──────────────▶   checks incarnation, versions, transport, geometry
//!   repeated with backoff                            draws a conversation id of its own
//!                                  ◀──────────────   Welcome{nonce, conversation, ask} | Refused{nonce, conversation, cause}
//! ```

use std::time::Duration;

use super::contact::{Event, HelloSaid};
use super::heard::{AnswerHeard, HelloHeard, Unanswered};
use super::numbers::Numbers;
use super::{Introduction, Maps, Peer};
use crate::error::peer::cut;
use crate::error::{Cause, Mismatch, PeerCause};
use crate::id::PeerId;
use crate::layout::MAX_REGIONS;
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::io::Output;
use crate::proto::timer::Timer;
use crate::record::{MAX_NAME, TransportOffer};
use crate::time::Time;
use crate::trace::{Dropped, KvWhat};
use crate::transport::Origin;
use crate::wire::{Body, Codec, ConversationId, Hello, Refused, Welcome};

/// Most bytes of a transport's metadata, to which `METADATA_OF_REGION` is added for each region.
const MAX_METADATA: usize = 64 << 10;
const METADATA_OF_REGION: usize = 64;

impl Context {
    /// The peer with this incarnation. A worker that is not known yet is greeted. `None` if there
    /// are too many peers, and all of them are busy.
    pub(in crate::proto) fn meet(&mut self, mut introduction: Introduction) -> Option<PeerId> {
        let ways: Vec<TransportOffer> = introduction.transports.iter().cloned().collect();
        self.order_ways(introduction.incarnation, &mut introduction.transports);
        let chosen = introduction.transports.front()?;
        let again = self.way_to_try_again(&introduction, &ways, chosen);
        let id = match self.peers.known(introduction.incarnation, chosen) {
            Some(known) => {
                introduction.transports.pop_front();
                self.peers.reach_also_by(known, introduction.transports);
                self.want_again(known)
            }
            None => self.greet_first(introduction)?,
        };
        if let Some(peer) = self.peers.get_mut(id) {
            peer.ways = ways;
        }
        if let Some(again) = again {
            self.try_again(again);
        }
        Some(id)
    }

    /// A session looks for a peer that is known, or a failed way to the peer is tried again. An old hello for which no
    /// session waited is replaced, so that its age does not count as silence.
    pub(in crate::proto) fn want_again(&mut self, id: PeerId) -> PeerId {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.contact.turn(Event::Wanted);
            if peer.is_lost() && !peer.has_met() && peer.outgoing.says_again() {
                // The peer was known only to be told again of failures.
                peer.contact.turn(Event::WayOpened);
                self.open_way(id);
                self.say_hello(id);
                return id;
            }
            let waited_for = peer.contact.hello().is_some() && !peer.outgoing.waiting().is_empty();
            if !(peer.is_up() || peer.is_lost() || waited_for) {
                peer.contact.turn(Event::HelloOver);
                self.say_hello(id);
            }
        }
        id
    }

    /// Greets a worker by a transport that has failed. No session waits for the answer. If the worker has come by that
    /// transport itself, the greeting belongs to the conversation that the worker has begun.
    fn try_again(&mut self, introduction: Introduction) {
        let Some(way) = introduction.transports.front() else { return };
        if let Some(known) = self.peers.known(introduction.incarnation, way) {
            self.want_again(known);
        } else if self.peers.len() < self.config.limits.max_peers {
            // The chosen way may have taken the last place meanwhile.
            self.greet_first(introduction);
        }
    }

    /// Adds a peer, and greets it by the first of its transports.
    fn greet_first(&mut self, introduction: Introduction) -> Option<PeerId> {
        let id = self.admit(introduction)?;
        self.peers.get_mut(id)?.contact.turn(Event::Wanted);
        self.open_way(id);
        self.say_hello(id);
        Some(id)
    }

    /// Ends the conversation with a peer. Aborts of attempts of which the peer has not spoken are said again in a new
    /// conversation, if there is room for a peer.
    pub(in crate::proto) fn end_conversation(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let unanswered = peer.outgoing.take_unanswered();
        let introduction = Introduction {
            worker: peer.worker.clone(),
            incarnation: peer.incarnation,
            geometry: (!peer.maps.is_unknown()).then(|| peer.maps.geometry().clone()),
            transports: [peer.transport.clone()].into(),
        };
        let ways = peer.ways.clone();
        self.forget_peer(id);
        if unanswered.is_empty() {
            return;
        }
        let Some(again) = self.admit(introduction) else { return };
        let Some(peer) = self.peers.get_mut(again) else { return };
        peer.ways = ways;
        for (abort, failed_at) in each(unanswered) {
            peer.outgoing.abort_again(abort, failed_at);
        }
        self.greet_later(again, self.config.timing.retry_first);
    }

    /// A peer that is to be told again of failures begins with a lost way, which the timer opens, and tries to open again
    /// if that fails.
    pub(in crate::proto) fn greet_later(&mut self, id: PeerId, pause: Duration) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.contact.turn(Event::Wanted);
        peer.contact.turn(Event::HelloOver);
        peer.contact.turn(Event::WayLost);
        let pause = self.fx.backoff(pause, 1);
        self.fx.arm(Timer::Peer(id), self.fx.now() + pause);
    }

    /// Makes room for one more peer, and adds it.
    fn admit(&mut self, mut introduction: Introduction) -> Option<PeerId> {
        let transport = introduction.transports.pop_front()?;
        if self.peers.len() >= self.config.limits.max_peers {
            let idle = self.peers.oldest_idle()?;
            self.forget_peer(idle);
        }
        let conversation = self.peers.draw_conversation(&mut self.fx);
        let here = self.config.args.geometry();
        let id = self.peers.insert(Peer::new(introduction, transport, here, conversation, self.fx.now()));
        if let Some(met) = self.peers.get(id) {
            let (worker, incarnation) = (&met.worker, met.incarnation);
            self.fx.tell(id, || KvWhat::PeerMet { worker: worker.clone(), incarnation });
        }
        Some(id)
    }

    /// Adds the sender of a hello to the peers, if there is room.
    fn admit_speaker(&mut self, from: Origin, hello: &Hello) -> Option<PeerId> {
        if self.peers.of_origin(from).count() >= self.config.limits.max_incarnations {
            // The sender chooses names and incarnations: its connection has to make room for them.
            let idle = self.peers.of_origin(from).find(|(_, peer)| peer.is_idle()).map(|(id, _)| id);
            match idle {
                Some(idle) => self.forget_peer(idle),
                None => {
                    self.fx.drop_frame(None, Dropped::NoRoom);
                    return None;
                }
            }
        }
        let introduction = Introduction {
            worker: hello.worker.clone(),
            incarnation: hello.incarnation,
            geometry: hello.geometry.as_deref().cloned(),
            transports: [transport_of(hello)].into(),
        };
        let Some(id) = self.admit(introduction) else {
            self.fx.drop_frame(None, Dropped::NoRoom);
            return None;
        };
        if let Some(peer) = self.peers.get_mut(id) {
            peer.origin = Some(from);
        }
        self.open_way(id);
        Some(id)
    }

    /// Sends a hello to a peer, for the first time or again.
    pub(in crate::proto) fn say_hello(&mut self, id: PeerId) {
        let now = self.fx.now();
        let nonce = self.fx.draw();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let HelloSaid { nonce, times, .. } = peer.contact.greet(nonce, now);
        let (to, conversation) = (peer.incarnation, peer.ours);
        let (args, ways) = (&self.config.args, &self.config.transports);
        let way = each(ways).find(|way| way.name == peer.transport.name).or(ways.first());
        let Some(way) = way.cloned() else { return };
        let hello = Hello {
            versions: self.config.versions.get(),
            metadata: way.metadata,
            transport: way.name,
            to,
            incarnation: self.config.incarnation,
            conversation,
            nonce,
            worker: args.worker().clone(),
            geometry: Some(Box::new(args.geometry().clone())),
            suffixed: args.suffixes_requests(),
            service: self.config.service.name.clone(),
        };
        self.say(id, Codec::MEETING, ConversationId::NONE, &Body::Hello(hello));
        let pause = self.fx.backoff(self.config.timing.retry_first, times);
        self.fx.arm(Timer::Peer(id), now + pause);
    }

    /// Greets a peer anew that may have forgotten the conversation.
    pub(super) fn greet_again(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.contact.turn(Event::HelloOver);
            self.say_hello(id);
        }
    }

    pub(in crate::proto) fn unanswered_hello(&self, id: PeerId) -> Option<Unanswered> {
        let peer = self.peers.get(id)?;
        let said = peer.contact.hello().filter(|_| !peer.is_up())?;
        let silent_for = self.fx.now() - said.first_said;
        let others = !peer.others.is_empty() && peer.contact.conversation().is_none();
        Some(if others && silent_for >= self.forgetful() {
            Unanswered::NextWay
        } else if silent_for < self.config.timing.peer_timeout {
            Unanswered::Repeat
        } else {
            Unanswered::GiveUp { silent_for }
        })
    }

    /// Stops repeating the hello. Returns the sessions that waited for the answer.
    pub(in crate::proto) fn stop_greeting(&mut self, id: PeerId) -> Vec<crate::id::SessionId> {
        let Some(peer) = self.peers.get_mut(id) else { return Vec::new() };
        peer.contact.turn(Event::HelloOver);
        if peer.contact.conversation().is_none() {
            peer.outgoing.forget_ended();
        }
        peer.outgoing.waiting().iter().copied().collect()
    }

    // ---- hellos of peers ------------------------------------------------------------------------

    /// Handles a hello, up to the point at which sessions may have to end.
    pub(in crate::proto) fn hear_hello(&mut self, from: Origin, hello: &mut Hello) -> HelloHeard {
        if Codec::between(self.config.versions.get(), hello.versions).is_none() {
            // Nobody here knows what another version means by this geometry.
            hello.geometry = None;
        }
        let transport = transport_of(hello);
        let known = self.peers.known(hello.incarnation, &transport);
        let regions = hello.geometry.as_ref().map_or(MAX_REGIONS, |geometry| geometry.regions.len());
        if hello.geometry.as_ref().is_some_and(|geometry| geometry.validate().is_err())
            || hello.incarnation == self.config.incarnation
            || hello.metadata.len() > MAX_METADATA + METADATA_OF_REGION * regions
            || hello.transport.len() > MAX_NAME
            || hello.service.len() > MAX_NAME
            || known.is_some_and(|known| self.is_impostor(known, from))
        {
            self.fx.drop_frame(known, Dropped::BadHello);
            return HelloHeard::Nothing;
        }
        // Posts of a former conversation must have ended before a new one begins, because the
        // welcome tells the peer that its old pages are quiet. The peer will ask again.
        if self.peers.has_lingering_posts(hello.incarnation, &transport) {
            return HelloHeard::Nothing;
        }
        if hello.to != self.config.incarnation {
            self.refuse_stranger(known, from, hello);
            return HelloHeard::Nothing;
        }
        let Some(id) = known else {
            return self.admit_speaker(from, hello).map_or(HelloHeard::Nothing, HelloHeard::Goes);
        };
        match self.peers.get(id).and_then(|peer| peer.contact.conversation()) {
            // A late hello of a former conversation.
            Some(theirs) if hello.conversation.sequence() < theirs.sequence() => HelloHeard::Nothing,
            Some(theirs) if hello.conversation != theirs => HelloHeard::Forgotten(id),
            _ => HelloHeard::Goes(id),
        }
    }

    /// True if a frame in a known peer's name comes on another connection while the peer's own
    /// connection works.
    fn is_impostor(&self, known: PeerId, from: Origin) -> bool {
        let Some(peer) = self.peers.get(known) else { return false };
        let silent = self.fx.now() - peer.last_heard >= self.forgetful();
        peer.origin.is_some_and(|origin| origin != from) && !(silent || peer.is_out_of_touch())
    }

    /// Answers a hello that is meant for another incarnation of this worker. The conversation of
    /// this incarnation with the peer stays as it is: the id in the hello is for another
    /// conversation, and may be later than the id by which the peer addresses this incarnation.
    fn refuse_stranger(&mut self, known: Option<PeerId>, from: Origin, hello: &Hello) {
        let Some(id) = known.or_else(|| self.admit_speaker(from, hello)) else { return };
        let (versions, cause) = (self.config.versions.get(), PeerCause::Unknown);
        let refused = Refused { versions, nonce: hello.nonce, conversation: ConversationId::NONE, cause };
        self.say(id, Codec::MEETING, hello.conversation, &Body::Refused(refused));
    }

    /// Begins a new conversation with a peer that has lost its side of the old one, after the
    /// sessions here have ended. Frames of the old conversation must not reach the new one. False
    /// while a post of the old conversation is in flight.
    pub(in crate::proto) fn begin_anew(&mut self, id: PeerId) -> bool {
        if self.peers.get(id).is_some_and(|peer| peer.posts > 0) {
            return false;
        }
        let conversation = self.peers.draw_conversation(&mut self.fx);
        self.peers.renumber(id, conversation);
        if let Some(peer) = self.peers.get_mut(id) {
            peer.incoming = Default::default();
            self.drop_permission(id);
        }
        true
    }

    /// The peer's permission was for a conversation that is over.
    fn drop_permission(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.writes_out = Default::default();
        self.fx.output(Output::Permit { peer: id, until: Time::ZERO });
    }

    /// The peer has forgotten the conversation, and goes on under the same number of this side: nothing that it
    /// has permitted counts, and no answer to a question of before.
    pub(in crate::proto) fn ask_anew(&mut self, id: PeerId) {
        self.drop_permission(id);
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.numbers = Numbers::above(peer.numbers.last());
        self.fx.cancel(Timer::Permission(id));
    }

    /// Answers a hello. True if messages can be sent to the peer from now on.
    pub(in crate::proto) fn answer_hello(&mut self, id: PeerId, from: Origin, hello: &Hello) -> bool {
        let refusal = self.refusal(hello);
        let (now, versions, nonce) = (self.fx.now(), self.config.versions.get(), hello.nonce);
        let Some(peer) = self.peers.get_mut(id) else { return false };
        if peer.maps.is_unknown() {
            peer.maps = Maps::new(hello.geometry.as_deref().cloned(), self.config.args.geometry());
        }
        peer.contact
            .turn(Event::HelloAnswered { conversation: hello.conversation, refused: refusal.is_some() });
        peer.codec = Codec::between(versions, hello.versions).unwrap_or(Codec::MEETING);
        peer.origin = Some(from);
        peer.suffixed = hello.suffixed;
        peer.last_heard = now;
        let conversation = peer.ours;
        let body = match refusal {
            None => Body::Welcome(Welcome { versions, nonce, conversation, ask: peer.number(now) }),
            Some(cause) => Body::Refused(Refused { versions, nonce, conversation, cause }),
        };
        let welcome = matches!(body, Body::Welcome(_));
        self.send(id, body);
        welcome
    }

    fn refusal(&self, hello: &Hello) -> Option<PeerCause> {
        if self.is_stopping() {
            return Some(PeerCause::WorkerStopped);
        }
        let (ours, theirs) = (self.config.versions.get(), hello.versions);
        if Codec::between(ours, theirs).is_none() {
            return Some(PeerCause::Versions { ours, theirs });
        }
        let service = &self.config.service.name;
        if hello.service != *service {
            let (ours, theirs) = (service.clone(), cut(hello.service.clone()));
            return Some(PeerCause::Incompatible(Mismatch { field: "service".to_owned(), ours, theirs }));
        }
        let ways = &self.config.transports;
        if each(ways).all(|way| way.name != hello.transport) {
            let names: Vec<&str> = each(ways).map(|way| way.name.as_str()).collect();
            return Some(PeerCause::Incompatible(Mismatch {
                field: "transport".to_owned(),
                ours: names.join(", "),
                theirs: hello.transport.clone(),
            }));
        }
        let Some(geometry) = &hello.geometry else {
            return Some(PeerCause::Incompatible(Mismatch {
                field: "geometry".to_owned(),
                ours: format!("version {ours} of the wire"),
                theirs: "something that is newer".to_owned(),
            }));
        };
        self.config.args.geometry().check(geometry).err().map(PeerCause::Incompatible)
    }

    // ---- answers to hellos of ours --------------------------------------------------------------

    /// Ends the hello with this nonce, because somebody has answered it: only a process that has read the hello knows the
    /// nonce. `None` if no such hello is under way.
    fn end_hello(&mut self, id: PeerId, nonce: u64) -> Option<&mut Peer> {
        let peer = self.peers.get_mut(id)?;
        if peer.contact.hello().is_none_or(|said| said.nonce != nonce) {
            return None;
        }
        peer.contact.turn(Event::HelloOver);
        Some(peer)
    }

    /// Ends the hello with this nonce, and notes that the peer was heard, on the connection of the answer. Not for
    /// `PeerCause::Unknown`, with which another incarnation answers.
    fn answered(&mut self, from: Origin, id: PeerId, nonce: u64) -> Option<&mut Peer> {
        let now = self.fx.now();
        let peer = self.end_hello(id, nonce)?;
        peer.contact.turn(Event::Heard);
        peer.origin = Some(from);
        (peer.last_heard, peer.losses_unanswered) = (now, 0);
        Some(peer)
    }

    pub(in crate::proto) fn hear_welcome(
        &mut self,
        from: Origin,
        id: PeerId,
        welcome: &Welcome,
    ) -> AnswerHeard {
        let &Welcome { versions, nonce, conversation, .. } = welcome;
        let Some(codec) = Codec::between(self.config.versions.get(), versions) else {
            let cause = PeerCause::Versions { ours: versions, theirs: self.config.versions.get() };
            return self.hear_refused(from, id, Refused { versions, nonce, conversation, cause });
        };
        let Some(peer) = self.answered(from, id, nonce) else { return AnswerHeard::Nothing };
        peer.codec = codec;
        let forgot = peer.contact.conversation().is_some_and(|before| before != conversation);
        peer.contact.turn(Event::Welcomed { conversation });
        peer.writes_in.hear(welcome.ask, forgot);
        self.note_answer(id);
        AnswerHeard::Up { forgot, refuses: false }
    }

    pub(in crate::proto) fn hear_refused(
        &mut self,
        from: Origin,
        id: PeerId,
        refused: Refused,
    ) -> AnswerHeard {
        let ours = self.config.versions.get();
        if refused.cause == PeerCause::Unknown {
            // Another incarnation says this. The peer is not heard by that: the peer may be gone, or may speak on a connection
            // of its own.
            let is_ours = self.end_hello(id, refused.nonce).is_some();
            return if is_ours { AnswerHeard::AnotherLife } else { AnswerHeard::Nothing };
        }
        let Some(peer) = self.answered(from, id, refused.nonce) else { return AnswerHeard::Nothing };
        let cause = match (refused.cause, peer.maps.mismatch()) {
            (PeerCause::Versions { .. }, _) => Cause::Versions { ours, theirs: refused.versions },
            (PeerCause::Incompatible(_), Some(mismatch)) => Cause::Incompatible(mismatch.clone()),
            (cause, _) => Cause::ByPeer(cause),
        };
        let (conversation, before) = (refused.conversation, peer.contact.conversation());
        peer.contact.turn(Event::Refused { conversation, cause });
        peer.codec = Codec::between(ours, refused.versions).unwrap_or(Codec::MEETING);
        self.note_answer(id);
        AnswerHeard::Up { forgot: before.is_some_and(|before| before != conversation), refuses: true }
    }
}

/// The transport by which the sender of the hello can be reached.
fn transport_of(hello: &Hello) -> TransportOffer {
    TransportOffer::new(&hello.transport, hello.metadata.clone())
}
