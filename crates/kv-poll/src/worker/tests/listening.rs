//! Whoever listens to a worker is told what its machine tells, in the words of the machine.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kv_core::machine::Machine;
use kv_core::proto::{Command, Input, Output, Resource};
use kv_core::trace::{Event, Log, What};
use kv_core::{KvPoll, Quarantine, Room, Time, TransferError};

use super::client::FakeClient;
use super::transport::{Wire, fake_transport};
use super::{BootTime, args};
use crate::worker::{Driver, Listener, Setup};

/// An event of a service that is not the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Greeted(u64);

impl fmt::Display for Greeted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "is greeted by {}", self.0)
    }
}

impl What for Greeted {}

/// A machine that tells of each session that is opened, and ends it.
struct Greeter {
    log: Log<Greeted>,
    outputs: VecDeque<Output>,
    /// Set once somebody listens.
    heard: Arc<AtomicBool>,
}

impl Machine for Greeter {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;
    type Trace = Greeted;

    fn handle(&mut self, now: Time, input: Input) {
        let Input::Command(Command::OpenSender { session, room: Room::Number(who), .. }) = input else {
            return;
        };
        self.log.tell(now, session, || Greeted(who));
        self.outputs.push_back(Output::Status { session, poll: KvPoll::Success, failure: None });
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn listen(&mut self, on: bool) {
        self.log.listen(on);
        self.heard.store(on, Ordering::SeqCst);
    }

    fn poll_trace(&mut self) -> Option<Event<Greeted>> {
        self.log.next()
    }
}

/// Opens two sessions on a worker; true if its machine was asked to tell.
fn greet(setup: Setup<Greeted>) -> bool {
    let transport = Box::new(fake_transport(&Arc::default(), &Wire::new()));
    let (client, heard) = (Box::new(FakeClient::new(&Arc::default())), Arc::default());
    let machine = Greeter { log: Log::default(), outputs: VecDeque::new(), heard: Arc::clone(&heard) };
    let mut driver = Driver::new(machine, setup, transport, client, Box::new(BootTime)).unwrap();
    let port = driver.port();
    let open = |who| {
        port.open(|session| {
            let (room, options) = (Room::Number(who), Default::default());
            Command::OpenSender { session, room, receivers: 1, options }
        })
    };
    let sessions = [7, 8].map(|who| open(who).unwrap());
    driver.turn();
    drop(sessions);
    heard.load(Ordering::SeqCst)
}

#[test]
fn a_listener_is_told_the_events_of_a_service_in_its_own_words_and_order() {
    let told: Arc<Mutex<Vec<Event<Greeted>>>> = Arc::default();
    let events = Arc::clone(&told);
    let listener = Listener::new(move |worker, event: &Event<Greeted>| {
        assert_eq!(worker.to_string(), "engine/0");
        events.lock().unwrap().push(event.clone());
    });
    assert!(greet(Setup::new(args().worker().clone()).with(|setup| setup.listeners.push(listener))));
    let told = told.lock().unwrap();
    let words: Vec<Greeted> = told.iter().map(|event| event.what).collect();
    assert_eq!(words, [Greeted(7), Greeted(8)]);
    assert!(told[0].who.session.is_some() && told[0].who != told[1].who);
}

#[test]
fn a_machine_to_which_nobody_listens_is_not_asked_to_tell() {
    assert!(!greet(Setup::new(args().worker().clone())));
}

#[test]
fn every_listener_that_was_added_is_told_each_event() {
    let told: Arc<AtomicUsize> = Arc::default();
    let counting = || {
        let count = Arc::clone(&told);
        Listener::new(move |_, _: &Event<Greeted>| {
            count.fetch_add(1, Ordering::SeqCst);
        })
    };
    greet(Setup::new(args().worker().clone()).with(|setup| setup.listeners = vec![counting(), counting()]));
    assert_eq!(told.load(Ordering::SeqCst), 4);
}

#[test]
fn a_listener_made_of_two_tells_both_each_event() {
    let told: Arc<Mutex<Vec<(char, u64)>>> = Arc::default();
    let noting = |name| {
        let told = Arc::clone(&told);
        Listener::new(move |_, event: &Event<Greeted>| told.lock().unwrap().push((name, event.what.0)))
    };
    let both = noting('a').and(noting('b'));
    greet(Setup::new(args().worker().clone()).with(|setup| setup.listeners = vec![both]));
    assert_eq!(*told.lock().unwrap(), [('a', 7), ('b', 7), ('a', 8), ('b', 8)]);
}

#[test]
fn a_listener_that_panics_is_told_nothing_more_and_its_worker_goes_on() {
    let told: Arc<AtomicUsize> = Arc::default();
    let count = Arc::clone(&told);
    let listener = Listener::new(move |_, _: &Event<Greeted>| {
        count.fetch_add(1, Ordering::SeqCst);
        panic!("a bug in the listener");
    });
    greet(Setup::new(args().worker().clone()).with(|setup| setup.listeners.push(listener)));
    assert_eq!(told.load(Ordering::SeqCst), 1);
}
