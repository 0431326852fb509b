//! The connection on which a frame arrived, as far as NIXL tells senders apart: by the name of the sending
//! agent.
//!
//! The sender's NIXL writes the name, whatever the frame says; but a program that speaks UCX on its own can
//! write any name. The kernel writes that of a datagram's sender, which another process can have once the sender has
//! ended. So an origin keeps honest agents apart, and is no proof of who an agent is.

use std::collections::{HashMap, VecDeque};

use kv_core::Origin;

/// How many agents have numbers without being connected. Beyond this count the agent that came first loses
/// its number.
const MOST: usize = 4096;
/// Longest name, in bytes, that gets a number of its own: names of transports' agents are shorter. Longer
/// names share a number.
const LONGEST: usize = 32;

/// Numbers of agents, by the names of the agents.
#[derive(Debug, Default)]
pub(crate) struct Origins {
    numbers: HashMap<String, u64>,
    order: VecDeque<String>,
    last: u64,
}

impl Origins {
    /// The number of the agent of this name; `None` if the agent has none.
    pub(crate) fn known(&self, name: &str) -> Option<Origin> {
        self.numbers.get(name).map(|&number| Origin(number))
    }

    /// The number of the agent of this name; a new number, if the agent has none.
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
