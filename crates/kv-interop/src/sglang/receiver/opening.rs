//! From the opening of a receiving session until every prefill rank is told the session's pages.

use kv_core::proto::Resource;
use kv_core::{
    AuxIndex, BootstrapError, Cause, KvPoll, LookupId, Pages, PeerId, RankRecord, Replica, Room, SessionId,
    SessionOptions, Time, TransportError,
};

use super::engine::serving;
use super::session::{Given, Receive, Source, Writes};
use super::{Receiving, room_taken};
use crate::effects::Effects;
use crate::sglang::codec::Request;
use kv_core::QuarantineReason;

/// Why a row is refused with which a success would prove nothing.
const STALE_ROW: &str =
    "the aux row holds the room of the request before it was told to a rank: clear the row";

impl Receiving {
    pub(in crate::sglang) fn open(
        &mut self,
        effects: &mut Effects,
        now: Time,
        (session, room, addr): (SessionId, Room, String),
        options: &SessionOptions,
    ) {
        let patience = options.deadline.unwrap_or(self.timing.session_deadline);
        let number = if let Room::Number(number) = room { number } else { 0 };
        let receive = Receive {
            room: number,
            addr,
            replica: options.prefill_dp_rank.map_or(Replica::Modulo(number), Replica::Rank),
            prefix: options.prefix_pages,
            given: None,
            sources: Vec::new(),
            required: 1,
            generation: None,
        };
        self.sessions.open(session, room.clone(), now, patience, receive);
        let taken = self.rooms.get(&number).copied();
        let refusal = if self.closed.is_some() {
            self.closed.clone()
        } else if number == 0 {
            Some(Cause::Protocol("SGLang's rooms are numbers above 0"))
        } else {
            let held = taken.and_then(|other| self.sessions.any(other)).map(|other| {
                let reason = other.held().map(|held| held.reason);
                room_taken(reason, &room)
            });
            if held.is_none() {
                self.rooms.insert(number, session);
            }
            held
        };
        match refusal {
            Some(cause) => self.fail(effects, now, session, (None, cause)),
            None => self.find(effects, now, session),
        }
    }

    /// Looks for the ranks that serve a session.
    fn find(&mut self, effects: &mut Effects, now: Time, session: SessionId) {
        let Some(receive) = self.sessions.live(session).map(|session| &session.dialect) else { return };
        let (addr, replica) = (receive.addr.clone(), receive.replica);
        let Some(records) = self.finder.find(effects, now, (session, &addr, replica)) else { return };
        match serving(&self.cache, &records) {
            Ok((ranks, required)) => {
                let new = ranks.iter().filter(|rank| !self.prefills.contains(&rank.place)).count();
                self.prefills.prune(effects, self.limits.prefill_ranks.saturating_sub(new));
                if self.prefills.len() + new > self.limits.prefill_ranks {
                    let max = self.limits.prefill_ranks;
                    return self.fail(effects, now, session, (None, Cause::TooManyPeers { max }));
                }
                for rank in &ranks {
                    self.prefills.join(effects, &rank.place, &addr, session);
                }
                if let Some(session) = self.sessions.live(session) {
                    session.dialect.required = required;
                    session.dialect.sources = ranks.into_iter().map(Source::new).collect();
                }
                self.advance(effects, session);
            }
            Err(cause) => {
                let peer = records.first().map(|record| record.worker.clone());
                self.fail(effects, now, session, (peer, cause));
            }
        }
    }

    pub(in crate::sglang) fn found(
        &mut self,
        effects: &mut Effects,
        now: Time,
        lookup: LookupId,
        ranks: Vec<RankRecord>,
    ) {
        let times = (now, self.timing.lookup_lifetime);
        for session in self.finder.found(effects, times, lookup, ranks) {
            self.find(effects, now, session);
        }
    }

    pub(in crate::sglang) fn lookup_failed(
        &mut self,
        effects: &mut Effects,
        now: Time,
        lookup: LookupId,
        error: &BootstrapError,
    ) {
        let times = (now, self.timing.lookup_retry);
        for session in self.finder.failed(effects, times, lookup, error) {
            self.fail(effects, now, session, (None, Cause::Bootstrap(error.clone())));
        }
    }

    /// The way to a rank is open. The rank is told of this worker, and again to stop what was to be stopped.
    pub(in crate::sglang) fn connected(&mut self, effects: &mut Effects, now: Time, peer: PeerId) {
        let registration = self.registration();
        for session in self.prefills.connected(effects, peer, registration) {
            if self.sessions.live(session).is_some() {
                self.advance(effects, session);
            } else {
                self.ask_again_to_stop(effects, now, session);
            }
        }
    }

    /// The way to a rank could not be opened.
    pub(in crate::sglang) fn connect_failed(
        &mut self,
        effects: &mut Effects,
        now: Time,
        peer: PeerId,
        error: &TransportError,
    ) {
        let Some(gone) = self.prefills.gone(now + self.timing.reconnect, peer) else { return };
        self.finder.forget(&gone.addr);
        for session in gone.sessions {
            let failure = (self.worker_at(session, &gone.place), Cause::Connect(error.clone()));
            self.fail(effects, now, session, failure);
        }
    }

    pub(in crate::sglang) fn init(
        &mut self,
        effects: &mut Effects,
        now: Time,
        session: SessionId,
        (pages, aux): (Pages, Option<AuxIndex>),
    ) {
        let geometry = &self.cache.geometry;
        let rows = geometry.aux_rows().unwrap_or(0);
        let bad = pages.list().check_below(geometry.num_pages).err().map(Cause::BadPages);
        let list: Vec<u32> = pages.list().iter().collect();
        self.sessions.lend(effects, session, Resource::Pages(pages));
        let Some(open) = self.sessions.live(session) else { return };
        let cause = match aux {
            _ if open.dialect.given.is_some() => Some(Cause::InitOrder),
            None => Some(Cause::AuxOneSided { sender: true, receiver: false }),
            Some(AuxIndex(index)) if index >= rows => Some(Cause::BadAux { index, rows }),
            Some(aux)
                if self.aux_rooms.as_ref().is_some_and(|rows| rows.room_in(aux) == open.dialect.room) =>
            {
                Some(Cause::Protocol(STALE_ROW))
            }
            Some(aux) => {
                open.dialect.given = Some(Given { pages: list, aux });
                bad
            }
        };
        match cause {
            Some(cause) => self.fail(effects, now, session, (None, cause)),
            None => self.advance(effects, session),
        }
    }

    /// Goes on once every rank can be spoken to: the session may be given pages, and given pages are told.
    fn advance(&mut self, effects: &mut Effects, session: SessionId) {
        let Some(open) = self.sessions.live(session) else { return };
        let sources = &open.dialect.sources;
        let up =
            !sources.is_empty() && sources.iter().all(|source| self.prefills.is_up(&source.serving.place));
        if !up || open.status() > KvPoll::WaitingForInput {
            return;
        }
        self.sessions.advance(effects, session, KvPoll::WaitingForInput);
        self.tell_pages(effects, session);
    }

    fn tell_pages(&mut self, effects: &mut Effects, session: SessionId) {
        let page_size = u64::from(self.cache.geometry.page_size);
        let Some(open) = self.sessions.live(session) else { return };
        let receive = &mut open.dialect;
        let Some(given) = &receive.given else { return };
        for source in &mut receive.sources {
            let dummy = source.serving.dummy;
            let request = Request {
                room: receive.room,
                ip: self.registration.ip.clone(),
                port: self.registration.port,
                agent: self.registration.agent.clone(),
                pages: if dummy { Vec::new() } else { given.pages.clone() },
                aux: given.aux.0,
                required: receive.required,
                has_state: false,
                prefix_tokens: receive.prefix as u64 * page_size,
                dummy,
            };
            self.prefills.say(effects, &source.serving.place, request.encode());
            source.told = true;
            if !dummy {
                source.writes = Writes::Yes(QuarantineReason::Unacknowledged);
            }
        }
        self.sessions.advance(effects, session, KvPoll::Transferring);
    }
}
