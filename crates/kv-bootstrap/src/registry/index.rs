//! Engines by the lookups that they can answer, so that a search looks at no engine that cannot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_core::{EngineId, Replica, WorkerRole};

use super::engine::{Engine, Kind, Profile};
use super::replica::{Change, State};

/// Most engines with only some complete replicas that a search for `number % dp_size` looks at.
const MAX_PARTIAL: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Index {
    /// Engines of which a replica is complete, by the replica.
    pub(super) complete: Sets<(Kind, u32)>,
    /// Engines of which a replica has ranks and is not complete, by the replica.
    pub(super) begun: Sets<(Kind, u32)>,
    /// Engines of which a replica has drained, by the replica.
    pub(super) drained: Sets<(Kind, u32)>,
    /// Engines by their number of replicas (`dp_size`).
    sized: Sets<(Kind, u32)>,
    /// Engines with all replicas complete.
    pub(super) whole: Sets<Kind>,
    /// Engines with some replicas complete.
    pub(super) partial: Sets<Kind>,
    /// Engines with ranks that have not left.
    pub(super) awake: Sets<Kind>,
    /// Engines with replicas that have drained.
    pub(super) ebbing: Sets<Kind>,
}

/// Sets of engines by a key. No set is empty.
#[derive(Debug)]
pub(super) struct Sets<K>(BTreeMap<K, BTreeSet<EngineId>>);

impl Index {
    /// The few engines that may answer a lookup, the best one first. Engines that have drained come last: any
    /// other engine may still serve.
    pub(super) fn candidates(
        &self,
        role: WorkerRole,
        service: Option<&str>,
        replica: Replica,
    ) -> Vec<EngineId> {
        let kind: Kind = (role, service.map(Arc::from));
        let mut found = Vec::new();
        match replica {
            Replica::Rank(dp) => {
                let key = (kind.clone(), dp);
                found.extend(self.complete.of(&key).next());
                found.extend(self.begun.of(&key).next());
                // If no engine has a rank of this replica, an engine with the most replicas may have it
                // later.
                let most = self.sized.0.range((kind.clone(), 0)..=(kind, u32::MAX)).next_back();
                let mut most = most.into_iter().flat_map(|(_, engines)| engines).take(MAX_PARTIAL);
                let drained = self.drained.0.get(&key);
                found.extend(most.find(|id| drained.is_none_or(|engines| !engines.contains(*id))));
                found.extend(self.drained.of(&key).next());
            }
            Replica::Modulo(_) => {
                found.extend(self.whole.of(&kind).next());
                found.extend(self.partial.of(&kind).take(MAX_PARTIAL));
                found.extend(self.awake.of(&kind).next());
                found.extend(self.ebbing.of(&kind).next());
            }
        }
        found.into_iter().cloned().collect()
    }

    pub(super) fn insert(&mut self, profile: &Profile, id: &EngineId) {
        for kind in profile.kinds() {
            self.sized.insert((kind, profile.sizes.dp), id);
        }
    }

    pub(super) fn remove(&mut self, profile: &Profile, id: &EngineId) {
        for kind in profile.kinds() {
            self.sized.remove(&(kind, profile.sizes.dp), id);
        }
    }

    /// Notes what has happened to a rank of the replica `dp`.
    pub(super) fn changed(&mut self, id: &EngineId, engine: &mut Engine, dp: u32, change: Change) {
        let expected = engine.profile.sizes.replica();
        let members = engine.replicas.get(&dp).copied().unwrap_or_default();
        let changed = members.after(change, expected);
        let (before, after) = (members.state(expected), changed.state(expected));
        match after {
            None => drop(engine.replicas.remove(&dp)),
            Some(_) => drop(engine.replicas.insert(dp, changed)),
        }
        if before == after {
            return;
        }
        let (was, is, dps) = (engine.tally, engine.tally.moved(before, after), engine.profile.sizes.dp);
        engine.tally = is;
        for kind in engine.profile.kinds() {
            let key = (kind.clone(), dp);
            for (state, set) in [
                (State::Complete, &mut self.complete),
                (State::Begun, &mut self.begun),
                (State::Drained, &mut self.drained),
            ] {
                set.moved(&key, id, before == Some(state), after == Some(state));
            }
            let sets = [&mut self.whole, &mut self.partial, &mut self.awake, &mut self.ebbing];
            for (set, (was, is)) in sets.into_iter().zip(was.traits(dps).into_iter().zip(is.traits(dps))) {
                set.moved(&kind, id, was, is);
            }
        }
    }
}

impl<K> Default for Sets<K> {
    fn default() -> Sets<K> {
        Sets(BTreeMap::new())
    }
}

impl<K: Ord + Clone> Sets<K> {
    fn of(&self, key: &K) -> impl Iterator<Item = &EngineId> {
        self.0.get(key).into_iter().flatten()
    }

    pub(super) fn insert(&mut self, key: K, id: &EngineId) {
        self.0.entry(key).or_default().insert(id.clone());
    }

    fn remove(&mut self, key: &K, id: &EngineId) {
        let Some(ids) = self.0.get_mut(key) else { return };
        ids.remove(id);
        if ids.is_empty() {
            self.0.remove(key);
        }
    }

    /// The engine was in the set or not, and is to be in the set or not.
    fn moved(&mut self, key: &K, id: &EngineId, was: bool, is: bool) {
        match (was, is) {
            (false, true) => self.insert(key.clone(), id),
            (true, false) => self.remove(key, id),
            _ => {}
        }
    }
}
