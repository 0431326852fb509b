//! One accepted post, which is cut into slices: one write or read of libfabric each.

use std::iter;

use bytes::Bytes;
use kv_core::{Descriptor, Op, Post, PostId, TransportError};
use kv_host::OfWay;

/// How posts are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Most ranges of a slice.
    pub(crate) ranges: usize,
    /// Most bytes of a slice.
    pub(crate) bytes: u64,
}

/// A part of a post: some descriptors, one after the other, of which the first and the last may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Position of the first descriptor, and bytes of it that are not part of the slice.
    first: usize,
    skip: u64,
    /// Bytes of the slice.
    pub(crate) bytes: u64,
}

/// A range of a slice: a region and an offset on each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) here: (u32, u64),
    pub(crate) there: (u32, u64),
    pub(crate) len: u64,
}

/// How a post's notify frame gets to the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notify {
    /// There is none, or it has been sent.
    None,
    /// Sent after the bytes are in place.
    After(Bytes),
    /// Sent before the first slice; the peer keeps the frame until it has counted the writes.
    Counted(Bytes),
    /// Sent ahead, with this number, which the writes carry.
    Announced { sequence: u32, len: usize },
}

/// A post that was accepted and has not ended.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// Number of the way to the peer.
    pub(crate) way: u64,
    pub(crate) post: PostId,
    pub(crate) op: Op,
    pub(crate) notify: Notify,
    descriptors: Vec<Descriptor>,
    /// Position of the next descriptor, and bytes of it that are in slices already.
    next: usize,
    skip: u64,
    /// Slices that were begun, and those that are under way.
    pub(crate) begun: u32,
    pub(crate) under_way: usize,
    /// Why no more slices are begun, if that is so.
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
        self.failed.is_none() && self.next < self.descriptors.len()
    }
}

impl Transfer {
    /// A transfer whose descriptors have been [checked](kv_host::check::descriptors).
    pub(crate) fn new(way: u64, post: Post, counted: bool) -> Transfer {
        let notify = match post.notify {
            None => Notify::None,
            Some(frame) if counted && post.op == Op::Write => Notify::Counted(frame),
            Some(frame) => Notify::After(frame),
        };
        Transfer {
            way,
            post: post.id,
            op: post.op,
            notify,
            descriptors: post.descriptors,
            next: 0,
            skip: 0,
            begun: 0,
            under_way: 0,
            failed: None,
        }
    }

    /// True if all writes of a counted post were begun: the peer gives the frame out when they have arrived, whatever this
    /// side does.
    pub(crate) fn is_told(&self) -> bool {
        matches!(self.notify, Notify::Announced { .. }) && !self.has_more()
    }

    /// True if all bytes are in place, or no more will be.
    pub(crate) fn is_over(&self) -> bool {
        self.under_way == 0 && !self.has_more()
    }

    /// The next slice, without taking it.
    pub(crate) fn peek(&self, cut: Cut) -> Option<Slice> {
        let mut bytes = 0;
        let mut skip = self.skip;
        for descriptor in self.descriptors.get(self.next..)?.iter().take(cut.ranges) {
            bytes += (descriptor.len - skip).min(cut.bytes - bytes);
            skip = 0;
            if bytes == cut.bytes {
                break;
            }
        }
        (bytes > 0).then_some(Slice { first: self.next, skip: self.skip, bytes })
    }

    /// Takes a slice that was peeked at.
    pub(crate) fn take(&mut self, slice: Slice) {
        let mut left = slice.bytes;
        while let Some(descriptor) = self.descriptors.get(self.next) {
            let rest = descriptor.len - self.skip;
            if left < rest {
                self.skip += left;
                return;
            }
            left -= rest;
            self.next += 1;
            self.skip = 0;
            if left == 0 {
                return;
            }
        }
    }

    /// How many slices the whole post is cut into. The same cut gives the same slices.
    pub(crate) fn slices(&self, cut: Cut) -> u32 {
        let (mut slices, mut ranges, mut bytes) = (0, 0, 0);
        for descriptor in &self.descriptors {
            let mut left = descriptor.len;
            while left > 0 {
                if ranges == 0 {
                    slices += 1;
                }
                let part = left.min(cut.bytes - bytes);
                left -= part;
                bytes += part;
                ranges += 1;
                if ranges == cut.ranges || bytes == cut.bytes {
                    (ranges, bytes) = (0, 0);
                    // Whole slices of one long descriptor need not be counted one by one.
                    let whole = left / cut.bytes;
                    slices += u32::try_from(whole).unwrap_or(u32::MAX / 2);
                    left -= whole * cut.bytes;
                }
            }
        }
        slices
    }

    /// The ranges of a slice, here and at the peer.
    pub(crate) fn ranges(&self, slice: Slice) -> impl Iterator<Item = Range> + '_ {
        let (mut skip, mut left) = (slice.skip, slice.bytes);
        let mut descriptors = self.descriptors.get(slice.first..).unwrap_or_default().iter();
        iter::from_fn(move || {
            let descriptor = (left > 0).then(|| descriptors.next()).flatten()?;
            let len = (descriptor.len - skip).min(left);
            let here = (descriptor.local_region, descriptor.local_offset + skip);
            let there = (descriptor.remote_region, descriptor.remote_offset + skip);
            (skip, left) = (0, left - len);
            Some(Range { here, there, len })
        })
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
        Transfer::new(3, post, true)
    }

    /// Every byte of the ranges, as its offsets here and at the peer.
    fn bytes(ranges: impl Iterator<Item = Range>) -> Vec<(u64, u64)> {
        let of = |range: Range| (0..range.len).map(move |at| (range.here.1 + at, range.there.1 + at));
        ranges.flat_map(of).collect()
    }

    #[test]
    fn slices_cover_every_byte_once_and_are_as_many_as_was_counted_before() {
        let lens = [5, 1, 100, 64, 3, 1, 1, 1, 1, 7];
        let whole = transfer(&lens);
        let all = Slice { first: 0, skip: 0, bytes: lens.iter().sum() };
        let wanted = bytes(whole.ranges(all));
        for ranges in 1..=5 {
            for most in 1..200 {
                let cut = Cut { ranges, bytes: most };
                let mut transfer = transfer(&lens);
                let (mut got, mut slices) = (Vec::new(), 0);
                while let Some(slice) = transfer.peek(cut) {
                    assert_eq!(transfer.peek(cut), Some(slice), "looking takes nothing");
                    assert!(slice.bytes <= most && transfer.ranges(slice).count() <= ranges);
                    got.extend(bytes(transfer.ranges(slice)));
                    transfer.take(slice);
                    slices += 1;
                }
                assert!(!transfer.has_more());
                assert_eq!(got, wanted, "{cut:?}");
                assert_eq!(whole.slices(cut), slices, "{cut:?}");
            }
        }
    }

    #[test]
    fn only_writes_with_a_frame_are_counted() {
        let post = |op, notify: Option<&'static [u8]>| {
            let descriptors = vec![];
            Post { id: PostId(1), op, descriptors, notify: notify.map(Bytes::from_static) }
        };
        let notify = |op, frame, counted| Transfer::new(1, post(op, frame), counted).notify;
        let frame = Bytes::from_static(b"done");
        assert_eq!(notify(Op::Write, Some(b"done"), true), Notify::Counted(frame.clone()));
        assert_eq!(notify(Op::Write, Some(b"done"), false), Notify::After(frame.clone()));
        assert_eq!(notify(Op::Read, Some(b"done"), true), Notify::After(frame));
        assert_eq!(notify(Op::Write, None, true), Notify::None);
    }
}
