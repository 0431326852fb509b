//! Random schedules, with the books checked after each step.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::{AuxIndex, KvPoll, OpenError, Pages, Room};
use kv_poll::consensus::RequestKey;

use super::{Bench, CONFIG, incoming};
use crate::fake::{Rng, seeds};

#[test]
fn random_schedules_keep_the_pages_accounted_and_end_every_request_once() {
    seeds(60, |seed| {
        let mut rng = Rng::new(seed);
        let mut bench = Bench::new(60, CONFIG);
        let mut server: BTreeMap<RequestKey, (u64, Pages)> = BTreeMap::new();
        let (mut pushed, mut ended, mut corrupt) = (0_u64, BTreeSet::new(), BTreeSet::new());
        for turn in 0..3_000 {
            let healing = turn > 2_000;
            match rng.below(10) {
                0 | 1 if !healing => {
                    let priority = rng.below(3) as i32;
                    let mut incoming = incoming(pushed, rng.below(14));
                    incoming.priority = priority;
                    bench.fake.world(|world| {
                        world.refuse = (rng.below(9) == 0).then_some(OpenError::Backpressure);
                    });
                    pushed += u64::from(bench.queues.push(pushed, incoming).is_ok());
                }
                2 | 3 => {
                    if let Some(ready) = bench.queues.pop_waiting() {
                        assert!(!corrupt.contains(&ready.request), "seed {seed}: corrupt data runs");
                        server.insert(ready.key, (ready.request, ready.pages));
                    }
                }
                4 => {
                    let keys: Vec<_> = server.keys().copied().collect();
                    if let Some(key) = rng.pick(&keys) {
                        let (request, mut pages) = server.remove(key).unwrap();
                        match rng.below(if healing { 1 } else { 3 }) {
                            0 => {
                                bench.queues.finish(*key, pages).unwrap();
                                assert!(ended.insert(request), "seed {seed}");
                            }
                            1 => bench.queues.retract(*key, request, pages, rng.below(16)).unwrap(),
                            _ => {
                                if let Some(more) = bench.queues.allocate(rng.below(4)) {
                                    pages.append(more).unwrap();
                                }
                                server.insert(*key, (request, pages));
                            }
                        }
                    }
                }
                5 if rng.below(10) == 0 && pushed > 0 => {
                    bench.queues.abort(RequestKey(rng.next() % pushed));
                }
                _ => {
                    bench.fake.world(|world| world.ring = if healing { usize::MAX } else { rng.below(3) });
                    let open: Vec<_> = bench.fake.world(|world| {
                        let open = world.sessions.iter().filter(|(_, session)| !session.reclaimable);
                        open.map(|(id, s)| (*id, s.poll, s.aborted, s.calls.len(), s.room.clone())).collect()
                    });
                    if let Some((id, poll, aborted, calls, Room::Number(room))) = rng.pick(&open).cloned() {
                        let row = bench.fake.world(|world| world.sessions[&id].aux);
                        match poll {
                            KvPoll::Failed | KvPoll::Success => bench.fake.set_session(id, poll, true),
                            _ if aborted || rng.below(40) == 0 => {
                                bench.fake.set_session(id, KvPoll::Failed, rng.below(2) == 0);
                            }
                            KvPoll::Bootstrapping => {
                                bench.fake.set_session(id, KvPoll::WaitingForInput, false)
                            }
                            _ if calls > 0 => {
                                if rng.below(20) == 0 {
                                    corrupt.insert(room);
                                } else if let Some(row) = row {
                                    bench.rows.write(row, room);
                                }
                                bench.fake.set_session(id, KvPoll::Success, rng.below(2) == 0);
                            }
                            _ => {}
                        }
                    }
                    bench.step();
                }
            }
            while let Some(failed) = bench.queues.drain_failed() {
                assert!(ended.insert(failed.request), "seed {seed}: {} ended twice", failed.request);
            }
            check_pages(&bench, &server, seed);
        }
        // Everything ends.
        bench.fake.world(|world| world.ring = usize::MAX);
        for _ in 0..pushed + 1 {
            let open: Vec<_> = bench.fake.world(|world| {
                world.sessions.iter().filter(|(_, s)| !s.reclaimable).map(|(id, s)| (*id, s.poll)).collect()
            });
            for (id, poll) in open {
                let poll = if poll == KvPoll::Success { poll } else { KvPoll::Failed };
                bench.fake.set_session(id, poll, true);
            }
            bench.step();
            while let Some(ready) = bench.queues.pop_waiting() {
                server.insert(ready.key, (ready.request, ready.pages));
            }
            for (key, (request, pages)) in std::mem::take(&mut server) {
                bench.queues.finish(key, pages).unwrap();
                assert!(ended.insert(request), "seed {seed}");
            }
            while let Some(failed) = bench.queues.drain_failed() {
                assert!(ended.insert(failed.request), "seed {seed}");
            }
        }
        assert_eq!(ended.len() as u64, pushed, "seed {seed}: {:?}", bench.queues.counts());
        assert_eq!(bench.queues.counts(), Default::default(), "seed {seed}");
        assert_eq!(bench.queues.accounting().free, 60, "seed {seed}");
        // All aux rows are free again.
        bench.fake.world(|world| world.refuse = None);
        let rows: BTreeSet<AuxIndex> = (0..4)
            .map(|n| {
                bench.shake_hands(1_000_000 + n, 1);
                bench.fake.at(1_000_000 + n, |session| session.aux).unwrap()
            })
            .collect();
        assert_eq!(rows.len(), 4);
    });
}

/// No page is in two places, and the books say what is where.
fn check_pages(bench: &Bench, server: &BTreeMap<RequestKey, (u64, Pages)>, seed: u64) {
    let accounting = bench.queues.accounting();
    assert_eq!(accounting.sum(), accounting.capacity, "seed {seed}: {accounting:?}");
    assert_eq!(accounting.lost, 0, "seed {seed}");
    let mut seen = bench.fake.custody();
    assert_eq!(seen.len(), accounting.in_transfer + accounting.quarantined, "seed {seed}: {accounting:?}");
    let mut with_server = 0;
    for page in server.values().flat_map(|(_, pages)| pages.list().iter()) {
        with_server += 1;
        assert!(seen.insert(page), "seed {seed}: page {page} is in two places");
    }
    assert_eq!(with_server, accounting.with_server, "seed {seed}: {accounting:?}");
    let rows = bench.fake.world(|world| {
        let live = world.sessions.values().filter(|session| !session.reclaimable);
        live.filter_map(|session| session.aux).collect::<Vec<_>>()
    });
    assert_eq!(rows.len(), rows.iter().collect::<BTreeSet<_>>().len(), "seed {seed}: a row has two requests");
}
