//! Ranks that have left, and what lookups are told of their replicas.

use super::*;

fn left(registry: &mut Registry, now: Time, rank: &RankRecord) {
    registry.leave(now, &rank.worker, rank.incarnation).unwrap();
}

fn names(found: Result<Vec<RankRecord>, LookupError>) -> Result<Vec<String>, LookupError> {
    found.map(|ranks| ranks.iter().map(|rank| rank.worker.to_string()).collect())
}

#[test]
fn a_replica_is_found_until_all_ranks_have_left_and_again_once_all_are_registered_anew() {
    let mut registry = Registry::new(RegistryConfig::default());
    let (a, b) = (record("p", 0, 1, (2, 0), (1, 0), (1, 0)), record("p", 1, 2, (2, 1), (1, 0), (1, 0)));
    for rank in [&a, &b] {
        registry.register(at(0), here(), rank, LEASE).unwrap();
    }
    left(&mut registry, at(1), &a);
    assert_eq!(find(&mut registry, at(1), Replica::Rank(0)).map(|ranks| ranks.len()), Ok(2));
    let stranger = Incarnation::from_random(9);
    assert!(matches!(registry.leave(at(1), &b.worker, stranger), Err(LeaseError::OtherIncarnation { .. })));
    left(&mut registry, at(1), &b);
    assert_eq!(find(&mut registry, at(1), Replica::Rank(0)), Err(LookupError::Left));
    assert_eq!(registry.len(), 2, "they stay registered, and are renewed");
    registry.renew(at(2), &a.worker, a.incarnation, LEASE).unwrap();
    assert_eq!(find(&mut registry, at(2), Replica::Rank(0)), Err(LookupError::Left));
    let restarted = record("p", 0, 3, (2, 0), (1, 0), (1, 0));
    registry.register(at(3), here(), &restarted, LEASE).unwrap();
    let one = LookupError::NotReady { registered: 1, expected: 2 };
    assert_eq!(find(&mut registry, at(3), Replica::Rank(0)), Err(one), "the other one takes no requests");
    registry.withdraw(at(3), &b.worker, b.incarnation).unwrap();
    assert_eq!(find(&mut registry, at(3), Replica::Rank(0)), Err(one));
    let restarted = record("p", 1, 4, (2, 1), (1, 0), (1, 0));
    registry.register(at(4), here(), &restarted, LEASE).unwrap();
    assert_eq!(find(&mut registry, at(4), Replica::Rank(0)).map(|ranks| ranks.len()), Ok(2));
    assert_index(&registry);
}

#[test]
fn a_replica_that_has_left_hides_no_other_engine_from_lookups_that_name_none() {
    for replica in [Replica::Rank(0), Replica::Modulo(7)] {
        let mut registry = Registry::new(RegistryConfig::default());
        let old = record("a", 0, 1, (1, 0), (1, 0), (1, 0));
        let others = [record("b", 0, 2, (2, 0), (1, 0), (1, 0)), record("b", 1, 3, (2, 1), (1, 0), (1, 0))];
        registry.register(at(0), here(), &old, LEASE).unwrap();
        assert_eq!(names(find(&mut registry, at(0), replica)), Ok(vec!["a/0".to_owned()]));
        left(&mut registry, at(0), &old);
        assert_eq!(find(&mut registry, at(0), replica), Err(LookupError::Left), "{replica:?}");
        registry.register(at(0), here(), &others[0], LEASE).unwrap();
        let comes = LookupError::NotReady { registered: 1, expected: 2 };
        assert_eq!(find(&mut registry, at(0), replica), Err(comes), "{replica:?}: another engine comes up");
        registry.register(at(0), here(), &others[1], LEASE).unwrap();
        let both = vec!["b/0".to_owned(), "b/1".to_owned()];
        assert_eq!(names(find(&mut registry, at(0), replica)), Ok(both), "{replica:?}");
        let engine = EngineId::new("a").unwrap();
        let named = registry.lookup(at(0), WorkerRole::Prefill, None, replica, Some(&engine));
        assert_eq!(named, Err(LookupError::Left), "who names the engine is told of that engine");
        for rank in &others {
            left(&mut registry, at(0), rank);
        }
        assert_eq!(find(&mut registry, at(0), replica), Err(LookupError::Left));
        assert_index(&registry);
    }
}

#[test]
fn a_lookup_steps_over_any_number_of_engines_that_have_left() {
    let mut registry = Registry::new(RegistryConfig::default());
    for number in 0..2000 {
        let rank = record(&format!("a{number}"), 0, 1, (1, 0), (1, 0), (2, 0));
        registry.register(at(0), here(), &rank, LEASE).unwrap();
        left(&mut registry, at(0), &rank);
    }
    registry.register(at(0), here(), &record("z", 0, 1, (1, 0), (1, 0), (1, 0)), LEASE).unwrap();
    for replica in [Replica::Rank(0), Replica::Modulo(4)] {
        let before = registry.steps();
        assert_eq!(names(find(&mut registry, at(0), replica)), Ok(vec!["z/0".to_owned()]));
        assert_eq!(registry.steps() - before, 2, "{replica:?}: one engine and one rank");
    }
}
