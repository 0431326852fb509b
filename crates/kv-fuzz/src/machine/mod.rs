//! The protocol machine under scripts of inputs.
//!
//! The bytes of a script are decisions: which input comes next, and how large its texts, counts and lists
//! are. A script opens and feeds sessions of both kinds, lets several peers greet the worker and send
//! anything under the conversations that they know, ends posts, opens and loses ways, answers lookups, and
//! lets time pass. After every input the outputs are checked against the machine's contract, the gauges
//! against their bounds, and the cost of the input is noted.
//!
//! `entries.rs` does the same with the machine of the encoder cache, whose peers ask for entries, and `dialects` with
//! the machines of vLLM's and SGLang's dialects.

mod books;
mod caches;
mod cost;
mod dialects;
mod entries;
mod frames;
mod scheduler;
mod script;
mod world;

pub use cost::{ALLOCATED, Budget, Cost, Paid, SAID, STEPS};
pub use dialects::{HELD, run_sglang, run_vllm, sglang_machine, vllm_machine};
pub use world::MAX_INPUTS;

use std::collections::BTreeMap;

use script::Script;
use world::World;

/// The result of running a script.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// How many inputs the machine was given.
    pub inputs: u64,
    /// For each kind of input, the input that took up the largest share of its budgets.
    pub dearest: BTreeMap<&'static str, Charge>,
    /// The offsets in the script at which its steps begin.
    pub steps: Vec<usize>,
    /// How much of each table the script has filled.
    pub reach: Reach,
    /// Numbers that stand for what the machine has done; scripts with new numbers are kept.
    pub features: Vec<u32>,
}

impl Outcome {
    /// The input that took up the largest share of its budgets.
    pub fn worst(&self) -> Charge {
        let dearest = self.dearest.values().copied();
        dearest.max_by(|one, other| one.share().total_cmp(&other.share())).unwrap_or_default()
    }
}

/// The most that a script has reached at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reach {
    /// The size of the largest frame, in bytes.
    pub frame: u64,
    /// What the worker's own scheduler has asked for in sessions that had not ended.
    pub own: u64,
    /// Sending and receiving sessions that the machine held.
    pub sessions: usize,
    /// The number of ranks that served receiving sessions.
    pub sources: usize,
    /// The number of receivers that sending sessions had met.
    pub targets: usize,
    /// The number of peers.
    pub peers: usize,
    /// The number of posts in flight.
    pub posts: usize,
}

impl Reach {
    /// The larger number of both, for each field.
    pub fn or(self, other: Reach) -> Reach {
        Reach {
            frame: self.frame.max(other.frame),
            own: self.own.max(other.own),
            sessions: self.sessions.max(other.sessions),
            sources: self.sources.max(other.sources),
            targets: self.targets.max(other.targets),
            peers: self.peers.max(other.peers),
            posts: self.posts.max(other.posts),
        }
    }
}

/// One input, its cost, and what its budget is computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Charge {
    /// The name of the input's kind.
    pub what: &'static str,
    /// The cost of the input.
    pub cost: Cost,
    /// What the budget of the input is computed from.
    pub paid: Paid,
}

impl Charge {
    /// The share of its budgets that the input takes up.
    pub fn share(&self) -> f64 {
        self.cost.share(self.paid)
    }
}

impl std::fmt::Display for Charge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Cost { steps, allocated, said }, Paid { bytes, own }) = (self.cost, self.paid);
        let (share, what) = (self.share(), self.what);
        write!(f, "{share:7.3} {what:<16} {bytes:>8} {own:>8} {steps:>10} {allocated:>12} {said:>10}")
    }
}

/// Runs a script. Panics if the machine breaks its contract or a bound; costs are only noted.
pub fn run(bytes: &[u8]) -> Outcome {
    World::new(Script(bytes)).run()
}

/// Runs a script for the machine of the encoder cache. Panics if the machine breaks its contract or a bound;
/// costs are only noted.
pub fn run_entries(bytes: &[u8]) -> Outcome {
    entries::Entries::new(Script(bytes)).run()
}

/// Runs a script for the machine of the encoder cache. Panics also if an input costs more than its budgets.
pub fn entries(bytes: &[u8]) {
    let worst = run_entries(bytes).worst();
    assert!(worst.share() <= 1.0, "over budget (share, input, bytes, own, steps, allocated, said): {worst}");
}

/// Runs a script. Panics also if an input costs more than its budgets.
pub fn machine(bytes: &[u8]) {
    let worst = run(bytes).worst();
    assert!(worst.share() <= 1.0, "over budget (share, input, bytes, own, steps, allocated, said): {worst}");
}
