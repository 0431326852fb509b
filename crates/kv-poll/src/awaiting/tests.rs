//! Futures and streams over a worker that is played by hand: who is woken, and what is lost when one is dropped.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};

use futures_core::Stream;
use kv_core::machine::SessionCommand;
use kv_core::proto::Resource;
use kv_core::{KvManager, KvSender, OpenError, Room, SessionOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::kv::{Changes, KvMachine, Manager, Sender};
use crate::worker::Failure;
use crate::worker::cell::Cell;
use crate::worker::shared::Shared;
use crate::worker::tests::{idle, pages, queues};
use crate::{Change, EngineGroup};

type Link = Arc<Shared<KvMachine>>;

/// A task that counts how often the task was woken.
#[derive(Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Task {
    fn new() -> (Arc<Task>, Waker) {
        let task = Arc::<Task>::default();
        (Arc::clone(&task), Waker::from(task))
    }

    fn woken(&self) -> usize {
        self.0.swap(0, Ordering::SeqCst)
    }
}

fn look<F: Future>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

fn next(changes: &mut Changes, waker: &Waker) -> Poll<Option<Change>> {
    Pin::new(changes).poll_next(&mut Context::from_waker(waker))
}

fn open(manager: &Manager, room: u64) -> Sender {
    manager.sender("", Room::from(room), &[], SessionOptions::default()).unwrap()
}

/// Plays the worker: takes a command, and hands back what the command lends when told so.
fn take(link: &Link) -> (Arc<Cell<KvMachine>>, Option<Resource>) {
    let message = link.next_command().unwrap();
    (message.cell, message.command.into_resource())
}

fn set(link: &Link, cell: &Arc<Cell<KvMachine>>, poll: KvPoll) {
    let failed = || Failure::Machine(Box::new(failure(1)));
    assert!(cell.set(poll, (poll == KvPoll::Failed).then(failed)));
    link.announce(cell);
}

fn failure(room: u64) -> TransferError {
    TransferError::new(Room::from(room), Phase::Transfer, Cause::PeerLost)
}

#[test]
fn a_session_is_awaited_until_a_state_or_a_later_one_and_wakes_its_task() {
    let (link, manager) = idle();
    let sender = open(&manager, 1);
    let (cell, _) = take(&link);
    let (task, waker) = Task::new();
    let mut ready = pin!(sender.ready());
    assert_eq!((look(ready.as_mut(), &waker), task.woken()), (Poll::Pending, 0));
    set(&link, &cell, KvPoll::Transferring);
    assert_eq!((task.woken(), look(ready, &waker)), (1, Poll::Ready(Ok(KvPoll::Transferring))));
    let mut finished = pin!(sender.finished());
    assert_eq!(look(finished.as_mut(), &waker), Poll::Pending);
    set(&link, &cell, KvPoll::Success);
    assert_eq!((task.woken(), look(finished, &waker)), (1, Poll::Ready(Ok(KvPoll::Success))));
}

#[test]
fn a_session_that_fails_resolves_every_future_with_its_failure() {
    let (link, manager) = idle();
    let sender = open(&manager, 1);
    let (cell, _) = take(&link);
    let (task, waker) = Task::new();
    let (mut ready, mut finished) = (pin!(sender.ready()), pin!(sender.finished()));
    assert!(look(ready.as_mut(), &waker).is_pending() && look(finished.as_mut(), &waker).is_pending());
    set(&link, &cell, KvPoll::Failed);
    assert_eq!(task.woken(), 2);
    assert_eq!(look(ready, &waker), Poll::Ready(Err(failure(1))));
    assert_eq!(look(finished, &waker), Poll::Ready(Err(failure(1))));
}

#[test]
fn a_dropped_future_aborts_nothing_and_loses_no_page() {
    let (link, manager) = idle();
    let mut sender = open(&manager, 1);
    sender.send(pages(&[4, 5])).unwrap();
    let (cell, _) = take(&link);
    let (_, lent) = take(&link);
    let (task, waker) = Task::new();
    {
        let mut reclaimed = pin!(sender.reclaimed());
        assert!(look(reclaimed.as_mut(), &waker).is_pending());
    }
    set(&link, &cell, KvPoll::Success);
    link.give_back(&cell, lent.unwrap());
    assert_eq!((task.woken(), link.aborts_waiting()), (0, 0), "nobody waits any more");
    let reclaimed = look(pin!(sender.reclaimed()), &waker);
    assert_eq!(reclaimed.map(|back| back.unwrap().pages), Poll::Ready(pages(&[4, 5])));
    assert_eq!(manager.orphans(), []);
}

#[test]
fn pages_are_awaited_until_all_are_back_and_are_handed_out_once() {
    let (link, manager) = idle();
    let mut sender = open(&manager, 1);
    sender.send(pages(&[4])).unwrap();
    sender.send(pages(&[7])).unwrap();
    let (cell, _) = take(&link);
    let lent = [take(&link).1.unwrap(), take(&link).1.unwrap()];
    set(&link, &cell, KvPoll::Failed);
    let (task, waker) = Task::new();
    {
        let mut reclaimed = pin!(sender.reclaimed());
        for (resource, left) in lent.into_iter().zip([1, 0]) {
            assert!(look(reclaimed.as_mut(), &waker).is_pending(), "{} are out", left + 1);
            link.give_back(&cell, resource);
        }
        assert_eq!(task.woken(), 1);
        let back = look(reclaimed, &waker).map(|back| back.unwrap().pages);
        assert_eq!(back, Poll::Ready(pages(&[4, 7])));
    }
    assert_eq!(look(pin!(sender.reclaimed()), &waker), Poll::Ready(None), "reclaimed before");
}

#[test]
fn a_worker_that_stops_with_pages_held_ends_the_wait_for_these_pages() {
    let (link, manager) = idle();
    let mut sender = open(&manager, 1);
    sender.send(pages(&[4])).unwrap();
    let (cell, _) = take(&link);
    let _held = take(&link);
    set(&link, &cell, KvPoll::Failed);
    let (task, waker) = Task::new();
    let mut reclaimed = pin!(sender.reclaimed());
    assert!(look(reclaimed.as_mut(), &waker).is_pending());
    // What the worker's thread does last.
    link.close();
    link.announce(&cell);
    assert_eq!((task.woken(), look(reclaimed, &waker)), (1, Poll::Ready(None)));
}

#[test]
fn a_stream_of_changes_wakes_its_task_and_reports_each_change_once() {
    let (link, manager) = idle();
    let senders = [1, 2].map(|room| open(&manager, room));
    let cells = senders.each_ref().map(|_| take(&link).0);
    let (task, waker) = Task::new();
    let mut changes = manager.changes();
    assert!(next(&mut changes, &waker).is_pending());
    set(&link, &cells[1], KvPoll::WaitingForInput);
    set(&link, &cells[0], KvPoll::Transferring);
    set(&link, &cells[1], KvPoll::Transferring);
    assert_eq!(task.woken(), 1);
    let told = |number: usize| {
        let session = senders[number].id();
        Poll::Ready(Some(Change { session, poll: KvPoll::Transferring, reclaimable: false }))
    };
    assert_eq!((next(&mut changes, &waker), next(&mut changes, &waker)), (told(1), told(0)));
    assert!(next(&mut changes, &waker).is_pending());
    set(&link, &cells[0], KvPoll::Success);
    set(&link, &cells[1], KvPoll::Success);
    let over = |number: usize| {
        let session = senders[number].id();
        Poll::Ready(Some(Change { session, poll: KvPoll::Success, reclaimable: true }))
    };
    assert_eq!(next(&mut changes, &waker), over(0));
    assert_eq!(next(&mut changes, &waker), over(1));
    assert!(next(&mut changes, &waker).is_pending());
}

/// A task may hold a stream for long before it looks again.
#[test]
fn a_stream_that_is_kept_and_not_polled_keeps_no_change_from_drains_and_other_streams() {
    let (link, manager) = idle();
    let senders = [1, 2, 3, 4].map(|room| open(&manager, room));
    let cells = senders.each_ref().map(|_| take(&link).0);
    let (task, waker) = Task::new();
    let (mut kept, mut other) = (manager.changes(), manager.changes());
    assert!(next(&mut other, &waker).is_pending());
    cells[..3].iter().for_each(|cell| set(&link, cell, KvPoll::WaitingForInput));
    assert_eq!(task.woken(), 1);
    let told = |number: usize, poll: KvPoll| Change {
        session: senders[number].id(),
        poll,
        reclaimable: poll.is_terminal(),
    };
    assert_eq!(next(&mut kept, &waker), Poll::Ready(Some(told(0, KvPoll::WaitingForInput))));
    let readable = || {
        let mut fds = [PollFd::new(manager.poll_set(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    };
    assert!(readable(), "two sessions are left");
    // One of them changes once more.
    set(&link, &cells[1], KvPoll::Success);
    assert_eq!(next(&mut other, &waker), Poll::Ready(Some(told(1, KvPoll::Success))));
    assert!(readable(), "one session is left");
    // Another comes.
    set(&link, &cells[3], KvPoll::Transferring);
    let mut drained = Vec::new();
    assert_eq!(manager.poll_set().drain(|change| drained.push(change)), 2);
    assert_eq!(drained, [told(2, KvPoll::WaitingForInput), told(3, KvPoll::Transferring)]);
    assert!(!readable() && next(&mut kept, &waker).is_pending() && next(&mut other, &waker).is_pending());
    // And the last one that a stream takes leaves nothing to read.
    set(&link, &cells[3], KvPoll::Success);
    assert!(readable());
    assert_eq!(next(&mut kept, &waker), Poll::Ready(Some(told(3, KvPoll::Success))));
    assert!(!readable());
}

#[test]
fn a_stream_that_a_drain_keeps_from_looking_is_woken_when_the_drain_ends() {
    let (link, manager) = idle();
    let _senders = [1, 2].map(|room| open(&manager, room));
    let cells = [take(&link).0, take(&link).0];
    let (task, waker) = Task::new();
    let mut changes = manager.changes();
    assert!(next(&mut changes, &waker).is_pending());
    set(&link, &cells[0], KvPoll::Transferring);
    assert_eq!(task.woken(), 1);
    manager.poll_set().drain(|_| {
        set(&link, &cells[1], KvPoll::Transferring);
        assert!(next(&mut changes, &waker).is_pending(), "one drain at a time");
        task.woken();
    });
    assert_eq!(task.woken(), 1);
    assert!(next(&mut changes, &waker).is_ready(), "the second session");
}

#[test]
fn a_task_waits_for_room_in_the_ring_and_is_woken_when_the_worker_takes_commands() {
    let (link, manager) = queues(8, 1);
    let (task, waker) = Task::new();
    let mut free = pin!(manager.command_room());
    assert_eq!(look(free.as_mut(), &waker), Poll::Ready(()));
    let _sender = open(&manager, 1);
    let full = manager.sender("", Room::from(2), &[], SessionOptions::default());
    assert_eq!(full.map(drop), Err(OpenError::Backpressure));
    let mut room = pin!(manager.command_room());
    assert_eq!(look(room.as_mut(), &waker), Poll::Pending);
    take(&link);
    link.made_room();
    assert_eq!((task.woken(), look(room, &waker)), (1, Poll::Ready(())));
    let _sender = open(&manager, 2);
    let mut never = pin!(manager.command_room());
    assert_eq!(look(never.as_mut(), &waker), Poll::Pending);
    link.close();
    assert_eq!(
        (task.woken(), look(never, &waker)),
        (1, Poll::Ready(())),
        "a stopped worker hands back at once"
    );
}

#[test]
fn a_task_waits_for_room_in_the_rings_of_all_ranks() {
    let (links, managers): (Vec<_>, Vec<_>) = (0..2).map(|_| queues(8, 1)).unzip();
    let group = EngineGroup::new(managers.clone()).unwrap();
    let (_first, _second) = (open(&managers[0], 1), open(&managers[1], 2));
    let (task, waker) = Task::new();
    let mut room = pin!(group.command_room());
    assert_eq!(look(room.as_mut(), &waker), Poll::Pending);
    for (link, ended) in links.iter().zip([Poll::Pending, Poll::Ready(())]) {
        take(link);
        link.made_room();
        assert_eq!((task.woken(), look(room.as_mut(), &waker)), (1, ended));
    }
}

#[test]
fn a_session_of_several_ranks_is_awaited_without_a_drain_of_the_group() {
    let (links, managers): (Vec<_>, Vec<_>) = (0..2).map(|_| queues(8, 2)).unzip();
    let group = EngineGroup::new(managers.clone()).unwrap();
    let mut sender = group.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
    let (task, waker) = Task::new();
    // The ring of the second rank is full when the pages are given.
    let _in_the_way = open(&managers[1], 2);
    sender.send(pages(&[1, 2])).unwrap();
    let cells: Vec<_> = links.iter().map(|link| take(link).0).collect();
    {
        let mut ready = pin!(sender.ready());
        assert!(look(ready.as_mut(), &waker).is_pending());
        set(&links[0], &cells[0], KvPoll::WaitingForInput);
        assert_eq!(
            (task.woken(), look(ready.as_mut(), &waker)),
            (1, Poll::Pending),
            "the slowest rank counts"
        );
        set(&links[1], &cells[1], KvPoll::WaitingForInput);
        assert_eq!((task.woken(), look(ready, &waker)), (1, Poll::Ready(Ok(KvPoll::WaitingForInput))));
    }
    // The pages went to both ranks, although the ring of the second was full at first.
    take(&links[1]);
    let lent: Vec<_> = links.iter().map(|link| take(link).1.unwrap()).collect();
    let mut reclaimed = pin!(sender.reclaimed());
    assert!(look(reclaimed.as_mut(), &waker).is_pending());
    set(&links[0], &cells[0], KvPoll::Failed);
    assert!(task.woken() > 0 && look(reclaimed.as_mut(), &waker).is_pending());
    assert!(cells[1].is_abort_wanted(), "a request that has failed on one rank ends on all");
    set(&links[1], &cells[1], KvPoll::Failed);
    for (rank, resource) in lent.into_iter().enumerate() {
        assert!(look(reclaimed.as_mut(), &waker).is_pending());
        links[rank].give_back(&cells[rank], resource);
    }
    assert!(task.woken() > 0);
    assert_eq!(look(reclaimed, &waker).map(|back| back.unwrap().pages), Poll::Ready(pages(&[1, 2])));
}

#[test]
fn a_worker_that_takes_commands_wakes_only_tasks_whose_sessions_wait_for_room() {
    let (links, managers): (Vec<_>, Vec<_>) = (0..2).map(|_| queues(8, 2)).unzip();
    let group = EngineGroup::new(managers.clone()).unwrap();
    let mut sender = group.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
    let cells = opened(&links);
    let (task, waker) = Task::new();
    {
        let mut ready = pin!(sender.ready());
        assert!(look(ready.as_mut(), &waker).is_pending());
        links.iter().for_each(|link| link.made_room());
        assert_eq!(task.woken(), 0, "of thousands that wait for their peers");
    }
    let _in_the_way = [2, 3].map(|room| open(&managers[1], room));
    sender.send(pages(&[1, 2])).unwrap();
    let mut finished = pin!(sender.finished());
    assert!(look(finished.as_mut(), &waker).is_pending());
    assert_eq!(links[1].commands_waiting(), 2, "the pages have no room");
    take(&links[1]);
    links[1].made_room();
    assert_eq!((task.woken(), look(finished.as_mut(), &waker)), (1, Poll::Pending));
    assert_eq!(links[1].commands_waiting(), 2, "and now they have");
    links[1].made_room();
    assert_eq!(task.woken(), 0);
    for (link, cell) in links.iter().zip(&cells) {
        set(link, cell, KvPoll::Success);
    }
    assert!(task.woken() > 0);
    assert_eq!(look(finished, &waker), Poll::Ready(Ok(KvPoll::Success)));
}

#[test]
fn a_stream_of_a_group_reports_a_request_once_and_hands_on_what_waited_for_room() {
    let (links, managers): (Vec<_>, Vec<_>) = (0..2).map(|_| queues(8, 2)).unzip();
    let group = EngineGroup::new(managers.clone()).unwrap();
    let mut senders = [1, 2].map(|_| None);
    let (task, waker) = Task::new();
    let mut changes = group.changes();
    let mut next = |waker: &Waker| Pin::new(&mut changes).poll_next(&mut Context::from_waker(waker));
    senders[0] = Some(group.sender("", Room::from(1), &[], SessionOptions::default()).unwrap());
    let _in_the_way = open(&managers[1], 9);
    senders[0].as_mut().unwrap().send(pages(&[1, 2])).unwrap();
    let mut cells = vec![opened(&links)];
    links[1].next_command().unwrap();
    assert!(next(&waker).is_pending(), "and the second rank has its pages now");
    assert_eq!(links.iter().map(|link| link.commands_waiting()).collect::<Vec<_>>(), [1, 1]);
    for link in &links {
        link.next_command().unwrap();
    }
    senders[1] = Some(group.sender("", Room::from(2), &[], SessionOptions::default()).unwrap());
    cells.push(opened(&links));
    task.woken();
    for rank in 0..2 {
        for cells in &cells {
            set(&links[rank], &cells[rank], KvPoll::Transferring);
        }
        assert!(task.woken() > 0);
        if rank == 0 {
            assert!(next(&waker).is_pending(), "the slowest rank counts");
        }
    }
    let told = |number: usize| {
        let session = senders[number].as_ref().unwrap().id();
        Poll::Ready(Some(Change { session, poll: KvPoll::Transferring, reclaimable: false }))
    };
    assert_eq!(next(&waker), told(0));
    drop(changes);
    let mut drained = Vec::new();
    assert_eq!(group.drain(|change| drained.push(change)), 1, "what a dropped stream has not reported");
    assert_eq!(Poll::Ready(drained.pop()), told(1));
}

/// What waits for room in a rank's ring is handed on by the stream. The pages would stay until something else
/// happens.
#[test]
fn a_stream_of_a_group_is_woken_when_a_full_ring_has_room() {
    let (links, managers): (Vec<_>, Vec<_>) = (0..2).map(|_| queues(8, 2)).unzip();
    let group = EngineGroup::new(managers.clone()).unwrap();
    let (task, waker) = Task::new();
    let mut changes = group.changes();
    let mut sender = group.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
    let _in_the_way = open(&managers[1], 9);
    sender.send(pages(&[1, 2])).unwrap();
    assert!(Pin::new(&mut changes).poll_next(&mut Context::from_waker(&waker)).is_pending());
    task.woken();
    take(&links[1]);
    links[1].made_room();
    assert!(task.woken() > 0);
}

/// The cells of the sessions that the next command of each rank opens.
fn opened(links: &[Link]) -> Vec<Arc<Cell<KvMachine>>> {
    links.iter().map(|link| take(link).0).collect()
}
