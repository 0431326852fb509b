//! Worlds of the encoder cache keep all promises, every run of a seed is the same, and every bug that is planted
//! in them is caught by the invariant that is meant for it.
#![allow(clippy::print_stdout)]

use kv_sim::{ENTRIES, Options, Planted, Worlds, run_seed};

/// The number of worlds in which a bug must show.
const WORLDS: u64 = 2000;

fn options(planted: Option<Planted>) -> Options {
    Options { worlds: Worlds::Ec, planted, ..Options::default() }
}

#[test]
fn the_first_seeds_keep_all_promises() {
    for seed in 0..1000 {
        let report = run_seed(seed, options(None));
        assert_eq!(report.violation, None, "seed {seed}");
    }
}

#[test]
fn running_a_seed_twice_gives_the_same_history() {
    for seed in 0..40 {
        let runs = [(); 2].map(|()| run_seed(seed, options(None)));
        assert_eq!(runs[0].trace.hash(), runs[1].trace.hash(), "seed {seed}");
        assert_eq!(runs[0].counters, runs[1].counters, "seed {seed}");
    }
}

#[test]
fn every_planted_bug_is_caught_by_the_invariant_meant_for_it() {
    let planted = Planted::ALL.iter().copied().filter(|planted| planted.places().contains(&ENTRIES));
    for planted in planted {
        let mut others = Vec::new();
        let caught = (0..WORLDS).find(|seed| {
            let violation = run_seed(*seed, options(Some(planted))).violation;
            let meant = violation.as_ref().is_some_and(|found| found.invariant == planted.caught_by());
            others.extend(violation.filter(|_| !meant).map(|found| (*seed, found.to_string())));
            meant || others.len() == 50
        });
        let meant = others.len() < 50 && caught.is_some();
        println!("{} is caught at seed {caught:?}, {} others", planted.name(), others.len());
        assert!(meant, "{} is not caught by {}: {others:#?}", planted.name(), planted.caught_by());
    }
}
