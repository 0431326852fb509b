//! What travels on a connection after the greetings. Numbers are little endian.
//!
//! Every message begins with 32 bytes:
//!
//! | bytes | | frame | write | read | answer | bytes of a read |
//! |---|---|---|---|---|---|---|
//! | 1 | kind | 1 | 2 | 3 | 4 | 5 |
//! | 1 | verdict | 0 | 0 | 0 | see [`Verdict`] | 0 |
//! | 2 | ranges that follow | 0 | 1 to 1024 | 1 to 1024 | 0 | 0 |
//! | 4 | length of the frame that follows last | any | any; 0: none | 0 | 0 | 0 |
//! | 8 | bytes of pages | 0 | in the ranges | in the ranges | 0 | that follow |
//! | 8 | time, by the clock of the side that accepted the connection | 0 | until when | until when | now | 0 |
//! | 4 | number of the slice | 0 | counts up | counts up | as asked | as asked |
//! | 4 | 0 | | | | | |
//!
//! A range is 16 bytes: region (4), length (4), offset (8). After the ranges of a write come the bytes of the pages, in the
//! order of the ranges; then a byte, which is 1 if these are the pages' bytes, and 0 if zeros stand for some of them, because
//! the time was over before they were sent; and then the frame. The side that dialed sends frames, writes and reads; the other
//! side sends answers, in the order of the slices, and the bytes of reads before their answers.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kv_core::{MAX_FRAME, Time};

/// Length of the beginning of each message, in bytes.
pub(crate) const HEADER: usize = 32;
/// Length of a range, in bytes.
pub(crate) const RANGE: usize = 16;
/// Most ranges of a slice.
pub(crate) const MAX_RANGES: usize = 1024;
/// Most bytes of pages in a slice.
pub(crate) const MAX_SLICE: usize = 16 << 20;
/// Longest frame that travels with a slice, in bytes.
pub(crate) const MAX_NOTIFY: usize = 16 << 10;

/// The byte after the pages of a write whose bytes were all sent in time.
pub(crate) const WHOLE: u8 = 1;
/// The byte after the pages of a write if zeros stand for some of them.
pub(crate) const ZEROED: u8 = 0;

/// A contiguous part of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) region: u32,
    pub(crate) len: u32,
    pub(crate) offset: u64,
}

/// How a slice has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All bytes are in place.
    Done = 0,
    /// The time of the slice was over before all bytes were in place: the slice may be sent again.
    Late = 1,
    /// The right to write was revoked.
    Revoked = 2,
}

/// A slice of a write or read, as its receiver is asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) number: u32,
    /// Until when the slice may touch memory, by the clock of the side that accepted the connection.
    pub(crate) until: Time,
    pub(crate) ranges: Vec<Range>,
    /// Bytes of all ranges together.
    pub(crate) bytes: u64,
}

/// What the side that dialed asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// A frame for the owner of the transport.
    Frame(Bytes),
    /// The bytes of the slice follow, then [`WHOLE`] or [`ZEROED`], and then, if the number is not 0, a frame of so many
    /// bytes.
    Write(Asked, usize),
    /// The bytes of the ranges are to be sent.
    Read(Asked),
}

/// What the side that accepted says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// A slice has ended.
    Answer {
        number: u32,
        verdict: Verdict,
        /// The clock of the answering side when it answered.
        clock: Time,
    },
    /// So many bytes of a read follow.
    Bytes { number: u32, bytes: u64 },
}

/// The other side has broken the rules of the stream; nothing more can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("a message of kind {0} is not allowed here")]
    Kind(u8),
    #[error("{field} is {got}; it must be {min} to {max}")]
    Size { field: &'static str, got: u64, min: u64, max: u64 },
    #[error("range {range}: region {region} has {len} bytes, but {size} bytes at offset {offset} were named")]
    OutOfBounds { range: usize, region: u32, len: u64, offset: u64, size: u64 },
    #[error("the byte after the pages of a write is {0}; it must be 0 or 1")]
    Ending(u8),
    #[error("the connection has ended")]
    End,
}

impl Broken {
    fn size(field: &'static str, got: u64, min: u64, max: u64) -> Result<(), Broken> {
        if (min..=max).contains(&got) { Ok(()) } else { Err(Broken::Size { field, got, min, max }) }
    }
}

const FRAME: u8 = 1;
const WRITE: u8 = 2;
const READ: u8 = 3;
const ANSWER: u8 = 4;
const BYTES: u8 = 5;

/// The beginning of every message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Header {
    kind: u8,
    verdict: u8,
    ranges: u16,
    frame: u32,
    bytes: u64,
    time: u64,
    number: u32,
}

impl Header {
    fn put(&self, out: &mut BytesMut) {
        out.put_u8(self.kind);
        out.put_u8(self.verdict);
        out.put_u16_le(self.ranges);
        out.put_u32_le(self.frame);
        out.put_u64_le(self.bytes);
        out.put_u64_le(self.time);
        out.put_u32_le(self.number);
        out.put_u32_le(0);
    }

    fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(HEADER);
        self.put(&mut out);
        out.freeze()
    }

    fn peek(mut bytes: &[u8]) -> Option<Header> {
        (bytes.len() >= HEADER).then(|| Header {
            kind: bytes.get_u8(),
            verdict: bytes.get_u8(),
            ranges: bytes.get_u16_le(),
            frame: bytes.get_u32_le(),
            bytes: bytes.get_u64_le(),
            time: bytes.get_u64_le(),
            number: bytes.get_u32_le(),
        })
    }
}

/// The beginning of a message with a frame, which follows.
pub(crate) fn frame(len: usize) -> Bytes {
    Header { kind: FRAME, frame: len as u32, ..Header::default() }.encode()
}

/// The beginning of a write with its ranges; the bytes, [`WHOLE`] or [`ZEROED`], and then the frame follow.
pub(crate) fn write(asked: &Asked, frame: usize) -> Bytes {
    asked.encode(WRITE, frame)
}

/// A request to read.
pub(crate) fn read(asked: &Asked) -> Bytes {
    asked.encode(READ, 0)
}

impl Asked {
    fn encode(&self, kind: u8, frame: usize) -> Bytes {
        let mut out = BytesMut::with_capacity(HEADER + RANGE * self.ranges.len());
        let header = Header {
            kind,
            verdict: 0,
            ranges: self.ranges.len() as u16,
            frame: frame as u32,
            bytes: self.bytes,
            time: self.until.as_nanos(),
            number: self.number,
        };
        header.put(&mut out);
        for range in &self.ranges {
            out.put_u32_le(range.region);
            out.put_u32_le(range.len);
            out.put_u64_le(range.offset);
        }
        out.freeze()
    }
}

impl Request {
    /// Takes the next request out of the bytes that have come; `None` if it has not come completely.
    /// `regions` returns the length of the region with a number.
    pub(crate) fn next(
        bytes: &mut BytesMut,
        regions: impl Fn(u32) -> Option<u64>,
    ) -> Result<Option<Request>, Broken> {
        let Some(header) = Header::peek(bytes) else { return Ok(None) };
        match header.kind {
            FRAME => {
                Broken::size("frame.len", header.frame.into(), 0, MAX_FRAME as u64)?;
                let len = HEADER + header.frame as usize;
                if bytes.len() < len {
                    return Ok(None);
                }
                Ok(Some(Request::Frame(body(bytes, len))))
            }
            WRITE | READ => {
                Broken::size("ranges.len", header.ranges.into(), 1, MAX_RANGES as u64)?;
                Broken::size("slice.bytes", header.bytes, 1, MAX_SLICE as u64)?;
                let notify = if header.kind == WRITE { MAX_NOTIFY as u64 } else { 0 };
                Broken::size("notify.len", header.frame.into(), 0, notify)?;
                let len = HEADER + RANGE * usize::from(header.ranges);
                if bytes.len() < len {
                    return Ok(None);
                }
                let mut list = bytes.split_to(len).freeze();
                list.advance(HEADER);
                let asked = Asked {
                    number: header.number,
                    until: Time::from_nanos(header.time),
                    ranges: ranges(list, header.bytes, regions)?,
                    bytes: header.bytes,
                };
                Ok(Some(match header.kind {
                    WRITE => Request::Write(asked, header.frame as usize),
                    _ => Request::Read(asked),
                }))
            }
            kind => Err(Broken::Kind(kind)),
        }
    }
}

fn body(bytes: &mut BytesMut, len: usize) -> Bytes {
    let mut body = bytes.split_to(len);
    body.advance(HEADER);
    // Copied, so that a short frame does not keep a long buffer alive.
    Bytes::copy_from_slice(&body)
}

fn ranges(mut list: Bytes, bytes: u64, regions: impl Fn(u32) -> Option<u64>) -> Result<Vec<Range>, Broken> {
    let mut ranges = Vec::with_capacity(list.len() / RANGE);
    let mut sum = 0;
    while list.len() >= RANGE {
        let range = Range { region: list.get_u32_le(), len: list.get_u32_le(), offset: list.get_u64_le() };
        let (size, offset) = (u64::from(range.len), range.offset);
        Broken::size("range.len", size, 1, MAX_SLICE as u64)?;
        let len = regions(range.region).unwrap_or(0);
        if offset.checked_add(size).is_none_or(|end| end > len) {
            let region = range.region;
            return Err(Broken::OutOfBounds { range: ranges.len(), region, len, offset, size });
        }
        sum += size;
        ranges.push(range);
    }
    Broken::size("slice.bytes", bytes, sum, sum)?;
    Ok(ranges)
}

impl Reply {
    pub(crate) fn encode(&self) -> Bytes {
        match *self {
            Reply::Answer { number, verdict, clock } => Header {
                kind: ANSWER,
                verdict: verdict as u8,
                time: clock.as_nanos(),
                number,
                ..Header::default()
            },
            Reply::Bytes { number, bytes } => Header { kind: BYTES, bytes, number, ..Header::default() },
        }
        .encode()
    }

    /// Takes the next reply out of the bytes that have come; `None` if it has not come completely.
    pub(crate) fn next(bytes: &mut BytesMut) -> Result<Option<Reply>, Broken> {
        let Some(header) = Header::peek(bytes) else { return Ok(None) };
        let reply = match header.kind {
            ANSWER => {
                let verdict = match header.verdict {
                    0 => Verdict::Done,
                    1 => Verdict::Late,
                    2 => Verdict::Revoked,
                    other => {
                        return Err(Broken::Size { field: "verdict", got: other.into(), min: 0, max: 2 });
                    }
                };
                Reply::Answer { number: header.number, verdict, clock: Time::from_nanos(header.time) }
            }
            BYTES => Reply::Bytes { number: header.number, bytes: header.bytes },
            kind => return Err(Broken::Kind(kind)),
        };
        bytes.advance(HEADER);
        Ok(Some(reply))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENS: [u64; 2] = [1000, 1 << 40];

    fn lens(region: u32) -> Option<u64> {
        LENS.get(region as usize).copied()
    }

    fn asked(ranges: &[(u32, u32, u64)]) -> Asked {
        let ranges: Vec<Range> =
            ranges.iter().map(|&(region, len, offset)| Range { region, len, offset }).collect();
        let bytes = ranges.iter().map(|range| u64::from(range.len)).sum();
        Asked { number: 7, until: Time::from_nanos(99), ranges, bytes }
    }

    fn next(bytes: &[u8]) -> Result<Option<Request>, Broken> {
        Request::next(&mut BytesMut::from(bytes), lens)
    }

    #[test]
    fn requests_survive_the_trip_and_wait_until_they_are_complete() {
        let slice = asked(&[(0, 10, 990), (1, MAX_SLICE as u32 - 10, (1 << 40) - MAX_SLICE as u64 + 10)]);
        let mut framed = frame(5).to_vec();
        framed.extend(b"frame");
        for (bytes, wanted) in [
            (Bytes::from(framed), Request::Frame(Bytes::from_static(b"frame"))),
            (write(&slice, 3), Request::Write(slice.clone(), 3)),
            (read(&slice), Request::Read(slice.clone())),
        ] {
            for len in 0..bytes.len() {
                assert_eq!(next(&bytes[..len]), Ok(None), "{len}");
            }
            let mut more = BytesMut::from(&bytes[..]);
            more.extend_from_slice(b"more");
            assert_eq!(Request::next(&mut more, lens), Ok(Some(wanted)));
            assert_eq!(&more[..], b"more");
        }
    }

    #[test]
    fn slices_that_leave_a_region_or_contradict_themselves_are_refused_before_their_bytes() {
        let refused = |asked: &Asked| {
            let (by_write, by_read) = (next(&write(asked, 0)), next(&read(asked)));
            assert_eq!(by_write, by_read);
            by_write.unwrap_err()
        };
        for (range, len) in [((0, 11, 990), 1000), ((2, 1, 0), 0), ((1, 2, u64::MAX), 1 << 40)] {
            let (region, size, offset) = range;
            let size = u64::from(size);
            let wanted = Broken::OutOfBounds { range: 1, region, len, offset, size };
            assert_eq!(refused(&asked(&[(0, 1, 0), range])), wanted);
        }
        let sized = |field, got, min, max| Broken::Size { field, got, min, max };
        let (ranges, slice) = (MAX_RANGES as u64, MAX_SLICE as u64);
        assert_eq!(refused(&asked(&[])), sized("ranges.len", 0, 1, ranges));
        assert_eq!(refused(&asked(&[(0, 1, 0); MAX_RANGES + 1])), sized("ranges.len", ranges + 1, 1, ranges));
        assert_eq!(refused(&asked(&[(0, 0, 0), (0, 1, 0)])), sized("range.len", 0, 1, slice));
        let liar = Asked { bytes: 11, ..asked(&[(0, 10, 0)]) };
        assert_eq!(refused(&liar), sized("slice.bytes", 11, 10, 10));
        let huge = Asked { bytes: u64::MAX, ..asked(&[(0, 10, 0)]) };
        assert_eq!(refused(&huge), sized("slice.bytes", u64::MAX, 1, slice));
    }

    #[test]
    fn lengths_are_refused_as_soon_as_the_header_is_there() {
        let sized = |field, got, max| Err(Broken::Size { field, got, min: 0, max });
        let long = MAX_FRAME as u64 + 1;
        assert_eq!(next(&frame(long as usize)), sized("frame.len", long, MAX_FRAME as u64));
        let slice = asked(&[(0, 1, 0)]);
        let long = MAX_NOTIFY as u64 + 1;
        assert_eq!(
            next(&write(&slice, long as usize)[..HEADER]),
            sized("notify.len", long, MAX_NOTIFY as u64)
        );
        for kind in [0, ANSWER, BYTES, 6, 255] {
            assert_eq!(next(&[kind; HEADER]), Err(Broken::Kind(kind)));
        }
    }

    #[test]
    fn replies_survive_the_trip_and_unknown_ones_are_refused() {
        let clock = Time::from_nanos(u64::MAX);
        let verdicts = [Verdict::Done, Verdict::Late, Verdict::Revoked];
        let answers = verdicts.map(|verdict| Reply::Answer { number: u32::MAX, verdict, clock });
        for reply in answers.into_iter().chain([Reply::Bytes { number: 1, bytes: u64::MAX }]) {
            let bytes = reply.encode();
            assert_eq!(Reply::next(&mut BytesMut::from(&bytes[..])), Ok(Some(reply)));
            assert_eq!(Reply::next(&mut BytesMut::from(&bytes[..HEADER - 1])), Ok(None));
        }
        assert_eq!(Reply::next(&mut BytesMut::from(&frame(0)[..])), Err(Broken::Kind(FRAME)));
        let mut unknown = answers[0].encode().to_vec();
        unknown[1] = 3;
        let refused = Err(Broken::Size { field: "verdict", got: 3, min: 0, max: 2 });
        assert_eq!(Reply::next(&mut BytesMut::from(&unknown[..])), refused);
    }
}
