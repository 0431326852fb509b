use std::collections::BTreeSet;

use super::*;
use crate::samples::{offer, record};

mod drained;
mod model;

const LEASE: Duration = Duration::from_secs(5);

fn at(secs: u64) -> Time {
    Time::ZERO + Duration::from_secs(secs)
}

fn client(last: u8) -> ClientAddr {
    ClientAddr::from(std::net::IpAddr::from([10, 0, 0, last]))
}

fn here() -> ClientAddr {
    client(1)
}

fn ranks(bodies: Vec<Bytes>) -> Vec<RankRecord> {
    let parse = |body: &Bytes| serde_json::from_slice::<RankJson>(body).unwrap().into_record().unwrap();
    bodies.iter().map(parse).collect()
}

fn find(registry: &mut Registry, now: Time, replica: Replica) -> Result<Vec<RankRecord>, LookupError> {
    registry.lookup(now, WorkerRole::Prefill, None, replica, None).map(ranks)
}

#[test]
fn a_replica_is_handed_out_whole_and_in_rank_order() {
    let mut registry = Registry::new(RegistryConfig::default());
    assert_eq!(find(&mut registry, at(0), Replica::Rank(0)), Err(LookupError::Unknown));
    let order = [(1, 1), (0, 1), (1, 0), (0, 0)];
    let mut all = Vec::new();
    for (number, (pp, tp)) in order.into_iter().enumerate() {
        let missing = LookupError::NotReady { registered: number as u32, expected: 4 };
        if number > 0 {
            assert_eq!(find(&mut registry, at(0), Replica::Rank(1)), Err(missing));
        }
        let rank = record("p", number as u32, 1, (2, tp), (2, pp), (2, 1));
        // A rank that registers twice is still one rank.
        registry.register(at(0), here(), &rank, LEASE).unwrap();
        registry.register(at(0), here(), &rank, LEASE).unwrap();
        all.push(rank);
    }
    all.sort_by_key(|rank| (rank.parallel.pp_rank, rank.parallel.tp_rank));
    assert_eq!(find(&mut registry, at(0), Replica::Rank(1)).unwrap(), all);
    assert_eq!(find(&mut registry, at(0), Replica::Modulo(7)).unwrap(), all);
    let other = LookupError::NotReady { registered: 0, expected: 4 };
    assert_eq!(find(&mut registry, at(0), Replica::Modulo(8)), Err(other));
    assert_eq!(find(&mut registry, at(0), Replica::Rank(2)), Err(LookupError::Unknown));
}

#[test]
fn ranks_leave_when_their_lease_ends_and_stay_while_it_is_renewed() {
    let mut registry = Registry::new(RegistryConfig::default());
    let (a, b) = (record("p", 0, 1, (2, 0), (1, 0), (1, 0)), record("p", 1, 2, (2, 1), (1, 0), (1, 0)));
    registry.register(at(0), here(), &a, LEASE).unwrap();
    registry.register(at(0), here(), &b, LEASE).unwrap();
    registry.renew(at(4), &a.worker, a.incarnation, LEASE).unwrap();
    assert_eq!(registry.next_timeout(), Some(at(5)));
    let missing = Err(LookupError::NotReady { registered: 1, expected: 2 });
    assert_eq!(find(&mut registry, at(5), Replica::Rank(0)), missing);
    let gone = Err(LeaseError::Unknown(b.worker.clone()));
    assert_eq!(registry.renew(at(5), &b.worker, b.incarnation, LEASE), gone);
    assert_eq!(find(&mut registry, at(9), Replica::Rank(0)), Err(LookupError::Unknown));
    assert!(registry.is_empty() && registry.bytes() == 0);
    assert_index(&registry);
}

#[test]
fn leases_are_bounded_and_so_are_ranks_and_bytes() {
    let config = RegistryConfig { max_ranks: 2, max_lease: LEASE, ..RegistryConfig::default() };
    let mut registry = Registry::new(config);
    let rank = |number| record("p", number, 1, (9, number), (1, 0), (1, 0));
    assert_eq!(registry.register(at(0), here(), &rank(0), LEASE * 100), Ok(LEASE));
    assert_eq!(registry.register(at(0), here(), &rank(1), LEASE), Ok(LEASE));
    assert_eq!(registry.register(at(0), here(), &rank(1), LEASE), Ok(LEASE));
    let full = Err(RegisterError::Full { field: "ranks", would_be: 3, max: 2 });
    assert_eq!(registry.register(at(0), here(), &rank(2), LEASE), full);
    registry.config.max_bytes = 1;
    let refused = registry.register(at(0), here(), &rank(1), LEASE);
    assert!(matches!(refused, Err(RegisterError::Full { field: "bytes", max: 1, .. })));
    assert_eq!(registry.len(), 2, "a refused registration changes nothing");
}

#[test]
fn a_new_incarnation_replaces_the_old_record_which_cannot_return_or_delete_it() {
    let mut registry = Registry::new(RegistryConfig::default());
    let life = |life| record("p", 0, life, (1, 0), (1, 0), (1, 0));
    registry.register(at(0), here(), &life(1), LEASE).unwrap();
    registry.register(at(0), here(), &life(2), LEASE).unwrap();
    assert_eq!(find(&mut registry, at(0), Replica::Rank(0)).unwrap(), [life(2)]);
    let zombie = registry.register(at(1), here(), &life(1), LEASE);
    assert!(matches!(zombie, Err(RegisterError::Conflict { field: "incarnation", .. })));
    let worker = life(1).worker;
    let other = Err(LeaseError::OtherIncarnation {
        worker: worker.clone(),
        registered: life(2).incarnation,
        claimed: life(1).incarnation,
    });
    assert_eq!(registry.withdraw(at(1), &worker, life(1).incarnation), other);
    assert_eq!(find(&mut registry, at(1), Replica::Rank(0)).unwrap(), [life(2)]);
    registry.withdraw(at(1), &worker, life(2).incarnation).unwrap();
    assert!(registry.is_empty());
}

#[test]
fn contradictions_name_the_field_and_both_values() {
    let mut registry = Registry::new(RegistryConfig::default());
    registry.register(at(0), here(), &record("p", 0, 1, (2, 0), (1, 0), (1, 0)), LEASE).unwrap();
    let cases = [
        (record("p", 1, 1, (4, 1), (1, 0), (1, 0)), "p/1: tp_size is 4, but 2 is registered"),
        (record("p", 1, 1, (2, 1), (3, 0), (1, 0)), "p/1: pp_size is 3, but 1 is registered"),
        (record("p", 1, 1, (2, 1), (1, 0), (8, 0)), "p/1: dp_size is 8, but 1 is registered"),
        (
            record("p", 1, 1, (2, 0), (1, 0), (1, 0)),
            "p/1: place is dp_rank 0 pp_rank 0 pcp_rank 0 tp_rank 0, but p/0 at dp_rank 0 pp_rank 0 pcp_rank 0 tp_rank 0 is registered",
        ),
    ];
    for (claim, message) in cases {
        assert_eq!(registry.register(at(0), here(), &claim, LEASE).unwrap_err().to_string(), message);
    }
    let mut decode = record("p", 1, 1, (2, 1), (1, 0), (1, 0));
    decode.role = WorkerRole::Decode;
    let message = "p/1: role is Decode, but Prefill is registered";
    assert_eq!(registry.register(at(0), here(), &decode, LEASE).unwrap_err().to_string(), message);
    // Once the contradicted rank has left, the new configuration is accepted.
    registry.register(at(6), here(), &decode, LEASE).unwrap();
    // A single rank may register with another configuration: no other rank contradicts it.
    registry.register(at(6), here(), &record("p", 1, 2, (4, 1), (1, 0), (1, 0)), LEASE).unwrap();
    let missing = Err(LookupError::NotReady { registered: 1, expected: 4 });
    assert_eq!(find(&mut registry, at(6), Replica::Rank(0)), missing);
}

#[test]
fn of_several_complete_engines_the_smallest_is_returned() {
    let mut registry = Registry::new(RegistryConfig::default());
    registry.register(at(0), here(), &record("a", 0, 1, (2, 0), (1, 0), (1, 0)), LEASE).unwrap();
    for engine in ["c", "b"] {
        registry.register(at(0), here(), &record(engine, 0, 1, (1, 0), (1, 0), (1, 0)), LEASE).unwrap();
    }
    assert_eq!(find(&mut registry, at(0), Replica::Rank(0)).unwrap()[0].worker.to_string(), "b/0");
    let mut only = |engine| {
        let engine = EngineId::new(engine).unwrap();
        registry.lookup(at(0), WorkerRole::Prefill, None, Replica::Rank(0), Some(&engine)).map(ranks)
    };
    assert_eq!(only("c").unwrap()[0].worker.to_string(), "c/0");
    assert_eq!(only("a"), Err(LookupError::NotReady { registered: 1, expected: 2 }));
    assert_eq!(only("d"), Err(LookupError::Unknown));
}

/// An index that is made anew from the registry's engines.
fn assert_index(registry: &Registry) {
    let mut index = Index::default();
    for (id, engine) in &registry.engines {
        let sizes = engine.profile.sizes;
        index.insert(&engine.profile, id);
        let replicas: BTreeSet<u32> = engine.places.keys().map(|place| place.dp).collect();
        assert_eq!(replicas, engine.replicas.keys().copied().collect(), "{id}");
        for kind in engine.profile.kinds() {
            let mut complete = 0;
            for &dp in &replicas {
                let key = (kind.clone(), dp);
                let there = engine.ranks.values().filter(|rank| rank.place.dp == dp);
                let left = there.clone().filter(|rank| rank.left).count();
                let (there, drained) = (there.count(), engine.replicas[&dp].has_drained());
                assert!(left > 0 || !drained, "{id}");
                if drained && left == there {
                    index.drained.insert(key, id);
                    index.ebbing.insert(kind.clone(), id);
                } else if !drained && there as u64 == sizes.replica() {
                    complete += 1;
                    index.complete.insert(key, id);
                    index.partial.insert(kind.clone(), id);
                    index.awake.insert(kind.clone(), id);
                } else {
                    index.begun.insert(key, id);
                    index.awake.insert(kind.clone(), id);
                }
            }
            if complete == sizes.dp {
                index.whole.insert(kind, id);
            }
        }
    }
    assert_eq!(format!("{index:?}"), format!("{:?}", registry.index));
}

#[test]
fn engines_are_found_by_services_that_all_of_their_ranks_offer() {
    let mut registry = Registry::new(RegistryConfig::default());
    let with = |engine, rank, services: &[&str]| {
        let mut record = record(engine, rank, 1, (2, rank), (1, 0), (1, 0));
        record.offers = services.iter().map(|service| offer(service)).collect();
        record
    };
    let ranks_of = |engine, services| [with(engine, 0, services), with(engine, 1, services)];
    let (both, cache, none) = (ranks_of("m", &["kv", "ec"]), ranks_of("b", &["kv"]), ranks_of("a", &[]));
    for rank in both.iter().chain(&cache).chain(&none) {
        registry.register(at(0), here(), rank, LEASE).unwrap();
        assert_index(&registry);
    }
    let mut find = |service: Option<&str>, replica| {
        registry.lookup(at(0), WorkerRole::Prefill, service, replica, None).map(ranks)
    };
    for replica in [Replica::Rank(0), Replica::Modulo(7)] {
        assert_eq!(find(Some("ec"), replica), Ok(both.to_vec()));
        assert_eq!(find(Some("kv"), replica), Ok(cache.to_vec()));
        assert_eq!(find(None, replica), Ok(none.to_vec()));
        assert_eq!(find(Some("k"), replica), Err(LookupError::Unknown));
    }
    let engine = EngineId::new("b").unwrap();
    let named = registry.lookup(at(0), WorkerRole::Prefill, Some("ec"), Replica::Rank(0), Some(&engine));
    assert_eq!(named, Err(LookupError::Unknown), "a named engine must have the service, too");
    let refused = registry.register(at(0), here(), &with("m", 1, &["kv"]), LEASE).unwrap_err();
    assert_eq!(refused.to_string(), "m/1: services is [kv], but [ec, kv] is registered");
    registry.expire(at(5));
    assert_index(&registry);
    assert_eq!(registry.bytes(), 0);
}

#[test]
fn a_lookup_visits_only_engines_and_ranks_that_it_returns() {
    let mut registry = Registry::new(RegistryConfig::default());
    for number in 0..4000_u32 {
        // Incomplete engines of 500 ranks, and engines with another number of replicas each.
        let incomplete =
            record(&format!("a{}", number / 500), number, 1, (4096, number % 500), (1, 0), (1, 0));
        registry.register(at(0), here(), &incomplete, LEASE).unwrap();
        let partial = record(&format!("b{number}"), 0, 1, (1, 0), (1, 0), (2 + number, 1));
        registry.register(at(0), here(), &partial, LEASE).unwrap();
    }
    let steps = |registry: &mut Registry, replica, engine: Option<&EngineId>| {
        let before = registry.steps();
        let found = registry.lookup(at(0), WorkerRole::Prefill, Some("kv"), replica, engine);
        (found.map(|ranks| ranks.len()), registry.steps() - before)
    };
    let missing = |registered, expected| Err(LookupError::NotReady { registered, expected });
    assert_eq!(steps(&mut registry, Replica::Rank(0), None), (missing(500, 4096), 2));
    assert_eq!(steps(&mut registry, Replica::Rank(9), None), (missing(0, 1), 1));
    assert_eq!(steps(&mut registry, Replica::Rank(9999), None), (Err(LookupError::Unknown), 1));
    assert_eq!(steps(&mut registry, Replica::Rank(1), None), (Ok(1), 2));
    let (found, count) = steps(&mut registry, Replica::Modulo(0), None);
    assert_eq!((found, count), (missing(0, 1), 17));
    let named = EngineId::new("a3").unwrap();
    assert_eq!(steps(&mut registry, Replica::Modulo(7), Some(&named)), (missing(500, 4096), 1));
    for tp in 0..64 {
        registry.register(at(0), here(), &record("z", tp, 1, (64, tp), (1, 0), (1, 0)), LEASE).unwrap();
    }
    assert_eq!(steps(&mut registry, Replica::Rank(0), None), (Ok(64), 65));
    assert_eq!(steps(&mut registry, Replica::Modulo(5), None), (Ok(64), 65));
}

#[test]
fn bytes_count_until_the_last_answer_is_gone_and_each_client_has_a_share() {
    let mut registry = Registry::new(RegistryConfig::default());
    let rank = |number| record("p", number, 1, (9, number), (1, 0), (1, 0));
    registry.register(at(0), here(), &rank(0), LEASE).unwrap();
    let one = registry.bytes();
    registry.config.max_bytes_per_client = one;
    // The same registration again replaces itself.
    registry.register(at(0), here(), &rank(0), LEASE).unwrap();
    let full = RegisterError::ClientFull { field: "bytes", would_be: 2 * one, max: one };
    assert_eq!(registry.register(at(0), here(), &rank(1), LEASE), Err(full.clone()));
    registry.register(at(0), client(2), &rank(1), LEASE).unwrap();
    assert_eq!((registry.len(), registry.bytes()), (2, 2 * one));

    registry.register(at(0), client(3), &record("q", 0, 1, (1, 0), (1, 0), (1, 0)), LEASE).unwrap();
    let engine = EngineId::new("q").unwrap();
    let answer = registry.lookup(at(0), WorkerRole::Prefill, None, Replica::Rank(0), Some(&engine)).unwrap();
    registry.expire(at(5));
    assert_eq!((registry.len(), registry.bytes()), (0, one), "an answer that nobody has read yet");
    assert!(registry.register(at(5), client(3), &rank(3), LEASE).is_err(), "it counts for its client");
    registry.register(at(5), client(2), &rank(1), LEASE).unwrap();
    drop(answer);
    registry.register(at(5), client(3), &rank(3), LEASE).unwrap();
    registry.expire(at(10));
    assert_eq!(registry.bytes(), 0);
}

#[test]
fn clients_without_registrations_are_forgotten_by_the_registry() {
    let mut registry = Registry::new(RegistryConfig::default());
    for number in 0..10_000_u32 {
        let from = ClientAddr::from(std::net::IpAddr::from(number.to_be_bytes()));
        let rank = record("p", 0, 1, (1, 0), (1, 0), (1, 0));
        registry.register(at(0), from, &rank, LEASE).unwrap();
        assert!(registry.memory.clients() <= 64, "{} clients for one rank", registry.memory.clients());
    }
}

#[test]
fn the_largest_groups_and_leases_size_nothing() {
    let config = RegistryConfig { max_lease: Duration::MAX, ..RegistryConfig::default() };
    let mut registry = Registry::new(config);
    let max = (u32::MAX, u32::MAX - 1);
    let rank = record("p", u32::MAX, u64::MAX, max, max, max);
    registry.register(at(0), here(), &rank, Duration::MAX).unwrap();
    assert!(registry.bytes() < 4096);
    let missing = |registered| Err(LookupError::NotReady { registered, expected: u32::MAX });
    assert_eq!(find(&mut registry, at(0), Replica::Rank(u32::MAX - 1)), missing(1));
    assert_eq!(find(&mut registry, at(0), Replica::Modulo(u64::MAX)), missing(0));
    assert_eq!(find(&mut registry, at(0), Replica::Rank(u32::MAX)), Err(LookupError::Unknown));
    assert_eq!(registry.next_timeout(), Some(Time::MAX));
}
