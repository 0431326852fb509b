//! The id of a conversation, drawn by each side for the other.

use serde::{Deserialize, Serialize};

/// A conversation, as one of its two sides names it. The upper half counts up, so that the later of
/// two conversations is known; the lower half is random, so that a wrong id is never right by
/// chance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ConversationId(pub u64);

impl ConversationId {
    /// The id in the header of a `Hello`, whose speaker does not know the addressee's id yet.
    pub const NONE: ConversationId = ConversationId(0);

    /// The `sequence`-th conversation of a machine, with 32 random bits.
    pub fn new(sequence: u32, random: u32) -> ConversationId {
        ConversationId(u64::from(sequence) << 32 | u64::from(random))
    }

    /// The position of this conversation among all conversations of the machine.
    pub fn sequence(self) -> u32 {
        (self.0 >> 32) as u32
    }
}
