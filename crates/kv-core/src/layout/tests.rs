//! What geometries are accepted, and which fit each other.

mod bounds;
mod forms;
mod pairing;

use super::*;
use crate::args::KvArgs;
use crate::layout::{MemoryKind, Region};
use crate::page_list::MAX_PAGES;

fn shape(role: RegionRole, items: u64, item_len: u64) -> RegionShape {
    RegionShape {
        role,
        len: items * item_len,
        item_len,
        memory: MemoryKind::Dram,
        layer: None,
        layers: 1,
        holds: Holds::Opaque,
        group: 0,
        form: Form::default(),
    }
}

/// K and V of layer 7, two aux regions of 5 and 3 rows, one state region.
fn geometry() -> Geometry {
    let mut regions = vec![
        shape(RegionRole::Kv, 10, 64),
        shape(RegionRole::Kv, 10, 32),
        shape(RegionRole::Aux, 5, 16),
        shape(RegionRole::Aux, 3, 8),
        shape(RegionRole::State, 4, 100),
    ];
    regions[0].layer = Some(7);
    regions[1].layer = Some(7);
    Geometry {
        num_pages: 10,
        page_size: 16,
        dtype: "bf16".to_owned(),
        kv_heads: 2,
        head_dim: 64,
        model: "m".to_owned(),
        parallel: Parallel {
            tp_size: 4,
            tp_rank: 1,
            pp_size: 4,
            pp_rank: 2,
            dp_size: 2,
            ..Parallel::default()
        },
        regions,
        layout: Layout::default(),
    }
}

fn changed(change: impl FnOnce(&mut Geometry)) -> Geometry {
    let mut geometry = geometry();
    change(&mut geometry);
    geometry
}

fn remove(geometry: &mut Geometry, region: usize) {
    geometry.regions.remove(region);
}

/// Field, value here, value there, and what makes it so at the peer.
type Difference = (&'static str, &'static str, &'static str, fn(&mut Geometry));

#[test]
fn a_mismatch_names_the_field_and_both_values() {
    let differences: &[Difference] = &[
        ("page_size", "16", "32", |peer| peer.page_size = 32),
        ("dtype", "\"bf16\"", "\"f\\n16\"", |peer| peer.dtype = "f\n16".to_owned()),
        ("kv_heads", "2", "1", |peer| peer.kv_heads = 1),
        ("head_dim", "64", "128", |peer| peer.head_dim = 128),
        ("model", "\"m\"", "\"\"", |peer| peer.model.clear()),
        ("tp_size", "4", "2", |peer| peer.parallel.tp_size = 2),
        ("pp_size", "4", "2", |peer| peer.parallel.pp_size = 2),
        ("tp_rank", "1", "0", |peer| peer.parallel.tp_rank = 0),
        ("pp_rank", "2", "3", |peer| peer.parallel.pp_rank = 3),
        ("kv_regions", "2", "1", |peer| remove(peer, 0)),
        ("aux_regions", "2", "1", |peer| remove(peer, 3)),
        ("state_regions", "1", "0", |peer| remove(peer, 4)),
        ("regions[1].item_len", "32", "48", |peer| peer.regions[1].item_len = 48),
        ("regions[1].layer", "7", "8", |peer| peer.regions[1].layer = Some(8)),
        ("regions[0].layer", "7", "none", |peer| peer.regions[0].layer = None),
        ("regions[3].item_len", "8", "4", |peer| peer.regions[3].item_len = 4),
        ("regions[4].item_len", "100", "50", |peer| peer.regions[4].item_len = 50),
    ];
    for (field, ours, theirs, change) in differences {
        let mismatch = geometry().check(&changed(*change)).unwrap_err();
        assert_eq!((&*mismatch.field, &*mismatch.ours, &*mismatch.theirs), (*field, *ours, *theirs));
    }
}

#[test]
fn sizes_of_the_cache_replica_and_memory_may_differ() {
    let peer = changed(|peer| {
        peer.num_pages = 3;
        peer.parallel.dp_size = 1;
        for region in &mut peer.regions {
            region.len = 3 * region.item_len;
            region.memory = MemoryKind::Vram;
        }
    });
    assert_eq!(peer.validate(), Ok(()));
    assert_eq!(geometry().check(&peer), Ok(()));
    assert_eq!(peer.check(&geometry()), Ok(()));
}

/// What makes a geometry impossible, and how it is refused.
type Impossible = (fn(&mut Geometry), GeometryError);

#[test]
fn an_impossible_geometry_is_refused_with_the_field_and_its_bounds() {
    let out_of_range = |field, got, min, max| GeometryError::Range { field, got, min, max };
    let cases: Vec<Impossible> = vec![
        (|g| g.num_pages = 0, out_of_range("num_pages", 0, 1, 1 << 24)),
        (|g| g.num_pages = MAX_PAGES + 1, out_of_range("num_pages", (1 << 24) + 1, 1, 1 << 24)),
        (|g| g.page_size = 0, out_of_range("page_size", 0, 1, 1 << 20)),
        (|g| g.kv_heads = u32::MAX, out_of_range("kv_heads", u64::from(u32::MAX), 1, 1 << 16)),
        (|g| g.head_dim = 0, out_of_range("head_dim", 0, 1, 1 << 20)),
        (|g| g.dtype = "x".repeat(65), out_of_range("dtype.len", 65, 1, 64)),
        (|g| g.model = "x".repeat(257), out_of_range("model.len", 257, 0, 256)),
        (|g| g.regions.clear(), out_of_range("regions.len", 0, 1, 4096)),
        (
            |g| g.regions = vec![shape(RegionRole::Kv, 10, 1); 4097],
            out_of_range("regions.len", 4097, 1, 4096),
        ),
        (|g| g.parallel.tp_size = 0, out_of_range("tp_size", 0, 1, 4096)),
        (|g| g.parallel.dp_size = 4097, out_of_range("dp_size", 4097, 1, 4096)),
        (|g| g.parallel.pp_rank = 4, out_of_range("pp_rank", 4, 0, 3)),
        (|g| g.regions[1].item_len = 0, GeometryError::ItemLen { region: 1, got: 0, max: 1 << 40 }),
        (
            |g| g.regions[3].item_len = u64::MAX,
            GeometryError::ItemLen { region: 3, got: u64::MAX, max: 1 << 40 },
        ),
        (|g| g.regions.swap(1, 2), GeometryError::RegionOrder { region: 2, role: "kv", before: "aux" }),
    ];
    for (change, error) in cases {
        assert_eq!(changed(change).validate(), Err(error));
    }
    assert_eq!(geometry().validate(), Ok(()));
}

#[test]
fn a_region_holds_whole_items_and_exactly_the_pages() {
    let length = |region, role, len, item_len, items| {
        Err(GeometryError::RegionLength { region, role, len, item_len, items })
    };
    assert_eq!(changed(|g| g.regions[0].len += 64).validate(), length(0, "kv", 704, 64, 10));
    assert_eq!(changed(|g| g.regions[2].len += 1).validate(), length(2, "aux", 81, 16, 5));
    assert_eq!(changed(|g| g.regions[4].len = 0).validate(), length(4, "state", 0, 100, 1));
    // 2^24 pages of 2^40 bytes are 2^64 bytes: the product wraps to the length given.
    let wrapping = changed(|g| {
        g.num_pages = MAX_PAGES;
        g.regions = vec![RegionShape { len: 0, item_len: 1 << 40, ..g.regions[0].clone() }];
    });
    assert_eq!(wrapping.validate(), length(0, "kv", 0, 1 << 40, 1 << 24));
    // More rows than an index can name.
    let rows = u64::from(u32::MAX);
    let many = changed(|g| g.regions[2] = shape(RegionRole::Aux, rows + 1, 1));
    assert_eq!(many.validate(), length(2, "aux", rows + 1, 1, rows));
}

#[test]
fn whatever_a_builder_accepts_a_peer_accepts() {
    let smallest = KvArgs::builder("e", 0).pages(1, 1).region(Region::dram(RegionRole::Kv, 8, 1, 1));
    let parallel = Parallel {
        tp_size: 4096,
        tp_rank: 4095,
        pp_size: 4096,
        pp_rank: 4095,
        dp_size: 4096,
        dp_rank: 4095,
        pcp_size: 4096,
        pcp_rank: 4095,
    };
    let largest = KvArgs::builder("e", 0)
        .pages(MAX_PAGES, 1 << 20)
        .heads(1 << 16, 1 << 20)
        .dtype(&"x".repeat(64))
        .model(&"x".repeat(256))
        .parallel(parallel)
        .region(Region::dram(RegionRole::Aux, 8, u64::from(u32::MAX), 1))
        .region(Region::dram(RegionRole::State, 1 << 62, 1 << 40, 1 << 40))
        .region(Region::dram(RegionRole::Kv, 1 << 40, 1 << 61, 1 << 37));
    for args in [smallest, largest] {
        assert_eq!(args.build().unwrap().geometry().validate(), Ok(()));
    }
}

#[test]
fn hostile_json_parses_and_is_then_refused() {
    let mut json = serde_json::to_value(geometry()).unwrap();
    json["regions"][0]["item_len"] = 0.into();
    let hostile: Geometry = serde_json::from_value(json).unwrap();
    assert_eq!(hostile.validate(), Err(GeometryError::ItemLen { region: 0, got: 0, max: 1 << 40 }));
    assert_eq!(hostile.regions[0].items(), 0);
}

#[test]
fn missing_layout_fields_get_the_values_of_older_versions() {
    let mut json = serde_json::to_value(geometry()).unwrap();
    json.as_object_mut().unwrap().remove("layout");
    for region in json["regions"].as_array_mut().unwrap() {
        for field in ["layers", "holds", "group"] {
            region.as_object_mut().unwrap().remove(field);
        }
    }
    assert_eq!(serde_json::from_value::<Geometry>(json).unwrap(), geometry());
}

#[test]
fn the_row_count_is_the_least_of_all_aux_regions() {
    assert_eq!(geometry().aux_rows(), Some(3));
    assert_eq!(changed(|g| drop(g.regions.drain(2..4))).aux_rows(), None);
    assert_eq!(geometry().kv_regions(), 0..2);
    assert_eq!(geometry().aux_regions(), 2..4);
    assert_eq!(geometry().bytes_per_page(), 96);
    // So are the items of a group.
    let smaller =
        changed(|g| g.regions.extend([shape(RegionRole::State, 2, 100), shape(RegionRole::State, 3, 8)]));
    assert_eq!((smaller.group_items(0), smaller.group_items(1)), (2, 0));
}

/// A cache that says what it holds: keys and values of layers 0 and 1, on rank 0 of 2.
fn told() -> Geometry {
    let region =
        |layer, holds| RegionShape { layer: Some(layer), holds, ..shape(RegionRole::Kv, 10, 16 * 2 * 8) };
    let state = RegionShape { layer: Some(1), holds: Holds::State(0), ..shape(RegionRole::State, 4, 4 * 32) };
    let mut geometry = geometry();
    geometry.parallel = Parallel { tp_size: 2, ..Parallel::default() };
    geometry.regions = vec![
        region(0, Holds::Key),
        region(0, Holds::Value),
        region(1, Holds::Key),
        region(1, Holds::Value),
        state,
    ];
    geometry.layout.total_kv_heads = 4;
    geometry.layout.groups = vec![CacheGroup::slots(4, 8)];
    geometry
}

#[test]
fn caches_with_declared_content_may_differ_in_shape() {
    let changes: &[fn(&mut Geometry)] = &[
        |peer| peer.parallel.tp_rank = 1,
        |peer| peer.layout.axes = HND,
        |peer| peer.layout.kernel_page_size = 4,
        |peer| {
            peer.page_size = 32;
            peer.regions.iter_mut().take(4).for_each(|region| {
                region.item_len *= 2;
                region.len *= 2;
            });
        },
        |peer| {
            peer.parallel.tp_size = 4;
            peer.kv_heads = 1;
            peer.layout.groups[0].heads = 2;
            peer.regions.iter_mut().for_each(|region| {
                region.item_len /= 2;
                region.len /= 2;
            });
        },
        |peer| peer.regions.swap(0, 3),
    ];
    for change in changes {
        let mut peer = told();
        change(&mut peer);
        assert_eq!(peer.validate(), Ok(()));
        assert_eq!(told().check(&peer), Ok(()));
        assert_eq!(peer.check(&told()), Ok(()));
    }
}

#[test]
fn an_impossible_pairing_is_refused_with_field_values_and_advice() {
    type Refused = (&'static str, &'static str, &'static str, &'static str, fn(&mut Geometry));
    let differences: &[Refused] = &[
        ("tp_size", "2", "3", "multiple", |peer| {
            peer.parallel.tp_size = 3;
            peer.layout.total_kv_heads = 6;
            peer.layout.groups[0] = CacheGroup::slots(4, 12);
        }),
        ("total_kv_heads", "4", "2", "number of KV heads", |peer| {
            peer.parallel.tp_size = 1;
            peer.layout.total_kv_heads = 2;
            peer.layout.groups[0] = CacheGroup::slots(4, 4);
        }),
        ("dcp_size", "1", "2", "latent", |peer| {
            peer.layout.dcp_size = 2;
            peer.layout.total_kv_heads = 2;
            peer.layout.groups[0] = CacheGroup::slots(4, 4);
        }),
        ("regions[0].head_bytes", "8", "4", "", |peer| {
            peer.page_size = 32;
        }),
        ("tp_rank", "0", "1", "Region::holds", |peer| {
            peer.parallel.tp_rank = 1;
            peer.regions[2].holds = Holds::Opaque;
        }),
        ("layout.groups[0].total_heads", "8", "4", "", |peer| {
            peer.parallel.tp_size = 1;
            peer.layout.total_kv_heads = 0;
            peer.kv_heads = 4;
            peer.page_size = 8;
            peer.layout.groups[0] = CacheGroup::slots(4, 4);
        }),
    ];
    for (field, ours, theirs, way_out, change) in differences {
        let mut peer = told();
        change(&mut peer);
        assert_eq!(peer.validate(), Ok(()), "{field}");
        let mismatch = told().check(&peer).unwrap_err();
        assert_eq!((&*mismatch.field, &*mismatch.ours, &*mismatch.theirs), (*field, *ours, *theirs));
        assert!(mismatch.to_string().contains(way_out), "{mismatch}");
    }
    let mut fewer = told();
    fewer.parallel.tp_size = 1;
    fewer.layout.total_kv_heads = 2;
    fewer.layout.groups[0] = CacheGroup::slots(4, 4);
    fewer.regions.truncate(2);
    let mut whole = told();
    whole.parallel.tp_size = 1;
    whole.layout.total_kv_heads = 2;
    whole.layout.groups[0] = CacheGroup::slots(4, 4);
    let mismatch = whole.check(&fewer).unwrap_err();
    assert_eq!((&*mismatch.field, &*mismatch.ours), ("layers", "4 of layers 0..2"));
    assert_eq!(mismatch.theirs, "2 of layers 0..1");
}

#[test]
fn an_impossible_layout_is_refused_with_its_field() {
    let cases: Vec<Impossible> = vec![
        (
            |g| g.layout.axes = Axes::new([Axis::Layer, Axis::Part, Axis::Token, Axis::Layer]),
            GeometryError::Axes { region: None },
        ),
        (
            |g| g.layout.kernel_page_size = 5,
            GeometryError::Multiple { field: "page_size", got: 16, of_field: "kernel_page_size", of: 5 },
        ),
        (|g| g.layout.total_kv_heads = 3, GeometryError::Heads { heads: 2, total: 3, ranks: 2 }),
        (|g| g.regions[1].holds = Holds::Key, GeometryError::HeldTwice { first: 0, second: 1, layer: 0 }),
        (|g| g.regions[1].layer = None, GeometryError::Content { region: 1, max: 1 << 16 }),
        (|g| g.regions[1].layers = 0, GeometryError::Content { region: 1, max: 1 << 16 }),
        (|g| g.regions[1].layers = u32::MAX, GeometryError::Content { region: 1, max: 1 << 16 }),
        (|g| g.regions[1].holds = Holds::State(0), GeometryError::Content { region: 1, max: 1 << 16 }),
        (|g| g.regions[1].layers = 3, GeometryError::Pieces { region: 1, item_len: 256, pieces: 3 * 16 * 2 }),
        (|g| g.regions[4].group = 1, GeometryError::Range { field: "regions.group", got: 1, min: 0, max: 0 }),
    ];
    for (change, error) in cases {
        let mut geometry = told();
        change(&mut geometry);
        assert_eq!(geometry.validate(), Err(error));
    }
    assert_eq!(told().validate(), Ok(()));
}
