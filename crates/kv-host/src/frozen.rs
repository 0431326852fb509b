//! [`Frozen`]: a transport's metadata, after which its memory and regions cannot change any more.

use std::cell::OnceCell;

use bytes::Bytes;
use kv_core::{MAX_REGIONS, TransportError};

use crate::error::MemoryError;

/// The metadata of a transport, made when the owner first asks for it. From then on peers may know the
/// transport's memory, so that no memory and no region can be added.
#[derive(Debug, Default)]
pub struct Frozen {
    bytes: OnceCell<Bytes>,
}

impl Frozen {
    /// The metadata, which `make` makes at the first call. If `make` fails, memory can still be added.
    pub fn get_or_make<E>(&self, make: impl FnOnce() -> Result<Bytes, E>) -> Result<Bytes, E> {
        match self.bytes.get() {
            Some(bytes) => Ok(bytes.clone()),
            None => make().map(|bytes| self.bytes.get_or_init(|| bytes).clone()),
        }
    }

    /// Refuses further memory with [`MemoryError::Frozen`] once the metadata has been made.
    pub fn check_memory(&self) -> Result<(), MemoryError> {
        if self.bytes.get().is_some() { Err(MemoryError::Frozen) } else { Ok(()) }
    }

    /// The number of the next region after `registered` regions, counted from 0. Refused once the metadata
    /// has been made, and above [`MAX_REGIONS`] regions.
    pub fn next_region(&self, registered: usize) -> Result<u32, TransportError> {
        if self.bytes.get().is_some() {
            return Err(TransportError::Unsupported(
                "a region that is registered after the metadata was asked for",
            ));
        }
        if registered >= MAX_REGIONS {
            let got = registered + 1;
            return Err(TransportError::Size { field: "regions.len", got, min: 0, max: MAX_REGIONS });
        }
        Ok(registered as u32)
    }
}

impl From<Bytes> for Frozen {
    fn from(bytes: Bytes) -> Frozen {
        Frozen { bytes: OnceCell::from(bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_regions_are_taken_until_the_metadata_is_made_and_never_after() {
        let frozen = Frozen::default();
        assert_eq!(frozen.get_or_make(|| Err(7)), Err(7));
        assert_eq!(frozen.check_memory(), Ok(()));
        assert_eq!(frozen.next_region(3), Ok(3));
        let (field, got) = ("regions.len", MAX_REGIONS + 1);
        let size = TransportError::Size { field, got, min: 0, max: MAX_REGIONS };
        assert_eq!(frozen.next_region(MAX_REGIONS), Err(size));
        let made = || Ok::<_, u32>(Bytes::from_static(b"first"));
        assert_eq!(frozen.get_or_make(made).unwrap(), "first");
        assert_eq!(frozen.get_or_make(|| Ok::<_, u32>(Bytes::from_static(b"second"))).unwrap(), "first");
        assert_eq!(frozen.check_memory(), Err(MemoryError::Frozen));
        assert!(matches!(frozen.next_region(0), Err(TransportError::Unsupported(_))));
    }
}
