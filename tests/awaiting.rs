//! Servers with a task per request: sessions, their changes, and room for commands are awaited on tokio, over real
//! workers. Futures and streams that are dropped at any moment abort nothing and lose no page.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::StreamExt;
use kv_conformance::Random;
use kv_transfer::prelude::*;
use kv_transfer::{Cause, Manager, OpenError, Receiver};
use support::PATIENCE;
use support::memory::Shape;
use support::pair::Pair;
use tokio::task::JoinSet;
use tokio::time::timeout;

const SHAPE: Shape = Shape { pages: 512, tensors: 2, piece: 256, page_major: false, rows: 4, aux_regions: 1 };
const PAGES: usize = 3;
const REQUESTS: u64 = 100;

/// The hosts of all tasks of a test.
#[derive(Clone)]
struct Hosts(Arc<Mutex<Pair>>);

impl Hosts {
    /// Hosts whose workers take few commands at once, so that tasks must wait for room.
    fn new() -> Hosts {
        Hosts(Arc::new(Mutex::new(Pair::new(SHAPE, |setup| setup.command_queue = 4))))
    }

    fn lock(&self) -> MutexGuard<'_, Pair> {
        self.0.lock().unwrap()
    }

    /// Checks the bytes of a request, and frees its pages.
    fn received(&self, room: u64, pages: Pages) {
        let mut pair = self.lock();
        pair.decode.arrived(pages.list(), room, &room);
        pair.decode.free(pages);
    }

    fn close(self) {
        Arc::into_inner(self.0).expect("every task has ended").into_inner().unwrap().close();
    }
}

/// Awaits a future, after this many futures of the same kind were given up.
macro_rules! after_giving_up {
    ($times:expr, $future:expr) => {{
        let mut times = $times;
        loop {
            if times == 0 {
                break timeout(PATIENCE, $future).await.expect("a future that resolves");
            }
            times -= 1;
            if let Ok(value) = timeout(Duration::from_micros(100), $future).await {
                break value;
            }
        }
    }};
}

/// Opens a session, when the worker has room for the command.
async fn open<S>(manager: &Manager, open: impl Fn(&Manager) -> Result<S, OpenError>) -> S {
    loop {
        match open(manager) {
            Err(OpenError::Backpressure) => manager.command_room().await,
            opened => return opened.unwrap(),
        }
    }
}

async fn receiver(manager: &Manager, addr: &str, room: u64) -> Receiver {
    let addr = addr.to_owned();
    open(manager, move |manager| manager.receiver(&addr, Room::from(room), SessionOptions::default())).await
}

async fn init_sender(manager: &Manager, sender: &mut impl KvSender) {
    while sender.init(PAGES, None).is_err() {
        manager.command_room().await;
    }
}

async fn send(manager: &Manager, sender: &mut impl KvSender, mut pages: Pages) {
    while let Err(Backpressure(refused)) = sender.send(pages) {
        pages = refused;
        manager.command_room().await;
    }
}

async fn init_receiver(manager: &Manager, receiver: &mut impl KvReceiver, mut pages: Pages) {
    while let Err(Backpressure(refused)) = receiver.init(pages, None) {
        pages = refused;
        manager.command_room().await;
    }
}

/// The prefill side of a request.
async fn prefill(hosts: Hosts, room: u64, give_up: usize) {
    let manager = hosts.lock().prefill.manager.clone();
    let mut sender =
        open(&manager, move |manager| manager.sender("", Room::from(room), &[], SessionOptions::default()))
            .await;
    init_sender(&manager, &mut sender).await;
    let pages = hosts.lock().prefill.prompt(PAGES, room);
    send(&manager, &mut sender, pages).await;
    let finished = after_giving_up!(give_up, sender.finished());
    assert!(finished.is_ok() || sender.poll() == KvPoll::Failed, "{finished:?}");
    let back = after_giving_up!(give_up, sender.reclaimed()).unwrap();
    assert_eq!(back.pages.len(), PAGES);
    hosts.lock().prefill.free(back.pages);
}

/// The decode side of a request, whose client may hang up.
async fn decode(hosts: Hosts, room: u64, give_up: usize, hang_up: bool) -> bool {
    let (manager, addr) = {
        let pair = hosts.lock();
        (pair.decode.manager.clone(), pair.addr.clone())
    };
    let mut receiver = receiver(&manager, &addr, room).await;
    after_giving_up!(give_up, receiver.ready()).unwrap();
    let pages = hosts.lock().decode.room_for(PAGES);
    init_receiver(&manager, &mut receiver, pages).await;
    if hang_up {
        receiver.abort();
    }
    let finished = after_giving_up!(give_up, receiver.finished());
    let back = after_giving_up!(give_up, receiver.reclaimed()).unwrap();
    let mut pair = hosts.lock();
    match &finished {
        Ok(_) => pair.decode.arrived(back.pages.list(), room, &room),
        Err(error) => {
            assert!(hang_up && error.cause == Cause::Aborted, "{error}");
            pair.decode.missed(back.pages.list(), room, &room);
        }
    }
    pair.decode.free(back.pages);
    finished.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_per_request_awaits_every_step_whatever_futures_are_dropped_meanwhile() {
    let mut random = Random::new("tasks");
    let hosts = Hosts::new();
    let (mut prefills, mut decodes) = (JoinSet::new(), JoinSet::new());
    for room in 0..REQUESTS {
        let mut give_up = || if random.chance(50) { random.below(20) } else { 0 };
        prefills.spawn(prefill(hosts.clone(), room, give_up()));
        decodes.spawn(decode(hosts.clone(), room, give_up(), room % 4 == 3));
    }
    let mut served = 0;
    while let Some(ended) = decodes.join_next().await {
        served += u64::from(ended.unwrap());
    }
    while let Some(ended) = prefills.join_next().await {
        ended.unwrap();
    }
    assert!((REQUESTS * 3 / 4..=REQUESTS).contains(&served), "{served}");
    hosts.close();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduler_awaits_changes_of_all_its_sessions_and_loses_none_with_a_dropped_stream() {
    let mut random = Random::new("streams");
    let hosts = Hosts::new();
    let mut prefills = JoinSet::new();
    let (manager, addr) = {
        let pair = hosts.lock();
        (pair.decode.manager.clone(), pair.addr.clone())
    };
    let mut sessions = BTreeMap::new();
    for room in 0..REQUESTS {
        prefills.spawn(prefill(hosts.clone(), room, 0));
        let mut receiver = receiver(&manager, &addr, room).await;
        let pages = hosts.lock().decode.room_for(PAGES);
        init_receiver(&manager, &mut receiver, pages).await;
        sessions.insert(receiver.id(), (room, receiver));
    }
    let mut changes = manager.changes();
    while !sessions.is_empty() {
        if random.chance(30) {
            changes = manager.changes();
        }
        let change = timeout(PATIENCE, changes.next()).await.expect("a change").unwrap();
        if !change.reclaimable {
            continue;
        }
        let (room, mut receiver) = sessions.remove(&change.session).expect("each end is reported once");
        assert_eq!(change.poll, KvPoll::Success, "{:?}", receiver.failure());
        let back = receiver.reclaim().expect("the change says so");
        hosts.received(room, back.pages);
    }
    while let Some(ended) = prefills.join_next().await {
        ended.unwrap();
    }
    drop(changes);
    hosts.close();
}

#[cfg(feature = "tokio")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduler_that_drains_in_batches_sleeps_on_the_runtimes_readiness() {
    use kv_transfer::tokio::Drained;

    let hosts = Hosts::new();
    let (manager, addr) = {
        let pair = hosts.lock();
        (pair.decode.manager.clone(), pair.addr.clone())
    };
    manager.poll_set().drain(|_| ());
    let set = Drained::new(manager.poll_set()).unwrap();
    let quiet = timeout(Duration::from_millis(50), set.drained(|| manager.poll_set().drain(|_| ()))).await;
    assert!(quiet.is_err(), "nothing has changed");
    for room in 0..10 {
        let prefill = tokio::spawn(prefill(hosts.clone(), room, 0));
        let mut receiver = receiver(&manager, &addr, room).await;
        let pages = hosts.lock().decode.room_for(PAGES);
        init_receiver(&manager, &mut receiver, pages).await;
        let mut reclaimable = false;
        while !reclaimable {
            let drain = || manager.poll_set().drain(|change| reclaimable |= change.reclaimable);
            assert!(timeout(PATIENCE, set.drained(drain)).await.expect("a change").unwrap() > 0);
        }
        let back = receiver.reclaim().unwrap();
        hosts.received(room, back.pages);
        prefill.await.unwrap();
    }
    drop(set);
    hosts.close();
}
