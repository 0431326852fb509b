//! Rooms with and without the suffix of an engine.

use crate::id::Room;

/// A room as one side of a request knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) struct Named {
    /// The room, with the suffix if the engine appends one.
    pub(in crate::proto) room: Room,
    /// The room without the suffix of that side's engine.
    pub(super) base: Room,
}

impl Named {
    pub(in crate::proto) fn new(room: Room, suffixed: bool) -> Named {
        Named { base: room.unsuffixed(suffixed), room }
    }

    /// True if both name one request, as far as the two rooms alone can tell.
    pub(in crate::proto) fn is_same_request(&self, other: &Named) -> bool {
        self.room == other.room || self.base == other.base
    }
}

/// Two rooms that a third room could mean.
pub(in crate::proto) type Ambiguity = (Room, Room);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_may_consist_of_its_suffix_alone() {
        let room = Room::request("-0000000a").unwrap();
        assert_eq!(Named::new(room.clone(), true).base, room);
    }
}
