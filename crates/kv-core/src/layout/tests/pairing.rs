//! Which caches fit: what is refused whichever side asks, and which ranks have to do with each other.

use super::*;

/// Neither side takes the other; the field that the first names.
fn refused(ours: &Geometry, theirs: &Geometry) -> String {
    assert_eq!((ours.validate(), theirs.validate()), (Ok(()), Ok(())));
    let (here, there) = (ours.check(theirs).unwrap_err(), theirs.check(ours).unwrap_err());
    assert_eq!((&here.field, &here.ours, &here.theirs), (&there.field, &there.theirs, &there.ours));
    assert_ne!(here.ours, here.theirs, "{here}");
    here.field
}

fn accepted(ours: &Geometry, theirs: &Geometry) {
    assert_eq!((ours.validate(), theirs.validate()), (Ok(()), Ok(())));
    assert_eq!((ours.check(theirs), theirs.check(ours)), (Ok(()), Ok(())));
}

/// A whole model on one rank: keys of layers 0 and 1, and one slot region of 8 shares.
fn whole() -> Geometry {
    let key = RegionShape { layer: Some(0), layers: 2, holds: Holds::Key, ..shape(RegionRole::Kv, 10, 512) };
    let state = RegionShape { layer: Some(1), holds: Holds::State(0), ..shape(RegionRole::State, 4, 256) };
    let layout = Layout { groups: vec![CacheGroup::slots(8, 8)], total_kv_heads: 2, ..Layout::default() };
    Geometry { parallel: Parallel::default(), regions: vec![key, state], layout, ..geometry() }
}

/// The same, in another order: nothing goes by position.
fn other() -> Geometry {
    Geometry { layout: Layout { axes: HND, ..whole().layout }, ..whole() }
}

fn with(mut geometry: Geometry, change: impl FnOnce(&mut Geometry)) -> Geometry {
    change(&mut geometry);
    geometry
}

#[test]
fn aux_rows_are_compared_whatever_else_differs() {
    let aux = |geometry, len| with(geometry, |g| g.regions.insert(1, shape(RegionRole::Aux, 5, len)));
    accepted(&aux(whole(), 8), &aux(other(), 8));
    assert_eq!(refused(&aux(whole(), 8), &aux(other(), 16)), "regions[1].item_len");
}

#[test]
fn regions_without_declared_content_go_to_no_other_rank() {
    let stage = |geometry| with(geometry, |g| g.parallel.pp_size = 2);
    let untold = |geometry| with(geometry, |g| g.regions[0].holds = Holds::Opaque);
    assert_eq!(refused(&stage(whole()), &stage(untold(other()))), "regions[0].holds");
    assert_eq!(refused(&untold(whole()), &untold(other())), "layout.axes");
}

#[test]
fn parallel_groups_of_which_neither_is_a_multiple_do_not_fit() {
    let ranks = |tp_size: u32| {
        with(whole(), |g| {
            g.parallel.tp_size = tp_size;
            (g.kv_heads, g.layout.total_kv_heads) = (2, 2 * tp_size);
            g.layout.groups = vec![CacheGroup::slots(8, 8 * tp_size)];
        })
    };
    assert_eq!(refused(&ranks(2), &ranks(3)), "tp_size");
    assert_eq!(refused(&ranks(4), &ranks(6)), "tp_size");
}

#[test]
fn pages_are_dealt_to_unequal_groups_only_of_latents_and_of_one_size() {
    // Layers 0 to 1 of 4, so that what else each has does not matter.
    let dealt = |size: u32, second: Holds, page_size: u32| {
        with(whole(), |g| {
            g.parallel = Parallel { tp_size: size, pp_size: 2, ..Parallel::default() };
            (g.page_size, g.kv_heads, g.layout.dcp_size) = (page_size, 1, size);
            (g.layout.total_kv_heads, g.layout.groups) = (1, Vec::new());
            let item_len = u64::from(page_size) * 8;
            let region = |layer| RegionShape { layer: Some(layer), ..shape(RegionRole::Kv, 10, item_len) };
            g.regions = vec![
                RegionShape { holds: Holds::Latent, ..region(0) },
                RegionShape { holds: second, ..region(1) },
            ];
        })
    };
    accepted(&dealt(2, Holds::Latent, 16), &dealt(4, Holds::Index, 16));
    accepted(&dealt(2, Holds::Key, 16), &with(dealt(2, Holds::Key, 16), |g| g.layout.axes = HND));
    assert_eq!(refused(&dealt(2, Holds::Latent, 16), &dealt(3, Holds::Latent, 16)), "dcp_size");
    assert_eq!(refused(&dealt(2, Holds::Latent, 16), &dealt(4, Holds::Key, 16)), "dcp_size");
    assert_eq!(refused(&dealt(1, Holds::Key, 16), &dealt(2, Holds::Latent, 16)), "dcp_size");
    for (here, there) in [(1, 2), (2, 2)] {
        let (here, there) = (dealt(here, Holds::Latent, 16), dealt(there, Holds::Latent, 8));
        assert_eq!(refused(&here, &there), "page_size of dealt pages");
        let text = here.check(&there).unwrap_err().to_string();
        assert!(text.contains("16 here, 8 at the peer") && text.contains("Layout::dcp_size"), "{text}");
    }
}

#[test]
fn caches_whose_units_of_pages_cannot_be_counted_do_not_fit() {
    let pages = |num_pages: u32, page_size: u32, kernel: u32| {
        with(whole(), |g| {
            (g.num_pages, g.page_size, g.layout.kernel_page_size) = (num_pages, page_size, kernel);
            g.regions.truncate(1);
            g.layout.groups.clear();
            g.regions[0].item_len = u64::from(page_size) * 4;
            g.regions[0].len = g.regions[0].item_len * u64::from(num_pages);
        })
    };
    // 2^32 - 1 units, and one page more.
    accepted(&pages(65_537, 65_535, 0), &pages(10, 2, 0));
    assert_eq!(refused(&pages(65_538, 65_535, 0), &pages(10, 2, 0)), "page_size");
    assert_eq!(refused(&pages(65_538, 65_535, 0), &pages(10, 65_535, 1)), "kernel_page_size");
    // Of units that are large enough, there may be as many pages as a list can name.
    accepted(&pages(MAX_PAGES, 1 << 10, 0), &pages(10, 1 << 9, 0));
}

#[test]
fn heads_are_compared_if_any_region_is_cut_by_them() {
    let index = |geometry| {
        with(geometry, |g| {
            g.regions[0] = RegionShape { layers: 1, ..shape(RegionRole::Kv, 10, 256) };
            (g.regions[0].layer, g.regions[0].holds) = (Some(0), Holds::Key);
            let index = RegionShape { layer: Some(0), holds: Holds::Index, ..shape(RegionRole::Kv, 10, 64) };
            g.regions.insert(1, index);
        })
    };
    accepted(&index(whole()), &index(other()));
    // Four heads of the same size, of which the rank has two.
    let more = with(index(whole()), |g| {
        (g.parallel.tp_size, g.layout.total_kv_heads) = (2, 4);
        g.layout.groups[0].heads = 4;
        (g.regions[2].len, g.regions[2].item_len) = (512, 128);
    });
    assert_eq!(refused(&index(whole()), &more), "total_kv_heads");
}

#[test]
fn engines_with_one_pipeline_stage_must_hold_the_same_layers() {
    let fewer = with(other(), |g| {
        (g.regions[0].layers, g.regions[0].item_len, g.regions[0].len) = (1, 256, 2560);
    });
    assert_eq!(refused(&whole(), &fewer), "layers");
    // As many, but others: of the state, and of the KV.
    let elsewhere = with(other(), |g| g.regions[1].layer = Some(0));
    assert_eq!(refused(&whole(), &elsewhere), "layers");
    let mismatch = whole().check(&elsewhere).unwrap_err();
    assert_eq!(mismatch.ours, "1 of group 0, with State(0) of layers 1..2");
    assert_eq!(mismatch.theirs, "1 of group 0, with State(0) of layers 0..1");
    let apart = |geometry, second: u32, order: [usize; 2]| {
        with(geometry, |g: &mut Geometry| {
            let key = RegionShape { layer: Some(0), holds: Holds::Key, ..shape(RegionRole::Kv, 10, 256) };
            let keys = [key.clone(), RegionShape { layer: Some(second), ..key.clone() }];
            let last = RegionShape { layer: Some(5), ..key };
            g.regions = order.map(|at| keys[at].clone()).into_iter().chain([last]).collect();
        })
    };
    let mismatch = apart(whole(), 1, [0, 1]).check(&apart(other(), 2, [1, 0])).unwrap_err();
    assert_eq!(mismatch.ours, "3 of layers 0..6, with Key of layers 1..2");
    assert_eq!(mismatch.theirs, "3 of layers 0..6, with Key of layers 2..3");
    let values = with(other(), |g| g.regions[0].holds = Holds::Value);
    assert_eq!(refused(&whole(), &values), "layers");
}

#[test]
fn state_of_one_side_only_does_not_fit_unless_both_call_it_optional() {
    let lacks = |geometry| with(geometry, |g| g.regions.truncate(1));
    let optional = |geometry| with(geometry, |g| g.layout.groups[0].optional = true);
    assert_eq!(refused(&whole(), &lacks(other())), "layers");
    assert_eq!(refused(&optional(whole()), &lacks(other())), "layers");
    assert_eq!(refused(&whole(), &optional(lacks(other()))), "layers");
    accepted(&optional(whole()), &optional(lacks(other())));
    accepted(&optional(lacks(whole())), &optional(lacks(other())));
    // Optional, and there: then it is the same.
    let elsewhere = with(optional(other()), |g| g.regions[1].layer = Some(0));
    assert_eq!(refused(&optional(whole()), &elsewhere), "layers");
    // No group for it at all.
    let none = with(lacks(other()), |g| g.layout.groups.clear());
    assert_eq!(refused(&whole(), &none), "layout.groups");
    // A second group, which one side does not know.
    let second = |group: CacheGroup| with(other(), |g| g.layout.groups.push(group));
    assert_eq!(refused(&whole(), &second(CacheGroup::slots(1, 1))), "layout.groups");
    assert_eq!(refused(&whole(), &second(CacheGroup::pages(4, 1, 1))), "layout.groups");
    accepted(&whole(), &second(CacheGroup::slots(1, 1).optional()));
}

#[test]
fn slots_that_nobody_described_go_to_a_rank_of_the_same_shape_only() {
    let undescribed = |geometry| {
        with(geometry, |g| {
            g.layout.groups.clear();
            (g.regions[1].holds, g.regions[1].layer) = (Holds::Opaque, None);
        })
    };
    accepted(&undescribed(whole()), &undescribed(whole()));
    assert_eq!(refused(&undescribed(whole()), &undescribed(other())), "layout.axes");
    assert_eq!(refused(&undescribed(whole()), &other()), "layout.groups");
    // Nor do those of a group of which nobody says how it lies.
    let opaque = |geometry| with(geometry, |g| g.regions[1].holds = Holds::Opaque);
    assert_eq!(refused(&opaque(whole()), &opaque(other())), "layout.axes");
    assert_eq!(refused(&opaque(whole()), &other()), "layout.groups[0].holds");
    // It is not the other group's fault.
    let two = |geometry, first, second| {
        with(geometry, |g| {
            g.layout.groups.push(CacheGroup::slots(8, 8));
            g.regions.push(RegionShape { group: 1, ..g.regions[1].clone() });
            (g.regions[1].holds, g.regions[2].holds) = (first, second);
        })
    };
    let told = Holds::State(0);
    let mixed = two(whole(), Holds::Opaque, told);
    assert_eq!(refused(&mixed, &two(other(), told, told)), "layout.groups[0].holds");
    let mixed = two(whole(), told, Holds::Opaque);
    assert_eq!(refused(&mixed, &two(other(), told, told)), "layout.groups[1].holds");
}

#[test]
fn items_of_a_group_whose_units_cannot_be_counted_do_not_fit() {
    let window = |geometry, items: u32, tokens: u32| {
        with(geometry, |g| {
            // The first group is small.
            g.layout.groups.push(CacheGroup::pages(tokens, 1, 1));
            let item_len = u64::from(tokens);
            let region = RegionShape { group: 1, ..shape(RegionRole::State, items.into(), item_len) };
            g.regions.push(RegionShape { layer: Some(0), holds: Holds::Key, ..region.clone() });
            // The one with the most items counts.
            let few = RegionShape { len: 2 * item_len, ..region };
            g.regions.push(RegionShape { layer: Some(1), holds: Holds::Key, ..few });
        })
    };
    accepted(&window(whole(), 65_537, 65_535), &window(other(), 2, 2));
    let field = "layout.groups[1].page_size";
    assert_eq!(refused(&window(whole(), 65_538, 65_535), &window(other(), 2, 2)), field);
    accepted(&window(whole(), 1 << 24, 1 << 10), &window(other(), 2, 1 << 9));
}

#[test]
fn groups_of_another_kind_are_another_shape_however_many_there_are() {
    let many = |page_size: u32| {
        with(geometry(), |g| {
            g.layout.groups = vec![CacheGroup::pages(1, 1, 4); 6];
            g.layout.groups[5].page_size = page_size;
        })
    };
    accepted(&many(1), &many(1));
    assert_eq!(refused(&many(1), &many(2)), "layout.groups[5]");
    let first = with(many(1), |g| g.layout.groups[0].heads = 4);
    let first = with(first, |g| g.layout.groups[0].total_heads = 16);
    assert_eq!(refused(&many(1), &first), "layout.groups");
    // What is optional is no matter of shape.
    accepted(&many(1), &with(many(1), |g| g.layout.groups[4].optional = true));
}

/// A rank of an engine with two pipeline stages: layers 0 and 1, layers 2 and 3; told, or not.
fn stage(pp_rank: u32, holds: Holds) -> Geometry {
    let region = RegionShape { layer: Some(2 * pp_rank), layers: 2, holds, ..shape(RegionRole::Kv, 10, 64) };
    let parallel = Parallel { pp_size: 2, pp_rank, ..Parallel::default() };
    let layout = Layout { stages: vec![(0, 2), (2, 4)], ..Layout::default() };
    Geometry { parallel, regions: vec![region], layout, ..geometry() }
}

#[test]
fn a_pipeline_stage_exchanges_only_with_stages_that_share_its_layers() {
    for holds in [Holds::Latent, Holds::Opaque] {
        let engine = [stage(0, holds), stage(1, holds)];
        for (index, dest) in engine.iter().enumerate() {
            assert_eq!(dest.validate(), Ok(()));
            let only = Source { index, bytes: true, aux: true };
            assert_eq!(sources(dest, &engine).unwrap(), [only]);
            for (number, source) in engine.iter().enumerate() {
                assert_eq!(receivers_of(source, dest), 1);
                assert_eq!(consumers(source, std::slice::from_ref(dest)), usize::from(number == index));
            }
        }
    }
    // All layers in one stage, which did not say that they are all.
    let mut all = stage(0, Holds::Latent);
    (all.parallel.pp_size, all.layout.stages) = (1, Vec::new());
    all.regions[0] = RegionShape { len: 1280, item_len: 128, layers: 4, ..all.regions[0].clone() };
    for source in [stage(0, Holds::Latent), stage(1, Holds::Latent)] {
        assert_eq!(receivers_of(&source, &all), 1);
        assert_eq!(receivers_of(&all, &source), 2);
    }
    let found = sources(&all, &[stage(1, Holds::Latent), stage(0, Holds::Latent)]).unwrap();
    assert_eq!(
        found.iter().map(|source| (source.index, source.aux)).collect::<Vec<_>>(),
        [(0, true), (1, false)]
    );
}

#[test]
fn ranks_that_share_the_pages_of_a_request_share_heads_too() {
    let rank = |tp_rank| {
        with(whole(), |g| {
            g.parallel = Parallel { tp_size: 6, tp_rank, ..Parallel::default() };
            (g.layout.dcp_size, g.layout.dcp_rank, g.layout.total_kv_heads) = (2, tp_rank % 2, 6);
            g.layout.groups = vec![CacheGroup::slots(8, 24)];
        })
    };
    for tp_rank in 0..6 {
        let rank = rank(tp_rank);
        assert_eq!(rank.validate(), Ok(()));
        let first = tp_rank / 2;
        assert_eq!(rank.heads_of(&rank.regions[0]), (2 * first, 2 * first + 2), "rank {tp_rank}");
        assert_eq!(rank.heads_of(&rank.regions[1]), (8 * first, 8 * first + 8), "rank {tp_rank}");
    }
}

#[test]
fn an_error_distinguishes_missing_layers_from_existing_layers() {
    let dest = with(stage(0, Holds::Latent), |g| {
        (g.parallel.pp_size, g.layout.stages) = (1, Vec::new());
        g.regions[0] = RegionShape { len: 1920, item_len: 192, layers: 6, ..g.regions[0].clone() };
    });
    for engine in [[0, 1], [1, 0]] {
        let engine = engine.map(|pp_rank| with(stage(pp_rank, Holds::Latent), |g| g.parallel.pp_size = 3));
        let error = sources(&dest, &engine).unwrap_err();
        assert_eq!((&*error.field, &*error.ours, &*error.theirs), ("layers", "0..6", "0..4"));
    }
}
