//! One accepted post, which is cut into slices.

use std::iter;

use bytes::Bytes;
use kv_core::{Descriptor, Op, Post, PostId, TransportError};
use kv_host::OfWay;

use crate::message::{MAX_RANGES, Range};

/// A part of a post that travels as one message: some descriptors, one after the other, of which the first
/// and the last may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Position of the first descriptor, and bytes of it that are not part of the slice.
    first: usize,
    skip: u64,
    /// Bytes of the slice.
    pub(crate) bytes: u64,
}

/// A post that was accepted and has not ended.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// Number of the way to the peer.
    pub(crate) way: u64,
    pub(crate) post: PostId,
    pub(crate) op: Op,
    pub(crate) notify: Option<Bytes>,
    descriptors: Vec<Descriptor>,
    /// Position of the next descriptor, and bytes of it that are in slices already.
    next: usize,
    skip: u64,
    /// Slices that have to be sent again.
    again: Vec<Slice>,
    /// Slices that are under way.
    pub(crate) under_way: usize,
    /// Why no more slices are sent, if that is so.
    pub(crate) failed: Option<TransportError>,
}

impl OfWay for Transfer {
    fn post(&self) -> PostId {
        self.post
    }

    fn way(&self) -> u64 {
        self.way
    }

    fn op(&self) -> Op {
        self.op
    }

    fn has_more(&self) -> bool {
        self.failed.is_none() && (!self.again.is_empty() || self.next < self.descriptors.len())
    }
}

impl Transfer {
    /// A transfer whose descriptors have been [checked](kv_host::check::descriptors).
    pub(crate) fn new(way: u64, post: Post) -> Transfer {
        Transfer {
            way,
            post: post.id,
            op: post.op,
            notify: post.notify,
            descriptors: post.descriptors,
            next: 0,
            skip: 0,
            again: Vec::new(),
            under_way: 0,
            failed: None,
        }
    }

    /// True if all bytes are in place, or no more will be.
    pub(crate) fn is_over(&self) -> bool {
        self.under_way == 0 && !self.has_more()
    }

    /// The next slice, of `most` bytes at most; and whether that is the whole post.
    pub(crate) fn cut(&mut self, most: u64) -> Option<(Slice, bool)> {
        if let Some(slice) = self.again.pop() {
            // A slice that came too late may have been too long.
            let now = slice.bytes.min(most);
            if now < slice.bytes {
                let (first, skip) = self.after(slice.first, slice.skip, now);
                self.again.push(Slice { first, skip, bytes: slice.bytes - now });
            }
            return Some((Slice { bytes: now, ..slice }, false));
        }
        self.descriptors.get(self.next)?;
        let start = (self.next, self.skip);
        let mut bytes = 0;
        for descriptor in self.descriptors.get(self.next..).unwrap_or_default().iter().take(MAX_RANGES) {
            let rest = descriptor.len - self.skip;
            let len = rest.min(most - bytes);
            bytes += len;
            if len < rest {
                self.skip += len;
                break;
            }
            self.next += 1;
            self.skip = 0;
            if bytes == most {
                break;
            }
        }
        let whole = start == (0, 0) && self.next == self.descriptors.len();
        Some((Slice { first: start.0, skip: start.1, bytes }, whole))
    }

    /// Sends a slice again.
    pub(crate) fn again(&mut self, slice: Slice) {
        self.again.push(slice);
    }

    /// The ranges of a slice, here and at the peer.
    pub(crate) fn ranges(&self, slice: Slice) -> impl Iterator<Item = (Range, Range)> + '_ {
        let (mut skip, mut left) = (slice.skip, slice.bytes);
        let mut descriptors = self.descriptors.get(slice.first..).unwrap_or_default().iter();
        iter::from_fn(move || {
            let descriptor = (left > 0).then(|| descriptors.next()).flatten()?;
            let len = (descriptor.len - skip).min(left);
            let range = |region, offset| Range { region, len: len as u32, offset: offset + skip };
            let here = range(descriptor.local_region, descriptor.local_offset);
            let there = range(descriptor.remote_region, descriptor.remote_offset);
            (skip, left) = (0, left - len);
            Some((here, there))
        })
    }

    /// The place `bytes` bytes after a place.
    fn after(&self, mut at: usize, mut skip: u64, mut bytes: u64) -> (usize, u64) {
        while let Some(descriptor) = self.descriptors.get(at) {
            let rest = descriptor.len - skip;
            if bytes < rest {
                return (at, skip + bytes);
            }
            (at, skip, bytes) = (at + 1, 0, bytes - rest);
        }
        (at, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(lens: &[u64]) -> Transfer {
        let mut at = 0;
        let descriptors = lens.iter().map(|len| {
            at += len;
            Descriptor {
                local_region: 1,
                remote_region: 2,
                local_offset: at,
                remote_offset: 7 * at,
                len: *len,
            }
        });
        let post = Post { id: PostId(1), op: Op::Write, descriptors: descriptors.collect(), notify: None };
        Transfer::new(3, post)
    }

    /// Every byte of the slice, as its offsets here and at the peer.
    fn bytes(transfer: &Transfer, slice: Slice) -> Vec<(u64, u64)> {
        let ranges: Vec<_> = transfer.ranges(slice).collect();
        assert!(ranges.iter().all(|(here, there)| here.len == there.len && here.len > 0));
        let of = |(here, there): &(Range, Range)| {
            let (here, there) = (*here, *there);
            (0..u64::from(here.len)).map(move |at| (here.offset + at, there.offset + at))
        };
        ranges.iter().flat_map(of).collect()
    }

    #[test]
    fn slices_cover_every_byte_once_also_when_some_are_sent_again_in_smaller_ones() {
        let lens = [5, 1, 100, 64, 3];
        let mut wanted = bytes(&transfer(&lens), Slice { first: 0, skip: 0, bytes: 173 });
        wanted.sort_unstable();
        for most in 1..180 {
            let mut transfer = transfer(&lens);
            let (mut got, mut number) = (Vec::new(), 0);
            while transfer.has_more() {
                let (slice, whole) = transfer.cut(most).unwrap();
                assert!(slice.bytes <= most && whole == (slice.bytes == 173));
                number += 1;
                if number % 3 == 0 {
                    transfer.again(slice);
                    let (smaller, whole) = transfer.cut(most.div_ceil(2)).unwrap();
                    assert!(!whole && smaller.bytes == slice.bytes.min(most.div_ceil(2)));
                    got.extend(bytes(&transfer, smaller));
                } else {
                    got.extend(bytes(&transfer, slice));
                }
            }
            got.sort_unstable();
            assert_eq!(got, wanted, "{most}");
        }
    }

    #[test]
    fn a_slice_has_as_many_ranges_as_a_message_may_have() {
        let mut transfer = transfer(&[1; 2 * MAX_RANGES + 1]);
        let slices: Vec<u64> =
            iter::from_fn(|| transfer.cut(1 << 20)).map(|(slice, _)| slice.bytes).collect();
        assert_eq!(slices, [MAX_RANGES as u64, MAX_RANGES as u64, 1]);
    }
}
