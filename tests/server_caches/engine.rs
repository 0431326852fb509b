//! An engine whose ranks hold tensors as a server allocates them, and which indexes its tensors by itself: what a
//! worker is told of a tensor, and what the server reads from it, are two statements that the bytes compare.

use std::ops::Range;
use std::time::{Duration, Instant};

use kv_transfer::prelude::*;
use kv_transfer::unstable::random::mix;
use kv_transfer::{CacheGroupItems, EngineGroup, EngineReceiver, EngineSender, KvArgsBuilder, Layout};
use kv_transfer::{Parallel, Publication, Reclaimed, RequestCacheGroups, TransferMode};

/// How long anything may take that must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Blocks of each cache, and slots of each cache group.
pub const BLOCKS: u32 = 24;
pub const SLOTS: u32 = 4;
/// What a byte is that nobody has written.
const NOISE: u8 = 0xa5;

/// The place of an element inside a block, counted in elements, as the server's kernels compute it: from the sizes
/// (tokens of a block, heads, elements of a head, all of this tensor) and the token, head and element.
pub type Index = fn([usize; 3], [usize; 3]) -> usize;

/// A tensor of a rank.
pub struct Tensor {
    /// What the worker is told. The address is set when the rank starts.
    pub region: Region,
    /// Which tensor of the layer: 0 keys, 1 values, 2 the latent.
    pub part: u64,
    /// Tokens of an item.
    pub block: usize,
    /// Which heads of the model, and which elements of each.
    pub heads: Range<usize>,
    pub dims: Range<usize>,
    /// Bytes of an element.
    pub element: usize,
    pub index: Index,
}

impl Tensor {
    /// Calls `f` with every element of an item: its offset in the item, and its token, head and element in the model.
    fn each(&self, mut f: impl FnMut(usize, [usize; 3])) {
        let sizes = [self.block, self.heads.len(), self.dims.len()];
        for token in 0..self.block {
            for (h, head) in self.heads.clone().enumerate() {
                for (d, dim) in self.dims.clone().enumerate() {
                    f((self.index)(sizes, [token, h, d]) * self.element, [token, head, dim]);
                }
            }
        }
    }

    /// The bytes that an element of the model has in a request.
    fn value(&self, content: u64, token: usize, head: usize, dim: usize) -> [u8; 8] {
        let layer = u64::from(self.region.layer.unwrap());
        let place = [layer, self.part, token as u64, head as u64, dim as u64];
        place.iter().fold(content, |sum, part| mix(sum ^ part)).to_le_bytes()
    }
}

/// A rank: its worker, its memory, and a copy of what the memory must hold.
struct Rank {
    worker: Worker,
    arena: Arena,
    image: Vec<u8>,
    tensors: Vec<Tensor>,
    /// The offset of each tensor.
    offsets: Vec<usize>,
}

impl Rank {
    fn start(args: KvArgsBuilder, role: WorkerRole, addr: &str, mut tensors: Vec<Tensor>) -> Rank {
        // Between two tensors there are bytes that nothing may touch, and nothing is aligned by chance.
        let mut end = 131;
        let offsets: Vec<usize> = tensors
            .iter()
            .map(|tensor| {
                let offset = end;
                end += tensor.region.len as usize + 131;
                offset
            })
            .collect();
        let (arena, image) = (Arena::new(end).unwrap(), vec![NOISE; end]);
        arena.write(0, &image).unwrap();
        for (tensor, offset) in tensors.iter_mut().zip(&offsets) {
            tensor.region.addr = arena.addr() + *offset as u64;
        }
        let args = tensors.iter().fold(args, |args, tensor| args.region(tensor.region.clone()));
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(&arena).unwrap();
        let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
        let config = WorkerConfig::new(args.build().unwrap(), role)
            .with(|config| config.bootstrap = Some(addr.to_owned()));
        let worker = Worker::start(config, transport, Box::new(client)).unwrap();
        Rank { worker, arena, image, tensors, offsets }
    }

    /// Puts the content of a request into the copy.
    fn put(&mut self, request: &Request, content: u64) {
        for (tensor, offset) in self.tensors.iter().zip(&self.offsets) {
            let items = match tensor.region.role {
                RegionRole::Kv => &request.blocks,
                _ => &request.slots,
            };
            for (position, item) in items.iter().enumerate() {
                let start = offset + *item as usize * tensor.region.item_len as usize;
                tensor.each(|at, [token, head, dim]| {
                    let value = tensor.value(content, position * tensor.block + token, head, dim);
                    let bytes = &mut self.image[start + at..start + at + tensor.element];
                    bytes.copy_from_slice(&value[..tensor.element]);
                });
            }
        }
    }

    fn check(&self, what: &str) {
        let mut bytes = vec![0; self.image.len()];
        self.arena.read(0, &mut bytes).unwrap();
        let Some(at) = bytes.iter().zip(&self.image).position(|(is, must)| is != must) else { return };
        let tensor = self.offsets.iter().rposition(|offset| *offset <= at);
        panic!("{what}: byte {at} (tensor {tensor:?}) is {:#x} and must be {:#x}", bytes[at], self.image[at]);
    }
}

/// The blocks of a request, and its slots; both are numbers that the scheduler has chosen.
pub struct Request {
    pub blocks: Vec<u32>,
    pub slots: Vec<u32>,
}

impl Request {
    /// These blocks, and no slot.
    pub fn blocks(blocks: impl IntoIterator<Item = u32>) -> Request {
        Request { blocks: blocks.into_iter().collect(), slots: Vec::new() }
    }
}

/// The ranks of an engine, driven as one.
pub struct Engine {
    ranks: Vec<Rank>,
    group: EngineGroup,
    blocks: PagePool,
    slots: PagePool,
}

impl Engine {
    /// Starts the ranks, whose tensors are given, and waits until they can be found.
    pub fn start(
        role: WorkerRole,
        addr: &str,
        tensors: Vec<Vec<Tensor>>,
        describe: impl Fn(KvArgsBuilder) -> KvArgsBuilder,
    ) -> Engine {
        let tp_size = tensors.len() as u32;
        let name = format!("{role:?}").to_lowercase();
        let ranks = (0..).zip(tensors).map(|(rank, tensors)| {
            let parallel = Parallel::default().with(|p| (p.tp_size, p.tp_rank) = (tp_size, rank));
            let args = describe(KvArgs::builder(&name, rank).parallel(parallel));
            Rank::start(args, role, addr, tensors)
        });
        let ranks: Vec<Rank> = ranks.collect();
        let managers: Vec<_> = ranks.iter().map(|rank| rank.worker.manager()).collect();
        let published = || managers.iter().all(|manager| manager.publication() == Publication::Published);
        until("registration", || published().then_some(()));
        let group = EngineGroup::new(managers).unwrap();
        Engine { ranks, group, blocks: PagePool::new(BLOCKS), slots: PagePool::new(SLOTS) }
    }

    fn pages(&self, request: &Request) -> Pages {
        let blocks = PageList::from_pages(request.blocks.iter().copied()).unwrap();
        self.blocks.adopt(blocks).unwrap()
    }

    fn groups(&self, request: &Request) -> RequestCacheGroups {
        let mut groups = RequestCacheGroups::none();
        if !request.slots.is_empty() {
            let slots = PageList::from_pages(request.slots.iter().copied()).unwrap();
            groups.push(CacheGroupItems::new(0, self.slots.adopt(slots).unwrap())).unwrap();
        }
        groups
    }

    /// Computes the KV of a request, in all ranks.
    pub fn compute(&mut self, request: &Request, content: u64) {
        for rank in &mut self.ranks {
            rank.put(request, content);
            rank.arena.write(0, &rank.image).unwrap();
        }
    }

    pub fn sender(&self, addr: &str, room: u64, request: &Request, mode: TransferMode) -> EngineSender {
        let options = SessionOptions::default().with(|options| options.mode = Some(mode));
        let mut sender = self.group.sender(addr, room.into(), &[], options).unwrap();
        sender.init(request.blocks.len(), None).unwrap();
        if !request.slots.is_empty() {
            sender.give_groups(self.groups(request)).unwrap();
        }
        sender.send(self.pages(request)).unwrap();
        sender
    }

    pub fn receiver(
        &self,
        addr: &str,
        room: u64,
        request: &Request,
        options: SessionOptions,
    ) -> EngineReceiver {
        let mut receiver = self.group.receiver(addr, room.into(), options).unwrap();
        if !request.slots.is_empty() {
            receiver.give_groups(self.groups(request)).unwrap();
        }
        receiver.init(self.pages(request), None).unwrap();
        receiver
    }

    /// Notes that the content of a request has arrived.
    pub fn arrived(&mut self, request: &Request, content: u64) {
        self.ranks.iter_mut().for_each(|rank| rank.put(request, content));
    }

    /// Takes back what a session had. Returns how many blocks and slots that were.
    fn take_back(&self, back: Reclaimed) -> (usize, usize) {
        let Reclaimed { pages, mut groups, .. } = back;
        let slots = groups.take(0).map(|group| self.slots.release(group.items).unwrap().len());
        (self.blocks.release(pages).unwrap().len(), slots.unwrap_or(0))
    }

    /// Every byte of every rank is what it must be, and nothing is out.
    pub fn check(&self, what: &str) {
        self.ranks.iter().for_each(|rank| rank.check(what));
        assert_eq!((self.blocks.num_out(), self.slots.num_out()), (0, 0), "{what}");
    }

    pub fn stop(self) {
        for rank in self.ranks {
            assert_eq!(rank.worker.stop(PATIENCE).pages_quarantined, 0);
        }
    }
}

fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what}: waited in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the end of a session, and takes back what it had.
pub fn end<S: KvSession>(
    of: [&Engine; 2],
    session: S,
) -> ((usize, usize), Option<kv_transfer::TransferError>) {
    let mut session = session;
    let back = until("the end of a session", || {
        for engine in of {
            engine.group.drain(|_| {});
        }
        session.reclaim()
    });
    (of[0].take_back(back), session.failure())
}

/// Sends a request from one engine to the other and compares every byte of both.
pub fn hand_over(
    [prefill, decode]: [&mut Engine; 2],
    addr: &str,
    [from, to]: [&Request; 2],
    (room, mode): (u64, TransferMode),
) {
    let what = format!("room {room}, {mode}");
    prefill.compute(from, room);
    let sender = prefill.sender(addr, room, from, mode);
    let options = SessionOptions::default().with(|options| {
        options.mode = Some(mode);
        options.lease_refs = if mode == TransferMode::Pull { sender.lease_refs() } else { Vec::new() };
    });
    let receiver = decode.receiver(addr, room, to, options);
    let (got, failure) = end([decode, prefill], receiver);
    assert_eq!((got, failure), ((to.blocks.len(), to.slots.len()), None), "{what}");
    let (kept, failure) = end([prefill, decode], sender);
    assert_eq!((kept, failure), ((from.blocks.len(), from.slots.len()), None), "{what}");
    decode.arrived(to, room);
    prefill.check(&what);
    decode.check(&what);
}

/// A cache without any feature but its layout.
pub fn plain(
    block: u32,
    (heads, head_dim): (u32, u32),
    dtype: &str,
    layout: Layout,
) -> impl Fn(KvArgsBuilder) -> KvArgsBuilder {
    move |args| {
        args.pages(BLOCKS, block).heads(heads, head_dim).dtype(dtype).model("test").layout(layout.clone())
    }
}
