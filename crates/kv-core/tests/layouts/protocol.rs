//! Whole requests between random engines: every rank a node, every frame and post delivered in any
//! order, and the bytes compared at the end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node, NodeConfig, Output, Resource};
use kv_core::{
    AuxIndex, CacheGroupItems, Cause, ChunkId, FinalLayers, Geometry, Incarnation, KvPoll, LeaseRef, Op,
    Pages, Parallel, PeerCause, PeerId, Post, RankRecord, RequestCacheGroups, Room, SessionId,
    SessionOptions, Time, TransferError, TransferMode, WorkerRole,
};

use crate::engine::{Engine, Lists, Model, Request};
use crate::memory::Memory;
use crate::rng::Rng;
use crate::{cuts, list, number};

const ROOM: Room = Room::Number(7);

/// All ranks of both engines: prefill first.
struct World {
    rng: Rng,
    nodes: Vec<Node>,
    memories: Vec<Memory>,
    /// What the forward pass writes on each prefill rank, layer by layer, before it says so.
    truths: Vec<Memory>,
    records: Vec<RankRecord>,
    prefills: usize,
    peers: BTreeMap<(usize, PeerId), usize>,
    /// Who says it, to whom, and the frame.
    wire: Vec<(usize, usize, Bytes)>,
    posts: Vec<(usize, usize, Post)>,
    polls: BTreeMap<usize, KvPoll>,
    failures: BTreeMap<usize, TransferError>,
    released: BTreeMap<usize, usize>,
    released_items: BTreeMap<usize, usize>,
    now: Time,
    moved: u64,
    /// What the router tells every receiver.
    lease_refs: Vec<LeaseRef>,
}

impl World {
    fn new(mut rng: Rng, engines: [&Engine; 2], memories: Vec<Memory>, truths: Vec<Memory>) -> World {
        let mut nodes = Vec::new();
        let mut records = Vec::new();
        for args in engines.iter().flat_map(|engine| &engine.args) {
            let metadata = Bytes::copy_from_slice(&(nodes.len() as u32).to_le_bytes());
            let incarnation = Incarnation::from_random(100 + nodes.len() as u64);
            let mut config = NodeConfig::new(args.clone(), incarnation, "test", metadata.clone());
            config.seed = rng.next();
            let (who, way) = ((args.worker().clone(), incarnation), ("test", metadata));
            let record = RankRecord::serving_kv(who, WorkerRole::Prefill, way, args.geometry());
            records.push(record.unwrap());
            nodes.push(Node::new(config));
        }
        let prefills = engines[0].args.len();
        records.truncate(prefills);
        World {
            rng,
            nodes,
            memories,
            truths,
            records,
            prefills,
            peers: BTreeMap::new(),
            wire: Vec::new(),
            posts: Vec::new(),
            polls: BTreeMap::new(),
            failures: BTreeMap::new(),
            released: BTreeMap::new(),
            released_items: BTreeMap::new(),
            now: Time::from_nanos(1_000_000_000),
            moved: 0,
            lease_refs: Vec::new(),
        }
    }

    /// The sessions of all prefill ranks, as `serve` opens them.
    fn refer(&mut self, lists: &[Lists]) {
        let lease_refs = self.records.iter().zip(lists).zip(1..).map(|((record, lists), session)| {
            let lease_ref = LeaseRef::new(record.incarnation, SessionId(session));
            if self.rng.chance(2) { lease_ref.of_pages(list(&lists.pages)) } else { lease_ref }
        });
        self.lease_refs = lease_refs.collect();
    }

    fn input(&mut self, node: usize, input: Input) {
        self.nodes[node].handle(self.now, input);
        while let Some(output) = self.nodes[node].poll_output() {
            match output {
                Output::Connect { peer, transport } => {
                    let to = u32::from_le_bytes(transport.metadata[..].try_into().unwrap());
                    self.peers.insert((node, peer), to as usize);
                }
                Output::Disconnect { peer } => drop(self.peers.remove(&(node, peer))),
                Output::Send { peer, frame } => self.wire.push((node, self.peers[&(node, peer)], frame)),
                Output::Post { peer, post } => self.posts.push((node, self.peers[&(node, peer)], post)),
                Output::Lookup { lookup, .. } => {
                    let ranks = self.rng.shuffled(self.records.clone());
                    self.nodes[node].handle(self.now, Input::Found { lookup, ranks });
                }
                Output::Status { poll, failure, .. } => {
                    self.polls.insert(node, poll);
                    self.failures.extend(failure.map(|failure| (node, *failure)));
                }
                Output::Release { resource: Resource::Pages(pages), .. } => {
                    *self.released.entry(node).or_default() += pages.len()
                }
                Output::Release { resource: Resource::RequestCacheGroups { groups, skipped }, .. } => {
                    assert_eq!(skipped, [] as [u16; 0]);
                    *self.released_items.entry(node).or_default() += groups.len();
                }
                Output::Cancel { .. } | Output::Permit { .. } | Output::Revoke { .. } => {}
            }
        }
    }

    fn carry_out(&mut self, node: usize, step: Step) {
        match step {
            Step::Say(command) => self.input(node, Input::Command(command)),
            Step::ComputeAux => {
                let record = &self.records[node];
                let geometry = record.offers[0].geometry(record.parallel).unwrap();
                self.memories[node].fill_aux(&geometry, 1);
                self.memories[node].compute_groups(&self.truths[node]);
            }
            Step::Compute { layers, tokens } => {
                self.memories[node].compute(&self.truths[node], &layers, |token| tokens.contains(&token));
            }
        }
    }

    /// Delivers one thing, or lets time pass. False if nothing can happen any more.
    fn step(&mut self) -> bool {
        let count = self.wire.len() + self.posts.len();
        if count == 0 {
            let next = self.nodes.iter().filter_map(Node::next_timeout).min();
            let Some(next) = next.filter(|next| *next < self.now + Duration::from_secs(30)) else {
                return false;
            };
            self.now = self.now.max(next);
            for node in 0..self.nodes.len() {
                if self.nodes[node].next_timeout().is_some_and(|at| at <= self.now) {
                    self.input(node, Input::Timeout);
                }
            }
            return true;
        }
        let pick = self.rng.below(count);
        if pick < self.wire.len() {
            let (from, to, frame) = self.wire.swap_remove(pick);
            if self.rng.chance(8) {
                self.wire.push((from, to, frame.clone()));
            }
            self.input(to, Input::Frame { from: kv_core::Origin(from as u64), frame });
        } else {
            let (node, peer, post) = self.posts.swap_remove(pick - self.wire.len());
            let (from, to) = if post.op == Op::Write { (node, peer) } else { (peer, node) };
            let source = std::mem::replace(&mut self.memories[from], Memory::none());
            for descriptor in &post.descriptors {
                self.memories[to].take(&source, descriptor, post.op);
                self.moved += descriptor.len;
            }
            self.memories[from] = source;
            self.wire.extend(post.notify.map(|frame| (node, peer, frame)));
            self.input(node, Input::Posted { post: post.id, result: Ok(()) });
        }
        true
    }

    /// True once every rank has said the last word about its session.
    fn ended(&self) -> bool {
        self.polls.len() == self.nodes.len() && self.polls.values().all(|poll| poll.is_terminal())
    }
}

/// What a scheduler does next.
enum Step {
    Say(Command),
    /// Runs the forward pass for some layers of some tokens.
    Compute {
        layers: Range<u32>,
        tokens: Vec<usize>,
    },
    ComputeAux,
}

/// What the scheduler of a prefill rank does with the pages of a request: chunks at once, or layer by
/// layer, those of one chunk before, between and after those of the next.
fn forward(rng: &mut Rng, session: SessionId, geometry: &Geometry, pages: &[u32]) -> Vec<Step> {
    let (first, end) = geometry.kv_layers().unwrap();
    let mut steps = Vec::new();
    let mut open: Vec<Vec<Step>> = Vec::new();
    let mut start = 0;
    for number in 0.. {
        let count = (1 + rng.below(4)).min(pages.len() - start);
        let chunk = Pages::unpooled(list(&pages[start..start + count])).unwrap();
        let layout = &geometry.layout;
        let whole = |page: usize| page * layout.dcp_size as usize + layout.dcp_rank as usize;
        let size = geometry.page_size as usize;
        let tokens: Vec<usize> =
            (start..start + count).flat_map(|page| whole(page) * size..(whole(page) + 1) * size).collect();
        start += count;
        if rng.chance(2) {
            steps.push(Step::Compute { layers: first..end, tokens });
            steps.push(Step::Say(Command::Send { session, chunk }));
        } else {
            steps.push(Step::Say(Command::BeginChunk { session, chunk }));
            let announce = |layers: Range<u32>| {
                let told =
                    if layers == (first..end) && number % 2 == 0 { None } else { Some(layers.clone()) };
                let mut final_layers = FinalLayers::all(ChunkId(number));
                final_layers.layers = told;
                let told = Command::LayersFinal { session, layers: final_layers };
                [Step::Say(told), Step::Compute { layers, tokens: tokens.clone() }]
            };
            // The next step is the last one.
            open.push(cuts(rng, first..end).into_iter().flat_map(announce).collect());
        }
        while !open.is_empty() && (start == pages.len() || rng.chance(2)) {
            let of = rng.below(open.len());
            steps.extend(open[of].pop());
            steps.extend(open[of].pop());
            open.retain(|steps| !steps.is_empty());
        }
        if start == pages.len() {
            break;
        }
    }
    // The row is final when the last thing is said, no earlier.
    steps.insert(steps.len() - 1, Step::ComputeAux);
    steps
}

/// The items of a rank that has such: from the beginning of the request on, or of the window.
fn groups(engine: &Engine, rank: usize, request: &Request, lists: &Lists, all: bool) -> RequestCacheGroups {
    let mut groups = RequestCacheGroups::none();
    for (number, items) in lists.groups.iter().enumerate() {
        if engine.ranks[rank].group_items(number as u16) == 0 {
            continue;
        }
        let size = engine.group_pages[number] as usize;
        let first = if all { 0 } else { request.windows[number] / size };
        let items = Pages::unpooled(list(&items[first..])).unwrap();
        groups.push(CacheGroupItems::from_number(number as u16, first as u32, items)).unwrap();
    }
    groups
}

/// Opens, gives and sends in any order among the ranks; returns once all have ended.
fn serve(world: &mut World, engines: &[Engine; 2], request: &Request, mode: TransferMode, receivers: u32) {
    let mut todo: Vec<Vec<Step>> = Vec::new();
    for node in 0..world.nodes.len() {
        let session = SessionId(node as u64 + 1);
        let mut steps = Vec::new();
        let (mode, aux) = (Some(mode), Some(AuxIndex(1)));
        if node < world.prefills {
            let options = Box::new(SessionOptions::default().with(|options| options.mode = mode));
            steps.push(Step::Say(Command::OpenSender { session, room: ROOM, receivers, options }));
            let pages = &request.prefill[node].pages;
            steps.push(Step::Say(Command::InitSender { session, num_pages: pages.len(), aux }));
            let groups = groups(&engines[0], node, request, &request.prefill[node], request.keeps_all);
            steps.extend(forward(&mut world.rng, session, &engines[0].ranks[node], pages));
            // At any time before the last thing is said.
            let at = 1 + world.rng.below(steps.len() - 1);
            steps.insert(at, Step::Say(Command::RequestCacheGroups { session, groups }));
        } else {
            let rank = node - world.prefills;
            let prefix_pages = request.prefix[rank];
            let lease_refs = world.lease_refs.clone();
            let options = Box::new(SessionOptions::default().with(|options| {
                options.mode = mode;
                options.lease_refs = lease_refs;
                options.prefix_pages = prefix_pages;
            }));
            let bootstrap_addr = "bootstrap:1".to_owned();
            steps.push(Step::Say(Command::OpenReceiver { session, room: ROOM, bootstrap_addr, options }));
            let groups = groups(&engines[1], rank, request, &request.decode[rank], false);
            steps.push(Step::Say(Command::RequestCacheGroups { session, groups }));
            let pages = Pages::unpooled(list(&request.decode[rank].pages[prefix_pages..])).unwrap();
            steps.push(Step::Say(Command::InitReceiver { session, pages, aux }));
        }
        steps.reverse();
        todo.push(steps);
    }
    if !world.lease_refs.is_empty() {
        // A session that a router tells of has been opened.
        for (node, steps) in todo.iter_mut().enumerate().take(world.prefills) {
            steps.pop().into_iter().for_each(|open| world.carry_out(node, open));
        }
    }
    for _ in 0..200_000 {
        if world.rng.chance(3) {
            let node = world.rng.below(world.nodes.len());
            if let Some(step) = todo[node].pop() {
                world.carry_out(node, step);
            }
        }
        // Schedulers are quick: no time passes before they have said everything.
        if world.wire.is_empty() && world.posts.is_empty() && !todo.iter().all(Vec::is_empty) {
            continue;
        }
        let idle = !world.step();
        if todo.iter().all(Vec::is_empty) && (world.ended() || idle) {
            return;
        }
    }
    panic!("no end: {:?}", world.polls);
}

fn case(seed: u64) -> (Rng, Model, [Engine; 2], Request) {
    let mut rng = Rng::new(seed);
    let model = Model::random(&mut rng);
    let prefill = Engine::random(&mut rng, &model, None);
    let decode = Engine::random(&mut rng, &model, Some(&prefill));
    let mut request = Request::random(&mut rng, &model, &prefill, &decode);
    for (window, (group, tokens)) in
        request.windows.iter_mut().zip(model.groups.iter().zip(&request.group_tokens))
    {
        *window = if group.slots || rng.chance(2) { 0 } else { rng.below(*tokens) };
    }
    request.keeps_all = rng.chance(2);
    (rng, model, [prefill, decode], request)
}

fn world(rng: Rng, model: &Model, engines: &[Engine; 2], request: &Request) -> World {
    let [prefill, decode] = engines;
    let truths =
        prefill.ranks.iter().zip(&request.prefill).map(|(rank, lists)| Memory::filled(model, rank, lists));
    let ranks = prefill.ranks.iter().chain(&decode.ranks);
    World::new(rng, [prefill, decode], ranks.map(Memory::empty).collect(), truths.collect())
}

fn run(seed: u64) {
    let (mut rng, model, engines, request) = case(seed);
    let mode = rng.pick(&[TransferMode::Push, TransferMode::Pull]);
    let mut world = world(rng, &model, &engines, &request);
    if mode == TransferMode::Pull && world.rng.chance(2) {
        world.refer(&request.prefill);
    }
    serve(&mut world, &engines, &request, mode, 0);
    for node in 0..world.nodes.len() {
        assert_eq!(world.polls[&node], KvPoll::Success, "node {node}: {:?}", world.failures);
    }
    let mut expected = 0;
    for (rank, geometry) in engines[1].ranks.iter().enumerate() {
        let memory = &mut world.memories[world.prefills + rank];
        let from = memory.take_aux(geometry, 1);
        let last = engines[0].ranks.iter().map(|rank| rank.parallel.pp_rank).max().unwrap();
        assert!(geometry.parallel.pp_size > 1 || u32::from(from) == last, "aux of stage {from}");
        expected += memory.compare(&model, &engines[0], geometry, &request, rank) + crate::memory::AUX_LEN;
        // Only the pages that were given are given back, and all of them.
        let given = request.decode[rank].pages.len() - request.prefix[rank];
        assert_eq!(world.released.get(&(world.prefills + rank)).copied().unwrap_or(0), given);
        let given = groups(&engines[1], rank, &request, &request.decode[rank], false);
        let released = world.released_items.get(&(world.prefills + rank)).copied();
        assert_eq!(released.unwrap_or(0), given.len());
    }
    assert_eq!(world.moved, expected, "bytes were moved twice");
}

#[test]
fn every_rank_of_any_two_engines_ends_well_with_the_right_bytes() {
    let cases = number("KV_LAYOUT_CASES").unwrap_or(2_000) / 5;
    let first = number("KV_LAYOUT_SEED").unwrap_or(1);
    for seed in first..first + cases.max(1) {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            let (_, _, engines, _) = case(seed);
            println!("prefill: {:#?}", engines[0].ranks[0]);
            println!("decode: {:#?}", engines[1].ranks[0]);
            println!("again: KV_LAYOUT_SEED={seed} KV_LAYOUT_CASES=1 cargo test -p kv-core --test layouts");
            std::panic::resume_unwind(panic);
        }
    }
}

/// A seed at which a rank of the prefill engine serves several of the decode engine.
fn uneven() -> (Rng, Model, [Engine; 2], Request) {
    let uneven = |seed: &u64| {
        let (_, _, engines, request) = case(*seed);
        let tp = engines.each_ref().map(|engine| engine.ranks[0].parallel.tp_size);
        let others = engines.each_ref().map(|engine| {
            let Parallel { pp_size, pcp_size, .. } = engine.ranks[0].parallel;
            (pp_size, pcp_size)
        });
        tp == [2, 4]
            && others == [(1, 1); 2]
            && request.tokens > 4
            && engines.iter().all(|engine| engine.context == 1)
    };
    case((1..).find(uneven).unwrap())
}

#[test]
fn a_number_of_receivers_that_contradicts_the_engine_fails_with_both_values() {
    let (rng, model, engines, request) = uneven();
    let mut world = world(rng, &model, &engines, &request);
    serve(&mut world, &engines, &request, TransferMode::Push, 1);
    let expected = Cause::ByPeer(PeerCause::ReceiverCount { expected: 1, told: 2 });
    assert_eq!(world.failures[&0].cause, expected);
    assert!(world.failures[&0].to_string().contains("expects 1 receivers, but the receiver's engine has 2"));
    assert!(world.polls.iter().all(|(_, poll)| *poll == KvPoll::Failed));

    let (rng, model, engines, request) = uneven();
    let mut world = self::world(rng, &model, &engines, &request);
    serve(&mut world, &engines, &request, TransferMode::Push, 2);
    assert!(world.polls.iter().all(|(_, poll)| *poll == KvPoll::Success), "{:?}", world.failures);
}

/// The router's references name every rank of an engine, and one of these has been restarted: its
/// readers learn it before they read anything, the others are served.
#[test]
fn a_restarted_rank_is_distinguished_from_ranks_that_live_on() {
    let (rng, model, engines, request) = uneven();
    let mut world = world(rng, &model, &engines, &request);
    world.refer(&request.prefill);
    world.lease_refs[1].incarnation = Incarnation::from_random(7);
    serve(&mut world, &engines, &request, TransferMode::Pull, 0);
    let found = world.records[1].incarnation;
    for (rank, node) in (2..6).enumerate() {
        if rank < 2 {
            assert_eq!(world.polls[&node], KvPoll::Success, "{:?}", world.failures);
        } else {
            let referenced = world.records[0].incarnation;
            assert_eq!(world.failures[&node].cause, Cause::StaleLease { referenced, found });
        }
    }
}

#[test]
fn page_counts_that_cannot_be_the_same_tokens_fail_with_both_values() {
    for mode in [TransferMode::Push, TransferMode::Pull] {
        let (rng, model, engines, mut request) = uneven();
        let geometry = &engines[1].ranks[0];
        let fewer =
            request.prefill[0].pages.len() * engines[0].page_size as usize + 4 * geometry.page_size as usize;
        let pages: Vec<u32> = (0..fewer.div_ceil(geometry.page_size as usize).min(24) as u32).collect();
        let registered = pages.len();
        request.decode.iter_mut().for_each(|lists| lists.pages.clone_from(&pages));
        request.prefix.iter_mut().for_each(|prefix| *prefix = 0);
        let mut world = world(rng, &model, &engines, &request);
        // Nobody gives a prefix away where pages are counted alike.
        serve(&mut world, &engines, &request, mode, 0);
        let sent = request.prefill[0].pages.len();
        let wanted = Cause::PageCount { sent, registered };
        assert!(world.failures.values().any(|failure| failure.cause == wanted), "{:?}", world.failures);
        assert_eq!(world.moved, 0);
    }
}
