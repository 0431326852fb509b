//! What every session has reported, and what came back of it: the invariants.

use std::collections::BTreeMap;

use kv_core::{KvPoll, PageList, SessionId};

use crate::Violation;

/// One life of one host.
pub(super) type Life = (usize, u8);

/// What is known of all sessions.
#[derive(Debug, Clone, Default)]
pub(super) struct Ledger {
    sessions: BTreeMap<(Life, SessionId), Entry>,
}

#[derive(Debug, Clone, Default)]
struct Entry {
    poll: Option<KvPoll>,
    given: Vec<PageList>,
    back: usize,
}

pub(super) fn violation(invariant: &'static str, what: String) -> Violation {
    Violation { invariant, what }
}

impl Ledger {
    /// A token goes in.
    pub(super) fn gives(&mut self, life: Life, session: SessionId, pages: &PageList) {
        self.sessions.entry((life, session)).or_default().given.push(pages.clone());
    }

    /// A status comes out.
    pub(super) fn status(
        &mut self,
        life: Life,
        session: SessionId,
        poll: KvPoll,
        failed: bool,
    ) -> Result<(), Violation> {
        let entry = self.sessions.entry((life, session)).or_default();
        let rises = entry
            .poll
            .is_none_or(|before| !before.is_terminal() && (poll == KvPoll::Failed || poll > before));
        let named = failed == (poll == KvPoll::Failed);
        if !rises || !named {
            let what = format!("session {session} of host {}: {:?} → {poll:?}", life.0, entry.poll);
            return Err(violation("ends_once", what));
        }
        entry.poll = Some(poll);
        Ok(())
    }

    /// A token comes out.
    pub(super) fn back(&mut self, life: Life, session: SessionId, pages: &PageList) -> Result<(), Violation> {
        let entry = self.sessions.entry((life, session)).or_default();
        let ended = entry.poll.is_some_and(KvPoll::is_terminal);
        if !ended || entry.given.get(entry.back) != Some(pages) {
            let what = format!("session {session} of host {} gives {pages:?}: {entry:?}", life.0);
            return Err(violation("pages_come_back_once", what));
        }
        entry.back += 1;
        Ok(())
    }

    pub(super) fn poll(&self, life: Life, session: SessionId) -> Option<KvPoll> {
        self.sessions.get(&(life, session))?.poll
    }

    /// The pages that a session was given, whether they came back or not.
    pub(super) fn given(&self, life: Life, session: SessionId) -> Option<&PageList> {
        self.sessions.get(&(life, session))?.given.first()
    }

    /// True if pages of the session are out.
    pub(super) fn holds(&self, life: Life, session: SessionId) -> bool {
        self.sessions.get(&(life, session)).is_some_and(|entry| entry.back < entry.given.len())
    }

    /// How many sessions of hosts other than the first have reported success.
    pub(super) fn successes(&self) -> usize {
        let receivers = self.sessions.iter().filter(|((life, _), _)| life.0 > 0);
        receivers.filter(|(_, entry)| entry.poll == Some(KvPoll::Success)).count()
    }

    /// A session of a life that goes on and that has not ended, or whose pages are out.
    pub(super) fn unfinished(&self, lives: impl Fn(Life) -> bool) -> Option<String> {
        let mut sessions = self.sessions.iter().filter(|((life, _), _)| lives(*life));
        let found = sessions.find(|(_, entry)| {
            !entry.poll.is_some_and(KvPoll::is_terminal) || entry.back != entry.given.len()
        });
        found.map(|((life, session), entry)| format!("session {session} of host {}: {entry:?}", life.0))
    }

    /// For the fingerprint of the world.
    pub(super) fn states(&self) -> impl Iterator<Item = (Life, SessionId, Option<KvPoll>, usize, usize)> {
        self.sessions
            .iter()
            .map(|(&(life, session), entry)| (life, session, entry.poll, entry.given.len(), entry.back))
    }
}
