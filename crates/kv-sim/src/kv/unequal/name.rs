//! Names for the bytes of a model's cache.

/// A byte of an item, named by what it is in the model: kind, layer, token within the item, head, place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// The kind of byte; bytes of different lanes are of different kinds.
    pub(super) kind: u8,
    /// The layer of the model.
    pub layer: u8,
    /// The token, counted from the first token of the item.
    pub token: u8,
    /// The head, counted over all ranks.
    pub(super) head: u8,
    pub(super) byte: u8,
}

impl Name {
    /// The name as a number, with the token counted from the first of the request.
    pub fn of_request(self, first_token: u64) -> u64 {
        let [kind, layer, head, byte] = [self.kind, self.layer, self.head, self.byte].map(u64::from);
        (first_token + u64::from(self.token)) << 32 | kind << 24 | layer << 16 | head << 8 | byte
    }

    /// The same byte of the previous head; `None` for the first head.
    pub fn of_neighbour(self) -> Option<Name> {
        Some(Name { head: self.head.checked_sub(1)?, ..self })
    }
}
