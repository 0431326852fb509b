//! Regions that differ from the rest of their cache: what is accepted, which of them fit each other, and
//! what a worker of an older version reads.

use serde::{Deserialize, Serialize};

use super::*;
use crate::layout::{Axes, Axis, HDN, MAX_SPLIT_RANGES};

/// The cache of [`told`], with heads of four elements of two bytes.
fn cache() -> Geometry {
    Geometry { head_dim: 4, ..told() }
}

fn with(change: impl FnOnce(&mut Geometry)) -> Geometry {
    let mut geometry = cache();
    change(&mut geometry);
    geometry
}

/// The latent of layer 0 in regions of these elements, two bytes each, of 576.
fn latent(ranges: &[Option<(u32, u32)>]) -> Geometry {
    with(|g| {
        (g.head_dim, g.kv_heads, g.layout.total_kv_heads) = (576, 1, 0);
        g.layout.groups.clear();
        let region = |elements: &Option<(u32, u32)>| {
            let (start, end) = elements.unwrap_or((0, 576));
            let latent = shape(RegionRole::Kv, 10, 16 * 2 * u64::from(end - start));
            let form = Form { elements: *elements, ..Form::default() };
            RegionShape { layer: Some(0), holds: Holds::Latent, form, ..latent }
        };
        g.regions = ranges.iter().map(region).collect();
    })
}

#[test]
fn an_impossible_form_is_refused_with_region_field_and_values() {
    let range = |field, got, min, max| GeometryError::RegionRange { region: 1, field, got, min, max };
    let multiple =
        |field, got, of_field, of| GeometryError::RegionMultiple { region: 1, field, got, of_field, of };
    let cases: Vec<Impossible> = vec![
        (
            |g| g.regions[1].form.axes = Some(Axes::with_dim([Axis::Dim; 5])),
            GeometryError::Axes { region: Some(1) },
        ),
        (|g| g.regions[1].form.heads = Some((0, 4)), range("heads", 0, 1, 1 << 16)),
        (|g| g.regions[1].form.heads = Some((1, 0)), range("total_heads", 0, 1, 1 << 24)),
        (|g| g.regions[1].form.heads = Some((2, 8)), GeometryError::Heads { heads: 2, total: 8, ranks: 2 }),
        (|g| g.regions[1].form.head_dim = Some(0), range("head_dim", 0, 1, 1 << 20)),
        (|g| g.regions[1].form.elements = Some((2, 5)), range("elements.end", 5, 1, 4)),
        (|g| g.regions[1].form.elements = Some((3, 3)), range("elements.start", 3, 0, 2)),
        (
            |g| g.regions[1].form.elements = Some((1, 4)),
            multiple("head_bytes", 8, "the elements of a head", 3),
        ),
        (|g| g.regions[1].form.axes = Some(HDN.packed(3)), multiple("elements", 4, "axes.pack", 3)),
        (|g| g.regions[1].form.axes = Some(HDN.packed(0)), multiple("elements", 4, "axes.pack", 0)),
        (
            |g| g.layout.axes = HDN.packed(8),
            GeometryError::RegionMultiple {
                region: 0,
                field: "elements",
                got: 4,
                of_field: "axes.pack",
                of: 8,
            },
        ),
        (
            |g| {
                g.regions[1].holds = Holds::Opaque;
                g.regions[1].form.head_dim = Some(4);
            },
            GeometryError::Form { region: 1 },
        ),
    ];
    for (change, error) in cases {
        assert_eq!(with(change).validate(), Err(error));
    }
    assert_eq!(cache().validate(), Ok(()));
}

#[test]
fn a_latent_in_two_tensors_fits_one_tensor_and_no_element_is_held_twice() {
    let two = latent(&[Some((0, 512)), Some((512, 576))]);
    let (one, turned) = (latent(&[None]), latent(&[Some((512, 576)), Some((0, 512))]));
    for (here, there) in [(&two, &two), (&two, &one), (&one, &two), (&two, &turned), (&turned, &one)] {
        assert_eq!((here.validate(), here.check(there)), (Ok(()), Ok(())));
    }
    let twice = GeometryError::HeldTwice { first: 0, second: 1, layer: 0 };
    assert_eq!(latent(&[Some((0, 512)), Some((500, 576))]).validate(), Err(twice.clone()));
    assert_eq!(latent(&[None, Some((512, 576))]).validate(), Err(twice));
    // The peer lacks the last elements.
    let part = latent(&[Some((0, 512))]);
    let single = |mut geometry: Geometry| {
        geometry.parallel.tp_size = 1;
        geometry
    };
    let refused = single(two).check(&single(part)).unwrap_err();
    assert_eq!((&*refused.field, &*refused.ours), ("layers", "2 of layers 0..1"));
    let wider = with(|g| *g = Geometry { head_dim: 512, ..latent(&[None]) });
    assert_eq!(one.check(&wider).unwrap_err().field, "head_dim");
    let mut ranges: Vec<_> = (0..9).map(|at| Some((at, at + 1))).collect();
    let many = GeometryError::Range { field: "ranges of elements", got: 9, min: 1, max: 8 };
    assert_eq!(latent(&ranges).validate(), Err(many));
    ranges.truncate(8);
    assert_eq!(latent(&ranges).validate(), Ok(()));
}

#[test]
fn layers_that_differ_in_heads_or_head_size_are_compared_layer_by_layer() {
    // Layer 1 has twice as many elements a head, and half as many heads.
    let mixed = |g: &mut Geometry| {
        for region in &mut g.regions[2..4] {
            (region.form.heads, region.form.head_dim) = (Some((1, 2)), Some(8));
        }
    };
    let ours = with(mixed);
    assert_eq!((ours.validate(), ours.check(&with(mixed))), (Ok(()), Ok(())));
    let head_major = with(|g| {
        mixed(g);
        g.layout.axes = HND;
    });
    assert_eq!(ours.check(&head_major), Ok(()));
    let refused = |change: fn(&mut Geometry)| {
        let mut theirs = head_major.clone();
        change(&mut theirs);
        assert_eq!(theirs.validate(), Ok(()));
        let mismatch = ours.check(&theirs).unwrap_err();
        (mismatch.field, mismatch.ours, mismatch.theirs)
    };
    let texts =
        |field: &str, ours: &str, theirs: &str| (field.to_owned(), ours.to_owned(), theirs.to_owned());
    assert_eq!(refused(|g| g.regions[3].form.head_dim = None), texts("regions[3].head_dim", "8", "4"));
    assert_eq!(
        refused(|g| g.regions[2].form.heads = Some((1, 1))),
        texts("regions[2].total_heads", "2", "1")
    );
    assert_eq!(refused(|g| g.regions[2].form.heads = None), texts("regions[2].head_bytes", "16", "8"));
    // Without another difference than the form, the form is the difference.
    let opaque = |geometry: &Geometry| {
        let mut geometry = geometry.clone();
        geometry.regions[0].holds = Holds::Opaque;
        geometry
    };
    let plain = with(|_| ());
    assert_eq!(opaque(&ours).check(&opaque(&plain)).unwrap_err().field, "regions[2].heads");
}

/// One layer of values, whose elements lie innermost or not.
fn values(heads: u32, head_dim: u32, axes: Axes) -> Geometry {
    with(|g| {
        g.parallel = Parallel::default();
        (g.kv_heads, g.head_dim, g.layout.axes) = (heads, head_dim, axes);
        (g.layout.total_kv_heads, g.layout.groups) = (0, Vec::new());
        let item = 16 * 2 * u64::from(heads * head_dim);
        g.regions =
            vec![RegionShape { layer: Some(0), holds: Holds::Value, ..shape(RegionRole::Kv, 10, item) }];
    })
}

#[test]
fn packs_that_do_not_divide_each_other_are_refused_with_both_axes() {
    let (ours, theirs) = (values(2, 12, HDN.packed(3)), values(2, 12, HDN.packed(2)));
    let mismatch = ours.check(&theirs).unwrap_err();
    assert_eq!(mismatch.field, "regions[0].axes");
    assert!(mismatch.ours.starts_with("Layer, Part, Head, Dim, Token, packed 3 ("), "{mismatch}");
    assert!(mismatch.theirs.starts_with("Layer, Part, Head, Dim, Token, packed 2 ("), "{mismatch}");
    assert!(mismatch.to_string().contains("a multiple of the other"), "{mismatch}");
    assert_eq!(ours.check(&values(2, 12, HDN.packed(6))), Ok(()));
    assert_eq!(ours.check(&values(2, 12, NHD)), Ok(()));
}

#[test]
fn elements_that_would_need_too_many_descriptors_are_refused_on_both_sides() {
    let pair = |heads, head_dim| (values(heads, head_dim, HDN), values(heads, head_dim, NHD));
    let (ours, theirs) = pair(128, 128);
    assert_eq!(MAX_SPLIT_RANGES, 128 * 128);
    assert_eq!((ours.check(&theirs), theirs.check(&ours)), (Ok(()), Ok(())));
    let (ours, theirs) = pair(128, 129);
    let (here, there) = (ours.check(&theirs).unwrap_err(), theirs.check(&ours).unwrap_err());
    assert_eq!((&here.field, &here.ours, &here.theirs), (&there.field, &there.theirs, &there.ours));
    assert!(
        here.theirs.starts_with("Layer, Part, Token, Head (1 layers of Value, 16 tokens, 128 heads"),
        "{here}"
    );
    assert!(here.ours.ends_with("more than 16384 ranges a token)"), "{here}");
    // Between equal axes whole pages move, however many elements there are.
    assert_eq!(ours.check(&ours), Ok(()));
    let mut larger = ours.clone();
    (larger.page_size, larger.num_pages) = (32, 5);
    larger.regions[0].item_len *= 2;
    // 16 tokens of an element lie together on both sides.
    assert_eq!((larger.validate(), ours.check(&larger)), (Ok(()), Ok(())));
}

/// What a worker before forms reads of a region, a layout and a geometry.
#[derive(Serialize, Deserialize)]
struct OldRegion {
    role: RegionRole,
    len: u64,
    item_len: u64,
    memory: MemoryKind,
    layer: Option<u32>,
    layers: u32,
    holds: Holds,
    group: u16,
}

#[derive(Serialize, Deserialize)]
enum OldAxis {
    Layer,
    Part,
    Token,
    Head,
}

#[derive(Serialize, Deserialize)]
struct OldLayout {
    axes: [OldAxis; 4],
    total_kv_heads: u32,
    kernel_page_size: u32,
    dcp_size: u32,
    dcp_rank: u32,
    stages: Vec<(u32, u32)>,
    groups: Vec<CacheGroup>,
}

#[derive(Serialize, Deserialize)]
struct OldGeometry {
    num_pages: u32,
    page_size: u32,
    dtype: String,
    kv_heads: u32,
    head_dim: u32,
    model: String,
    parallel: Parallel,
    regions: Vec<OldRegion>,
    layout: OldLayout,
}

#[test]
fn older_versions_read_plain_regions_as_before_and_refuse_any_form() {
    let plain = rmp_serde::to_vec_named(&cache()).unwrap();
    let old: OldGeometry = rmp_serde::from_slice(&plain).unwrap();
    assert_eq!(rmp_serde::to_vec_named(&old).unwrap(), plain);
    let forms: &[fn(&mut Geometry)] = &[
        |g| g.layout.axes = HDN,
        |g| g.layout.axes = HDN.packed(4),
        |g| g.regions[2].form.axes = Some(NHD),
        |g| g.regions[2].form.axes = Some(HDN.packed(2)),
        |g| g.regions[0].form.heads = Some((2, 4)),
        |g| g.regions[3].form.head_dim = Some(4),
        |g| g.regions[3].form.elements = Some((0, 4)),
    ];
    for change in forms {
        let geometry = with(change);
        assert_eq!(geometry.validate(), Ok(()));
        let bytes = rmp_serde::to_vec_named(&geometry).unwrap();
        assert!(rmp_serde::from_slice::<OldGeometry>(&bytes).is_err());
        assert_eq!(rmp_serde::from_slice::<Geometry>(&bytes).unwrap(), geometry);
        // The record of a rank, too.
        let offer = crate::record::ServiceOffer::kv(&geometry).unwrap();
        assert_eq!(offer.geometry(geometry.parallel).unwrap(), geometry);
    }
}
