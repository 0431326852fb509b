//! Session handles: what a scheduler holds of a transfer.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use kv_core::proto::Command;
use kv_core::{
    AuxIndex, Backpressure, ChunkId, FinalLayers, GrantRef, Groups, KvPoll, KvReceiver, KvSender, KvSession,
    Pages, Reclaimed, Room, SessionId, TransferError,
};

use crate::cell::{Cell, Side};
use crate::link::Link;
use crate::token::Token;

/// The sending half of a transfer, on a prefill worker.
pub type Sender = Session<Sending>;
/// The receiving half of a transfer, on a decode worker.
pub type Receiver = Session<Receiving>;

/// The role of a [`Sender`].
#[derive(Debug)]
pub enum Sending {}
/// The role of a [`Receiver`].
#[derive(Debug)]
pub enum Receiving {}

/// One half of one transfer. Nothing in it blocks, and [`poll`](KvSession::poll) is one load.
///
/// Dropping a session without reclaiming it aborts it, and its pages go to
/// [`Manager::orphans`](crate::Manager::orphans) as they come back, items of state groups to
/// [`Manager::orphan_groups`](crate::Manager::orphan_groups).
#[must_use = "dropping a session aborts it"]
pub struct Session<Role> {
    link: Arc<Link>,
    cell: Arc<Cell>,
    /// The first page of each token given, by which its place is known when it comes back.
    given: Vec<u32>,
    /// How many tokens were given.
    tokens: u32,
    closed: bool,
    role: PhantomData<fn() -> Role>,
}

impl<Role> Session<Role> {
    pub(crate) fn new(link: Arc<Link>, cell: Arc<Cell>) -> Session<Role> {
        Session { link, cell, given: Vec::new(), tokens: 0, closed: false, role: PhantomData }
    }

    /// Gives pages away in a command.
    fn give(
        &mut self,
        pages: Pages,
        command: impl FnOnce(SessionId, Pages) -> Command,
    ) -> Result<(), Backpressure<Pages>> {
        let first = pages.list().runs().first().map(|run| run.start);
        match self.link.submit(&self.cell, command(self.cell.id(), pages)) {
            Ok(()) => {
                self.given.extend(first);
                self.tokens = self.tokens.saturating_add(1);
                Ok(())
            }
            Err(command) => match Token::from_command(command) {
                Some(Token::Pages(pages)) => Err(Backpressure(pages)),
                _ => Err(Backpressure(Pages::none())),
            },
        }
    }

    /// Everything that has come back, once the session can be reclaimed.
    fn take_back(&mut self) -> Option<Reclaimed> {
        if !self.cell.is_reclaimable() {
            return None;
        }
        let mut reclaimed = Reclaimed::default();
        let mut tokens = Vec::new();
        for token in self.cell.take_returned() {
            match token {
                Token::Pages(pages) => tokens.push(pages),
                Token::Groups(groups, skipped) => {
                    // Of several, the node has refused all but the first.
                    reclaimed.skipped.extend(skipped);
                    for items in groups {
                        if let Err(refused) = reclaimed.groups.push(items) {
                            let mut rest = Groups::none();
                            // The first of an empty list always gets in.
                            let _ = rest.push(refused.items);
                            self.link.add_orphan(Token::Groups(rest, Vec::new()));
                        }
                    }
                }
            }
        }
        for token in in_order(tokens, &self.given) {
            // Only tokens that share pages, against their promise, can exceed the bound together.
            if let Err(token) = reclaimed.pages.append(token) {
                self.link.add_orphan(token);
            }
        }
        self.close();
        Some(reclaimed)
    }

    fn close(&mut self) {
        self.closed = true;
        self.cell.close_handle();
        self.link.leave(&self.cell, Side::Handle);
    }
}

impl<Role> KvSession for Session<Role> {
    fn id(&self) -> SessionId {
        self.cell.id()
    }

    fn room(&self) -> &Room {
        self.cell.room()
    }

    fn poll(&self) -> KvPoll {
        self.cell.poll()
    }

    fn failure(&self) -> Option<TransferError> {
        self.cell.failure()
    }

    fn abort(&mut self) {
        self.link.abort(&self.cell);
    }

    fn give_groups(&mut self, groups: Groups) -> Result<(), Backpressure<Groups>> {
        let command = Command::Groups { session: self.cell.id(), groups };
        self.link.submit(&self.cell, command).map_err(|command| match Token::from_command(command) {
            Some(Token::Groups(groups, _)) => Backpressure(groups),
            _ => Backpressure(Groups::none()),
        })
    }

    fn reclaim(self) -> Result<Pages, Self> {
        let link = Arc::clone(&self.link);
        let Reclaimed { pages, groups, .. } = self.reclaim_all()?;
        link.add_orphan(Token::Groups(groups, Vec::new()));
        Ok(pages)
    }

    fn reclaim_all(mut self) -> Result<Reclaimed, Self> {
        self.take_back().ok_or(self)
    }
}

impl KvSender for Session<Sending> {
    fn grant(&self) -> GrantRef {
        GrantRef { incarnation: self.link.incarnation, nonce: self.cell.id(), pages: None }
    }

    fn init(&mut self, num_pages: usize, aux: Option<AuxIndex>) -> Result<(), Backpressure<()>> {
        let session = self.cell.id();
        let command = Command::InitSender { session, num_pages, aux };
        self.link.submit(&self.cell, command).map_err(|_| Backpressure(()))
    }

    fn send(&mut self, chunk: Pages) -> Result<(), Backpressure<Pages>> {
        self.give(chunk, |session, chunk| Command::Send { session, chunk })
    }

    fn begin_chunk(&mut self, chunk: Pages) -> Result<ChunkId, Backpressure<Pages>> {
        let number = ChunkId(self.tokens);
        self.give(chunk, |session, chunk| Command::BeginChunk { session, chunk })?;
        Ok(number)
    }

    fn layers_final(&mut self, layers: FinalLayers) -> Result<(), Backpressure<FinalLayers>> {
        let FinalLayers { chunk, layers, fence } = layers;
        let command = Command::LayersFinal { session: self.cell.id(), chunk, layers: layers.clone() };
        let refused = self.link.submit_after(&self.cell, command, fence);
        refused.map_err(|(_, fence)| Backpressure(FinalLayers { chunk, layers, fence }))
    }
}

impl KvReceiver for Session<Receiving> {
    fn init(&mut self, pages: Pages, aux: Option<AuxIndex>) -> Result<(), Backpressure<Pages>> {
        self.give(pages, |session, pages| Command::InitReceiver { session, pages, aux })
    }
}

impl<Role> Drop for Session<Role> {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        self.link.abort(&self.cell);
        for token in self.cell.abandon() {
            self.link.add_orphan(token);
        }
        self.close();
    }
}

impl<Role> fmt::Debug for Session<Role> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, room, poll) = (self.cell.id(), self.cell.room(), self.cell.poll());
        f.debug_struct("Session").field("id", &id).field("room", room).field("poll", &poll).finish()
    }
}

/// Tokens come back in any order; this is the order in which they were given. Tokens own distinct
/// pages, so the first page names the token; empty ones have no place.
fn in_order(mut tokens: Vec<Pages>, given: &[u32]) -> Vec<Pages> {
    if tokens.len() > 1 {
        let mut places: Vec<(u32, usize)> =
            given.iter().enumerate().map(|(place, page)| (*page, place)).collect();
        places.sort_unstable();
        tokens.sort_by_cached_key(|token| {
            let first = token.list().runs().first()?.start;
            let at = places.binary_search_by_key(&first, |(page, _)| *page).ok()?;
            places.get(at).map(|(_, place)| *place)
        });
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::tests::{args, pages};
    use kv_core::{Cause, GroupItems, Incarnation, OpenError};

    fn link(max_sessions: usize, commands: usize) -> Arc<Link> {
        let incarnation = Incarnation::from_random(1);
        Arc::new(Link::new(args(), incarnation, max_sessions, commands).unwrap())
    }

    fn open(link: &Arc<Link>) -> Result<Sender, OpenError> {
        let command =
            |session, room| Command::OpenSender { session, room, receivers: 1, options: Default::default() };
        link.open(Room::from(3), command).map(|cell| Session::new(Arc::clone(link), cell))
    }

    /// Plays the worker for one command.
    fn take(link: &Link) -> (Arc<Cell>, Command) {
        let message = link.next_command().unwrap();
        (message.cell, message.command)
    }

    #[test]
    fn a_full_ring_returns_the_pages_and_counts_nothing_as_out() {
        let link = link(8, 2);
        let mut sender = open(&link).unwrap();
        sender.init(3, None).unwrap();
        assert_eq!(sender.send(pages(&[1, 2, 3])), Err(Backpressure(pages(&[1, 2, 3]))));
        assert_eq!(sender.init(3, None), Err(Backpressure(())));
        assert_eq!(open(&link).map(drop), Err(OpenError::Backpressure));
        let (cell, command) = take(&link);
        assert!(matches!(command, Command::OpenSender { .. }));
        assert!(matches!(take(&link).1, Command::InitSender { num_pages: 3, .. }));
        cell.set(KvPoll::Success, None);
        assert_eq!(sender.reclaim().ok(), Some(Pages::none()));
    }

    #[test]
    fn a_refused_send_does_not_hide_that_the_session_is_reclaimable() {
        let link = link(8, 1);
        let mut sender = open(&link).unwrap();
        sender.cell.set(KvPoll::Success, None);
        let refused = sender.send(pages(&[1]));
        assert!(refused.is_err());
        let mut changes = Vec::new();
        link.poll_set.drain(|change| changes.push(change.reclaimable));
        assert_eq!(changes, [true]);
    }

    #[test]
    fn aborting_works_with_a_full_ring_and_is_queued_once() {
        let link = link(8, 1);
        let mut sender = open(&link).unwrap();
        for _ in 0..3 {
            sender.abort();
        }
        drop(sender);
        assert_eq!(link.aborts_waiting(), 1);
        assert!(link.next_abort().is_some_and(|cell| cell.is_abort_wanted()));
    }

    #[test]
    fn pages_come_back_in_the_order_given_whatever_the_order_of_release() {
        let link = link(8, 8);
        let mut sender = open(&link).unwrap();
        let chunks: [&[u32]; 4] = [&[9, 10], &[1, 2], &[], &[5]];
        for chunk in chunks {
            sender.send(pages(chunk)).unwrap();
        }
        let (cell, _) = take(&link);
        let mut tokens: Vec<_> = (0..4).filter_map(|_| Token::from_command(take(&link).1)).collect();
        assert_eq!(tokens.len(), 4);
        cell.set(KvPoll::Success, None);
        while let Some(token) = tokens.pop() {
            sender = sender.reclaim().expect_err("tokens are out");
            link.give_back(&cell, token);
        }
        assert_eq!(sender.reclaim().ok(), Some(pages(&[9, 10, 1, 2, 5])));
        assert_eq!(link.take_orphans(), []);
    }

    #[test]
    fn a_dropped_session_is_aborted_and_loses_no_page() {
        let link = link(8, 8);
        let mut sender = open(&link).unwrap();
        sender.send(pages(&[1])).unwrap();
        sender.send(pages(&[2])).unwrap();
        let (cell, _) = take(&link);
        link.give_back(&cell, Token::from_command(take(&link).1).unwrap());
        drop(sender);
        assert!(cell.is_abort_wanted());
        assert_eq!((link.gauges().pages_orphaned, link.take_orphans()), (1, vec![pages(&[1])]));
        link.give_back(&cell, Token::from_command(take(&link).1).unwrap());
        assert_eq!((link.gauges().pages_orphaned, link.take_orphans()), (1, vec![pages(&[2])]));
        assert_eq!(link.gauges().pages_orphaned, 0);
    }

    fn groups(items: &[u32]) -> Groups {
        let mut groups = Groups::none();
        groups.push(GroupItems::new(2, pages(items))).unwrap();
        groups
    }

    #[test]
    fn items_of_state_groups_come_back_with_the_pages_or_to_the_manager() {
        for all in [true, false] {
            let link = link(8, 8);
            let mut sender = open(&link).unwrap();
            sender.give_groups(groups(&[3, 4])).unwrap();
            sender.send(pages(&[1])).unwrap();
            let (cell, _) = take(&link);
            let tokens: Vec<_> = (0..2).filter_map(|_| Token::from_command(take(&link).1)).collect();
            cell.set(KvPoll::Success, None);
            for token in tokens.into_iter().rev() {
                sender = sender.reclaim_all().expect_err("tokens are out");
                link.give_back(&cell, token);
            }
            if all {
                let back = Reclaimed { pages: pages(&[1]), groups: groups(&[3, 4]), skipped: vec![] };
                assert_eq!((sender.reclaim_all().ok(), link.take_orphan_groups()), (Some(back), vec![]));
            } else {
                assert_eq!(sender.reclaim().ok(), Some(pages(&[1])));
                assert_eq!(link.gauges().items_orphaned, 2);
                assert_eq!(link.take_orphan_groups(), [groups(&[3, 4])]);
            }
            assert_eq!(link.gauges().items_orphaned, 0);
        }
    }

    #[test]
    fn items_of_a_dropped_session_are_orphans_and_a_full_ring_returns_them() {
        let link = link(8, 2);
        let mut sender = open(&link).unwrap();
        sender.give_groups(groups(&[3])).unwrap();
        assert_eq!(sender.give_groups(groups(&[5])), Err(Backpressure(groups(&[5]))));
        let (cell, _) = take(&link);
        let token = Token::from_command(take(&link).1).unwrap();
        drop(sender);
        assert_eq!(link.take_orphan_groups(), []);
        link.give_back(&cell, token);
        assert_eq!(link.take_orphan_groups(), [groups(&[3])]);
    }

    #[test]
    fn a_session_counts_until_both_handle_and_worker_are_done() {
        let link = link(2, 8);
        let (first, _second) = (open(&link).unwrap(), open(&link).unwrap());
        assert_eq!(open(&link).map(drop), Err(OpenError::TooManySessions { open: 2, max: 2 }));
        let (cell, _) = take(&link);
        drop(first);
        assert_eq!(link.gauges().sessions_open, 2);
        link.leave(&cell, Side::Worker);
        assert_eq!(link.gauges().sessions_open, 1);
        assert!(open(&link).is_ok());
    }

    #[test]
    fn commands_that_meet_a_stopped_worker_fail_and_their_pages_are_free() {
        let link = link(8, 8);
        let mut sender = open(&link).unwrap();
        sender.send(pages(&[1])).unwrap();
        link.close();
        sender.send(pages(&[2])).unwrap();
        assert_eq!(sender.failure().map(|error| error.cause), Some(Cause::WorkerStopped));
        assert_eq!(sender.reclaim().ok(), Some(pages(&[1, 2])));
        assert_eq!(open(&link).map(drop), Err(OpenError::WorkerStopped));
        assert_eq!(link.gauges().sessions_open, 0);
    }
}
