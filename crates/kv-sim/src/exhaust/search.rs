//! The search: depth first through all histories, each state once.

use std::collections::HashMap;

use super::scope::Scope;
use super::small::Small;
use crate::planted::Planted;
use crate::violation::Violation;

/// A small world that a search goes through.
pub(super) trait Histories: Sized {
    /// One possible step.
    type Choice: Copy;

    /// A world that has had the same history.
    fn fork(&self) -> Result<Self, Violation>;

    /// A number for the whole state: two worlds with the same number have the same future.
    fn fingerprint(&self) -> u64;

    /// All steps that are possible now.
    fn choices(&self) -> Vec<Self::Choice>;

    /// Carries out a step, and checks the invariants.
    fn apply(&mut self, choice: Self::Choice) -> Result<(), Violation>;

    /// The step in words; called before the step is carried out.
    fn describe(&self, choice: Self::Choice) -> String;

    /// Lets the world run to its end without faults; with `lossy`, frames in flight are lost first.
    fn rest(self, lossy: bool) -> Result<(), Violation>;
}

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
    search(|| Small::new(scope, planted), scope.depth, planted.is_some())
}

/// Goes through all histories of a world that are at most `depth` steps long. With `thorough`, the world runs to
/// rest from every end.
pub(super) fn search<W: Histories>(
    begin: impl Fn() -> Result<W, Violation>,
    depth: u8,
    thorough: bool,
) -> Outcome {
    let mut search = Search { thorough, outcome: Outcome::default(), seen: HashMap::new(), path: Vec::new() };
    let found = match begin() {
        Ok(world) => search.visit(&world, depth),
        Err(violation) => Err(violation),
    };
    let mut outcome = search.outcome;
    outcome.states = search.seen.len() as u64;
    outcome.found = found.err().map(|violation| {
        let history = begin().map_or_else(|_| Vec::new(), |world| retell(world, &search.path));
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

struct Search<W: Histories> {
    /// Every end is run to rest, not only a sample.
    thorough: bool,
    outcome: Outcome,
    /// Fingerprints, and how many steps were left when the state was reached.
    seen: HashMap<u64, u8>,
    path: Vec<W::Choice>,
}

impl<W: Histories> Search<W> {
    /// Goes on from this state. After an error, `path` holds the steps that lead to the violation.
    fn visit(&mut self, world: &W, depth: u8) -> Result<(), Violation> {
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
            let mut next = world.fork()?;
            next.apply(choice)?;
            self.visit(&next, depth - 1)?;
            self.path.pop();
        }
        Ok(())
    }
}

impl<W: Histories> Search<W> {
    /// Lets the world at the end of a history run to rest. Without a planted bug only a sample of the ends is
    /// run; the fingerprint of the state decides, so that every search takes the same sample. With a planted
    /// bug every end is run, so that no luck is needed to find the bug.
    fn rest(&mut self, world: &W, fingerprint: u64) -> Result<(), Violation> {
        if !self.thorough {
            if fingerprint.is_multiple_of(8) {
                self.outcome.rests += 1;
                world.fork()?.rest(fingerprint.is_multiple_of(16))?;
            }
            return Ok(());
        }
        for lossy in [false, true] {
            self.outcome.rests += 1;
            world.fork()?.rest(lossy)?;
        }
        Ok(())
    }
}

fn retell<W: Histories>(mut world: W, path: &[W::Choice]) -> Vec<String> {
    let mut history = Vec::new();
    for &choice in path {
        history.push(world.describe(choice));
        if world.apply(choice).is_err() {
            break;
        }
    }
    history
}
