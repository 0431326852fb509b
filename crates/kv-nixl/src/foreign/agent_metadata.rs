//! The metadata of an agent in NIXL's format, checked before NIXL reads the metadata.
//!
//! A foreign agent's metadata comes from a side channel, without a digest, and the metadata of an agent of this
//! crate with a digest that a forger can make. NIXL's reader checks little, and
//! the binding panics at a name that is no text. So the whole structure is checked here: NIXL gets metadata
//! with a name, with counts and lengths that fit, and with possible ranges of memory. The parts that NIXL
//! hands on to its backend cannot be checked: for UCX, the address of the worker and the memory keys.
//!
//! ```text
//! nixlSerDes| Agent(name) Conns(n) n × { t(backend) c(address) } (MemSection)
//!   nixlSecElms(n) n × { bknd(backend) nixlDList(nixlSDList) t(kind) n(count) count × (addr len device key) }
//! ```
//!
//! where `tag(value)` is the tag, the length of the value in eight bytes (little-endian as all numbers),
//! the value, and `|`.

use kv_core::hash::Fnv1a;
use kv_core::{MAX_REGIONS, MemoryKind};

use crate::foreign::error::ForeignError;
use crate::foreign::registered::Registered;

/// Longest metadata, in bytes, that is read: the metadata of an agent with the most regions of a transport,
/// and keys of 256 bytes.
pub(crate) const LONGEST: usize = (64 << 10) + (64 + 256) * MAX_REGIONS;
/// The most backends that an agent may have.
const MOST_BACKENDS: usize = 16;
/// Bytes of a range's address, length and device, which come before the key.
const RANGE: usize = 24;

/// What an agent's metadata says, apart from the parts that only a backend understands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentMetadata<'a> {
    pub(crate) name: &'a str,
    pub(crate) backends: Vec<&'a str>,
    /// The memory that the agent has registered, of kinds that this crate knows.
    pub(crate) memory: Vec<Registered>,
    pub(crate) digests: Digests,
}

/// Digests that tell the lives of one agent apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digests {
    /// The digest of the addresses of the agent's backends. The address of a UCX worker begins with a number
    /// that UCX draws at random when the worker is made.
    pub(crate) addresses: u64,
    /// The digest of all registrations of memory, with their keys.
    pub(crate) registrations: u64,
}

impl<'a> AgentMetadata<'a> {
    /// Reads all of the metadata, and checks names, counts, lengths and ranges.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<AgentMetadata<'a>, ForeignError> {
        if bytes.len() > LONGEST {
            let (field, got, max) = ("metadata.len", bytes.len(), LONGEST);
            return Err(ForeignError::Size { field, got, min: 1, max });
        }
        let mut reader = Reader { bytes, at: 0 };
        reader.literal("nixlSerDes|", b"nixlSerDes|")?;
        let name = reader.text("Agent")?;
        let addresses = reader.at;
        let count = reader.count("Conns", 1, MOST_BACKENDS)?;
        let mut backends = Vec::with_capacity(count);
        for _ in 0..count {
            backends.push(reader.text("t")?);
            reader.value("c")?;
        }
        let section = reader.at;
        reader.exactly("", b"MemSection")?;
        let (mut memory, mut ranges) = (Vec::new(), 0);
        for _ in 0..reader.count("nixlSecElms", 0, MAX_REGIONS)? {
            reader.value("bknd")?;
            reader.exactly("nixlDList", b"nixlSDList")?;
            let kind = memory_kind(reader.number::<4>("t")?);
            let count = reader.count("n", 1, MAX_REGIONS - ranges)?;
            ranges += count;
            for _ in 0..count {
                let range = reader.range()?;
                memory.extend(kind.map(|kind| Registered { kind, ..range }));
            }
        }
        if reader.at != bytes.len() {
            return Err(reader.damaged("end"));
        }
        let part = |from: usize, to: usize| Fnv1a::of(bytes.get(from..to).unwrap_or_default());
        let digests =
            Digests { addresses: part(addresses, section), registrations: part(section, bytes.len()) };
        Ok(AgentMetadata { name, backends, memory, digests })
    }
}

/// The kind of memory with NIXL's number; `None` of kinds that this crate does not move.
fn memory_kind(number: u64) -> Option<MemoryKind> {
    match number {
        0 => Some(MemoryKind::Dram),
        1 => Some(MemoryKind::Vram),
        _ => None,
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn damaged(&self, field: &'static str) -> ForeignError {
        ForeignError::Damaged { field, at: self.at, len: self.bytes.len() }
    }

    fn literal(&mut self, field: &'static str, expected: &[u8]) -> Result<(), ForeignError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        if !rest.starts_with(expected) {
            return Err(self.damaged(field));
        }
        self.at += expected.len();
        Ok(())
    }

    fn take(&mut self, field: &'static str, len: usize) -> Result<&'a [u8], ForeignError> {
        let end = self.at.checked_add(len);
        let taken = end.and_then(|end| self.bytes.get(self.at..end)).ok_or_else(|| self.damaged(field))?;
        self.at += len;
        Ok(taken)
    }

    /// Reads a tag, and returns its value.
    fn value(&mut self, tag: &'static str) -> Result<&'a [u8], ForeignError> {
        self.literal(tag, tag.as_bytes())?;
        let len = little_endian(self.take(tag, 8)?);
        let len = usize::try_from(len).map_err(|_| self.damaged(tag))?;
        let value = self.take(tag, len)?;
        self.literal(tag, b"|")?;
        // NIXL takes an empty value for a missing one.
        if value.is_empty() { Err(self.damaged(tag)) } else { Ok(value) }
    }

    fn exactly(&mut self, tag: &'static str, expected: &'static [u8]) -> Result<(), ForeignError> {
        if self.value(tag)? == expected { Ok(()) } else { Err(self.damaged(tag)) }
    }

    /// Text without a NUL, as a C library takes it.
    fn text(&mut self, tag: &'static str) -> Result<&'a str, ForeignError> {
        let text = std::str::from_utf8(self.value(tag)?).ok().filter(|text| !text.contains('\0'));
        let max = crate::notifications::inbox::LONGEST_NAME;
        match text {
            Some(text) if text.len() > max => {
                Err(ForeignError::Size { field: tag, got: text.len(), min: 1, max })
            }
            Some(text) => Ok(text),
            None => Err(self.damaged(tag)),
        }
    }

    fn number<const LEN: usize>(&mut self, tag: &'static str) -> Result<u64, ForeignError> {
        let value = self.value(tag)?;
        if value.len() == LEN { Ok(little_endian(value)) } else { Err(self.damaged(tag)) }
    }

    fn count(&mut self, field: &'static str, min: usize, max: usize) -> Result<usize, ForeignError> {
        let got = usize::try_from(self.number::<8>(field)?).unwrap_or(usize::MAX);
        if (min..=max).contains(&got) { Ok(got) } else { Err(ForeignError::Size { field, got, min, max }) }
    }

    /// A range of memory, without its kind.
    fn range(&mut self) -> Result<Registered, ForeignError> {
        let value = self.value("")?;
        let (Some(range), true) = (value.get(..RANGE), value.len() > RANGE) else {
            return Err(self.damaged("descriptor"));
        };
        let [addr, len, device] = [0, 8, 16].map(|at| little_endian(&range[at..at + 8]));
        if addr.checked_add(len).is_none() {
            return Err(self.damaged("descriptor"));
        }
        Ok(Registered { kind: MemoryKind::Dram, addr, len, device })
    }
}

/// A number of at most eight bytes.
fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::sample::sample;

    #[test]
    fn what_an_agent_says_of_itself_is_read_and_every_truncation_refused() {
        let ranges = [[4096, 100, 0], [1 << 40, 1 << 30, 3]];
        let bytes = sample(b"0f8fad5b-d9cb", &ranges);
        let read = AgentMetadata::parse(&bytes).unwrap();
        assert_eq!((read.name, &read.backends[..]), ("0f8fad5b-d9cb", &["UCX"][..]));
        let memory =
            ranges.map(|[addr, len, device]| Registered { kind: MemoryKind::Dram, addr, len, device });
        assert_eq!(read.memory, memory);
        for len in 0..bytes.len() {
            let error = AgentMetadata::parse(&bytes[..len]).unwrap_err();
            let at =
                |error: &ForeignError| matches!(error, ForeignError::Damaged { at, len: of, .. } if at <= of);
            assert!(at(&error), "{len}: {error}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(AgentMetadata::parse(&longer).is_err());
    }

    #[test]
    fn damaged_metadata_panics_nowhere_and_huge_counts_cost_nothing() {
        let bytes = sample(b"agent", &[[1, 2, 3]]);
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                let _ = AgentMetadata::parse(&damaged);
            }
        }
        let refused = |bytes: &[u8]| AgentMetadata::parse(bytes).unwrap_err();
        assert!(matches!(refused(&sample(&[0xff, 0xfe], &[])), ForeignError::Damaged { field: "Agent", .. }));
        assert!(matches!(refused(&sample(b"a\0b", &[])), ForeignError::Damaged { field: "Agent", .. }));
        assert!(matches!(refused(&sample(&[b'a'; 300], &[])), ForeignError::Size { got: 300, max: 256, .. }));
        assert!(matches!(refused(&sample(b"a", &[[u64::MAX, 2, 0]])), ForeignError::Damaged { .. }));
        assert!(matches!(refused(&vec![0; LONGEST + 1]), ForeignError::Size { field: "metadata.len", .. }));
        let mut many = sample(b"a", &[[1, 2, 3]]);
        // The count stands before the only range.
        let count = many.len() - (8 + 27 + 1) - 9;
        many[count..count + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(refused(&many), ForeignError::Size { field: "n", max: MAX_REGIONS, .. }));
    }
}
