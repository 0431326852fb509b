//! The scheduler queues of two engines of two ranks each, over real workers. Each of four threads has a
//! worker, a cache and queues of its own, and the ranks of an engine agree on what becomes of a request.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kv_conformance::Random;
use kv_transfer::allocator::RunAllocator;
use kv_transfer::consensus::{RequestKey, ThreadConsensus};
use kv_transfer::prelude::*;
use kv_transfer::queue::{
    AdmissionRule, AuxMemory, DecodeConfig, DecodeCounts, DecodeQueues, Demand, GateError, Incoming,
    Outgoing, PrefillConfig, PrefillPolicy, PrefillQueues, RequestError, aux_tag,
};
use kv_transfer::{AuxIndex, Cause, Change, Manager, Parallel, PeerCause};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::host::{Host, Setup};
use support::memory::{Memory, Shape, page_content, row_content};
use support::{PATIENCE, server, until};

const RANKS: u32 = 2;
const SHAPE: Shape = Shape { pages: 96, tensors: 4, piece: 512, page_major: false, rows: 6, aux_regions: 1 };

/// A request as a router gives it to all four ranks.
#[derive(Debug, Clone)]
struct Request {
    prefill_room: Room,
    decode_room: Room,
    pages: usize,
    content: u64,
    trouble: Trouble,
}

/// What goes wrong with a request, and on which rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    /// The prefill rank writes another room's tag into the aux row.
    WrongTag(u32),
    /// The prefill rank writes no tag.
    NoTag(u32),
    /// The scheduler of that prefill rank gives up after the first chunk.
    PrefillAborts(u32),
    /// The scheduler of that decode rank gives up while others are served.
    DecodeAborts(u32),
}

type Outcome = Result<(), RequestError>;

impl Request {
    /// The content of a rank, which has its own part of the heads.
    fn content_of(&self, rank: u32) -> u64 {
        self.content ^ u64::from(rank)
    }
}

/// One side's end of all requests, by number, and the host.
struct Served {
    host: Host,
    outcomes: Vec<Outcome>,
}

/// Counts the ranks that have reached a point. There are two such points. The forward passes begin when both
/// decode ranks have met their peers and have aborted what they are to abort, and the prefill rank knows of all
/// that was aborted. And no rank leaves before all are done, because a rank that leaves early fails requests of
/// the others.
#[derive(Clone, Default)]
struct Gate(Arc<AtomicUsize>);

impl Gate {
    fn wait(&self, ranks: usize, mut idle: impl FnMut()) {
        self.0.fetch_add(1, Ordering::SeqCst);
        let deadline = Instant::now() + PATIENCE;
        while self.0.load(Ordering::SeqCst) < ranks {
            assert!(Instant::now() < deadline, "another rank does not come to its end");
            idle();
        }
    }
}

fn parallel(rank: u32) -> Parallel {
    Parallel::default().with(|parallel| {
        parallel.tp_size = RANKS;
        parallel.tp_rank = rank;
    })
}

/// Sleeps until a session has changed, or another rank may have reported something.
fn sleep(manager: &Manager) -> Vec<Change> {
    let mut fds = [PollFd::from_borrowed_fd(manager.poll_set().as_fd(), PollFlags::IN)];
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
    let mut changes = Vec::new();
    manager.poll_set().drain(|change| changes.push(change));
    changes
}

/// The requests in an order of the rank's own: a router's requests come to each rank by a way of their own.
fn in_own_order(requests: &[Request], side: u64, rank: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    Random::from_seed(requests[0].content ^ side << 32 ^ u64::from(rank)).shuffle(&mut order);
    order
}

/// Runs a prefill rank: every request goes through its queues, a few chunks at a time.
fn prefill_rank(
    rank: u32,
    addr: &str,
    requests: &[Request],
    consensus: ThreadConsensus,
    [start, finish]: [Gate; 2],
) -> Served {
    let setup = Setup { rank, parallel: parallel(rank), runs: true, ..Setup::prefill(addr, SHAPE) };
    let mut host = setup.start();
    let manager = host.manager.clone();
    let mut queues =
        PrefillQueues::new(manager.clone(), consensus, PrefillConfig::new(PrefillPolicy::AfterBootstrap));
    let mut outcomes: Vec<Option<Outcome>> = vec![None; requests.len()];
    let mut rows: BTreeMap<RequestKey, AuxIndex> = BTreeMap::new();
    for number in in_own_order(requests, 0, rank) {
        queues.push(number, Outgoing::new(addr, requests[number].prefill_room.clone())).unwrap();
    }
    let doomed = |number: &usize| matches!(requests[*number].trouble, Trouble::DecodeAborts(_));
    let doomed: Vec<usize> = (0..requests.len()).filter(doomed).collect();
    let deadline = Instant::now() + PATIENCE;
    while !queues.is_empty() {
        assert!(Instant::now() < deadline, "prefill rank {rank}: {:?}", queues.counts());
        let Ok(()) = queues.step(sleep(&manager));
        while let Some(done) = queues.drain_finished() {
            for page in done.pages.list().iter() {
                host.memory.check_page(page, &"a page that was sent");
            }
            host.free(done.pages);
            if let Some(row) = rows.remove(&done.key) {
                assert!(host.rows.give(row));
            }
            let before = outcomes[done.request].replace(done.outcome);
            assert!(before.is_none(), "request {} ends twice", done.request);
        }
        let (cache, free_rows) = (&host.cache, host.rows.available());
        let fits =
            |_: RequestKey, number: &mut usize| cache.available() >= requests[*number].pages && free_rows > 0;
        let is_known = doomed.iter().all(|number| outcomes[*number].is_some());
        if !is_known || start.0.load(Ordering::SeqCst) < RANKS as usize {
            continue;
        }
        let Some(key) = queues.pop_waiting(fits) else { continue };
        let request = &requests[*queues.request(key).unwrap()];
        let mut pages = host.prompt(request.pages, request.content_of(rank));
        let row = host.rows.take().unwrap();
        rows.insert(key, row);
        let mut bytes = row_content(request.content_of(rank), SHAPE.row_len());
        let tag = match request.trouble {
            Trouble::WrongTag(wrong) if wrong == rank => aux_tag(&Room::Number(u64::MAX)),
            Trouble::NoTag(wrong) if wrong == rank => 0,
            _ => aux_tag(&request.prefill_room),
        };
        bytes[..8].copy_from_slice(&tag.to_le_bytes());
        host.memory.write_row(row.0, &bytes);
        queues.init(key, request.pages, Some(row)).unwrap();
        let aborts = request.trouble == Trouble::PrefillAborts(rank);
        let mut first = true;
        while !pages.is_empty() {
            let rest = pages.split_off(pages.len().div_ceil(2));
            // The request may have failed meanwhile: then the chunk comes back.
            if let Err(refused) = queues.send_chunk(key, std::mem::replace(&mut pages, rest)) {
                host.free(refused.pages);
            }
            if std::mem::take(&mut first) && aborts {
                queues.abort(key);
                host.free(std::mem::take(&mut pages));
            }
        }
        if !aborts {
            queues.finish(key).unwrap();
        }
    }
    finish.wait(2 * RANKS as usize, || {
        let Ok(()) = queues.step(sleep(&manager));
    });
    let outcomes = outcomes.into_iter().map(Option::unwrap).collect();
    Served { host, outcomes }
}

/// The aux rows in the host's memory, as the queues see them.
struct Rows<'a>(&'a mut Memory, &'a [Request], u32);

impl AuxMemory<usize> for Rows<'_> {
    fn clear(&mut self, row: AuxIndex) {
        self.0.write_row(row.0, &[0; 72]);
    }

    fn tag(&self, row: AuxIndex) -> u64 {
        u64::from_le_bytes(self.0.row(row.0)[..8].try_into().unwrap())
    }

    fn read(&mut self, row: AuxIndex, number: &mut usize) {
        let request = &self.1[*number];
        let mut bytes = row_content(request.content_of(self.2), SHAPE.row_len());
        bytes[..8].copy_from_slice(&aux_tag(&request.prefill_room).to_le_bytes());
        self.0.row_arrived(row.0, &bytes, &format!("request {number}"));
    }
}

fn decode_rank(
    rank: u32,
    addr: &str,
    requests: &[Request],
    consensus: ThreadConsensus,
    [start, finish]: [Gate; 2],
) -> Served {
    let setup = Setup { rank, parallel: parallel(rank), ..Setup::decode(addr, SHAPE) };
    let mut host = setup.start();
    let manager = host.manager.clone();
    let rule = AdmissionRule::new(16).with(|rule| {
        rule.reserved_tokens = 0;
        rule.clip_new_tokens = 0;
        rule.retraction = false;
    });
    let config = DecodeConfig::new(rule).with(|config| config.aux_rows = SHAPE.rows);
    let allocator = RunAllocator::new(SHAPE.pages);
    let mut queues = DecodeQueues::new(manager.clone(), consensus, allocator, config);
    let mut outcomes: Vec<Option<Outcome>> = vec![None; requests.len()];
    let mut left = requests.len();
    let (mut doomed, mut met) = (Vec::new(), false);
    for number in in_own_order(requests, 1, rank) {
        let request = &requests[number];
        let demand = Demand::new(request.pages, 0);
        let key = queues.push(number, Incoming::new(addr, request.decode_room.clone(), demand)).unwrap();
        if request.trouble == Trouble::DecodeAborts(rank) {
            doomed.push(key);
        }
    }
    let deadline = Instant::now() + PATIENCE;
    while left > 0 || queues.counts() != DecodeCounts::default() {
        assert!(Instant::now() < deadline, "decode rank {rank}: {:?}, {left} left", queues.counts());
        let Ok(()) = queues.step(sleep(&manager), &mut Rows(&mut host.memory, requests, rank));
        assert_eq!(queues.accounting().sum(), SHAPE.pages as usize);
        if !met && queues.counts().handshake == 0 {
            met = true;
            doomed.iter().for_each(|key| assert!(queues.abort(*key)));
            start.0.fetch_add(1, Ordering::SeqCst);
        }
        let mut end = |number: usize, outcome: Outcome| {
            assert!(outcomes[number].replace(outcome).is_none(), "request {number} ends twice");
            left -= 1;
        };
        while let Some(failed) = queues.drain_failed() {
            end(failed.request, Err(failed.error));
        }
        while let Some(ready) = queues.pop_waiting() {
            let request = &requests[ready.request];
            for (position, page) in ready.pages.list().iter().enumerate() {
                let content = page_content(request.content_of(rank), position, SHAPE.page_len());
                host.memory.page_arrived(page, &content, &format!("request {} rank {rank}", ready.request));
            }
            end(ready.request, Ok(()));
            queues.finish(ready.key, ready.pages).unwrap();
        }
    }
    let pages = queues.accounting();
    assert_eq!((pages.free, pages.lost), (pages.capacity, 0), "{pages:?}");
    finish.wait(2 * RANKS as usize, || {
        let Ok(()) = queues.step(sleep(&manager), &mut Rows(&mut host.memory, requests, rank));
    });
    let outcomes = outcomes.into_iter().map(Option::unwrap).collect();
    Served { host, outcomes }
}

/// Serves requests on four ranks: the outcomes on the prefill ranks, then on the decode ranks.
fn serve(requests: Vec<Request>) -> [Vec<Vec<Outcome>>; 2] {
    let (_server, addr) = server();
    let (prefill, decode) = (ThreadConsensus::group(2), ThreadConsensus::group(2));
    let gates = [Gate::default(), Gate::default()];
    let served = std::thread::scope(|scope| {
        let start = |serve: fn(u32, &str, &[Request], ThreadConsensus, [Gate; 2]) -> Served,
                     ranks: Vec<_>| {
            let start = |(rank, consensus)| {
                let (addr, requests, gates) = (addr.as_str(), requests.as_slice(), gates.clone());
                scope.spawn(move || serve(rank, addr, requests, consensus, gates))
            };
            (0..).zip(ranks).map(start).collect::<Vec<_>>()
        };
        let ranks = [start(prefill_rank, prefill), start(decode_rank, decode)];
        ranks.map(|ranks| ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<Served>>())
    });
    served.map(|ranks| {
        let end = |Served { mut host, outcomes }: Served| {
            until("the end of all sessions", || host.gauges().sessions_open == 0);
            let gauges = host.gauges();
            assert_eq!(gauges.posts_in_flight, 0);
            assert_eq!(
                (gauges.pages_in_transfer(), gauges.pages_quarantined(), gauges.pages_orphaned()),
                (0, 0, 0)
            );
            assert_eq!(host.cache.available(), host.cache.capacity());
            assert_eq!(host.rows.available(), host.rows.capacity());
            if outcomes.iter().all(Result::is_ok) {
                host.memory.check_all("after all requests");
            }
            let report = host.stop();
            assert_eq!((report.sessions_ended, report.pages_quarantined), (0, 0));
            outcomes
        };
        ranks.into_iter().map(end).collect()
    })
}

fn requests(random: &mut Random, count: usize, trouble: impl Fn(usize) -> Trouble) -> Vec<Request> {
    let request = |number: usize| {
        let (prefill_room, decode_room) = if random.chance(50) {
            (Room::Number(number as u64), Room::Number(number as u64))
        } else {
            let mut id = || Room::request(&format!("cmpl-{number}-0-{:08x}", random.bits() as u32)).unwrap();
            (id(), id())
        };
        let pages = 2 + random.below(15);
        let (content, trouble) = (random.bits(), trouble(number));
        Request { prefill_room, decode_room, pages, content, trouble }
    };
    (0..count).map(request).collect()
}

#[test]
fn all_requests_are_served_by_both_ranks_with_each_ranks_own_bytes() {
    let mut random = Random::new("all_requests_are_served_by_both_ranks");
    let outcomes = serve(requests(&mut random, 120, |_| Trouble::None));
    for (side, ranks) in ["prefill", "decode"].into_iter().zip(outcomes) {
        for (rank, outcomes) in ranks.into_iter().enumerate() {
            for (number, outcome) in outcomes.into_iter().enumerate() {
                assert_eq!(outcome, Ok(()), "{side} rank {rank}, request {number}");
            }
        }
    }
}

fn transfer(outcome: &Outcome) -> Option<&Cause> {
    match outcome {
        Err(RequestError::Transfer(error)) => Some(&error.cause),
        _ => None,
    }
}

/// True if the rank did nothing wrong itself: the failure came from its peer, or from the other rank.
fn is_told(outcome: &Outcome) -> bool {
    matches!(outcome, Err(RequestError::OtherRank { .. }))
        || transfer(outcome) == Some(&Cause::ByPeer(PeerCause::Aborted))
        // The agreement ends the sessions of ranks that had not failed by themselves.
        || transfer(outcome) == Some(&Cause::Aborted)
}

fn gate(outcome: &Outcome) -> Option<&GateError> {
    match outcome {
        Err(RequestError::Gate(error)) => Some(error),
        _ => None,
    }
}

#[test]
fn a_request_that_fails_on_one_rank_fails_on_both_alone() {
    let mut random = Random::new("what_fails_on_one_rank_fails_on_both");
    let trouble = |number: usize| match number % 12 {
        1 => Trouble::WrongTag(number as u32 / 12 % 2),
        4 => Trouble::NoTag(number as u32 / 12 % 2),
        7 => Trouble::PrefillAborts(number as u32 / 12 % 2),
        10 => Trouble::DecodeAborts(number as u32 / 12 % 2),
        _ => Trouble::None,
    };
    let requests = requests(&mut random, 96, trouble);
    let [prefill, decode] = serve(requests.clone());
    for (number, request) in requests.iter().enumerate() {
        let at = |side: &[Vec<Outcome>], rank: u32| side[rank as usize][number].clone();
        let (p, d) = (|rank| at(&prefill, rank), |rank| at(&decode, rank));
        let other = |rank: u32| 1 - rank;
        let what = format!("request {number}, {:?}: {:?}", request.trouble, (p(0), p(1), d(0), d(1)));
        match request.trouble {
            Trouble::None => assert_eq!((p(0), p(1), d(0), d(1)), (Ok(()), Ok(()), Ok(()), Ok(()))),
            // Only the gate knows that the transfer brought another's data. The prefill side learns
            // of it if the other rank's transfer was still going on.
            Trouble::WrongTag(rank) | Trouble::NoTag(rank) => {
                let all_sent = (p(0), p(1)) == (Ok(()), Ok(()));
                assert!(all_sent || is_told(&p(0)) && is_told(&p(1)), "{what}");
                let (d_rank, d_other) = (d(rank), d(other(rank)));
                let error = gate(&d_rank).unwrap_or_else(|| panic!("{what}"));
                assert_eq!(error.expected, aux_tag(&request.decode_room));
                let wrong = matches!(request.trouble, Trouble::WrongTag(_));
                assert_eq!(error.found, if wrong { aux_tag(&Room::Number(u64::MAX)) } else { 0 });
                assert!(is_told(&d_other), "{what}");
            }
            Trouble::PrefillAborts(rank) => {
                assert_eq!(transfer(&p(rank)), Some(&Cause::Aborted), "{what}");
                assert!(is_told(&p(other(rank))) && is_told(&d(rank)) && is_told(&d(other(rank))), "{what}");
            }
            Trouble::DecodeAborts(rank) => {
                assert_eq!(transfer(&d(rank)), Some(&Cause::Aborted), "{what}");
                assert!(is_told(&d(other(rank))) && is_told(&p(rank)) && is_told(&p(other(rank))), "{what}");
            }
        }
    }
}
