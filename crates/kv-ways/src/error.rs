//! Why transports cannot be made into one.

/// Members that cannot be one transport. Change the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WaysError {
    /// None, or too many.
    #[error("members (count) is {got}; it must be 1 to {max}")]
    Members {
        /// How many were given.
        got: usize,
        /// Largest allowed.
        max: usize,
    },
    /// A name that a rank record cannot hold.
    #[error("the name of member {member} has {got} bytes; it must have 1 to {max}")]
    Name {
        /// Position in the list.
        member: usize,
        /// Its length.
        got: usize,
        /// Largest allowed.
        max: usize,
    },
    /// Two members that peers could not tell apart. Give one of them a name of its own
    /// ([`Member::named`](crate::Member::named)).
    #[error("members {first} and {second} are both named {name}")]
    SameName {
        /// The name.
        name: &'static str,
        /// Position of the first.
        first: usize,
        /// Position of the second.
        second: usize,
    },
}
