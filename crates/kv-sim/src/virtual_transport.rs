//! The simulator's transport without the rest: the same connections, frames and posts as in a simulated
//! world, behind the [`Transport`] trait, in virtual time.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::{
    PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent, TransportWait, WriteFence,
};
use kv_host::check;

use crate::clock::{Clock, MS, US};
use crate::kv::host::{Stock, new_host};
use crate::kv::memory::Memory;
use crate::kv::params::{Params, Topology};
use crate::kv::service::KvWorld;
use crate::net::Memory as _;
use crate::net::host::Engine;
use crate::net::lives;
use crate::net::lives::{LifeId, TRANSPORT, life_of};
use crate::net::params::Physics;
use crate::net::params::{ChaosParams, DmaParams, NetParams, WayParams};

/// The number of transports in one network, at most.
const TRANSPORTS: usize = 32;
/// Posts move in pieces of this many bytes, each at a moment of its own.
const PIECE: usize = 4096;
/// Virtual time that passes with each poll, in nanoseconds.
const POLL: u64 = 20 * US;

/// A network of virtual transports: up to 32, dead ones included. Frames are duplicated and reordered, posts
/// are slow or fast, cancellations take effect or not, deaths are noticed late, and writes of the dead still
/// arrive for a while; a seed decides all of this.
#[derive(Clone)]
pub struct VirtualNet {
    world: Rc<RefCell<KvWorld>>,
}

impl VirtualNet {
    /// A new network, whose chances this seed decides.
    pub fn new(seed: u64) -> VirtualNet {
        let draw = Params::draw(seed);
        let params = Params {
            topology: Topology::Plain,
            unequal: None,
            num_pages: vec![1; TRANSPORTS],
            misfit: None,
            physics: Physics {
                prefills: TRANSPORTS / 2,
                decodes: TRANSPORTS / 2,
                driven: false,
                net: NetParams {
                    duplicate: 100,
                    tail: 100,
                    delay: 20 * US,
                    delay_max: 500 * US,
                    ..NetParams::default()
                },
                dma: DmaParams {
                    slow: 100,
                    time: 200 * US,
                    time_max: 60 * MS,
                    cancel: 500,
                    ..DmaParams::default()
                },
                // One transport for each worker: of two, the first one may lead nowhere.
                ways: WayParams {
                    bound: 3 * MS,
                    slice_max: MS,
                    stuck: 0,
                    unproven: 0,
                    several: false,
                    ..draw.physics.ways
                },
                chaos: ChaosParams { detect_max: 5 * MS, ..ChaosParams::default() },
                ..draw.physics
            },
            ..draw
        };
        VirtualNet { world: Rc::new(RefCell::new(KvWorld::of_transports(params))) }
    }

    /// Adds a transport to the network; `None` if the network is full.
    pub fn transport(&self) -> Option<VirtualTransport> {
        let life = self.world.borrow_mut().attach()?;
        Some(VirtualTransport { world: Rc::clone(&self.world), life })
    }

    /// Copies out of a region of the transport with this metadata; false if there is none, or out of
    /// bounds.
    pub fn read(&self, metadata: &[u8], region: u32, offset: usize, out: &mut [u8]) -> bool {
        let world = self.world.borrow();
        let memory = life_of(metadata).and_then(|life| world.memories.get(life));
        let piece = memory.and_then(|memory| memory.piece(region, offset as u64, out.len() as u64));
        piece.map(|bytes| out.copy_from_slice(bytes)).is_some()
    }

    /// Copies into a region; false as for `read`.
    pub fn write(&self, metadata: &[u8], region: u32, offset: usize, bytes: &[u8]) -> bool {
        let mut world = self.world.borrow_mut();
        let memory = life_of(metadata).and_then(|life| world.memories.get_mut(life));
        memory.is_some_and(|memory| memory.overwrite(region, offset as u64, bytes))
    }

    /// Ends the worker of the transport with this metadata, in the middle of whatever is under way.
    pub fn crash(&self, metadata: &[u8]) {
        let mut world = self.world.borrow_mut();
        let Some(life) = life_of(metadata) else { return };
        let slot = world.slots.iter().position(|there| *there == Some(life));
        if let Some(slot) = slot {
            world.crash(slot);
        }
    }

    /// Ends the connection of the transport with the metadata `from` to the one with the metadata `to`. Both live
    /// on, and can be connected anew.
    pub fn cut(&self, from: &[u8], to: &[u8]) {
        let mut world = self.world.borrow_mut();
        let (Some(from), Some(to)) = (life_of(from), life_of(to)) else { return };
        let conns = world.hosts[from].conns.iter();
        let lost: Vec<PeerId> = conns.filter(|(_, conn)| conn.target == to).map(|(&peer, _)| peer).collect();
        let detected = world.now + MS;
        for peer in lost {
            world.lose(from, peer, detected);
        }
    }

    /// The virtual time. Every poll of one of the network's transports takes 20 µs.
    pub fn now(&self) -> Time {
        Time::from_nanos(self.world.borrow().now)
    }
}

/// One transport of a [`VirtualNet`], with its memory.
pub struct VirtualTransport {
    world: Rc<RefCell<KvWorld>>,
    life: LifeId,
}

impl VirtualTransport {
    /// False once the transport's worker has crashed.
    pub fn is_alive(&self) -> bool {
        self.world.borrow().lives[self.life].alive
    }
}

impl Transport for VirtualTransport {
    fn name(&self) -> &'static str {
        TRANSPORT
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        // Its memory comes with it: addresses mean nothing here.
        self.world.borrow_mut().memories[self.life].add(region.role, region.len as usize, PIECE);
        Ok(())
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        Ok(lives::metadata(self.life))
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        let mut world = self.world.borrow_mut();
        let target = life_of(metadata).filter(|target| *target < world.hosts.len() && *target != self.life);
        let target = target.ok_or(TransportError::Metadata("it leads to no other transport"))?;
        if let Some(conn) = world.hosts[self.life].conns.get(&peer)
            && !conn.dead
        {
            let other = TransportError::Unsupported("another transport under the id of a connected peer");
            return if conn.target == target { Ok(()) } else { Err(other) };
        }
        world.connect(self.life, peer, metadata);
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        let mut world = self.world.borrow_mut();
        if let Some(conn) = world.hosts[self.life].conns.remove(&peer) {
            world.leave_revoked(conn.target, self.life, conn.road);
        }
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        check::frame("frame.len", frame.len())?;
        let mut world = self.world.borrow_mut();
        world.target(self.life, peer)?;
        world.send(self.life, peer, frame);
        Ok(())
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if let Some(notify) = &post.notify {
            check::frame("notify.len", notify.len())?;
        }
        let mut world = self.world.borrow_mut();
        let target = world.target(self.life, peer)?;
        let len_of = |memory: &Memory, region: u32| {
            memory.regions().get(region as usize).map(|region| region.bytes.len() as u64)
        };
        let (local, remote) = (&world.memories[self.life], &world.memories[target]);
        check::descriptors(
            &post.descriptors,
            |region| len_of(local, region),
            |region| len_of(remote, region),
        )?;
        world.post(self.life, peer, post);
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        self.world.borrow_mut().cancel(self.life, post);
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        self.world.borrow_mut().permit(self.life, peer, until);
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        let world = self.world.borrow();
        let conn = world.hosts[self.life].conns.get(&peer);
        conn.map_or(WriteFence::AtDeath, |conn| world.declared_fence(conn.target, self.life, conn.road))
    }

    fn revoke(&mut self, peer: PeerId) {
        self.world.borrow_mut().revoke(self.life, peer);
    }

    fn poll(&mut self, _now: Time, events: &mut Vec<TransportEvent>) {
        let mut world = self.world.borrow_mut();
        world.advance(POLL);
        if let Engine::Transport(inbox) = &mut world.hosts[self.life].engine {
            events.append(inbox);
        }
    }

    fn wait(&self) -> TransportWait {
        // Time passes when it is polled.
        TransportWait::ReadableOrAfter(Vec::new(), Duration::ZERO)
    }
}

impl KvWorld {
    /// Adds a host whose transport has an owner outside of the world.
    fn attach(&mut self) -> Option<LifeId> {
        let slot = self.hosts.len();
        if slot >= self.slots.len() {
            return None;
        }
        let life = slot;
        let shape = Memory::new(1, 1, PIECE, 0, 0);
        let clock = Clock::new(self.now, self.now, 1_000_000);
        let bits = self.rng.bits();
        let mut host = new_host(&self.service.params, (slot, life), (bits, clock), &shape, None).ok()?;
        host.engine = Engine::Transport(Vec::new());
        self.service.stock.push(Stock::default());
        self.add_host(host, Memory::empty(), clock);
        self.slots[slot] = Some(life);
        Some(life)
    }

    /// The life that a peer id stands for, if the peer is connected.
    fn target(&self, life: LifeId, peer: PeerId) -> Result<LifeId, TransportError> {
        let conn = self.hosts[life].conns.get(&peer).filter(|conn| !conn.dead);
        conn.map(|conn| conn.target).ok_or(TransportError::PeerGone)
    }
}
