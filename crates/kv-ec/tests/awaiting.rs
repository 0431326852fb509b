//! Fetches and requests as futures: who is woken, and what a dropped future leaves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use kv_ec::{EcConnector, EcError, EcPoll, EntryGuard, FetchFailure, Request, RequestPoll, Want};
use support::{BLOCK, Host, PATIENCE, Server, content, until};

/// An executor of one task, which sleeps until the task is woken.
struct Sleeper {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }
}

fn sleeper() -> (Arc<Sleeper>, Waker) {
    let sleeper = Arc::new(Sleeper { thread: thread::current(), woken: AtomicBool::new(false) });
    (Arc::clone(&sleeper), Waker::from(sleeper))
}

fn look<F: Future>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

/// Runs a future to its end. Looks only when woken, so that a wake-up that is missing is found.
fn block_on<F: Future>(future: F) -> F::Output {
    let (sleeper, waker) = sleeper();
    let (mut future, deadline) = (pin!(future), Instant::now() + PATIENCE);
    loop {
        if let Poll::Ready(output) = look(future.as_mut(), &waker) {
            return output;
        }
        while !sleeper.woken.swap(false, Ordering::SeqCst) {
            assert!(Instant::now() < deadline, "never woken");
            thread::park_timeout(Duration::from_secs(1));
        }
    }
}

/// What a server writes; the futures of such functions must be fit for executors with many threads.
async fn fetched(connector: EcConnector, want: Want) -> Result<EntryGuard, FetchFailure> {
    let mut fetch = match connector.ensure_cache_available(want).unwrap() {
        kv_ec::Availability::Deferred(fetch) => fetch,
        kv_ec::Availability::Here(entry) => return Ok(entry),
    };
    assert!(fetch.until(EcPoll::Waiting).await? >= EcPoll::Waiting);
    assert_eq!(fetch.finished().await?, EcPoll::Ready);
    Ok(fetch.entry().unwrap())
}

async fn gathered(mut request: Request) -> (RequestPoll, Request) {
    (request.finished().await, request)
}

#[test]
fn an_entry_is_awaited_and_has_the_producers_bytes() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 16), Host::consumer("prefill", 16));
    producer.save(1, 3 * BLOCK);
    let future: Pin<Box<dyn Future<Output = _> + Send>> =
        Box::pin(fetched(consumer.connector.clone(), server.want(1, 3 * BLOCK)));
    let entry = block_on(future).unwrap();
    assert_eq!(consumer.bytes(&entry), content(1, 3 * BLOCK));
    drop(entry);
    consumer.until_cached(3);
}

#[test]
fn a_request_is_awaited_until_its_last_entry_has_come_from_the_last_producer() {
    let (one, other) = (Server::start(), Server::start());
    let producers = [Host::producer(&one, "encoder-1", 16), Host::producer(&other, "encoder-2", 16)];
    let consumer = Host::consumer("prefill", 16);
    // Both producers are asked before they have their entries, and the second producer has its entry last.
    let [first, second] = [producers[0].written(1, 2 * BLOCK), producers[1].written(2, 3 * BLOCK)];
    let request = consumer.connector.request([one.want(1, 2 * BLOCK), other.want(2, 3 * BLOCK)]).unwrap();
    let future: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(gathered(request));
    let waiting = thread::spawn(move || block_on(future));
    producers[0].connector.save(first).unwrap();
    until("the first entry", || consumer.connector.gauges().cache.pinned == 2);
    assert!(!waiting.is_finished());
    producers[1].connector.save(second).unwrap();
    let (poll, request) = waiting.join().unwrap();
    assert_eq!(poll, RequestPoll::Ready);
    let bytes: Vec<_> = request.entries().map(|(index, entry)| (index, consumer.bytes(entry))).collect();
    assert_eq!(bytes, [(0, content(1, 2 * BLOCK)), (1, content(2, 3 * BLOCK))]);
}

#[test]
fn a_fetch_that_fails_wakes_its_task_and_tells_the_reason() {
    let server = Server::start();
    let consumer = Host::consumer("prefill", 16);
    let budget = Duration::from_millis(50);
    let want = |seed| server.want(seed, BLOCK).with(|want| want.budget = Some(budget));
    let failure = block_on(fetched(consumer.connector.clone(), want(1))).unwrap_err();
    let out_of_budget = |error: &EcError| matches!(error, EcError::Budget { after, .. } if *after == budget);
    assert!(matches!(&failure, FetchFailure::Machine(error) if out_of_budget(error)), "{failure}");
    // A request waits for all of its fetches, also behind one that has failed.
    let (poll, request) = block_on(gathered(consumer.connector.request([want(1), want(2)]).unwrap()));
    assert_eq!((poll, request.missing().count()), (RequestPoll::EncodeLocally, 2));
    consumer.until_cached(0);
}

#[test]
fn a_worker_that_stops_ends_the_wait_for_an_entry() {
    let server = Server::start();
    let consumer = Host::consumer("prefill", 16);
    let mut fetch = consumer.deferred(server.want(1, BLOCK));
    let (sleeper, waker) = sleeper();
    let mut finished = pin!(fetch.finished());
    assert!(look(finished.as_mut(), &waker).is_pending());
    drop(consumer);
    assert!(sleeper.woken.load(Ordering::SeqCst));
    let Poll::Ready(Err(failure)) = look(finished, &waker) else { panic!("still waits") };
    assert!(
        matches!(&failure, FetchFailure::Machine(error) if **error == EcError::WorkerStopped),
        "{failure}"
    );
}

#[test]
fn a_dropped_future_ends_no_fetch_and_loses_no_entry() {
    let server = Server::start();
    let (producer, consumer) = (Host::producer(&server, "encoder", 16), Host::consumer("prefill", 16));
    let reservation = producer.written(1, 2 * BLOCK);
    let mut fetch = consumer.deferred(server.want(1, 2 * BLOCK));
    let (sleeper, waker) = sleeper();
    assert!(look(pin!(fetch.finished()), &waker).is_pending());
    producer.connector.save(reservation).unwrap();
    until("the entry", || fetch.poll() == EcPoll::Ready);
    assert!(!sleeper.woken.load(Ordering::SeqCst), "the registration ends with the future");
    // The future that sees the entry is dropped, too; the entry stays with the fetch.
    assert!(matches!(look(pin!(fetch.finished()), &waker), Poll::Ready(Ok(EcPoll::Ready))));
    let entry = fetch.entry().unwrap();
    assert_eq!(consumer.bytes(&entry), content(1, 2 * BLOCK));
    // The same for a request whose future was dropped between two entries.
    producer.save(2, BLOCK);
    let reservation = producer.written(3, BLOCK);
    let wants = [server.want(2, BLOCK), server.want(3, BLOCK)];
    let mut request = consumer.connector.request(wants).unwrap();
    until("the first of two entries", || {
        assert!(look(pin!(request.finished()), &waker).is_pending());
        request.entries().count() == 1
    });
    producer.connector.save(reservation).unwrap();
    assert_eq!(block_on(request.finished()), RequestPoll::Ready);
    let bytes: Vec<_> = request.entries().map(|(_, entry)| consumer.bytes(entry)).collect();
    assert_eq!(bytes, [content(2, BLOCK), content(3, BLOCK)]);
    drop((fetch, entry, request));
    consumer.until_cached(4);
}
