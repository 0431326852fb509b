//! The machines of vLLM's and SGLang's dialects under scripts: whatever foreign engines send, sessions end in time,
//! pages come back once and never under a write, memory is bounded, and what is said is of the dialect.
//!
//! `KV_FUZZ_CASES` sets the number of cases of each machine (default 4000), `KV_FUZZ_SEED` the seed, and
//! `KV_FUZZ_CASE` a single case in hexadecimal digits to run alone.
#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;

use kv_fuzz::driver::{Cases, Witness, corpus, setting};
use kv_fuzz::machine::{Outcome, Reach, run_sglang, run_vllm};
use kv_fuzz::worst::Worst;

#[global_allocator]
static COUNTING: kv_fuzz::alloc::Counting = kv_fuzz::alloc::Counting;

#[test]
fn hostile_vllm_engines_cost_what_they_send_and_no_page_is_lost() {
    let Some((reach, said)) = run_all("vllm_machine", run_vllm) else { return };
    let all = ["Answer", "Done", "Heartbeat", "Registration", "Read", "Written"];
    assert!(said.is_superset(&all.into()), "{said:?}");
    assert!(reach.posts > 1 && reach.sessions > 3 && reach.peers > 3, "{reach:?}");
}

#[test]
fn hostile_sglang_workers_cost_what_they_send_and_no_page_is_lost() {
    let Some((reach, said)) = run_all("sglang_machine", run_sglang) else { return };
    let all = ["AbortAck", "AbortOfRank", "Registration", "Request", "Status", "Written", "Found"];
    assert!(said.is_superset(&all.into()), "{said:?}");
    assert!(reach.posts > 1 && reach.sessions > 3 && reach.peers > 3, "{reach:?}");
}

/// Runs all cases: how far the scripts have come, and the kinds of inputs; `None` if the cases are too few to tell.
fn run_all(target: &'static str, run: fn(&[u8]) -> Outcome) -> Option<(Reach, BTreeSet<&'static str>)> {
    if let Ok(digits) = std::env::var("KV_FUZZ_CASE") {
        let digit = |at| u8::from_str_radix(digits.get(at..at + 2).unwrap_or("0"), 16).unwrap_or(0);
        let outcome = run(&(0..digits.len() / 2).map(|at| digit(2 * at)).collect::<Vec<u8>>());
        outcome.dearest.values().for_each(|charge| println!("{charge}"));
        assert!(outcome.worst().share() <= 1.0);
        return None;
    }
    let (cases, seed) = (setting("KV_FUZZ_CASES", 4000), setting("KV_FUZZ_SEED", 24301));
    println!("to repeat this run: KV_FUZZ_CASES={cases} KV_FUZZ_SEED={seed}");
    let mut all = Cases::new(corpus(target), 2048, seed);
    let (mut worst, mut reach, mut seen) = (Worst::default(), Reach::default(), BTreeSet::new());
    let mut said = BTreeSet::new();
    for _ in 0..cases {
        let case = all.next_case();
        let witness = Witness { target, case: &case };
        let mut outcome = run(&case);
        assert!(outcome.worst().share() <= 1.0, "over budget: {}", outcome.worst());
        drop(witness);
        reach = reach.or(outcome.reach);
        said.extend(outcome.dearest.keys());
        let features = std::mem::take(&mut outcome.features);
        let fresh = features.into_iter().filter(|&feature| seen.insert(feature)).count() > 0;
        if worst.enter(&case, &outcome) || fresh {
            all.keep(&case, std::mem::take(&mut outcome.steps));
        }
    }
    println!("{target}: the most that any script has filled: {reach:?}; {} different features", seen.len());
    worst.kinds().filter_map(<[_]>::first).for_each(|dear| println!("{}", dear.charge));
    (cases >= 1000).then_some((reach, said))
}
