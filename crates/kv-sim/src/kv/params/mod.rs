//! The parameters of a world, which its seed decides before anything happens.

pub(crate) mod draw;

use std::ops::Range;

use kv_core::proto::{Limits, Timing};

use crate::clock::{MS, SEC};
use crate::kv::unequal::Unequal;
use crate::net::params::Physics;

/// How the hosts of a world form engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// Every host is an engine of its own.
    Plain,
    /// All prefill hosts are data-parallel replicas of one engine.
    DataParallel,
    /// Both engines have two tensor-parallel ranks; rank k meets rank k.
    TensorParallel,
    /// The engines differ in parallel sizes, pages and layout: see [`Params::unequal`].
    Unequal,
}

/// Which faults a world has, and thereby what is promised in it. Ways that do not lead everywhere are in all of them: another
/// transport takes their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Faults {
    /// All of them.
    All,
    /// Connections between living hosts may break, with the frames on them, and posts may fail. No host fails, and no
    /// other frame is lost: how each half of a request ends must be told to the other half over the next connection.
    Breaks,
    /// Frames may be lost, and nothing worse: every request must be served.
    Losses,
    /// No frame is lost and no host fails, so that the end of each half must be told to the other half.
    None,
}

/// The parameters of one world. All rates are in permille.
#[derive(Debug, Clone)]
pub struct Params {
    /// The network, and what may go wrong in it.
    pub physics: Physics,
    /// How they form engines.
    pub topology: Topology,
    /// The two engines, if they hold the model's cache differently.
    pub unequal: Option<Unequal>,
    /// Engines add suffixes to the ids of requests; otherwise ids are equal on both sides.
    pub suffixed: bool,
    /// KV regions of each host, if they do not.
    pub kv_regions: usize,
    /// The size of an item, in bytes.
    pub item_len: usize,
    /// The number of pages of each host.
    pub num_pages: Vec<u32>,
    /// Aux rows of each host; zero for no aux region.
    pub aux_rows: u32,
    /// Items of each cache group of each host; zero for no cache groups.
    pub state_items: u32,
    /// The one host, if any, whose cache cannot be paired with that of any other host.
    pub misfit: Option<usize>,
    /// The number of requests of the fault phase.
    pub requests: usize,
    /// The number of requests of the healed world.
    pub heal_requests: usize,
    /// Whether the healed world serves at once, or first waits for all old things to end.
    pub heal_eager: bool,
    /// The limits of all machines.
    pub limits: Limits,
    /// The `max_inflight` of all machines.
    pub max_inflight: usize,
    /// The `max_sge` of all machines.
    pub max_sge: usize,
    /// The faults, and what is promised.
    pub faults: Faults,
    /// What the schedulers do.
    pub sched: SchedParams,
}

/// What the schedulers do, in permille of the requests unless said otherwise.
#[derive(Debug, Clone, Default)]
pub struct SchedParams {
    /// Halves of requests that their scheduler aborts.
    pub abort: u32,
    /// Requests with one half only.
    pub one_sided: u32,
    /// Requests whose halves disagree about pages.
    pub disagree: u32,
    /// Receivers initialised before the handshake is done.
    pub early_init: u32,
    /// Commands with arguments that cannot be right.
    pub misuse: u32,
    /// Requests named by a text id instead of a number.
    pub request_ids: u32,
    /// Requests with a twin: another request whose id differs only in the suffix.
    pub twins: u32,
    /// Failed requests that are tried again under the same base id.
    pub retry: u32,
    /// Requests with two receivers.
    pub two_receivers: u32,
    /// Requests whose pages are read (pull), and not written (push).
    pub pull: u32,
    /// Senders that accept both push and pull.
    pub auto: u32,
    /// Pulling receivers that are given a reference to their sender.
    pub referenced: u32,
    /// Sessions with a deadline of their own.
    pub own_deadline: u32,
    /// Chunks that are given before they are computed.
    pub layered: u32,
    /// The ordinary pause between two actions of a scheduler, in nanoseconds.
    pub pause: u64,
    /// The longest pause between two actions of a scheduler, in nanoseconds.
    pub pause_max: u64,
}

impl Params {
    /// The number of hosts.
    pub fn hosts(&self) -> usize {
        self.physics.hosts()
    }

    /// The bootstrap server of a prefill slot.
    pub fn addr(&self, slot: usize) -> String {
        match self.topology {
            Topology::Plain => format!("p{slot}:1"),
            Topology::DataParallel | Topology::TensorParallel | Topology::Unequal => "p:1".to_owned(),
        }
    }

    /// The size of an item of a cache group, in bytes; items of different groups have different sizes.
    pub fn state_item_len(&self, group: usize) -> usize {
        self.item_len + 4 * (1 + group)
    }

    /// The place of a slot in its engine: true for prefill, and the rank.
    pub fn rank(&self, slot: usize) -> (bool, u32) {
        let prefill = slot < self.physics.prefills;
        (prefill, if prefill { slot } else { slot - self.physics.prefills } as u32)
    }

    /// The layers that a slot's scheduler announces: those of its pipeline stage or, where engines are alike,
    /// one for each region.
    pub fn layers(&self, slot: usize) -> Range<u32> {
        let (prefill, rank) = self.rank(slot);
        self.unequal.as_ref().map_or(0..self.kv_regions as u32, |pair| pair.layers_of(prefill, rank))
    }

    /// The number of tokens in a page of a slot; one where worlds count in pages.
    pub fn page_size(&self, slot: usize) -> usize {
        self.unequal.as_ref().map_or(1, |pair| pair.page_size(slot < self.physics.prefills))
    }

    /// The number of pages of a slot that this many tokens take.
    pub fn pages_of(&self, slot: usize, tokens: usize) -> usize {
        let (prefill, rank) = self.rank(slot);
        self.unequal.as_ref().map_or(tokens, |pair| pair.deal(prefill, rank).pages(tokens))
    }

    /// The prefill slots that serve a decode slot in a request of these.
    pub fn servers(&self, senders: &[usize], receiver: usize) -> Vec<usize> {
        match &self.unequal {
            Some(pair) => pair.sources(self.rank(receiver).1).into_iter().map(|rank| rank as usize).collect(),
            None => senders.first().copied().into_iter().collect(),
        }
    }

    /// The prefill rank whose aux row a slot has or gets.
    pub fn row_source(&self, slot: usize) -> u32 {
        let Some(pair) = &self.unequal else { return 0 };
        let (prefill, rank) = self.rank(slot);
        if prefill { rank } else { pair.aux_source(rank) }
    }

    /// True if no host fails and no connection breaks.
    pub fn is_gentle(&self) -> bool {
        matches!(self.faults, Faults::Losses | Faults::None)
    }

    /// True if no host fails. A host that drains is stopped nevertheless, once it is empty.
    pub fn spares_hosts(&self) -> bool {
        self.faults != Faults::All
    }

    /// True if what becomes of a half of a request must be told to the other side, and not be left to its deadline.
    pub fn tells_ends(&self) -> bool {
        matches!(self.faults, Faults::Breaks | Faults::None)
    }

    /// How long such an end may take to reach the other side.
    pub fn telling_time(&self) -> u64 {
        let Timing { retry_max, keepalive, .. } = self.physics.timing;
        let retry = retry_max.as_nanos() as u64 * 2;
        let once = 4 * self.physics.net.delay_max + 2 * retry + 4 * self.physics.lateness + 5 * MS;
        // Each broken connection is first noticed, then opened again, then trusted once the old one has been silent.
        let reopened = self.physics.chaos.detect_max
            + self.physics.ways.refused_max
            + 8 * keepalive.as_nanos() as u64
            + once;
        once + if self.faults == Faults::Breaks { (1 + self.physics.chaos.breaks) * reopened } else { 0 }
    }

    /// How long the healed world may take to serve a request.
    pub fn serving_time(&self) -> u64 {
        let timing = &self.physics.timing;
        let old = 2 * self.physics.dma.time_max + 2 * timing.peer_timeout.as_nanos() as u64;
        old + 2 * timing.session_deadline.as_nanos() as u64
            + 40 * timing.retry_max.as_nanos() as u64
            + 10 * self.physics.lookup.delay_max
            + 2 * SEC
    }
}
