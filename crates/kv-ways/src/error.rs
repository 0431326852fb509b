//! The errors of [`Ways::new`](crate::Ways::new).

/// Why members cannot be combined into one transport. The configuration must change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WaysError {
    /// There is no member, or there are more than [`MAX_MEMBERS`](crate::MAX_MEMBERS).
    #[error("members (count) is {got}; it must be 1 to {max}")]
    Members {
        /// Members that were given.
        got: usize,
        /// Most members of one transport.
        max: usize,
    },
    /// A member's name is empty, or too long for a rank record.
    #[error("the name of member {member} has {got} bytes; it must have 1 to {max}")]
    Name {
        /// Position of the member in the list, from 0.
        member: usize,
        /// Length of the name, in bytes.
        got: usize,
        /// Longest name allowed, in bytes.
        max: usize,
    },
    /// Two members have one name, so that peers could not tell them apart. Give one of them another name with
    /// [`Member::named`](crate::Member::named), on both sides.
    #[error("members {first} and {second} are both named {name}; give one of them another name")]
    SameName {
        /// The name that both members have.
        name: &'static str,
        /// Position of the first member in the list, from 0.
        first: usize,
        /// Position of the second member in the list, from 0.
        second: usize,
    },
}
