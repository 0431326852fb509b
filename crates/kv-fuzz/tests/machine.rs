//! The protocol machine under scripts: whatever peers send, no input costs more than a constant times its own
//! bytes and what the worker's own scheduler has asked for.
//!
//! `KV_FUZZ_CASES` sets the number of cases (default 4000), `KV_FUZZ_SEED` the seed, and `KV_FUZZ_CASE` a
//! single case in hexadecimal digits to run alone. Each thread draws cases of its own; together they run that
//! number.

#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_fuzz::driver::{Cases, Witness, corpus, hex, setting};
use kv_fuzz::machine::{self, ALLOCATED, Reach, SAID, STEPS};
use kv_fuzz::worst::{Dear, Worst};
use rustix::time::{ClockId, clock_gettime};

#[global_allocator]
static COUNTING: kv_fuzz::alloc::Counting = kv_fuzz::alloc::Counting;

/// How often a run reports its progress: after each hundredth of its cases, but not after fewer than this
/// many.
const REPORTS: u64 = 100;
const LEAST_BETWEEN: u64 = 5000;

const HEAD: &str = "  share input               bytes      own      steps    allocated       said";

#[test]
fn no_input_costs_more_than_its_own_bytes_and_the_own_scheduler_pay_for() {
    if let Ok(case) = std::env::var("KV_FUZZ_CASE") {
        return one(&case);
    }
    let (cases, seed) = (setting("KV_FUZZ_CASES", 4000), setting("KV_FUZZ_SEED", 24301));
    println!("to repeat this run: KV_FUZZ_CASES={cases} KV_FUZZ_SEED={seed}");
    println!("budgets: steps {STEPS:?}, allocated bytes {ALLOCATED:?}, bytes of outputs {SAID:?}");
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let counter = Counter { cases, ..Counter::default() };
    let found: Vec<Found> = std::thread::scope(|scope| {
        let run = |thread: u64| {
            let counter = &counter;
            scope.spawn(move || dearest(counter, seed ^ (thread << 32)))
        };
        let running: Vec<_> = (0..threads).map(run).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (mut worst, mut reach) = (Worst::default(), Reach::default());
    for found in found {
        worst.join(found.worst);
        reach = reach.or(found.reach);
    }
    println!("the most that any script has filled: {reach:?}");
    println!("{HEAD}   the most expensive inputs of each kind");
    worst.kinds().flatten().for_each(|Dear { charge, .. }| println!("{charge}"));
    println!("{HEAD}   the most expensive inputs of all, with the CPU time of the case (best of 5)");
    for Dear { charge, case } in worst.all() {
        let best = (0..5).map(|_| cpu_time(case)).min().unwrap_or_default();
        println!("{charge} {best:?}");
    }
    if let Some(Dear { charge, case }) = worst.all().first() {
        assert!(charge.share() <= 1.0, "over budget; run it alone with KV_FUZZ_CASE={}", hex(case));
    }
}

/// Runs one case alone.
fn one(digits: &str) {
    let digit = |at| u8::from_str_radix(digits.get(at..at + 2).unwrap_or("0"), 16).unwrap_or(0);
    let case: Vec<u8> = (0..digits.len() / 2).map(|at| digit(2 * at)).collect();
    let outcome = machine::run(&case);
    println!("{} inputs, {:?}", outcome.inputs, outcome.reach);
    println!("{HEAD}");
    outcome.dearest.values().for_each(|charge| println!("{charge}"));
    assert!(outcome.worst().share() <= 1.0);
}

/// How far all threads are together.
#[derive(Debug, Default)]
struct Counter {
    cases: u64,
    begun: AtomicU64,
    /// The largest share so far, as the bits of an `f64`, which rise with the number.
    worst: AtomicU64,
}

impl Counter {
    /// True if another case may be run. Reports the progress now and then.
    fn next(&self) -> bool {
        let begun = self.begun.fetch_add(1, Ordering::Relaxed);
        if begun > 0 && begun.is_multiple_of((self.cases / REPORTS).max(LEAST_BETWEEN)) {
            let worst = f64::from_bits(self.worst.load(Ordering::Relaxed));
            println!(
                "{begun} of {} cases; the most expensive input so far takes up {worst:.3} of its budget",
                self.cases
            );
        }
        begun < self.cases
    }
}

/// What one thread has found.
struct Found {
    worst: Worst,
    reach: Reach,
}

/// Runs cases until there are enough.
fn dearest(counter: &Counter, seed: u64) -> Found {
    let mut all = Cases::new(corpus("machine"), 2048, seed);
    let mut found = Found { worst: Worst::default(), reach: Reach::default() };
    let mut seen = BTreeSet::new();
    let (mut cases, mut inputs) = (0, 0);
    while counter.next() {
        let case = all.next_case();
        let witness = Witness { target: "machine", case: &case };
        let mut outcome = machine::run(&case);
        drop(witness);
        (cases, inputs) = (cases + 1, inputs + outcome.inputs);
        found.reach = found.reach.or(outcome.reach);
        let worst = outcome.worst();
        let before = counter.worst.fetch_max(worst.share().to_bits(), Ordering::Relaxed);
        // At once: a long run may not come to its end.
        if worst.share() > f64::from_bits(before).max(1.0) {
            println!("over budget:\n{HEAD}\n{worst}\nKV_FUZZ_CASE={}", hex(&case));
        }
        let features = std::mem::take(&mut outcome.features);
        let fresh = features.into_iter().filter(|&feature| seen.insert(feature)).count() > 0;
        if found.worst.enter(&case, &outcome) || fresh {
            all.keep(&case, std::mem::take(&mut outcome.steps));
        }
    }
    println!(
        "seed {seed:#x}: {cases} cases, {inputs} inputs, {} different features of the machine seen",
        seen.len()
    );
    found
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
