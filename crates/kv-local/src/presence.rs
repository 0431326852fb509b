//! Which pages of a peer's memory have been made present in this process.
//!
//! The first touch of a mapped page is a fault, which takes longer than the copy of the page. So pages are made
//! present before they are copied, a piece at a time: all pieces one after the other while nothing is copied, from
//! a moment after the peer was connected; and the pieces of a post before its copies. Only bytes that the peer has
//! registered are mapped, and only pages that it has allocated are made present: a hole of its file stays a hole.

use std::ops::Range;
use std::sync::Arc;

use kv_host::Mapping;

/// Bytes that are made present together before a copy.
const PIECE: usize = 256 << 10;
/// Pieces that are made present together while nothing is copied: as many as a huge page has.
const TOGETHER: usize = 8;
/// Pieces of one word of a map.
const WORD: usize = u64::BITS as usize;

/// The pieces of all mappings of one peer.
#[derive(Debug)]
pub(crate) struct Presence {
    maps: Vec<Map>,
    /// The first mapping that may have absent pieces.
    next: usize,
}

/// The pieces of one mapping.
#[derive(Debug)]
struct Map {
    /// One bit for each piece: made present.
    present: Vec<u64>,
    pieces: usize,
    /// All pieces before this one are present.
    next: usize,
}

impl Presence {
    /// Mappings of these lengths, of which nothing is present.
    pub(crate) fn new(lengths: impl Iterator<Item = usize>) -> Presence {
        let map = |len: usize| {
            let pieces = len.div_ceil(PIECE);
            Map { present: vec![0; pieces.div_ceil(WORD)], pieces, next: 0 }
        };
        Presence { maps: lengths.map(map).collect(), next: 0 }
    }

    /// Makes the pieces present in which a range of a mapping lies. Returns how many were absent.
    pub(crate) fn make(&mut self, index: usize, mapping: &Mapping, offset: usize, len: usize) -> usize {
        let Some(map) = self.maps.get_mut(index).filter(|map| map.next < map.pieces && len > 0) else {
            return 0;
        };
        let mut made = 0;
        for piece in offset / PIECE..=(offset + len - 1) / PIECE {
            if map.set(piece) {
                made += 1;
                if !populate(mapping, piece..piece + 1) {
                    self.give_up();
                    break;
                }
            }
        }
        made
    }

    /// Makes the first absent pieces of all present, as many as a huge page has at most. True if there may be others.
    pub(crate) fn make_next(&mut self, mappings: &[Arc<Mapping>]) -> bool {
        while let (Some(map), Some(mapping)) = (self.maps.get_mut(self.next), mappings.get(self.next)) {
            let absent = map.take_absent();
            if !absent.is_empty() {
                if !populate(mapping, absent) {
                    self.give_up();
                }
                return self.next < self.maps.len();
            }
            self.next += 1;
        }
        false
    }

    /// Makes nothing present any more: copies work without this, only slower at first.
    fn give_up(&mut self) {
        self.maps.clear();
    }
}

impl Map {
    /// The first absent pieces, which are noted as present. Empty if all pieces are present.
    fn take_absent(&mut self) -> Range<usize> {
        while self.next < self.pieces && self.is_present(self.next) {
            self.next += 1;
        }
        let first = self.next;
        let end = (first + 1).next_multiple_of(TOGETHER).min(self.pieces);
        while self.next < end && self.set(self.next) {
            self.next += 1;
        }
        first..self.next
    }

    fn is_present(&self, piece: usize) -> bool {
        self.present.get(piece / WORD).is_some_and(|word| word & (1 << (piece % WORD)) != 0)
    }

    /// Notes that a piece is present. True if it was not.
    fn set(&mut self, piece: usize) -> bool {
        let (Some(word), bit) = (self.present.get_mut(piece / WORD), 1 << (piece % WORD)) else {
            return false;
        };
        let was_absent = *word & bit == 0;
        *word |= bit;
        was_absent
    }
}

/// Makes the pages of some pieces present. False if the kernel cannot do this (before Linux 5.14).
fn populate(mapping: &Mapping, pieces: Range<usize>) -> bool {
    let (start, end) = (pieces.start * PIECE, (pieces.end * PIECE).min(mapping.len()));
    mapping.populate_existing(start, end.saturating_sub(start)).is_ok()
}

#[cfg(test)]
mod tests {
    use kv_host::MemoryFile;

    use super::*;

    #[test]
    fn each_piece_is_made_present_once_in_whatever_order() {
        let file = MemoryFile::create("test", 10 * PIECE as u64 + 4096, false).unwrap();
        let mappings = [file.map(0, PIECE).unwrap(), file.map(0, 9 * PIECE + 4096).unwrap()].map(Arc::new);
        let mut presence = Presence::new(mappings.iter().map(|mapping| mapping.len()));
        assert_eq!(presence.make(1, &mappings[1], 3 * PIECE - 1, 2), 2);
        assert_eq!(presence.make(1, &mappings[1], 3 * PIECE, PIECE), 0);
        assert_eq!(presence.make(1, &mappings[1], 3 * PIECE, 0), 0);
        assert_eq!(presence.make(1, &mappings[1], 9 * PIECE + 4095, 1), 1);
        assert!(presence.make_next(&mappings), "the first mapping, of one piece");
        for end in [2, 8, 9] {
            assert!(presence.make_next(&mappings));
            assert_eq!(presence.maps[1].next, end);
        }
        assert!(!presence.make_next(&mappings));
        assert_eq!(presence.make(1, &mappings[1], 0, 9 * PIECE), 0);
        assert_eq!(file.allocated(), 0, "holes stay holes");
    }

    #[test]
    fn a_mapping_that_has_shrunk_ends_the_work_without_an_error() {
        let file = MemoryFile::create("test", 4 * PIECE as u64, false).unwrap();
        let mut mapping = file.map(0, 4 * PIECE).unwrap();
        let mut presence = Presence::new([4 * PIECE].into_iter());
        mapping.shrink(PIECE);
        assert_eq!(presence.make(0, &mapping, 2 * PIECE + 1, 1), 1);
        assert!(!presence.make_next(&[Arc::new(mapping)]));
    }
}
