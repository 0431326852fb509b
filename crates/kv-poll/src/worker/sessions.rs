//! The worker's table of the sessions that the machine knows.

use std::sync::Arc;

use kv_core::SessionId;
use kv_core::in_order::InOrder;
use kv_core::machine::{Amounts, Machine, SessionCommand, SessionResource, SessionStatus};

use super::cell::{Cell, Failure, Side};
use super::shared::{Message, Shared};

/// The sessions that the machine knows, and what the machine holds of each.
///
/// A session is in the table from its opening command until the session has ended and everything lent to it
/// is back. The table is dropped when the worker ends, by a stop or by a panic: every session that is still
/// running then fails with [`Failure::WorkerStopped`]. Resources that are out at that moment never come back,
/// because nothing is left that could prove that no data operation touches them.
pub(super) struct Sessions<M: Machine> {
    shared: Arc<Shared<M>>,
    entries: InOrder<SessionId, Entry<M>>,
}

struct Entry<M: Machine> {
    cell: Arc<Cell<M>>,
    /// Number of resources that the machine holds; `held` is their amounts.
    lent: usize,
    held: Amounts,
}

impl<M: Machine> Sessions<M> {
    pub(super) fn new(shared: Arc<Shared<M>>) -> Sessions<M> {
        Sessions { shared, entries: InOrder::default() }
    }

    /// Books a command before the machine sees the command. `None` if the session has ended: then the machine
    /// need not see the command, and what the command lends is handed back, because no data operation
    /// uses it.
    pub(super) fn admit(&mut self, message: Message<M>) -> Option<M::Command> {
        let Message { cell, command, opens } = message;
        if opens {
            let entry = Entry { cell: Arc::clone(&cell), lent: 0, held: Amounts::default() };
            self.entries.insert(cell.id(), entry);
        }
        match self.entries.get_mut(cell.id()) {
            Some(entry) if !cell.is_over() => {
                if let Some(amounts) = command.lends() {
                    entry.lent += 1;
                    entry.held = entry.held.plus(amounts);
                    self.shared.counters.in_transfer.add(amounts);
                }
                Some(command)
            }
            _ => {
                self.shared.return_unseen(&cell, command);
                None
            }
        }
    }

    /// True if the machine knows the session and the session has not ended.
    pub(super) fn is_running(&self, cell: &Cell<M>) -> bool {
        self.entries.contains(cell.id()) && !cell.is_over()
    }

    /// Takes note of a new state that the machine reports for a session.
    pub(super) fn status(&mut self, session: SessionId, status: M::Status, failure: Option<Box<M::Failure>>) {
        let Some(entry) = self.entries.get(session) else { return };
        if !entry.cell.set(status, failure.map(Failure::Machine)) {
            return;
        }
        if status.is_terminal() {
            self.shared.counters.start_quarantine(entry.held);
        }
        self.shared.announce_soon(&entry.cell);
        if status.is_terminal() {
            self.retire(session);
        }
    }

    /// Hands a resource back to its session, of which the machine says that the resource is quiet.
    pub(super) fn release(&mut self, session: SessionId, resource: M::Resource) {
        let Some(entry) = self.entries.get_mut(session) else {
            debug_assert!(false, "something released that the machine did not hold");
            return self.shared.add_orphan(resource);
        };
        let amounts = resource.amounts().least(entry.held);
        entry.lent = entry.lent.saturating_sub(1);
        entry.held = entry.held.minus(amounts);
        let counters = &self.shared.counters;
        match entry.cell.is_over() {
            true => counters.quarantined.sub(amounts),
            false => counters.in_transfer.sub(amounts),
        }
        self.shared.give_back(&entry.cell, resource);
        self.retire(session);
    }

    /// Number of sessions that have not ended.
    pub(super) fn running(&self) -> usize {
        self.entries.values().filter(|entry| !entry.cell.is_over()).count()
    }

    /// True if every session has ended and everything is back.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn retire(&mut self, session: SessionId) {
        let settled = |entry: &Entry<M>| entry.lent == 0 && entry.cell.is_over();
        if self.entries.get(session).is_some_and(settled)
            && let Some(entry) = self.entries.remove(session)
        {
            self.shared.leave(&entry.cell, Side::Worker);
        }
    }
}

impl<M: Machine> Drop for Sessions<M> {
    fn drop(&mut self) {
        // Before `close`, after which others may end sessions too.
        let counters = &self.shared.counters;
        for entry in self.entries.values().filter(|entry| !entry.cell.is_over()) {
            counters.start_quarantine(entry.held);
        }
        counters.sessions_lost.set(self.entries.values().filter(|entry| !entry.held.is_empty()).count());
        self.shared.set_quarantine(Vec::new());
        self.shared.close();
        for entry in self.entries.values() {
            // Also of a session that had ended: what the machine still holds will never be back.
            entry.cell.fail_stopped();
            self.shared.announce(&entry.cell);
            self.shared.leave(&entry.cell, Side::Worker);
        }
        self.shared.poll_set.signal_noted();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvMachine;
    use crate::worker::tests::{idle, pages};
    use kv_core::proto::Command;
    use kv_core::{KvManager, KvPoll, KvSender, KvSession, Room, SessionOptions};

    /// Plays the worker for one command.
    fn take(shared: &Shared<KvMachine>, sessions: &mut Sessions<KvMachine>) -> Option<Command> {
        sessions.admit(shared.next_command().unwrap())
    }

    #[test]
    fn pages_lost_with_the_worker_are_counted_even_if_commands_of_their_session_wait() {
        let (shared, manager) = idle();
        let mut sessions = Sessions::new(Arc::clone(&shared));
        let mut sender = manager.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
        sender.send(pages(&[1, 2])).unwrap();
        sender.send(pages(&[3])).unwrap();
        assert!(take(&shared, &mut sessions).is_some());
        assert!(take(&shared, &mut sessions).is_some());
        drop(sessions);
        let gauges = manager.gauges();
        assert_eq!((gauges.pages_in_transfer(), gauges.pages_quarantined()), (0, 2));
        assert_eq!(sender.poll(), KvPoll::Failed);
        // Page 3 has met no data operation, pages 1 and 2 have: the session as a whole is not reclaimable,
        // but dropping it returns the page that is quiet.
        assert_eq!(sender.reclaim(), None, "two pages are out");
        drop(sender);
        assert_eq!(manager.orphans(), [pages(&[3])]);
    }

    #[test]
    fn states_after_the_end_are_ignored() {
        let (shared, manager) = idle();
        let mut sessions = Sessions::new(Arc::clone(&shared));
        let mut sender = manager.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
        sender.send(pages(&[1])).unwrap();
        while shared.has_commands() {
            assert!(take(&shared, &mut sessions).is_some());
        }
        let id = sender.id();
        sessions.status(id, KvPoll::Success, None);
        sessions.status(id, KvPoll::Transferring, None);
        assert_eq!((sender.poll(), manager.gauges().pages_quarantined()), (KvPoll::Success, 1));
        sessions.release(id, pages(&[1]).into());
        assert_eq!((sessions.is_empty(), manager.gauges().pages_quarantined()), (true, 0));
        assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[1])));
    }
}
