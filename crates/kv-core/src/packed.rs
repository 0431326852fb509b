//! Runs (first, length) as frames carry them: a fixed number of bytes for each run, little-endian.
//! Frames have thousands of runs, and copying bytes is much faster than reading a list of pairs.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

use crate::meter::each;

/// Bytes of so few runs that writing them takes no memory but the frame's.
const FEW: usize = 96;

/// A run that takes `WIDTH` bytes on the wire.
pub(crate) trait Packed: Sized {
    const WIDTH: usize;
    /// Writes the run to `WIDTH` bytes.
    fn write(self, out: &mut [u8]);
    /// Reads the run from `WIDTH` bytes.
    fn read(bytes: &[u8]) -> Self;
}

impl Packed for (u32, u32) {
    const WIDTH: usize = 8;

    fn write(self, out: &mut [u8]) {
        if let Some(out) = out.first_chunk_mut() {
            *out = (u64::from(self.1) << 32 | u64::from(self.0)).to_le_bytes();
        }
    }

    fn read(bytes: &[u8]) -> (u32, u32) {
        let run = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        (run as u32, (run >> 32) as u32)
    }
}

impl Packed for (u64, u32) {
    const WIDTH: usize = 12;

    fn write(self, out: &mut [u8]) {
        if let Some((first, number)) = out.split_first_chunk_mut() {
            *first = self.0.to_le_bytes();
            number.copy_from_slice(&self.1.to_le_bytes());
        }
    }

    fn read(bytes: &[u8]) -> (u64, u32) {
        let first = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let number = bytes.last_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        (first, number)
    }
}

/// Writes runs as bytes.
pub(crate) fn write<P: Packed, S: Serializer>(
    runs: impl ExactSizeIterator<Item = P>,
    out: S,
) -> Result<S::Ok, S::Error> {
    let len = runs.len() * P::WIDTH;
    let (mut few, mut many) = ([0; FEW], Vec::new());
    let bytes = match few.get_mut(..len) {
        Some(few) => few,
        None => {
            many.resize(len, 0);
            &mut many
        }
    };
    for (run, place) in each(runs).zip(bytes.chunks_exact_mut(P::WIDTH)) {
        run.write(place);
    }
    out.serialize_bytes(bytes)
}

/// Writes a field that is a list of runs.
pub(crate) fn serialize<P: Packed + Copy, S: Serializer>(runs: &[P], out: S) -> Result<S::Ok, S::Error> {
    write(runs.iter().copied(), out)
}

/// Reads the runs that [`write()`] has written.
pub(crate) fn deserialize<'de, T: OfRuns, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    from.deserialize_bytes(Runs(PhantomData))
}

/// A type that can be built from runs.
pub(crate) trait OfRuns: Sized {
    type Run: Packed;
    type Error: fmt::Display;
    fn of_runs(runs: impl Iterator<Item = Self::Run>) -> Result<Self, Self::Error>;
}

impl<P: Packed> OfRuns for Vec<P> {
    type Run = P;
    type Error = Infallible;

    fn of_runs(runs: impl Iterator<Item = P>) -> Result<Vec<P>, Infallible> {
        Ok(runs.collect())
    }
}

struct Runs<T>(PhantomData<T>);

impl<T: OfRuns> Visitor<'_> for Runs<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "runs of {} bytes each", T::Run::WIDTH)
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<T, E> {
        let runs = bytes.chunks_exact(T::Run::WIDTH);
        if !runs.remainder().is_empty() {
            return Err(E::invalid_length(bytes.len(), &self));
        }
        T::of_runs(each(runs).map(T::Run::read)).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    #[derive(Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
    struct Both {
        #[serde(with = "super")]
        pages: Vec<(u32, u32)>,
        #[serde(with = "super")]
        attempts: Vec<(u64, u32)>,
    }

    #[test]
    fn runs_are_equal_after_encoding_and_truncated_runs_are_refused() {
        let (pages, attempts) = (vec![(0, u32::MAX), (u32::MAX, 0)], vec![(u64::MAX - 1, 7), (1, 0)]);
        let both = Both { pages, attempts };
        let bytes = rmp_serde::to_vec(&both).unwrap();
        assert_eq!(bytes.len(), 1 + 2 + 2 * 8 + 2 + 2 * 12);
        assert_eq!(rmp_serde::from_slice::<Both>(&bytes).unwrap(), both);
        for cut in [
            [0x92, 0xc4, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0xc4, 0].as_slice(),
            &[0x92, 0xc4, 0, 0xc4, 4, 1, 2, 3, 4],
        ] {
            let error = rmp_serde::from_slice::<Both>(cut).unwrap_err();
            assert!(error.to_string().contains("bytes each"), "{error}");
        }
    }

    #[test]
    fn few_runs_and_many_runs_are_written_alike() {
        for len in [0, 1, 7, 8, 9, 12, 13, 1000] {
            let pages: Vec<(u32, u32)> = (0..len).map(|at| (at * 7, at + 1)).collect();
            let attempts = pages.iter().map(|&(start, count)| (u64::from(start) << 33, count)).collect();
            let both = Both { pages, attempts };
            assert_eq!(rmp_serde::from_slice::<Both>(&rmp_serde::to_vec(&both).unwrap()).unwrap(), both);
        }
    }
}
