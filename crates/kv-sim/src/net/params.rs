//! What a seed decides of a network, before anything happens. All rates are in permille.

use kv_core::proto::Timing;

/// The parameters of a network and of what may go wrong in it.
#[derive(Debug, Clone)]
pub struct Physics {
    /// The seed.
    pub seed: u64,
    /// Hosts of the first kind: prefill.
    pub prefills: usize,
    /// Hosts of the second kind: decode.
    pub decodes: usize,
    /// Hosts run the worker's own loop.
    pub driven: bool,
    /// Timing of all machines.
    pub timing: Timing,
    /// Length of the fault phase.
    pub fault_span: u64,
    /// Most clock drift, in parts per million.
    pub drift_ppm: u64,
    /// How late timers ring at most.
    pub lateness: u64,
    /// What carries frames.
    pub net: NetParams,
    /// What copies.
    pub dma: DmaParams,
    /// What ends writes.
    pub ways: WayParams,
    /// The bootstrap server.
    pub lookup: LookupParams,
    /// Faults with a moment.
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

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.prefills + self.decodes
    }
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

/// The data transport.
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

/// How ways end their writes, and for how long one slice of a write may be under way.
#[derive(Debug, Clone, Default)]
pub struct WayParams {
    /// How often a way is of each kind: at death, revocable, within a bound; in tenths.
    pub kinds: [u64; 3],
    /// The bound of the last kind.
    pub bound: u64,
    /// Slices that take long, in permille.
    pub long: u32,
    /// The longest slice where a processor copies.
    pub slice_max: u64,
    /// Deaths that a transport of the last kind cannot prove, in permille.
    pub unproven: u32,
    /// Posts that do not end before the world is healed, in permille.
    pub stuck: u32,
    /// How long a way that was lost may be refused.
    pub refused_max: u64,
    /// Most workers have two transports, one of which may lead nowhere, or be lost while the other is not.
    pub several: bool,
}
