//! Facts of another implementation: what vLLM 0.33.0 computes for the same engines and pages.

use kv_core::layout::{consumers, receivers_of, sources};
use kv_core::plan::{PagePlan, Plan, RegionMap, Side};
use kv_core::{CacheGroup, Descriptor, Geometry, Holds, KvArgs, Layout, Parallel, Region, RegionRole, Room};
use serde_json::Value;

use crate::list;

fn table(name: &str) -> Vec<Value> {
    let tables: Value = serde_json::from_str(include_str!("../data/layout_vectors.json")).unwrap();
    let rows = tables[name].as_array().unwrap().clone();
    assert!(!rows.is_empty());
    rows
}

fn number(row: &Value, field: &str) -> u32 {
    row[field].as_u64().unwrap() as u32
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect()
}

fn descriptors(mut plan: Plan) -> Vec<Descriptor> {
    let mut descriptors = Vec::new();
    assert!(plan.fill(&mut descriptors, usize::MAX, u64::MAX).done);
    descriptors
}

/// One layer, pages of one token, heads of one byte; with a state of eight shares for hybrid models.
fn rank(row: &Value, tp_size: u32, tp_rank: u32) -> Geometry {
    let (mla, mamba) = (row["mla"] == true, row["mamba"] == true);
    let total = number(row, "kv_heads");
    let heads = if mla { 1 } else { (total / tp_size).max(1) };
    let held = if mla { Holds::Latent } else { Holds::Key };
    let region = |role, addr, len: u32| Region::dram(role, addr, 10 * u64::from(len), len.into()).layer(0);
    let mut layout = Layout::default().with(|layout| layout.total_kv_heads = if mla { 0 } else { total });
    let mut builder = KvArgs::builder("e", tp_rank)
        .pages(10, 1)
        .heads(heads, 1)
        .parallel(Parallel::default().with(|parallel| {
            parallel.tp_size = tp_size;
            parallel.tp_rank = tp_rank;
        }))
        .region(region(RegionRole::Kv, 0x1000, heads).holds(held));
    if mamba {
        layout.groups.push(CacheGroup::slots(8 / tp_size, 8));
        builder = builder.region(region(RegionRole::State, 0x2000, 8 / tp_size).holds(Holds::State(0)));
    }
    builder.layout(layout).build().unwrap().geometry().clone()
}

#[test]
fn ranks_heads_and_consumer_counts_match_vllm() {
    for row in table("tp") {
        let (local_tp, remote_tp) = (number(&row, "local_tp"), number(&row, "remote_tp"));
        let ours: Vec<_> = (0..local_tp).map(|tp_rank| rank(&row, local_tp, tp_rank)).collect();
        let theirs: Vec<_> = (0..remote_tp).map(|tp_rank| rank(&row, remote_tp, tp_rank)).collect();
        let here = &ours[number(&row, "rank") as usize];

        let found = sources(here, &theirs).unwrap();
        let linked: Vec<u32> = found.iter().map(|source| source.index as u32).collect();
        assert_eq!(linked, numbers(&row["handshake"]), "{row}");
        let ratio = row["ratio"].as_i64().unwrap();
        assert_eq!(linked.len() as i64, if ratio < 0 { -ratio } else { 1 }, "{row}");
        let bytes: Vec<u32> = found.iter().filter(|source| source.bytes).map(|s| s.index as u32).collect();
        assert_eq!(bytes, numbers(&row["all"]), "{row}");

        let (mut pages, mut states) = (Vec::new(), Vec::new());
        for &index in &linked {
            let there = &theirs[index as usize];
            assert_eq!(consumers(there, &ours) as u64, row["consumers"].as_u64().unwrap(), "{row}");
            assert_eq!(receivers_of(there, here) as u64, row["consumers"].as_u64().unwrap(), "{row}");
            let map = RegionMap::directed(here, there, Side::Remote).unwrap();
            let kv = descriptors(Plan::chunk(&map, &list(&[0]), 0, &list(&[0])).unwrap());
            if let Some(descriptor) = kv.first() {
                pages.push(index);
                let slot = descriptor.local_offset / descriptor.len;
                assert_eq!(Some(slot), row["slot"][index.to_string()].as_u64(), "{row}");
                if ratio > 0 {
                    assert_eq!(
                        Some(descriptor.remote_offset / descriptor.len),
                        row["offset"].as_u64(),
                        "{row}"
                    );
                }
            }
            if row["mamba"] == true
                && !descriptors(Plan::state(&map, 0, &list(&[1]), &list(&[2])).unwrap()).is_empty()
            {
                states.push(index);
            }
        }
        let expected = row["sources"].as_array().unwrap();
        assert_eq!(pages, numbers(&expected[0]), "{row}");
        assert_eq!(states, expected.get(1).map(numbers).unwrap_or_default(), "{row}");
    }
}

/// Ranks of a latent cache whose pages are dealt to all of them.
fn dealt(size: u32, rank: u32) -> Geometry {
    let layout = Layout::default().with(|layout| {
        layout.dcp_size = size;
        layout.dcp_rank = rank;
    });
    let region = Region::dram(RegionRole::Kv, 0x1000, 2000, 1).layer(0).holds(Holds::Latent);
    let parallel = Parallel::default().with(|parallel| {
        parallel.tp_size = size;
        parallel.tp_rank = rank;
    });
    let args = KvArgs::builder("e", rank).pages(2000, 1).parallel(parallel).layout(layout).region(region);
    args.build().unwrap().geometry().clone()
}

#[test]
fn dcp_pages_are_paired_as_in_vllm() {
    for row in table("dcp") {
        let (local, remote) = (number(&row, "local_dcp"), number(&row, "remote_dcp"));
        let (local_rank, remote_rank) = (number(&row, "local_rank"), number(&row, "remote_rank"));
        let (here, there) = (dealt(local, local_rank), dealt(remote, remote_rank));
        let ours: Vec<_> = (0..local).map(|rank| dealt(local, rank)).collect();
        assert_eq!(consumers(&there, &ours) as u64, row["consumers"].as_u64().unwrap(), "{row}");

        let blocks = number(&row, "global_blocks");
        let of_rank = |size: u32, rank: u32| (0..blocks).filter(move |block| block % size == rank);
        let registered: Vec<u32> = of_rank(remote, remote_rank).collect();
        let cached = number(&row, "cached") as usize;
        let wanted: Vec<u32> = of_rank(local, local_rank).skip(cached).map(|block| 1000 + block).collect();
        let map = RegionMap::directed(&here, &there, Side::Remote).unwrap();
        let descriptors = descriptors(Plan::chunk(&map, &list(&wanted), cached, &list(&registered)).unwrap());
        let pages = |start: fn(&Descriptor) -> u64| -> Vec<u32> {
            descriptors
                .iter()
                .flat_map(|descriptor| start(descriptor)..start(descriptor) + descriptor.len)
                .map(|at| at as u32)
                .collect()
        };
        assert_eq!(pages(|descriptor| descriptor.local_offset), numbers(&row["local"]), "{row}");
        assert_eq!(pages(|descriptor| descriptor.remote_offset), numbers(&row["remote"]), "{row}");
    }
}

#[test]
fn descriptors_are_numbered_as_in_vllm() {
    for row in table("descriptor") {
        // Blocks of another size are counted in smaller ones.
        let ratio = row["ratio"].as_f64().unwrap_or(1.0);
        let blocks = (f64::from(number(&row, "num_blocks")) * ratio) as u64;
        let regions = number(&row, "regions");
        let mut builder = KvArgs::builder("e", 0).pages(blocks as u32, 1);
        for region in 0..regions {
            builder = builder.region(Region::dram(RegionRole::Kv, u64::from(region + 1) << 32, blocks, 1));
        }
        let geometry = builder.build().unwrap().geometry().clone();
        let map = RegionMap::new(&geometry, &geometry).unwrap();
        let ids: Vec<u32> = row["block_ids"].as_array().unwrap().iter().flat_map(numbers).collect();
        let others: Vec<u32> = (0..ids.len() as u32).collect();
        let plan = Plan::pages(&map, PagePlan::new(&list(&ids), &list(&others)).unwrap()).unwrap();
        let numbered = descriptors(plan).into_iter().flat_map(|descriptor| {
            (descriptor.local_offset..descriptor.local_offset + descriptor.len)
                .map(move |block| (u64::from(descriptor.local_region) * blocks + block) as u32)
        });
        assert_eq!(numbered.collect::<Vec<_>>(), numbers(&row["descriptor"]), "{row}");
    }
}

#[test]
fn larger_pages_are_cut_to_the_peers_as_in_vllm() {
    for row in table("remap") {
        let ratio = number(&row, "ratio");
        let geometry = |pages: u32, page_size: u32| {
            let len = u64::from(pages * page_size);
            let region = Region::dram(RegionRole::Kv, 0x1000, len, page_size.into());
            let args = KvArgs::builder("e", 0).pages(pages, page_size);
            args.region(region.layer(0).holds(Holds::Key)).build().unwrap().geometry().clone()
        };
        let map = RegionMap::new(&geometry(10, ratio), &geometry(20, 1)).unwrap();
        let (local, remote) = (numbers(&row["local"][0]), numbers(&row["remote"][0]));
        let descriptors = descriptors(Plan::chunk(&map, &list(&local), 0, &list(&remote)).unwrap());
        let pages = |start: fn(&Descriptor) -> u64| -> Vec<u32> {
            descriptors
                .iter()
                .flat_map(|descriptor| start(descriptor)..start(descriptor) + descriptor.len)
                .map(|at| at as u32)
                .collect()
        };
        assert_eq!(pages(|descriptor| descriptor.local_offset), numbers(&row["out"][0][0]), "{row}");
        assert_eq!(pages(|descriptor| descriptor.remote_offset), numbers(&row["out"][1][0]), "{row}");
    }
}

#[test]
fn request_ids_lose_their_suffix_as_in_vllm() {
    for row in table("reqid") {
        let (id, base) = (row[0].as_str().unwrap(), row[1].as_str().unwrap());
        assert_eq!(Room::request(id).unwrap().base(), Some(base), "{row}");
    }
}
