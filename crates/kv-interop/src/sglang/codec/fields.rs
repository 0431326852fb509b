//! The fields of SGLang's messages: decimal numbers, short texts, and packed lists of integers; and their bounds.

use bytes::Bytes;

/// The first frame of registrations and requests. SGLang's prefill rank stops serving at any other first frame
/// that names no message.
pub(super) const GUARD: &[u8] = b"NixlMsgGuard";
/// Longest host name or address, in bytes.
pub(crate) const MAX_HOST: usize = 255;
/// Longest agent name, in bytes.
pub(super) const MAX_AGENT: usize = 128;
/// Longest metadata of an agent, in bytes.
pub(super) const MAX_METADATA: usize = 1 << 20;
/// Most regions of one decode worker.
pub(super) const MAX_REGIONS: usize = 4096;

/// Why a message is not one of SGLang's. Such a message is counted and dropped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("the first frame {got:?} names no message")]
    Name { got: String },
    #[error("{message} has {got} frames; {min} or more are needed")]
    Frames { message: &'static str, got: usize, min: usize },
    #[error("{field} is {got:?}; it must be a number from 0 to {max}")]
    Number { field: &'static str, got: String, max: u64 },
    #[error("{field} is not a text of 1 to {max} printable characters")]
    Text { field: &'static str, max: usize },
    #[error("{field} has {got} bytes, which are no whole number of entries of {entry} bytes")]
    Packed { field: &'static str, got: usize, entry: usize },
    #[error("{field} has {got} entries; at most {max} are allowed")]
    TooMany { field: &'static str, got: usize, max: usize },
    #[error("{field} has {got} entries, but there are {expected} regions")]
    Entries { field: &'static str, got: usize, expected: usize },
    #[error("{field} has {got} bytes; at most {max} are allowed")]
    TooLong { field: &'static str, got: usize, max: usize },
    #[error("kv_data_mem_kinds names {got:?}, which is neither DRAM nor VRAM")]
    MemoryKind { got: String },
}

/// The frames of a message, read by position.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frames<'a> {
    frames: &'a [Bytes],
}

impl<'a> Frames<'a> {
    /// Frames of which there are at least `min`.
    pub(crate) fn new(
        message: &'static str,
        frames: &'a [Bytes],
        min: usize,
    ) -> Result<Frames<'a>, Malformed> {
        let got = frames.len();
        if got < min { Err(Malformed::Frames { message, got, min }) } else { Ok(Frames { frames }) }
    }

    /// A frame; empty if the message is shorter.
    pub(crate) fn bytes(&self, at: usize) -> &'a [u8] {
        self.frames.get(at).map_or(&[], |frame| frame)
    }

    /// A frame that is kept, of at most `max` bytes.
    pub(crate) fn kept(&self, at: usize, field: &'static str, max: usize) -> Result<Bytes, Malformed> {
        let got = self.bytes(at).len();
        if got > max {
            return Err(Malformed::TooLong { field, got, max });
        }
        Ok(Bytes::copy_from_slice(self.bytes(at)))
    }

    /// A decimal number of at most `max`.
    pub(crate) fn number(&self, at: usize, field: &'static str, max: u64) -> Result<u64, Malformed> {
        let bytes = self.bytes(at);
        number(bytes, max).ok_or_else(|| Malformed::Number { field, got: shown(bytes), max })
    }

    /// A number; the default if the frame is missing or empty.
    pub(crate) fn number_or(
        &self,
        at: usize,
        field: &'static str,
        default: u64,
        max: u64,
    ) -> Result<u64, Malformed> {
        if self.bytes(at).is_empty() { Ok(default) } else { self.number(at, field, max) }
    }

    /// A text of 1 to `max` printable ASCII characters.
    pub(crate) fn text(&self, at: usize, field: &'static str, max: usize) -> Result<String, Malformed> {
        let bytes = self.bytes(at);
        let fits = (1..=max).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic);
        match std::str::from_utf8(bytes) {
            Ok(text) if fits => Ok(text.to_owned()),
            _ => Err(Malformed::Text { field, max }),
        }
    }

    /// A packed list of at most `max` little-endian numbers of 64 bits.
    pub(crate) fn u64s(&self, at: usize, field: &'static str, max: usize) -> Result<Vec<u64>, Malformed> {
        self.packed(at, field, max).map(|list| list.into_iter().map(u64::from_le_bytes).collect())
    }

    /// A packed list of at most `max` little-endian numbers of 32 bits.
    pub(crate) fn u32s(&self, at: usize, field: &'static str, max: usize) -> Result<Vec<u32>, Malformed> {
        self.packed(at, field, max).map(|list| list.into_iter().map(u32::from_le_bytes).collect())
    }

    fn packed<const N: usize>(
        &self,
        at: usize,
        field: &'static str,
        max: usize,
    ) -> Result<Vec<[u8; N]>, Malformed> {
        let bytes = self.bytes(at);
        let (entries, rest) = bytes.as_chunks::<N>();
        if !rest.is_empty() {
            return Err(Malformed::Packed { field, got: bytes.len(), entry: N });
        }
        if entries.len() > max {
            return Err(Malformed::TooMany { field, got: entries.len(), max });
        }
        Ok(entries.to_vec())
    }
}

/// A decimal number without sign or blanks, of at most `max`.
fn number(bytes: &[u8], max: u64) -> Option<u64> {
    let digits = (1..=20).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(bytes).ok().filter(|_| digits)?;
    text.parse().ok().filter(|number| *number <= max)
}

/// The beginning of a field that is not valid, for errors.
pub(crate) fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.get(..32).unwrap_or(bytes)).into_owned()
}

/// A number as a frame.
pub(crate) fn decimal(number: impl ToString) -> Bytes {
    Bytes::from(number.to_string())
}

/// Numbers of 64 bits as a packed frame.
pub(crate) fn pack_u64s(numbers: &[u64]) -> Bytes {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Numbers of 32 bits as a packed frame.
pub(crate) fn pack_u32s(numbers: &[u32]) -> Bytes {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}
