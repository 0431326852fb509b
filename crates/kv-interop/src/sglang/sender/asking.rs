//! What decode ranks ask for: they register, name the pages of each request, and give requests up.

use kv_core::{
    Cause, KvPoll, PageList, PagesError, PeerCause, PeerId, SessionId, Time, TransportError, WayEnd, WorkerId,
};

use super::Sending;
use super::agents::{Agent, Registered};
use super::pushes::Endpoint;
use super::session::{Send, Target};
use crate::cache::differs;
use crate::effects::Effects;
use crate::sglang::codec::{Abort, AbortAck, FAILED, KvStatus, Registration, Request};

/// How many requests rooms without a sender may have, for each room that may be without one.
const REQUESTS_PER_ROOM: usize = 16;

impl Sending {
    /// Takes a registration. False if there is no room for another agent.
    pub(in crate::sglang) fn register(&mut self, effects: &mut Effects, registration: Registration) -> bool {
        let name = registration.agent.clone();
        let used = |agent: &str| self.rooms.uses(agent) || self.of_agent.contains_key(agent);
        match self.agents.register(effects, &self.cache, registration, used) {
            Registered::Taken => true,
            Registered::Replaced => {
                for session in self.sessions_of(&name) {
                    self.fail(effects, session, (None, Cause::PeerRestarted));
                }
                true
            }
            Registered::Full => false,
        }
    }

    /// Takes the pages that a decode rank wants of a room. False if the request is dropped, or refused.
    pub(in crate::sglang) fn request(&mut self, effects: &mut Effects, now: Time, request: Request) -> bool {
        let endpoint = (request.ip.clone(), request.port);
        let Some(agent) = self.agents.get(&request.agent) else {
            self.refuse(
                effects,
                &endpoint,
                request.room,
                "the agent has not registered with this prefill rank",
            );
            return false;
        };
        let worker = agent.worker();
        if agent.endpoint() != endpoint {
            return false;
        }
        let (session, room) = (self.rooms.session(request.room), request.room);
        let closed = match self.closed {
            Some(Cause::Draining) if session.is_none() => Some("the prefill worker drains"),
            None | Some(Cause::Draining) => None,
            Some(_) => Some("the prefill worker is stopping"),
        };
        if let Some(why) = closed {
            self.refuse(effects, &endpoint, room, why);
            return false;
        }
        self.agents.hear(&request.agent);
        if let Some(cause) = self.refusal(&request) {
            self.refuse(effects, &endpoint, room, &cause.to_string());
            self.refused(effects, now, &request, (worker, cause));
            return false;
        }
        if let Some(session) = session {
            return self.attach(effects, session, request);
        }
        let (rooms, requests, pages) = self.rooms.unclaimed();
        let full = rooms >= self.limits.unclaimed_rooms
            || requests >= self.limits.unclaimed_rooms.saturating_mul(REQUESTS_PER_ROOM)
            || pages.saturating_add(request.pages.len()) > self.limits.unclaimed_pages;
        if full {
            self.refuse(effects, &endpoint, room, "too many requests wait for their prefill");
            return false;
        }
        if !request.dummy {
            self.agents.open(effects, &request.agent);
        }
        self.rooms.ask(now + self.timing.unclaimed, room, request);
        true
    }

    /// Why a request cannot be served.
    pub(super) fn refusal(&self, request: &Request) -> Option<Cause> {
        let agent = self.agents.get(&request.agent)?;
        if request.dummy {
            return None;
        }
        if let Err(cause) = &agent.cache {
            return Some(cause.clone());
        }
        if request.has_state {
            let found = differs("state_indices", "no state components", "some");
            return Some(Cause::Incompatible(found));
        }
        let page_size = u64::from(self.cache.geometry.page_size);
        if !request.prefix_tokens.is_multiple_of(page_size.max(1)) {
            let ours = format!("whole pages of {page_size} tokens");
            return Some(Cause::Incompatible(differs("decode_prefix_len", ours, request.prefix_tokens)));
        }
        let far = request.pages.iter().find(|page| **page >= agent.slots());
        let error = PagesError::OutOfRange { page: *far?, num_pages: agent.slots() };
        Some(Cause::BadPages(error))
    }

    /// A request of a room was refused: its sender fails, or will when it comes. A sender that has all its decode
    /// ranks is not ended by the request of another one.
    fn refused(
        &mut self,
        effects: &mut Effects,
        now: Time,
        request: &Request,
        refusal: (Option<WorkerId>, Cause),
    ) {
        match self.rooms.session(request.room) {
            Some(session) => {
                let waits = |send: &Send| !send.attached || send.targets(&request.agent);
                if self.sessions.live(session).is_some_and(|open| waits(&open.dialect)) {
                    self.fail(effects, session, refusal);
                }
            }
            None if self.rooms.unclaimed().0 < self.limits.unclaimed_rooms => {
                self.rooms.refuse(now + self.timing.unclaimed, request.room, refusal);
            }
            None => {}
        }
    }

    /// Tells a decode rank that a request has failed for which nothing was written.
    pub(super) fn refuse(&mut self, effects: &mut Effects, endpoint: &Endpoint, room: u64, reason: &str) {
        let status = KvStatus { room, status: FAILED, rank: self.rank, reason: reason.to_owned() };
        self.pushes.say(effects, endpoint, status.encode());
    }

    /// A decode rank joins a session.
    pub(super) fn attach(&mut self, effects: &mut Effects, session: SessionId, request: Request) -> bool {
        let endpoint = (request.ip.clone(), request.port);
        let page_size = u64::from(self.cache.geometry.page_size).max(1);
        let Some(open) = self.sessions.live(session) else {
            self.refuse(effects, &endpoint, request.room, "the request has failed");
            return false;
        };
        if open.dialect.attached || open.dialect.targets(&request.agent) {
            return false;
        }
        // Range and number of the pages were checked.
        let pages = PageList::from_pages(request.pages).unwrap_or_default();
        let target = Target {
            agent: request.agent,
            endpoint,
            dummy: request.dummy,
            required: request.required,
            pages,
            prefix: (request.prefix_tokens / page_size) as usize,
            aux: request.aux,
            begun: Default::default(),
            aux_begun: false,
            flows: Default::default(),
            told: false,
            stop: Default::default(),
        };
        let (agent, dummy) = (target.agent.clone(), target.dummy);
        open.dialect.targets.push(target);
        open.dialect.attached = open.dialect.targets.len() >= open.dialect.required();
        let attached = open.dialect.attached;
        self.of_agent.entry(agent.clone()).or_default().insert(session);
        if !dummy {
            self.agents.open(effects, &agent);
        }
        if attached {
            self.sessions.advance(effects, session, KvPoll::WaitingForInput);
            self.check_agreement(effects, session);
            self.write(effects, session);
        }
        true
    }

    /// A decode rank gives a request up. The acknowledgement follows when no post of this worker writes for the
    /// request any more. False if the rank is unknown.
    pub(in crate::sglang) fn aborted(&mut self, effects: &mut Effects, abort: &Abort) -> bool {
        let known = abort.reply_to.as_ref().is_some_and(|endpoint| self.agents.has_endpoint(endpoint));
        let Some(endpoint) = abort.reply_to.as_ref().filter(|_| known) else { return false };
        let cause = || Cause::ByPeer(PeerCause::Aborted);
        if let Some(session) = self.rooms.session(abort.room) {
            let Some(open) = self.sessions.any(session) else { return false };
            let target = open.dialect.targets.iter_mut().find(|target| target.endpoint == *endpoint);
            let Some(target) = target else {
                // While ranks are missing, the rank may be one of the room's that has given up before its request,
                // and the others wait in vain. Once all are there, another rank may not end the room.
                if !open.dialect.attached {
                    self.fail(effects, session, (None, cause()));
                }
                self.acknowledge(effects, endpoint, abort);
                return true;
            };
            target.told = true;
            target.stop.extend(abort.generation);
            let agent = target.agent.clone();
            let worker = self.agents.get(&agent).and_then(Agent::worker);
            self.fail(effects, session, (worker, cause()));
            self.settle(effects, session);
            return true;
        }
        if let Some(room) = self.rooms.withdraw(abort.room, endpoint) {
            room.refusal = Some((None, cause()));
        }
        self.acknowledge(effects, endpoint, abort);
        true
    }

    fn acknowledge(&mut self, effects: &mut Effects, endpoint: &Endpoint, abort: &Abort) {
        if abort.generation.is_some() {
            let ack = AbortAck { room: abort.room, rank: self.rank, generation: abort.generation };
            self.pushes.say(effects, endpoint, ack.encode());
        }
    }

    /// A room for which no sender has come is given up, and its decode ranks are told, all but dummies. True if at least
    /// one is told.
    pub(super) fn give_up_room(&mut self, effects: &mut Effects, number: u64, reason: &str) -> bool {
        let Some(room) = self.rooms.forget(number) else { return false };
        let mut is_told = false;
        for request in room.requests.into_values().filter(|request| !request.dummy) {
            self.refuse(effects, &(request.ip, request.port), number, reason);
            is_told = true;
        }
        is_told
    }

    /// The sessions that write, or wrote, to an agent.
    fn sessions_of(&self, agent: &str) -> Vec<SessionId> {
        self.of_agent.get(agent).into_iter().flatten().copied().collect()
    }

    /// The way to an agent, or to the socket of one, has ended. True if the peer is one of these.
    pub(in crate::sglang) fn gone(&mut self, effects: &mut Effects, (peer, end): (PeerId, WayEnd)) -> bool {
        if let Some(name) = self.agents.gone(peer) {
            effects.disconnect(peer);
            let worker = self.agents.get(&name).and_then(Agent::worker);
            for session in self.sessions_of(&name) {
                self.fail(effects, session, (worker.clone(), Cause::WayLost));
            }
            return true;
        }
        let Some(endpoint) = self.pushes.gone(peer) else { return false };
        effects.disconnect(peer);
        if end != WayEnd::Lost {
            for name in self.agents.at(&endpoint) {
                let worker = self.agents.get(&name).and_then(Agent::worker);
                for session in self.sessions_of(&name) {
                    self.forgive(session, &endpoint);
                    self.fail(effects, session, (worker.clone(), Cause::PeerLost));
                }
                self.agents.remove(effects, &name);
            }
        }
        true
    }

    /// A decode rank that is dead needs to be told nothing.
    fn forgive(&mut self, session: SessionId, endpoint: &Endpoint) {
        let Some(open) = self.sessions.any(session) else { return };
        for target in open.dialect.targets.iter_mut().filter(|target| target.endpoint == *endpoint) {
            target.told = true;
            target.stop.clear();
        }
    }

    /// The way to an agent, or to the socket of one, could not be opened.
    pub(in crate::sglang) fn connect_failed(
        &mut self,
        effects: &mut Effects,
        peer: PeerId,
        error: &TransportError,
    ) -> bool {
        let Some(name) = self.agents.gone(peer) else { return self.pushes.gone(peer).is_some() };
        let cause = Cause::Connect(error.clone());
        // What the transport refuses in the registration stays refused; a way may be opened next time.
        if matches!(error, TransportError::Foreign(_)) {
            self.agents.refuse(&name, cause.clone());
        }
        let worker = self.agents.get(&name).and_then(Agent::worker);
        for session in self.sessions_of(&name) {
            self.fail(effects, session, (worker.clone(), cause.clone()));
        }
        true
    }
}
