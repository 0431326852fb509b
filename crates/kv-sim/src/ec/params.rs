//! The parameters of a world of the encoder cache, which its seed decides before anything happens.

use std::time::Duration;

use kv_core::TransferMode;
use kv_core::proto::Limits;
use kv_ec::Eviction;

use crate::clock::{MS, US};
use crate::kv::params::draw::{
    draw_chaos, draw_dma, draw_lookup, draw_net, draw_timing, draw_way_retries, draw_ways,
};
use crate::net::lives::Slot;
use crate::net::params::{ChaosParams, Physics};
use crate::rng::Rng;

/// The most blocks that a region of these worlds has.
pub const MAX_BLOCKS: usize = 40;

/// The parameters of one world of the encoder cache. All rates are in permille.
#[derive(Debug, Clone)]
pub struct EcParams {
    /// The network, and what may go wrong in it. Producers are the hosts of the first kind.
    pub physics: Physics,
    /// The number of blocks of each host.
    pub blocks: Vec<u32>,
    /// The size of a block, in bytes.
    pub block_bytes: usize,
    /// The number of blocks of each entry that there is in the world.
    pub items: Vec<u32>,
    /// True if every host saves entries and wants entries.
    pub both: bool,
    /// The one host, if any, whose entries are not interchangeable with those of the others.
    pub misfit: Option<Slot>,
    /// Which entries make room first.
    pub eviction: Eviction,
    /// True if no frame is lost and no host fails.
    pub lossless: bool,
    /// The budget of sessions that name none.
    pub budget: Duration,
    /// The lease of readers.
    pub lease: Duration,
    /// How long one answer of a producer may take.
    pub answer_deadline: Duration,
    /// How long one try may take.
    pub try_limit: Duration,
    /// The shortest and the longest pause between two tries.
    pub retry: (Duration, Duration),
    /// Most answers of one producer at once.
    pub max_answers: usize,
    /// The `max_inflight` and the `max_sge` of all machines.
    pub posting: (usize, usize),
    /// The limits of all machines.
    pub limits: Limits,
    /// How many entries are saved while there are faults.
    pub saves: usize,
    /// How often entries are wanted while there are faults; each time by one to four sessions.
    pub wants: usize,
    /// How many entries are saved and wanted in the healed world, one after the other.
    pub rounds: usize,
    /// Which sides move the bytes; a want takes any of these.
    pub modes: &'static [TransferMode],
    /// Sessions that are aborted.
    pub abort: u32,
    /// Sessions that want an entry of another size.
    pub other_size: u32,
    /// Sessions with a budget of their own.
    pub own_budget: u32,
    /// Saves that go through the machine, with an event that they wait for; a fifth of the events fail.
    pub evented: u32,
    /// The longest time for which an entry is held, and for which an encoder writes.
    pub hold_max: u64,
}

impl EcParams {
    /// The parameters of the world of a seed.
    pub fn draw(seed: u64) -> EcParams {
        let rng = &mut Rng::new(seed ^ 0x5eed_0ec0_0ec0);
        let lossless = rng.chance(200);
        let (prefills, decodes) = (1 + rng.index(3), 1 + rng.index(3));
        let hosts = prefills + decodes;
        let timing = draw_way_retries(seed, draw_timing(rng));
        let ms = Duration::from_millis;
        let budget = ms(rng.between(50, 3000));
        let retry_first = ms(rng.between(1, 20));
        let mut chaos = if lossless { ChaosParams::default() } else { draw_chaos(rng) };
        if !lossless {
            chaos.stops = rng.pick(&[0, 0, 1, 2]);
            let longest = timing.peer_timeout.max(timing.kv_lease_duration).max(budget);
            chaos.stop_max = longest.as_nanos() as u64 * rng.pick(&[1, 2, 4]);
        }
        // Of a series of its own, so that a world differs from one without drains in its drains only.
        chaos.drains = Rng::new(seed ^ 0xd4a1_0ec0).pick(&[0, 0, 1, 2]);
        let largest = rng.pick(&[1, 4, 8]);
        let smallest = *[8, 10, 16, 24].get(rng.index(4)).unwrap_or(&8);
        let physics = Physics {
            seed,
            prefills,
            decodes,
            driven: rng.chance(200),
            timing,
            fault_span: rng.between(50 * MS, 800 * MS),
            drift_ppm: rng.pick(&[0, 100, 10_000, 15_000]),
            lateness: rng.pick(&[0, 50 * US, MS]),
            net: draw_net(rng, lossless, &timing),
            dma: draw_dma(rng, lossless, &timing),
            ways: draw_ways(seed ^ 0xec, lossless),
            lookup: draw_lookup(rng, lossless),
            chaos,
        };
        const ALL: [&[TransferMode]; 4] = [
            &[TransferMode::Push],
            &[TransferMode::Pull],
            &[TransferMode::Auto],
            &[TransferMode::Push, TransferMode::Pull, TransferMode::Auto],
        ];
        EcParams {
            blocks: (0..hosts).map(|_| rng.between(smallest, MAX_BLOCKS as u64) as u32).collect(),
            block_bytes: rng.pick(&[8, 12, 16]),
            items: (0..rng.between(1, 6)).map(|_| rng.between(1, largest) as u32).collect(),
            both: rng.chance(300),
            misfit: rng.chance(50).then(|| rng.index(hosts)),
            eviction: rng.pick(&[Eviction::Fifo, Eviction::Lru]),
            lossless,
            budget,
            lease: timing.kv_lease_duration,
            answer_deadline: ms(rng.between(300, 3000)),
            try_limit: ms(rng.pick(&[300, 1000, 20_000])),
            retry: (retry_first, retry_first * rng.between(1, 20) as u32),
            max_answers: rng.pick(&[1, 2, 1024]),
            posting: (rng.pick(&[1, 2, 4, 32]), rng.pick(&[1, 2, 4, 64])),
            limits: Limits::default().with(|limits| limits.max_post_bytes = rng.pick(&[8, 16, 40, 1 << 20])),
            saves: 1 + rng.index(10),
            wants: 1 + rng.index(14),
            rounds: 1 + rng.index(3),
            modes: ALL[rng.index(4)],
            abort: rng.pick(&[0, 50, 200, 500]),
            other_size: rng.pick(&[0, 0, 100, 300]),
            own_budget: rng.pick(&[0, 100, 500]),
            evented: rng.pick(&[0, 300, 1000]),
            hold_max: rng.pick(&[MS, 20 * MS, 300 * MS]),
            physics,
        }
    }

    /// The address of the bootstrap server of a host.
    pub fn addr(slot: Slot) -> String {
        format!("ec{slot}:1")
    }

    /// The text that a host must have in common with another for their entries to be interchangeable.
    pub fn compatibility(&self, slot: Slot) -> &'static str {
        if self.misfit == Some(slot) { "another model" } else { "one model" }
    }
}
