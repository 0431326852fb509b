//! Checks that every transport makes of what its owner or a peer asks for: lengths, offsets, limits, ranges.

use kv_core::{Descriptor, MAX_FRAME, TransportError};

use crate::error::{Limit, MemoryError};

/// Refuses a frame longer than [`MAX_FRAME`] with [`TransportError::Size`]. `len` is the frame's length in
/// bytes, and `field` names the frame in the error: `frame.len`, or `notify.len`.
pub fn frame(field: &'static str, len: usize) -> Result<(), TransportError> {
    if len > MAX_FRAME {
        return Err(TransportError::Size { field, got: len, min: 0, max: MAX_FRAME });
    }
    Ok(())
}

/// Checks every descriptor of a post against the regions of both sides. `local` and `remote` return the
/// length, in bytes, of the region with the given number; `None` if there is no such region.
///
/// # Errors
///
/// [`TransportError::Size`] for a post without descriptors, or an empty descriptor;
/// [`TransportError::OutOfBounds`] for the first descriptor that leaves its region.
pub fn descriptors(
    descriptors: &[Descriptor],
    local: impl Fn(u32) -> Option<u64>,
    remote: impl Fn(u32) -> Option<u64>,
) -> Result<(), TransportError> {
    let empty = |field| TransportError::Size { field, got: 0, min: 1, max: usize::MAX };
    if descriptors.is_empty() {
        return Err(empty("descriptors.len"));
    }
    for (index, descriptor) in descriptors.iter().enumerate() {
        if descriptor.len == 0 {
            return Err(empty("descriptor.len"));
        }
        for (side, region, len, offset) in [
            ("local", descriptor.local_region, local(descriptor.local_region), descriptor.local_offset),
            ("remote", descriptor.remote_region, remote(descriptor.remote_region), descriptor.remote_offset),
        ] {
            let len = len.unwrap_or(0);
            if offset.checked_add(descriptor.len).is_none_or(|end| end > len) {
                let size = descriptor.len;
                return Err(TransportError::OutOfBounds {
                    descriptor: index,
                    side,
                    region,
                    len,
                    offset,
                    size,
                });
            }
        }
    }
    Ok(())
}

/// Checks fields of a configuration, each given as its name, its value, and the smallest and largest value
/// allowed. The error names the first field whose value is out of range.
pub fn limits(fields: impl IntoIterator<Item = (&'static str, usize, usize, usize)>) -> Result<(), Limit> {
    let mut fields = fields.into_iter();
    match fields.find(|(_, got, min, max)| !(min..=max).contains(&got)) {
        Some((field, got, min, max)) => Err(Limit { field, got, min, max }),
        None => Ok(()),
    }
}

/// Refuses a range whose address is zero, that has no bytes, or that ends outside of the address space, with
/// [`MemoryError::Range`].
pub fn range(addr: u64, len: u64) -> Result<(), MemoryError> {
    let fits = addr.checked_add(len).is_some_and(|end| end <= isize::MAX as u64);
    if addr == 0 || len == 0 || !fits { Err(MemoryError::Range { addr, len }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(descriptors: &[Descriptor]) -> Result<(), TransportError> {
        let lens = |lens: [u64; 2]| move |region: u32| lens.get(region as usize).copied();
        super::descriptors(descriptors, lens([100, 200]), lens([1000, u64::MAX]))
    }

    #[test]
    fn a_descriptor_that_leaves_its_region_on_either_side_is_named() {
        let good =
            Descriptor { local_region: 1, remote_region: 0, local_offset: 190, remote_offset: 990, len: 10 };
        assert_eq!(checked(&[good; 3]), Ok(()));
        let refused = |descriptor: Descriptor| match checked(&[good, descriptor]) {
            Err(TransportError::OutOfBounds { descriptor: 1, side, region, len, offset, size }) => {
                (side, region, len, offset, size)
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(Descriptor { local_offset: 191, ..good }), ("local", 1, 200, 191, 10));
        assert_eq!(refused(Descriptor { local_region: 0, ..good }), ("local", 0, 100, 190, 10));
        assert_eq!(refused(Descriptor { local_region: 2, ..good }), ("local", 2, 0, 190, 10));
        assert_eq!(refused(Descriptor { remote_offset: 991, ..good }), ("remote", 0, 1000, 991, 10));
        assert_eq!(refused(Descriptor { remote_region: u32::MAX, ..good }), ("remote", u32::MAX, 0, 990, 10));
        let wraps = Descriptor { remote_region: 1, remote_offset: u64::MAX - 5, ..good };
        assert_eq!(refused(wraps), ("remote", 1, u64::MAX, u64::MAX - 5, 10));
    }

    #[test]
    fn posts_without_descriptors_and_descriptors_without_bytes_are_refused() {
        let empty = |field| Err(TransportError::Size { field, got: 0, min: 1, max: usize::MAX });
        assert_eq!(checked(&[]), empty("descriptors.len"));
        let none =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 0 };
        assert_eq!(checked(&[none]), empty("descriptor.len"));
    }

    #[test]
    fn frames_and_limits_are_allowed_up_to_their_bounds_and_no_further() {
        assert_eq!(frame("frame.len", MAX_FRAME), Ok(()));
        let (field, got) = ("notify.len", MAX_FRAME + 1);
        assert_eq!(frame(field, got), Err(TransportError::Size { field, got, min: 0, max: MAX_FRAME }));
        assert_eq!(limits([("a", 1, 1, 2), ("b", 2, 1, 2)]), Ok(()));
        let limit = Limit { field: "b", got: 3, min: 1, max: 2 };
        assert_eq!(limits([("a", 1, 1, 2), ("b", 3, 1, 2), ("c", 0, 1, 2)]), Err(limit));
        assert_eq!(limits([("b", 0, 1, 2)]), Err(Limit { got: 0, ..limit }));
    }
}
