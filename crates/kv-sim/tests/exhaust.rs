//! The lease protocol, exhaustively at small scope; and every mistake in it is found.

#![allow(clippy::print_stdout)]

use kv_sim::exhaust::{Mistake, Scope, explore, hunt};

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

#[test]
fn every_mistake_is_found() {
    for &mistake in Mistake::ALL {
        let scope = Scope::named(mistake.scope()).unwrap();
        let outcome = hunt(scope, Some(mistake));
        let name = mistake.name();
        let found = outcome.found.unwrap_or_else(|| panic!("{name} is not found in {}", scope.name));
        let history = found.history.join("\n  ");
        println!("{name}: {} states, {}\n  {history}", outcome.states, found.violation);
        assert_eq!(found.violation.invariant, mistake.caught_by(), "{name}: {}", found.violation);
    }
}

#[test]
fn every_invariant_can_fail() {
    let caught: std::collections::BTreeSet<&str> = Mistake::ALL.iter().map(|m| m.caught_by()).collect();
    let all = [
        "ends_once",
        "pages_come_back_once",
        "pages_come_back_with_the_lease",
        "rests_in_the_end",
        "success_is_mutual",
        "success_means_granted_bytes",
    ];
    assert_eq!(caught.into_iter().collect::<Vec<_>>(), all);
}
