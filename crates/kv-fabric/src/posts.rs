//! Posts that were accepted and have not ended, and the events for the owner, in order.

use std::collections::{BTreeMap, HashMap};

use kv_core::{Post, PostId, TransportError, TransportEvent};

use crate::transfer::Transfer;

/// Number of an accepted post; never used again, unlike the owner's [`PostId`].
pub(crate) type TransferId = u64;

/// Accepted posts, and events that the owner has not been given yet. A post ends once, and its event comes
/// before the event that its peer is gone.
#[derive(Debug, Default)]
pub(crate) struct Posts {
    transfers: BTreeMap<TransferId, Transfer>,
    by_post: HashMap<PostId, TransferId>,
    next: TransferId,
    events: Vec<TransportEvent>,
    completed: u64,
}

impl Posts {
    /// Refuses a post if `max` posts have not ended or their ends have not been told, and a post under the id
    /// of another one that has not ended.
    pub(crate) fn check(&self, post: PostId, max: usize) -> Result<(), TransportError> {
        if self.transfers.len() + self.events.len() >= max {
            return Err(TransportError::WouldBlock);
        }
        if self.by_post.contains_key(&post) {
            return Err(TransportError::Unsupported("a post under the id of one that has not ended"));
        }
        Ok(())
    }

    /// Accepts a post that has been checked. `counted` says whether the peer can count writes.
    pub(crate) fn accept(&mut self, way: u64, post: Post, counted: bool) -> TransferId {
        self.next += 1;
        self.by_post.insert(post.id, self.next);
        self.transfers.insert(self.next, Transfer::new(way, post, counted));
        self.next
    }

    /// A post that has not ended, by the owner's id.
    pub(crate) fn id_of(&self, post: PostId) -> Option<TransferId> {
        self.by_post.get(&post).copied()
    }

    /// A post that has not ended.
    pub(crate) fn get(&self, id: TransferId) -> Option<&Transfer> {
        self.transfers.get(&id)
    }

    /// A post that has not ended.
    pub(crate) fn get_mut(&mut self, id: TransferId) -> Option<&mut Transfer> {
        self.transfers.get_mut(&id)
    }

    /// The posts of a way, oldest first.
    pub(crate) fn of_way(&self, way: u64) -> Vec<TransferId> {
        self.transfers.iter().filter(|(_, transfer)| transfer.way == way).map(|(id, _)| *id).collect()
    }

    /// Ends a post with its event.
    pub(crate) fn end(&mut self, id: TransferId, result: Result<(), TransportError>) {
        if let Some(transfer) = self.transfers.remove(&id) {
            self.by_post.remove(&transfer.post);
            self.completed += u64::from(result.is_ok());
            self.events.push(TransportEvent::Posted { post: transfer.post, result });
        }
    }

    /// Adds an event for the owner.
    pub(crate) fn tell(&mut self, event: TransportEvent) {
        self.events.push(event);
    }

    /// Appends the events for the owner to `events`.
    pub(crate) fn hand_over(&mut self, events: &mut Vec<TransportEvent>) {
        events.append(&mut self.events);
    }

    /// Events for the owner.
    pub(crate) fn events(&self) -> usize {
        self.events.len()
    }

    /// Posts that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.transfers.len()
    }

    /// How many posts have ended without an error.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }
}
