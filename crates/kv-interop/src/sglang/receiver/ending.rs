//! How receiving sessions end: in success, by a word of the prefill engine, by this worker's own will, or with
//! the way to a rank.

use kv_core::{
    Cause, Obstacle, PeerCause, PeerId, QuarantineReason, RequestCacheGroups, SessionId, Time, WayEnd,
    WorkerId,
};

use super::engine::Place;
use super::session::{Source, Writes};
use super::{Failure, Receiving};
use crate::effects::Effects;
use crate::sglang::codec::{Abort, AbortAck, FAILED, KvStatus, SUCCESS};

impl Receiving {
    /// Takes a rank's word on a room. False if the word is for no session that waits for it.
    pub(in crate::sglang) fn told(&mut self, effects: &mut Effects, now: Time, status: KvStatus) -> bool {
        let Some(&session) = self.rooms.get(&status.room) else { return false };
        let Some(open) = self.sessions.live(session) else { return false };
        let Some(source) = open.dialect.writer(status.rank) else { return false };
        match status.status {
            SUCCESS => {
                (source.done, source.writes) = (true, Writes::No);
                if open.dialect.is_complete() {
                    self.complete(effects, now, session);
                }
            }
            FAILED => {
                let name = if status.reason.is_empty() { "failed".to_owned() } else { status.reason };
                let failure = (Some(source.serving.worker.clone()), Cause::ByPeer(PeerCause::Other { name }));
                self.fail(effects, now, session, failure);
            }
            _ => return false,
        }
        true
    }

    /// All bytes are in place. The aux row must say that they are those of this request.
    fn complete(&mut self, effects: &mut Effects, now: Time, session: SessionId) {
        let Some(open) = self.sessions.live(session) else { return };
        let row = open.dialect.given.as_ref().map(|given| given.aux);
        let (room, peer) = (open.dialect.room, open.dialect.sources.first());
        let peer = peer.map(|source| source.serving.worker.clone());
        let found = self.aux_rooms.as_ref().zip(row).map(|(rooms, row)| rooms.room_in(row));
        if found.is_some_and(|found| found != room) {
            let cause = Cause::Protocol("bootstrap_room in the aux row is not the room of the request");
            return self.fail(effects, now, session, (peer, cause));
        }
        let parts = self.parts(session);
        self.sessions.succeed(effects, session);
        self.let_go(session, parts);
    }

    /// Ends a session with an error. Prefill ranks are told to stop; what they may still write is in quarantine.
    pub(super) fn fail(&mut self, effects: &mut Effects, now: Time, session: SessionId, failure: Failure) {
        let phase = self.phase(session);
        if self.sessions.live(session).is_none() {
            return;
        }
        self.ask_to_stop(effects, session);
        let Some(open) = self.sessions.live(session) else { return };
        let held = open.dialect.held(now);
        let (peer, cause) = failure;
        let parts = self.parts(session);
        self.sessions.fail(effects, session, (peer, phase, cause), held);
        if self.sessions.any(session).is_some() {
            self.repeats.insert((now + self.timing.abort_repeat, session));
        }
        self.let_go(session, parts);
    }

    /// Tells every rank that the request is given up. Ranks that were told pages answer when they write no more.
    fn ask_to_stop(&mut self, effects: &mut Effects, session: SessionId) {
        let Some(open) = self.sessions.live(session) else { return };
        if open.dialect.sources.iter().any(|source| source.told) {
            self.generation += 1;
            open.dialect.generation = Some(self.generation);
        }
        // A success that was of no use may have been that of a former request of the room.
        for source in open.dialect.sources.iter_mut().filter(|source| source.done) {
            (source.done, source.writes) = (false, Writes::Yes(QuarantineReason::Unacknowledged));
        }
        self.say_stop(effects, session);
    }

    /// Says the abort again if a rank that this worker can reach has not acknowledged the abort.
    pub(super) fn repeat_abort(&mut self, effects: &mut Effects, now: Time, session: SessionId) {
        let waits = |source: &Source| matches!(source.writes, Writes::Yes(_));
        let Some(ended) = self.sessions.any(session).filter(|session| session.has_ended()) else { return };
        if ended.dialect.generation.is_some() && ended.dialect.sources.iter().any(waits) {
            self.say_stop(effects, session);
            self.repeats.insert((now + self.timing.abort_repeat, session));
        }
    }

    fn say_stop(&mut self, effects: &mut Effects, session: SessionId) {
        let reply_to = Some((self.registration.ip.clone(), self.registration.port));
        let Some(open) = self.sessions.any(session) else { return };
        let abort = Abort { room: open.dialect.room, reply_to, generation: open.dialect.generation };
        for source in &open.dialect.sources {
            self.prefills.say(effects, &source.serving.place, abort.encode());
        }
    }

    /// The way to a rank is open again. Whatever process is there now knows what its port's owner has begun: the
    /// answer frees the pages.
    pub(super) fn ask_again_to_stop(&mut self, effects: &mut Effects, now: Time, session: SessionId) {
        if let Some(open) = self.sessions.any(session) {
            for source in &mut open.dialect.sources {
                let up = self.prefills.is_up(&source.serving.place);
                if up && source.writes == Writes::Yes(QuarantineReason::WayLost) {
                    source.writes = Writes::Yes(QuarantineReason::Unacknowledged);
                }
            }
        }
        self.say_stop(effects, session);
        self.settle(effects, now, session);
    }

    /// Takes the word of a rank that it writes nothing more of a room. False if nobody waits for the word.
    pub(in crate::sglang) fn stopped(&mut self, effects: &mut Effects, now: Time, ack: &AbortAck) -> bool {
        let Some(&session) = self.rooms.get(&ack.room) else { return false };
        let Some(ended) = self.sessions.any(session).filter(|session| session.has_ended()) else {
            return false;
        };
        if ended.dialect.generation.is_none() || ended.dialect.generation != ack.generation {
            return false;
        }
        let Some(source) = ended.dialect.writer(ack.rank) else { return false };
        source.writes = Writes::No;
        self.settle(effects, now, session);
        true
    }

    /// SGLang's state components are no cache groups of ours: such items end the session.
    pub(in crate::sglang) fn refuse_groups(
        &mut self,
        effects: &mut Effects,
        now: Time,
        (session, groups): (SessionId, RequestCacheGroups),
    ) {
        let group = groups.iter().next().map_or(0, |items| items.group);
        self.sessions.lend(effects, session, groups.into());
        self.fail(effects, now, session, (None, Cause::UnknownGroup { group }));
    }

    pub(in crate::sglang) fn abort(&mut self, effects: &mut Effects, now: Time, session: SessionId) {
        self.fail(effects, now, session, (None, Cause::Aborted));
    }

    pub(super) fn deadline(&mut self, effects: &mut Effects, now: Time, session: SessionId) {
        let Some(open) = self.sessions.live(session) else { return };
        let after = open.patience;
        let looking = open.dialect.sources.is_empty();
        let last = if looking { self.finder.last_error(&open.dialect.addr) } else { None };
        let cause = Cause::DeadlineExceeded { after, last: last.map(Obstacle::Bootstrap) };
        self.fail(effects, now, session, (None, cause));
    }

    /// The way to a rank has ended. True if the peer is a prefill rank.
    pub(in crate::sglang) fn gone(
        &mut self,
        effects: &mut Effects,
        now: Time,
        (peer, end): (PeerId, WayEnd),
    ) -> bool {
        // A process that is dead is not looked for again.
        let retry_at = if end == WayEnd::Lost { now + self.timing.reconnect } else { Time::MAX };
        let Some(gone) = self.prefills.gone(retry_at, peer) else { return false };
        effects.disconnect(peer);
        self.finder.forget(&gone.addr);
        for session in gone.sessions {
            let Some(open) = self.sessions.any(session) else { continue };
            for source in &mut open.dialect.sources {
                if source.serving.place == gone.place {
                    source.ended(now, end);
                }
            }
            let worker = self.worker_at(session, &gone.place);
            let cause = if end == WayEnd::Lost { Cause::WayLost } else { Cause::PeerLost };
            if self.sessions.live(session).is_some() {
                self.fail(effects, now, session, (worker, cause));
            } else {
                self.settle(effects, now, session);
            }
        }
        true
    }

    pub(super) fn worker_at(&mut self, session: SessionId, place: &Place) -> Option<WorkerId> {
        let sources = &self.sessions.any(session)?.dialect.sources;
        let source = sources.iter().find(|source| source.serving.place == *place)?;
        Some(source.serving.worker.clone())
    }

    /// Brings the quarantine of an ended session up to date, and frees what nobody can write any more.
    fn settle(&mut self, effects: &mut Effects, now: Time, session: SessionId) {
        let Some(ended) = self.sessions.any(session).filter(|session| session.has_ended()) else { return };
        match ended.dialect.held(now) {
            Some(held) => self.sessions.hold(session, held),
            None => self.free(effects, session),
        }
    }

    /// Hands back the pages of a session that has ended.
    pub(super) fn free(&mut self, effects: &mut Effects, session: SessionId) {
        let parts = self.parts(session);
        self.sessions.free(effects, session);
        self.let_go(session, parts);
    }

    /// What a session has joined: its ranks, the address of its lookup, and its room.
    fn parts(&mut self, session: SessionId) -> Option<(Vec<Place>, String, u64)> {
        let receive = &self.sessions.any(session)?.dialect;
        let places = receive.sources.iter().map(|source| source.serving.place.clone());
        Some((places.collect(), receive.addr.clone(), receive.room))
    }

    /// Leaves everything that an ended session has joined, unless its pages are still held.
    fn let_go(&mut self, session: SessionId, parts: Option<(Vec<Place>, String, u64)>) {
        let Some((places, addr, room)) = parts else { return };
        self.finder.leave(&addr, session);
        if self.sessions.any(session).is_some() {
            return;
        }
        for place in &places {
            self.prefills.leave(place, session);
        }
        if self.rooms.get(&room) == Some(&session) {
            self.rooms.remove(&room);
        }
    }
}
