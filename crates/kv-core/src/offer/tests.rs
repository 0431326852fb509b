use bytes::Bytes;

use super::*;
use crate::id::{EngineId, Incarnation};
use crate::layout::Parallel;
use crate::record::WorkerRole;

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
fn the_matching_offer_is_taken_at_the_highest_common_version() {
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
