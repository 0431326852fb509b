//! What waits to be written to a connection: encoded bytes, and pages that are gathered from registered
//! memory at the moment of writing.
//!
//! Pages have a time until which they may be read. A slice of which bytes are left by then is completed with
//! zeros, so that the stream stays in order, and what follows its pages says so: the other side knows the time, too, but its
//! clock may have stood still meanwhile, as that of a paused virtual machine does.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use bytes::{Buf, Bytes};
use kv_core::Time;
use kv_host::{Memory, OsError};

use crate::message::{HEADER, Range, Reply, Verdict, WHOLE, ZEROED};
use crate::sys::Gather;

/// Bytes that stand for pages that may not be read any more.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[derive(Debug)]
enum Segment {
    Bytes(Bytes),
    Pages {
        range: Range,
        until: Time,
    },
    Zeros(usize),
    /// The answer to a read whose pages come before: written once it is certain that none were zeros.
    ReadDone(u32),
    /// The same of a write: the byte that says whether its pages were all read in time.
    WriteDone,
}

impl Segment {
    fn len(&self) -> usize {
        match self {
            Segment::Bytes(bytes) => bytes.len(),
            Segment::Pages { range, .. } => range.len as usize,
            Segment::Zeros(len) => *len,
            Segment::ReadDone(_) => HEADER,
            Segment::WriteDone => 1,
        }
    }
}

/// The segments that one connection has still to write, in order.
#[derive(Debug)]
pub(crate) struct Outbound {
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that are written already.
    written: usize,
    /// Encoded bytes in the segments.
    encoded: usize,
    /// No pages may be read before this time ends.
    soonest: Time,
}

impl Default for Outbound {
    fn default() -> Outbound {
        Outbound { segments: VecDeque::new(), written: 0, encoded: 0, soonest: Time::MAX }
    }
}

impl Outbound {
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Encoded bytes that wait: frames, and the beginnings of slices.
    pub(crate) fn encoded(&self) -> usize {
        self.encoded
    }

    /// Segments that wait.
    pub(crate) fn len(&self) -> usize {
        self.segments.len()
    }

    pub(crate) fn push(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.encoded += bytes.len();
            self.segments.push_back(Segment::Bytes(bytes));
        }
    }

    /// Adds pages, which may be read until this time of this host's clock.
    pub(crate) fn push_pages(&mut self, ranges: impl IntoIterator<Item = Range>, until: Time) {
        self.soonest = self.soonest.min(until);
        self.segments.extend(ranges.into_iter().map(|range| Segment::Pages { range, until }));
    }

    /// Adds the answer to a read whose pages were added just before.
    pub(crate) fn push_read_done(&mut self, number: u32) {
        self.segments.push_back(Segment::ReadDone(number));
    }

    /// Adds the byte that ends the pages of a write, which were added just before.
    pub(crate) fn push_write_done(&mut self) {
        self.segments.push_back(Segment::WriteDone);
    }

    /// Writes as many bytes as the socket takes, about `most` at most. Returns how many, and whether the
    /// socket may take more.
    pub(crate) fn flush(
        &mut self,
        socket: BorrowedFd<'_>,
        regions: &[Memory],
        now: Time,
        most: usize,
    ) -> Result<(usize, bool), OsError> {
        if self.soonest <= now {
            self.expire(now);
        }
        // The answers that may be written in this call.
        let answers: Vec<Bytes> = self
            .segments
            .iter()
            .take(1024)
            .filter_map(|segment| match segment {
                Segment::ReadDone(number) => Some(done(*number, now)),
                _ => None,
            })
            .collect();
        let mut gather = Gather::new();
        let (mut skip, mut answers_left) = (self.written, answers.iter());
        for segment in &self.segments {
            if gather.is_full() || gather.bytes() >= most {
                break;
            }
            let len = segment.len() - skip;
            match segment {
                Segment::Bytes(bytes) => gather.slice(bytes.get(skip..).unwrap_or_default()),
                Segment::Zeros(_) => gather.slice(ZEROS.get(..len.min(ZEROS.len())).unwrap_or_default()),
                Segment::Pages { range, .. } => {
                    let (at, len) = (range.offset as usize + skip, len.min(most - gather.bytes()));
                    let memory = regions.get(range.region as usize);
                    if !memory.is_some_and(|memory| gather.memory(memory, at, len)) {
                        return Err(OUTSIDE);
                    }
                }
                Segment::WriteDone => gather.slice(&[WHOLE]),
                Segment::ReadDone(_) => match answers_left.next() {
                    Some(answer) => gather.slice(answer),
                    None => break,
                },
            }
            skip = 0;
            if matches!(segment, Segment::Zeros(len) if *len > ZEROS.len()) {
                break;
            }
        }
        let asked = gather.bytes();
        if asked == 0 {
            return Ok((0, false));
        }
        let sent = match gather.send(socket) {
            Ok(sent) => sent,
            Err(error) if error.kind == std::io::ErrorKind::WouldBlock => 0,
            Err(error) if error.kind == std::io::ErrorKind::Interrupted => return Ok((0, true)),
            Err(error) => return Err(error),
        };
        self.advance(sent, now);
        Ok((sent, sent == asked))
    }

    /// Copies the next bytes that may be read now into `room`, as many as fit. Returns those, which stay here until
    /// [`advance`](Outbound::advance) says, with the same time, how many of them were written.
    #[cfg_attr(not(feature = "tls"), allow(dead_code))]
    pub(crate) fn copy<'a>(
        &mut self,
        regions: &[Memory],
        now: Time,
        room: &'a mut [u8],
    ) -> Result<&'a [u8], OsError> {
        if self.soonest <= now {
            self.expire(now);
        }
        let (mut skip, mut end) = (self.written, 0);
        for segment in &self.segments {
            let len = (segment.len() - skip).min(room.len() - end);
            if len == 0 {
                break;
            }
            let into = room.get_mut(end..end + len).unwrap_or_default();
            let mut bytes =
                |bytes: &[u8]| into.copy_from_slice(bytes.get(skip..skip + len).unwrap_or_default());
            match segment {
                Segment::Bytes(encoded) => bytes(encoded),
                Segment::ReadDone(number) => bytes(&done(*number, now)),
                Segment::WriteDone => bytes(&[WHOLE]),
                Segment::Zeros(_) => into.fill(0),
                Segment::Pages { range, .. } => {
                    let memory = regions.get(range.region as usize).ok_or(OUTSIDE)?;
                    memory.read(range.offset as usize + skip, into).map_err(|_| OUTSIDE)?;
                }
            }
            end += len;
            skip = 0;
        }
        Ok(room.get(..end).unwrap_or_default())
    }

    /// So many of the next bytes are written.
    pub(crate) fn advance(&mut self, sent: usize, now: Time) {
        self.written += sent;
        while let Some(first) = self.segments.front() {
            let len = first.len();
            if self.written < len {
                break;
            }
            self.written -= len;
            if let Segment::Bytes(bytes) = first {
                self.encoded -= bytes.len();
            }
            self.segments.pop_front();
        }
        if self.segments.is_empty() {
            self.soonest = Time::MAX;
        }
        // An answer of which a part is written cannot become another one.
        if let Some(first) = self.segments.front_mut()
            && let Segment::ReadDone(number) = *first
            && self.written > 0
        {
            *first = Segment::Bytes(done(number, now));
            self.encoded += HEADER;
        }
        // Encoded bytes that are written need not be kept.
        if let Some(Segment::Bytes(bytes)) = self.segments.front_mut()
            && self.written > 0
        {
            bytes.advance(self.written);
            self.encoded -= self.written;
            self.written = 0;
        }
    }

    /// Replaces pages that may not be read any more, and what follows the slices of which such pages are a part.
    fn expire(&mut self, now: Time) {
        let (mut late, mut encoded) = (false, 0);
        self.soonest = Time::MAX;
        for segment in &mut self.segments {
            match *segment {
                Segment::Pages { range, until } if until <= now => {
                    *segment = Segment::Zeros(range.len as usize);
                    late = true;
                }
                Segment::Pages { until, .. } => self.soonest = self.soonest.min(until),
                Segment::Zeros(_) => late = true,
                Segment::ReadDone(number) if late => {
                    let answer = Reply::Answer { number, verdict: Verdict::Late, clock: now };
                    *segment = Segment::Bytes(answer.encode());
                    encoded += HEADER;
                    late = false;
                }
                Segment::WriteDone if late => {
                    *segment = Segment::Bytes(Bytes::from_static(&[ZEROED]));
                    encoded += 1;
                    late = false;
                }
                Segment::ReadDone(_) | Segment::WriteDone => late = false,
                // Between the pages of two slices there always are encoded bytes.
                Segment::Bytes(_) => late = false,
            }
        }
        self.encoded += encoded;
    }
}

fn done(number: u32, clock: Time) -> Bytes {
    Reply::Answer { number, verdict: Verdict::Done, clock }.encode()
}

/// Cannot happen: ranges are checked before they are queued.
const OUTSIDE: OsError = OsError { call: "sendmsg", kind: std::io::ErrorKind::InvalidInput, errno: None };

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use bytes::BytesMut;
    use kv_host::Arena;

    use super::*;

    const AT_10: Time = Time::from_nanos(10);

    fn range(offset: u64, len: u32) -> Range {
        Range { region: 0, len, offset }
    }

    /// Writes everything in pieces of about `most` bytes; returns what was written.
    fn written(mut outbound: Outbound, most: usize, times: impl Fn(usize) -> Time) -> Vec<u8> {
        let arena = Arena::new(1 << 20).unwrap();
        arena.write(0, &[7; 1 << 20]).unwrap();
        let regions = [arena.memory().clone()];
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut out = Vec::new();
        for turn in 0.. {
            if outbound.is_empty() {
                assert_eq!(outbound.encoded(), 0);
                return out;
            }
            let (sent, _) = outbound.flush(ours.as_fd(), &regions, times(turn), most).unwrap();
            let at = out.len();
            out.resize(at + sent, 0);
            theirs.read_exact(&mut out[at..]).unwrap();
        }
        unreachable!()
    }

    fn read_of(number: u32, bytes: u64, ranges: &[Range]) -> Outbound {
        let mut outbound = Outbound::default();
        outbound.push(Reply::Bytes { number, bytes }.encode());
        outbound.push_pages(ranges.iter().copied(), AT_10);
        outbound.push_read_done(number);
        outbound
    }

    #[test]
    fn pages_that_may_be_read_in_time_are_followed_by_an_answer_that_says_so() {
        for most in [1, 31, 1000, 1 << 20] {
            let out = written(read_of(3, 300, &[range(5, 100), range(9, 200)]), most, |_| Time::ZERO);
            assert!(out[HEADER..][..300].iter().all(|byte| *byte == 7));
            let mut answer = BytesMut::from(&out[HEADER + 300..]);
            let wanted = Reply::Answer { number: 3, verdict: Verdict::Done, clock: Time::ZERO };
            assert_eq!(Reply::next(&mut answer), Ok(Some(wanted)), "{most}");
            assert!(answer.is_empty());
        }
    }

    #[test]
    fn what_follows_the_pages_of_a_write_says_whether_zeros_stand_for_some_of_them() {
        let (long, most) = (200_000, 50_000);
        for (late_from, ending) in [(usize::MAX, WHOLE), (0, ZEROED), (1, ZEROED), (3, ZEROED), (4, WHOLE)] {
            let mut outbound = Outbound::default();
            outbound.push_pages([range(0, 20_000), range(9, 180_000)], AT_10);
            outbound.push_write_done();
            outbound.push(Bytes::from_static(b"notify"));
            outbound.push_pages([range(0, 10)], Time::MAX);
            outbound.push_write_done();
            let out = written(outbound, most, |turn| if turn < late_from { Time::ZERO } else { AT_10 });
            let zeros = out[..long].contains(&0);
            assert_eq!((zeros, out[long]), (ending == ZEROED, ending), "late from turn {late_from} on");
            assert_eq!(out[long + 1..], *b"notify\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x01");
        }
    }

    #[test]
    fn pages_are_not_read_after_their_time_and_the_stream_goes_on_with_zeros_and_the_truth() {
        // The first call writes a part, and the time is over before the second.
        let (long, most) = (200_000, 50_000);
        let mut outbound = read_of(3, long, &[range(0, 20_000), range(9, 180_000)]);
        outbound.push(Bytes::from_static(b"next"));
        let out = written(outbound, most, |turn| if turn == 0 { Time::ZERO } else { AT_10 });
        let pages = &out[HEADER..][..long as usize];
        let first_zero = pages.iter().position(|byte| *byte == 0).unwrap();
        assert!(first_zero > 0 && pages[first_zero..].iter().all(|byte| *byte == 0));
        let mut rest = BytesMut::from(&out[HEADER + long as usize..]);
        let wanted = Reply::Answer { number: 3, verdict: Verdict::Late, clock: AT_10 };
        assert_eq!(Reply::next(&mut rest), Ok(Some(wanted)));
        assert_eq!(&rest[..], b"next");
    }

    #[test]
    fn pages_that_are_copied_to_be_encrypted_are_not_read_after_their_time() {
        let arena = Arena::new(4096).unwrap();
        arena.write(0, &[7; 4096]).unwrap();
        let regions = [arena.memory().clone()];
        for (now, byte, verdict) in [(Time::ZERO, 7, Verdict::Done), (AT_10, 0, Verdict::Late)] {
            let mut outbound = read_of(3, 300, &[range(5, 100), range(9, 200)]);
            let mut room = [1; 1024];
            let mut out = BytesMut::from(outbound.copy(&regions, now, &mut room).unwrap());
            assert_eq!(Reply::next(&mut out), Ok(Some(Reply::Bytes { number: 3, bytes: 300 })));
            assert!(out.split_to(300).iter().all(|got| *got == byte));
            assert_eq!(Reply::next(&mut out), Ok(Some(Reply::Answer { number: 3, verdict, clock: now })));
            assert!(out.is_empty());
        }
    }

    #[test]
    fn pages_of_each_slice_are_read_until_the_time_of_that_slice_and_no_longer() {
        let arena = Arena::new(4096).unwrap();
        arena.write(0, &[7; 4096]).unwrap();
        let regions = [arena.memory().clone()];
        for ends in [[10, 20, 30], [30, 20, 10], [20, 30, 10]] {
            let mut outbound = Outbound::default();
            for (number, end) in (0..).zip(ends) {
                outbound.push(Reply::Bytes { number, bytes: 100 }.encode());
                outbound.push_pages([range(5, 100)], Time::from_nanos(end));
                outbound.push_read_done(number);
            }
            // Nothing is written meanwhile.
            for now in [5, 10, 15, 20, 25, 30] {
                let mut room = [1; 1024];
                let mut out =
                    BytesMut::from(outbound.copy(&regions, Time::from_nanos(now), &mut room).unwrap());
                for (number, end) in (0..).zip(ends) {
                    let (byte, wanted) = if now < end { (7, Verdict::Done) } else { (0, Verdict::Late) };
                    assert_eq!(Reply::next(&mut out), Ok(Some(Reply::Bytes { number, bytes: 100 })));
                    assert!(out.split_to(100).iter().all(|got| *got == byte), "{ends:?}: {number} at {now}");
                    let answer = Reply::next(&mut out).unwrap();
                    let Some(Reply::Answer { verdict, .. }) = answer else { panic!("{answer:?}") };
                    assert_eq!(verdict, wanted, "{ends:?}: {number} at {now}");
                }
            }
        }
    }

    #[test]
    fn an_answer_that_is_written_in_parts_tells_the_time_of_its_first_part() {
        const STEP: u64 = 0x0101_0101_0101_0101;
        let arena = Arena::new(4096).unwrap();
        let regions = [arena.memory().clone()];
        for piece in 1..=HEADER {
            let mut outbound = Outbound::default();
            outbound.push_pages([range(0, 3)], Time::MAX);
            outbound.push_read_done(3);
            let (mut out, mut first) = (BytesMut::new(), None);
            for turn in 0.. {
                if outbound.is_empty() {
                    break;
                }
                let (now, mut room) = (Time::from_nanos(turn * STEP), [0; HEADER]);
                let sent = outbound.copy(&regions, now, &mut room[..piece]).unwrap();
                out.extend_from_slice(sent);
                outbound.advance(sent.len(), now);
                if out.len() > 3 {
                    first.get_or_insert(now);
                }
            }
            assert_eq!(outbound.encoded(), 0);
            let mut answer = out.split_off(3);
            let wanted = Reply::Answer { number: 3, verdict: Verdict::Done, clock: first.unwrap() };
            assert_eq!(Reply::next(&mut answer), Ok(Some(wanted)), "pieces of {piece} bytes");
        }
    }
}
