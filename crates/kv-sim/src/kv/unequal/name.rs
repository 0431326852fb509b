//! What each byte of an item is of the model.

/// A byte of an item, by what it is of the model: kind, layer, token within the item, head, place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// No two lanes have bytes of one kind.
    pub(super) kind: u8,
    /// Its layer.
    pub layer: u8,
    /// Its token, counted from the first of the item.
    pub token: u8,
    /// Counted over all ranks.
    pub(super) head: u8,
    pub(super) byte: u8,
}

impl Name {
    /// The name as a number, with the token counted from the first of the request.
    pub fn of_request(self, first_token: u64) -> u64 {
        let [kind, layer, head, byte] = [self.kind, self.layer, self.head, self.byte].map(u64::from);
        (first_token + u64::from(self.token)) << 32 | kind << 24 | layer << 16 | head << 8 | byte
    }

    /// The same byte of the head before.
    pub fn of_neighbour(self) -> Option<Name> {
        Some(Name { head: self.head.checked_sub(1)?, ..self })
    }
}
