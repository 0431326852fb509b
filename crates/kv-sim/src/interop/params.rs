//! The parameters of a world of a dialect, which its seed decides before anything happens. All rates are in
//! permille, and all times in nanoseconds.

use crate::clock::{MS, SEC};
use crate::rng::Rng;

use super::Dialect;

/// The parameters of a world of a dialect.
#[derive(Debug, Clone)]
pub struct DialectParams {
    /// The seed of the world.
    pub seed: u64,
    /// The protocol that all hosts speak.
    pub dialect: Dialect,
    /// The number of prefill engines.
    pub prefills: usize,
    /// The number of decode engines.
    pub decodes: usize,
    /// Tensor-parallel ranks of each prefill engine.
    pub prefill_tp: u32,
    /// Tensor-parallel ranks of each decode engine.
    pub decode_tp: u32,
    /// Pages of each host.
    pub pages: u32,
    /// Most descriptors of a post.
    pub max_sge: usize,
    /// Most posts in flight to one peer.
    pub max_inflight: usize,
    /// Requests of the fault phase.
    pub requests: u64,
    /// The length of the fault phase.
    pub fault_span: u64,
    /// Most clock drift, in parts per million.
    pub drift_ppm: u64,
    /// By how much timers ring late, at most.
    pub lateness: u64,
    /// The ordinary and the longest time of a message of a side channel.
    pub channel_delay: (u64, u64),
    /// The ordinary and the longest time of a notification.
    pub notify_delay: (u64, u64),
    /// The ordinary and the longest time from one descriptor of a post to the next.
    pub slice: (u64, u64),
    /// Posts that fail with an error after some of their descriptors.
    pub post_error: u32,
    /// Posts that stay under way for longer than sessions last.
    pub post_slow: u32,
    /// Cancellations that take effect at once; all others are ignored.
    pub cancel: u32,
    /// Notifications under way that die with their sender, and those that are lost with a way.
    pub notify_lost: u32,
    /// Lookups that fail, of a thousand.
    pub lookup_fail: u32,
    /// Lookups whose answer is out of date.
    pub lookup_stale: u32,
    /// Legs of requests that a scheduler aborts.
    pub abort: u32,
    /// Requests that come again under the same name after a failure.
    pub retry: u32,
    /// The shortest and the longest deadline of a session.
    pub deadline: (u64, u64),
    /// The longest time for which a scheduler lets a session wait.
    pub slow_scheduler: u64,
    /// How many engines are killed. Each comes back at the same addresses.
    pub kills: u64,
    /// For how long the other ranks of an engine outlive the first one, at most.
    pub outlive: u64,
    /// How many hosts are stopped and continued.
    pub stops: u64,
    /// How many pairs of hosts are parted for a while.
    pub partitions: u64,
    /// How many connections of side channels are broken between living hosts.
    pub breaks: u64,
    /// How many engines lose the thread of their side channel, and live on. Only vLLM's engines have such a thread.
    pub deafs: u64,
}

impl DialectParams {
    /// The parameters of a seed.
    pub fn draw(seed: u64, dialect: Dialect) -> DialectParams {
        let mut rng = Rng::new(seed ^ 0x1d1a_1ec7_0000_0000 ^ (dialect as u64) << 56);
        let rng = &mut rng;
        let calm = rng.chance(150);
        let faults = |rng: &mut Rng, most: u64| if calm { 0 } else { rng.below(most + 1) };
        let rate =
            |rng: &mut Rng, most: u64| if calm || rng.chance(400) { 0 } else { rng.below(most + 1) as u32 };
        let delay = rng.pick(&[100_000, MS, 20 * MS]);
        DialectParams {
            seed,
            dialect,
            prefills: 1 + rng.index(2),
            decodes: 1 + rng.index(2),
            prefill_tp: rng.pick(&[1, 1, 2]),
            decode_tp: rng.pick(&[1, 1, 2]),
            pages: rng.pick(&[16, 32, 48]),
            max_sge: rng.pick(&[1, 4, 64]),
            max_inflight: rng.pick(&[1, 2, 8]),
            requests: rng.between(3, 20),
            fault_span: rng.between(20, 150) * SEC,
            drift_ppm: rng.pick(&[0, 50, 200]),
            lateness: rng.pick(&[0, MS, 100 * MS]),
            channel_delay: (delay, rng.pick(&[MS, 100 * MS, 4 * SEC]).max(delay)),
            notify_delay: (delay, rng.pick(&[MS, 100 * MS, 8 * SEC]).max(delay)),
            slice: (rng.pick(&[10_000, MS, 100 * MS]), rng.pick(&[200 * MS, 2 * SEC])),
            post_error: rate(rng, 80),
            post_slow: rate(rng, 80),
            cancel: rng.pick(&[0, 500, 1000]),
            notify_lost: rng.pick(&[0, 500, 1000]),
            lookup_fail: rate(rng, 200),
            lookup_stale: rate(rng, 300),
            abort: rate(rng, 300),
            retry: rng.pick(&[0, 500, 1000]),
            deadline: rng.pick(&[(5 * SEC, 30 * SEC), (40 * SEC, 120 * SEC), (10 * SEC, 120 * SEC)]),
            slow_scheduler: rng.pick(&[10 * MS, SEC, 20 * SEC]),
            kills: faults(rng, 3),
            outlive: rng.pick(&[0, 2 * SEC, 30 * SEC]),
            stops: faults(rng, 3),
            partitions: faults(rng, 3),
            breaks: faults(rng, 4),
            deafs: if dialect == Dialect::Sglang { 0 } else { faults(rng, 2) },
        }
    }
}
