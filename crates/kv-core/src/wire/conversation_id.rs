//! The number that names a conversation.

use serde::{Deserialize, Serialize};

/// A conversation, as the side that drew the number knows it. The upper half counts up, so that the
/// later of two can be told; the lower half is random, so that it cannot be guessed by mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ConversationId(pub u64);

impl ConversationId {
    /// What a `Hello` carries: its sender knows no number yet.
    pub const NONE: ConversationId = ConversationId(0);

    /// The `sequence`-th conversation of a node.
    pub fn new(sequence: u32, random: u32) -> ConversationId {
        ConversationId(u64::from(sequence) << 32 | u64::from(random))
    }

    /// Which of the node's conversations it is.
    pub fn sequence(self) -> u32 {
        (self.0 >> 32) as u32
    }
}
