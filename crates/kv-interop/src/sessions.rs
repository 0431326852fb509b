//! What sessions of every dialect have in common: each ends once, before its deadline, and hands back what it was
//! lent once no data operation can touch it.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::machine::SessionResource;
use kv_core::proto::Resource;
use kv_core::{
    Cause, KvPoll, Phase, Quarantine, QuarantineReason, Room, SessionId, Time, TransferError, WorkerId,
};

use crate::effects::Effects;

/// The sessions of a machine. `S` is what the dialect keeps of a session.
#[derive(Debug)]
pub(crate) struct Sessions<S> {
    sessions: BTreeMap<SessionId, Session<S>>,
    /// When each session has to be looked at: at its deadline, and when its quarantine ends.
    timers: BTreeSet<(Time, SessionId)>,
}

/// One session, from its opening until everything that the session was lent has come back.
#[derive(Debug)]
pub(crate) struct Session<S> {
    pub(crate) room: Room,
    /// How long the session may take, from its opening.
    pub(crate) patience: std::time::Duration,
    pub(crate) dialect: S,
    deadline: Time,
    status: KvPoll,
    lent: Vec<Resource>,
    held: Option<Held>,
}

/// Why the pages of a session that has ended are not handed back yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) reason: QuarantineReason,
    pub(crate) peer: Option<WorkerId>,
    /// When the pages are free whatever the peer does; `None` if time alone frees nothing.
    pub(crate) until: Option<Time>,
}

/// What the time has come for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// The session has not ended, and its deadline has passed.
    Deadline(SessionId),
    /// The pages of the session, which has ended, are free by time.
    Free(SessionId),
}

impl<S> Default for Sessions<S> {
    fn default() -> Sessions<S> {
        Sessions { sessions: BTreeMap::new(), timers: BTreeSet::new() }
    }
}

impl<S> Sessions<S> {
    /// Opens a session, which ends at `opened + patience` at the latest.
    pub(crate) fn open(
        &mut self,
        id: SessionId,
        room: Room,
        opened: Time,
        patience: std::time::Duration,
        dialect: S,
    ) {
        let deadline = opened + patience;
        let status = KvPoll::Bootstrapping;
        let session = Session { room, patience, dialect, deadline, status, lent: Vec::new(), held: None };
        self.timers.insert((deadline, id));
        self.sessions.insert(id, session);
    }

    /// A session that has not ended.
    pub(crate) fn live(&mut self, id: SessionId) -> Option<&mut Session<S>> {
        self.sessions.get_mut(&id).filter(|session| !session.status.is_terminal())
    }

    /// A session, even if it has ended and its pages are held.
    pub(crate) fn any(&mut self, id: SessionId) -> Option<&mut Session<S>> {
        self.sessions.get_mut(&id)
    }

    /// All sessions, in the order of their ids.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SessionId, &Session<S>)> {
        self.sessions.iter().map(|(id, session)| (*id, session))
    }

    /// The ids of the sessions that have not ended.
    pub(crate) fn live_ids(&self) -> Vec<SessionId> {
        self.iter().filter(|(_, session)| !session.has_ended()).map(|(id, _)| id).collect()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Keeps what a command lends. The resource comes straight back if no session takes it.
    pub(crate) fn lend(&mut self, effects: &mut Effects, id: SessionId, resource: Resource) {
        match self.live(id) {
            Some(session) => session.lent.push(resource),
            None => effects.release(id, resource),
        }
    }

    /// Reports progress: a state that is not below the one reported before.
    pub(crate) fn advance(&mut self, effects: &mut Effects, id: SessionId, status: KvPoll) {
        if let Some(session) = self.live(id)
            && status > session.status
            && !status.is_terminal()
        {
            session.status = status;
            effects.status(id, status);
        }
    }

    /// Ends a session in success. Everything that was lent comes back.
    pub(crate) fn succeed(&mut self, effects: &mut Effects, id: SessionId) {
        self.end(effects, id, None, None);
    }

    /// Ends a session with this error. With `held`, what was lent stays until [`free`](Sessions::free), or until
    /// the time that `held` says.
    pub(crate) fn fail(
        &mut self,
        effects: &mut Effects,
        id: SessionId,
        (peer, phase, cause): (Option<WorkerId>, Phase, Cause),
        held: Option<Held>,
    ) {
        let Some(room) = self.live(id).map(|session| session.room.clone()) else { return };
        let mut error = TransferError::new(room, phase, cause);
        error.peer = peer;
        self.end(effects, id, Some(error), held);
    }

    fn end(
        &mut self,
        effects: &mut Effects,
        id: SessionId,
        error: Option<TransferError>,
        held: Option<Held>,
    ) {
        let Some(session) = self.live(id) else { return };
        session.status = if error.is_some() { KvPoll::Failed } else { KvPoll::Success };
        let deadline = session.deadline;
        // A request without pages may still have an aux row.
        let held = held.filter(|_| !session.lent.is_empty());
        session.held.clone_from(&held);
        self.timers.remove(&(deadline, id));
        effects.end(id, error);
        match held {
            Some(Held { until: Some(until), .. }) => {
                self.timers.insert((until, id));
            }
            Some(_) => {}
            None => self.free(effects, id),
        }
    }

    /// Changes what the pages of an ended session wait for.
    pub(crate) fn hold(&mut self, id: SessionId, held: Held) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(before) = session.held.replace(held.clone()) else {
            session.held = None;
            return;
        };
        if let Some(until) = before.until {
            self.timers.remove(&(until, id));
        }
        if let Some(until) = held.until {
            self.timers.insert((until, id));
        }
    }

    /// Hands everything back that an ended session was lent, and forgets the session.
    pub(crate) fn free(&mut self, effects: &mut Effects, id: SessionId) {
        if !self.sessions.get(&id).is_some_and(Session::has_ended) {
            return;
        }
        let Some(session) = self.sessions.remove(&id) else { return };
        if let Some(until) = session.held.and_then(|held| held.until) {
            self.timers.remove(&(until, id));
        }
        for resource in session.lent {
            effects.release(id, resource);
        }
    }

    /// The next thing for which the time has come. The caller ends or frees the session before the next call.
    pub(crate) fn due(&mut self, now: Time) -> Option<Due> {
        let (at, id) = *self.timers.first()?;
        if at > now {
            return None;
        }
        let ended = self.sessions.get(&id).is_some_and(Session::has_ended);
        Some(if ended { Due::Free(id) } else { Due::Deadline(id) })
    }

    /// When something is due.
    pub(crate) fn next_due(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The pages of ended sessions that are held, by peer and reason.
    pub(crate) fn quarantine(&self, now: Time) -> Vec<Quarantine> {
        let held = self.sessions.values().filter_map(|session| Some((session, session.held.as_ref()?)));
        let entries = held.map(|(session, held)| {
            let amount = |kind| session.lent.iter().map(|resource| resource.amounts().kind(kind)).sum();
            let pages = amount(Resource::PAGES);
            let mut entry = Quarantine::new(held.peer.clone(), held.reason, 1, pages);
            entry.items = amount(Resource::ITEMS);
            entry.ends_within = held.until.map(|until| until.since(now));
            entry
        });
        Quarantine::gather(entries, |a, b| a.saturating_add(b))
    }
}

impl<S> Session<S> {
    /// True once the session has ended; its pages may still be held.
    pub(crate) fn has_ended(&self) -> bool {
        self.status.is_terminal()
    }

    pub(crate) fn status(&self) -> KvPoll {
        self.status
    }

    /// What the pages of the session wait for, if the session has ended and pages are held.
    pub(crate) fn held(&self) -> Option<&Held> {
        self.held.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use kv_core::machine::Output;
    use kv_core::{PageList, PagePool, Pages};

    const ID: SessionId = SessionId(4);
    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn pages() -> Pages {
        PagePool::new(9).adopt(PageList::from_pages([3, 4]).unwrap()).unwrap()
    }

    fn opened() -> (Sessions<()>, Effects) {
        let (mut sessions, mut effects) = (Sessions::default(), Effects::default());
        sessions.open(ID, Room::Number(1), at(0), 10 * SECOND, ());
        sessions.lend(&mut effects, ID, pages().into());
        (sessions, effects)
    }

    /// What a session was told: its states, and how many pages came back.
    fn told(effects: &mut Effects) -> (Vec<KvPoll>, usize) {
        let (mut states, mut pages) = (Vec::new(), 0);
        while let Some(out) = effects.poll() {
            match out {
                Output::Status { poll, .. } => states.push(poll),
                Output::Release { resource, .. } => pages += resource.amounts().kind(Resource::PAGES),
                _ => {}
            }
        }
        (states, pages)
    }

    #[test]
    fn a_session_ends_once_and_hands_its_pages_back_once() {
        let (mut sessions, mut effects) = opened();
        sessions.advance(&mut effects, ID, KvPoll::Transferring);
        sessions.advance(&mut effects, ID, KvPoll::WaitingForInput);
        sessions.succeed(&mut effects, ID);
        sessions.fail(&mut effects, ID, (None, Phase::Transfer, Cause::Aborted), None);
        assert_eq!(told(&mut effects), (vec![KvPoll::Transferring, KvPoll::Success], 2));
        assert_eq!((sessions.len(), sessions.next_due()), (0, None));
        sessions.lend(&mut effects, ID, pages().into());
        assert_eq!(told(&mut effects), (vec![], 2), "lent too late, and back at once");
    }

    #[test]
    fn held_pages_come_back_by_word_or_by_time_and_are_shown_meanwhile() {
        for by_time in [false, true] {
            let (mut sessions, mut effects) = opened();
            let until = by_time.then(|| at(30));
            let held = Held { reason: QuarantineReason::ReaderLease, peer: None, until };
            assert_eq!(sessions.due(at(10)), Some(Due::Deadline(ID)));
            let cause = (None, Phase::Transfer, Cause::LeaseExpired);
            sessions.fail(&mut effects, ID, cause, Some(held));
            assert_eq!(told(&mut effects), (vec![KvPoll::Failed], 0));
            let shown = sessions.quarantine(at(10));
            assert_eq!((shown.len(), shown[0].pages, shown[0].sessions), (1, 2, 1));
            assert_eq!(shown[0].ends_within, by_time.then(|| 20 * SECOND));
            assert_eq!(sessions.due(at(29)), None);
            assert_eq!(sessions.due(at(30)), by_time.then_some(Due::Free(ID)));
            sessions.free(&mut effects, ID);
            assert_eq!(told(&mut effects), (vec![], 2));
            assert_eq!((sessions.quarantine(at(30)), sessions.next_due()), (vec![], None));
        }
    }
}
