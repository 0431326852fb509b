//! What must hold of the numbers, the groups and the regions that a worker gives.

use super::parallel::Parallel;
use super::region::{MemoryKind, Region, RegionRole};
use crate::error::ArgsError;

pub(super) fn check_regions(regions: &[Region], num_pages: u32) -> Result<(), ArgsError> {
    for (index, region) in regions.iter().enumerate() {
        range("item_len", region.item_len, 1, 1 << 40)?;
        let items = match region.role {
            RegionRole::Kv => u64::from(num_pages),
            RegionRole::Aux | RegionRole::State => region.items().clamp(1, u64::from(u32::MAX)),
        };
        if region.item_len.checked_mul(items) != Some(region.len) {
            return Err(ArgsError::RegionLength {
                region: index,
                role: region.role.name(),
                len: region.len,
                item_len: region.item_len,
                items,
            });
        }
        let null = region.addr == 0 && region.memory != MemoryKind::File;
        if null || region.addr.checked_add(region.len).is_none() {
            return Err(ArgsError::RegionAddress { region: index, addr: region.addr, len: region.len });
        }
    }
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by_key(|&index| (regions[index].memory, regions[index].device, regions[index].addr));
    for pair in order.windows(2) {
        let (first, second) = (&regions[pair[0]], &regions[pair[1]]);
        let same_space = first.memory == second.memory && first.device == second.device;
        if same_space && first.addr + first.len > second.addr {
            return Err(ArgsError::RegionOverlap { first: pair[0], second: pair[1] });
        }
    }
    Ok(())
}

pub(super) fn check_parallel(parallel: &Parallel) -> Result<(), ArgsError> {
    for (size_field, rank_field, size, rank) in parallel.groups() {
        range(size_field, u64::from(size), 1, 4096)?;
        if rank >= size {
            return Err(ArgsError::RankOutOfGroup { field: rank_field, rank, size });
        }
    }
    Ok(())
}

pub(super) fn range(field: &'static str, got: u64, min: u64, max: u64) -> Result<(), ArgsError> {
    if (min..=max).contains(&got) { Ok(()) } else { Err(ArgsError::Range { field, got, min, max }) }
}
