//! Writes start only while their peer permits them.

use std::mem;

use kv_core::{Op, PeerId, PostId, Time};
use kv_host::clock;

use crate::connections::id::RemoteId;
use crate::connections::route::Route;
use crate::transfers::line::Length;
use crate::transfers::permission::Permission;
use crate::transfers::transfer::Made;
use crate::transport::NixlTransport;

impl NixlTransport {
    /// Takes a peer's new permission. Writes that waited for the permission stand in line again.
    pub(crate) fn permitted(&mut self, peer: PeerId, until: Time) {
        let Some(id) = self.peers.get(&peer).copied() else { return };
        self.permissions.insert(peer, Permission::told(until, clock::now()));
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        let held = mem::take(&mut remote.held);
        for post in held {
            match self.transfers.get(&post) {
                Some(transfer) if transfer.peer == peer => self.enqueue(id, post),
                Some(_) => self.hold(id, post),
                None => {}
            }
        }
    }

    /// Whether a request of these posts, all to one peer, may be started now.
    pub(crate) fn may_start(&mut self, id: RemoteId, op: Op, posts: &[PostId], weight: u64) -> bool {
        let Some(remote) = self.remotes.get_mut(&id) else { return false };
        if op == Op::Read || remote.route == Route::Storage {
            return true;
        }
        // It waits for those on their way.
        let weight = remote.underway.saturating_add(weight);
        let takes = remote.speed(op).at_slowest(weight);
        let peer = posts.first().and_then(|post| self.transfers.get(post)).map(|transfer| transfer.peer);
        let permission = peer.and_then(|peer| self.permissions.get(&peer));
        permission.is_some_and(|permission| permission.covers(clock::now(), takes))
    }

    /// Puts a request that was made back into its posts, which wait for the peer's permission.
    pub(crate) fn put_back(&mut self, id: RemoteId, length: Length, made: Made, posts: Vec<PostId>) {
        let mut made = Some(made);
        for post in posts {
            if let Some(transfer) = self.transfers.get_mut(&post) {
                match length {
                    Length::Short => transfer.rewind(),
                    Length::Long => made.take().into_iter().for_each(|made| transfer.ready.push_front(made)),
                }
            }
            self.hold(id, post);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_core::{Transport, TransportError, TransportEvent, TransportWait};

    use super::*;
    use crate::testing::{LEN, PEER, nixl, others, pass, until, whole, worker};

    fn posted(post: u64, result: Result<(), TransportError>) -> TransportEvent {
        TransportEvent::Posted { post: PostId(post), result }
    }

    #[test]
    fn writes_wait_for_permission_asleep_while_reads_pass_and_cancelled_ones_end() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, ours), (mut there, theirs)) = (worker(nixl), worker(nixl));
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        ours.write(0, &vec![7; LEN]).unwrap();
        here.post(PEER, whole(1, Op::Write)).unwrap();
        here.post(PEER, whole(2, Op::Write)).unwrap();
        let tens = Duration::from_millis(50);
        let asleep = |here: &NixlTransport| matches!(here.wait(), TransportWait::ReadableOrAfter(..));
        let events = until(&mut [&mut here, &mut there], "sleep", |here, _| asleep(here));
        assert_eq!(events, []);
        assert_eq!(pass(&mut [&mut here, &mut there], tens), []);
        assert!(asleep(&here), "{:?}", here.wait());
        here.permit(PEER, clock::now());
        assert_eq!(pass(&mut [&mut here, &mut there], tens), []);
        here.cancel(PostId(2));
        assert_eq!(pass(&mut [&mut here, &mut there], tens), [posted(2, Err(TransportError::Cancelled))]);
        assert_eq!(here.remotes.values().map(|remote| remote.held.len()).sum::<usize>(), 1);
        assert_eq!(others(&theirs, 0), 0, "written without permission");

        here.post(PEER, whole(3, Op::Read)).unwrap();
        let events = until(&mut [&mut here, &mut there], "a read", |_, events| !events.is_empty());
        assert_eq!((events, others(&ours, 0)), (vec![posted(3, Ok(()))], 0));
        ours.write(0, &vec![7; LEN]).unwrap();
        here.permit(PEER, Time::MAX);
        let events = until(&mut [&mut here, &mut there], "a write", |_, events| !events.is_empty());
        assert_eq!((events, others(&theirs, 7)), (vec![posted(1, Ok(()))], 0));

        // A connection of a new life has no permission of an old one.
        here.disconnect(PEER);
        until(&mut [&mut here, &mut there], "the end", |here, _| here.remotes.is_empty());
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        ours.write(0, &vec![8; LEN]).unwrap();
        here.post(PEER, whole(4, Op::Write)).unwrap();
        assert_eq!(pass(&mut [&mut here, &mut there], tens), []);
        assert_eq!(others(&theirs, 7), 0, "written without permission");
    }

    #[test]
    fn no_slice_begins_after_the_permission_and_the_rest_follows_its_renewal() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, ours), (mut there, theirs)) = (worker(nixl), worker(nixl));
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        ours.write(0, &vec![7; LEN]).unwrap();
        here.post(PEER, whole(1, Op::Write)).unwrap();
        // Two slices fill the way, for nobody takes them; the others are made, and wait. On a busy machine a
        // permission may end before anything has begun.
        while here.stats().requests == 0 {
            let end = clock::now() + Duration::from_millis(400);
            here.permit(PEER, end);
            until(&mut [&mut here], "the end of the permission", |_, _| clock::now() > end);
        }
        let begun = here.stats().requests;
        assert_eq!(pass(&mut [&mut here, &mut there], Duration::from_millis(200)), []);
        assert_eq!(here.stats().requests, begun, "a slice was begun after the permission");
        let missing = others(&theirs, 7);
        assert!(missing > 0 && missing < LEN, "{missing} of {LEN} bytes are missing");
        here.permit(PEER, Time::MAX);
        let events = until(&mut [&mut here, &mut there], "a write", |_, events| !events.is_empty());
        assert_eq!((events, others(&theirs, 7)), (vec![posted(1, Ok(()))], 0));
    }
}
