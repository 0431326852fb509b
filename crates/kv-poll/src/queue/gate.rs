//! The gate against wrong-room data: what an aux row must say before its request goes on.

use kv_core::hash::Fnv1a;
use kv_core::{AuxIndex, RequestGroups, Room};

/// The word by which an aux row names its request: the prefill server writes it into the row that
/// it sends, the decode side's gate compares it. Never zero, so an empty row never passes, and
/// room 0 is a room like any other.
///
/// Stable, for other languages: the 64-bit FNV-1a hash (offset basis `0xcbf29ce484222325`, prime
/// `0x100000001b3`) of one kind byte and the room, with 0 replaced by 1. Kind `0x01` is followed by
/// the number as eight bytes, least significant first; kind `0x02` by the request id **without its
/// per-engine suffix** ([`RequestId::base`](kv_core::RequestId::base)) in UTF-8, since the two
/// engines' suffixes differ.
///
/// ```
/// use kv_core::Room;
/// use kv_poll::queue::aux_tag;
/// assert_eq!(aux_tag(&Room::Number(0)), 0x529a_2cdc_8ff5_33ac);
/// let (p, d) = (Room::request("cmpl-7-0-0123abcd").unwrap(), Room::request("cmpl-7-0-89abcdef").unwrap());
/// assert_eq!(aux_tag(&p), aux_tag(&d));
/// ```
pub fn aux_tag(room: &Room) -> u64 {
    let mut hash = Fnv1a::new();
    match room {
        Room::Number(number) => {
            hash.write(&[1]);
            hash.write(&number.to_le_bytes());
        }
        Room::Request(id) => {
            hash.write(&[2]);
            hash.write(id.base().as_bytes());
        }
    }
    hash.finish().max(1)
}

/// The decode server's aux rows, as the queue needs them. The layout of a row is the server's.
///
/// A row is touched by nobody else from `clear` until `read`, or until the failed request's session
/// can be reclaimed.
pub trait AuxMemory<R> {
    /// Erases the row, so that nothing of an earlier request can be taken for a later one's. At the
    /// least its tag word becomes zero.
    fn clear(&mut self, row: AuxIndex);

    /// The tag word of the row: what the prefill server wrote as [`aux_tag`].
    fn tag(&self, row: AuxIndex) -> u64;

    /// The row's request has arrived: copies what it needs (first token, logprobs …) into it. The
    /// row is given to another request afterwards.
    fn read(&mut self, row: AuxIndex, request: &mut R);

    /// The items of the request's cache groups, now that it is to be admitted: a recurrent layer's slot,
    /// the pages of a sliding window. They are the session's until they come out of
    /// [`Ready`](super::Ready) or of [`drain_groups`](super::DecodeQueues::drain_groups).
    ///
    /// `None` if the server has too few of them at the moment: the request waits, and with it those
    /// behind it. A model without state has no groups.
    fn take_groups(&mut self, _request: &mut R) -> Option<RequestGroups> {
        Some(RequestGroups::none())
    }
}

/// For caches without aux rows: nothing is checked but the transfer itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoAux;

impl<R> AuxMemory<R> for NoAux {
    fn clear(&mut self, _row: AuxIndex) {}

    fn tag(&self, _row: AuxIndex) -> u64 {
        0
    }

    fn read(&mut self, _row: AuxIndex, _request: &mut R) {}
}

/// The transfer succeeded, but the aux row is not this request's: its KV may not be either. Never
/// decode from it; recompute, and report it, because one side has mixed up two requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("aux row {row} of room {room} carries tag {found:#018x}, expected {expected:#018x}; recompute")]
pub struct GateError {
    /// The request.
    pub room: Room,
    /// Its row.
    pub row: AuxIndex,
    /// The tag of its room.
    pub expected: u64,
    /// What the row says; zero if nobody wrote it.
    pub found: u64,
}

/// Checks an arrived row.
pub(super) fn check<R>(room: &Room, row: AuxIndex, aux: &impl AuxMemory<R>) -> Result<(), GateError> {
    let (expected, found) = (aux_tag(room), aux.tag(row));
    if expected == found { Ok(()) } else { Err(GateError { room: room.clone(), row, expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_differ_by_kind_and_value_and_are_never_zero() {
        let rooms = [0, 1, 7, u64::MAX].map(Room::Number);
        let named = ["7", "8", "\u{1f}"].into_iter().filter_map(|id| Room::request(id).ok());
        let mut tags: Vec<u64> = rooms.iter().cloned().chain(named).map(|room| aux_tag(&room)).collect();
        assert!(!tags.contains(&0));
        let all = tags.len();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), all);
    }
}
