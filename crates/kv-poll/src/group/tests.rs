//! The caller's code and the group's lock: neither waits for the other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::task::{Context as TaskContext, Wake, Waker};
use std::thread;
use std::time::Duration;

use futures_core::Stream;
use kv_core::machine::SessionCommand;
use kv_core::proto::Command;
use kv_core::{
    Cause, ChunkId, FinalLayers, KvPoll, KvSender, KvSession, Phase, ReadyEvent, ReadyEventError,
    TransferError,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::kv::KvMachine;
use crate::worker::tests::{pages, queues};
use crate::worker::{Failure, shared};

/// Long enough for anything that does not wait; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(20);

type Link = Arc<shared::Shared<KvMachine>>;

/// A group of two ranks whose workers are played by the test. The second one has room for three commands.
fn two_ranks() -> ([Link; 2], EngineGroup) {
    let ((first, one), (second, other)) = (queues(8, 16), queues(8, 3));
    ([first, second], EngineGroup::new(vec![one, other]).unwrap())
}

/// A request with a chunk of one page under way.
fn begun(group: &EngineGroup) -> EngineSender {
    let mut sender = group.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
    sender.init(1, None).unwrap();
    assert_eq!(sender.begin_chunk(pages(&[3])), Ok(ChunkId(0)));
    sender
}

/// Takes the commands of a rank up to its announcement: the ready event that the worker would ask.
fn ready_event(link: &Link) -> Box<dyn ReadyEvent> {
    loop {
        let mut message = link.next_command().expect("an announcement is under way");
        if matches!(message.command, Command::LayersFinal { .. }) {
            return message.command.take_ready().unwrap();
        }
    }
}

/// What `call` returns, on a thread of its own: a call that waits fails the test, and does not stop it.
fn at_once<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    thread::spawn(move || sender.send(call()));
    receiver.recv_timeout(PATIENCE).expect("the call waits for something")
}

#[test]
fn a_ready_event_that_takes_its_time_holds_up_no_call_and_no_other_rank() {
    let ([first, second], group) = two_ranks();
    let mut sender = begun(&group);
    let (entered, has_entered) = channel();
    let (go_on, may_go_on) = channel();
    let slow = move || {
        entered.send(()).unwrap();
        may_go_on.recv_timeout(2 * PATIENCE).unwrap();
        Ok(true)
    };
    // The first two commands of the second rank are taken: it has room for the announcement.
    let opened = second.next_command().unwrap().cell;
    second.next_command().unwrap();
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(slow)).unwrap();
    let (mut asked, mut other) = (ready_event(&first), ready_event(&second));
    let asking = thread::spawn(move || asked.passed());
    has_entered.recv_timeout(PATIENCE).unwrap();
    // From here on, the worker of the first rank is inside the caller's code.
    opened.set(KvPoll::Transferring, None);
    let (heard, seen, mut other) = at_once(move || {
        let heard = other.passed();
        let drained = group.drain(|_| ());
        let seen = (sender.poll(), sender.failure(), sender.next_chunk(), drained);
        sender.abort();
        (heard, seen, other)
    });
    assert_eq!((heard, seen), (Ok(false), (KvPoll::Bootstrapping, None, ChunkId(1), 0)));
    go_on.send(()).unwrap();
    assert_eq!((asking.join().unwrap(), other.passed()), (Ok(true), Ok(true)));
}

#[test]
fn a_ready_event_may_use_the_group_and_the_session_that_wait_for_it() {
    let ([first, second], group) = two_ranks();
    let mut sender = begun(&group);
    let (own, used) = (Arc::new(OnceLock::<EngineSender>::new()), group.clone());
    let session = Arc::clone(&own);
    let using = move || {
        used.drain(|_| ());
        let other = used.sender("", Room::from(2), &[], SessionOptions::default());
        other.map(drop).map_err(|_| ReadyEventError::Device { code: 1 })?;
        Ok(session
            .get()
            .is_some_and(|sender| sender.poll() == KvPoll::Bootstrapping && sender.failure().is_none()))
    };
    for _ in 0..2 {
        second.next_command().unwrap();
    }
    sender.layers_final(FinalLayers::all(ChunkId(0)).after(using)).unwrap();
    own.set(sender).unwrap();
    let (mut asked, mut other) = (ready_event(&first), ready_event(&second));
    assert_eq!(at_once(move || asked.passed()), Ok(true));
    assert_eq!(other.passed(), Ok(true));
}

/// An event that uses its group when it is dropped.
struct Leaving {
    group: EngineGroup,
    left: Arc<AtomicUsize>,
}

impl ReadyEvent for Leaving {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        Ok(false)
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.group.orphan_groups();
        self.left.fetch_add(1, Ordering::SeqCst);
    }
}

/// Ends the session of a rank as its worker would after an abort: what it was told comes back.
fn end(link: &Link) {
    let mut cell = None;
    while let Some(message) = link.next_command() {
        link.return_unseen(&message.cell, message.command);
        cell = Some(message.cell);
    }
    let cell = cell.expect("a session was opened");
    cell.set(KvPoll::Failed, None);
    link.poll_set.notify(&cell);
}

#[test]
fn a_ready_event_that_was_never_asked_is_dropped_while_the_group_is_not_locked() {
    for keeps_the_handle in [true, false] {
        let ([first, second], group) = two_ranks();
        let mut sender = begun(&group);
        let left = Arc::new(AtomicUsize::new(0));
        let event = Leaving { group: group.clone(), left: Arc::clone(&left) };
        // The ring of the second rank is full: its announcement waits in the group.
        sender.layers_final(FinalLayers::all(ChunkId(0)).after(event)).unwrap();
        let mut kept = Some(sender);
        if !keeps_the_handle {
            drop(kept.take());
        }
        end(&first);
        end(&second);
        let orphans = at_once(move || {
            group.drain(|_| ());
            if let Some(mut sender) = kept {
                assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[3])));
            }
            group.orphans()
        });
        let expected = if keeps_the_handle { vec![] } else { vec![pages(&[3])] };
        assert_eq!((orphans, left.load(Ordering::SeqCst)), (expected, 1), "handle kept: {keeps_the_handle}");
    }
}

/// A server may await all its sessions, and drop those whose clients have hung up.
#[test]
fn pages_of_a_dropped_session_come_back_to_a_server_that_never_drains_the_group() {
    let ([first, second], group) = two_ranks();
    drop(begun(&group));
    end(&first);
    end(&second);
    assert_eq!(group.orphans(), [pages(&[3])]);
    // And what a scheduler has yet to be told is not lost.
    let sender = group.sender("", Room::from(2), &[], SessionOptions::default()).unwrap();
    let cells = [&first, &second].map(|link| link.next_command().unwrap().cell);
    for (link, cell) in [&first, &second].into_iter().zip(&cells) {
        cell.set(KvPoll::WaitingForInput, None);
        link.announce(cell);
    }
    assert_eq!(group.orphans(), []);
    assert!(wakes(&group));
    let mut told = Vec::new();
    group.drain(|change| told.push((change.session, change.poll)));
    assert_eq!(told, [(sender.id(), KvPoll::WaitingForInput)]);
}

/// A task of an executor that runs the task at once when the task is woken.
struct AtOnce {
    group: EngineGroup,
    woken: AtomicUsize,
}

impl Wake for AtOnce {
    fn wake(self: Arc<Self>) {
        self.group.drain(|_| ());
        self.woken.fetch_add(1, Ordering::SeqCst);
    }
}

/// A worker that has stopped hands back at once what its sessions are given: the caller's thread wakes tasks.
#[test]
fn a_task_that_a_call_on_a_session_wakes_may_use_the_group_at_once() {
    let ([first, _second], group) = two_ranks();
    let mut sender = begun(&group);
    first.close();
    let task = Arc::new(AtOnce { group: group.clone(), woken: AtomicUsize::new(0) });
    let waker = Waker::from(Arc::clone(&task));
    let calls: [fn(&mut EngineSender); 2] = [|sender| sender.send(pages(&[])).unwrap(), EngineSender::abort];
    for call in calls {
        let mut changes = group.changes();
        while Pin::new(&mut changes).poll_next(&mut TaskContext::from_waker(&waker)).is_ready() {}
        sender = at_once(move || {
            call(&mut sender);
            sender
        });
    }
    assert!(task.woken.load(Ordering::SeqCst) > 0);
}

/// True if the descriptor of the group wakes an event loop.
fn wakes(group: &EngineGroup) -> bool {
    let mut fds = [PollFd::new(group, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

/// Sessions on a group of one rank whose worker says that they wait for input.
fn met(link: &Link, group: &EngineGroup, rooms: std::ops::Range<u64>) -> Vec<EngineSender> {
    let open = |room| group.sender("", Room::from(room), &[], SessionOptions::default()).unwrap();
    let senders: Vec<_> = rooms.map(open).collect();
    while let Some(message) = link.next_command() {
        message.cell.set(KvPoll::WaitingForInput, None);
        link.poll_set.notify(&message.cell);
    }
    senders
}

#[test]
fn a_panic_in_a_drain_of_a_group_leaves_the_other_changes_to_the_next_drain() {
    let (link, manager) = queues(8, 16);
    let group = EngineGroup::new(vec![manager]).unwrap();
    let mut senders = met(&link, &group, 0..4);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        group.drain(|change| panic!("a bug in the scheduler, at {change:?}"))
    }));
    assert!(panicked.is_err());
    assert!(wakes(&group), "three changes are untold");
    // Nothing is told of a session that is gone.
    drop(senders.remove(3));
    let mut told = Vec::new();
    assert_eq!(group.drain(|change| told.push(change)), told.len());
    let change =
        |of: &EngineSender| Change { session: of.id(), poll: KvPoll::WaitingForInput, reclaimable: false };
    assert_eq!(told, [change(&senders[1]), change(&senders[2])]);
    assert!(!wakes(&group));
    assert_eq!(group.drain(|_| ()), 0);
}

#[test]
fn a_drain_within_a_drain_tells_each_change_once_and_none_out_of_order() {
    let (link, manager) = queues(8, 16);
    let group = EngineGroup::new(vec![manager]).unwrap();
    let senders = met(&link, &group, 0..3);
    let mut told = Vec::new();
    let outer = group.drain(|change| {
        told.push(change.session);
        assert_eq!(group.drain(|change| told.push(change.session)), 2);
    });
    assert_eq!((outer, told), (1, senders.iter().map(KvSession::id).collect()));
    assert!(!wakes(&group));
}

/// The worker answers at once, on a thread of its own; the scheduler drains on another one than it opens on.
#[test]
fn no_change_of_a_session_that_is_opened_beside_a_drain_is_lost() {
    const SESSIONS: usize = 4_000;
    let (links, managers): (Vec<_>, Vec<_>) = (0..3).map(|_| queues(SESSIONS, SESSIONS)).unzip();
    let group = EngineGroup::new(managers).unwrap();
    let opened = Arc::new(AtomicUsize::new(0));
    let answering = thread::spawn({
        let links = links.clone();
        move || {
            let mut answered = 0;
            while answered < SESSIONS * links.len() {
                for link in &links {
                    while let Some(message) = link.next_command() {
                        message.cell.set(KvPoll::WaitingForInput, None);
                        link.poll_set.notify(&message.cell);
                        answered += 1;
                    }
                }
            }
        }
    });
    let opening = thread::spawn({
        let (group, opened) = (group.clone(), Arc::clone(&opened));
        move || {
            let open = |room| {
                let sender = group.sender("", Room::from(room as u64), &[], SessionOptions::default());
                opened.store(room + 1, Ordering::SeqCst);
                sender.unwrap()
            };
            (0..SESSIONS).map(open).collect::<Vec<_>>()
        }
    });
    let mut told = 0;
    while opened.load(Ordering::SeqCst) < SESSIONS {
        told += group.drain(|_| ());
    }
    let senders = opening.join().unwrap();
    answering.join().unwrap();
    told += group.drain(|_| ());
    assert_eq!((told, senders.len()), (SESSIONS, SESSIONS));
}

#[test]
fn a_request_that_one_rank_cannot_open_is_no_session_of_the_group_and_leaves_nothing() {
    let ((first, one), (second, other)) = (queues(8, 16), queues(1, 16));
    let group = EngineGroup::new(vec![one, other]).unwrap();
    let mut sender = group.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
    assert!(group.sender("", Room::from(2), &[], SessionOptions::default()).is_err(), "one session at most");
    // The workers answer everything that they are told, and report every state.
    for link in [&first, &second] {
        while let Some(message) = link.next_command() {
            message.cell.set(KvPoll::WaitingForInput, None);
            link.poll_set.notify(&message.cell);
        }
    }
    let mut told = Vec::new();
    group.drain(|change| told.push(change));
    let change = |of: &EngineSender, poll| Change { session: of.id(), poll, reclaimable: false };
    assert_eq!(told, [change(&sender, KvPoll::WaitingForInput)]);
    sender.send(pages(&[3])).unwrap();
    for link in [&first, &second] {
        end(link);
    }
    group.drain(|_| ());
    assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[3])));
    assert!(group.orphans().is_empty());
}

#[test]
fn a_request_for_which_one_rank_has_no_room_is_opened_on_no_rank_until_it_has() {
    let ((first, one), (second, other)) = (queues(8, 16), queues(8, 1));
    let group = EngineGroup::new(vec![one, other]).unwrap();
    let open = |room: u64| group.sender("", Room::from(room), &[], SessionOptions::default());
    let told = |link: &Link| std::iter::from_fn(|| link.next_command()).count();
    let _before = open(1).unwrap();
    assert_eq!(told(&first), 1);
    assert_eq!(open(2).err(), Some(OpenError::Backpressure));
    // The peers of the first rank hear of no session that begins and ends.
    assert_eq!((told(&first), first.aborts_waiting(), told(&second)), (0, 0, 1));
    let _again = open(2).unwrap();
    assert_eq!((told(&first), told(&second)), (1, 1));
}

#[test]
fn a_command_that_waits_for_a_rank_is_tried_at_every_drain_until_the_rank_has_room() {
    let ([first, second], group) = two_ranks();
    let mut sender = begun(&group);
    // The ring of the second rank is full.
    sender.layers_final(FinalLayers::all(ChunkId(0))).unwrap();
    for _ in 0..3 {
        group.drain(|_| ());
    }
    let told = |link: &Link| std::iter::from_fn(|| link.next_command()).count();
    assert_eq!((told(&first), told(&second)), (4, 3));
    group.drain(|_| ());
    assert_eq!((told(&first), told(&second)), (0, 1));
}

#[test]
fn a_group_knows_why_a_request_failed_after_its_pages_are_back_and_nothing_else_of_the_request() {
    let ([first, second], group) = two_ranks();
    let mut sender = begun(&group);
    let error = TransferError::new(Room::from(1), Phase::Transfer, Cause::PeerLost);
    for link in [&first, &second] {
        while let Some(message) = link.next_command() {
            message.cell.set(KvPoll::Failed, Some(Failure::Machine(Box::new(error.clone()))));
            link.return_unseen(&message.cell, message.command);
            link.poll_set.notify(&message.cell);
        }
    }
    group.drain(|_| ());
    assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[3])));
    assert_eq!(sender.failure(), Some(error));
    assert!(group.shared.lock().is_empty());
    drop(sender);
    assert!(group.shared.lock().is_empty());
}
