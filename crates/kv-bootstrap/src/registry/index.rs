//! Engines by the lookups that they can answer, so that a search looks at no engine that cannot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_core::{EngineId, Replica, WorkerRole};

use super::engine::{Engine, Kind, Profile};

/// Most engines with only some complete replicas that a search for `number % dp_size` looks at.
const MAX_PARTIAL: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Index {
    /// Engines of which all ranks of a replica are registered, by the replica.
    pub(super) complete: Sets<(Kind, u32)>,
    /// Engines of which some ranks of a replica are registered, by the replica.
    pub(super) begun: Sets<(Kind, u32)>,
    /// Engines by their number of replicas (`dp_size`).
    sized: Sets<(Kind, u32)>,
    /// Engines with all replicas complete.
    pub(super) whole: Sets<Kind>,
    /// Engines with some replicas complete.
    pub(super) partial: Sets<Kind>,
    all: Sets<Kind>,
}

/// Sets of engines by a key. No set is empty.
#[derive(Debug)]
pub(super) struct Sets<K>(BTreeMap<K, BTreeSet<EngineId>>);

impl Index {
    /// The few engines that may answer a lookup, the best one first.
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
                found.extend(self.complete.of(&(kind.clone(), dp)).next());
                found.extend(self.begun.of(&(kind.clone(), dp)).next());
                // If no engine has a rank of this replica, the engine with the most replicas may have it
                // later.
                let most = self.sized.0.range((kind.clone(), 0)..=(kind, u32::MAX)).next_back();
                found.extend(most.and_then(|(_, engines)| engines.first()));
            }
            Replica::Modulo(_) => {
                found.extend(self.whole.of(&kind).next());
                found.extend(self.partial.of(&kind).take(MAX_PARTIAL));
                found.extend(self.all.of(&kind).next());
            }
        }
        found.into_iter().cloned().collect()
    }

    pub(super) fn insert(&mut self, profile: &Profile, id: &EngineId) {
        for kind in profile.kinds() {
            self.sized.insert((kind.clone(), profile.sizes.dp), id);
            self.all.insert(kind, id);
        }
    }

    pub(super) fn remove(&mut self, profile: &Profile, id: &EngineId) {
        for kind in profile.kinds() {
            self.all.remove(&kind, id);
            self.sized.remove(&(kind, profile.sizes.dp), id);
        }
    }

    /// Notes that a rank of the replica `dp` has been registered.
    pub(super) fn added(&mut self, id: &EngineId, engine: &mut Engine, dp: u32) {
        let there = engine.replicas.entry(dp).or_default();
        *there += 1;
        let full = u64::from(*there) == engine.profile.sizes.replica();
        engine.complete += u32::from(full);
        let whole = engine.complete == engine.profile.sizes.dp;
        for kind in engine.profile.kinds() {
            if full {
                self.complete.insert((kind.clone(), dp), id);
                self.partial.insert(kind.clone(), id);
                if whole {
                    self.whole.insert(kind.clone(), id);
                }
            }
            self.begun.insert((kind, dp), id);
        }
    }

    /// Notes that a rank of the replica `dp` has been removed.
    pub(super) fn removed(&mut self, id: &EngineId, engine: &mut Engine, dp: u32) {
        let Some(there) = engine.replicas.get_mut(&dp) else { return };
        let was_full = u64::from(*there) == engine.profile.sizes.replica();
        *there -= 1;
        let empty = *there == 0;
        if empty {
            engine.replicas.remove(&dp);
        }
        engine.complete -= u32::from(was_full);
        for kind in engine.profile.kinds() {
            if was_full {
                self.complete.remove(&(kind.clone(), dp), id);
                self.whole.remove(&kind, id);
                if engine.complete == 0 {
                    self.partial.remove(&kind, id);
                }
            }
            if empty {
                self.begun.remove(&(kind, dp), id);
            }
        }
    }
}

impl<K> Default for Sets<K> {
    fn default() -> Sets<K> {
        Sets(BTreeMap::new())
    }
}

impl<K: Ord> Sets<K> {
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
}
