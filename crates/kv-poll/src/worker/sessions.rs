//! The worker's table of sessions.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::proto::Command;
use kv_core::{KvPoll, Quarantine, QuarantineReason, SessionId, TransferError};

use crate::cell::{Cell, Side};
use crate::link::Link;
use crate::token::{Size, Token};

/// The sessions that the node knows, and what it holds of each.
///
/// A session is here from its `Open` until it has ended and all its tokens are back. When the table
/// is dropped, the worker is no more, in whatever way: every session that is still running fails
/// with `WorkerStopped`. Tokens that have not come back by then never will: nobody is left who
/// could prove that no wire touches them.
pub(super) struct Sessions {
    link: Arc<Link>,
    entries: BTreeMap<SessionId, Entry>,
}

struct Entry {
    cell: Arc<Cell>,
    /// Tokens that the node holds, and what is in them.
    tokens: usize,
    held: Size,
}

impl Sessions {
    pub(super) fn new(link: Arc<Link>) -> Sessions {
        Sessions { link, entries: BTreeMap::new() }
    }

    /// Books a command before the node sees it. `None` if the session has ended: then the node
    /// need not see it, and the pages in it are on their way back, having met no wire.
    pub(super) fn admit(&mut self, cell: &Arc<Cell>, command: Command) -> Option<Command> {
        if let Command::OpenSender { session, .. } | Command::OpenReceiver { session, .. } = command {
            self.entries.insert(session, Entry { cell: Arc::clone(cell), tokens: 0, held: Size::default() });
        }
        match self.entries.get_mut(&cell.id()) {
            Some(entry) if !cell.poll().is_terminal() => {
                if let Some(size) = Token::size_in(&command) {
                    entry.tokens += 1;
                    entry.held.pages += size.pages;
                    entry.held.items += size.items;
                    self.link.counters.start_transfer(size);
                }
                Some(command)
            }
            _ => {
                if let Some(token) = Token::from_command(command) {
                    self.link.give_back(cell, token);
                }
                None
            }
        }
    }

    /// Whether the node knows the session and has not ended it.
    pub(super) fn is_running(&self, cell: &Cell) -> bool {
        self.entries.contains_key(&cell.id()) && !cell.poll().is_terminal()
    }

    /// The node says: the session has a new state.
    pub(super) fn status(&mut self, session: SessionId, poll: KvPoll, failure: Option<Box<TransferError>>) {
        let Some(entry) = self.entries.get(&session) else { return };
        if !entry.cell.set(poll, failure) {
            return;
        }
        if poll.is_terminal() {
            self.link.counters.start_quarantine(entry.held);
        }
        self.link.poll_set.notify(&entry.cell);
        self.retire(session);
    }

    /// The node says: these pages or items are quiet.
    pub(super) fn release(&mut self, session: SessionId, token: Token) {
        let Some(entry) = self.entries.get_mut(&session) else {
            debug_assert!(false, "pages released that the node did not hold");
            return self.link.add_orphan(token);
        };
        let size = token.size();
        let size = Size { pages: size.pages.min(entry.held.pages), items: size.items.min(entry.held.items) };
        entry.tokens = entry.tokens.saturating_sub(1);
        entry.held.pages -= size.pages;
        entry.held.items -= size.items;
        let counters = &self.link.counters;
        match entry.cell.poll().is_terminal() {
            true => counters.end_quarantine(size),
            false => counters.end_transfer(size),
        }
        self.link.give_back(&entry.cell, token);
        self.retire(session);
    }

    /// How many have not ended.
    pub(super) fn running(&self) -> usize {
        self.entries.values().filter(|entry| !entry.cell.poll().is_terminal()).count()
    }

    /// True if every session has ended and every page is back.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn retire(&mut self, session: SessionId) {
        let settled = |entry: &Entry| entry.tokens == 0 && entry.cell.poll().is_terminal();
        if self.entries.get(&session).is_some_and(settled)
            && let Some(entry) = self.entries.remove(&session)
        {
            self.link.leave(&entry.cell, Side::Worker);
        }
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        // Before `close`, after which others may end sessions too.
        let running = |entry: &&Entry| !entry.cell.poll().is_terminal();
        for entry in self.entries.values().filter(running) {
            self.link.counters.start_quarantine(entry.held);
        }
        let held = self.entries.values().filter(|entry| entry.held != Size::default());
        let lost = held.map(|entry| Quarantine {
            peer: None,
            reason: QuarantineReason::WorkerStopped,
            pages: entry.held.pages,
            items: entry.held.items,
            sessions: 1,
            ends_within: None,
        });
        self.link.set_quarantine(Quarantine::gather(lost, |a, b| a + b));
        self.link.close();
        for entry in self.entries.values() {
            if entry.cell.fail_stopped() {
                self.link.poll_set.notify(&entry.cell);
            }
            self.link.leave(&entry.cell, Side::Worker);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::tests::{args, pages};
    use kv_core::{Incarnation, KvManager, KvSender, KvSession, Room, SessionOptions};

    /// Plays the worker for one command.
    fn take(link: &Link, sessions: &mut Sessions) -> Option<Command> {
        let message = link.next_command().unwrap();
        sessions.admit(&message.cell, message.command)
    }

    #[test]
    fn pages_lost_with_the_worker_are_counted_even_if_commands_of_their_session_wait() {
        let link = Arc::new(Link::new(args(), Incarnation::from_random(1), 8, 8).unwrap());
        let mut sessions = Sessions::new(Arc::clone(&link));
        let manager = crate::Manager::new(Arc::clone(&link));
        let mut sender = manager.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
        sender.send(pages(&[1, 2])).unwrap();
        sender.send(pages(&[3])).unwrap();
        assert!(take(&link, &mut sessions).is_some());
        assert!(take(&link, &mut sessions).is_some());
        drop(sessions);
        let gauges = manager.gauges();
        assert_eq!((gauges.pages_in_transfer, gauges.pages_quarantined), (0, 2));
        assert_eq!(sender.poll(), KvPoll::Failed);
        // Page 3 has met no wire, pages 1 and 2 have: the session as a whole is not reclaimable,
        // but dropping it returns the page that is quiet.
        let sender = sender.reclaim().expect_err("two pages are out");
        drop(sender);
        assert_eq!(manager.orphans(), [pages(&[3])]);
    }

    #[test]
    fn states_after_the_end_are_ignored() {
        let link = Arc::new(Link::new(args(), Incarnation::from_random(1), 8, 8).unwrap());
        let mut sessions = Sessions::new(Arc::clone(&link));
        let manager = crate::Manager::new(Arc::clone(&link));
        let mut sender = manager.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
        sender.send(pages(&[1])).unwrap();
        while link.has_commands() {
            assert!(take(&link, &mut sessions).is_some());
        }
        let id = sender.id();
        sessions.status(id, KvPoll::Success, None);
        sessions.status(id, KvPoll::Transferring, None);
        assert_eq!((sender.poll(), link.gauges().pages_quarantined), (KvPoll::Success, 1));
        sessions.release(id, pages(&[1]).into());
        assert_eq!((sessions.is_empty(), link.gauges().pages_quarantined), (true, 0));
        assert_eq!(sender.reclaim().ok(), Some(pages(&[1])));
    }
}
