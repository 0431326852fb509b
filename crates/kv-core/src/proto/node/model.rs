//! What a model checker needs of a machine: a number that stands for its state, and a twin of it, which
//! is its clone.
//!
//! Only with the feature `model`: a twin owns the same pages as its original, which no server may
//! ever allow. Of one machine and its twins, a checker believes one.

use std::fmt::{Debug, Write};
use std::hash::{DefaultHasher, Hasher};

use super::Node;
use crate::proto::context::Context;

impl Node {
    /// Two machines with one configuration and the same number do the same for ever, but for the
    /// chance of 2⁻⁶⁴ that a hash has. Everything counts, except how many frames were dropped.
    pub fn fingerprint(&self) -> u64 {
        // By name, so that a field that is added later cannot be forgotten.
        let Node { cx, sending, receiving } = self;
        let Context { config: _, stopping, fx, peers, lookups, rendezvous, posts } = cx;
        let fx = fx.counted();
        let machine: [&dyn Debug; 8] = [stopping, &fx, peers, lookups, rendezvous, posts, sending, receiving];
        let mut state = Text(DefaultHasher::new());
        for part in machine {
            // Writing into a hasher cannot fail.
            let _ = write!(state, "{part:?};");
        }
        state.0.finish()
    }
}

/// Hashes the debug output of whatever is written.
struct Text(DefaultHasher);

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}
