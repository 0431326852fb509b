//! The bounds of what a layout says of heads, stages and groups.

use super::*;

fn range(field: &'static str, got: u64, min: u64, max: u64) -> GeometryError {
    GeometryError::Range { field, got, min, max }
}

fn check(change: impl FnOnce(&mut Geometry), expected: Result<(), GeometryError>) {
    let mut geometry = told();
    change(&mut geometry);
    assert_eq!(geometry.validate(), expected, "{:?}", geometry.layout);
}

#[test]
fn sizes_of_context_pages_and_stages_are_bounded() {
    check(|g| g.layout.dcp_size = 0, Err(range("dcp_size", 0, 1, 2)));
    check(|g| g.layout.dcp_size = 3, Err(range("dcp_size", 3, 1, 2)));
    check(|g| g.layout.dcp_rank = 1, Err(range("dcp_rank", 1, 0, 0)));
    check(|g| g.layout.kernel_page_size = 16, Ok(()));
    check(|g| g.layout.kernel_page_size = 17, Err(range("kernel_page_size", 17, 0, 16)));
    check(|g| g.layout.stages = vec![(0, 0)], Ok(()));
    check(|g| g.layout.stages = vec![(1 << 16, 1 << 16)], Ok(()));
    let stages = |first, end| move |g: &mut Geometry| g.layout.stages = vec![(first, end)];
    check(stages(0, (1 << 16) + 1), Err(range("layout.stages.end", (1 << 16) + 1, 0, 1 << 16)));
    check(stages(3, 2), Err(range("layout.stages.first", 3, 0, 2)));
    check(|g| g.layout.stages = vec![(0, 1); 2], Err(range("layout.stages.len", 2, 0, 1)));
    for (position, axis) in [(1, Axis::Layer), (1, Axis::Token), (2, Axis::Head), (3, Axis::Part)] {
        let twice = |g: &mut Geometry| {
            let mut order = g.layout.axes.order();
            order[position] = axis;
            g.layout.axes = Axes::with_dim(order);
        };
        check(twice, Err(GeometryError::Axes { region: None }));
    }
}

#[test]
fn sizes_of_groups_are_bounded() {
    let group = |page_size, heads, total_heads| {
        move |g: &mut Geometry| {
            g.regions.truncate(4);
            g.layout.groups = vec![CacheGroup::slots(1, 2), CacheGroup::pages(page_size, heads, total_heads)];
        }
    };
    check(group(1, 1, 1), Ok(()));
    check(group(1 << 20, 1, 2), Ok(()));
    check(group(0, 1, 2), Err(range("group.page_size", 0, 1, 1 << 20)));
    check(group((1 << 20) + 1, 1, 2), Err(range("group.page_size", (1 << 20) + 1, 1, 1 << 20)));
    check(group(1, 1 << 16, 1 << 17), Ok(()));
    check(group(1, 0, 2), Err(range("group.heads", 0, 1, 1 << 16)));
    check(group(1, (1 << 16) + 1, (1 << 17) + 2), Err(range("group.heads", (1 << 16) + 1, 1, 1 << 16)));
    check(group(1, 1, 0), Err(range("group.total_heads", 0, 1, 1 << 24)));
    check(group(1, 1, (1 << 24) + 1), Err(range("group.total_heads", (1 << 24) + 1, 1, 1 << 24)));
    check(group(1, 2, 2), Err(GeometryError::Heads { heads: 2, total: 2, ranks: 2 }));
    let most = |g: &mut Geometry| {
        group(1, 1 << 16, 1 << 24)(g);
        (g.parallel.tp_size, g.kv_heads, g.layout.total_kv_heads) = (256, 1, 1);
        g.layout.groups[0].total_heads = 256;
        g.regions.iter_mut().for_each(|region| region.holds = Holds::Opaque);
    };
    check(most, Ok(()));
}

#[test]
fn heads_are_cut_evenly_or_repeated_one_by_one() {
    let heads = |ranks: u32, heads: u32, total: u32| {
        move |g: &mut Geometry| {
            (g.parallel.tp_size, g.kv_heads, g.layout.total_kv_heads) = (ranks, heads, total);
            g.regions.truncate(4);
            g.layout.groups.clear();
            g.regions.iter_mut().for_each(|region| region.holds = Holds::Opaque);
        }
    };
    for (ranks, each, total) in [(2, 2, 4), (1, 3, 3), (4, 1, 2), (6, 1, 3), (2, 1, 2), (2, 1 << 15, 1 << 16)]
    {
        check(heads(ranks, each, total), Ok(()));
    }
    for (ranks, each, total) in [(2, 1, 4), (2, 1, 3), (2, 2, 3), (4, 2, 2), (4, 1, 3), (2, 2, 1), (3, 1, 2)]
    {
        check(heads(ranks, each, total), Err(GeometryError::Heads { heads: each, total, ranks }));
    }
    let most = range("total_kv_heads", (1 << 16) + 2, 0, 1 << 16);
    check(heads(2, (1 << 15) + 1, (1 << 16) + 2), Err(most));
}

#[test]
fn state_is_held_once_in_each_group() {
    let twice = |group: u16, other: u16| {
        move |g: &mut Geometry| {
            g.layout.groups = vec![CacheGroup::slots(4, 8); 3];
            g.regions[4].group = group;
            g.regions.push(RegionShape { group: other, ..g.regions[4].clone() });
        }
    };
    for group in 0..3 {
        check(twice(group, group), Err(GeometryError::HeldTwice { first: 4, second: 5, layer: 1 }));
        check(twice(group, (group + 1) % 3), Ok(()));
    }
    // A region of several layers holds the last of them, too; a neighbour holds others.
    let wide = |first: u32| {
        move |g: &mut Geometry| {
            g.regions.truncate(4);
            g.regions[0] = RegionShape { layers: 3, ..shape(RegionRole::Kv, 10, 768) };
            (g.regions[0].layer, g.regions[0].holds) = (Some(4), Holds::Key);
            g.regions[2].layer = Some(first);
        }
    };
    check(wide(6), Err(GeometryError::HeldTwice { first: 0, second: 2, layer: 6 }));
    check(wide(7), Ok(()));
    check(wide(3), Ok(()));
    check(wide(4), Err(GeometryError::HeldTwice { first: 0, second: 2, layer: 4 }));
}

#[test]
fn only_state_belongs_to_groups_and_aux_rows_hold_nothing_of_layers() {
    check(|g| g.regions[0].group = 1, Err(range("regions.group", 1, 0, 0)));
    let second = |g: &mut Geometry| {
        g.layout.groups.push(CacheGroup::slots(4, 8));
        g.regions[3].group = 1;
    };
    check(second, Err(range("regions.group", 1, 0, 0)));
    let aux = |g: &mut Geometry| {
        let region = RegionShape { layer: Some(0), holds: Holds::Key, ..shape(RegionRole::Aux, 2, 64) };
        g.regions.insert(4, region);
    };
    check(aux, Err(GeometryError::Content { region: 4, max: 1 << 16 }));
    check(|g| g.layout.groups.clear(), Err(GeometryError::Content { region: 4, max: 1 << 16 }));
    check(|g| g.regions[0].layer = Some((1 << 16) - 1), Ok(()));
    check(|g| g.regions[0].layer = Some(1 << 16), Err(GeometryError::Content { region: 0, max: 1 << 16 }));
}
