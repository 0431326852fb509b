//! Sessions and their pages: what goes to the machine, and what comes back to the schedulers.

use std::time::Duration;

use kv_core::{
    Cause, ChunkId, KvManager, KvPoll, KvReceiver, KvSender, KvSession, PageList, PagePool, Room,
    SessionOptions, WorkerRole,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::script::{SLOW, STUCK};
use super::{PATIENCE, Rig, Seen, args, pages};
use crate::kv::WorkerConfig;

#[test]
fn pages_go_through_and_come_back_in_order() {
    let rig = Rig::start();
    let mut sender = rig.sender(SLOW);
    sender.init(4, None).unwrap();
    for chunk in [&[7, 8][..], &[1], &[], &[30]] {
        sender.send(pages(chunk)).unwrap();
    }
    rig.until("the chunks", || rig.seen().len() == 5);
    assert_eq!(rig.worker.manager().gauges().pages_in_transfer(), 4);
    assert_eq!(sender.reclaim(), None, "the session has not ended");
    sender.init(4, None).unwrap();
    rig.wire.say("done");
    rig.until("success", || sender.poll() == KvPoll::Success);
    let mut back = None;
    rig.until("the pages", || {
        back = sender.reclaim();
        back.is_some()
    });
    assert_eq!(back.map(|back| back.pages), Some(pages(&[7, 8, 1, 30])));
    assert_eq!(sender.reclaim(), None, "the pages came back twice");
    let gauges = rig.worker.manager().gauges();
    assert_eq!((gauges.pages_in_transfer(), gauges.pages_quarantined(), gauges.pages_orphaned()), (0, 0, 0));
    rig.until("the free place", || rig.worker.manager().gauges().sessions_open == 0);
}

#[test]
fn an_abort_that_overtakes_the_opening_still_counts() {
    for _ in 0..200 {
        let rig = Rig::start();
        let mut sender = rig.sender(SLOW);
        sender.abort();
        rig.until("the abort", || sender.poll() == KvPoll::Failed);
        assert_eq!(sender.failure().map(|error| error.cause), Some(Cause::Aborted));
        assert_eq!(rig.seen(), [Seen::Opened(0), Seen::Aborted(0)]);
    }
}

#[test]
fn pages_given_to_an_ended_session_come_back_without_the_machine() {
    let rig = Rig::start();
    let mut sender = rig.sender(1);
    sender.send(pages(&[1])).unwrap();
    rig.until("success", || sender.poll() == KvPoll::Success);
    sender.send(pages(&[2, 3])).unwrap();
    sender.init(9, None).unwrap();
    let mut back = None;
    rig.until("the pages", || {
        back = sender.reclaim();
        back.is_some()
    });
    assert_eq!(back.map(|back| back.pages), Some(pages(&[1, 2, 3])));
    assert_eq!(rig.seen(), [Seen::Opened(0), Seen::Sent(0)]);
}

#[test]
fn quarantined_pages_are_reported_when_they_become_reclaimable() {
    let rig = Rig::start();
    let manager = rig.worker.manager();
    let mut receiver = manager.receiver("a:1", Room::from(STUCK), SessionOptions::default()).unwrap();
    receiver.init(pages(&[4, 5]), None).unwrap();
    let id = receiver.id();
    rig.until_seen(&Seen::Sent(0));
    rig.wire.say("done");
    rig.until("the end", || receiver.poll() == KvPoll::Success);
    assert_eq!(receiver.reclaim(), None, "a data operation may touch them");
    rig.until("the gauge", || manager.gauges().pages_quarantined() == 2);
    manager.poll_set().drain(|_| ());
    rig.wire.say("release");
    let mut changes = Vec::new();
    while changes.is_empty() {
        let mut fds = [PollFd::new(manager.poll_set(), PollFlags::IN)];
        let patience = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut fds, Some(&patience)), Ok(1));
        manager.poll_set().drain(|change| changes.push(change));
    }
    assert_eq!(changes, [crate::Change { session: id, poll: KvPoll::Success, reclaimable: true }]);
    assert_eq!(receiver.reclaim().map(|back| back.pages), Some(pages(&[4, 5])));
    rig.until("the gauge", || manager.gauges().pages_quarantined() == 0);
}

#[test]
fn a_dropped_session_is_aborted_and_its_pages_become_orphans() {
    let rig = Rig::start();
    let mut sender = rig.sender(SLOW);
    sender.send(pages(&[1, 2])).unwrap();
    drop(sender);
    let manager = rig.worker.manager();
    let mut orphans = Vec::new();
    rig.until("the orphans", || {
        orphans.extend(manager.orphans());
        !orphans.is_empty()
    });
    assert_eq!(orphans, [pages(&[1, 2])]);
    rig.until("the free place", || manager.gauges().sessions_open == 0);
}

/// Sends one page by a sender of any kind, and waits until the page is back in its pool.
fn send_one<S: KvSender>(rig: &Rig, mut sender: S, pool: &PagePool) {
    sender.init(1, None).unwrap();
    assert_eq!(sender.next_chunk(), ChunkId(0));
    sender.send(pool.adopt(PageList::from_pages([5]).unwrap()).unwrap()).unwrap();
    assert_eq!((sender.next_chunk(), pool.is_out(5)), (ChunkId(1), true));
    rig.until("success", || sender.poll() == KvPoll::Success);
    let mut back = None;
    rig.until("the page", || {
        back = sender.reclaim();
        back.is_some()
    });
    pool.release(back.unwrap().pages).unwrap();
    assert_eq!((sender.reclaim(), pool.num_out(), pool.lost().len()), (None, 0, 0));
}

#[test]
fn a_boxed_session_of_unknown_kind_is_used_like_any_session() {
    let (rig, pool) = (Rig::start(), PagePool::new(8));
    send_one(&rig, rig.sender(1), &pool);
    let boxed: Box<dyn KvSender> = Box::new(rig.sender(2));
    send_one(&rig, boxed, &pool);
    let manager = rig.worker.manager();
    let receiver = manager.receiver("a:1", Room::from(3), SessionOptions::default()).unwrap();
    let mut receiver: Box<dyn KvReceiver> = Box::new(receiver);
    receiver.init(pool.adopt(PageList::from_pages([6]).unwrap()).unwrap(), None).unwrap();
    let mut open: Vec<Box<dyn KvSession>> = vec![receiver, Box::new(rig.sender(4))];
    open.iter_mut().for_each(|session| session.abort());
    rig.until("the ends", || {
        open.retain_mut(|session| match session.reclaim() {
            Some(back) => pool.release(back.pages).is_err(),
            None => true,
        });
        open.is_empty()
    });
    assert_eq!((pool.num_out(), pool.lost().len()), (0, 0));
}

#[test]
fn pages_that_die_with_their_worker_are_named_by_their_pool() {
    let (rig, pool) = (Rig::start(), PagePool::new(8));
    let mut sender = rig.sender(STUCK);
    let stuck = PageList::from_pages([1, 2, 3]).unwrap();
    sender.send(pool.adopt(stuck.clone()).unwrap()).unwrap();
    rig.until_seen(&Seen::Sent(0));
    assert_eq!(pool.lost(), PageList::default());
    rig.worker.stop(Duration::from_millis(50));
    assert_eq!((sender.reclaim(), pool.lost(), pool.num_out()), (None, stuck, 3));
}

/// Several schedulers open, feed, abort, drop and reclaim sessions against one worker with a tiny
/// ring: at the end every page is accounted for, once.
#[test]
fn no_page_is_lost_between_many_schedulers_and_one_worker() {
    const PAGES: u32 = 64;
    const SCHEDULERS: u32 = 4;
    let config = WorkerConfig::new(args(), WorkerRole::Prefill).with(|config| {
        config.max_sessions = 16;
        config.command_queue = 4;
    });
    let rig = Rig::with(config);
    let schedulers: Vec<_> = (0..SCHEDULERS)
        .map(|number| {
            let manager = rig.worker.manager();
            std::thread::spawn(move || {
                let share = PAGES / SCHEDULERS;
                let mut free = pages(&(number * share..(number + 1) * share).collect::<Vec<_>>());
                let mut open = Vec::new();
                for step in 0..3_000_u32 {
                    let room = if step % 7 == 0 { SLOW } else { u64::from(step % 900) };
                    let opened = manager.sender("", Room::from(room), &[], SessionOptions::default());
                    if let Ok(mut sender) = opened {
                        let chunk = free.split_off(free.len().saturating_sub(3));
                        if let Err(refused) = sender.send(chunk) {
                            free.append(refused.0).unwrap();
                        }
                        if step % 5 == 0 {
                            sender.abort();
                        }
                        open.push(sender);
                        if step % 7 == 1 {
                            drop(open.swap_remove(step as usize % open.len()));
                        }
                    }
                    open.retain_mut(|sender| match sender.reclaim() {
                        Some(back) => {
                            free.append(back.pages).unwrap();
                            false
                        }
                        None => true,
                    });
                    if step % 16 == 0 {
                        manager.poll_set().drain(|_| ());
                        for orphan in manager.orphans() {
                            free.append(orphan).unwrap();
                        }
                        std::thread::yield_now();
                    }
                }
                drop(open);
                free.list().iter().collect::<Vec<_>>()
            })
        })
        .collect();
    let mut back: Vec<u32> = schedulers.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    let manager = rig.worker.manager();
    let report = rig.worker.stop(PATIENCE);
    assert_eq!((report.pages_quarantined, report.panicked), (0, false));
    back.extend(manager.orphans().iter().flat_map(|orphan| orphan.list().iter()));
    back.sort_unstable();
    assert_eq!(back, (0..PAGES).collect::<Vec<_>>());
    assert_eq!(manager.gauges().sessions_open, 0);
}
