//! Worlds without planted bugs keep all promises, and every run of a seed is the same.

use kv_sim::{Options, run_seed};

#[test]
fn the_first_seeds_keep_all_promises() {
    for seed in 0..2000 {
        let report = run_seed(seed, Options::default());
        assert_eq!(report.violation, None, "seed {seed}");
    }
}

#[test]
fn running_a_seed_twice_gives_the_same_history() {
    for seed in 0..40 {
        let first = run_seed(seed, Options::default());
        let again = run_seed(seed, Options { keep: 10, ..Options::default() });
        assert_eq!(first.trace.hash(), again.trace.hash(), "seed {seed}");
        assert_eq!(first.counters, again.counters, "seed {seed}");
        assert_eq!(first.virtual_time, again.virtual_time, "seed {seed}");
    }
    let hashes: std::collections::BTreeSet<u64> =
        (0..40).map(|seed| run_seed(seed, Options::default()).trace.hash()).collect();
    assert_eq!(hashes.len(), 40, "different seeds have different histories");
}
