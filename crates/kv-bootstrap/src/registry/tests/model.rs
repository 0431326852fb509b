//! Random requests, beside a model of the registry.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Register { engine: u8, rank: u32, life: u64, tp: u32, dp: u32, lease: u64 },
    Renew { engine: u8, rank: u32, life: u64, lease: u64 },
    Withdraw { engine: u8, rank: u32, life: u64 },
    Leave { engine: u8, rank: u32, life: u64 },
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (engine, rank, life, lease) = (0..2u8, 0..4u32, 1..4u64, 1..6u64);
    let step = prop_oneof![
        4 => (engine.clone(), rank.clone(), life.clone(), 1..3u32, 0..2u32, lease.clone())
            .prop_map(|(engine, rank, life, tp, dp, lease)| Step::Register { engine, rank, life, tp, dp, lease }),
        2 => (engine.clone(), rank.clone(), life.clone(), lease)
            .prop_map(|(engine, rank, life, lease)| Step::Renew { engine, rank, life, lease }),
        1 => (engine.clone(), rank.clone(), life.clone())
            .prop_map(|(engine, rank, life)| Step::Withdraw { engine, rank, life }),
        3 => (engine, rank, life).prop_map(|(engine, rank, life)| Step::Leave { engine, rank, life }),
        2 => (0..4u64).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 1..60)
}

/// The rules of the registry, written as a scan over a list; and who has left, and which replicas have drained.
#[derive(Default)]
struct Model(
    Vec<(RankRecord, Time, Vec<Incarnation>)>,
    BTreeSet<(WorkerId, Incarnation)>,
    BTreeSet<(EngineId, u32)>,
);

impl Model {
    /// Forgets who is gone, and notes the replicas that have drained, or are free of ranks that had left.
    fn settle(&mut self, now: Time) {
        self.0.retain(|(_, expires, _)| *expires > now);
        let there: BTreeSet<_> =
            self.0.iter().map(|(record, ..)| (record.worker.clone(), record.incarnation)).collect();
        self.1.retain(|rank| there.contains(rank));
        let replicas: BTreeSet<(EngineId, u32)> =
            self.0.iter().map(|(r, ..)| (r.worker.engine.clone(), r.parallel.dp_rank)).collect();
        self.2.retain(|replica| replicas.contains(replica));
        for (engine, dp) in replicas {
            let all = self.find(engine.as_str(), dp);
            let left = all.iter().filter(|rank| self.has_left(rank)).count();
            match left {
                0 => drop(self.2.remove(&(engine, dp))),
                _ if left as u32 == all[0].parallel.tp_size => drop(self.2.insert((engine, dp))),
                _ => {}
            }
        }
    }

    fn has_left(&self, rank: &RankRecord) -> bool {
        self.1.contains(&(rank.worker.clone(), rank.incarnation))
    }

    /// What a lookup of a replica of this engine answers.
    fn lookup(&self, engine: &EngineId, dp: u32) -> Result<Vec<RankRecord>, LookupError> {
        let tp = self.0.iter().find(|(r, ..)| r.worker.engine == *engine).map(|(r, ..)| r.parallel.tp_size);
        let expected = tp.ok_or(LookupError::Unknown)?;
        let all = self.find(engine.as_str(), dp);
        let drained = self.2.contains(&(engine.clone(), dp));
        let anew = all.iter().filter(|rank| !drained || !self.has_left(rank)).count() as u32;
        match (drained, anew) {
            (true, 0) => Err(LookupError::Left),
            (false, registered) if registered == expected => Ok(all),
            (_, registered) => Err(LookupError::NotReady { registered, expected }),
        }
    }

    fn register(&mut self, now: Time, record: &RankRecord, lease: Duration) -> bool {
        let new = record.parallel;
        let same = |old: &RankRecord| old.worker == record.worker;
        let bad = self.0.iter().any(|(old, _, superseded)| {
            let p = old.parallel;
            let place = (p.tp_rank, p.pp_rank, p.dp_rank) == (new.tp_rank, new.pp_rank, new.dp_rank);
            let sizes = (p.tp_size, p.pp_size, p.dp_size) != (new.tp_size, new.pp_size, new.dp_size);
            let engine = old.worker.engine == record.worker.engine;
            (same(old) && superseded.contains(&record.incarnation))
                || (!same(old) && engine && (place || sizes))
        });
        if bad {
            return false;
        }
        let mut superseded = Vec::new();
        if let Some(at) = self.0.iter().position(|(old, ..)| same(old)) {
            let (old, _, lives) = self.0.remove(at);
            superseded = lives;
            if old.incarnation != record.incarnation {
                superseded.push(old.incarnation);
            }
        }
        self.1.remove(&(record.worker.clone(), record.incarnation));
        self.0.push((record.clone(), now + lease, superseded));
        true
    }

    fn find(&self, engine: &str, dp: u32) -> Vec<RankRecord> {
        let of = |r: &&RankRecord| r.worker.engine.as_str() == engine && r.parallel.dp_rank == dp;
        let mut found: Vec<RankRecord> = self.0.iter().map(|(r, ..)| r).filter(of).cloned().collect();
        found.sort_by_key(|r| (r.parallel.pp_rank, r.parallel.tp_rank));
        found
    }
}

proptest! {
    #[test]
    fn random_requests_keep_the_registry_equal_to_its_model(steps in steps()) {
        let mut registry = Registry::new(RegistryConfig::default());
        let mut model = Model::default();
        let mut now = at(0);
        for step in steps {
            match step {
                Step::Wait(secs) => now = now + Duration::from_secs(secs),
                Step::Register { engine, rank, life, tp, dp, lease } => {
                    model.0.retain(|(_, expires, _)| *expires > now);
                    let claim = record(&format!("e{engine}"), rank, life, (tp, rank % tp), (1, 0), (2, dp));
                    let lease = Duration::from_secs(lease);
                    let taken = registry.register(now, here(), &claim, lease);
                    prop_assert_eq!(taken.is_ok(), model.register(now, &claim, lease), "{:?}", taken);
                }
                Step::Renew { engine, rank, life, lease } => {
                    model.0.retain(|(_, expires, _)| *expires > now);
                    let key = record(&format!("e{engine}"), rank, life, (1, 0), (1, 0), (1, 0));
                    let lease = Duration::from_secs(lease);
                    let mut known = false;
                    for (old, expires, _) in &mut model.0 {
                        if old.worker == key.worker && old.incarnation == key.incarnation {
                            *expires = now + lease;
                            known = true;
                        }
                    }
                    prop_assert_eq!(registry.renew(now, &key.worker, key.incarnation, lease).is_ok(), known);
                }
                Step::Leave { engine, rank, life } => {
                    model.settle(now);
                    let key = record(&format!("e{engine}"), rank, life, (1, 0), (1, 0), (1, 0));
                    let known = model.0.iter().any(|(old, ..)| {
                        (&old.worker, old.incarnation) == (&key.worker, key.incarnation)
                    });
                    if known {
                        model.1.insert((key.worker.clone(), key.incarnation));
                    }
                    prop_assert_eq!(registry.leave(now, &key.worker, key.incarnation).is_ok(), known);
                }
                Step::Withdraw { engine, rank, life } => {
                    model.0.retain(|(_, expires, _)| *expires > now);
                    let key = record(&format!("e{engine}"), rank, life, (1, 0), (1, 0), (1, 0));
                    let before = model.0.len();
                    model.0.retain(|(old, ..)| (&old.worker, old.incarnation) != (&key.worker, key.incarnation));
                    let gone = registry.withdraw(now, &key.worker, key.incarnation).is_ok();
                    prop_assert_eq!(gone, model.0.len() < before);
                }
            }
            model.settle(now);
            let engines = ["e0", "e1"].map(|engine| EngineId::new(engine).unwrap());
            for dp in 0..2 {
                let mut expected = Err(LookupError::Unknown);
                for id in &engines {
                    let got = registry.lookup(now, WorkerRole::Prefill, Some("kv"), Replica::Rank(dp), Some(id));
                    prop_assert_eq!(got.map(ranks), model.lookup(id, dp));
                    expected = match (expected, model.lookup(id, dp)) {
                        (Err(before), Err(after)) => Err(if after.is_better_than(&before) { after } else { before }),
                        (Ok(ranks), _) | (_, Ok(ranks)) => Ok(ranks),
                    };
                }
                let got = registry.lookup(now, WorkerRole::Prefill, Some("kv"), Replica::Rank(dp), None).map(ranks);
                match (&expected, &got) {
                    (Err(LookupError::NotReady { .. }), Err(LookupError::NotReady { .. })) => {}
                    _ => prop_assert_eq!(got, expected, "an engine that has drained hides no other"),
                }
            }
            let bodies = registry.engines.values().flat_map(|e| e.ranks.values()).map(|r| r.body.len());
            let bytes: usize = bodies.map(|len| RANK_BYTES + SERVICE_BYTES + len).sum();
            prop_assert_eq!((registry.len(), registry.bytes()), (model.0.len(), bytes));
            prop_assert_eq!(registry.expiry.len(), model.0.len());
            assert_index(&registry);
        }
    }
}
