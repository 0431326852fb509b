//! The machines of foreign dialects under scripts of inputs: vLLM's and SGLang's.
//!
//! As with the native machine, the bytes of a script are decisions. A script opens senders and receivers of one
//! machine, lets foreign engines say anything that their protocol has, in any order and by any way, damages some of
//! what they say, ends posts, opens and loses ways, answers lookups, and lets time pass.
//!
//! After every input:
//! - a page that comes back was lent once, comes back once, and no post in flight touches the page;
//! - no session is open after its deadline, and none ends twice;
//! - what the machine says is what an engine of the dialect says, byte by byte, and goes to a way that is open;
//! - the memory that the machine holds keeps to [`HELD`], and the cost of the input to its budget.
//!
//! After the script the worker stops, and its peers die: everything that was lent has come back.
//!
//! `world.rs` has the surroundings of every dialect, `vllm.rs` and `sglang.rs` have what foreign engines say.
// What a run finds is told by a panic, as by an assertion.
#![allow(clippy::panic)]

mod sglang;
mod vllm;
mod world;

use kv_core::proto::{Input, Output, Resource};
use kv_core::{PageList, Post, RankRecord, Room, SessionId, SessionOptions, WayEnd};
use kv_interop::message::{Incoming, Way};
use kv_poll::KvMachine;

use super::Outcome;
use super::cost::Budget;
use super::script::Script;
use world::World;

/// The bytes that a machine and its surroundings may hold: `bytes` of the budget are the largest frame of the
/// script, and `own` is what the worker's own scheduler has asked for.
pub const HELD: Budget = Budget { base: 768 << 10, per_byte: 48, per_own: 2048 };
/// Pages of the worker under test.
const PAGES: u32 = 64;
/// Rows of each of its aux buffers.
const ROWS: u32 = 8;

/// What foreign engines of a dialect say, and what they take from the machine.
trait Dialect: Sized {
    /// The name of the dialect's target.
    const NAME: &'static str;
    /// True if requests have aux rows; else a session that is given one fails.
    const AUX: bool;

    /// The engines around a worker, the arguments of the worker, and its machine.
    fn new(script: &mut Script<'_>) -> (Self, kv_core::KvArgs, KvMachine);

    /// The room, the bootstrap address and the options of a session, and how many things the scheduler asks for.
    fn open(&mut self, script: &mut Script<'_>, sender: bool) -> (Room, String, SessionOptions, u64);

    /// What arrives: the name of its kind, and the input.
    fn say(&mut self, script: &mut Script<'_>) -> (&'static str, Incoming);

    /// What an engine says that owes the machine an answer; `None` once all have answered.
    fn serve(&mut self) -> Option<Incoming> {
        None
    }

    /// Something is about to arrive.
    fn arrives(&mut self, _incoming: &Incoming) {}

    /// The machine says something by a way. Panics if no engine of the dialect would.
    fn hears(&mut self, peer: kv_core::PeerId, way: &Way, frame: &[u8]);

    /// The machine has begun a post. Panics if no engine of the dialect would tell its peer so.
    fn posted(&mut self, way: &Way, post: &Post);

    /// What a bootstrap server answers.
    fn ranks(&self, script: &mut Script<'_>) -> Vec<RankRecord>;

    /// A session was opened for a room.
    fn opened(&mut self, _session: SessionId, _room: &Room, _sender: bool) {}

    /// A way has ended; the engine at its end may live.
    fn gone(&mut self, _way: &Way, _end: WayEnd) {}

    /// Pages of a session come back. Panics if a foreign engine may still write into them.
    fn comes_back(&mut self, _session: SessionId, _pages: &PageList) {}
}

/// Runs a script for the machine of vLLM's dialect. Panics if the machine breaks its contract or a bound; costs are
/// only noted.
pub fn run_vllm(bytes: &[u8]) -> Outcome {
    World::<vllm::Vllm>::new(Script(bytes)).run()
}

/// Runs a script for the machine of SGLang's dialect. Panics if the machine breaks its contract or a bound; costs
/// are only noted.
pub fn run_sglang(bytes: &[u8]) -> Outcome {
    World::<sglang::Sglang>::new(Script(bytes)).run()
}

/// Runs a script for the machine of vLLM's dialect. Panics also if an input costs more than its budgets.
pub fn vllm_machine(bytes: &[u8]) {
    check(&run_vllm(bytes));
}

/// Runs a script for the machine of SGLang's dialect. Panics also if an input costs more than its budgets.
pub fn sglang_machine(bytes: &[u8]) {
    check(&run_sglang(bytes));
}

fn check(outcome: &Outcome) {
    let worst = outcome.worst();
    assert!(worst.share() <= 1.0, "over budget (share, input, bytes, own, steps, allocated, said): {worst}");
}
