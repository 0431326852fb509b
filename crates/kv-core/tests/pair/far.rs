//! Two nodes with a round trip between them, and many pulls.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node, NodeConfig, Output};
use kv_core::{
    Directions, Incarnation, KvArgs, KvPoll, Origin, PageList, Pages, PostId, RankRecord, Region, RegionRole,
    Room, SessionId, SessionOptions, Time, TransferMode, WorkerRole, WriteFence,
};

use crate::pair::{D, P};

const PAGES: u32 = 4096;

fn config(engine: &str, incarnation: u64) -> NodeConfig {
    let args = KvArgs::builder(engine, 0)
        .pages(PAGES, 16)
        .region(Region::dram(RegionRole::Kv, 0x1_0000, u64::from(PAGES) * 64, 64))
        .build()
        .unwrap();
    NodeConfig::new(args, Incarnation::from_random(incarnation), "test", Bytes::from_static(b"memory"))
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Frame(Bytes),
    Read(u64),
    Begin(u64),
}

/// So many requests, one every so often: how many succeed, and why the others do not.
fn pulls(total: u64, spacing: Duration, round_trip: Duration) -> (usize, BTreeMap<String, u32>) {
    let configs = [config("prefill", 1), config("decode", 2)];
    let mut nodes = [Node::new(configs[P].clone()), Node::new(configs[D].clone())];
    let mut queue: BinaryHeap<Reverse<(Time, u64, usize, Event)>> = BinaryHeap::new();
    let mut now = Time::from_nanos(1_000_000_000);
    let mut number = 0;
    let mut later = |queue: &mut BinaryHeap<_>, at: Time, node: usize, event: Event| {
        number += 1;
        queue.push(Reverse((at, number, node, event)));
    };
    for request in 0..total {
        later(&mut queue, now + spacing * request as u32, D, Event::Begin(request));
    }
    let (mut polls, mut causes) = (BTreeMap::new(), BTreeMap::<String, u32>::new());
    let end = now + spacing * total as u32 + Duration::from_secs(150);
    loop {
        let timer = nodes.iter().filter_map(Node::next_timeout).min();
        let event = queue.peek().map(|Reverse((at, ..))| *at);
        let Some(next) = timer.into_iter().chain(event).min() else { break };
        now = now.max(next);
        if now > end {
            break;
        }
        let mut inputs: Vec<(usize, Input)> = Vec::new();
        if event.is_some_and(|at| at <= now) {
            let Reverse((_, _, node, event)) = queue.pop().unwrap();
            match event {
                Event::Frame(frame) => {
                    inputs.push((node, Input::Frame { from: Origin(1 - node as u64), frame }))
                }
                Event::Read(post) => {
                    inputs.push((node, Input::Posted { post: PostId(post), result: Ok(()) }))
                }
                Event::Begin(request) => inputs.extend(begin(request)),
            }
        } else {
            let due = |node: &usize| nodes[*node].next_timeout().is_some_and(|at| at <= now);
            inputs.extend([P, D].into_iter().filter(due).map(|node| (node, Input::Timeout)));
        }
        for (node, input) in inputs {
            nodes[node].handle(now, input);
            while let Some(output) = nodes[node].poll_output() {
                match output {
                    Output::Connect { peer, .. } => {
                        let (directions, fence) = (Directions::BOTH, WriteFence::AtDeath);
                        nodes[node].handle(now, Input::Connected { peer, directions, fence });
                    }
                    Output::Send { frame, .. } => {
                        later(&mut queue, now + round_trip / 2, 1 - node, Event::Frame(frame));
                    }
                    Output::Post { post, .. } => {
                        later(&mut queue, now + round_trip, node, Event::Read(post.id.0));
                    }
                    Output::Lookup { lookup, .. } => {
                        nodes[node].handle(now, Input::Found { lookup, ranks: vec![record(&configs[P])] });
                    }
                    Output::Status { session, poll, failure } if node == D => {
                        if let Some(failure) = failure {
                            *causes.entry(failure.cause.to_string()).or_default() += 1;
                        }
                        polls.insert(session, poll);
                    }
                    _ => {}
                }
            }
        }
    }
    (polls.values().filter(|poll| **poll == KvPoll::Success).count(), causes)
}

/// Both sides of a request begin.
fn begin(request: u64) -> Vec<(usize, Input)> {
    let (session, room) = (SessionId(request), Room::Number(request));
    let deadline = Some(Duration::from_secs(100));
    let options = || {
        Box::new(SessionOptions::default().with(|options| {
            options.mode = Some(TransferMode::Pull);
            options.deadline = deadline;
        }))
    };
    let page = || {
        let page = (request % u64::from(PAGES)) as u32;
        Pages::unpooled(PageList::from_pages([page]).unwrap()).unwrap()
    };
    let (bootstrap_addr, aux) = ("bootstrap:1".to_owned(), None);
    let commands = [
        (P, Command::OpenSender { session, room: room.clone(), receivers: 1, options: options() }),
        (P, Command::InitSender { session, num_pages: 1, aux }),
        (P, Command::Send { session, chunk: page() }),
        (D, Command::OpenReceiver { session, room, bootstrap_addr, options: options() }),
        (D, Command::InitReceiver { session, pages: page(), aux }),
    ];
    commands.into_iter().map(|(node, command)| (node, Input::Command(command))).collect()
}

fn record(config: &NodeConfig) -> RankRecord {
    RankRecord::serving_kv(
        (config.args.worker().clone(), config.incarnation),
        WorkerRole::Prefill,
        (&config.transports[0].name, config.transports[0].metadata.clone()),
        config.args.geometry(),
    )
    .unwrap()
}

#[test]
fn a_thousand_claims_a_second_succeed_however_long_a_round_trip_takes() {
    for (spacing, round_trip) in [(1000, 10), (1000, 70), (1000, 100), (1000, 500), (200, 15), (200, 100)] {
        let (spacing, round_trip) = (Duration::from_micros(spacing), Duration::from_millis(round_trip));
        let (successes, causes) = pulls(3000, spacing, round_trip);
        assert_eq!((successes, causes), (3000, BTreeMap::new()), "every {spacing:?}, {round_trip:?} away");
    }
}
