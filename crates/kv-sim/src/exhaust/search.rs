//! Depth first through all histories, each state once.

use std::collections::HashMap;

use super::choice::Choice;
use super::scope::Scope;
use super::small::Small;
use crate::planted::Planted;
use crate::violation::Violation;

/// What a search has gone through.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Different states.
    pub states: u64,
    /// Steps from one to another.
    pub steps: u64,
    /// States at the bound, and those in which nothing more could happen.
    pub ends: u64,
    /// Those of them that were brought to rest: one of eight, and all where a bug is planted.
    pub rests: u64,
    /// The first broken promise, and how to get there.
    pub found: Option<Counterexample>,
}

/// A history that breaks a promise.
#[derive(Debug, Clone)]
pub struct Counterexample {
    /// The promise.
    pub violation: Violation,
    /// The steps, in words. What follows them is a run to rest.
    pub history: Vec<String>,
}

/// Goes through a scope, as deep as it says.
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

/// Goes through a scope deeper and deeper: what it finds is as short as can be.
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
    /// After an error, the path is the one that leads to it.
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
    /// Brings the end of a history to rest. Of correct machines only a sample: the fingerprint decides,
    /// so that it is the same in every run. What is found of a planted bug must not hang on that.
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
