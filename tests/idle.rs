//! Rest: a worker with nothing to do uses no processor time, and a scheduler that sleeps on the poll set's
//! descriptor is woken exactly when something has changed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use kv_transfer::prelude::*;
use kv_transfer::{Manager, PollSet};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rustix::event::{Timespec, epoll};
use support::memory::Shape;
use support::pair::Pair;
use support::{PATIENCE, reclaimed, until};

const SHAPE: Shape = Shape { pages: 64, tensors: 2, piece: 256, page_major: false, rows: 4, aux_regions: 1 };

/// Registrations are renewed every third of the lease: here once in twenty minutes.
fn pair() -> Pair {
    Pair::new(SHAPE, |setup| setup.lease = Duration::from_secs(3600))
}

/// Waits for a second in which none of the workers takes a turn.
fn rest(managers: &[&Manager]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let gauges = || managers.iter().map(|manager| manager.gauges()).collect::<Vec<_>>();
        let before = gauges();
        std::thread::sleep(Duration::from_secs(1));
        let after = gauges();
        if before == after {
            return;
        }
        assert!(Instant::now() < deadline, "no rest: {before:?}, a second later {after:?}");
    }
}

#[test]
fn connected_workers_without_sessions_take_no_turns_and_wake_for_the_next_request() {
    let mut pair = pair();
    for room in 0..2 {
        rest(&[&pair.prefill.manager, &pair.decode.manager]);
        pair.serve(room, 8);
    }
    pair.close();
}

#[test]
fn a_session_that_waits_for_its_other_half_costs_no_turns() {
    let mut pair = pair();
    let mut sender = pair.announced(1, 4);
    sender.send(pair.prefill.prompt(4, 1)).unwrap();
    // A sender without a receiver concerns no peer.
    rest(&[&pair.prefill.manager]);
    assert_eq!(sender.poll(), KvPoll::Bootstrapping);
    // A registration without a sender keeps in touch, a few times a second at most.
    let receiver = pair.registered(2, 4);
    until("registration", || receiver.poll() == KvPoll::Transferring);
    let before = (pair.prefill.gauges().turns, pair.decode.gauges().turns);
    std::thread::sleep(Duration::from_secs(2));
    let turns = (pair.prefill.gauges().turns - before.0, pair.decode.gauges().turns - before.1);
    assert!(turns.0 < 100 && turns.1 < 100, "turns in two seconds: {turns:?}");
    assert_eq!(receiver.poll(), KvPoll::Transferring);

    let first = pair.registered(1, 4);
    pair.complete(sender, first, 1);
    let mut second = pair.announced(2, 4);
    second.send(pair.prefill.prompt(4, 2)).unwrap();
    pair.complete(second, receiver, 2);
    pair.close();
}

/// The event loop of a scheduler, with level-triggered readiness.
struct Level(std::os::fd::OwnedFd);

impl Level {
    fn new(set: &PollSet) -> Level {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&epoll, set.as_fd(), epoll::EventData::new_u64(7), epoll::EventFlags::IN).unwrap();
        Level(epoll)
    }

    fn is_readable(&self, within: Duration) -> bool {
        let timeout = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: i64::from(within.subsec_nanos()) };
        let mut events = Vec::with_capacity(4);
        let ready =
            epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut events), Some(&timeout)).unwrap();
        assert!(events.iter().all(|event| event.data.u64() == 7));
        ready > 0
    }

    /// Checks that nothing has changed. A drain beside the last change may have left the descriptor readable
    /// once.
    fn is_quiet(&self, set: &PollSet) {
        if self.is_readable(Duration::from_millis(10)) {
            assert_eq!(set.drain(|change| panic!("{change:?}")), 0);
            assert!(!self.is_readable(Duration::from_millis(10)), "readable for nothing");
        }
    }
}

#[test]
fn the_descriptor_is_readable_exactly_while_there_is_something_to_drain() {
    let mut pair = pair();
    let set = pair.decode.manager.clone();
    let set = set.poll_set();
    set.drain(|_| ());
    let level = Level::new(set);
    for room in 0..20 {
        level.is_quiet(set);
        let mut receiver = pair.receiver(room);
        receiver.init(pair.decode.room_for(3), None).unwrap();
        let id = receiver.id();
        // Handshake and registration come by themselves, then nothing until a sender comes.
        let mut last = KvPoll::Bootstrapping;
        while last != KvPoll::Transferring {
            assert!(level.is_readable(PATIENCE));
            assert!(level.is_readable(Duration::ZERO), "level, not edge");
            set.drain(|change| {
                assert_eq!(change.session, id);
                assert!(change.poll >= last && !change.reclaimable);
                last = change.poll;
            });
        }
        level.is_quiet(set);
        let mut sender = pair.announced(room, 3);
        sender.send(pair.prefill.prompt(3, room)).unwrap();
        let mut reclaimable = false;
        while !reclaimable {
            assert!(level.is_readable(PATIENCE), "the end is not signalled");
            set.drain(|change| {
                assert_eq!((change.session, change.poll), (id, KvPoll::Success));
                reclaimable = change.reclaimable;
            });
        }
        let pages = receiver.reclaim().expect("the poll set said that the pages are back").pages;
        pair.decode.arrived(pages.list(), room, &"a request");
        pair.decode.free(pages);
        pair.prefill.free(reclaimed(sender));
    }
    pair.close();
}

/// mio watches edges: a change that makes no new edge leaves the scheduler asleep.
#[test]
fn a_scheduler_on_mio_sees_every_request_through_to_its_end() {
    let mut pair = pair();
    let managers = [pair.prefill.manager.clone(), pair.decode.manager.clone()];
    let mut poll = Poll::new().unwrap();
    for (token, manager) in managers.iter().enumerate() {
        let fd = manager.poll_set().as_fd().as_raw_fd();
        poll.registry().register(&mut SourceFd(&fd), Token(token), Interest::READABLE).unwrap();
    }
    // What is there from before the registration is no edge of ours.
    for manager in &managers {
        manager.poll_set().drain(|_| ());
    }
    let mut events = Events::with_capacity(8);
    for batch in 0..40 {
        let rooms = batch * 16..(batch + 1) * 16;
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for room in rooms {
            receivers.push((room, pair.registered(room, 2)));
            let mut sender = pair.announced(room, 2);
            sender.send(pair.prefill.prompt(2, room)).unwrap();
            senders.push(sender);
        }
        let mut open = [senders.len(), receivers.len()];
        while open != [0, 0] {
            poll.poll(&mut events, Some(PATIENCE)).unwrap();
            assert!(!events.is_empty(), "asleep with {open:?} sessions open, batch {batch}");
            for event in &events {
                let Token(side) = event.token();
                managers[side].poll_set().drain(|change| {
                    assert_ne!(change.poll, KvPoll::Failed);
                    open[side] -= usize::from(change.reclaimable);
                });
            }
        }
        for (room, mut receiver) in receivers {
            let pages = receiver.reclaim().expect("reported as reclaimable").pages;
            pair.decode.arrived(pages.list(), room, &"a request");
            pair.decode.free(pages);
        }
        for mut sender in senders {
            pair.prefill.free(sender.reclaim().expect("reported as reclaimable").pages);
        }
    }
    pair.close();
}
