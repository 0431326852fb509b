//! Posts that were accepted and have not ended, and the events for the owner, in order.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use kv_core::in_order::InOrder;
use kv_core::{Op, Post, PostId, TransportError, TransportEvent};

use crate::link::LinkId;
use crate::transfer::Transfer;

/// Posts beyond so many bytes, accepted one upon the other, go past the processor's caches: these do not hold the bytes
/// until somebody has looked at all of them. In bursts of twice as many, copying all bytes and then reading them on
/// another core took less time than through the caches, in pieces of 8 KiB and in larger ones.
const CACHED: u64 = 16 << 20;

/// Accepted posts, and events that the owner has not been given yet. A post ends once, and its event comes
/// before the event that its peer is gone.
#[derive(Debug, Default)]
pub(crate) struct Posts {
    transfers: InOrder<PostId, Transfer>,
    /// Posts with bytes to copy, the next one first. Ids of ended posts are skipped, and of those in place.
    run: VecDeque<PostId>,
    events: Vec<TransportEvent>,
    completed: u64,
    /// Bytes of the posts that were accepted since there was none.
    burst: u64,
}

impl Posts {
    /// Refuses a post if `max` posts have not ended or their ends have not been told, and a post under the id
    /// of another one that has not ended.
    pub(crate) fn check(&self, post: PostId, max: usize) -> Result<(), TransportError> {
        if self.transfers.len() + self.events.len() >= max {
            return Err(TransportError::WouldBlock);
        }
        if self.transfers.contains(post) {
            return Err(TransportError::Unsupported("a post under the id of one that has not ended"));
        }
        Ok(())
    }

    /// Accepts a post that has been checked.
    pub(crate) fn accept(&mut self, link: LinkId, post: Post) {
        let before = if self.transfers.is_empty() { 0 } else { self.burst };
        let id = post.id;
        let mut transfer = Transfer::new(link, post);
        self.burst = before.saturating_add(transfer.bytes);
        transfer.streams = self.burst > CACHED;
        self.transfers.insert(id, transfer);
    }

    /// Puts posts into the line of those whose bytes are copied.
    pub(crate) fn run(&mut self, posts: impl IntoIterator<Item = PostId>) {
        self.run.extend(posts);
    }

    /// The link of the only post, if it is a write of so many bytes of which nothing is copied, and which a frame follows.
    pub(crate) fn lone_write(&self, bytes: RangeInclusive<u64>) -> Option<LinkId> {
        let mut all = self.transfers.iter();
        let (Some((_, only)), None) = (all.next(), all.next()) else { return None };
        let is_meant = only.op() == Op::Write && only.notify.is_some() && bytes.contains(&only.bytes);
        (is_meant && only.is_untouched()).then_some(only.link)
    }

    /// How many posts wait for their turn, some of which may have ended.
    pub(crate) fn in_line(&self) -> usize {
        self.run.len()
    }

    /// Takes the next post with bytes to copy out of the line.
    pub(crate) fn next(&mut self) -> Option<(PostId, &mut Transfer)> {
        while let Some(id) = self.run.pop_front() {
            // Asked twice: the borrow checker does not see that nothing is returned otherwise. An id that was cancelled
            // and is used again can be in line twice.
            if self.transfers.get(id).is_some_and(|transfer| !transfer.is_in_place) {
                return self.transfers.get_mut(id).map(|transfer| (id, transfer));
            }
        }
        None
    }

    /// A post that has not ended.
    pub(crate) fn get_mut(&mut self, post: PostId) -> Option<&mut Transfer> {
        self.transfers.get_mut(post)
    }

    /// Ends a post with its event.
    pub(crate) fn end(&mut self, post: PostId, result: Result<(), TransportError>) {
        if self.transfers.remove(post).is_some() {
            self.completed += u64::from(result.is_ok());
            self.events.push(TransportEvent::Posted { post, result });
        }
    }

    /// Ends all posts of a link with [`TransportError::PeerGone`]: this side copies no more for the link.
    pub(crate) fn end_of(&mut self, link: LinkId) {
        let of_link = self.transfers.iter().filter(|(_, transfer)| transfer.link == link);
        let posts: Vec<PostId> = of_link.map(|(post, _)| post).collect();
        for post in posts {
            self.end(post, Err(TransportError::PeerGone));
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

    /// True if a post has bytes to copy.
    pub(crate) fn is_copying(&self) -> bool {
        !self.run.is_empty()
    }

    /// True if a post has bytes to copy, or there is an event for the owner.
    pub(crate) fn is_busy(&self) -> bool {
        !self.run.is_empty() || !self.events.is_empty()
    }

    /// How many posts have ended without an error.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// True if every post that was accepted has ended.
    pub(crate) fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use kv_core::Descriptor;

    use super::*;

    fn post(id: u64) -> Post {
        Post { id: PostId(id), op: Op::Write, descriptors: Vec::new(), notify: None }
    }

    #[test]
    fn posts_go_past_the_caches_once_a_burst_is_longer_than_these_hold() {
        let mut posts = Posts::default();
        let third = Descriptor {
            local_region: 0,
            remote_region: 0,
            local_offset: 0,
            remote_offset: 0,
            len: CACHED / 3,
        };
        let mut streams = |id, pieces| {
            posts.accept(7, Post { descriptors: vec![third; pieces], ..post(id) });
            let streams = posts.get_mut(PostId(id)).map(|transfer| transfer.streams);
            posts.end(PostId(id - 1), Ok(()));
            streams
        };
        assert_eq!(
            [(1, 2), (2, 1), (3, 1)].map(|(id, pieces)| streams(id, pieces)),
            [false, false, true].map(Some)
        );
        assert_eq!([streams(9, 4), streams(10, 0)], [Some(true); 2]);
        posts.end_of(7);
        posts.accept(7, post(11));
        assert!(!posts.get_mut(PostId(11)).unwrap().streams, "a burst ends with its last post");
    }

    #[test]
    fn a_post_ends_once_and_before_its_peer_is_reported_gone() {
        let mut posts = Posts::default();
        for (link, id) in [(7, 3), (8, 2), (7, 1)] {
            posts.accept(link, post(id));
            posts.run([PostId(id)]);
        }
        assert!(posts.check(PostId(4), 3).is_err_and(|error| error == TransportError::WouldBlock));
        assert!(matches!(posts.check(PostId(3), 4), Err(TransportError::Unsupported(_))));
        assert_eq!(posts.check(PostId(4), 4), Ok(()));
        posts.end(PostId(3), Ok(()));
        posts.end_of(7);
        posts.end(PostId(1), Ok(()));
        posts.tell(TransportEvent::Revoked { peer: kv_core::PeerId(1) });
        assert!(posts.check(PostId(4), 4).is_err(), "three ends have not been told, and one is to come");
        let mut events = Vec::new();
        posts.hand_over(&mut events);
        let ended = |id, result| TransportEvent::Posted { post: PostId(id), result };
        let revoked = TransportEvent::Revoked { peer: kv_core::PeerId(1) };
        assert_eq!(events, [ended(3, Ok(())), ended(1, Err(TransportError::PeerGone)), revoked]);
        assert_eq!(posts.completed(), 1);
        // Posts that have ended are passed over.
        assert_eq!(posts.next().map(|(id, _)| id), Some(PostId(2)));
        assert!(posts.next().is_none());
    }
}
