//! The parameters of a network, which a seed decides before anything happens. All rates are in permille, and
//! all times in nanoseconds.

use kv_core::proto::Timing;

/// The parameters of a network and of its faults.
#[derive(Debug, Clone)]
pub struct Physics {
    /// The seed of the world.
    pub seed: u64,
    /// The number of hosts of the first kind, which prefill.
    pub prefills: usize,
    /// The number of hosts of the second kind, which decode.
    pub decodes: usize,
    /// True if hosts run the worker's own loop.
    pub driven: bool,
    /// The timing of all machines.
    pub timing: Timing,
    /// The length of the fault phase.
    pub fault_span: u64,
    /// Most clock drift, in parts per million.
    pub drift_ppm: u64,
    /// By how much timers ring late, at most.
    pub lateness: u64,
    /// The network that carries frames.
    pub net: NetParams,
    /// The transport that carries bytes.
    pub dma: DmaParams,
    /// What bounds the last writes of a peer.
    pub ways: WayParams,
    /// The bootstrap server and its faults.
    pub lookup: LookupParams,
    /// Faults that strike at one moment.
    pub chaos: ChaosParams,
}

impl Physics {
    /// A network in which nothing goes wrong, and nothing takes time.
    pub fn calm(seed: u64, (prefills, decodes): (usize, usize)) -> Physics {
        Physics {
            seed,
            prefills,
            decodes,
            driven: false,
            timing: Timing::default(),
            fault_span: 0,
            drift_ppm: 0,
            lateness: 0,
            net: NetParams::default(),
            dma: DmaParams::default(),
            ways: WayParams::default(),
            lookup: LookupParams::default(),
            chaos: ChaosParams::default(),
        }
    }

    /// The number of hosts.
    pub fn hosts(&self) -> usize {
        self.prefills + self.decodes
    }
}

/// The network that carries frames. The rates are of all frames.
#[derive(Debug, Clone, Default)]
pub struct NetParams {
    /// Frames that are lost.
    pub drop: u32,
    /// Frames that are delivered twice.
    pub duplicate: u32,
    /// Frames that are delayed with a heavy tail.
    pub tail: u32,
    /// The ordinary delay of a frame.
    pub delay: u64,
    /// The longest delay of a frame.
    pub delay_max: u64,
    /// Frames for a dead life that reach its successor.
    pub misdeliver: u32,
    /// Frames after which garbage arrives.
    pub garbage: u32,
    /// Hellos after which a liar greets the host, too.
    pub liars: u32,
    /// Frames after which a machine gets a timeout that it has not asked for.
    pub spurious: u32,
}

/// The transport that carries bytes. The rates are of all posts.
#[derive(Debug, Clone, Default)]
pub struct DmaParams {
    /// Posts that fail with an error.
    pub error: u32,
    /// Posts that take longer than a deadline.
    pub slow: u32,
    /// The ordinary duration of a post.
    pub time: u64,
    /// The longest duration of a post.
    pub time_max: u64,
    /// Cancellations that take effect at once.
    pub cancel: u32,
    /// Connections that fail when they are opened.
    pub connect_fail: u32,
    /// Posts that are refused because the transport has no room.
    pub refuse: u32,
}

/// The bootstrap server. The rates are of all lookups.
#[derive(Debug, Clone, Default)]
pub struct LookupParams {
    /// Lookups that end with an error.
    pub fail: u32,
    /// The ordinary delay of an answer.
    pub delay: u64,
    /// The longest delay of an answer.
    pub delay_max: u64,
    /// How long a dead rank stays registered.
    pub lease: u64,
    /// Answers that were taken some time before they arrive.
    pub stale: u32,
}

/// Faults with a moment: how many of each in the fault phase.
#[derive(Debug, Clone, Default)]
pub struct ChaosParams {
    /// How many hosts crash.
    pub crashes: u64,
    /// How many hosts are paused.
    pub pauses: u64,
    /// Pauses that last longer than every timeout.
    pub stops: u64,
    /// The longest time for which a host is stopped.
    pub stop_max: u64,
    /// How many pairs of hosts are parted for a while.
    pub partitions: u64,
    /// How many connections are broken between living hosts.
    pub breaks: u64,
    /// Shutdowns, each followed by a crash and a restart.
    pub shutdowns: u64,
    /// Drains, each followed by a restart once the host is empty.
    pub drains: u64,
    /// Longest time until a death is detected.
    pub detect_max: u64,
}

/// How ways end their writes, and how long one slice of a write takes.
#[derive(Debug, Clone, Default)]
pub struct WayParams {
    /// How often a way is of each kind: at death, revocable, within a bound; in tenths.
    pub kinds: [u64; 3],
    /// The bound of the last kind of way.
    pub bound: u64,
    /// Slices that take long.
    pub long: u32,
    /// The longest slice where a processor copies.
    pub slice_max: u64,
    /// Deaths that a transport of the last kind cannot prove, in permille.
    pub unproven: u32,
    /// Posts that do not end before the world is healed, in permille.
    pub stuck: u32,
    /// How long a way that was lost may be refused.
    pub refused_max: u64,
    /// True if most workers have two transports, one of which may connect two workers in one direction only or not
    /// at all, or be lost while the other is not.
    pub several: bool,
}
