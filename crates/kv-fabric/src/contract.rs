//! The [`Transport`] trait.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent, TransportWait,
    WriteFence,
};
use kv_host::{check, clock, random};

use crate::ffi::numa;
use crate::message::{Header, Immediate, Kind};
use crate::metadata::{Identity, Metadata, Place};
use crate::transfer::Transfer;
use crate::transport::FabricTransport;

/// How long a sleep may be while libfabric has no room, or has no descriptor to sleep on.
const RETRY: Duration = Duration::from_millis(1);

impl Transport for FabricTransport {
    fn name(&self) -> &'static str {
        "fabric"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        let memory = self.given.find(region)?;
        // Where this side chooses the keys, nobody can guess one.
        let (base, keys) = self.devices.register(&memory, u64::from_le_bytes(random()?))?;
        self.given.registered(Place::new(base, memory.len() as u64, keys, numa::node_of(&memory)));
        Ok(())
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.given.metadata()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        self.now = clock::now();
        self.open_way(peer, metadata)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let Ok(decoded) = Metadata::decode(metadata) else { return false };
        let identity = Identity::of(decoded.token, metadata);
        self.guests.get(from.0).is_some_and(|guest| guest.from == identity)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.now = clock::now();
        if let Some(id) = self.peers.remove(&peer) {
            self.leave(id);
        }
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        check::frame("frame.len", frame.len())?;
        let id = self.usable(peer)?;
        let way = self.ways.get_mut(&id).ok_or(TransportError::PeerGone)?;
        // Parked notify frames, which wait for room, go first.
        if !way.parked.is_empty() || way.frame_bytes + frame.len() > self.config.outbound_bytes {
            return Err(TransportError::WouldBlock);
        }
        way.push(Header { len: frame.len() as u32, ..Header::new(way.key, Kind::Frame) }, frame);
        self.stirred.insert(id);
        Ok(())
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if let Some(notify) = &post.notify {
            check::frame("notify.len", notify.len())?;
        }
        let id = self.usable(peer)?;
        let way = self.ways.get_mut(&id).ok_or(TransportError::PeerGone)?;
        let (ours, theirs) = (&self.given, &way.regions);
        check::descriptors(
            &post.descriptors,
            |region| ours.len_of(region),
            |region| theirs.get(region as usize).map(|place| place.len),
        )?;
        self.posts.check(post.id, self.config.max_posts)?;
        let transfer = self.posts.accept(Transfer::new(id, post, way.immediate >= Immediate::SURE));
        way.turns.push(transfer, &self.posts);
        self.stirred.insert(id);
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        self.now = clock::now();
        let Some(id) = self.posts.id_of(post) else { return };
        if !self.posts.get(id).is_some_and(Transfer::is_told) {
            self.give_up(id, TransportError::Cancelled);
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        let Some(id) = self.peers.get(&peer) else { return };
        if let Some(way) = self.ways.get_mut(id) {
            way.permitted = until;
            self.stirred.insert(*id);
        }
    }

    fn write_fence(&self, _peer: PeerId) -> WriteFence {
        WriteFence::AtDeath
    }

    fn poll(&mut self, _now: Time, events: &mut Vec<TransportEvent>) {
        self.now = clock::now();
        self.serve(Instant::now());
        self.posts.hand_over(events);
    }

    fn wait(&self) -> TransportWait {
        if !self.stirred.is_empty() || self.posts.events() > 0 {
            return TransportWait::Now;
        }
        let endpoints = || self.devices.all().map(|device| &device.endpoint);
        let descriptor = endpoints().all(|endpoint| endpoint.fd().is_some());
        if endpoints().any(|endpoint| endpoint.fd().is_some() && !endpoint.may_sleep()) {
            return TransportWait::Now;
        }
        let completions = endpoints().filter_map(|endpoint| endpoint.fd());
        let watch = completions.chain([self.watch.fd()]).map(|fd| fd.as_raw_fd()).collect();
        let receives = self.devices.all().all(|device| device.unreceived.is_empty());
        let waits = !self.blocked.is_empty() || !self.unanswered.is_empty() || !receives;
        let retry = (waits || !descriptor).then_some(RETRY);
        let timers = [self.timers.next(), self.keep_alive_at];
        let timer = timers.into_iter().flatten().min().map(|at| at.since(clock::now()));
        match retry.into_iter().chain(timer).min() {
            None => TransportWait::Readable(watch),
            Some(after) => TransportWait::ReadableOrAfter(watch, after),
        }
    }
}

impl Drop for FabricTransport {
    /// Sends the frames that were taken, awaits the slices under way, and says farewell to the peers with which none is
    /// left: some 0.8 s at most.
    fn drop(&mut self) {
        self.now = clock::now();
        self.take_leave();
    }
}

#[cfg(test)]
mod tests {
    use kv_core::Op;

    use super::*;
    use crate::pair::{PEER, both_until, connected, frames_of, post};
    use crate::transfer::Notify;
    use crate::way::WayId;

    /// A post of which no byte has moved, as the peer permits no write; its notify frame is put by hand among those that wait for
    /// room.
    fn parked() -> (WayId, [FabricTransport; 2]) {
        let (id, [(mut here, _), (there, _)]) = connected();
        here.ways.get_mut(&id).unwrap().immediate = 0;
        here.post(PEER, post(Op::Write, 4096, Some(b"parked"))).unwrap();
        let transfer = here.posts.id_of(PostId(1)).unwrap();
        let Notify::After(frame) = here.posts.get(transfer).unwrap().notify.clone() else {
            panic!("counted")
        };
        here.ways.get_mut(&id).unwrap().parked.push_back((transfer, frame));
        (id, [here, there])
    }

    /// What the peer hears, up to the frame "last".
    fn heard(here: &mut FabricTransport, there: &mut FabricTransport) -> Vec<Bytes> {
        here.send(PEER, Bytes::from_static(b"last")).unwrap();
        let (mut events, begun) = (Vec::new(), Instant::now());
        while frames_of(&events).last().is_none_or(|frame| frame != "last") {
            assert!(begun.elapsed() < Duration::from_secs(20), "{events:?}");
            here.poll(clock::now(), &mut Vec::new());
            there.poll(clock::now(), &mut events);
        }
        frames_of(&events)
    }

    #[test]
    fn no_frame_overtakes_the_notify_frame_of_a_post_that_waits_for_room() {
        let (id, [mut here, mut there]) = parked();
        assert_eq!(here.send(PEER, Bytes::from_static(b"later")), Err(TransportError::WouldBlock));
        here.stirred.insert(id);
        let begun = Instant::now();
        while !here.ways.get(&id).unwrap().parked.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it waits for ever");
            here.poll(clock::now(), &mut Vec::new());
        }
        assert_eq!(heard(&mut here, &mut there), ["parked", "last"]);
    }

    #[test]
    fn the_notify_frame_of_a_post_that_was_cancelled_while_it_waited_for_room_is_not_sent() {
        let (_, [mut here, mut there]) = parked();
        here.cancel(PostId(1));
        assert_eq!(heard(&mut here, &mut there), ["last"]);
    }

    #[test]
    fn a_post_that_was_there_before_its_permission_begins_when_the_permission_comes() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        here.post(PEER, post(Op::Write, 4096, None)).unwrap();
        both_until([&mut here, &mut there], "rest", |here, _, _| here.stirred.is_empty());
        here.permit(PEER, Time::MAX);
        assert!(matches!(here.wait(), TransportWait::Now));
        assert!(here.stirred.contains(&id));
        both_until([&mut here, &mut there], "the post", |_, _, events| !events.is_empty());
    }

    #[test]
    fn a_worker_sleeps_no_longer_than_what_waits_for_room_and_its_timers_allow() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        let sleep = |transport: &FabricTransport| match transport.wait() {
            TransportWait::ReadableOrAfter(watched, after) => {
                assert!(watched.contains(&transport.watch.fd().as_raw_fd()), "ends of processes wake nobody");
                Some(after)
            }
            TransportWait::Readable(_) => Some(Duration::MAX),
            TransportWait::Now => None,
        };
        both_until([&mut here, &mut there], "it sleeps until its next greeting", |here, _, _| {
            let greeting = RETRY * 2..=here.config.silence / 4;
            here.keep_alive_at.is_none() && sleep(here).is_some_and(|after| greeting.contains(&after))
        });
        here.blocked.insert(id);
        assert!(sleep(&here).is_none_or(|after| after <= RETRY));
        let (guest, _) = there.guests.all().next().unwrap();
        there.unanswered.clear();
        there.welcome_guest(guest);
        assert!(sleep(&there).is_none_or(|after| after <= RETRY));
    }

    #[test]
    fn the_notify_frame_of_a_post_waits_while_frames_fill_the_room() {
        let (id, [mut here, mut there]) = parked();
        here.ways.get_mut(&id).unwrap().frame_bytes = here.config.outbound_bytes;
        here.stirred.insert(id);
        here.poll(clock::now(), &mut Vec::new());
        let way = here.ways.get_mut(&id).unwrap();
        assert_eq!((way.parked.len(), way.outgoing.len()), (1, 0));
        way.frame_bytes = 0;
        here.stirred.insert(id);
        here.poll(clock::now(), &mut Vec::new());
        assert_eq!(heard(&mut here, &mut there), ["parked", "last"]);
    }
}
