//! Posts that were accepted and have not ended, and the events for the owner, in order: for transports whose posts
//! belong to ways to peers.

use std::collections::{BTreeMap, HashMap};

use kv_core::{Op, PostId, TransportError, TransportEvent};

/// Number of an accepted post; never used again, unlike the owner's [`PostId`].
pub type TransferId = u64;

/// What a transport keeps of a post until the post has ended.
pub trait OfWay {
    /// The owner's id of the post.
    fn post(&self) -> PostId;

    /// The transport's number of the way to the peer.
    fn way(&self) -> u64;

    /// The direction in which the bytes move.
    fn op(&self) -> Op;

    /// True if there is a slice to be begun: never again once the post was cancelled or has failed.
    fn has_more(&self) -> bool;
}

/// Accepted posts, and events that the owner has not been given yet. A post ends once, and its event comes
/// before the event that its peer is gone.
#[derive(Debug)]
pub struct Posts<T> {
    transfers: BTreeMap<TransferId, T>,
    by_post: HashMap<PostId, TransferId>,
    next: TransferId,
    events: Vec<TransportEvent>,
    completed: u64,
}

impl<T> Default for Posts<T> {
    fn default() -> Posts<T> {
        Posts {
            transfers: BTreeMap::new(),
            by_post: HashMap::new(),
            next: 0,
            events: Vec::new(),
            completed: 0,
        }
    }
}

impl<T: OfWay> Posts<T> {
    /// Refuses a post if `max` posts have not ended or their ends have not been told, and a post under the id
    /// of another one that has not ended.
    ///
    /// # Errors
    ///
    /// [`TransportError::WouldBlock`] for too many posts, [`TransportError::Unsupported`] for an id in use.
    pub fn check(&self, post: PostId, max: usize) -> Result<(), TransportError> {
        if self.transfers.len() + self.events.len() >= max {
            return Err(TransportError::WouldBlock);
        }
        if self.by_post.contains_key(&post) {
            return Err(TransportError::Unsupported("a post under the id of one that has not ended"));
        }
        Ok(())
    }

    /// Accepts a post that has been checked.
    pub fn accept(&mut self, transfer: T) -> TransferId {
        self.next += 1;
        self.by_post.insert(transfer.post(), self.next);
        self.transfers.insert(self.next, transfer);
        self.next
    }

    /// A post that has not ended, by the owner's id.
    pub fn id_of(&self, post: PostId) -> Option<TransferId> {
        self.by_post.get(&post).copied()
    }

    /// A post that has not ended.
    pub fn get(&self, id: TransferId) -> Option<&T> {
        self.transfers.get(&id)
    }

    /// A post that has not ended.
    pub fn get_mut(&mut self, id: TransferId) -> Option<&mut T> {
        self.transfers.get_mut(&id)
    }

    /// The posts of a way, oldest first.
    pub fn of_way(&self, way: u64) -> Vec<TransferId> {
        self.transfers.iter().filter(|(_, transfer)| transfer.way() == way).map(|(id, _)| *id).collect()
    }

    /// Ends a post with its event.
    pub fn end(&mut self, id: TransferId, result: Result<(), TransportError>) {
        if let Some(transfer) = self.transfers.remove(&id) {
            let post = transfer.post();
            self.by_post.remove(&post);
            self.completed += u64::from(result.is_ok());
            self.events.push(TransportEvent::Posted { post, result });
        }
    }

    /// Adds an event for the owner.
    pub fn tell(&mut self, event: TransportEvent) {
        self.events.push(event);
    }

    /// Appends the events for the owner to `events`.
    pub fn hand_over(&mut self, events: &mut Vec<TransportEvent>) {
        events.append(&mut self.events);
    }

    /// How many events the owner has not been given yet.
    pub fn events(&self) -> usize {
        self.events.len()
    }

    /// How many posts have not ended.
    pub fn open(&self) -> usize {
        self.transfers.len()
    }

    /// How many posts have ended without an error.
    pub fn completed(&self) -> u64 {
        self.completed
    }
}
