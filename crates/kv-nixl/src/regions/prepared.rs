//! Descriptor lists that NIXL prepares once for each peer: a request then names items by number.
//!
//! A cache's regions are rows of items (pages, or a layer's share of pages), and most descriptors are one
//! item here and one there. NIXL looks such an item up when the list is made, and not again with each
//! request. But preparing is one call, in which nothing else happens. So lists are made only of caches that
//! are small enough ([`NixlConfig::prepared_items`](crate::NixlConfig::prepared_items)), and used only for
//! descriptors of an item or two; a longer descriptor is named by its address.

use kv_core::MemoryKind;

use crate::regions::place::Place;

/// The most items of one descriptor that are named by their numbers.
const MOST_ITEMS: u64 = 2;

/// The items of all regions of one kind of memory, numbered in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) kind: MemoryKind,
    /// The number of the first item of each region, and the length of its items; `None` if the region is of
    /// another kind, or has no items.
    regions: Vec<Option<(u64, u64)>>,
}

impl Grid {
    /// The items of these regions; `None` if there are no items, or more than `most`.
    pub(crate) fn new(rows: &[Place], most: usize) -> Option<Grid> {
        let kind = rows.first()?.kind;
        let mut items = 0_u64;
        let place = |row: &Place| {
            let count = row.len.checked_div(row.item_len).filter(|count| row.kind == kind && *count > 0)?;
            let first = items;
            items = items.saturating_add(count);
            Some((first, row.item_len))
        };
        let regions = rows.iter().map(place).collect();
        let fits = (1..=most.min(i32::MAX as usize) as u64).contains(&items) && kind != MemoryKind::File;
        fits.then_some(Grid { kind, regions })
    }

    /// Address, length and device of every item, in order.
    pub(crate) fn items<'a>(&'a self, rows: &'a [Place]) -> impl Iterator<Item = (u64, u64, u64)> + 'a {
        let listed = rows.iter().zip(&self.regions).filter(|(_, place)| place.is_some());
        listed.flat_map(|(row, _)| {
            let count = row.len.checked_div(row.item_len).unwrap_or(0);
            (0..count).map(|item| (row.addr + item * row.item_len, row.item_len, row.device))
        })
    }

    /// The number of the item that begins at an offset of a region, and the length of such items.
    fn item(&self, region: u32, offset: u64) -> Option<(u64, u64)> {
        let (first, item_len) = (*self.regions.get(region as usize)?)?;
        offset.is_multiple_of(item_len).then(|| (first + offset / item_len, item_len))
    }
}

/// The numbers of a descriptor's items on both sides, and their count; `None` if the descriptor is no whole
/// number of items of one length, or has too many.
pub(crate) fn numbers(
    (here, there): (&Grid, &Grid),
    local: (u32, u64),
    remote: (u32, u64),
    len: u64,
) -> Option<(u64, u64, u64)> {
    let (ours, item_len) = here.item(local.0, local.1)?;
    let (theirs, other) = there.item(remote.0, remote.1)?;
    let count = len.checked_div(item_len)?;
    let whole = item_len == other && len.is_multiple_of(item_len) && (1..=MOST_ITEMS).contains(&count);
    whole.then_some((ours, theirs, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(addr: u64, items: u64, item_len: u64, kind: MemoryKind) -> Place {
        // Some bytes at the end that are no item.
        Place { addr, len: items * item_len + item_len / 2, item_len, kind, device: 0 }
    }

    #[test]
    fn numbers_name_the_items_that_the_list_has_at_these_places() {
        let dram = MemoryKind::Dram;
        let here = [row(1000, 5, 64, dram), row(9000, 3, 7, MemoryKind::Vram), row(5000, 4, 16, dram)];
        let there = [row(70_000, 9, 16, dram), row(90_000, 2, 64, dram)];
        let (ours, theirs) = (Grid::new(&here, 9).unwrap(), Grid::new(&there, 11).unwrap());
        let listed: [Vec<_>; 2] = [ours.items(&here).collect(), theirs.items(&there).collect()];
        assert_eq!([listed[0].len(), listed[1].len()], [9, 11]);
        let grids = (&ours, &theirs);
        for (local, remote, len) in [((0, 64), (1, 64), 64), ((0, 192), (1, 0), 128), ((2, 48), (0, 128), 16)]
        {
            let (a, b, count) = numbers(grids, local, remote, len).unwrap();
            let (here, there) = (here[local.0 as usize], there[remote.0 as usize]);
            assert_eq!(listed[0][a as usize], (here.addr + local.1, here.item_len, 0));
            assert_eq!(listed[1][b as usize], (there.addr + remote.1, there.item_len, 0));
            assert_eq!(count * here.item_len, len);
        }
        for (local, remote, len) in [
            ((0, 1), (1, 0), 64),  // no item begins there
            ((0, 0), (1, 32), 64), // nor there
            ((0, 0), (1, 0), 65),  // more than an item
            ((0, 0), (1, 0), 0),   // nothing
            ((0, 0), (1, 0), 192), // so many are one descriptor
            ((0, 0), (0, 0), 64),  // items of other lengths
            ((1, 0), (1, 0), 64),  // other memory
            ((3, 0), (1, 0), 64),  // no such region
        ] {
            assert_eq!(numbers(grids, local, remote, len), None, "{local:?} {remote:?} {len}");
        }
    }

    #[test]
    fn caches_without_items_with_too_many_or_of_files_have_no_list() {
        let rows = |item_len, kind| [row(0, 8, 64, MemoryKind::Dram), row(4096, 8, item_len, kind)];
        assert!(Grid::new(&rows(64, MemoryKind::Dram), 16).is_some());
        assert_eq!(Grid::new(&rows(64, MemoryKind::Dram), 15), None);
        assert!(Grid::new(&rows(0, MemoryKind::Dram), 8).is_some());
        assert_eq!(Grid::new(&[], 8), None);
        assert_eq!(Grid::new(&[row(0, 8, 64, MemoryKind::File)], 8), None);
        let endless = Place { addr: 0, len: u64::MAX, item_len: 1, kind: MemoryKind::Dram, device: 0 };
        assert_eq!(Grid::new(&[endless, endless], usize::MAX), None);
    }
}
