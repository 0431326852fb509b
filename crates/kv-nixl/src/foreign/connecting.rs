//! Opening the way to a foreign agent.

use std::time::Instant;

use bytes::Bytes;
use kv_core::{MAX_REGIONS, MemoryKind, PeerId, PlaneError};
use kv_host::Life;

use crate::agent::name::agent_name;
use crate::connections::id::RemoteId;
use crate::connections::remote::{Remote, Stage};
use crate::error::ForeignError;
use crate::foreign::agent_metadata::{AgentMetadata, Registered};
use crate::notifications::allowance::Allowance;
use crate::notifications::inbox::RawNotification;
use crate::notifications::speech::Speech;
use crate::plane::NixlPlane;
use crate::regions::place::Place;

/// A range of a foreign agent's memory, as its side channel describes it: what
/// [`Desc::remote_region`](kv_core::Desc::remote_region) counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ForeignRegion {
    /// The address of its first byte, in the agent's process.
    pub addr: u64,
    /// Bytes. The agent must have registered the whole range in one piece.
    pub len: u64,
    /// Bytes from the beginning of an item (a page of a layer, say) to that of the next one: descriptors
    /// of such items are cheaper. Zero, if there are no items.
    pub item_len: u64,
    /// The kind of memory: [`MemoryKind::Dram`] or [`MemoryKind::Vram`].
    pub memory: MemoryKind,
    /// The device, as the agent gave it to NIXL.
    pub device: u64,
}

impl NixlPlane {
    /// The name of our agent, which foreign agents address.
    pub fn agent_name(&self) -> String {
        agent_name(self.token)
    }

    /// The metadata of our agent as NIXL writes it (what `get_agent_metadata` returns in Python), for
    /// the side channel of a foreign agent. From the first call on, our memory does not change any more.
    pub fn agent_metadata(&self) -> Result<Bytes, PlaneError> {
        self.own_agent_metadata()
    }

    /// Opens the way to a foreign agent whose metadata came through its side channel, to these regions of
    /// its memory, at most [`MAX_REGIONS`]. Done again for a connected peer, this does nothing.
    ///
    /// On an error nothing is connected, and NIXL has seen nothing of metadata that is not what NIXL
    /// writes.
    pub fn connect_foreign(
        &mut self,
        peer: PeerId,
        metadata: &[u8],
        regions: &[ForeignRegion],
    ) -> Result<(), ForeignError> {
        // As with our own peers: what we registered may be part of what the agent needs.
        self.own_agent_metadata()?;
        let agent = AgentMetadata::parse(metadata)?;
        let places = self.places_of(&agent, regions)?;
        if let Some(id) = self.foreign_known(peer, agent.name, &places)? {
            self.reopen_foreign(id, peer);
            return Ok(());
        }
        if self.peers.len() >= self.config.max_peers {
            let (got, max) = (self.peers.len() + 1, self.config.max_peers);
            return Err(ForeignError::Size { field: "peers", got, min: 0, max });
        }
        let name = agent.name.to_owned();
        let loaded = self.engine.load(metadata).map_err(|error| {
            // NIXL keeps what it had read before it failed.
            self.engine.forget(&name);
            PlaneError::from(error)
        })?;
        if loaded != name {
            self.engine.forget(&loaded);
            return Err(ForeignError::Name { asked: name, found: loaded });
        }
        let speech = Speech::Foreign(Allowance::new(Instant::now()));
        let slice = (self.config.slice_time, self.config.slice_bytes);
        let mut remote = Remote::new(name.clone(), speech, places, Life::Unseen, peer, slice);
        remote.origin = self.origins.of(&name);
        remote.lists = self.prepare(&name, &remote.regions);
        let id = RemoteId::random()?;
        self.names.insert(name, id);
        self.remotes.insert(id, remote);
        self.peers.insert(peer, id);
        self.pace.stir();
        Ok(())
    }

    /// The oldest notification of a foreign agent that has not been taken: of one that is connected, or
    /// of one that we know only by its name. `None` while
    /// [`foreign_bytes`](crate::NixlConfig::foreign_bytes) is zero. [`poll`](kv_core::Plane::poll) brings them in.
    pub fn next_notification(&mut self) -> Option<RawNotification> {
        self.inbox.take()
    }

    /// The name of the agent under which a connected peer's notifications come, ours or foreign.
    pub fn agent_of(&self, peer: PeerId) -> Option<&str> {
        Some(&self.remotes.get(self.peers.get(&peer)?)?.name)
    }

    /// The regions of an agent that can be reached from here.
    fn places_of(
        &self,
        agent: &AgentMetadata,
        regions: &[ForeignRegion],
    ) -> Result<Vec<Place>, ForeignError> {
        if !agent.backends.contains(&self.config.backend.as_str()) {
            let theirs = agent.backends.iter().map(|backend| (*backend).to_owned()).collect();
            return Err(ForeignError::Backend { ours: self.config.backend.clone(), theirs });
        }
        if regions.len() > MAX_REGIONS {
            let (got, max) = (regions.len(), MAX_REGIONS);
            return Err(ForeignError::Size { field: "regions.len", got, min: 0, max });
        }
        let place = |(region, given): (usize, &ForeignRegion)| {
            let ForeignRegion { addr, len, item_len, memory, device } = *given;
            let range = Registered { kind: memory, addr, len, device };
            if len == 0 || !agent.memory.iter().any(|registered| registered.covers(&range)) {
                return Err(ForeignError::Region { region, memory, device, addr, len });
            }
            Ok(Place { addr, len, item_len, kind: memory, device })
        };
        regions.iter().enumerate().map(place).collect()
    }

    /// The connection to this agent, if there is one that this peer may use.
    fn foreign_known(
        &self,
        peer: PeerId,
        name: &str,
        regions: &[Place],
    ) -> Result<Option<RemoteId>, ForeignError> {
        if name == agent_name(self.token) {
            return Err(ForeignError::Name { asked: "another agent".to_owned(), found: name.to_owned() });
        }
        if let Some(remote) = self.peers.get(&peer).and_then(|id| self.remotes.get(id))
            && remote.name != name
        {
            return Err(ForeignError::Name { asked: remote.name.clone(), found: name.to_owned() });
        }
        let Some(id) = self.names.get(name) else { return Ok(None) };
        let Some(remote) = self.remotes.get(id) else { return Ok(None) };
        if !remote.is_foreign() || remote.regions != regions {
            return Err(ForeignError::Differs { name: name.to_owned() });
        }
        match remote.stage {
            Stage::Broken(_) => Err(ForeignError::Plane(PlaneError::PeerGone)),
            Stage::Open | Stage::Left => Ok(Some(*id)),
        }
    }

    fn reopen_foreign(&mut self, id: RemoteId, peer: PeerId) {
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        remote.stage = Stage::Open;
        if !remote.users.contains(&peer) {
            remote.users.push(peer);
        }
        self.peers.insert(peer, id);
        self.pace.stir();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_core::{Desc, MAX_FRAME, Op, Plane, PlaneEvent, Post, PostId, Time, WayEnd};

    use kv_host::HostPool;

    use super::*;
    use crate::agent::engine::Engine;
    use crate::config::NixlConfig;
    use crate::ffi::memory::Memory;
    use crate::foreign::agent_metadata::tests::sample;
    use crate::notifications::envelope::{Kind, Notification};
    use crate::testing::{LEN, PEER, nixl, others, until, whole, worker_with};

    /// An agent of somebody else, as plain as NIXL has it.
    struct Stranger {
        engine: Engine,
        pool: HostPool,
        heard: Vec<Bytes>,
    }

    impl Stranger {
        fn new(name: &str) -> Option<Stranger> {
            let mut engine = Engine::new(nixl()?, name, &config()).unwrap();
            let pool = HostPool::new(LEN).unwrap();
            engine.register(&Memory::of_pool(&pool)).unwrap();
            Some(Stranger { engine, pool, heard: Vec::new() })
        }

        fn metadata(&self) -> Vec<u8> {
            self.engine.metadata().unwrap()
        }

        fn region(&self) -> ForeignRegion {
            let (addr, len) = (self.pool.addr(), LEN as u64);
            ForeignRegion { addr, len, item_len: 4096, memory: MemoryKind::Dram, device: 0 }
        }

        fn listen(&mut self) {
            self.engine.receive(|_, message| self.heard.push(message)).unwrap();
        }
    }

    fn config() -> NixlConfig {
        NixlConfig { foreign_bytes: 16 << 20, ..crate::testing::config() }
    }

    fn plane() -> Option<(NixlPlane, HostPool)> {
        Some(worker_with(nixl()?, config()))
    }

    /// Polls both for this long.
    fn both(plane: &mut NixlPlane, stranger: &mut Stranger, span: Duration) -> Vec<PlaneEvent> {
        let (end, mut events) = (Instant::now() + span, Vec::new());
        while Instant::now() < end {
            plane.poll(Time::ZERO, &mut events);
            stranger.listen();
        }
        events
    }

    fn until_both(
        plane: &mut NixlPlane,
        stranger: &mut Stranger,
        done: impl Fn(&NixlPlane, &Stranger, &[PlaneEvent]) -> bool,
    ) -> Vec<PlaneEvent> {
        let (deadline, mut events) = (Instant::now() + Duration::from_secs(60), Vec::new());
        while !done(plane, stranger, &events) {
            assert!(Instant::now() < deadline, "{events:?}");
            events.extend(both(plane, stranger, Duration::from_millis(1)));
        }
        events
    }

    fn posted(post: u64) -> PlaneEvent {
        PlaneEvent::Posted { post: PostId(post), result: Ok(()) }
    }

    #[test]
    fn bytes_move_to_and_from_a_foreign_agent_which_hears_only_what_it_is_sent() {
        let (Some((mut here, ours)), Some(mut there)) = (plane(), Stranger::new("a decode worker")) else {
            return;
        };
        here.connect_foreign(PEER, &there.metadata(), &[there.region()]).unwrap();
        assert_eq!(here.agent_of(PEER), Some("a decode worker"));
        there.pool.write(0, &vec![7; LEN]).unwrap();
        let read = Post { notify: Some(Bytes::from_static(b"req:1")), ..whole(1, Op::Read) };
        here.post(PEER, read).unwrap();
        let events = until_both(&mut here, &mut there, |_, _, events| !events.is_empty());
        assert_eq!((events, others(&ours, 7)), (vec![posted(1)], 0));

        // A write of items, which have numbers, waits for permission like any other.
        ours.write(0, &vec![9; LEN]).unwrap();
        let item =
            |at| Desc { local_region: 0, remote_region: 0, local_offset: at, remote_offset: 8192, len: 4096 };
        let write = Post { id: PostId(2), op: Op::Write, descs: vec![item(4096)], notify: None };
        here.post(PEER, write).unwrap();
        assert_eq!(both(&mut here, &mut there, Duration::from_millis(50)), []);
        here.permit(PEER, Time::MAX);
        let events = until_both(&mut here, &mut there, |_, _, events| !events.is_empty());
        assert_eq!((events, others(&there.pool, 7)), (vec![posted(2)], 4096));
        assert_eq!(here.stats().requests_by_number, 1);

        // It floods us, so that one of ours would be told of it; then there is silence, which would be
        // tried out; and then we end.
        there.engine.load(&here.agent_metadata().unwrap()).unwrap();
        for _ in 0..64 {
            there.engine.notify(&here.agent_name(), &[b'n'; 40_000]).unwrap();
        }
        both(&mut here, &mut there, Duration::from_millis(2500));
        here.send(PEER, Bytes::from_static(b"HB:1")).unwrap();
        until_both(&mut here, &mut there, |_, there, _| there.heard.len() >= 2);
        drop(here);
        let quiet = Instant::now();
        while quiet.elapsed() < Duration::from_millis(300) {
            there.listen();
        }
        assert_eq!(there.heard, [&b"req:1"[..], b"HB:1"], "nothing of ours beside it");
    }

    #[test]
    fn notifications_of_foreign_agents_are_raw_whatever_they_look_like() {
        let (Some((mut here, _)), Some(mut there)) = (plane(), Stranger::new("a prefill worker")) else {
            return;
        };
        there.engine.load(&here.agent_metadata().unwrap()).unwrap();
        let forged =
            Notification { to: here.token, connection: 3, kind: Kind::Frame(Bytes::from_static(b"x")) };
        let messages = [b"HB:a,b".to_vec(), Vec::new(), vec![0xff; 18], forged.encode()];
        let mut heard = Vec::new();
        // Unknown first, then connected: then nothing of it is taken for ours.
        for (known, messages) in [(false, &messages[..3]), (true, &messages[..])] {
            if known {
                here.connect_foreign(PEER, &there.metadata(), &[]).unwrap();
            }
            for message in messages {
                there.engine.notify(&here.agent_name(), message).unwrap();
            }
            let deadline = Instant::now() + Duration::from_secs(60);
            let mut came = Vec::new();
            while came.len() < messages.len() {
                assert!(Instant::now() < deadline, "{came:?}");
                assert_eq!(both(&mut here, &mut there, Duration::from_millis(1)), []);
                came.extend(std::iter::from_fn(|| here.next_notification()));
            }
            assert!(came.iter().all(|raw| &*raw.agent == "a prefill worker"));
            heard.extend(came.into_iter().map(|raw| raw.message.to_vec()));
        }
        assert_eq!(heard, [&messages[..3], &messages[..]].concat());
        assert_eq!((here.stats().strangers, here.stats().foreign_dropped), (0, 0));
    }

    #[test]
    fn a_plane_that_asks_for_no_raw_notifications_keeps_none() {
        let Some(mut there) = Stranger::new("an agent") else { return };
        let (mut here, _pool) = worker_with(nixl().unwrap(), crate::testing::config());
        there.engine.load(&here.agent_metadata().unwrap()).unwrap();
        there.engine.notify(&here.agent_name(), b"HB:a").unwrap();
        until_both(&mut here, &mut there, |here, _, _| here.stats().strangers == 1);
        assert_eq!(here.next_notification(), None);
    }

    #[test]
    fn what_a_silent_foreign_agent_is_sent_at_once_is_bounded() {
        let (Some((mut here, _)), Some(there)) = (plane(), Stranger::new("a stopped worker")) else { return };
        here.connect_foreign(PEER, &there.metadata(), &[]).unwrap();
        let (begun, message, most) =
            (Instant::now(), Bytes::from(vec![1; MAX_FRAME]), here.config.outbound_bytes);
        let sent = (0..100).take_while(|_| here.send(PEER, message.clone()).is_ok()).count();
        // The whole allowance, and what has come back meanwhile.
        let back = most as f64 * begun.elapsed().as_secs_f64() / 10.0;
        assert!(sent >= 3 && (sent * MAX_FRAME) as f64 <= most as f64 + back, "{sent}, {back}");
        assert_eq!(here.send(PEER, message), Err(PlaneError::WouldBlock));
    }

    #[test]
    fn the_end_of_a_foreign_agent_is_seen_and_its_successor_is_another() {
        let (Some((mut here, _)), Some(mut there)) = (plane(), Stranger::new("first life")) else { return };
        let metadata = there.metadata();
        here.connect_foreign(PEER, &metadata, &[there.region()]).unwrap();
        // The connection is made by the first word.
        here.send(PEER, Bytes::from_static(b"HB:1")).unwrap();
        until_both(&mut here, &mut there, |_, there, _| !there.heard.is_empty());
        assert_eq!(both(&mut here, &mut there, Duration::from_millis(600)), [], "it lives");
        drop(there);
        let events = until(&mut [&mut here], "the end", |_, events| !events.is_empty());
        assert_eq!(events, [PlaneEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
        assert_eq!(here.send(PEER, Bytes::new()), Err(PlaneError::PeerGone));
        let Some(mut next) = Stranger::new("second life") else { return };
        here.connect_foreign(PEER, &next.metadata(), &[next.region()]).unwrap();
        here.post(PEER, whole(1, Op::Read)).unwrap();
        let events = until_both(&mut here, &mut next, |_, _, events| !events.is_empty());
        assert_eq!(events, [posted(1)]);
    }

    #[test]
    fn metadata_that_is_not_the_agents_is_refused_with_both_values() {
        let (Some((mut here, _)), Some(there)) = (plane(), Stranger::new("an agent")) else { return };
        let Some(other) = Stranger::new("another agent") else { return };
        let (metadata, region) = (there.metadata(), there.region());
        let mut connect =
            |bytes: &[u8], regions: &[ForeignRegion]| here.connect_foreign(PEER, bytes, regions);
        for len in 0..metadata.len() {
            let error = connect(&metadata[..len], &[]).unwrap_err();
            assert!(matches!(error, ForeignError::Damaged { len: of, .. } if of == len), "{error}");
        }
        let outside = [
            ForeignRegion { len: region.len + 1, ..region },
            ForeignRegion { addr: region.addr - 1, ..region },
            ForeignRegion { device: 1, ..region },
            ForeignRegion { len: 0, ..region },
            ForeignRegion { memory: MemoryKind::Vram, ..region },
        ];
        for wrong in outside {
            let ForeignRegion { addr, len, memory, device, .. } = wrong;
            let expected = ForeignError::Region { region: 1, memory, device, addr, len };
            assert_eq!(connect(&metadata, &[region, wrong]), Err(expected));
        }
        let mut backend = sample(b"an agent", &[[1, 2, 0]]);
        let at = backend.windows(3).position(|tag| tag == b"UCX").unwrap();
        backend[at] = b'X';
        let expected = ForeignError::Backend { ours: "UCX".to_owned(), theirs: vec!["XCX".to_owned()] };
        assert_eq!(connect(&backend, &[]), Err(expected));
        assert!(matches!(connect(&[], &[]), Err(ForeignError::Damaged { at: 0, .. })));

        connect(&metadata, &[region]).unwrap();
        connect(&metadata, &[region]).unwrap();
        assert_eq!(connect(&metadata, &[]), Err(ForeignError::Differs { name: "an agent".to_owned() }));
        let (asked, found) = ("an agent".to_owned(), "another agent".to_owned());
        assert_eq!(connect(&other.metadata(), &[]), Err(ForeignError::Name { asked, found }));
        let own = here.agent_metadata().unwrap();
        assert!(matches!(here.connect_foreign(PeerId(9), &own, &[]), Err(ForeignError::Name { .. })));
    }

    #[test]
    fn a_plane_is_a_peer_of_ours_or_a_foreign_agent_and_never_both() {
        let (Some((mut here, _)), Some((mut there, _))) = (plane(), plane()) else { return };
        let (raw, native) = (there.agent_metadata().unwrap(), there.metadata().unwrap());
        here.connect_foreign(PEER, &raw, &[]).unwrap();
        assert!(matches!(here.connect(PeerId(2), &native), Err(PlaneError::Unsupported(_))));
        assert!(matches!(here.connect(PEER, &native), Err(PlaneError::Unsupported(_))));
        here.disconnect(PEER);
        until(&mut [&mut here, &mut there], "the end", |here, _| here.remotes.is_empty());
        here.connect(PEER, &native).unwrap();
        let name = there.agent_name();
        assert_eq!(here.connect_foreign(PEER, &raw, &[]), Err(ForeignError::Differs { name }));
    }
}
