use super::*;
use crate::args::KvArgs;
use crate::id::EngineId;
use crate::layout::{Holds, Region};

fn cache(layers: u32, spread: bool) -> Geometry {
    let mut args = KvArgs::builder("p", 0).pages(4, 16).heads(2, 4);
    for layer in 0..layers {
        for (at, holds) in [Holds::Key, Holds::Value].into_iter().enumerate() {
            let addr = 0x10000 * u64::from(2 * layer + at as u32 + 1);
            let item = 512 * if spread { u64::from(1 + layer % 7) } else { 1 };
            let region = Region::dram(RegionRole::Kv, addr, 4 * item, item);
            args = args.region(if spread { region } else { region.layer(layer).holds(holds) });
        }
    }
    args.build().unwrap().geometry().clone()
}

#[test]
fn a_geometry_with_many_regions_is_equal_after_encoding_and_decoding() {
    for geometry in [cache(1, false), cache(3, true), cache(900, false), cache(900, true)] {
        let offer = ServiceOffer::kv(&geometry).unwrap();
        assert!(offer.data.len() <= crate::record::MAX_OFFER_BYTES, "{} bytes", offer.data.len());
        assert_eq!(offer.geometry(geometry.parallel), Ok(geometry));
    }
}

#[test]
fn a_cache_with_too_many_regions_for_a_record_is_refused_by_field() {
    let mut geometry = cache(1, false);
    geometry.regions = vec![geometry.regions[0].clone(); MAX_REGIONS];
    let worker = WorkerId { engine: EngineId::new("p").unwrap(), rank: 0 };
    let (who, way) = ((worker, Incarnation::from_random(1)), ("nixl", Bytes::new()));
    let refused = RankRecord::serving_kv(who, WorkerRole::Prefill, way, &geometry).unwrap_err();
    let max = crate::record::MAX_OFFER_BYTES as u64;
    assert!(
        matches!(refused, RecordError::Range { field: "offers.data (bytes)", got, max: most, .. } if got > max && most == max),
        "{refused}"
    );
}

#[test]
fn a_geometry_has_the_parallel_groups_of_its_record() {
    let geometry = cache(1, false);
    let worker = WorkerId { engine: EngineId::new("p").unwrap(), rank: 0 };
    let who = (worker, Incarnation::from_random(1));
    let way = ("nixl", Bytes::from_static(b"metadata"));
    let mut record = RankRecord::serving_kv(who, WorkerRole::Prefill, way, &geometry).unwrap();
    record.parallel.dp_size = 4;
    let chosen = Wanted::kv("nixl").choose(&record).unwrap();
    assert_eq!(chosen.transport.metadata, "metadata");
    assert_eq!(chosen.version, u16::from(VERSIONS.max));
    let got = chosen.offer.geometry(record.parallel).unwrap();
    assert_eq!((got.parallel, got.regions), (record.parallel, geometry.regions));
}

#[test]
fn fields_of_a_later_version_are_skipped_and_malformed_data_are_typed_errors() {
    #[derive(Serialize)]
    struct Later {
        #[serde(flatten)]
        data: KvData,
        compressed: (u8, String),
    }
    let geometry = cache(2, false);
    let with = |data: Vec<u8>| ServiceOffer { data: data.into(), ..ServiceOffer::kv(&geometry).unwrap() };
    let encoded = |change: fn(&mut KvData)| {
        let mut data = KvData::of(&geometry);
        change(&mut data);
        with(rmp_serde::to_vec_named(&data).unwrap()).geometry(Parallel::default())
    };
    let later = Later { data: KvData::of(&geometry), compressed: (1, "zstd".to_owned()) };
    let later = with(rmp_serde::to_vec_named(&later).unwrap());
    assert_eq!(later.geometry(Parallel::default()), Ok(geometry.clone()));

    let many = encoded(|data| data.regions = vec![data.regions[0]; MAX_REGIONS + 1]);
    assert_eq!(many, Err(KvDataError::Regions { got: MAX_REGIONS + 1, max: MAX_REGIONS }));
    assert!(matches!(encoded(|data| data.page_size = 0), Err(KvDataError::Geometry(_))));
    for garbage in [&b""[..], b"\xc1", &[0x91; 4096], b"\xdf\xff\xff\xff\xff"] {
        assert_eq!(with(garbage.to_vec()).geometry(Parallel::default()), Err(KvDataError::Form));
    }
}

/// A short text that announces a long list: what is not there is not allocated.
#[test]
fn offers_that_announce_more_than_they_hold_are_refused_before_allocation() {
    let mut data = rmp_serde::to_vec_named(&KvData::of(&cache(1, false))).unwrap();
    let regions = data.windows(7).position(|part| part == b"regions").unwrap();
    data.truncate(regions + 7);
    data.extend([0xdd, 0xff, 0xff, 0xff, 0xff]);
    let offer = ServiceOffer { data: data.into(), ..ServiceOffer::kv(&cache(1, false)).unwrap() };
    assert_eq!(offer.geometry(Parallel::default()), Err(KvDataError::Form));
}
