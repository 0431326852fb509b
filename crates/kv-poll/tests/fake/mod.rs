//! A `KvManager` whose sessions do what the test says.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kv_core::machine::Submit;
use kv_core::proto::Command;
use kv_core::random::SplitMix64;
use kv_core::{
    AuxIndex, CacheGroupItems, Cause, ChunkId, Incarnation, KvArgs, KvManager, KvPoll, KvReceiver, KvSender,
    KvSession, LeaseRef, OpenError, PageList, Pages, Phase, Quarantine, Reclaimed, Region, RegionRole,
    RequestCacheGroups, Room, SessionId, SessionOptions, TransferError,
};
use kv_poll::Change;
use kv_poll::queue::{AuxMemory, aux_tag};

#[derive(Clone)]
pub(crate) struct Fake(Rc<RefCell<World>>, Rc<KvArgs>);

pub(crate) struct World {
    next_id: u64,
    pub(crate) sessions: BTreeMap<SessionId, Session>,
    pub(crate) refuse: Option<OpenError>,
    /// Free places in the command ring.
    pub(crate) ring: usize,
    changes: Vec<Change>,
    /// What the manager says of its quarantine.
    pub(crate) quarantine: Vec<Quarantine>,
    /// What was left behind with the manager: pages, and numbers of items of cache groups.
    pub(crate) left: (Vec<Pages>, usize),
    /// How often a session was polled.
    pub(crate) polls: u64,
}

pub(crate) struct Session {
    pub(crate) room: Room,
    pub(crate) poll: KvPoll,
    pub(crate) reclaimable: bool,
    pub(crate) failure: Option<TransferError>,
    pub(crate) custody: Pages,
    pub(crate) groups: RequestCacheGroups,
    /// What the session was given, call by call.
    pub(crate) calls: Vec<Call>,
    pub(crate) aux: Option<AuxIndex>,
    pub(crate) aborted: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Init(usize),
    RequestCacheGroups(usize),
    Pages(Vec<u32>),
    Begin(Vec<u32>),
    Final(u32, Option<std::ops::Range<u32>>),
}

impl Fake {
    pub(crate) fn new() -> Fake {
        let args = KvArgs::builder("fake", 0)
            .pages(64, 16)
            .region(Region::dram(RegionRole::Kv, 0x10_0000, 64 * 64, 64))
            .build()
            .unwrap();
        let world = World {
            next_id: 0,
            sessions: BTreeMap::new(),
            refuse: None,
            ring: usize::MAX,
            changes: Vec::new(),
            quarantine: Vec::new(),
            left: (Vec::new(), 0),
            polls: 0,
        };
        Fake(Rc::new(RefCell::new(world)), Rc::new(args))
    }

    pub(crate) fn world<T>(&self, f: impl FnOnce(&mut World) -> T) -> T {
        f(&mut self.0.borrow_mut())
    }

    /// The session that was opened last in this room.
    pub(crate) fn in_room(&self, room: u64) -> SessionId {
        let find = |world: &mut World| {
            let mut sessions = world.sessions.iter().rev();
            sessions.find(|(_, session)| session.room == Room::Number(room)).map(|(id, _)| *id)
        };
        self.world(find).unwrap()
    }

    pub(crate) fn at<T>(&self, room: u64, f: impl FnOnce(&mut Session) -> T) -> T {
        let id = self.in_room(room);
        self.world(|world| f(world.sessions.get_mut(&id).unwrap()))
    }

    pub(crate) fn set(&self, room: u64, poll: KvPoll, reclaimable: bool) {
        self.set_session(self.in_room(room), poll, reclaimable);
    }

    pub(crate) fn set_session(&self, id: SessionId, poll: KvPoll, reclaimable: bool) {
        self.world(|world| {
            let session = world.sessions.get_mut(&id).unwrap();
            session.poll = poll;
            session.reclaimable = reclaimable;
            if poll == KvPoll::Failed && session.failure.is_none() {
                let cause = if session.aborted { Cause::Aborted } else { Cause::PeerLost };
                let (room, phase) = (session.room.clone(), Phase::Transfer);
                session.failure = Some(TransferError::new(room, phase, cause));
            }
            world.changes.push(Change { session: id, poll, reclaimable });
        });
    }

    pub(crate) fn changes(&self) -> Vec<Change> {
        self.world(|world| std::mem::take(&mut world.changes))
    }

    /// Pages in the custody of sessions; panics if one is there twice.
    pub(crate) fn custody(&self) -> BTreeSet<u32> {
        self.world(|world| {
            let mut all = BTreeSet::new();
            for session in world.sessions.values() {
                for page in session.custody.list().iter() {
                    assert!(all.insert(page), "page {page} is with two sessions");
                }
            }
            all
        })
    }

    fn open(&self, room: Room) -> Result<Handle, OpenError> {
        self.world(|world| {
            if let Some(error) = world.refuse.clone() {
                return Err(error);
            }
            let id = SessionId(world.next_id);
            world.next_id += 1;
            let session = Session {
                room: room.clone(),
                poll: KvPoll::Bootstrapping,
                reclaimable: false,
                failure: None,
                custody: Pages::none(),
                groups: RequestCacheGroups::none(),
                calls: Vec::new(),
                aux: None,
                aborted: false,
            };
            world.sessions.insert(id, session);
            Ok(Handle { id, room, fake: self.clone() })
        })
    }
}

pub(crate) struct Handle {
    id: SessionId,
    room: Room,
    fake: Fake,
}

impl Handle {
    fn with<T>(&self, f: impl FnOnce(&mut Session) -> T) -> T {
        self.fake.world(|world| f(world.sessions.get_mut(&self.id).unwrap()))
    }

    /// One place in the ring, or none.
    fn command(&self) -> bool {
        self.fake.world(|world| {
            let free = world.ring > 0;
            world.ring -= usize::from(free && world.ring != usize::MAX);
            free
        })
    }
}

impl KvSession for Handle {
    fn id(&self) -> SessionId {
        self.id
    }

    fn room(&self) -> &Room {
        &self.room
    }

    fn poll(&self) -> KvPoll {
        self.fake.world(|world| world.polls += 1);
        self.with(|session| session.poll)
    }

    fn failure(&self) -> Option<TransferError> {
        self.with(|session| session.failure.clone())
    }

    fn abort(&mut self) {
        self.with(|session| session.aborted |= !session.poll.is_terminal());
    }

    fn reclaim(&mut self) -> Option<Reclaimed> {
        self.with(|session| {
            (session.poll.is_terminal() && session.reclaimable).then(|| {
                let mut reclaimed = Reclaimed::new(std::mem::take(&mut session.custody));
                reclaimed.groups = std::mem::take(&mut session.groups);
                reclaimed
            })
        })
    }
}

impl KvSender for Handle {
    fn lease_ref(&self) -> LeaseRef {
        LeaseRef::new(Incarnation::from_random(1), self.id())
    }

    fn next_chunk(&self) -> ChunkId {
        let is_chunk = |call: &&Call| !matches!(call, Call::Init(_) | Call::Final(..));
        ChunkId(self.with(|session| session.calls.iter().filter(is_chunk).count()) as u32)
    }
}

impl KvReceiver for Handle {}

impl Submit<Command> for Handle {
    fn submit(&mut self, command: Command) -> Result<(), Command> {
        if !self.command() {
            return Err(command);
        }
        self.with(|session| match command {
            Command::InitSender { num_pages, aux, .. } => {
                session.calls.push(Call::Init(num_pages));
                session.aux = aux;
            }
            Command::Send { chunk, .. } => session.take(chunk, Call::Pages),
            Command::BeginChunk { chunk, .. } => session.take(chunk, Call::Begin),
            Command::InitReceiver { pages, aux, .. } => {
                session.take(pages, Call::Pages);
                session.aux = aux;
            }
            Command::LayersFinal { layers, .. } => {
                session.calls.push(Call::Final(layers.chunk.0, layers.layers));
            }
            Command::RequestCacheGroups { groups, .. } => {
                session.calls.push(Call::RequestCacheGroups(groups.len()));
                groups.into_iter().try_for_each(|items| session.groups.push(items)).unwrap();
            }
            other => panic!("nothing that a queue says: {other:?}"),
        });
        Ok(())
    }
}

impl Session {
    fn take(&mut self, pages: Pages, call: fn(Vec<u32>) -> Call) {
        self.calls.push(call(pages.list().iter().collect()));
        self.custody.append(pages).unwrap();
    }
}

impl KvManager for Fake {
    type Sender = Handle;
    type Receiver = Handle;

    fn args(&self) -> &KvArgs {
        &self.1
    }

    fn sender(&self, _: &str, room: Room, _: &[u32], _: SessionOptions) -> Result<Handle, OpenError> {
        self.open(room)
    }

    fn receiver(&self, _: &str, room: Room, _: SessionOptions) -> Result<Handle, OpenError> {
        self.open(room)
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        self.world(|world| world.quarantine.clone())
    }

    fn leave_behind(&self, left: Reclaimed) {
        self.world(|world| {
            world.left.0.extend(Some(left.pages).filter(|pages| !pages.is_empty()));
            world.left.1 += left.groups.len();
        });
    }
}

/// Aux rows of one word, the tag; and the free slots, if requests have one each.
#[derive(Default)]
pub(crate) struct Rows(pub(crate) BTreeMap<AuxIndex, u64>, pub(crate) Option<Vec<u32>>);

impl Rows {
    /// What the prefill side's write of the room's last chunk does.
    pub(crate) fn write(&mut self, row: AuxIndex, room: u64) {
        self.0.insert(row, aux_tag(&Room::Number(room)));
    }
}

impl<R> AuxMemory<R> for Rows {
    fn take_groups(&mut self, _request: &mut R) -> Option<RequestCacheGroups> {
        let mut groups = RequestCacheGroups::none();
        if let Some(slots) = &mut self.1 {
            groups.push(CacheGroupItems::new(0, pages([slots.pop()?]))).unwrap();
        }
        Some(groups)
    }

    fn clear(&mut self, row: AuxIndex) {
        self.0.insert(row, 0);
    }

    fn tag(&self, row: AuxIndex) -> u64 {
        self.0.get(&row).copied().unwrap_or(0)
    }

    fn read(&mut self, row: AuxIndex, _request: &mut R) {
        assert_ne!(self.0.get(&row), Some(&0), "a row was read before the gate");
    }
}

pub(crate) fn pages(list: impl IntoIterator<Item = u32>) -> Pages {
    Pages::unpooled(PageList::from_pages(list).unwrap()).unwrap()
}

pub(crate) struct Rng(SplitMix64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(SplitMix64::new(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.bits()
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len()))
    }
}

/// Runs a random test for some seeds; `SEED=n` runs one.
pub(crate) fn seeds(count: u64, run: impl Fn(u64)) {
    match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => run(seed),
        None => (0..count).for_each(|seed| {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed)));
            if let Err(panic) = outcome {
                eprintln!("replay with SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }),
    }
}
