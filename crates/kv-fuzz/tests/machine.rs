//! The protocol machine under scripts: whatever peers say, no input costs more than a constant times its
//! own bytes and what the own scheduler has asked for.
//!
//! `KV_FUZZ_CASES` sets the number of cases (default 4000), `KV_FUZZ_SEED` the seed, and `KV_FUZZ_CASE`
//! one case in hexadecimal digits, which is run alone.

#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;
use std::time::Duration;

use kv_fuzz::driver::{Cases, Witness, corpus, hex, setting};
use kv_fuzz::machine::{self, ALLOCATED, Charge, SAID, STEPS};
use rustix::time::{ClockId, clock_gettime};

#[global_allocator]
static COUNTING: kv_fuzz::alloc::Counting = kv_fuzz::alloc::Counting;

/// How many of the dearest cases are kept, and timed.
const WORST: usize = 100;

/// A case and its dearest input.
struct Dear {
    charge: Charge,
    case: Vec<u8>,
}

#[test]
fn no_input_costs_more_than_its_own_bytes_and_the_own_scheduler_pay_for() {
    if let Ok(case) = std::env::var("KV_FUZZ_CASE") {
        let digit = |at| u8::from_str_radix(case.get(at..at + 2).unwrap_or("0"), 16).unwrap_or(0);
        let case: Vec<u8> = (0..case.len() / 2).map(|at| digit(2 * at)).collect();
        let outcome = machine::run(&case);
        println!("{} inputs, the dearest: {}", outcome.inputs, outcome.worst);
        return assert!(outcome.worst.share() <= 1.0);
    }
    let (cases, seed) = (setting("KV_FUZZ_CASES", 4000), setting("KV_FUZZ_SEED", 24301));
    println!("replay with KV_FUZZ_CASES={cases} KV_FUZZ_SEED={seed}");
    println!("budgets: steps {STEPS:?}, allocated {ALLOCATED:?}, said {SAID:?}");
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let mut dear: Vec<Dear> = std::thread::scope(|scope| {
        let share = |thread| cases / threads + u64::from(thread < cases % threads);
        let run = |thread| scope.spawn(move || dearest(share(thread), seed ^ (thread << 32)));
        let running: Vec<_> = (0..threads).map(run).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    dear.sort_by(|one, other| other.charge.share().total_cmp(&one.charge.share()));
    dear.truncate(WORST);
    println!(
        "  share input               bytes      own      steps    allocated       said   CPU of the case (best of 5)"
    );
    for Dear { charge, case } in &dear {
        let best = (0..5).map(|_| cpu_time(case)).min().unwrap_or_default();
        println!("{charge} {best:?}");
    }
    if let Some(Dear { charge, case }) = dear.first() {
        assert!(charge.share() <= 1.0, "over budget; run it alone with KV_FUZZ_CASE={}", hex(case));
    }
}

/// Runs cases; the dearest of them.
fn dearest(cases: u64, seed: u64) -> Vec<Dear> {
    let mut all = Cases::new(corpus("machine"), 2048, seed);
    let mut dear: Vec<Dear> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut inputs = 0;
    for _ in 0..cases {
        let case = all.next_case();
        let witness = Witness { target: "machine", case: &case };
        let outcome = machine::run(&case);
        drop(witness);
        inputs += outcome.inputs;
        let fresh = outcome.features.into_iter().filter(|&feature| seen.insert(feature)).count() > 0;
        let charge = outcome.worst;
        let least = dear.last().map_or(0.0, |last| last.charge.share());
        let dearer = dear.len() < WORST || charge.share() > least;
        if fresh || dearer {
            all.keep(&case);
        }
        if dearer {
            let at = dear.partition_point(|other| other.charge.share() >= charge.share());
            dear.insert(at, Dear { charge, case });
            dear.truncate(WORST);
        }
    }
    println!("seed {seed:#x}: {cases} cases, {inputs} inputs, {} things seen", seen.len());
    dear
}

fn cpu_time(case: &[u8]) -> Duration {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let start = now();
    machine::run(case);
    now() - start
}
