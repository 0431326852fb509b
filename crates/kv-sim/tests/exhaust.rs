//! The exhaustive check of the lease protocol finds nothing wrong, and finds every bug planted in it.

#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;

use kv_sim::Planted;
use kv_sim::exhaust::{EntryScope, Scope, explore, explore_entries, hunt};

#[test]
fn no_history_of_a_small_world_breaks_a_promise() {
    for &scope in Scope::ALL {
        let outcome = explore(scope, None);
        let (states, steps, ends) = (outcome.states, outcome.steps, outcome.ends);
        println!(
            "{:15} {:2} steps deep: {states} states, {steps} steps, {ends} ends",
            scope.name, scope.depth
        );
        if let Some(found) = outcome.found {
            panic!("{}: {}\n{}", scope.name, found.violation, found.history.join("\n"));
        }
    }
}

/// The planted bugs that show in small worlds.
fn small() -> impl Iterator<Item = (Planted, &'static str)> {
    Planted::ALL.iter().filter_map(|planted| Some((*planted, planted.scope()?)))
}

#[test]
fn every_bug_of_a_small_world_is_found() {
    for (planted, scope) in small() {
        let scope = Scope::named(scope).unwrap();
        let outcome = hunt(scope, Some(planted));
        let name = planted.name();
        let found = outcome.found.unwrap_or_else(|| panic!("{name} is not found in {}", scope.name));
        let history = found.history.join("\n  ");
        println!("{name}: {} states, {}\n  {history}", outcome.states, found.violation);
        assert_eq!(found.violation.invariant, planted.caught_by(), "{name}: {}", found.violation);
    }
}

#[test]
fn every_invariant_of_leases_can_fail_in_a_small_world() {
    let caught: BTreeSet<&str> = small().map(|(planted, _)| planted.caught_by()).collect();
    let all = [
        "ends_once_in_time",
        "idle_is_quiet",
        "pages_come_back",
        "pages_come_back_with_the_lease",
        "success_means_right_bytes",
    ];
    assert_eq!(caught.into_iter().collect::<Vec<_>>(), all);
}

#[test]
fn no_history_of_a_small_encoder_cache_breaks_a_promise() {
    for &scope in EntryScope::ALL {
        let outcome = explore_entries(scope, None);
        let (states, steps, rests) = (outcome.states, outcome.steps, outcome.rests);
        println!("{}, {} steps deep: {states} states, {steps} steps, {rests} rests", scope.name, scope.depth);
        if let Some(found) = outcome.found {
            panic!("{}: {}\n{}", scope.name, found.violation, found.history.join("\n"));
        }
    }
}

#[test]
fn an_entry_that_is_unpinned_at_the_grant_is_found_in_every_small_encoder_cache() {
    for &scope in EntryScope::ALL {
        let outcome = explore_entries(scope, Some(Planted::UnpinnedAtGrant));
        let found = outcome.found.unwrap_or_else(|| panic!("nothing is found: {}", scope.name));
        println!("{}: {}\n  {}", scope.name, found.violation, found.history.join("\n  "));
        assert_eq!(found.violation.invariant, Planted::UnpinnedAtGrant.caught_by());
    }
}
