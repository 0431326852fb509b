//! Hosts with the real machine, the frames and reads between them, and their memories.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node, NodeConfig, Output};
use kv_core::wire::{Body, Frame, Link};
use kv_core::{
    GrantRef, Incarnation, KvArgs, KvPoll, Lease, Origin, PageList, Pages, PeerId, PostId, RankRecord,
    Region, RegionRole, Room, SessionId, SessionOptions, Time, TransferMode, WayEnd, WorkerRole,
};

use super::choice::Choice;
use super::ledger::{Ledger, Life, violation};
use super::mistake::Mistake;
use super::scope::{Drift, Scope};
use crate::Violation;

/// The prefill host.
pub(super) const P: usize = 0;
/// Its session, in every life: a number says nothing across lives.
pub(super) const SENDER: SessionId = SessionId(1);
/// The lease of the pages.
pub(super) const LEASE: Duration = Duration::from_secs(6);
const ROOM: Room = Room::Number(7);
const PAGE: u64 = 16;
/// Bytes that somebody else has written.
const OTHER: u64 = 999;

/// One host.
pub(super) struct Host {
    pub(super) node: Node,
    pub(super) alive: bool,
    /// Its receiver, if it is a decode host.
    pub(super) session: Option<SessionId>,
    /// That one has its pages.
    pub(super) init: bool,
    life: u8,
    /// Thirty-second parts of a second that its clock counts in a second.
    rate: u64,
    config: NodeConfig,
    peers: BTreeMap<PeerId, Life>,
    /// One number stands for the bytes of a page.
    memory: Vec<u64>,
}

/// A frame in flight.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Letter {
    pub(super) to: Life,
    pub(super) bytes: Bytes,
}

/// A read in flight.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Read {
    pub(super) host: usize,
    pub(super) post: PostId,
    from: Life,
    /// Pages here and there.
    pages: Vec<(usize, usize)>,
    pub(super) copied: bool,
}

/// What may still go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Left {
    pub(super) duplicates: u8,
    pub(super) aborts: u8,
    pub(super) failures: u8,
    pub(super) restarts: u8,
    pub(super) deaths: u8,
}

/// Everything at one moment.
pub(super) struct World {
    pub(super) scope: Scope,
    pub(super) mistake: Option<Mistake>,
    /// Nanoseconds, as the prefill host counts them.
    pub(super) now: u64,
    pub(super) hosts: Vec<Host>,
    pub(super) wire: Vec<Letter>,
    pub(super) reads: Vec<Read>,
    pub(super) left: Left,
    /// The pages of the sender's present life are complete.
    pub(super) sent: bool,
    /// Proofs of death that a plane has yet to give: to whom, of whom.
    pub(super) gone: BTreeSet<(usize, usize)>,
    pub(super) ledger: Ledger,
    /// Until when the sender's pages may be held, by the last grant or heartbeat that arrived.
    held_until: u64,
    /// When a decode host sent which heartbeat or claim, by its own clock. Of use to mistakes only.
    pub(super) beats: BTreeMap<(usize, u64), Time>,
    /// What stood in the last frame to each host, likewise.
    pub(super) links: BTreeMap<usize, Link>,
}

impl Host {
    fn new(host: usize, life: u8, scope: &Scope) -> Option<Host> {
        let engine = if host == P { "prefill".to_owned() } else { format!("decode-{host}") };
        let pages = scope.pages * 2;
        let args = KvArgs::builder(&engine, 0)
            .pages(pages, 16)
            .region(Region::dram(RegionRole::Kv, 0x1_0000, u64::from(pages) * PAGE, PAGE))
            .build()
            .ok()?;
        let incarnation = Incarnation::from_random(1 + host as u64 * 100 + u64::from(life));
        let metadata = Bytes::copy_from_slice(&[host as u8, life]);
        let mut config = NodeConfig::new(args, incarnation, "model", metadata);
        config.limits.max_post_bytes = PAGE;
        let timing = &mut config.timing;
        timing.session_deadline = LEASE * 8;
        timing.retry_first = LEASE / 3;
        timing.retry_max = LEASE;
        timing.keepalive = if scope.impatient { LEASE / 6 } else { LEASE * 10 / 3 };
        timing.peer_timeout = if scope.impatient { LEASE / 2 } else { LEASE * 10 };
        timing.kv_lease_duration = LEASE;
        let rate = match scope.drift {
            _ if host == P => 32,
            Drift::Slow => 31,
            Drift::Equal => 32,
            Drift::Fast => 33,
        };
        let node = Node::new(config.clone());
        let peers = BTreeMap::new();
        let memory = vec![0; pages as usize];
        Some(Host { node, alive: true, session: None, init: false, life, rate, config, peers, memory })
    }

    /// What its clock shows.
    fn clock(&self, now: u64) -> Time {
        Time::from_nanos(now / 32 * self.rate + now % 32 * self.rate / 32)
    }

    /// When its clock will show this.
    pub(super) fn when(&self, at: Time) -> u64 {
        let at = at.as_nanos();
        at / self.rate * 32 + (at % self.rate * 32).div_ceil(self.rate)
    }
}

impl World {
    /// The world in which every receiver has met the sender's host and sent its claim.
    pub(super) fn new(scope: Scope, mistake: Option<Mistake>) -> Result<World, Violation> {
        let hosts = (0..=scope.decodes).map(|host| Host::new(host, 0, &scope)).collect::<Option<Vec<_>>>();
        let hosts = hosts.ok_or_else(|| violation("rests_in_the_end", "no such host".to_owned()))?;
        let Scope { duplicates, aborts, failures, restarts, deaths, .. } = scope;
        let mut world = World {
            scope,
            mistake,
            now: 1_000_000_000,
            hosts,
            wire: Vec::new(),
            reads: Vec::new(),
            left: Left { duplicates, aborts, failures, restarts, deaths },
            sent: false,
            gone: BTreeSet::new(),
            ledger: Ledger::default(),
            held_until: u64::MAX,
            beats: BTreeMap::new(),
            links: BTreeMap::new(),
        };
        world.open_sender()?;
        for host in 1..=scope.decodes {
            world.open_receiver(host)?;
            let claims = |letter: &Letter| {
                Frame::decode(&letter.bytes).is_ok_and(|frame| matches!(frame.body, Body::Claim(_)))
            };
            while let Some(at) = world.wire.iter().position(|letter| !claims(letter)) {
                let letter = world.wire.remove(at);
                world.deliver(letter)?;
            }
        }
        if scope.reading {
            world.apply(Choice::Send)?;
            while !world.wire.is_empty() {
                world.apply(Choice::Deliver { letter: 0, again: false })?;
            }
            for host in 1..=scope.decodes {
                world.apply(Choice::Init(host))?;
            }
        }
        Ok(world)
    }

    pub(super) fn fork(&self) -> World {
        let hosts = self.hosts.iter().map(|host| Host {
            node: host.node.fork(),
            config: host.config.clone(),
            peers: host.peers.clone(),
            memory: host.memory.clone(),
            ..*host
        });
        World {
            hosts: hosts.collect(),
            wire: self.wire.clone(),
            reads: self.reads.clone(),
            gone: self.gone.clone(),
            ledger: self.ledger.clone(),
            beats: self.beats.clone(),
            links: self.links.clone(),
            ..*self
        }
    }

    /// Two worlds with the same number have the same future.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut state = DefaultHasher::new();
        (self.now, self.left, self.sent, &self.gone, self.held_until).hash(&mut state);
        for host in &self.hosts {
            let node = if host.alive { host.node.fingerprint() } else { 0 };
            (node, host.alive, host.init, host.life, &host.memory, &host.peers).hash(&mut state);
        }
        self.reads.hash(&mut state);
        for entry in self.ledger.states() {
            (entry.0, entry.1, entry.2.map(|poll| poll as u8), entry.3, entry.4).hash(&mut state);
        }
        // In which order frames were sent does not matter.
        let sum = self.wire.iter().map(|letter| {
            let mut hasher = DefaultHasher::new();
            letter.hash(&mut hasher);
            hasher.finish()
        });
        sum.fold(0_u64, u64::wrapping_add).hash(&mut state);
        if self.mistake.is_some() {
            self.beats.hash(&mut state);
        }
        state.finish()
    }

    pub(super) fn life(&self, host: usize) -> Life {
        (host, self.hosts[host].life)
    }

    fn options(&self) -> SessionOptions {
        let lease =
            if self.scope.fixed { Lease::Fixed(self.lease()) } else { Lease::Renewable(self.lease()) };
        SessionOptions { mode: Some(TransferMode::Pull), lease: Some(lease), ..SessionOptions::default() }
    }

    fn open_sender(&mut self) -> Result<(), Violation> {
        let (receivers, options) = (self.scope.readers, Box::new(self.options()));
        self.command(P, Command::OpenSender { session: SENDER, room: ROOM, receivers, options })?;
        let num_pages = self.scope.pages as usize;
        self.command(P, Command::InitSender { session: SENDER, num_pages, aux: None })
    }

    fn open_receiver(&mut self, host: usize) -> Result<(), Violation> {
        let session = SessionId(10 + host as u64);
        self.hosts[host].session = Some(session);
        let incarnation = self.hosts[P].config.incarnation;
        let grant = GrantRef { incarnation, nonce: SENDER, pages: Some(self.request()) };
        let grants = if self.scope.by_room { Vec::new() } else { vec![grant] };
        let options = Box::new(SessionOptions { grants, ..self.options() });
        let bootstrap_addr = "model:1".to_owned();
        self.command(host, Command::OpenReceiver { session, room: ROOM, bootstrap_addr, options })
    }

    /// The prefill scheduler has computed its pages.
    pub(super) fn send_pages(&mut self) -> Result<(), Violation> {
        self.sent = true;
        let request = self.request();
        for (position, page) in request.iter().enumerate() {
            let bytes = granted_bytes(self.hosts[P].life, position);
            self.hosts[P].memory[page as usize] = bytes;
        }
        self.held_until = self.now + LEASE.as_nanos() as u64;
        self.ledger.gives(self.life(P), SENDER, &request);
        let Ok(chunk) = Pages::claim(request) else { return Ok(()) };
        self.command(P, Command::Send { session: SENDER, chunk })
    }

    /// True if the host has a session that has not ended.
    pub(super) fn is_open(&self, host: usize) -> bool {
        let session = if host == P { Some(SENDER) } else { self.hosts[host].session };
        let poll = session.and_then(|session| self.ledger.poll(self.life(host), session));
        self.hosts[host].alive && poll.is_some_and(|poll| !poll.is_terminal())
    }

    pub(super) fn command(&mut self, host: usize, command: Command) -> Result<(), Violation> {
        self.input(host, Input::Command(command))
    }

    pub(super) fn deliver(&mut self, letter: Letter) -> Result<(), Violation> {
        let host = letter.to.0;
        if !self.hosts[host].alive {
            return Ok(());
        }
        let Some(bytes) = self.tampered(&letter)? else { return Ok(()) };
        let renews = host == P
            && !self.scope.fixed
            && Frame::decode(&bytes).is_ok_and(|frame| matches!(frame.body, Body::Heartbeat(_)));
        if renews {
            let until = self.now + LEASE.as_nanos() as u64 * 2 / 3;
            // Before the grant it means nothing.
            self.held_until = self.held_until.max(until);
        }
        self.input(host, Input::Frame { from: Origin(1), frame: bytes })
    }

    pub(super) fn ring(&mut self, host: usize) -> Result<(), Violation> {
        if self.is_deaf(host) {
            return self.check_held(host);
        }
        self.input(host, Input::Timeout)?;
        let host = &self.hosts[host];
        match host.node.next_timeout() {
            Some(next) if next <= host.clock(self.now) => {
                Err(violation("rests_in_the_end", "a timer that has rung is still due".to_owned()))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn input(&mut self, host: usize, input: Input) -> Result<(), Violation> {
        let now = self.hosts[host].clock(self.now);
        self.hosts[host].node.handle(now, input);
        while let Some(output) = self.hosts[host].node.poll_output() {
            self.carry_out(host, output)?;
        }
        self.check_held(host)
    }

    fn check_held(&self, host: usize) -> Result<(), Violation> {
        let held = self.ledger.holds(self.life(P), SENDER);
        if host == P && held && self.now >= self.held_until {
            let seconds = |nanos| nanos as f64 / 1e9;
            let what = format!("held after {} s, it is {} s", seconds(self.held_until), seconds(self.now));
            return Err(violation("pages_come_back_with_the_lease", what));
        }
        Ok(())
    }

    fn carry_out(&mut self, host: usize, output: Output) -> Result<(), Violation> {
        let life = self.life(host);
        match output {
            Output::Connect { peer, metadata } => {
                if let [host_there, life_there] = metadata[..] {
                    self.hosts[host].peers.insert(peer, (host_there.into(), life_there));
                }
            }
            Output::Disconnect { peer } => drop(self.hosts[host].peers.remove(&peer)),
            Output::Send { peer, frame } => {
                if let Some(&to) = self.hosts[host].peers.get(&peer) {
                    self.note(host, to, &frame);
                    self.wire.push(Letter { to, bytes: frame });
                    if self.wire.len() > self.scope.frames {
                        self.wire.remove(0);
                    }
                }
            }
            Output::Post { peer, post } => {
                let pages = post.descs.iter().flat_map(|desc| {
                    let (here, there) = (desc.local_offset / PAGE, desc.remote_offset / PAGE);
                    (0..desc.len / PAGE).map(move |page| ((here + page) as usize, (there + page) as usize))
                });
                let from = self.hosts[host].peers.get(&peer).copied().unwrap_or((P, u8::MAX));
                let pages = pages.collect();
                self.reads.push(Read { host, post: post.id, from, pages, copied: false });
            }
            // A plane may ignore it, as NIXL does.
            Output::Cancel { .. } | Output::Permit { .. } | Output::Revoke { .. } => {}
            Output::Lookup { lookup, .. } => {
                let config = &self.hosts[P].config;
                let record = RankRecord::serving_kv(
                    (config.args.worker().clone(), config.incarnation),
                    WorkerRole::Prefill,
                    (&config.plane, config.metadata.clone()),
                    config.args.geometry(),
                )
                .map_err(|error| violation("record", error.to_string()))?;
                let now = self.hosts[host].clock(self.now);
                self.hosts[host].node.handle(now, Input::Found { lookup, ranks: vec![record] });
            }
            Output::Status { session, poll, failure } => {
                for _ in 0..self.reports(poll) {
                    self.ledger.status(life, session, poll, failure.is_some())?;
                }
                self.after_status(host, poll);
                if poll == KvPoll::Success {
                    self.check_success(host, session)?;
                }
            }
            Output::Release { session, pages } => self.release(host, session, pages.list())?,
            // None were given.
            Output::ReleaseGroups { .. } => {}
        }
        Ok(())
    }

    fn release(&mut self, host: usize, session: SessionId, pages: &PageList) -> Result<(), Violation> {
        let life = self.life(host);
        for _ in 0..self.releases() {
            self.ledger.back(life, session, pages)?;
        }
        if host == P {
            self.overwrite();
        }
        Ok(())
    }

    /// Somebody else uses the sender's pages.
    pub(super) fn overwrite(&mut self) {
        self.hosts[P].memory.fill(OTHER);
    }

    fn check_success(&self, host: usize, session: SessionId) -> Result<(), Violation> {
        if host == P {
            let (done, readers) = (self.ledger.successes(), self.scope.readers as usize);
            if done < readers {
                let what = format!("the sender succeeds, but only {done} of {readers} receivers do");
                return Err(violation("success_is_mutual", what));
            }
            return Ok(());
        }
        let Some(pages) = self.ledger.given(self.life(host), session) else { return Ok(()) };
        let bytes: Vec<u64> = pages.iter().map(|page| self.hosts[host].memory[page as usize]).collect();
        let granted = |life: u8| (0..bytes.len()).map(move |position| granted_bytes(life, position));
        // References are to the first life.
        let lives = if self.scope.by_room { self.hosts[P].life } else { 0 };
        if (0..=lives).any(|life| granted(life).eq(bytes.iter().copied())) {
            return Ok(());
        }
        let what = format!("host {host} reports success on {bytes:?}, which no grant named");
        Err(violation("success_means_granted_bytes", what))
    }

    /// True if the memory that the read is of is still there.
    pub(super) fn can_copy(&self, read: &Read) -> bool {
        read.from == self.life(read.from.0) || self.reads_successors()
    }

    pub(super) fn copy(&mut self, read: usize) {
        let Some(read) = self.reads.get_mut(read) else { return };
        read.copied = true;
        for &(here, there) in &read.pages {
            self.hosts[read.host].memory[here] = self.hosts[read.from.0].memory[there];
        }
    }

    pub(super) fn restart(&mut self) -> Result<(), Violation> {
        let life = self.hosts[P].life + 1;
        let Some(host) = Host::new(P, life, &self.scope) else { return Ok(()) };
        self.hosts[P] = host;
        self.overwrite();
        self.gone.extend((1..self.hosts.len()).filter(|&d| self.hosts[d].alive).map(|d| (d, P)));
        self.held_until = u64::MAX;
        self.open_sender()?;
        self.send_pages()
    }

    pub(super) fn die(&mut self, host: usize) {
        self.hosts[host].alive = false;
        self.reads.retain(|read| read.host != host);
        self.wire.retain(|letter| letter.to.0 != host);
        self.gone.retain(|&(told, _)| told != host);
        self.gone.insert((P, host));
    }

    /// A plane proves that a former life, or a dead host, is gone.
    pub(super) fn tell_gone(&mut self, host: usize, other: usize) -> Result<(), Violation> {
        self.gone.remove(&(host, other));
        let dead =
            |life: Life| life.0 == other && (!self.hosts[other].alive || life.1 < self.hosts[other].life);
        let peers = self.hosts[host].peers.iter().filter(|&(_, &life)| dead(life)).map(|(&peer, _)| peer);
        let peers: Vec<PeerId> = peers.collect();
        for peer in peers {
            self.input(host, Input::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } })?;
        }
        Ok(())
    }

    /// Remembers what mistakes are made of.
    fn note(&mut self, host: usize, to: Life, frame: &Bytes) {
        if self.mistake.is_none() {
            return;
        }
        let Ok(frame) = Frame::decode(frame) else { return };
        self.links.insert(to.0, frame.link);
        let beat = match frame.body {
            Body::Claim(claim) => claim.beat,
            Body::Heartbeat(heartbeat) => heartbeat.beat,
            _ => return,
        };
        self.beats.insert((host, beat), self.hosts[host].clock(self.now));
    }

    /// What the clock of a host shows now.
    pub(super) fn clock(&self, host: usize) -> Time {
        self.hosts[host].clock(self.now)
    }
}

/// What the sender's pages hold in one of its lives.
fn granted_bytes(life: u8, position: usize) -> u64 {
    100 + u64::from(life) * 100 + position as u64
}
