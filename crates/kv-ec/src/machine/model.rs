//! What a simulator and a model checker need of the machine: its transfers, and a number that stands for its
//! state. Only with the feature `model`.

use std::hash::{DefaultHasher, Hash, Hasher};

use kv_core::{ContentHash, PageList, SessionId};

use super::EcMachine;

impl EcMachine {
    /// The transfers that fill blocks and were not given up: the inner machine's session, the entry, and the
    /// entry's blocks.
    pub fn moving(&self) -> impl Iterator<Item = (SessionId, &ContentHash, &PageList)> {
        self.fetching.moving()
    }

    /// Two machines with one configuration, the same fingerprint and equal caches behave alike for ever,
    /// except with the probability of 2⁻⁶⁴ with which hashes collide.
    pub fn fingerprint(&self) -> u64 {
        let mut state = DefaultHasher::new();
        let EcMachine { cx, serving, fetching, saving, closed } = self;
        (cx.node.fingerprint(), saving, format!("{closed:?}{serving:?}{fetching:?}")).hash(&mut state);
        state.finish()
    }
}
