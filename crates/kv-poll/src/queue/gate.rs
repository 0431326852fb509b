//! The gate against another request's data: the tag that an aux row must have before its request goes on.

use kv_core::hash::Fnv1a;
use kv_core::{AuxIndex, RequestCacheGroups, Room};

/// The word by which an aux row names its request. The prefill server writes the tag into the row that it
/// sends, and the decode queues compare it. The tag is never zero, so an empty row never passes; room 0 has a
/// tag like any other room.
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

/// The decode server's aux rows, as the queues use them. The server decides the form of a row;
/// [`AuxRow`](super::AuxRow) is a form that is ready.
///
/// From `clear` until `read`, or until a failed request's pages come back, only the peer's data operations write
/// to a row: the server must not touch the row.
pub trait AuxMemory<R> {
    /// Erases a row, so that data of an earlier request cannot be taken for those of a later one. At least
    /// the tag word must become zero.
    fn clear(&mut self, row: AuxIndex);

    /// The tag word of a row, which the prefill server wrote as [`aux_tag`].
    fn tag(&self, row: AuxIndex) -> u64;

    /// Copies what `request` needs (first token, log-probabilities …) out of its row, which has arrived. The
    /// row is given to another request afterwards.
    fn read(&mut self, row: AuxIndex, request: &mut R);

    /// The items of cache groups for a request that is about to be admitted: a recurrent layer's slot, the
    /// pages of a sliding window. The session has them until they come out of [`Ready`](super::Ready) or of
    /// [`drain_groups`](super::DecodeQueues::drain_groups).
    ///
    /// `None` if the server has too few items at the moment: this request and those behind it wait. The
    /// default is for models without further cache groups.
    fn take_groups(&mut self, _request: &mut R) -> Option<RequestCacheGroups> {
        Some(RequestCacheGroups::none())
    }
}

/// The [`AuxMemory`] of caches without aux rows: a request whose transfer succeeds is not checked further.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoAux;

impl<R> AuxMemory<R> for NoAux {
    fn clear(&mut self, _row: AuxIndex) {}

    fn tag(&self, _row: AuxIndex) -> u64 {
        0
    }

    fn read(&mut self, _row: AuxIndex, _request: &mut R) {}
}

/// The transfer succeeded, but the aux row is not that of this request, so the KV may be another request's,
/// too. Never decode from such pages: recompute the request, and report the error, because one side has mixed
/// up two requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("aux row {row} of room {room} carries tag {found:#018x}, expected {expected:#018x}; recompute")]
pub struct GateError {
    /// The room of the request.
    pub room: Room,
    /// The aux row of the request.
    pub row: AuxIndex,
    /// The tag of the room, see [`aux_tag`].
    pub expected: u64,
    /// The tag that the row has; zero if the row was not written.
    pub found: u64,
}

/// Checks the tag of a row that has arrived.
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
