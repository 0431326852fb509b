//! The protocol machine under scripts of inputs.
//!
//! The bytes are decisions: which input comes next, and how large its texts, counts and lists are. A
//! script opens and feeds sessions of both kinds, lets several peers greet and say anything under the
//! conversations that they know, ends posts, opens and loses ways, answers lookups, and lets time pass. After
//! every input the outputs are checked against the machine's contract and the gauges against their
//! bounds, and the costs of the input are noted.

mod books;
mod cost;
mod frames;
mod scheduler;
mod script;
mod world;

pub use cost::{ALLOCATED, Budget, Cost, Paid, SAID, STEPS};
pub use world::MAX_INPUTS;

use std::collections::BTreeMap;

use script::Script;
use world::World;

/// What a script has come to.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// How many inputs the machine was given.
    pub inputs: u64,
    /// Of each kind of input, the one that took up most of its budgets.
    pub dearest: BTreeMap<&'static str, Charge>,
    /// Where in the script its steps begin.
    pub steps: Vec<usize>,
    /// How far it has come.
    pub reach: Reach,
    /// Numbers that stand for what the machine has done: scripts that bring new ones are kept.
    pub features: Vec<u32>,
}

impl Outcome {
    /// The input that took up most of its budgets.
    pub fn worst(&self) -> Charge {
        let dearest = self.dearest.values().copied();
        dearest.max_by(|one, other| one.share().total_cmp(&other.share())).unwrap_or_default()
    }
}

/// The most that a script has reached at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reach {
    /// Bytes of one frame.
    pub frame: u64,
    /// What the own scheduler asked for in sessions that had not ended.
    pub own: u64,
    /// Sending and receiving sessions that the machine held.
    pub sessions: usize,
    /// Ranks that served its receiving sessions.
    pub sources: usize,
    /// Receivers that its sending sessions had met.
    pub targets: usize,
    /// Peers.
    pub peers: usize,
    /// Posts in flight.
    pub posts: usize,
}

impl Reach {
    /// The most of both.
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

/// One input: what it was, what it has cost, and what pays for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Charge {
    /// What it was.
    pub what: &'static str,
    /// Its cost.
    pub cost: Cost,
    /// What pays for it.
    pub paid: Paid,
}

impl Charge {
    /// How much of its budgets the input takes up.
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

/// Runs a script. Panics if an input costs more than its budgets, too.
pub fn machine(bytes: &[u8]) {
    let worst = run(bytes).worst();
    assert!(worst.share() <= 1.0, "over budget (share, input, bytes, own, steps, allocated, said): {worst}");
}
