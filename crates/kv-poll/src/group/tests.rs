//! The caller's code and the group's lock: neither waits for the other.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use kv_core::machine::SessionCommand;
use kv_core::proto::Command;
use kv_core::{ChunkId, FinalLayers, KvPoll, KvSender, KvSession, ReadyEvent, ReadyEventError};

use super::*;
use crate::kv::KvMachine;
use crate::worker::shared;
use crate::worker::tests::{pages, queues};

/// Long enough for anything that does not wait; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(20);

type Link = Arc<shared::Shared<KvMachine>>;

/// A group of two ranks whose workers are played by the test. The second one has room for three commands.
fn two_ranks() -> ([Link; 2], EngineGroup) {
    let ((first, one), (second, other)) = (queues(8, 16), queues(8, 3));
    ([first, second], EngineGroup::new(vec![one, other]).unwrap())
}

/// A request with a chunk of one page under way.
fn begun(group: &EngineGroup) -> GroupSender {
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
    let (own, used) = (Arc::new(OnceLock::<GroupSender>::new()), group.clone());
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
