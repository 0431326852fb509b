//! A foreign agent's registrations: a region that the side channel names must be inside one of them.

use kv_core::{MAX_REGIONS, MemoryKind};

use crate::foreign::error::ForeignError;
use crate::foreign::region::ForeignRegion;
use crate::regions::place::Place;

/// A range of memory that an agent has registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registered {
    pub(crate) kind: MemoryKind,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) device: u64,
}

impl Registered {
    fn of(region: &ForeignRegion) -> Registered {
        let ForeignRegion { addr, len, memory, device, .. } = *region;
        Registered { kind: memory, addr, len, device }
    }

    /// Whether this range contains another range of the same memory.
    pub(crate) fn covers(&self, other: &Registered) -> bool {
        let offset = other.addr.checked_sub(self.addr);
        let end = offset.and_then(|offset| offset.checked_add(other.len));
        self.is_beside(other) && end.is_some_and(|end| end <= self.len)
    }

    /// Whether another range is of the same kind of memory and the same device.
    pub(crate) fn is_beside(&self, other: &Registered) -> bool {
        self.kind == other.kind && self.device == other.device
    }

    /// The address after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.addr.saturating_add(self.len)
    }
}

/// The places of these regions. Each region must be inside one registration.
pub(crate) fn places(
    registered: &[Registered],
    regions: &[ForeignRegion],
) -> Result<Vec<Place>, ForeignError> {
    if regions.len() > MAX_REGIONS {
        let (got, max) = (regions.len(), MAX_REGIONS);
        return Err(ForeignError::Size { field: "regions.len", got, min: 0, max });
    }
    let regions: Vec<ForeignRegion> = regions.iter().map(|region| measured(registered, *region)).collect();
    let ranges: Vec<Registered> = regions.iter().map(Registered::of).collect();
    if let Some(region) = first_outside(registered, &ranges, || {})
        && let Some(&ForeignRegion { addr, len, memory, device, .. }) = regions.get(region)
    {
        return Err(ForeignError::Region { region, memory, device, addr, len });
    }
    Ok(regions.iter().map(ForeignRegion::place).collect())
}

/// The region with a length, if it has none: up to the end of the registration in which the region begins.
fn measured(registered: &[Registered], region: ForeignRegion) -> ForeignRegion {
    if region.len != ForeignRegion::REST {
        return region;
    }
    let byte = Registered { len: 1, ..Registered::of(&region) };
    let end = registered.iter().filter(|range| range.covers(&byte)).map(Registered::end).max();
    ForeignRegion { len: end.map_or(0, |end| end - region.addr), ..region }
}

/// The first of these ranges that has no bytes, or is inside none of the registered ranges. Both lists come
/// from a peer: they are sorted, and then compared in one pass. `step` counts the cost.
fn first_outside(registered: &[Registered], ranges: &[Registered], mut step: impl FnMut()) -> Option<usize> {
    let start = |range: &Registered| (range.kind, range.device, range.addr);
    let mut order = |a: &Registered, b: &Registered| {
        step();
        start(a).cmp(&start(b))
    };
    let mut registered = registered.to_vec();
    registered.sort_unstable_by(&mut order);
    let mut ranges: Vec<(usize, &Registered)> = ranges.iter().enumerate().collect();
    ranges.sort_unstable_by(|(_, a), (_, b)| order(a, b));

    let mut registered = registered.into_iter().peekable();
    let (mut furthest, mut outside) = (None::<Registered>, None::<usize>);
    for (number, range) in ranges {
        // Of the registrations of the same memory that begin no later, the one that ends last covers the
        // range if any of them does.
        while let Some(next) = registered.next_if(|next| start(next) <= start(range)) {
            step();
            let further = furthest.filter(|last| last.is_beside(&next) && last.end() >= next.end());
            furthest = further.or(Some(next));
        }
        step();
        if range.len == 0 || !furthest.is_some_and(|furthest| furthest.covers(range)) {
            outside = Some(outside.map_or(number, |first| first.min(number)));
        }
    }
    outside
}

#[cfg(test)]
mod tests {
    use kv_host::random;

    use super::*;

    fn range(kind: MemoryKind, device: u64, addr: u64, len: u64) -> Registered {
        Registered { kind, addr, len, device }
    }

    fn naive(registered: &[Registered], ranges: &[Registered]) -> Option<usize> {
        let inside = |range: &Registered| range.len > 0 && registered.iter().any(|one| one.covers(range));
        ranges.iter().position(|range| !inside(range))
    }

    #[test]
    fn a_region_without_a_length_reaches_to_the_end_of_its_registration() {
        let registered = [range(MemoryKind::Dram, 0, 1000, 640), range(MemoryKind::Dram, 0, 1640, 640)];
        let region = |addr| ForeignRegion {
            addr,
            len: ForeignRegion::REST,
            item_len: 64,
            memory: MemoryKind::Dram,
            device: 0,
        };
        let lens = places(&registered, &[region(1000), region(1704)]).unwrap();
        assert_eq!(lens.iter().map(|place| place.len).collect::<Vec<_>>(), [640, 576]);
        let outside = places(&registered, &[region(1000), region(2280)]).unwrap_err();
        assert!(matches!(outside, ForeignError::Region { region: 1, .. }), "{outside}");
    }

    #[test]
    fn the_first_region_outside_is_the_one_that_each_pair_compared_would_find() {
        let seed = u64::from_le_bytes(random().unwrap());
        println!("seed {seed}");
        let mut state = seed | 1;
        let mut below = |most: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % most
        };
        let (mut inside, mut outside) = (0, 0);
        for _ in 0..20_000 {
            let (registrations, regions) = (below(12), below(4));
            let mut any = |count: u64, longest: u64| -> Vec<Registered> {
                let kinds = [MemoryKind::Dram, MemoryKind::Dram, MemoryKind::Vram];
                let one = |_| range(kinds[below(3) as usize], below(2), below(40), below(longest));
                (0..count).map(one).collect()
            };
            let (registered, ranges) = (any(registrations, 40), any(regions, 8));
            let found = first_outside(&registered, &ranges, || {});
            assert_eq!(found, naive(&registered, &ranges), "{registered:?} {ranges:?}");
            *(if found.is_some() { &mut outside } else { &mut inside }) += 1;
        }
        assert!(inside > 1000 && outside > 1000, "{inside}, {outside}");
    }

    #[test]
    fn the_check_of_the_most_regions_costs_the_sum_of_both_lists_and_not_their_product() {
        let most = MAX_REGIONS as u64;
        // No registration covers the last region, and most begin before it.
        let mut registered: Vec<_> =
            (0..most).map(|at| range(MemoryKind::Dram, 0, at * 7 % most, 4)).collect();
        let mut ranges: Vec<_> = (0..most).map(|at| range(MemoryKind::Dram, 0, at * 5 % most, 1)).collect();
        ranges.push(range(MemoryKind::Dram, 0, most + 8, 1));
        let mut steps = 0_usize;
        let found = first_outside(&registered, &ranges, || steps += 1);
        assert_eq!(found, Some(MAX_REGIONS));
        let sum = registered.len() + ranges.len();
        println!("{steps} steps for {sum} ranges");
        let logarithm = sum.ilog2() as usize;
        assert!(steps <= 2 * sum * logarithm, "{steps} steps for {sum} ranges");
        registered.clear();
        assert_eq!(first_outside(&registered, &ranges, || {}), Some(0));
    }

    #[test]
    fn a_range_is_covered_by_its_own_registration_only() {
        let registered = Registered { kind: MemoryKind::Dram, addr: 1000, len: 100, device: 0 };
        let inside = |addr, len| registered.covers(&Registered { addr, len, ..registered });
        assert!(inside(1000, 100) && inside(1099, 1));
        assert!(!inside(999, 2) && !inside(1000, 101) && !inside(1050, u64::MAX));
        assert!(!registered.covers(&Registered { device: 1, ..registered }));
        assert!(!registered.covers(&Registered { kind: MemoryKind::Vram, ..registered }));
    }
}
