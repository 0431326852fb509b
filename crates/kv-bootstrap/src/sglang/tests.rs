use std::collections::BTreeSet;
use std::time::Duration;

use kv_core::{Incarnation, Time, WorkerId};
use serde_json::{Value, json};

use super::engine::{Rank, STALLED};
use super::error::RouteError;
use super::rank::{MAX_HOST, MAX_SPEC_LAYOUT, MAX_WORD};
use super::*;
use crate::client_addr::ClientAddr;
use crate::place::Place;

fn claim(tp: (u32, u32), port: u16) -> Value {
    json!({
        "attn_tp_size": tp.0, "attn_tp_rank": tp.1, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": port,
        "page_size": 16, "kv_cache_dtype": "bfloat16", "load_balance_method": "follow_bootstrap_room",
    })
}

fn put(table: &mut RouteTable, now: Time, claim: Value) -> Result<(), RouteError> {
    put_from("10.0.0.1", table, now, claim)
}

fn put_from(client: &str, table: &mut RouteTable, now: Time, claim: Value) -> Result<(), RouteError> {
    let client = ClientAddr::from(client.parse::<std::net::IpAddr>().unwrap());
    let result = table.register(now, client, serde_json::from_value(claim).unwrap());
    table.check();
    result
}

impl RouteTable {
    /// Asserts that the counters of a table agree with its entries.
    fn check(&self) {
        let engines = || self.engine.iter().chain(&self.rival);
        for engine in engines() {
            let ranks: usize = engine.ranks.values().map(Rank::bytes).sum();
            assert_eq!(engine.bytes, engine.info.bytes() + ranks);
            assert_eq!(engine.clients.values().sum::<usize>(), engine.ranks.len());
            assert_eq!(engine.ages.len(), engine.ranks.values().filter(|rank| !rank.left).count());
            assert!(!engine.ranks.is_empty());
        }
        assert_eq!(self.bytes, engines().map(|engine| engine.bytes).sum::<usize>());
        let leased = engines().flat_map(|engine| engine.ranks.values()).filter(|rank| rank.expires.is_some());
        assert_eq!(self.expiry.len(), leased.count());
        let watched = engines().flat_map(|engine| engine.ranks.values()).filter(|rank| rank.watched);
        let watched: BTreeSet<u64> = watched.map(|rank| rank.seq).collect();
        assert_eq!(self.watched.keys().copied().collect::<BTreeSet<_>>(), watched);
        assert!(self.unwell.is_subset(&watched));
        let owned = engines().flat_map(|engine| engine.ranks.values()).filter(|rank| rank.owner.is_some());
        assert_eq!(self.owned.len(), owned.count());
    }
}

fn table() -> RouteTable {
    let max_lease = Duration::from_secs(3600);
    RouteTable::new(RouteLimits {
        max_ranks: 64,
        max_per_client: 64,
        max_bytes: 1 << 20,
        max_lease,
        watch: true,
    })
}

/// The ports that are answered, or how many ranks are registered.
fn ports(table: &mut RouteTable, ranks: u32) -> Result<Vec<u16>, RouteMiss> {
    (0..ranks).map(|tp| table.rank(Time::ZERO, place(tp)).map(|rank| rank.rank_port)).collect()
}

fn place(tp: u32) -> Option<Place> {
    Some(Place { tp, ..Place::FIRST })
}

#[test]
fn a_repeated_registration_never_makes_the_engine_ready() {
    let mut table = table();
    for _ in 0..5 {
        put(&mut table, Time::ZERO, claim((2, 0), 1000)).unwrap();
        assert_eq!(table.info(Time::ZERO), Err(RouteMiss::NotReady { registered: 1 }));
    }
    put(&mut table, Time::ZERO, claim((2, 1), 1001)).unwrap();
    assert!(table.info(Time::ZERO).is_ok());
    assert_eq!(table.rank(Time::ZERO, place(1)).unwrap().rank_port, 1001);
    assert_eq!(table.places(), 2);
    assert_eq!(table.rank(Time::ZERO, place(2)), Err(RouteMiss::Unknown));
}

#[test]
fn sglang_entries_without_a_lease_never_expire() {
    let mut table = table();
    let mut leased = claim((2, 1), 1001);
    leased["lease_ttl_s"] = json!(2.5);
    put(&mut table, Time::ZERO, claim((2, 0), 1000)).unwrap();
    put(&mut table, Time::ZERO, leased).unwrap();
    assert!(table.info(Time::from_nanos(2_499_999_999)).is_ok());
    let end = Time::from_nanos(2_500_000_000);
    assert_eq!(table.next_timeout(), Some(end));
    assert_eq!(table.info(end), Err(RouteMiss::NotReady { registered: 1 }));
    for bad in [json!(0), json!(-1), json!(1e300)] {
        let mut claim = claim((2, 1), 1001);
        claim["lease_ttl_s"] = bad;
        assert_eq!(put(&mut table, end, claim), Err(RouteError::Lease));
    }
}

#[test]
fn other_parallel_sizes_are_refused_until_a_known_rank_restarts_with_them() {
    let mut table = table();
    put(&mut table, Time::ZERO, claim((2, 0), 1)).unwrap();
    put(&mut table, Time::ZERO, claim((2, 1), 2)).unwrap();
    let refused = RouteError::Topology { field: "attn_tp_size", registered: 2, claimed: 4 };
    assert_eq!(put(&mut table, Time::ZERO, claim((4, 3), 3)), Err(refused));
    for rank in 0..4 {
        assert_eq!(ports(&mut table, 2), Ok(vec![1, 2]), "the former engine serves until it is replaced");
        put(&mut table, Time::ZERO, claim((4, rank), 40 + rank as u16)).unwrap();
    }
    assert_eq!(ports(&mut table, 4), Ok(vec![40, 41, 42, 43]));
    assert_eq!(table.places(), 4, "nothing is left of the former engine");
}

#[test]
fn a_restarted_engine_with_another_policy_takes_over_once_complete() {
    let mut table = table();
    put(&mut table, Time::ZERO, claim((2, 0), 1)).unwrap();
    put(&mut table, Time::ZERO, claim((2, 1), 2)).unwrap();
    let other = |rank, port| {
        let mut claim = claim((2, rank), port);
        claim["decode_allocation_policy"] = json!("prefill_complete");
        claim
    };
    assert_eq!(put(&mut table, Time::ZERO, other(0, 1)), Err(RouteError::AllocationPolicy), "the same life");
    put(&mut table, Time::ZERO, other(0, 11)).unwrap();
    assert_eq!(ports(&mut table, 2), Ok(vec![1, 2]));
    put(&mut table, Time::ZERO, other(1, 12)).unwrap();
    assert_eq!(ports(&mut table, 2), Ok(vec![11, 12]));
}

#[test]
fn old_ports_leave_whatever_the_order_of_restarts_and_none_are_lost() {
    // Two ranks, killed after any number of registrations, restarted in either order.
    for (first, before, second) in [[0, 1], [1, 0]]
        .into_iter()
        .flat_map(|first| (0..=2).flat_map(move |n| [[0, 1], [1, 0]].map(|second| (first, n, second))))
    {
        let mut table = table();
        for rank in first.into_iter().take(before) {
            put(&mut table, Time::ZERO, claim((2, rank), 10 + rank as u16)).unwrap();
        }
        for rank in second {
            put(&mut table, Time::ZERO, claim((2, rank), 20 + rank as u16)).unwrap();
        }
        assert_eq!(ports(&mut table, 2), Ok(vec![20, 21]), "{first:?} {before} {second:?}");
    }
}

#[test]
fn ports_known_to_be_old_are_answered_only_as_a_whole_set() {
    let mut table = table();
    for rank in 0..3 {
        put(&mut table, Time::ZERO, claim((3, rank), 10 + rank as u16)).unwrap();
    }
    // The rank that had registered last restarts first: the others had registered before it, and leave.
    put(&mut table, Time::ZERO, claim((3, 2), 22)).unwrap();
    assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]), "all of the former life");
    put(&mut table, Time::ZERO, claim((3, 0), 20)).unwrap();
    assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]));
    put(&mut table, Time::ZERO, claim((3, 1), 21)).unwrap();
    assert_eq!(ports(&mut table, 3), Ok(vec![20, 21, 22]));
}

#[test]
fn a_registration_by_another_client_removes_no_rank() {
    let mut table = table();
    put(&mut table, Time::ZERO, claim((3, 0), 10)).unwrap();
    put(&mut table, Time::ZERO, claim((3, 1), 11)).unwrap();
    put_from("10.9.9.9", &mut table, Time::ZERO, claim((3, 1), 666)).unwrap();
    put(&mut table, Time::ZERO, claim((3, 1), 11)).unwrap();
    put(&mut table, Time::ZERO, claim((3, 2), 12)).unwrap();
    assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]));
    // An engine of another client does not replace one of this client that is not complete yet.
    put(&mut table, Time::ZERO, claim((4, 0), 40)).unwrap();
    let refused = put_from("10.9.9.9", &mut table, Time::ZERO, claim((5, 0), 50));
    assert_eq!(refused, Err(RouteError::Topology { field: "attn_tp_size", registered: 3, claimed: 5 }));
    let later = Time::ZERO + STALLED;
    put_from("10.9.9.9", &mut table, later, claim((5, 0), 50)).unwrap();
    assert_eq!(ports(&mut table, 3), Ok(vec![10, 11, 12]));
}

#[test]
fn texts_places_and_bytes_are_bounded_with_both_values_named() {
    let mut small = table();
    let fields = [
        ("rank_ip", MAX_HOST),
        ("kv_cache_dtype", MAX_WORD),
        ("kv_layout", MAX_WORD),
        ("load_balance_method", MAX_WORD),
        ("decode_allocation_policy", MAX_WORD),
        ("dsv41_spec_layout", MAX_SPEC_LAYOUT - 2),
    ];
    for (field, max) in fields {
        let mut claim = claim((1, 0), 1);
        claim[field] = json!("x".repeat(max + 1));
        let json = if field == "dsv41_spec_layout" { 2 } else { 0 };
        let refused =
            RouteError::Rank(SglangRankError::Length { field, got: max + 1 + json, max: max + json });
        assert_eq!(put(&mut small, Time::ZERO, claim.clone()), Err(refused));
        claim[field] = json!("x".repeat(max));
        assert_eq!(put(&mut table(), Time::ZERO, claim), Ok(()), "{field}");
    }
    assert_eq!((small.places(), small.bytes()), (0, 0));

    small.limits.max_per_client = 2;
    for rank in [0, 1, 1, 0] {
        put(&mut small, Time::ZERO, claim((4, rank), 1)).unwrap();
    }
    let full = RouteError::ClientFull { would_be: 3, max: 2 };
    assert_eq!(put(&mut small, Time::ZERO, claim((4, 2), 1)), Err(full));
    put_from("10.0.0.2", &mut small, Time::ZERO, claim((4, 2), 1)).unwrap();
    small.limits.max_bytes = small.bytes();
    let refused = put_from("10.0.0.2", &mut small, Time::ZERO, claim((4, 3), 1));
    assert!(matches!(refused, Err(RouteError::Full { would_be, max }) if would_be > max), "{refused:?}");
    assert_eq!(small.places(), 3);
}

#[test]
fn numbers_out_of_range_are_refused_by_field() {
    let mut table = table();
    for (field, value) in [
        ("attn_tp_rank", json!(2)),
        ("attn_tp_size", json!(0)),
        ("pp_rank", json!(-1)),
        ("rank_port", json!(70000)),
        ("attn_cp_size", json!(u64::MAX)),
        ("attn_tp_size", json!(65)),
    ] {
        let mut claim = claim((2, 0), 1);
        claim[field] = value;
        assert!(
            matches!(
                put(&mut table, Time::ZERO, claim),
                Err(RouteError::Rank(SglangRankError::Range { .. }))
            ),
            "{field}"
        );
    }
    assert_eq!(table.info(Time::ZERO), Err(RouteMiss::NotReady { registered: 0 }));
}

/// The numbers of the ports that the table wants watched now, in the order of their registration.
fn watched(table: &mut RouteTable) -> Vec<u64> {
    table.take_orders();
    table.watched.keys().copied().collect()
}

#[test]
fn a_dead_rank_leaves_and_nothing_is_answered_until_all_are_back() {
    let mut table = table();
    for rank in 0..2 {
        put(&mut table, Time::ZERO, claim((2, rank), 10 + rank as u16)).unwrap();
    }
    let ports_watched = watched(&mut table);
    table.judge(ports_watched[1], Verdict::Refused);
    let text = "dp_rank 0 pp_rank 0 pcp_rank 0 tp_rank 1 at 10.0.0.1:11";
    assert_eq!(
        table.health(Time::ZERO),
        Err(format!("{text} does not live: its port has refused a connection"))
    );
    table.judge(ports_watched[1], Verdict::Dead);
    table.check();
    assert_eq!(table.take_orders(), [WatchOrder::End { seq: ports_watched[1] }]);
    assert_eq!(table.health(Time::ZERO), Err(format!("{text} is dead: its port refuses connections")));
    assert_eq!(ports(&mut table, 2), Err(RouteMiss::NotReady { registered: 1 }));
    table.judge(ports_watched[1], Verdict::Lives);
    assert!(table.health(Time::ZERO).is_err(), "a verdict on a port that has left changes nothing");
    // Rank 1 is back, and rank 0 of the former life is dead, too.
    put(&mut table, Time::ZERO, claim((2, 1), 21)).unwrap();
    table.judge(ports_watched[0], Verdict::Dead);
    assert!(table.health(Time::ZERO).is_err());
    put(&mut table, Time::ZERO, claim((2, 0), 20)).unwrap();
    table.check();
    assert_eq!((table.health(Time::ZERO), ports(&mut table, 2)), (Ok(()), Ok(vec![20, 21])));
}

#[test]
fn a_silent_rank_keeps_its_entry_and_serves_again_when_it_greets() {
    let mut table = table();
    put(&mut table, Time::ZERO, claim((1, 0), 10)).unwrap();
    let port = watched(&mut table)[0];
    for unsure in [Verdict::Silent, Verdict::Unknown] {
        table.judge(port, unsure);
        let text = "dp_rank 0 pp_rank 0 pcp_rank 0 tp_rank 0 at 10.0.0.1:10 does not answer";
        assert_eq!(ports(&mut table, 1), Err(RouteMiss::Unwell(text.to_owned())));
    }
    table.judge(port, Verdict::Lives);
    table.check();
    assert_eq!((table.health(Time::ZERO), ports(&mut table, 1)), (Ok(()), Ok(vec![10])));
}

#[test]
fn a_second_engine_is_refused_while_the_first_is_known_to_live() {
    let mut table = table();
    put(&mut table, Time::ZERO, claim((1, 0), 10)).unwrap();
    let port = watched(&mut table)[0];
    table.judge(port, Verdict::Lives);
    let place = place(0).unwrap();
    let occupied = || Err(RouteError::Occupied { place, addr: "10.0.0.1:10".to_owned() });
    let mut other_policy = claim((1, 0), 30);
    other_policy["decode_allocation_policy"] = json!("prefill_complete");
    for second in [claim((1, 0), 20), other_policy.clone(), claim((2, 0), 40)] {
        assert_eq!(put_from("10.0.0.2", &mut table, Time::ZERO, second), occupied());
    }
    assert_eq!(put(&mut table, Time::ZERO, claim((1, 0), 10)), Ok(()), "the same registration");
    assert_eq!((ports(&mut table, 1), watched(&mut table)), (Ok(vec![10]), vec![port]));
    // Its connection is lost: a registration at another port is the restarted engine, with any policy.
    table.judge(port, Verdict::Unknown);
    put(&mut table, Time::ZERO, other_policy).unwrap();
    assert_eq!(ports(&mut table, 1), Ok(vec![30]));
    assert_eq!(table.take_orders().len(), 2, "the former port is watched no longer");
    table.check();
}

#[test]
fn a_lone_rank_restarts_with_another_policy_even_at_its_old_port() {
    let mut table = table();
    put(&mut table, Time::ZERO, claim((1, 0), 10)).unwrap();
    let mut other = claim((1, 0), 10);
    other["decode_allocation_policy"] = json!("prefill_complete");
    other["dsv41_spec_layout"] = json!({"layers": 3});
    put(&mut table, Time::ZERO, other).unwrap();
    let info = serde_json::to_value(table.info(Time::ZERO).unwrap()).unwrap();
    assert_eq!(info["decode_allocation_policy"], "prefill_complete");
    assert_eq!((table.places(), watched(&mut table).len()), (1, 1));
}

#[test]
fn the_entry_of_a_rank_record_lives_and_leaves_with_its_lease() {
    let mut table = table();
    let client = ClientAddr::from(std::net::IpAddr::from([10, 0, 0, 1]));
    let worker = |engine: &str| WorkerId { engine: kv_core::EngineId::new(engine).unwrap(), rank: 0 };
    let at = |secs| Time::ZERO + Duration::from_secs(secs);
    let publish = |table: &mut RouteTable, engine: &str, life, port, until| {
        let rank = SglangRank::new("10.0.0.1", port, 16);
        let admitted = table.admit(Time::ZERO, client, &rank, Some(&worker(engine)))?;
        table.enter(
            Time::ZERO,
            admitted,
            Some(at(until)),
            Some((worker(engine), Incarnation::from_random(life))),
        );
        table.check();
        Ok::<(), RouteError>(())
    };
    publish(&mut table, "p", 1, 10, 5).unwrap();
    assert_eq!(table.take_orders(), [], "a lease needs no watch");
    let refused = publish(&mut table, "q", 1, 20, 5).unwrap_err();
    assert!(matches!(refused, RouteError::Occupied { .. }), "{refused}");
    // Another incarnation of the same worker replaces its entry; the former one can do nothing to it.
    publish(&mut table, "p", 2, 11, 5).unwrap();
    table.renew(&worker("p"), Incarnation::from_random(1), at(100));
    table.withdraw(&worker("p"), Some(Incarnation::from_random(1)));
    table.renew(&worker("p"), Incarnation::from_random(2), at(9));
    assert_eq!((table.next_timeout(), ports(&mut table, 1)), (Some(at(9)), Ok(vec![11])));
    assert_eq!(table.health(at(8)), Ok(()));
    let gone = table.health(at(9)).unwrap_err();
    assert!(gone.ends_with("at 10.0.0.1:11 has not renewed its lease"), "{gone}");
    table.check();
    publish(&mut table, "q", 1, 20, 20).unwrap();
    assert_eq!(table.health(at(9)), Ok(()));
    table.withdraw(&worker("q"), Some(Incarnation::from_random(1)));
    table.check();
    assert!(table.health(at(9)).unwrap_err().ends_with("at 10.0.0.1:20 has been withdrawn"));
}
