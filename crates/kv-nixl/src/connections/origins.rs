//! On whose connection a frame came, as far as NIXL tells senders apart: by the name of the agent
//! that sent it.
//!
//! That name is written by the sender's NIXL, not by what it sends, but a program that speaks UCX on
//! its own can write another's. So an origin keeps honest agents apart, whatever is in their frames;
//! it is no proof of who an agent is.

use std::collections::{HashMap, VecDeque};

use kv_core::Origin;

/// Agents that are not connected and have numbers; above, the one that came first loses its number.
const MOST: usize = 4096;
/// Names of transports' agents are shorter. Longer ones share a number.
const LONGEST: usize = 32;

/// Numbers of agents.
#[derive(Debug, Default)]
pub(crate) struct Origins {
    numbers: HashMap<String, u64>,
    order: VecDeque<String>,
    last: u64,
}

impl Origins {
    /// The number of the agent of this name, if it has one.
    pub(crate) fn known(&self, name: &str) -> Option<Origin> {
        self.numbers.get(name).map(|&number| Origin(number))
    }

    /// The number of the agent of this name; a new one, if it has none.
    pub(crate) fn of(&mut self, name: &str) -> Origin {
        if name.len() > LONGEST {
            return Origin(0);
        }
        if let Some(number) = self.numbers.get(name) {
            return Origin(*number);
        }
        if self.order.len() >= MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.numbers.remove(&oldest);
        }
        self.last += 1;
        self.order.push_back(name.to_owned());
        self.numbers.insert(name.to_owned(), self.last);
        Origin(self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_keep_their_numbers_and_what_is_remembered_is_bounded() {
        let mut origins = Origins::default();
        let (a, b) = (origins.of("a"), origins.of("b"));
        assert_ne!(a, b);
        assert_eq!((origins.of("a"), origins.of("b")), (a, b));
        assert_eq!(origins.of(&"x".repeat(LONGEST + 1)), origins.of(&"y".repeat(1 << 20)));
        for stranger in 0..3 * MOST {
            origins.of(&stranger.to_string());
        }
        assert_eq!((origins.numbers.len(), origins.order.len()), (MOST, MOST));
        assert!(origins.numbers.keys().all(|name| name.len() <= LONGEST));
        assert!(![a, b].contains(&origins.of("a")), "a number is never given to two agents");
    }
}
