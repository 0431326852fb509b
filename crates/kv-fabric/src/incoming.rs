//! [`Incoming`]: what one guest sends. Frames are put together from their messages, and frames that wait for writes are
//! kept until so many writes have arrived.
//!
//! A counted post sends its notify frame ahead, with the number of its writes; each write carries the number of the
//! post to the completion queue of the device where it arrives. The frame is given to the owner when all have arrived, by
//! whatever devices and in whatever order. No message follows the writes, and no order among writes and messages is
//! needed.
//!
//! A guest can make this side hold one frame that is being put together, and twice as many waiting frames, bytes of
//! them and counters as a guest that keeps the rules ever has. What goes beyond is dropped.

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};

use crate::message::{Header, Kind};

/// Most counted posts of a way that have not ended.
pub(crate) const ANNOUNCED: usize = 256;
/// Most bytes of notify frames of counted posts that have not ended; one frame may be longer.
pub(crate) const ANNOUNCED_BYTES: usize = 4 << 20;
/// Room for a frame that is put together, at first: no more than a guest has sent, within a factor.
const FIRST: usize = 16 << 10;

/// The guest has sent what no transport of this version sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken;

/// What is known of a counted post.
#[derive(Debug, Default)]
struct Counted {
    arrived: u32,
    /// How many are to arrive, and the frame to be given out then; none if it was withdrawn.
    wanted: Option<(u32, Option<Bytes>)>,
}

/// The state of one guest's messages.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    partial: Option<(Header, BytesMut)>,
    counted: HashMap<u32, Counted>,
    /// Bytes of frames that wait for writes.
    waiting: usize,
}

impl Incoming {
    /// Takes a message with a frame, a part of one, or a withdrawal; a frame that can be given to the owner.
    pub(crate) fn take(&mut self, header: Header, body: &[u8]) -> Result<Option<Bytes>, Broken> {
        match header.kind {
            Kind::Frame if self.partial.is_none() => {
                let room = (header.len as usize).min(FIRST);
                self.partial = Some((header, BytesMut::with_capacity(room)));
                self.extend(body)
            }
            Kind::More if !body.is_empty() => self.extend(body),
            Kind::Withdraw => {
                self.withdrawn(header);
                Ok(None)
            }
            _ => Err(Broken),
        }
    }

    fn extend(&mut self, body: &[u8]) -> Result<Option<Bytes>, Broken> {
        let (header, bytes) = self.partial.as_mut().ok_or(Broken)?;
        let len = header.len as usize;
        if bytes.len() + body.len() > len {
            return Err(Broken);
        }
        bytes.extend_from_slice(body);
        if bytes.len() < len {
            return Ok(None);
        }
        let (header, bytes) = self.partial.take().ok_or(Broken)?;
        let frame = bytes.freeze();
        Ok(if header.count == 0 { Some(frame) } else { self.announced(header, frame) })
    }

    /// A frame that waits for writes is complete.
    fn announced(&mut self, header: Header, frame: Bytes) -> Option<Bytes> {
        let arrived = self.counted.get(&header.sequence).map_or(0, |counted| counted.arrived);
        if arrived >= header.count {
            self.forget(header.sequence);
            return (arrived == header.count).then_some(frame);
        }
        let fits = self.waiting + frame.len() <= 2 * ANNOUNCED_BYTES + kv_core::MAX_FRAME;
        let is_known = self.counted.get(&header.sequence).is_some_and(|counted| counted.wanted.is_some());
        if !fits || is_known {
            return None;
        }
        let counted = self.entry(header.sequence)?;
        let len = frame.len();
        counted.wanted = Some((header.count, Some(frame)));
        self.waiting += len;
        None
    }

    /// A frame is void. Writes of its post that have ended there may still be in the queue of another device here.
    fn withdrawn(&mut self, header: Header) {
        let arrived = self.counted.get(&header.sequence).map_or(0, |counted| counted.arrived);
        self.forget(header.sequence);
        if arrived < header.count
            && let Some(counted) = self.entry(header.sequence)
        {
            *counted = Counted { arrived, wanted: Some((header.count, None)) };
        }
    }

    /// A write of a counted post is in place; the post's frame, if that was the last write.
    pub(crate) fn arrived(&mut self, sequence: u32) -> Option<Bytes> {
        let counted = self.entry(sequence)?;
        counted.arrived = counted.arrived.saturating_add(1);
        let (count, _) = counted.wanted.as_ref()?;
        if counted.arrived != *count {
            return None;
        }
        self.forget(sequence)
    }

    fn entry(&mut self, sequence: u32) -> Option<&mut Counted> {
        if self.counted.len() >= 2 * ANNOUNCED && !self.counted.contains_key(&sequence) {
            return None;
        }
        Some(self.counted.entry(sequence).or_default())
    }

    fn forget(&mut self, sequence: u32) -> Option<Bytes> {
        let (_, frame) = self.counted.remove(&sequence)?.wanted?;
        let frame = frame?;
        self.waiting -= frame.len();
        Some(frame)
    }

    /// Posts that are being counted.
    pub(crate) fn counters(&self) -> usize {
        self.counted.len()
    }

    /// Bytes and counters that are held.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held(&self) -> (usize, usize) {
        let partial = self.partial.as_ref().map_or(0, |(_, bytes)| bytes.len());
        (self.waiting + partial, self.counted.len())
    }
}

#[cfg(test)]
mod tests {
    use kv_core::MAX_FRAME;

    use super::*;
    use crate::message::BODY;

    fn frame(len: usize, count: u32, sequence: u32) -> Header {
        Header { len: len as u32, count, sequence, ..Header::new(1, Kind::Frame) }
    }

    fn send(incoming: &mut Incoming, header: Header, frame: &[u8]) -> Option<Bytes> {
        let mut parts = frame.chunks(BODY);
        let mut got = incoming.take(header, parts.next().unwrap_or_default()).unwrap();
        for part in parts {
            assert_eq!(got, None);
            got = incoming.take(Header::new(1, Kind::More), part).unwrap();
        }
        got
    }

    #[test]
    fn frames_of_every_length_are_put_together() {
        let mut incoming = Incoming::default();
        for len in [0, 1, BODY - 1, BODY, BODY + 1, 3 * BODY, MAX_FRAME] {
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            assert_eq!(send(&mut incoming, frame(len, 0, 0), &bytes).as_deref(), Some(&bytes[..]), "{len}");
        }
        assert_eq!(incoming.held(), (0, 0));
    }

    #[test]
    fn a_counted_frame_is_given_out_with_its_last_write_whichever_comes_first() {
        for before in 0..=3 {
            let mut incoming = Incoming::default();
            for _ in 0..before {
                assert_eq!(incoming.arrived(7), None);
                assert_eq!(incoming.arrived(8), None, "another post");
            }
            let mut got = send(&mut incoming, frame(4, 3, 7), b"done");
            for _ in before..3 {
                assert_eq!(got, None, "{before}");
                got = incoming.arrived(7);
            }
            assert_eq!(got.as_deref(), Some(&b"done"[..]), "{before}");
            assert_eq!(incoming.held(), (0, usize::from(before > 0)));
        }
    }

    #[test]
    fn a_withdrawn_frame_and_one_of_fewer_writes_are_never_given_out() {
        let mut incoming = Incoming::default();
        assert_eq!(send(&mut incoming, frame(4, 3, 7), b"void"), None);
        assert_eq!(incoming.arrived(7), None);
        let withdraw = Header { count: 2, sequence: 7, ..Header::new(1, Kind::Withdraw) };
        assert_eq!(incoming.take(withdraw, b""), Ok(None));
        assert_eq!(incoming.arrived(7), None);
        assert_eq!(incoming.held(), (0, 0));
        for _ in 0..2 {
            assert_eq!(incoming.arrived(8), None);
        }
        assert_eq!(send(&mut incoming, frame(4, 1, 8), b"late"), None, "two have arrived already");
        assert_eq!(incoming.held(), (0, 0));
    }

    #[test]
    fn writes_that_arrive_after_their_post_was_withdrawn_leave_nothing_behind() {
        let withdraw = |count| Header { count, sequence: 7, ..Header::new(1, Kind::Withdraw) };
        for (before, begun) in [(0, 0), (0, 2), (1, 2), (2, 2)] {
            let mut incoming = Incoming::default();
            assert_eq!(send(&mut incoming, frame(4, 3, 7), b"void"), None);
            for _ in 0..before {
                assert_eq!(incoming.arrived(7), None);
            }
            assert_eq!(incoming.take(withdraw(begun), b""), Ok(None));
            for _ in before..begun {
                assert_eq!(incoming.held(), (0, 1));
                assert_eq!(incoming.arrived(7), None);
            }
            assert_eq!(incoming.held(), (0, 0), "{before} of {begun}");
        }
    }

    #[test]
    fn what_breaks_the_rules_is_refused() {
        let more = Header::new(1, Kind::More);
        assert_eq!(Incoming::default().take(more, b"part"), Err(Broken));
        let mut incoming = Incoming::default();
        assert_eq!(incoming.take(frame(5, 0, 0), b"1234"), Ok(None));
        assert_eq!(incoming.take(frame(5, 0, 0), b"1234"), Err(Broken), "a second frame inside of the first");
        assert_eq!(incoming.take(more, b""), Err(Broken));
        assert_eq!(incoming.take(more, b"56"), Err(Broken));
        assert_eq!(incoming.take(Header::new(1, Kind::Hello), b""), Err(Broken));
    }

    #[test]
    fn a_guest_cannot_make_this_side_hold_more_than_the_bounds() {
        let mut incoming = Incoming::default();
        for sequence in 0..10_000 {
            assert_eq!(incoming.arrived(sequence), None);
        }
        assert_eq!(incoming.held(), (0, 2 * ANNOUNCED));
        let mut incoming = Incoming::default();
        for sequence in 0..20 {
            assert_eq!(send(&mut incoming, frame(MAX_FRAME, 2, sequence), &vec![1; MAX_FRAME]), None);
        }
        assert!(incoming.held().0 <= 2 * ANNOUNCED_BYTES + MAX_FRAME, "{:?}", incoming.held());
    }
}
