//! One accepted post, which is cut into slices.

use bytes::Bytes;
use kv_core::{Descriptor, Op, Post, PostId, TransportError};
use kv_host::OfWay;

/// Bytes that a descriptor counts beside its own: UCX takes 5 to 7 µs for each descriptor over TCP, in which it would
/// move some 8 KiB.
pub(crate) const DESCRIPTOR: u64 = 8 << 10;
/// A slice may weigh one part in so many more than asked, if that keeps a descriptor whole.
const SPARE: u64 = 4;

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
        self.failed.is_none() && self.next < self.descriptors.len()
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
            under_way: 0,
            failed: None,
        }
    }

    /// True if all bytes are in place, or no more will be.
    pub(crate) fn is_over(&self) -> bool {
        self.under_way == 0 && !self.has_more()
    }

    /// Appends the parts of the next slice, which weighs about `most`: up to one part in [`SPARE`] more if that keeps
    /// a descriptor whole. Returns its weight: its bytes, and [`DESCRIPTOR`] for each part.
    pub(crate) fn cut(&mut self, most: u64, parts: &mut Vec<Descriptor>) -> u64 {
        let mut weight = 0;
        while let Some(descriptor) = self.descriptors.get(self.next).filter(|_| weight < most) {
            let rest = descriptor.len - self.skip;
            let room = most - weight;
            // Each part is a call of UCX, so that a descriptor which is cut costs one more.
            let is_whole = rest <= room.saturating_add(DESCRIPTOR.max(most / SPARE));
            let len = if is_whole { rest } else { room.max(DESCRIPTOR).min(rest) };
            parts.push(Descriptor {
                local_offset: descriptor.local_offset + self.skip,
                remote_offset: descriptor.remote_offset + self.skip,
                len,
                ..*descriptor
            });
            weight += len + DESCRIPTOR;
            self.skip += len;
            if self.skip == descriptor.len {
                (self.next, self.skip) = (self.next + 1, 0);
            }
        }
        weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_every_byte_once_and_in_order_and_weigh_what_they_may() {
        let lens = [5, 10 << 20, 1, (1 << 20) + 7, 100, 3];
        let mut at = 0;
        let descriptors: Vec<Descriptor> = lens
            .iter()
            .map(|len| {
                at += len;
                let (local_offset, remote_offset) = (at, 7 * at);
                Descriptor { local_region: 1, remote_region: 2, local_offset, remote_offset, len: *len }
            })
            .collect();
        for most in [64 << 10, 1 << 20, 1 << 30] {
            let post = Post { id: PostId(1), op: Op::Write, descriptors: descriptors.clone(), notify: None };
            let mut transfer = Transfer::new(3, post);
            let mut all = Vec::new();
            while transfer.has_more() {
                let before = all.len();
                let weight = transfer.cut(most, &mut all);
                let parts = &all[before..];
                let sum: u64 = parts.iter().map(|part| part.len + DESCRIPTOR).sum();
                let limit = most + DESCRIPTOR + DESCRIPTOR.max(most / SPARE);
                assert!(!parts.is_empty() && sum == weight && weight <= limit, "{most}: {parts:?}");
            }
            // Neighbours that were one descriptor are one again.
            let mut joined: Vec<Descriptor> = Vec::new();
            for part in all {
                assert!(part.len > 0);
                match joined.last_mut() {
                    Some(last)
                        if last.local_offset + last.len == part.local_offset
                            && last.remote_offset + last.len == part.remote_offset =>
                    {
                        last.len += part.len;
                    }
                    _ => joined.push(part),
                }
            }
            assert_eq!(joined, descriptors, "{most}");
        }
    }

    #[test]
    fn descriptors_stay_whole_where_the_slice_is_longer_by_a_quarter_at_most() {
        let of = |len: u64| {
            let descriptor =
                Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len };
            let descriptors = vec![descriptor; ((32 << 20) / len) as usize];
            let mut transfer =
                Transfer::new(1, Post { id: PostId(1), op: Op::Write, descriptors, notify: None });
            let mut parts = Vec::new();
            while transfer.has_more() {
                transfer.cut(1 << 20, &mut parts);
            }
            parts.len() as u64 * len / (32 << 20)
        };
        assert_eq!([4, 16, 64, 256, 512, 1024].map(|kib| of(kib << 10)), [1; 6], "parts of each descriptor");
        assert_eq!(of(4 << 20), 4);
    }

    #[test]
    fn small_descriptors_count_more_than_their_bytes() {
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 64 };
        let post = Post { id: PostId(1), op: Op::Write, descriptors: vec![descriptor; 1000], notify: None };
        let mut transfer = Transfer::new(1, post);
        let mut parts = Vec::new();
        transfer.cut(1 << 20, &mut parts);
        assert!(parts.len() as u64 <= (1 << 20) / DESCRIPTOR, "{}", parts.len());
    }
}
