//! The search: depth first through all histories, each state once.

use std::collections::HashMap;

use super::choice::Choice;
use super::scope::Scope;
use super::small::Small;
use crate::planted::Planted;
use crate::violation::Violation;

/// What a search has gone through, and what it has found.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The number of different states that were reached.
    pub states: u64,
    /// The number of steps from one state to another.
    pub steps: u64,
    /// The number of states at the end of a history: at the bound of steps, or where no step was possible.
    pub ends: u64,
    /// The number of these ends from which the world ran on to rest: one in eight, and all of them where a
    /// bug is planted.
    pub rests: u64,
    /// The first broken promise, and how to get there.
    pub found: Option<Counterexample>,
}

/// A history that breaks a promise.
#[derive(Debug, Clone)]
pub struct Counterexample {
    /// The promise that is broken, and how.
    pub violation: Violation,
    /// The steps of the history, in words. If the promise was broken later, it was in the run to rest that
    /// follows.
    pub history: Vec<String>,
}

/// Goes through all histories of a small world that are at most [`Scope::depth`] steps long.
pub fn explore(scope: Scope, planted: Option<Planted>) -> Outcome {
    let mut search = Search { planted, outcome: Outcome::default(), seen: HashMap::new(), path: Vec::new() };
    let found = match Small::new(scope, planted) {
        Ok(world) => search.visit(&world, scope.depth),
        Err(violation) => Err(violation),
    };
    let mut outcome = search.outcome;
    outcome.states = search.seen.len() as u64;
    outcome.found = found.err().map(|violation| {
        let history = retell(scope, planted, &search.path);
        Counterexample { violation, history }
    });
    outcome
}

/// Goes through the histories of a small world with one step more each time, so that the history that is
/// found is as short as possible.
pub fn hunt(scope: Scope, planted: Option<Planted>) -> Outcome {
    let mut outcome = Outcome::default();
    for depth in 0..=scope.depth {
        outcome = explore(Scope { depth, ..scope }, planted);
        if outcome.found.is_some() {
            break;
        }
    }
    outcome
}

struct Search {
    planted: Option<Planted>,
    outcome: Outcome,
    /// Fingerprints, and how many steps were left when the state was reached.
    seen: HashMap<u64, u8>,
    path: Vec<Choice>,
}

impl Search {
    /// Goes on from this state. After an error, `path` holds the steps that lead to the violation.
    fn visit(&mut self, world: &Small, depth: u8) -> Result<(), Violation> {
        let fingerprint = world.fingerprint();
        let known = self.seen.get(&fingerprint).copied();
        if known.is_some_and(|known| known >= depth) {
            return Ok(());
        }
        self.seen.insert(fingerprint, depth);
        let choices = if depth == 0 { Vec::new() } else { world.choices() };
        if choices.is_empty() {
            if known.is_none() {
                self.outcome.ends += 1;
                self.rest(world, fingerprint)?;
            }
            return Ok(());
        }
        for choice in choices {
            self.outcome.steps += 1;
            self.path.push(choice);
            let mut next = world.clone();
            next.apply(choice)?;
            self.visit(&next, depth - 1)?;
            self.path.pop();
        }
        Ok(())
    }
}

impl Search {
    /// Lets the world at the end of a history run to rest. Without a planted bug only a sample of the ends is
    /// run; the fingerprint of the state decides, so that every search takes the same sample. With a planted
    /// bug every end is run, so that no luck is needed to find the bug.
    fn rest(&mut self, world: &Small, fingerprint: u64) -> Result<(), Violation> {
        if self.planted.is_none() {
            if fingerprint.is_multiple_of(8) {
                self.outcome.rests += 1;
                world.clone().rest(fingerprint.is_multiple_of(16))?;
            }
            return Ok(());
        }
        for lossy in [false, true] {
            self.outcome.rests += 1;
            world.clone().rest(lossy)?;
        }
        Ok(())
    }
}

fn retell(scope: Scope, planted: Option<Planted>, path: &[Choice]) -> Vec<String> {
    let mut history = Vec::new();
    let Ok(mut world) = Small::new(scope, planted) else { return history };
    for &choice in path {
        history.push(world.describe(choice));
        if world.apply(choice).is_err() {
            break;
        }
    }
    history
}
