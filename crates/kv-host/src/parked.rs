//! [`Parked`]: notify frames that wait for room in a connection after the bytes of their posts have moved.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_core::PostId;

/// Posts of one connection whose bytes are in place, and for whose notify frames the connection has had no
/// room yet, oldest first. A post ends once its notify frame is on its way. Frames that the transport is
/// asked to send meanwhile wait behind the parked ones.
#[derive(Debug, Default)]
pub struct Parked {
    posts: VecDeque<(PostId, Bytes)>,
}

impl Parked {
    /// Adds a post and its notify frame at the end.
    pub fn push(&mut self, post: PostId, notify: Bytes) {
        self.posts.push_back((post, notify));
    }

    /// Takes the oldest post and its frame if `has_room` returns true for the length of the frame, in bytes.
    pub fn pop(&mut self, has_room: impl FnOnce(usize) -> bool) -> Option<(PostId, Bytes)> {
        let (_, notify) = self.posts.front()?;
        if has_room(notify.len()) { self.posts.pop_front() } else { None }
    }

    /// Drops the frame of a post that was cancelled.
    pub fn cancel(&mut self, post: PostId) {
        self.posts.retain(|(parked, _)| *parked != post);
    }

    /// Drops all frames: the connection has ended.
    pub fn clear(&mut self) {
        self.posts.clear();
    }

    /// True if no post waits.
    pub fn is_empty(&self) -> bool {
        self.posts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posts_leave_in_order_while_there_is_room_and_cancelled_ones_never() {
        let mut parked = Parked::default();
        for (post, len) in [(1, 10), (2, 20), (3, 30), (4, 1)] {
            parked.push(PostId(post), Bytes::from(vec![post as u8; len]));
        }
        let mut room = 15;
        let mut take = |parked: &mut Parked, more: usize| {
            room += more;
            let taken = parked.pop(|len| len <= room);
            room -= taken.as_ref().map_or(0, |(_, notify)| notify.len());
            taken.map(|(post, notify)| (post.0, notify.len(), notify[0]))
        };
        assert_eq!(take(&mut parked, 0), Some((1, 10, 1)));
        assert_eq!(take(&mut parked, 0), None, "the fourth would fit, and waits for the second");
        parked.cancel(PostId(3));
        assert_eq!(take(&mut parked, 15), Some((2, 20, 2)));
        assert!(!parked.is_empty());
        assert_eq!(take(&mut parked, 1), Some((4, 1, 4)));
        assert!(parked.is_empty());
        parked.push(PostId(5), Bytes::new());
        parked.clear();
        assert_eq!(parked.pop(|_| true), None);
    }
}
