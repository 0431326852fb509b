//! The registered ranks of one replica, in numbers, and what lookups are told of the replica.

use super::error::LookupError;

/// How many ranks of a replica are registered, and how many of these have left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Members {
    registered: u32,
    left: u32,
    /// All ranks had left. Ranks that register afterwards belong to the next life of the replica: until it is
    /// whole, it is not found.
    drained: bool,
}

/// What can be said of a replica with registered ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Ranks are missing, or still belong to a life that has drained.
    Begun,
    /// Every rank is registered, and one of them at least awaits peers.
    Complete,
    /// Every rank has left.
    Drained,
}

/// What happens to one rank of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Registers,
    /// A registered rank leaves that had not left.
    Leaves,
    /// A registration ends.
    Goes {
        /// True if the rank had left.
        had_left: bool,
    },
}

impl Members {
    /// The numbers after a change; `expected` is how many ranks the replica has.
    pub(super) fn after(self, change: Change, expected: u64) -> Members {
        let Members { registered, left, drained } = self;
        let (registered, left) = match change {
            Change::Registers => (registered.saturating_add(1), left),
            Change::Leaves => (registered, left.saturating_add(1)),
            Change::Goes { had_left } => {
                (registered.saturating_sub(1), left.saturating_sub(u32::from(had_left)))
            }
        };
        let all_left = u64::from(left) == expected;
        Members { registered, left, drained: left > 0 && (drained || all_left) }
    }

    /// `None` if no rank is registered.
    pub(super) fn state(self, expected: u64) -> Option<State> {
        let Members { registered, left, drained } = self;
        match (registered, drained) {
            (0, _) => None,
            (_, true) if left == registered => Some(State::Drained),
            (_, false) if u64::from(registered) == expected => Some(State::Complete),
            _ => Some(State::Begun),
        }
    }

    /// True if all ranks had left, and ranks of that life are still registered.
    #[cfg(test)]
    pub(super) fn has_drained(self) -> bool {
        self.drained
    }

    /// Why the ranks are not answered, if they are not.
    pub(super) fn check(self, expected: u64) -> Result<(), LookupError> {
        let Members { registered, left, drained } = self;
        match self.state(expected) {
            Some(State::Complete) => Ok(()),
            Some(State::Drained) => Err(LookupError::Left),
            Some(State::Begun) | None => {
                let registered = if drained { registered.saturating_sub(left) } else { registered };
                let expected = u32::try_from(expected).unwrap_or(u32::MAX);
                Err(LookupError::NotReady { registered, expected })
            }
        }
    }
}
