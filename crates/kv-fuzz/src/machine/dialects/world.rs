//! The surroundings of a machine of any dialect: its scheduler, its transport and its clock, moved by a script.

mod scheduler;

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::layout::RegionRole;
use kv_core::proto::Command;
use kv_core::{
    BootstrapError, Directions, KvArgs, KvPoll, LookupId, Op, Origin, PageList, PagePool, PeerId, Post,
    SessionId, Time, TransportError, WayEnd, WriteFence,
};
use kv_interop::message::{Incoming, Way};
use kv_poll::KvMachine;

use super::super::books::{self, Books};
use super::super::cost::{Cost, Moment, Paid};
use super::super::{Charge, MAX_INPUTS, Outcome, Reach};
use super::{Dialect, HELD, Input, Output, PAGES, Resource, Script};
use crate::alloc;

/// Most timers that run while time passes in one step. Both dialects have timers of a second.
const MAX_TIMERS: usize = 20_000;
/// Bytes for which a list in msgpack may ask before its elements are read, divided by what a byte of input may cost.
const LENT_TO_A_LIST: u64 = (3 << 20) / super::super::ALLOCATED.per_byte;

/// A way that the machine has opened.
struct Road {
    way: Way,
    connected: bool,
    /// True once the transport has said that the way has ended. The machine has not forgotten the peer yet.
    ended: bool,
}

/// One machine, its surroundings, and the script that moves both.
pub(super) struct World<'a, D> {
    script: Script<'a>,
    /// The length of the whole script, in bytes.
    length: usize,
    dialect: D,
    machine: KvMachine,
    args: KvArgs,
    now: Time,
    pool: PagePool,
    books: Books,
    opened: u64,
    /// The deadlines of sessions that have not ended.
    deadlines: BTreeMap<SessionId, Time>,
    roads: BTreeMap<PeerId, Road>,
    /// The last id of a way.
    last: PeerId,
    posts: Vec<(PeerId, Post)>,
    lookups: Vec<LookupId>,
    /// The largest frame so far, in bytes.
    largest: u64,
    /// What this thread held before the machine was made.
    before: i64,
}

impl<'a, D: Dialect> World<'a, D> {
    pub(super) fn new(mut script: Script<'a>) -> World<'a, D> {
        let (length, before) = (script.0.len(), alloc::held());
        let (dialect, args, machine) = D::new(&mut script);
        World {
            script,
            length,
            dialect,
            machine,
            args,
            now: Time::from_nanos(1_000_000_000),
            pool: PagePool::new(PAGES),
            books: Books::default(),
            opened: 0,
            deadlines: BTreeMap::new(),
            roads: BTreeMap::new(),
            last: PeerId(0),
            posts: Vec::new(),
            lookups: Vec::new(),
            largest: 0,
            before,
        }
    }

    pub(super) fn run(mut self) -> Outcome {
        while !self.script.is_empty() && self.books.inputs() < MAX_INPUTS {
            self.books.step(self.length - self.script.0.len());
            self.next();
        }
        self.finish();
        self.books.into_outcome()
    }

    fn next(&mut self) {
        match self.script.byte() {
            0..=19 => self.open(true),
            20..=39 => self.open(false),
            40..=79 => self.command(),
            80..=179 => self.say(),
            180..=194 => self.end_post(),
            195..=209 => self.connect(),
            210..=219 => self.serve(),
            220..=231 => self.lookup(),
            232..=237 => self.lose(),
            238..=249 => {
                let next = self.machine.next_timeout().unwrap_or(self.now);
                self.pass(next.since(self.now).min(Duration::from_secs(400)));
            }
            _ => {
                let step = Duration::from_micros(self.script.number() % 30_000_000);
                self.pass(step);
            }
        }
    }

    fn say(&mut self) {
        let (what, incoming) = self.dialect.say(&mut self.script);
        let copies = if self.script.byte() < 16 { 1 + u16::from(self.script.byte()) } else { 1 };
        self.hear(what, incoming, copies);
    }

    fn hear(&mut self, what: &'static str, incoming: Incoming, copies: u16) {
        self.dialect.arrives(&incoming);
        let frame = incoming.encode();
        drop(incoming);
        for _ in 0..copies {
            let frame = frame.clone();
            self.input(what, frame.len() as u64, Input::Frame { from: Origin(0), frame });
        }
    }

    /// Everybody does what the machine asks for.
    fn serve(&mut self) {
        for _ in 0..4 {
            while let Some(lookup) = self.lookups.pop() {
                let ranks = self.dialect.ranks(&mut Script(&[]));
                self.input("Found", 600 * ranks.len() as u64, Input::Found { lookup, ranks });
            }
            while let Some(incoming) = self.dialect.serve() {
                self.hear("Answer", incoming, 1);
            }
            let opening = self.roads.iter().filter(|(_, road)| !road.connected && !road.ended);
            for peer in opening.map(|(peer, _)| *peer).collect::<Vec<_>>() {
                self.connected(peer);
            }
        }
    }

    fn end_post(&mut self) {
        if self.posts.is_empty() {
            return;
        }
        let at = usize::from(self.script.byte()) % self.posts.len();
        let (_, post) = self.posts.remove(at);
        let result = if self.script.rarely() { Err(TransportError::Cancelled) } else { Ok(()) };
        self.posted(&post, result);
    }

    fn posted(&mut self, post: &Post, result: Result<(), TransportError>) {
        let what = if post.op == Op::Write { "Written" } else { "Read" };
        self.input(what, 0, Input::Posted { post: post.id, result });
    }

    fn connect(&mut self) {
        let at = usize::from(self.script.below(3));
        let opening = self.roads.iter().filter(|(_, road)| !road.connected && !road.ended);
        let Some(peer) = opening.map(|(peer, _)| *peer).nth(at) else { return };
        if self.script.byte() < 24 {
            self.end(peer);
            let error = TransportError::Metadata("of another host");
            return self.input("ConnectFailed", 0, Input::ConnectFailed { peer, error });
        }
        self.connected(peer);
    }

    fn connected(&mut self, peer: PeerId) {
        if let Some(road) = self.roads.get_mut(&peer) {
            road.connected = true;
        }
        let (directions, fence) = (Directions::BOTH, WriteFence::AtDeath);
        self.input("Connected", 0, Input::Connected { peer, directions, fence });
    }

    fn lookup(&mut self) {
        let Some(lookup) = self.lookups.pop() else { return };
        if self.script.byte() < 24 {
            let error = BootstrapError::UnknownRank;
            return self.input("LookupFailed", 0, Input::LookupFailed { lookup, error });
        }
        let ranks = self.dialect.ranks(&mut self.script);
        self.input("Found", 600 * ranks.len() as u64, Input::Found { lookup, ranks });
    }

    /// A way is lost, or the engine at its end is dead.
    fn lose(&mut self) {
        let at = usize::from(self.script.below(8));
        let open = self.roads.iter().filter(|(_, road)| !road.ended);
        let Some(peer) = open.map(|(peer, _)| *peer).nth(at) else { return };
        let quiet_after = Duration::from_millis(self.script.number() % 100_000);
        let end = if self.script.flag() { WayEnd::Lost } else { WayEnd::Dead { quiet_after } };
        self.gone(peer, end);
    }

    fn end(&mut self, peer: PeerId) {
        if let Some(road) = self.roads.get_mut(&peer) {
            road.ended = true;
        }
    }

    fn gone(&mut self, peer: PeerId, end: WayEnd) {
        self.end(peer);
        if let Some(road) = self.roads.get(&peer) {
            self.dialect.gone(&road.way, end);
        }
        self.input("PeerGone", 0, Input::PeerGone { peer, end });
    }

    /// Lets time pass. Every timer comes when it is due.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        let mut timers = 0;
        while let Some(due) = self.machine.next_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.input("Timeout", 0, Input::Timeout);
            let next = self.machine.next_timeout();
            assert!(next.is_none_or(|next| next > self.now), "a timer that is due was not run");
            timers += 1;
            assert!(timers < MAX_TIMERS, "the timers do not let the time pass");
        }
        self.now = until;
    }

    fn input(&mut self, what: &'static str, bytes: u64, input: Input) {
        self.largest = self.largest.max(bytes);
        let own = self.books.own();
        let start = Moment::now();
        self.machine.handle(self.now, input);
        let handled = start.cost_since(0);
        let outputs: Vec<Output> = std::iter::from_fn(|| self.machine.poll_output()).collect();
        let said = outputs.iter().map(|output| books::size(output, books::size_of_resource)).sum();
        // Each output of the machine is queued once more, and every way has a timer.
        let own = own + (outputs.len() + self.roads.len() + self.posts.len()) as u64;
        let lent = if what == "Answer" { LENT_TO_A_LIST } else { 0 };
        let paid = Paid { bytes: bytes + lent, own };
        self.books.charge(Charge { what, cost: Cost { said, ..handled }, paid }, &outputs);
        self.books.note_reach(Reach {
            frame: bytes,
            own,
            sessions: self.deadlines.len(),
            peers: self.roads.len(),
            posts: self.posts.len(),
            ..Reach::default()
        });
        outputs.into_iter().for_each(|output| self.carry_out(output));
        let late = self
            .deadlines
            .iter()
            .find(|(_, deadline)| **deadline < self.now || what == "Timeout" && **deadline == self.now);
        assert!(late.is_none(), "{late:?} has not ended at {:?}", self.now);
        self.check_memory();
    }

    fn check_memory(&self) {
        let held = (alloc::held() - self.before).max(0) as u64;
        let own = self.books.own() + self.opened + (self.roads.len() + self.posts.len()) as u64;
        let most = HELD.of(Paid { bytes: self.largest, own });
        assert!(held <= most, "{held} bytes are held for {own} things and frames of {} bytes", self.largest);
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Connect { peer, transport } => {
                assert!(peer > self.last, "{peer:?} was used before");
                self.last = peer;
                let way = Way::of(&transport);
                assert!(way.is_some(), "{transport:?} is no way to a foreign engine");
                if let Some(way) = way {
                    self.roads.insert(peer, Road { way, connected: false, ended: false });
                }
            }
            Output::Disconnect { peer } => drop(self.roads.remove(&peer)),
            Output::Send { peer, frame } => {
                let road = self.roads.get(&peer);
                assert!(road.is_some(), "a frame to {peer:?}, who was disconnected");
                if let Some(road) = road {
                    self.dialect.hears(peer, &road.way, &frame);
                }
            }
            Output::Post { peer, post } => {
                self.check_post(peer, &post);
                self.posts.push((peer, post));
            }
            Output::Lookup { lookup, .. } => self.lookups.push(lookup),
            Output::Status { session, poll, failure } => {
                assert_eq!(failure.is_some(), poll == KvPoll::Failed, "{session}");
                self.books.told(session, poll);
                if poll.is_terminal() {
                    self.deadlines.remove(&session);
                }
            }
            Output::Release { session, resource } => {
                self.books.released(session);
                if let Resource::Pages(pages) = resource {
                    self.check_quiet(pages.list());
                    self.dialect.comes_back(session, pages.list());
                    let back = self.pool.release(pages);
                    assert!(back.is_ok(), "{session} hands back what it has not: {back:?}");
                }
            }
            Output::Revoke { peer } => panic!("no dialect can revoke the right to write, of {peer:?}"),
            Output::Cancel { .. } | Output::Permit { .. } => {}
        }
    }

    /// A post is inside the memory of both sides.
    fn check_post(&mut self, peer: PeerId, post: &Post) {
        let road = self.roads.get(&peer);
        let Some(Road { way: way @ Way::Agent { regions, .. }, .. }) = road else {
            panic!("a post to {peer:?}, who is no agent");
        };
        assert!((1..=self.args.max_sge()).contains(&post.descriptors.len()), "{}", post.descriptors.len());
        for descriptor in &post.descriptors {
            let inside = |offset: u64, len| offset.checked_add(descriptor.len).is_some_and(|end| end <= len);
            let here = self.args.regions().get(descriptor.local_region as usize).map(|region| region.len);
            let there = regions.get(descriptor.remote_region as usize).map(|region| region.len);
            assert!(
                descriptor.len > 0
                    && here.is_some_and(|len| inside(descriptor.local_offset, len))
                    && there.is_some_and(|len| inside(descriptor.remote_offset, len)),
                "{descriptor:?} leaves the memory: {here:?} bytes here, {there:?} bytes there"
            );
        }
        self.dialect.posted(way, post);
    }

    /// No post in flight touches the pages.
    fn check_quiet(&self, pages: &PageList) {
        let touched = self.posts.iter().flat_map(|(_, post)| &post.descriptors).find(|descriptor| {
            let region = self.args.regions().get(descriptor.local_region as usize);
            let Some(region) = region.filter(|region| region.role == RegionRole::Kv) else { return false };
            let first = descriptor.local_offset / region.item_len;
            let last = (descriptor.local_offset + descriptor.len - 1) / region.item_len;
            pages.iter().any(|page| (first..=last).contains(&u64::from(page)))
        });
        assert!(touched.is_none(), "{pages:?} come back while {touched:?} is in flight");
    }

    /// The worker stops and its peers die: every session ends, and everything that was lent comes back.
    fn finish(&mut self) {
        self.input("Shutdown", 0, Input::Command(Command::Shutdown));
        self.books.check_all_ended();
        for _ in 0..100 {
            for (_, post) in std::mem::take(&mut self.posts) {
                self.posted(&post, Ok(()));
            }
            // Engines that are asked again are found dead.
            for peer in self.roads.keys().copied().collect::<Vec<_>>() {
                if self.roads.get(&peer).is_some_and(|road| !road.connected && !road.ended) {
                    self.connected(peer);
                }
                if self.roads.get(&peer).is_some_and(|road| !road.ended) {
                    self.gone(peer, WayEnd::Dead { quiet_after: Duration::ZERO });
                }
            }
            if self.machine.quarantine().is_empty() && self.posts.is_empty() {
                break;
            }
            let Some(next) = self.machine.next_timeout() else { break };
            self.pass(next.since(self.now).max(Duration::from_millis(1)));
        }
        let (out, held) = (self.pool.num_out(), self.machine.quarantine());
        assert!(out == 0 && held.is_empty(), "{} never gives {out} pages back: {held:?}", D::NAME);
    }
}
