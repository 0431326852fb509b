//! The machine of the encoder cache under scripts: whatever peers send, no input costs more than a constant times
//! its own bytes, the tables keep to their bounds, and every block is accounted for.
//!
//! `KV_FUZZ_CASES` sets the number of cases (default 4000), and `KV_FUZZ_SEED` the seed.
#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;

use kv_fuzz::driver::{Cases, Witness, corpus, setting};
use kv_fuzz::machine::{Reach, run_entries};
use kv_fuzz::worst::Worst;

#[global_allocator]
static COUNTING: kv_fuzz::alloc::Counting = kv_fuzz::alloc::Counting;

#[test]
fn hostile_peers_of_an_encoder_cache_cost_what_they_send_and_leave_nothing_behind() {
    let (cases, seed) = (setting("KV_FUZZ_CASES", 4000), setting("KV_FUZZ_SEED", 24301));
    println!("to repeat this run: KV_FUZZ_CASES={cases} KV_FUZZ_SEED={seed}");
    let mut all = Cases::new(corpus("entries"), 2048, seed);
    let (mut worst, mut reach, mut seen) = (Worst::default(), Reach::default(), BTreeSet::new());
    for _ in 0..cases {
        let case = all.next_case();
        let witness = Witness { target: "entries", case: &case };
        let mut outcome = run_entries(&case);
        assert!(outcome.worst().share() <= 1.0, "over budget: {}", outcome.worst());
        drop(witness);
        reach = reach.or(outcome.reach);
        let features = std::mem::take(&mut outcome.features);
        let fresh = features.into_iter().filter(|&feature| seen.insert(feature)).count() > 0;
        if worst.enter(&case, &outcome) || fresh {
            all.keep(&case, std::mem::take(&mut outcome.steps));
        }
    }
    println!("the most that any script has filled: {reach:?}; {} different features", seen.len());
    worst.kinds().filter_map(<[_]>::first).for_each(|dear| println!("{}", dear.charge));
    assert!(cases < 1000 || reach.targets > 1 && reach.posts > 0 && reach.sessions > 3, "{reach:?}");
}
