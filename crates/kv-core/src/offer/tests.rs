use super::*;
use crate::args::KvArgs;
use crate::id::EngineId;
use crate::layout::Region;

fn transport(name: &str, version: u16) -> TransportOffer {
    TransportOffer { name: name.to_owned(), version, metadata: Bytes::from(format!("{name} {version}")) }
}

fn offer(service: &str, (min, max): (u16, u16), compatibility: &str) -> ServiceOffer {
    let (service, compatibility) = (service.to_owned(), compatibility.to_owned());
    ServiceOffer { service, min, max, compatibility, data: Bytes::new() }
}

fn rank(transports: Vec<TransportOffer>, offers: Vec<ServiceOffer>) -> RankRecord {
    let worker = WorkerId { engine: EngineId::new("p").unwrap(), rank: 3 };
    let who = (worker, Incarnation::from_random(1));
    RankRecord::new(who, WorkerRole::Prefill, Parallel::default(), transports, offers).unwrap()
}

fn wanted() -> Wanted<'static> {
    Wanted { transport: ("nixl", 2), service: "kv", versions: 3..=5, compatibility: "hash" }
}

fn choose(transports: Vec<TransportOffer>, offers: Vec<ServiceOffer>) -> Result<(Bytes, u16), String> {
    let rank = rank(transports, offers);
    let chosen = wanted().choose(&rank).map_err(|error| error.to_string())?;
    Ok((chosen.transport.metadata.clone(), chosen.version))
}

#[test]
fn of_many_offers_the_one_that_fits_is_taken_at_the_highest_common_version() {
    let transports = || vec![transport("local", 2), transport("nixl", 1), transport("nixl", 2)];
    let cases = [((1, 3), 3), ((1, 4), 4), ((4, 9), 5), ((5, 5), 5), ((0, u16::MAX), 5)];
    for (theirs, version) in cases {
        let offers = vec![
            offer("ec", (4, 4), "hash"),
            offer("kv", (4, 4), "another hash"),
            offer("kv", (6, 9), "hash"),
            offer("kv", theirs, "hash"),
        ];
        let offers = if theirs.1 < 9 { offers } else { offers.into_iter().skip(3).collect() };
        assert_eq!(choose(transports(), offers), Ok((Bytes::from("nixl 2"), version)), "{theirs:?}");
    }
}

#[test]
fn a_rank_that_does_not_fit_is_refused_by_field_with_both_values() {
    let mismatch = |transports, offers| {
        let rank = rank(transports, offers);
        match wanted().choose(&rank) {
            Err(OfferError::Differs(Mismatch { field, ours, theirs })) => [field, ours, theirs],
            other => panic!("{other:?}"),
        }
    };
    let (way, good) = (|| vec![transport("nixl", 2)], || offer("kv", (3, 5), "hash"));
    let cases = [
        (vec![], vec![good()], ["transport", "nixl version 2", "nothing"]),
        (
            vec![transport("nixl", 1), transport("local", 2)],
            vec![good()],
            ["transport", "nixl version 2", "nixl version 1, local version 2"],
        ),
        (way(), vec![], ["service", "kv", "nothing"]),
        (way(), vec![offer("ec", (3, 3), "hash")], ["service", "kv", "ec version 3"]),
        (way(), vec![offer("kv", (3, 5), "h")], ["compatibility", "\"hash\"", "\"h\""]),
        (way(), vec![offer("kv", (1, 2), "hash")], ["version", "kv versions 3 to 5", "kv versions 1 to 2"]),
        (way(), vec![offer("kv", (6, 6), "hash")], ["version", "kv versions 3 to 5", "kv version 6"]),
    ];
    for (transports, offers, expected) in cases {
        assert_eq!(mismatch(transports, offers), expected);
    }
}

#[test]
fn two_offers_of_one_rank_that_fit_are_refused_and_both_are_named() {
    let one = || vec![transport("nixl", 2)];
    let offers = vec![offer("kv", (1, 3), "hash"), offer("kv", (6, 6), "hash"), offer("kv", (5, 9), "hash")];
    let refused = "p/3 has two offers that fit: kv versions 1 to 3 and kv versions 5 to 9";
    assert_eq!(choose(one(), offers), Err(refused.to_owned()));
    let refused = "p/3 has two offers that fit: nixl version 2 and nixl version 2";
    let good = offer("kv", (3, 5), "hash");
    assert_eq!(choose([one(), one()].concat(), vec![good]), Err(refused.to_owned()));
}

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
fn a_geometry_comes_back_from_its_offer_however_many_regions_it_has() {
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
    let with = |data: Vec<u8>| ServiceOffer { data: data.into(), ..offer("kv", (3, 3), "") };
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
fn data_that_announce_more_than_they_hold_are_refused_before_anything_is_made_of_them() {
    let mut data = rmp_serde::to_vec_named(&KvData::of(&cache(1, false))).unwrap();
    let regions = data.windows(7).position(|part| part == b"regions").unwrap();
    data.truncate(regions + 7);
    data.extend([0xdd, 0xff, 0xff, 0xff, 0xff]);
    let offer = ServiceOffer { data: data.into(), ..offer("kv", (4, 4), "") };
    assert_eq!(offer.geometry(Parallel::default()), Err(KvDataError::Form));
}
