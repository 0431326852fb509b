//! Random schedules: every request and every page comes back once.

use std::collections::BTreeSet;

use kv_core::{KvPoll, OpenError, Room};
use kv_poll::consensus::RequestKey;
use kv_poll::queue::{Outgoing, PrefillPolicy};

use super::{queues, step};
use crate::fake::{Call, Rng, pages, seeds};

#[test]
fn random_schedules_return_every_request_and_every_page_once() {
    seeds(60, |seed| {
        let mut rng = Rng::new(seed);
        let (mut queues, fake) = queues(PrefillPolicy::AfterBootstrap);
        let mut free: Vec<u32> = (0..200).collect();
        let (mut pushed, mut active) = (0_u64, Vec::<(RequestKey, usize)>::new());
        let mut ended = BTreeSet::new();
        for turn in 0..2_000 {
            let healing = turn > 1_500;
            match rng.below(8) {
                0 | 1 if !healing => {
                    fake.world(|world| world.refuse = (rng.below(9) == 0).then_some(OpenError::Backpressure));
                    let result = queues.push(pushed, Outgoing::new("p:1", Room::Number(pushed)));
                    if result.is_ok() {
                        pushed += 1;
                    }
                }
                2 => {
                    if let Some(key) = queues.pop_waiting(|_, _| true) {
                        let total = rng.below(12);
                        queues.init(key, total, None).unwrap();
                        active.push((key, total));
                    }
                }
                3 | 4 if !active.is_empty() => {
                    let index = rng.below(active.len());
                    let (key, left) = &mut active[index];
                    let n = rng.below(4).min(*left).min(free.len());
                    let chunk: Vec<u32> = free.drain(free.len() - n..).collect();
                    match queues.send_chunk(*key, pages(chunk)) {
                        Ok(()) => *left -= n,
                        Err(refused) => {
                            free.extend(refused.pages.list().iter());
                            *left = 0;
                        }
                    }
                    if *left == 0 {
                        let _ = queues.finish(*key);
                        active.swap_remove(index);
                    }
                }
                5 if rng.below(20) == 0 && pushed > 0 => {
                    queues.abort(RequestKey(rng.next() % pushed));
                }
                _ => {
                    fake.world(|world| world.ring = if healing { usize::MAX } else { rng.below(4) });
                    let sessions: Vec<_> = fake.world(|world| {
                        let open = world.sessions.iter().filter(|(_, session)| !session.reclaimable);
                        open.map(|(id, session)| (*id, session.poll, session.aborted)).collect()
                    });
                    if let Some((id, poll, aborted)) = rng.pick(&sessions).copied() {
                        let complete = fake.world(|world| match &world.sessions[&id].calls[..] {
                            [Call::Init(n), chunk, ..] => {
                                matches!(chunk, Call::Pages(_)) && world.sessions[&id].custody.len() == *n
                            }
                            _ => false,
                        });
                        match poll {
                            KvPoll::Failed | KvPoll::Success => fake.set_session(id, poll, true),
                            _ if aborted || rng.below(30) == 0 => {
                                fake.set_session(id, KvPoll::Failed, rng.below(2) == 0);
                            }
                            KvPoll::Bootstrapping => fake.set_session(id, KvPoll::WaitingForInput, false),
                            _ if complete => fake.set_session(id, KvPoll::Success, rng.below(2) == 0),
                            _ => {}
                        }
                    }
                    queues.step(fake.changes()).unwrap();
                }
            }
            while let Some(finished) = queues.drain_finished() {
                assert!(ended.insert(finished.request), "seed {seed}: {} ended twice", finished.request);
                free.extend(finished.pages.list().iter());
            }
            let counts = queues.counts();
            let sum = counts.bootstrap + counts.waiting + counts.forward + counts.inflight + counts.failing;
            assert_eq!(sum, queues.len(), "seed {seed}");
            fake.custody();
        }
        fake.world(|world| world.ring = usize::MAX);
        for id in fake.world(|world| world.sessions.keys().copied().collect::<Vec<_>>()) {
            if fake.world(|world| world.sessions[&id].poll != KvPoll::Success) {
                fake.set_session(id, KvPoll::Failed, true);
            } else {
                fake.set_session(id, KvPoll::Success, true);
            }
        }
        step(&mut queues, &fake);
        while let Some(finished) = queues.drain_finished() {
            assert!(ended.insert(finished.request), "seed {seed}: {} ended twice", finished.request);
            free.extend(finished.pages.list().iter());
        }
        assert_eq!(ended.len() as u64, pushed, "seed {seed}");
        free.sort_unstable();
        assert_eq!(free, (0..200).collect::<Vec<_>>(), "seed {seed}: pages are missing or double");
        assert!(queues.is_empty());
    });
}
