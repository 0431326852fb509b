//! Simulated memories: real bytes, whose content tells where they come from.

use std::ops::Range;

use kv_core::RegionRole;

use crate::ledger::HoldId;
use crate::rng::mix;
use crate::state::GROUPS;

/// The position that stands for the aux row of a request.
pub const AUX_POSITION: u32 = u32::MAX;

/// The registered memory of one life of a host, and who holds which item of it.
#[derive(Debug)]
pub struct Memory {
    regions: Vec<SimRegion>,
    /// Who holds each page; zero if the scheduler does.
    pub pages: Vec<HoldId>,
    /// Who holds each aux row; zero if the scheduler does.
    pub rows: Vec<HoldId>,
    /// Who holds each item of each state group, likewise.
    pub items: [Vec<HoldId>; GROUPS],
    poisoned: u64,
}

/// One region.
#[derive(Debug)]
pub struct SimRegion {
    /// What it is for.
    pub role: RegionRole,
    /// The state group that it belongs to.
    pub group: u16,
    /// Bytes of one item.
    pub item_len: usize,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Memory {
    /// Poisoned memory with `kv_regions` regions of `num_pages` pages and, if `aux_rows` is not
    /// zero, one of aux rows.
    pub fn new(kv_regions: usize, num_pages: u32, item_len: usize, aux_rows: u32, salt: u64) -> Memory {
        let region = |role, items: u32| SimRegion {
            role,
            group: 0,
            item_len,
            bytes: vec![0; items as usize * item_len],
        };
        let mut regions: Vec<_> = (0..kv_regions).map(|_| region(RegionRole::Kv, num_pages)).collect();
        if aux_rows > 0 {
            regions.push(region(RegionRole::Aux, aux_rows));
        }
        let mut memory = Memory {
            regions,
            pages: vec![0; num_pages as usize],
            rows: vec![0; aux_rows as usize],
            items: Default::default(),
            poisoned: mix(salt),
        };
        for page in 0..num_pages {
            memory.poison_page(page);
        }
        for row in 0..aux_rows {
            memory.poison_row(row);
        }
        memory
    }

    /// Memory without a region.
    pub fn empty() -> Memory {
        let (regions, pages, rows) = (Vec::new(), Vec::new(), Vec::new());
        Memory { regions, pages, rows, items: Default::default(), poisoned: 0 }
    }

    /// Adds a region of zeroes, which nobody holds, of items of this length.
    pub fn add(&mut self, role: RegionRole, len: usize, item_len: usize) {
        self.regions.push(SimRegion { role, group: 0, item_len, bytes: vec![0; len] });
    }

    /// The same memory with a region of so many items for each state group.
    pub fn with_state(mut self, items: u32, item_len: usize) -> Memory {
        for group in (0..GROUPS).filter(|_| items > 0) {
            // No two groups have items of one length.
            let item_len = item_len + 4 * (1 + group);
            let bytes = vec![0; items as usize * item_len];
            self.regions.push(SimRegion { role: RegionRole::State, group: group as u16, item_len, bytes });
            self.items[group] = vec![0; items as usize];
            (0..items).for_each(|item| self.poison_item(group as u16, item));
        }
        self
    }

    /// The regions.
    pub fn regions(&self) -> &[SimRegion] {
        &self.regions
    }

    /// The bytes of a piece; `None` if it leaves its region.
    pub fn piece(&self, region: u32, offset: u64, len: u64) -> Option<&[u8]> {
        let bytes = &self.regions.get(region as usize)?.bytes;
        bytes.get(offset as usize..offset.checked_add(len)? as usize)
    }

    /// Overwrites a piece; false if it leaves its region.
    pub fn overwrite(&mut self, region: u32, offset: u64, bytes: &[u8]) -> bool {
        let Some(region) = self.regions.get_mut(region as usize) else { return false };
        let Some(end) = (offset as usize).checked_add(bytes.len()) else { return false };
        let Some(place) = region.bytes.get_mut(offset as usize..end) else { return false };
        place.copy_from_slice(bytes);
        true
    }

    /// Who holds the item at an offset of a region, if the scheduler does not.
    pub fn holder(&self, region: u32, offset: u64) -> HoldId {
        let Some(region) = self.regions.get(region as usize) else { return 0 };
        let item = offset as usize / region.item_len;
        let holders = match region.role {
            RegionRole::Kv => Some(&self.pages),
            RegionRole::Aux => Some(&self.rows),
            RegionRole::State => self.items.get(usize::from(region.group)),
        };
        holders.and_then(|holders| holders.get(item)).copied().unwrap_or(0)
    }

    /// Writes the content of page `position` of the request `key` into a page, all regions.
    pub fn fill_page(&mut self, page: u32, key: u64, position: u32) {
        self.each_item((RegionRole::Kv, 0), page, |region, bytes| fill(bytes, key, region, position));
    }

    /// Writes the content of some regions of page `position` of the request `key` into a page.
    pub fn fill_layers(&mut self, page: u32, key: u64, position: u32, regions: &Range<u32>) {
        self.each_item((RegionRole::Kv, 0), page, |region, bytes| {
            if regions.contains(&(region as u32)) {
                fill(bytes, key, region, position);
            }
        });
    }

    /// Writes the content of the aux row of the request `key`.
    pub fn fill_row(&mut self, row: u32, key: u64) {
        self.each_item((RegionRole::Aux, 0), row, |region, bytes| fill(bytes, key, region, AUX_POSITION));
    }

    /// Writes the content of item `position` of a state group of the request `key`.
    pub fn fill_item(&mut self, group: u16, item: u32, key: u64, position: u32) {
        let state = (RegionRole::State, group);
        self.each_item(state, item, |region, bytes| fill(bytes, key, region, position));
    }

    /// The first region in which an item does not hold item `position` of the request `key`.
    pub fn wrong_state(&self, group: u16, item: u32, key: u64, position: u32) -> Option<usize> {
        self.wrong_item((RegionRole::State, group), item, key, position)
    }

    /// Makes an item of a state group worthless, differently each time.
    pub fn poison_item(&mut self, group: u16, item: u32) {
        self.poisoned = mix(self.poisoned.wrapping_add(1));
        let key = self.poisoned;
        self.each_item((RegionRole::State, group), item, |region, bytes| fill(bytes, key, region, item));
    }

    /// The first region in which a page does not hold page `position` of the request `key`.
    pub fn wrong_page(&self, page: u32, key: u64, position: u32) -> Option<usize> {
        self.wrong_item((RegionRole::Kv, 0), page, key, position)
    }

    /// The first region in which an aux row is not that of the request `key`.
    pub fn wrong_row(&self, row: u32, key: u64) -> Option<usize> {
        self.wrong_item((RegionRole::Aux, 0), row, key, AUX_POSITION)
    }

    /// Makes a page worthless, differently each time.
    pub fn poison_page(&mut self, page: u32) {
        self.poisoned = mix(self.poisoned.wrapping_add(1));
        let key = self.poisoned;
        self.each_item((RegionRole::Kv, 0), page, |region, bytes| fill(bytes, key, region, page));
    }

    /// Makes an aux row worthless, differently each time.
    pub fn poison_row(&mut self, row: u32) {
        self.poisoned = mix(self.poisoned.wrapping_add(1));
        let key = self.poisoned;
        self.each_item((RegionRole::Aux, 0), row, |region, bytes| fill(bytes, key, region, row));
    }

    fn each_item(&mut self, lane: (RegionRole, u16), item: u32, mut visit: impl FnMut(usize, &mut [u8])) {
        for (number, region) in self.regions.iter_mut().enumerate() {
            if (region.role, region.group) == lane {
                let start = item as usize * region.item_len;
                if let Some(bytes) = region.bytes.get_mut(start..start + region.item_len) {
                    visit(number, bytes);
                }
            }
        }
    }

    fn wrong_item(&self, lane: (RegionRole, u16), item: u32, key: u64, position: u32) -> Option<usize> {
        let right = |number: usize, region: &SimRegion| {
            let start = item as usize * region.item_len;
            let Some(bytes) = region.bytes.get(start..start + region.item_len) else { return false };
            bytes
                .chunks(8)
                .enumerate()
                .all(|(lane, bytes)| bytes == &word(key, number, position, lane)[..bytes.len()])
        };
        let mut regions =
            self.regions.iter().enumerate().filter(|(_, region)| (region.role, region.group) == lane);
        regions.find(|&(number, region)| !right(number, region)).map(|(number, _)| number)
    }
}

fn fill(bytes: &mut [u8], key: u64, region: usize, position: u32) {
    for (lane, bytes) in bytes.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&word(key, region, position, lane)[..bytes.len()]);
    }
}

fn word(key: u64, region: usize, position: u32, lane: usize) -> [u8; 8] {
    let place = u64::from(position) << 16 | (region as u64) << 8 | lane as u64;
    mix(key ^ mix(place)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_tells_key_region_and_position_apart() {
        let mut memory = Memory::new(2, 4, 12, 2, 1);
        memory.fill_page(3, 77, 0);
        assert_eq!(memory.wrong_page(3, 77, 0), None);
        assert_eq!(memory.wrong_page(3, 77, 1), Some(0));
        assert_eq!(memory.wrong_page(3, 78, 0), Some(0));
        assert_eq!(memory.wrong_page(2, 77, 0), Some(0));
        let swapped = memory.piece(0, 36, 12).unwrap().to_vec();
        assert!(memory.overwrite(1, 36, &swapped));
        assert_eq!(memory.wrong_page(3, 77, 0), Some(1));
        memory.fill_row(1, 77);
        assert_eq!((memory.wrong_row(1, 77), memory.wrong_row(0, 77)), (None, Some(2)));
    }

    #[test]
    fn pieces_outside_of_their_region_do_not_exist() {
        let mut memory = Memory::new(1, 2, 8, 0, 1);
        assert!(memory.piece(0, 8, 8).is_some());
        assert!(memory.piece(0, 9, 8).is_none());
        assert!(memory.piece(1, 0, 1).is_none());
        assert!(!memory.overwrite(0, u64::MAX, &[0]));
    }
}
