//! [`Turns`]: of which post the next slice to a peer is.

use std::collections::VecDeque;

use kv_core::Op;

use crate::posts::{OfWay, Posts, TransferId};

/// How many turns of posts that have ended may wait, beside as many as there are posts.
const SPARE: usize = 64;

/// The posts of one way that have slices to be begun: writes and reads take turns, and so do the posts of each
/// direction. A turn is one slice.
///
/// A post may end before its turn comes. No line keeps many turns of such posts: as long as a peer permits no writes,
/// nothing else takes the turns of cancelled writes away.
#[derive(Debug, Default)]
pub struct Turns {
    writes: VecDeque<TransferId>,
    reads: VecDeque<TransferId>,
    /// True if a read is next where both wait.
    reads_next: bool,
}

impl Turns {
    /// Gives a post the last turn of its direction, if the post has slices to be begun.
    pub fn push<T: OfWay>(&mut self, id: TransferId, posts: &Posts<T>) {
        let Some(post) = posts.get(id).filter(|post| post.has_more()) else { return };
        let line = self.line(post.op());
        if line.len() > 2 * posts.open() + SPARE {
            line.retain(|id| posts.get(*id).is_some_and(OfWay::has_more));
        }
        line.push_back(id);
    }

    /// Gives a post the first turn of its direction: its slice could not be begun, or has to be sent again.
    pub fn put_back(&mut self, id: TransferId, op: Op) {
        self.line(op).push_front(id);
    }

    /// Takes the next turn, without those of posts that have nothing to begin any more. Without `may_write`, the
    /// writes keep their turns.
    pub fn next<T: OfWay>(&mut self, posts: &Posts<T>, may_write: bool) -> Option<TransferId> {
        loop {
            let write = may_write && !self.writes.is_empty() && (!self.reads_next || self.reads.is_empty());
            let id = self.line(if write { Op::Write } else { Op::Read }).pop_front()?;
            if posts.get(id).is_some_and(OfWay::has_more) {
                return Some(id);
            }
        }
    }

    /// A slice of the post that had its turn was begun: the other direction is next, and the post gets another
    /// turn if it has more slices.
    pub fn begun<T: OfWay>(&mut self, id: TransferId, posts: &Posts<T>) {
        self.reads_next = posts.get(id).is_some_and(|post| post.op() == Op::Write);
        self.push(id, posts);
    }

    /// True if no post waits.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.reads.is_empty()
    }

    /// How many turns wait, of both directions.
    pub fn len(&self) -> usize {
        self.writes.len() + self.reads.len()
    }

    /// Takes all turns away: nothing more is begun.
    pub fn clear(&mut self) {
        self.writes.clear();
        self.reads.clear();
    }

    fn line(&mut self, op: Op) -> &mut VecDeque<TransferId> {
        match op {
            Op::Write => &mut self.writes,
            Op::Read => &mut self.reads,
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{PostId, TransportError};

    use super::*;

    struct Transfer {
        post: PostId,
        op: Op,
        slices: usize,
    }

    impl OfWay for Transfer {
        fn post(&self) -> PostId {
            self.post
        }

        fn way(&self) -> u64 {
            1
        }

        fn op(&self) -> Op {
            self.op
        }

        fn has_more(&self) -> bool {
            self.slices > 0
        }
    }

    #[derive(Default)]
    struct Way {
        posts: Posts<Transfer>,
        turns: Turns,
        last: u64,
    }

    impl Way {
        fn post(&mut self, op: Op, slices: usize) -> TransferId {
            self.last += 1;
            let id = self.posts.accept(Transfer { post: PostId(self.last), op, slices });
            self.turns.push(id, &self.posts);
            id
        }

        fn cancel(&mut self, id: TransferId) {
            self.posts.end(id, Err(TransportError::Cancelled));
        }

        /// Begins slices until none is next; whose they were.
        fn begin_all(&mut self, may_write: bool) -> Vec<TransferId> {
            let mut begun = Vec::new();
            while let Some(id) = self.turns.next(&self.posts, may_write) {
                self.posts.get_mut(id).unwrap().slices -= 1;
                self.turns.begun(id, &self.posts);
                begun.push(id);
            }
            begun
        }
    }

    #[test]
    fn writes_and_reads_take_turns_and_so_do_the_posts_of_each_direction() {
        let mut way = Way::default();
        let [w, x] = [3, 1].map(|slices| way.post(Op::Write, slices));
        let [r, s] = [4, 2].map(|slices| way.post(Op::Read, slices));
        let none = way.post(Op::Read, 0);
        assert_eq!(way.begin_all(true), [w, r, x, s, w, r, w, s, r, r], "{none} has nothing to begin");
        assert!(way.turns.is_empty());
    }

    #[test]
    fn writes_wait_for_permission_in_their_order_while_reads_go_on() {
        let mut way = Way::default();
        let [w, x] = [2, 1].map(|slices| way.post(Op::Write, slices));
        let r = way.post(Op::Read, 3);
        assert_eq!(way.begin_all(false), [r, r, r]);
        assert_eq!(way.begin_all(false), []);
        let s = way.post(Op::Read, 1);
        assert_eq!(way.begin_all(true), [w, s, x, w]);
    }

    #[test]
    fn a_post_that_was_put_back_is_next_and_the_other_direction_gets_no_turn_before_it() {
        let mut way = Way::default();
        let [w, x] = [1, 1].map(|slices| way.post(Op::Write, slices));
        let r = way.post(Op::Read, 1);
        for _ in 0..3 {
            assert_eq!(way.turns.next(&way.posts, true), Some(w));
            way.turns.put_back(w, Op::Write);
        }
        assert_eq!(way.begin_all(true), [w, r, x]);
    }

    /// Otherwise a worker grows by each post that it cancels.
    #[test]
    fn cancelled_posts_grow_no_line_and_take_no_turn() {
        for op in [Op::Write, Op::Read] {
            let mut way = Way::default();
            let mut kept = Vec::new();
            for number in 0..100_000 {
                let id = way.post(op, 1);
                let (waiting, open) = (way.turns.len(), way.posts.open());
                assert!(waiting <= 2 * open + SPARE + 1, "{waiting} turns wait for {open} posts");
                if number % 1000 == 0 {
                    kept.push(id);
                } else {
                    way.cancel(id);
                }
            }
            assert_eq!(way.begin_all(true), kept, "{op:?}");
        }
    }

    #[test]
    fn nothing_is_next_after_all_turns_were_taken_away() {
        let mut way = Way::default();
        for op in [Op::Write, Op::Read] {
            way.post(op, 1);
        }
        assert_eq!(way.turns.len(), 2);
        way.turns.clear();
        assert_eq!((way.turns.len(), way.begin_all(true)), (0, vec![]));
    }
}
