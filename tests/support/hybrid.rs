//! A worker of a hybrid model: attention pages, slots of a recurrent layer, window pages, and pages of a
//! draft model, each with an allocator of its own, in memory whose every byte is checked.

use kv_conformance::Random;
use kv_transfer::allocator::{FreeList, PageAllocator};
use kv_transfer::local::Arena;
use kv_transfer::prelude::*;
use kv_transfer::{
    CacheGroup, CacheGroupItems, Holds, Layout, Manager, Publication, Reclaimed, RequestCacheGroups,
};

use super::{PATIENCE, until};

/// The lane of attention pages, which are no cache group, but are indexed like one.
pub const KV: usize = 0;
/// Lane *n* is group *n* - 1.
pub const SLOTS: usize = 1;
pub const WINDOW: usize = 2;
pub const DRAFT: usize = 3;
const LANES: usize = 4;
/// For each lane, the layers of its regions and the size of a token (or slot) in bytes; both engines have the
/// same.
const REGIONS: [&[(u32, Holds, usize)]; LANES] = [
    &[(0, Holds::Key, 24), (0, Holds::Value, 24)],
    &[(1, Holds::State(0), 300), (1, Holds::State(1), 520)],
    &[(2, Holds::Key, 20), (2, Holds::Value, 20)],
    &[(3, Holds::Key, 28)],
];
/// The number of bytes between regions, which nothing may touch.
const GAP: usize = 97;

/// Which items of a lane: the number of the first in the request, and their indices.
pub struct Items<'a> {
    pub lane: usize,
    pub first: usize,
    pub list: &'a PageList,
}

pub struct Hybrid {
    pub worker: Worker,
    pub manager: Manager,
    arena: Arena,
    image: Vec<u8>,
    /// Start and bytes of a token of each region, by lane.
    places: [Vec<(usize, usize)>; LANES],
    /// Tokens of an item, by lane.
    pub tokens: [usize; LANES],
    pub free: [FreeList; LANES],
}

impl Hybrid {
    /// A worker whose items hold this many tokens in each lane, with `items` items in each.
    pub fn start(addr: &str, role: WorkerRole, tokens: [usize; LANES], items: u32) -> Hybrid {
        let mut end = GAP;
        let places: [Vec<(usize, usize)>; LANES] = std::array::from_fn(|lane| {
            let place = |&(_, _, token): &(u32, Holds, usize)| {
                let start = end;
                end += token * tokens[lane] * items as usize + GAP;
                (start, token)
            };
            REGIONS[lane].iter().map(place).collect()
        });
        let image = Random::from_seed(end as u64).bytes(end);
        let arena = Arena::new(end).unwrap();
        arena.write(0, &image).unwrap();
        let page = |lane: usize| CacheGroup::pages(tokens[lane] as u32, 1, 1);
        let groups = vec![CacheGroup::slots(1, 1), page(WINDOW), page(DRAFT).optional()];
        let mut args = KvArgs::builder(&format!("{role:?}").to_lowercase(), 0)
            .pages(items, tokens[KV] as u32)
            .layout(Layout::default().with(|layout| layout.groups = groups))
            .max_inflight(4)
            .max_sge(8);
        for lane in 0..LANES {
            for (&(start, token), &(layer, holds, _)) in places[lane].iter().zip(REGIONS[lane]) {
                let item = (token * tokens[lane]) as u64;
                let role = if lane == KV { RegionRole::Kv } else { RegionRole::State };
                let region = Region::dram(role, arena.addr() + start as u64, item * u64::from(items), item);
                args = args.region(region.layer(layer).holds(holds).group(lane.saturating_sub(1) as u16));
            }
        }
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(&arena).unwrap();
        let client = HttpBootstrapClient::new(ClientConfig::default()).unwrap();
        let config = WorkerConfig::new(args.build().unwrap(), role)
            .with(|config| config.bootstrap = Some(addr.to_owned()));
        let worker = Worker::start(config, transport, Box::new(client)).unwrap();
        let manager = worker.manager();
        until("registration", || manager.publication() == Publication::Published);
        let free = std::array::from_fn(|_| FreeList::new(items));
        Hybrid { worker, manager, arena, image, places, tokens, free }
    }

    /// Takes the items for the tokens `from` to `to` of a request, and the number of the first item. Checks
    /// that the items are as they were left.
    pub fn take(&mut self, lane: usize, from: usize, to: usize) -> (usize, Pages) {
        let first = from / self.tokens[lane];
        let items = self.free[lane].allocate(to.div_ceil(self.tokens[lane]) - first).unwrap();
        self.each(&Items { lane, first, list: items.list() }, |at, len, _| {
            let mut bytes = vec![0; len];
            self.arena.read(at, &mut bytes).unwrap();
            assert!(bytes == self.image[at..at + len], "a free item of lane {lane} was touched");
        });
        (first, items)
    }

    /// The forward pass of a request: writes all tokens of its items.
    pub fn compute(&mut self, items: &Items, room: u64) {
        let mut written = Vec::new();
        self.each(items, |at, len, name| written.push((at, content(room, name, len))));
        for (at, bytes) in written {
            self.arena.write(at, &bytes).unwrap();
            self.image[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// Checks the tokens `from` to `to` of a request in its items.
    pub fn check(&self, items: &Items, (from, to): (usize, usize), room: u64) {
        self.each(items, |at, len, name| {
            let mut bytes = vec![0; len];
            self.arena.read(at, &mut bytes).unwrap();
            let right = bytes == content(room, name, len);
            assert!(right || !(from..to).contains(&name.2), "room {room}: wrong bytes of {name:?}");
        });
    }

    /// Gives items back to the allocator. A later write into them is an error.
    pub fn give(&mut self, lane: usize, items: Pages) {
        let mut is = Vec::new();
        self.each(&Items { lane, first: 0, list: items.list() }, |at, len, _| is.push((at, len)));
        for (at, len) in is {
            self.arena.read(at, &mut self.image[at..at + len]).unwrap();
        }
        self.free[lane].free(items).unwrap();
    }

    /// Gives all items of groups back to their allocators.
    pub fn give_groups(&mut self, groups: RequestCacheGroups) {
        for CacheGroupItems { group, items, .. } in groups {
            self.give(usize::from(group) + 1, items);
        }
    }

    /// Frees all that a session gave back.
    pub fn give_all(&mut self, reclaimed: Reclaimed) {
        self.give(KV, reclaimed.pages);
        self.give_groups(reclaimed.groups);
    }

    /// Everything has come back, that of dropped sessions included, and no other byte has changed.
    pub fn close(mut self, what: &str) {
        until(what, || self.manager.gauges().sessions_open == 0);
        for orphan in self.manager.orphans() {
            self.give(KV, orphan);
        }
        for orphan in self.manager.orphan_groups() {
            self.give_groups(orphan);
        }
        for (lane, free) in self.free.iter().enumerate() {
            assert_eq!(free.available(), free.capacity(), "{what}: free items of lane {lane}");
        }
        let gauges = self.manager.gauges();
        let items = (gauges.items_in_transfer(), gauges.items_quarantined(), gauges.items_orphaned());
        let pages = (gauges.pages_in_transfer(), gauges.pages_quarantined(), gauges.pages_orphaned());
        assert_eq!((items, pages), ((0, 0, 0), (0, 0, 0)), "{what}");
        self.worker.stop(PATIENCE);
        let mut bytes = vec![0; self.image.len()];
        self.arena.read(0, &mut bytes).unwrap();
        let wrong = bytes.iter().zip(&self.image).position(|(is, must)| is != must);
        assert_eq!(wrong, None, "{what}: first wrong byte of {}", bytes.len());
    }

    /// Visits every token in the items: its place, its length, and its name (lane, region, number).
    fn each(&self, items: &Items, mut see: impl FnMut(usize, usize, (usize, usize, usize))) {
        let tokens = self.tokens[items.lane];
        for (position, item) in items.list.iter().enumerate() {
            for (region, &(start, len)) in self.places[items.lane].iter().enumerate() {
                for token in 0..tokens {
                    let number = (items.first + position) * tokens + token;
                    see(start + (item as usize * tokens + token) * len, len, (items.lane, region, number));
                }
            }
        }
    }
}

fn content(room: u64, (lane, region, token): (usize, usize, usize), len: usize) -> Vec<u8> {
    let name = (lane * 8 + region) as u64 * 0x1_0000 + token as u64;
    Random::from_seed(room.wrapping_mul(0x9_0000_0001).wrapping_add(name)).bytes(len)
}
