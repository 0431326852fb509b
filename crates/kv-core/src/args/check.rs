//! The rules for a worker's memory and limits. The rules for what peers are told are in
//! [`Geometry::validate`](crate::Geometry::validate); both sides check them.

use crate::error::ArgsError;
use crate::layout::{MemoryKind, Region};

/// Checks that every region is a range of addresses, and that no two regions share bytes.
pub(super) fn check_memory(regions: &[Region]) -> Result<(), ArgsError> {
    for (index, region) in regions.iter().enumerate() {
        let null = region.addr == 0 && region.memory != MemoryKind::File;
        if null || region.addr.checked_add(region.len).is_none() {
            return Err(ArgsError::RegionAddress { region: index, addr: region.addr, len: region.len });
        }
    }
    // The addresses of host memory are the same on all NUMA nodes.
    let space = |region: &Region| match region.memory {
        MemoryKind::Dram => (MemoryKind::Dram, 0),
        other => (other, region.device),
    };
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by_key(|&index| (space(&regions[index]), regions[index].addr));
    for pair in order.windows(2) {
        let (first, second) = (&regions[pair[0]], &regions[pair[1]]);
        if space(first) == space(second) && first.addr + first.len > second.addr {
            return Err(ArgsError::RegionOverlap { first: pair[0], second: pair[1] });
        }
    }
    Ok(())
}

pub(super) fn range(field: &'static str, got: u64, min: u64, max: u64) -> Result<(), ArgsError> {
    if (min..=max).contains(&got) { Ok(()) } else { Err(ArgsError::Range { field, got, min, max }) }
}
