//! Simulated memories: real bytes, whose content tells which request and which position they are of.

use std::ops::Range;

use kv_core::RegionRole;
use kv_core::random::mix;

use crate::kv::items::GROUPS;
use crate::kv::unequal::{Deal, Name};
use crate::net;
use crate::net::lives::HoldId;

/// The position that stands for the aux row of a request on the first prefill rank. The rows of the following
/// ranks have the positions before it.
pub const AUX_POSITION: u32 = u32::MAX;
/// The region number from which the content of an aux row is made, in whichever region the row lies.
const AUX_REGION: usize = 255;

/// The registered memory of one life of a host, and the holder of each item.
#[derive(Debug, Clone)]
pub struct Memory {
    regions: Vec<SimRegion>,
    /// The holder of each page; zero if the scheduler holds the page.
    pub pages: Vec<HoldId>,
    /// The holder of each aux row; zero if the scheduler holds the row.
    pub rows: Vec<HoldId>,
    /// The holder of each item of each cache group; zero if the scheduler holds the item.
    pub items: [Vec<HoldId>; GROUPS],
    poisoned: u64,
}

/// One registered region of a simulated memory.
#[derive(Debug, Clone)]
pub struct SimRegion {
    /// The role of the region: pages, aux rows, or items of a cache group.
    pub role: RegionRole,
    /// The cache group of the region's items, if the role is `State`.
    pub group: u16,
    /// The size of one item, in bytes.
    pub item_len: usize,
    /// The content of the region.
    pub bytes: Vec<u8>,
    /// For each byte of an item, which byte of the model's cache it is; empty where engines are alike.
    pub names: Vec<Name>,
    /// Which tokens of a request the items have.
    deal: Deal,
}

/// The parts of which an item of a region consists.
#[derive(Debug, Clone, Copy)]
struct Contents<'a> {
    /// Of each byte; empty where engines are alike.
    names: &'a [Name],
    deal: Deal,
}

impl Contents<'_> {
    /// The first token of item `position` of a request.
    fn first_token(&self, position: u32) -> u64 {
        self.deal.number(position.into()) * self.deal.tokens
    }
}

impl Memory {
    /// Poisoned memory with `kv_regions` regions of `num_pages` pages and, if `aux_rows` is not
    /// zero, one of aux rows.
    pub fn new(kv_regions: usize, num_pages: u32, item_len: usize, aux_rows: u32, salt: u64) -> Memory {
        let mut memory = Memory::empty();
        for _ in 0..kv_regions {
            memory.add(RegionRole::Kv, num_pages as usize * item_len, item_len);
        }
        memory.poisoned_with(num_pages, (aux_rows, item_len), salt)
    }

    /// The same with regions whose bytes have these names, in pages that have these tokens of a request.
    pub fn named(
        regions: Vec<Vec<Name>>,
        deal: Deal,
        num_pages: u32,
        (aux_rows, item_len): (u32, usize),
        salt: u64,
    ) -> Memory {
        let mut memory = Memory::empty();
        memory.add_named((RegionRole::Kv, 0), regions, deal, num_pages);
        memory.poisoned_with(num_pages, (aux_rows, item_len), salt)
    }

    fn poisoned_with(mut self, num_pages: u32, (rows, item_len): (u32, usize), salt: u64) -> Memory {
        if rows > 0 {
            self.add(RegionRole::Aux, rows as usize * item_len, item_len);
        }
        self.pages = vec![0; num_pages as usize];
        self.rows = vec![0; rows as usize];
        self.poisoned = mix(salt);
        (0..num_pages).for_each(|page| self.poison_page(page));
        (0..rows).for_each(|row| self.poison_row(row));
        self
    }

    /// Memory without a region.
    pub fn empty() -> Memory {
        let (regions, pages, rows) = (Vec::new(), Vec::new(), Vec::new());
        Memory { regions, pages, rows, items: Default::default(), poisoned: 0 }
    }

    /// Adds a region of zeroes with items of this length, held by no session.
    pub fn add(&mut self, role: RegionRole, len: usize, item_len: usize) {
        let (bytes, names) = (vec![0; len], Vec::new());
        self.regions.push(SimRegion { role, group: 0, item_len, bytes, names, deal: Deal::all(1) });
    }

    fn add_named(
        &mut self,
        (role, group): (RegionRole, u16),
        regions: Vec<Vec<Name>>,
        deal: Deal,
        items: u32,
    ) {
        for names in regions {
            let (bytes, item_len) = (vec![0; items as usize * names.len()], names.len());
            self.regions.push(SimRegion { role, group, item_len, bytes, names, deal });
        }
    }

    /// The same memory with a region of `items` items for each cache group.
    pub fn with_state(mut self, items: u32, item_len: usize) -> Memory {
        for group in (0..GROUPS).filter(|_| items > 0) {
            // No two groups have items of one length.
            let item_len = item_len + 4 * (1 + group);
            let bytes = vec![0; items as usize * item_len];
            let (role, names) = (RegionRole::State, Vec::new());
            let (group_number, deal) = (group as u16, Deal::all(1));
            self.regions.push(SimRegion { role, group: group_number, item_len, bytes, names, deal });
            self.own_items(group, items);
        }
        self
    }

    /// The same memory with regions of a cache group whose bytes have these names, in items of `tokens`
    /// tokens. A rank without a region of the group has no item of the group.
    pub fn with_group(mut self, group: usize, regions: Vec<Vec<Name>>, tokens: usize, items: u32) -> Memory {
        if !regions.is_empty() {
            self.add_named((RegionRole::State, group as u16), regions, Deal::all(tokens), items);
            self.own_items(group, items);
        }
        self
    }

    fn own_items(&mut self, group: usize, items: u32) {
        self.items[group] = vec![0; items as usize];
        (0..items).for_each(|item| self.poison_item(group as u16, item));
    }

    /// All registered regions, in the order of their numbers.
    pub fn regions(&self) -> &[SimRegion] {
        &self.regions
    }

    /// The layers of a piece that does not cross the end of an item, as bits; where engines are alike, each
    /// region is one layer. Bit 63 stands for content that is final with the last chunk.
    pub fn layers_in(&self, region: u32, offset: u64, len: u64) -> u64 {
        let Some(known) = self.regions.get(region as usize) else { return 0 };
        if known.role != RegionRole::Kv {
            return 1 << 63;
        }
        let start = offset as usize % known.item_len;
        match known.names.get(start..start + len as usize) {
            Some(names) => names.iter().fold(0, |layers, name| layers | 1 << name.layer),
            None => 1 << region.min(62),
        }
    }

    /// The offset, in the same item, of the bytes of the previous head that correspond to a piece of a cache
    /// group; `None` if the item does not have them.
    pub fn neighbours_share(&self, region: u32, offset: u64, len: u64) -> Option<u64> {
        let known = self.regions.get(region as usize)?;
        let within = offset as usize % known.item_len;
        let name = known.names.get(within).filter(|_| known.role == RegionRole::State)?;
        let wanted = name.of_neighbour()?;
        let at = known.names.iter().position(|name| *name == wanted)?;
        (at + len as usize <= known.item_len).then_some(offset - within as u64 + at as u64)
    }

    /// Writes the content of page `position` of the request `key` into a page, all regions.
    pub fn fill_page(&mut self, page: u32, key: u64, position: u32) {
        self.fill_layers(page, key, position, &(0..u32::MAX));
    }

    /// Writes the content of some layers of page `position` of the request `key` into a page.
    pub fn fill_layers(&mut self, page: u32, key: u64, position: u32, layers: &Range<u32>) {
        self.each_item((RegionRole::Kv, 0), page, |region, contents, bytes| {
            if contents.names.is_empty() && layers.contains(&(region as u32)) {
                fill(bytes, key, region, position);
            }
            for (byte, name) in bytes.iter_mut().zip(contents.names) {
                if layers.contains(&u32::from(name.layer)) {
                    *byte = named_byte(key, name.of_request(contents.first_token(position)));
                }
            }
        });
    }

    /// Writes the content of the aux row of the request `key`, as the prefill rank `rank` has it.
    pub fn fill_row(&mut self, row: u32, key: u64, rank: u32) {
        let position = AUX_POSITION - rank;
        self.each_item((RegionRole::Aux, 0), row, |_, _, bytes| fill(bytes, key, AUX_REGION, position));
    }

    /// Writes the content of item `position` of a cache group of the request `key`.
    pub fn fill_item(&mut self, group: u16, item: u32, key: u64, position: u32) {
        self.each_item((RegionRole::State, group), item, |region, contents, bytes| {
            if contents.names.is_empty() {
                fill(bytes, key, region, position);
            }
            for (byte, name) in bytes.iter_mut().zip(contents.names) {
                *byte = named_byte(key, name.of_request(contents.first_token(position)));
            }
        });
    }

    /// The first region in which an item does not hold item `position` of the request `key`. Where
    /// engines differ, only these tokens of the request count.
    pub fn wrong_state(
        &self,
        group: u16,
        item: u32,
        (key, position): (u64, u32),
        tokens: &Range<u64>,
    ) -> Option<usize> {
        self.wrong_tokens((RegionRole::State, group), item, (key, position), tokens)
    }

    /// Makes an item of a cache group worthless, differently each time.
    pub fn poison_item(&mut self, group: u16, item: u32) {
        self.poisoned = mix(self.poisoned.wrapping_add(1));
        let key = self.poisoned;
        self.each_item((RegionRole::State, group), item, |region, _, bytes| fill(bytes, key, region, item));
    }

    /// The first region in which a page does not hold page `position` of the request `key`. Where
    /// engines differ, only the first `tokens` tokens of the request count.
    pub fn wrong_page(&self, page: u32, key: u64, position: u32, tokens: u64) -> Option<usize> {
        self.wrong_tokens((RegionRole::Kv, 0), page, (key, position), &(0..tokens))
    }

    fn wrong_tokens(
        &self,
        lane: (RegionRole, u16),
        item: u32,
        (key, position): (u64, u32),
        tokens: &Range<u64>,
    ) -> Option<usize> {
        self.wrong_item(lane, item, |number, contents, bytes| {
            let first = contents.first_token(position);
            let right = |(name, byte): (&Name, &u8)| {
                !tokens.contains(&(first + u64::from(name.token)))
                    || *byte == named_byte(key, name.of_request(first))
            };
            match contents.names.is_empty() {
                true => is_filled(bytes, key, number, position),
                false => contents.names.iter().zip(bytes).all(right),
            }
        })
    }

    /// The first region in which an aux row does not hold the content of the request `key`, as the prefill
    /// rank `rank` has it.
    pub fn wrong_row(&self, row: u32, key: u64, rank: u32) -> Option<usize> {
        self.wrong_item((RegionRole::Aux, 0), row, |_, _, bytes| {
            is_filled(bytes, key, AUX_REGION, AUX_POSITION - rank)
        })
    }

    /// Overwrites a page with bytes that no request has, with other bytes at each call.
    pub fn poison_page(&mut self, page: u32) {
        self.poisoned = mix(self.poisoned.wrapping_add(1));
        let key = self.poisoned;
        self.each_item((RegionRole::Kv, 0), page, |region, _, bytes| fill(bytes, key, region, page));
    }

    /// Overwrites an aux row with bytes that no request has, with other bytes at each call.
    pub fn poison_row(&mut self, row: u32) {
        self.poisoned = mix(self.poisoned.wrapping_add(1));
        let key = self.poisoned;
        self.each_item((RegionRole::Aux, 0), row, |region, _, bytes| fill(bytes, key, region, row));
    }

    fn each_item(
        &mut self,
        lane: (RegionRole, u16),
        item: u32,
        mut visit: impl FnMut(usize, Contents<'_>, &mut [u8]),
    ) {
        for (number, region) in self.regions.iter_mut().enumerate() {
            if (region.role, region.group) == lane {
                let start = item as usize * region.item_len;
                if let Some(bytes) = region.bytes.get_mut(start..start + region.item_len) {
                    visit(number, Contents { names: &region.names, deal: region.deal }, bytes);
                }
            }
        }
    }

    fn wrong_item(
        &self,
        lane: (RegionRole, u16),
        item: u32,
        right: impl Fn(usize, Contents<'_>, &[u8]) -> bool,
    ) -> Option<usize> {
        let right = |number: usize, region: &SimRegion| {
            let start = item as usize * region.item_len;
            let bytes = region.bytes.get(start..start + region.item_len);
            let contents = Contents { names: &region.names, deal: region.deal };
            bytes.is_some_and(|bytes| right(number, contents, bytes))
        };
        let mut regions =
            self.regions.iter().enumerate().filter(|(_, region)| (region.role, region.group) == lane);
        regions.find(|&(number, region)| !right(number, region)).map(|(number, _)| number)
    }
}

impl net::Memory for Memory {
    fn piece(&self, region: u32, offset: u64, len: u64) -> Option<&[u8]> {
        let bytes = &self.regions.get(region as usize)?.bytes;
        bytes.get(offset as usize..offset.checked_add(len)? as usize)
    }

    fn overwrite(&mut self, region: u32, offset: u64, bytes: &[u8]) -> bool {
        let Some(region) = self.regions.get_mut(region as usize) else { return false };
        let Some(end) = (offset as usize).checked_add(bytes.len()) else { return false };
        let Some(place) = region.bytes.get_mut(offset as usize..end) else { return false };
        place.copy_from_slice(bytes);
        true
    }

    fn holder(&self, region: u32, offset: u64) -> HoldId {
        let Some(region) = self.regions.get(region as usize) else { return 0 };
        let item = offset as usize / region.item_len;
        let holders = match region.role {
            RegionRole::Kv => Some(&self.pages),
            RegionRole::Aux => Some(&self.rows),
            RegionRole::State => self.items.get(usize::from(region.group)),
            _ => None,
        };
        holders.and_then(|holders| holders.get(item)).copied().unwrap_or(0)
    }

    fn item_len(&self, region: u32) -> u64 {
        self.regions.get(region as usize).map_or(1, |region| region.item_len as u64)
    }
}

/// The content of a byte of the model.
fn named_byte(key: u64, name: u64) -> u8 {
    mix(key ^ mix(name)) as u8
}

fn is_filled(bytes: &[u8], key: u64, region: usize, position: u32) -> bool {
    let mut words = bytes.chunks(8).enumerate();
    words.all(|(lane, bytes)| bytes == &word(key, region, position, lane)[..bytes.len()])
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
    use crate::net::Memory as _;

    #[test]
    fn content_tells_key_region_and_position_apart() {
        let mut memory = Memory::new(2, 4, 12, 2, 1);
        memory.fill_page(3, 77, 0);
        assert_eq!(memory.wrong_page(3, 77, 0, 0), None);
        assert_eq!(memory.wrong_page(3, 77, 1, 0), Some(0));
        assert_eq!(memory.wrong_page(3, 78, 0, 0), Some(0));
        assert_eq!(memory.wrong_page(2, 77, 0, 0), Some(0));
        let swapped = memory.piece(0, 36, 12).unwrap().to_vec();
        assert!(memory.overwrite(1, 36, &swapped));
        assert_eq!(memory.wrong_page(3, 77, 0, 0), Some(1));
        memory.fill_row(1, 77, 0);
        assert_eq!((memory.wrong_row(1, 77, 0), memory.wrong_row(0, 77, 0)), (None, Some(2)));
        assert_eq!(memory.wrong_row(1, 77, 1), Some(2));
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
