//! The memory of one life: real bytes, which tell of which request and of which place in the model they are, and
//! the holder of each page.

use kv_core::KvArgs;
use kv_core::layout::{Axis, Geometry, Holds, RegionRole};
use kv_core::random::mix;

use super::LegId;

/// Bytes of the key or the value of one token in one head of one layer.
pub(super) const ATOM: usize = 16;

/// Who may have bytes moved from or to a page or an aux row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// Nobody: the scheduler may use the page for whatever comes next.
    Free,
    /// The scheduler, which has set the page aside for a leg that was not lent the page yet.
    Scheduler(LegId),
    /// The session of a leg.
    Lent(LegId),
}

/// The registered memory of one life.
pub(super) struct Memory {
    regions: Vec<Vec<u8>>,
    geometry: Geometry,
    addrs: Vec<u64>,
    pub(super) pages: Vec<Holder>,
    pub(super) rows: Vec<Holder>,
    poisoned: u64,
}

impl Memory {
    pub(super) fn new(args: &KvArgs, salt: u64) -> Memory {
        let geometry = args.geometry().clone();
        let rows = geometry.aux_rows().unwrap_or(0) as usize;
        let mut memory = Memory {
            regions: args.regions().iter().map(|region| vec![0; region.len as usize]).collect(),
            addrs: args.regions().iter().map(|region| region.addr).collect(),
            pages: vec![Holder::Free; geometry.num_pages as usize],
            rows: vec![Holder::Free; rows],
            geometry,
            poisoned: mix(salt),
        };
        (0..memory.pages.len()).for_each(|page| memory.poison(RegionRole::Kv, page));
        (0..rows).for_each(|row| memory.poison(RegionRole::Aux, row));
        memory
    }

    /// The region and the offset of an address; `None` if fewer than `len` bytes are registered there.
    pub(super) fn find(&self, addr: u64, len: u64) -> Option<(usize, usize)> {
        let region = self.addrs.iter().zip(&self.regions).position(|(begin, bytes)| {
            addr >= *begin && addr.saturating_add(len) <= begin + bytes.len() as u64
        })?;
        Some((region, (addr - self.addrs[region]) as usize))
    }

    pub(super) fn bytes(&self, region: usize, offset: usize, len: usize) -> Option<&[u8]> {
        self.regions.get(region)?.get(offset..offset.checked_add(len)?)
    }

    pub(super) fn overwrite(&mut self, region: usize, offset: usize, bytes: &[u8]) -> bool {
        let end = offset.saturating_add(bytes.len());
        let place = self.regions.get_mut(region).and_then(|region| region.get_mut(offset..end));
        place.map(|place| place.copy_from_slice(bytes)).is_some()
    }

    /// The holders of all pages, or of all rows, that these bytes touch.
    pub(super) fn holders(&self, region: usize, offset: usize, len: usize) -> Vec<Holder> {
        let shape = &self.geometry.regions[region];
        let table = if shape.role == RegionRole::Aux { &self.rows } else { &self.pages };
        let item = shape.item_len as usize;
        let items = offset / item..=(offset + len.max(1) - 1) / item;
        items.filter_map(|item| table.get(item).copied()).collect()
    }

    /// The numbers of the pages that these bytes touch; none if the bytes are of aux rows.
    pub(super) fn pages_at(&self, region: usize, offset: usize, len: usize) -> std::ops::Range<u32> {
        let size = self.geometry.regions[region].item_len as usize;
        let pages = (offset / size) as u32..((offset + len.max(1) - 1) / size) as u32 + 1;
        if self.is_aux(region) { 0..0 } else { pages }
    }

    /// True if these bytes touch this page, or this aux row.
    pub(super) fn touches(
        &self,
        (region, offset): (usize, usize),
        len: usize,
        (role, item): (RegionRole, u32),
    ) -> bool {
        let shape = &self.geometry.regions[region];
        let size = shape.item_len as usize;
        shape.role == role && (offset / size..=(offset + len.max(1) - 1) / size).contains(&(item as usize))
    }

    /// True if the bytes are of an aux row.
    pub(super) fn is_aux(&self, region: usize) -> bool {
        self.geometry.regions[region].role == RegionRole::Aux
    }

    /// Gives a page or a row a content that no request has.
    pub(super) fn poison(&mut self, role: RegionRole, item: usize) {
        self.poisoned += 1;
        let key = mix(self.poisoned ^ 0x9015_0000);
        for (region, shape) in self.regions.iter_mut().zip(&self.geometry.regions) {
            if shape.role == role {
                let len = shape.item_len as usize;
                let bytes = &mut region[item * len..(item + 1) * len];
                bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = mix(key ^ at as u64) as u8);
            }
        }
    }

    /// Writes the content that page `position` of a request has on this rank.
    pub(super) fn fill_page(&mut self, page: u32, key: u64, position: usize) {
        for number in self.geometry.kv_regions() {
            let content = self.content(number, key, position);
            let at = page as usize * content.len();
            self.regions[number][at..at + content.len()].copy_from_slice(&content);
        }
    }

    /// The number of a region in which a page has another content than page `position` of the request.
    pub(super) fn wrong_page(&self, page: u32, key: u64, position: usize) -> Option<usize> {
        self.geometry.kv_regions().find(|&number| {
            let content = self.content(number, key, position);
            let at = page as usize * content.len();
            self.regions[number][at..at + content.len()] != content
        })
    }

    /// Writes the aux row of a request. The first eight bytes of the last buffer are the room.
    pub(super) fn fill_row(&mut self, row: u32, key: u64, room: u64) {
        for (buffer, number) in self.geometry.aux_regions().enumerate() {
            let content = self.row(number, buffer, key, room);
            let at = row as usize * content.len();
            self.regions[number][at..at + content.len()].copy_from_slice(&content);
        }
    }

    /// The aux buffer in which a row has another content than that of the request.
    pub(super) fn wrong_row(&self, row: u32, key: u64, room: u64) -> Option<usize> {
        self.geometry.aux_regions().enumerate().find_map(|(buffer, number)| {
            let content = self.row(number, buffer, key, room);
            let at = row as usize * content.len();
            (self.regions[number][at..at + content.len()] != content).then_some(buffer)
        })
    }

    /// The first eight bytes of a row of the last aux buffer.
    pub(super) fn room_of(&self, row: u32) -> u64 {
        let Some(number) = self.geometry.aux_regions().last() else { return 0 };
        let at = row as usize * self.geometry.regions[number].item_len as usize;
        self.regions[number][at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    fn row(&self, number: usize, buffer: usize, key: u64, room: u64) -> Vec<u8> {
        let len = self.geometry.regions[number].item_len as usize;
        let mut row: Vec<u8> = (0..len).map(|at| mix(key ^ mix((buffer << 16 | at) as u64)) as u8).collect();
        if buffer + 1 == self.geometry.aux_regions().len() {
            row[..8].copy_from_slice(&room.to_le_bytes());
        }
        row
    }

    fn content(&self, number: usize, key: u64, position: usize) -> Vec<u8> {
        let (geometry, shape) = (&self.geometry, &self.geometry.regions[number]);
        let packed = shape.holds == Holds::KeyValue;
        let first_head = geometry.parallel.tp_rank * geometry.kv_heads;
        let extent = |axis| match axis {
            Axis::Layer => shape.layers,
            Axis::Part => 1 + u32::from(packed),
            Axis::Token => geometry.page_size,
            Axis::Head => geometry.kv_heads,
            Axis::Dim => 1,
        };
        let mut content = Vec::with_capacity(shape.item_len as usize);
        for atom in 0..shape.item_len as u32 / ATOM as u32 {
            let (mut rest, mut place) = (atom, [0; 5]);
            for axis in geometry.layout.axes.order().into_iter().rev() {
                place[axis as usize] = rest % extent(axis);
                rest /= extent(axis);
            }
            let at = |axis: Axis| place[axis as usize];
            let part = if packed { at(Axis::Part) } else { u32::from(shape.holds == Holds::Value) };
            let token = position as u64 * u64::from(geometry.page_size) + u64::from(at(Axis::Token));
            let layer = shape.layer.unwrap_or(0) + at(Axis::Layer);
            let name = token << 24 | u64::from(layer) << 16 | u64::from(first_head + at(Axis::Head)) << 8;
            let word = mix(key ^ mix(name | u64::from(part)));
            content.extend(word.to_le_bytes());
            content.extend(mix(word).to_le_bytes());
        }
        content
    }
}
