//! What a seed decides before anything happens.

mod draw;

use std::ops::Range;

use kv_core::proto::{Limits, Timing};

use crate::clock::{MS, SEC};
use crate::unequal::Unequal;
use crate::ways::WayParams;

/// How hosts form engines.
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

/// The parameters of one world. All rates are in permille.
#[derive(Debug, Clone)]
pub struct Params {
    /// The seed.
    pub seed: u64,
    /// Prefill hosts.
    pub prefills: usize,
    /// Decode hosts.
    pub decodes: usize,
    /// How they form engines.
    pub topology: Topology,
    /// The engines, if they differ.
    pub unequal: Option<Unequal>,
    /// Engines add suffixes to the ids of requests; otherwise ids are equal on both sides.
    pub suffixed: bool,
    /// Hosts run the worker's own loop.
    pub driven: bool,
    /// KV regions of each host, if they do not.
    pub kv_regions: usize,
    /// Bytes of an item.
    pub item_len: usize,
    /// Pages of each host.
    pub num_pages: Vec<u32>,
    /// Aux rows of each host; zero for no aux region.
    pub aux_rows: u32,
    /// Items of each state group of each host; zero for no state groups.
    pub state_items: u32,
    /// The one host whose cache fits nobody's.
    pub misfit: Option<usize>,
    /// Requests of the fault phase.
    pub requests: usize,
    /// Requests of the healed world.
    pub heal_requests: usize,
    /// Whether the healed world serves at once, or first waits for all old things to end.
    pub heal_eager: bool,
    /// Timing of all nodes.
    pub timing: Timing,
    /// Limits of all nodes.
    pub limits: Limits,
    /// `max_inflight` of all nodes.
    pub max_inflight: usize,
    /// `max_sge` of all nodes.
    pub max_sge: usize,
    /// Length of the fault phase.
    pub fault_span: u64,
    /// No frame is lost, no host fails: failures must be told.
    pub lossless: bool,
    /// Frames may be lost, and nothing worse: every request must be served.
    pub drizzle: bool,
    /// Most clock drift, in parts per million.
    pub drift_ppm: u64,
    /// How late timers ring at most.
    pub lateness: u64,
    /// The network.
    pub net: NetParams,
    /// The data plane.
    pub dma: DmaParams,
    /// What ends its writes.
    pub ways: WayParams,
    /// The bootstrap server.
    pub lookup: LookupParams,
    /// Faults with a moment.
    pub chaos: ChaosParams,
    /// The schedulers.
    pub sched: SchedParams,
}

/// The network that carries frames.
#[derive(Debug, Clone, Default)]
pub struct NetParams {
    /// Lost.
    pub drop: u32,
    /// Delivered twice.
    pub duplicate: u32,
    /// Delayed with a heavy tail.
    pub tail: u32,
    /// Ordinary delay.
    pub delay: u64,
    /// Longest delay.
    pub delay_max: u64,
    /// Frames to a dead life that reach its successor.
    pub misdeliver: u32,
    /// Garbage that arrives after a frame.
    pub garbage: u32,
    /// Greetings after which somebody else greets, too, and lies.
    pub liars: u32,
    /// Timeouts that nobody asked for, after a frame.
    pub spurious: u32,
}

/// The data plane.
#[derive(Debug, Clone, Default)]
pub struct DmaParams {
    /// Posts that fail.
    pub error: u32,
    /// Posts that are slow.
    pub slow: u32,
    /// Ordinary duration.
    pub time: u64,
    /// Longest duration.
    pub time_max: u64,
    /// Cancels that are honoured at once.
    pub cancel: u32,
    /// Connects that fail.
    pub connect_fail: u32,
    /// Posts refused for want of room.
    pub refuse: u32,
}

/// The bootstrap server.
#[derive(Debug, Clone, Default)]
pub struct LookupParams {
    /// Lookups that fail.
    pub fail: u32,
    /// Ordinary delay.
    pub delay: u64,
    /// Longest delay.
    pub delay_max: u64,
    /// How long a dead rank stays registered.
    pub lease: u64,
    /// Answers that were taken some time before they arrive.
    pub stale: u32,
}

/// Faults with a moment: how many of each in the fault phase.
#[derive(Debug, Clone, Default)]
pub struct ChaosParams {
    /// Crashes.
    pub crashes: u64,
    /// Pauses.
    pub pauses: u64,
    /// Pauses that last longer than every timeout.
    pub stops: u64,
    /// The longest of these.
    pub stop_max: u64,
    /// Partitions.
    pub partitions: u64,
    /// Broken connections.
    pub breaks: u64,
    /// Shutdowns, each followed by a crash and a restart.
    pub shutdowns: u64,
    /// Longest time until a death is detected.
    pub detect_max: u64,
}

/// The schedulers.
#[derive(Debug, Clone, Default)]
pub struct SchedParams {
    /// Halves aborted.
    pub abort: u32,
    /// Requests with one half only.
    pub one_sided: u32,
    /// Requests whose halves disagree.
    pub disagree: u32,
    /// Receivers initialised before the handshake is done.
    pub early_init: u32,
    /// Commands with wrong arguments.
    pub misuse: u32,
    /// Requests named by request ids.
    pub request_ids: u32,
    /// Requests with a twin: another request whose id differs in nothing but its suffix.
    pub twins: u32,
    /// Failed requests tried again under the same base id.
    pub retry: u32,
    /// Requests with two receivers.
    pub two_receivers: u32,
    /// Requests whose pages are read, not written.
    pub pull: u32,
    /// Senders that take either.
    pub auto: u32,
    /// Pulling receivers that are given a reference to their sender.
    pub referenced: u32,
    /// Sessions with a deadline of their own.
    pub own_deadline: u32,
    /// Chunks that are given before they are computed.
    pub layered: u32,
    /// Ordinary pause between two actions.
    pub pause: u64,
    /// Longest pause between two actions.
    pub pause_max: u64,
}

impl Params {
    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.prefills + self.decodes
    }

    /// The bootstrap server of a prefill slot.
    pub fn addr(&self, slot: usize) -> String {
        match self.topology {
            Topology::Plain => format!("p{slot}:1"),
            Topology::DataParallel | Topology::TensorParallel | Topology::Unequal => "p:1".to_owned(),
        }
    }

    /// Bytes of an item of a state group: no two groups have items of one length.
    pub fn state_item_len(&self, group: usize) -> usize {
        self.item_len + 4 * (1 + group)
    }

    /// The place of a slot in its engine: whether it prefills, and its rank.
    pub fn rank(&self, slot: usize) -> (bool, u32) {
        let prefill = slot < self.prefills;
        (prefill, if prefill { slot } else { slot - self.prefills } as u32)
    }

    /// Layers that a slot is told of: those of its pipeline stage, or, where engines are alike, one for
    /// each region.
    pub fn layers(&self, slot: usize) -> Range<u32> {
        let (prefill, rank) = self.rank(slot);
        self.unequal.as_ref().map_or(0..self.kv_regions as u32, |pair| pair.layers_of(prefill, rank))
    }

    /// Tokens of a page of a slot; one where nobody counts them.
    pub fn page_size(&self, slot: usize) -> usize {
        self.unequal.as_ref().map_or(1, |pair| pair.page_size(slot < self.prefills))
    }

    /// The pages of a slot for so many tokens.
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

    /// The prefill rank whose aux row a slot has, or gets.
    pub fn row_source(&self, slot: usize) -> u32 {
        let Some(pair) = &self.unequal else { return 0 };
        let (prefill, rank) = self.rank(slot);
        if prefill { rank } else { pair.aux_source(rank) }
    }

    /// How long a failure may take to reach the other side when no frame is lost.
    pub fn telling_time(&self) -> u64 {
        let retry = self.timing.retry_max.as_nanos() as u64 * 2;
        4 * self.net.delay_max + 2 * retry + 4 * self.lateness + 5 * MS
    }

    /// How long the healed world may take to serve a request.
    pub fn serving_time(&self) -> u64 {
        let timing = &self.timing;
        let old = 2 * self.dma.time_max + 2 * timing.peer_timeout.as_nanos() as u64;
        old + 2 * timing.session_deadline.as_nanos() as u64
            + 40 * timing.retry_max.as_nanos() as u64
            + 10 * self.lookup.delay_max
            + 2 * SEC
    }
}
