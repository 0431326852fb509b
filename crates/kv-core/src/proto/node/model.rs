//! What a model checker needs of a machine: a number that stands for the machine's state, and a
//! twin of the machine, which is its clone.
//!
//! Only with the feature `model`: a twin owns the same pages as the original, which no server may
//! ever allow. A checker follows only one of a machine and its twins at a time.

use std::fmt::{Debug, Write};
use std::hash::{DefaultHasher, Hasher};

use super::Node;
use crate::proto::context::Context;

impl Node {
    /// Two machines with one configuration and the same fingerprint behave alike for ever, except
    /// with the probability of 2⁻⁶⁴ with which hashes collide. The fingerprint covers all state
    /// except the number of dropped frames.
    pub fn fingerprint(&self) -> u64 {
        // By name, so that a field that is added later cannot be forgotten.
        let Node { cx, sending, receiving } = self;
        let Context { config: _, admits, fx, peers, lookups, rendezvous, posts } = cx;
        let fx = fx.counted();
        let machine: [&dyn Debug; 8] = [admits, &fx, peers, lookups, rendezvous, posts, sending, receiving];
        let mut state = Text(DefaultHasher::new());
        for part in machine {
            // Writing into a hasher cannot fail.
            let _ = write!(state, "{part:?};");
        }
        state.0.finish()
    }
}

/// Hashes the debug output that is written into it.
struct Text(DefaultHasher);

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}
