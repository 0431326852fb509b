//! Permission to write: a peer says until when, and the clock is read before each slice.

use std::time::Duration;

use kv_core::{Op, PeerId, PostId, Time};
use rustix::time::{ClockId, clock_gettime};

use crate::plane::NixlPlane;
use crate::remote::{Length, RemoteId};
use crate::transfer::Made;
use crate::transport::Transport;

/// What a peer has allowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permission {
    until: Time,
    /// No slice is expected to take longer than this: half of what was left when the peer's word came.
    /// Else one long stop of either side would be taken for the speed of the way, and forbid every
    /// write from then on.
    longest: Duration,
}

impl Permission {
    /// Told at this moment.
    pub(crate) fn told(until: Time, now: Time) -> Permission {
        Permission { until, longest: until.since(now) / 2 }
    }

    /// True if a write that takes so long ends within it.
    fn covers(self, now: Time, takes: Duration) -> bool {
        now + takes.min(self.longest) < self.until
    }
}

/// The clock that permissions are told in: it counts while the host sleeps.
pub(crate) fn boottime() -> Time {
    let now = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    Time::ZERO + now
}

impl NixlPlane {
    /// A peer's word. What waited for it stands in line again.
    pub(crate) fn permitted(&mut self, peer: PeerId, until: Time) {
        let Some(id) = self.peers.get(&peer).copied() else { return };
        self.permissions.insert(peer, Permission::told(until, boottime()));
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        let held = std::mem::take(&mut remote.held);
        for post in held {
            match self.transfers.get(&post) {
                Some(transfer) if transfer.peer == peer => self.enqueue(id, post),
                Some(_) => self.hold(id, post),
                None => {}
            }
        }
        self.pace.stir();
    }

    /// Whether a request of these posts, all of one peer, may be started at this moment.
    pub(crate) fn may_start(&mut self, id: RemoteId, op: Op, posts: &[PostId], weight: u64) -> bool {
        let Some(remote) = self.remotes.get_mut(&id) else { return false };
        if op == Op::Read || remote.transport == Transport::Storage {
            return true;
        }
        // It waits for those on their way.
        let weight = remote.underway.saturating_add(weight);
        let takes = remote.speed(op).at_slowest(weight);
        let peer = posts.first().and_then(|post| self.transfers.get(post)).map(|transfer| transfer.peer);
        let permission = peer.and_then(|peer| self.permissions.get(&peer));
        permission.is_some_and(|permission| permission.covers(boottime(), takes))
    }

    /// Puts a request that was made back into its posts, which wait for the peer's word.
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

    fn hold(&mut self, id: RemoteId, post: PostId) {
        if let Some(remote) = self.remotes.get_mut(&id) {
            remote.held.push_back(post);
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{Plane, PlaneError, PlaneEvent, PlaneWait};

    use super::*;
    use crate::testing::{LEN, PEER, nixl, others, pass, until, whole, worker};

    fn posted(post: u64, result: Result<(), PlaneError>) -> PlaneEvent {
        PlaneEvent::Posted { post: PostId(post), result }
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
        let asleep = |here: &NixlPlane| matches!(here.wait(), PlaneWait::ReadableOrAfter(..));
        let events = until(&mut [&mut here, &mut there], "sleep", |here, _| asleep(here));
        assert_eq!(events, []);
        assert_eq!(pass(&mut [&mut here, &mut there], tens), []);
        assert!(asleep(&here), "{:?}", here.wait());
        here.permit(PEER, boottime());
        assert_eq!(pass(&mut [&mut here, &mut there], tens), []);
        here.cancel(PostId(2));
        assert_eq!(pass(&mut [&mut here, &mut there], tens), [posted(2, Err(PlaneError::Cancelled))]);
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
        let end = boottime() + Duration::from_millis(400);
        here.permit(PEER, end);
        here.post(PEER, whole(1, Op::Write)).unwrap();
        // Two slices fill the way, for nobody takes them; the others are made, and wait.
        until(&mut [&mut here], "the end of the permission", |_, _| boottime() > end);
        let begun = here.stats().requests;
        assert_eq!(pass(&mut [&mut here, &mut there], Duration::from_millis(200)), []);
        assert_eq!(here.stats().requests, begun, "a slice was begun after the permission");
        let missing = others(&theirs, 7);
        assert!(missing > 0 && missing < LEN, "{missing} of {LEN} bytes are missing");
        here.permit(PEER, Time::MAX);
        let events = until(&mut [&mut here, &mut there], "a write", |_, events| !events.is_empty());
        assert_eq!((events, others(&theirs, 7)), (vec![posted(1, Ok(()))], 0));
    }

    #[test]
    fn no_write_begins_that_may_outlast_its_permission() {
        let second = Duration::from_secs(1);
        let now = Time::ZERO + 100 * second;
        let permission = Permission::told(now + 10 * second, now);
        assert!(permission.covers(now, 4 * second));
        assert!(!permission.covers(now + 6 * second, 4 * second), "it would end with it");
        assert!(!permission.covers(now + 10 * second, Duration::ZERO));
        assert!(!permission.covers(now + 20 * second, Duration::ZERO));
        assert!(permission.covers(now, 60 * second), "a stop is not taken for a speed");
        assert!(!permission.covers(now + 5 * second, 60 * second));
        assert!(!Permission::told(now, now + second).covers(now + second, Duration::ZERO), "it had ended");
        assert!(Permission::told(Time::MAX, now).covers(now, Duration::MAX));
    }

    #[test]
    fn the_clock_is_the_one_that_counts_while_the_host_sleeps() {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        assert!((boottime().since(Time::ZERO).as_secs_f64() - uptime).abs() < 5.0);
    }
}
