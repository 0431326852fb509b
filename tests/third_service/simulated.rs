//! The machine of the third service in simulated worlds full of faults. The file is a test of the package
//! kv-sim, so that other tests are built without the simulator.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod counter;
mod world;

use counter::machine::Mistake;
use kv_sim::net::Outcome;
use world::run;

#[test]
fn no_number_has_two_users_whatever_becomes_of_frames_and_hosts() {
    let (mut over, mut crashes, mut pauses, mut partitions) = (0, 0, 0, 0);
    let (mut dropped, mut duplicated, mut misdelivered) = (0, 0, 0);
    for (seed, driven) in (0..200).flat_map(|seed| [(seed, false), (seed, true)]) {
        let Outcome { violation, service, counters, .. } = run(seed, driven, None);
        assert_eq!(violation, None, "seed {seed}, driven {driven}");
        over += service.over();
        crashes += counters.crashes;
        pauses += counters.pauses;
        partitions += counters.partitions;
        dropped += counters.dropped;
        duplicated += counters.duplicated;
        misdelivered += counters.misdelivered;
    }
    let faults = [crashes, pauses, partitions, dropped, duplicated, misdelivered];
    println!("{over} leases ended; {faults:?} faults");
    assert!(over > 3000 && faults.iter().all(|fault| *fault > 20) && crashes > 500, "{over}, {faults:?}");
}

#[test]
fn each_planted_mistake_breaks_the_promise_it_is_meant_for() {
    for (mistake, invariant) in [
        (Mistake::ReturnsEarly, "no_number_is_used_twice"),
        (Mistake::KeepsSlots, "all_that_is_lent_comes_back_once"),
        (Mistake::AsksOn, "sessions_end_by_their_deadline"),
    ] {
        for driven in [false, true] {
            let worlds = (0..50).map(|seed| (seed, run(seed, driven, Some(mistake)).violation));
            let found: Vec<_> = worlds.filter_map(|(seed, broken)| Some((seed, broken?))).collect();
            println!(
                "{mistake:?}, driven {driven}: {} of 50 worlds; first: {:?}",
                found.len(),
                found.first()
            );
            assert!(found.iter().any(|(_, broken)| broken.invariant == invariant), "{mistake:?}, {driven}");
        }
    }
}

#[test]
fn worlds_of_the_service_are_the_same_in_every_run_of_a_seed() {
    for seed in 0..20 {
        let runs = [(); 2].map(|()| run(seed, true, None).trace.hash());
        assert_eq!(runs[0], runs[1], "seed {seed}");
    }
    assert_ne!(run(0, false, None).trace.hash(), run(1, false, None).trace.hash());
}
