//! The machine of one worker: who gets which input.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::directory::Directory;
use super::grant::EndedGrants;
use super::io::{Input, NodeConfig, Output};
use super::peer::{Peer, Peers};
use super::posting::Posting;
use super::random::Random;
use super::receive::ReceiveSession;
use super::rendezvous::Rendezvous;
use super::send::SendSession;
use super::timer::{Timer, Timers};
use crate::command::Command;
use crate::error::{Cause, Obstacle, TransferError};
use crate::id::{PeerId, SessionId};
use crate::layout::HeldLayers;
use crate::meter::{each, step};
use crate::plane::Origin;
use crate::poll::KvPoll;
use crate::time::Time;
use crate::wire::{Body, Frame, Link};

/// The protocol machine of one worker. It does no I/O and reads no clock: the same machine runs
/// under the worker thread over real planes, and under the simulator in virtual time.
///
/// # Contract
///
/// - **Inputs**: [`handle`](Node::handle), one at a time, with the time now. Times never go back.
/// - **Outputs**: after every input, [`poll_output`](Node::poll_output) is called until it
///   returns `None`, and each output is carried out in order, before the next input.
/// - **Time**: [`Input::Timeout`] is due at [`next_timeout`](Node::next_timeout). Late is allowed,
///   early does nothing.
/// - **Ends**: every session that was opened gets exactly one final [`Output::Status`], at the
///   latest at its deadline; every `Pages` and `Groups` token that went in comes out in exactly
///   one [`Output::Release`].
///
/// ```
/// use kv_core::proto::{Command, Input, Node, NodeConfig, Output};
/// use kv_core::{Incarnation, KvArgs, KvPoll, Region, RegionRole, Room, SessionId, Time};
///
/// let args = KvArgs::builder("prefill", 0)
///     .pages(4, 16)
///     .region(Region::dram(RegionRole::Kv, 0x1000, 4 * 64, 64))
///     .build()?;
/// let mut node = Node::new(NodeConfig::new(args, Incarnation::from_random(7), "local", Default::default()));
/// let open = Command::OpenSender {
///     session: SessionId(1), room: Room::Number(9), receivers: 1, options: Default::default(),
/// };
/// node.handle(Time::ZERO, Input::Command(open));
/// assert!(matches!(
///     node.poll_output(),
///     Some(Output::Status { poll: KvPoll::Bootstrapping, .. })
/// ));
/// assert_eq!(node.poll_output(), None);
/// # Ok::<(), kv_core::ArgsError>(())
/// ```
pub struct Node {
    pub(super) config: NodeConfig,
    pub(super) now: Time,
    pub(super) random: Random,
    pub(super) timers: Timers,
    pub(super) peers: Peers,
    pub(super) directory: Directory,
    pub(super) rendezvous: Rendezvous,
    pub(super) posting: Posting,
    pub(super) senders: BTreeMap<SessionId, SendSession>,
    pub(super) held_layers: HeldLayers,
    pub(super) receivers: BTreeMap<SessionId, ReceiveSession>,
    pub(super) stopping: bool,
    pub(super) frames_dropped: u64,
    pub(super) links_drawn: u32,
    pub(super) ended_grants: EndedGrants,
    pub(super) pages_leased: usize,
    pub(super) outputs: VecDeque<Output>,
}

/// What a node holds at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeGauges {
    /// Peers known.
    pub peers: usize,
    /// Sending sessions that have not ended, or whose pages have not come back.
    pub senders: usize,
    /// Receiving sessions likewise.
    pub receivers: usize,
    /// Registrations that wait for a sender.
    pub registrations: usize,
    /// Attempts of peers that are not over, the waiting registrations included, and results kept for them.
    pub incoming: usize,
    /// Those of them that are results of attempts that are over.
    pub results: usize,
    /// Runs of peers' attempts that are noted as over.
    pub closed_runs: usize,
    /// Runs of pages in waiting registrations.
    pub waiting_runs: usize,
    /// Receivers that sending sessions have met.
    pub targets: usize,
    /// Receivers and sources that have something to post.
    pub queued: usize,
    /// Numbers of heartbeats, claims and questions that may still be answered.
    pub beats: usize,
    /// Addresses of bootstrap servers whose answers are remembered.
    pub addresses: usize,
    /// Failed rooms remembered for latecomers.
    pub failed_rooms: usize,
    /// Posts in flight.
    pub posts: usize,
    /// Lookups under way.
    pub lookups: usize,
    /// Timers set.
    pub timers: usize,
    /// Complete pages that are pinned for readers.
    pub pages_leased: usize,
    /// Ended grants remembered for latecomers.
    pub ended_grants: usize,
    /// Attempts at peers that are over, and not acknowledged as such.
    pub releasing: usize,
    /// Frames dropped since the start: damaged, or of no conversation that is known.
    pub frames_dropped: u64,
}

impl Node {
    /// A machine with nothing in it.
    pub fn new(mut config: NodeConfig) -> Node {
        config.timing = config.timing.sane();
        Node {
            // Two lives of a worker draw different links, even if they are given one seed.
            random: Random::new(config.seed ^ config.incarnation.get().rotate_left(32)),
            posting: Posting::new(config.args.max_inflight(), config.timing.keepalive),
            held_layers: HeldLayers::new(config.args.geometry()),
            config,
            now: Time::ZERO,
            timers: Timers::default(),
            peers: Peers::default(),
            directory: Directory::default(),
            rendezvous: Rendezvous::default(),
            senders: BTreeMap::new(),
            receivers: BTreeMap::new(),
            stopping: false,
            frames_dropped: 0,
            links_drawn: 0,
            ended_grants: EndedGrants::default(),
            pages_leased: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Takes one input. Afterwards [`poll_output`](Node::poll_output) must be drained.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.now = self.now.max(now);
        self.excuse_peers();
        match input {
            Input::Command(command) => self.on_command(command),
            Input::Frame { from, frame } => self.on_frame(from, frame),
            Input::Posted { post, result } => self.on_posted(post, result),
            Input::Connected { peer, directions, fence } => self.on_connected(peer, directions, fence),
            Input::ConnectFailed { peer, error } => self.on_connect_failed(peer, error),
            Input::PeerGone { peer, end } => self.on_peer_gone(peer, end),
            Input::Revoked { peer } => self.on_revoked(peer),
            Input::Found { lookup, ranks } => self.on_found(lookup, ranks),
            Input::LookupFailed { lookup, error } => self.on_lookup_failed(lookup, error),
            Input::Timeout => {}
        }
        while let Some(timer) = self.timers.pop_due(self.now) {
            step(1);
            self.on_timer(timer);
        }
        self.pump_posts();
    }

    /// A timer that is very late says that this worker was stopped, or got no processor: nobody
    /// listened meanwhile, so that peers were silent says nothing about them.
    fn excuse_peers(&mut self) {
        let late = self.timers.next().map_or(std::time::Duration::ZERO, |due| self.now.since(due));
        if late >= self.config.timing.keepalive {
            self.peers.excuse(late, self.now);
        }
    }

    /// The next thing to do; `None` when drained.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Input::Timeout`] is due; `None` if nothing waits for time to pass.
    pub fn next_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// What the node holds at the moment.
    pub fn gauges(&self) -> NodeGauges {
        let sum = |of: &dyn Fn(&Peer) -> usize| self.peers.iter().map(|(_, peer)| of(peer)).sum();
        NodeGauges {
            peers: self.peers.len(),
            senders: self.senders.len(),
            receivers: self.receivers.len(),
            registrations: self.rendezvous.registrations.len(),
            incoming: sum(&|peer| peer.incoming.live_len() + peer.incoming.results_len()),
            results: sum(&|peer| peer.incoming.results_len()),
            closed_runs: sum(&|peer| peer.incoming.closed_len()),
            waiting_runs: self.rendezvous.waiting.runs,
            targets: self.senders.values().map(|sender| sender.targets.len()).sum(),
            queued: self.posting.queued(),
            beats: sum(&|peer| peer.heart.beats.len() + peer.writes_out.asked()),
            addresses: self.directory.addresses(),
            failed_rooms: self.rendezvous.failed_senders.len() + self.rendezvous.failed_receivers.len(),
            posts: self.posting.in_flight(),
            lookups: self.directory.len(),
            timers: self.timers.len(),
            pages_leased: self.pages_leased,
            ended_grants: self.ended_grants.len(),
            releasing: sum(&|peer| peer.releasing.len()),
            frames_dropped: self.frames_dropped,
        }
    }

    /// Complete pages that are pinned for readers, at the moment.
    pub fn pages_leased(&self) -> usize {
        self.pages_leased
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::OpenSender { session, room, receivers, options } => {
                self.open_sender(session, room, receivers, *options);
            }
            Command::InitSender { session, num_pages, aux } => self.init_sender(session, num_pages, aux),
            Command::Send { session, chunk } => self.send_chunk(session, chunk),
            Command::BeginChunk { session, chunk } => {
                self.begin_chunk(session, chunk);
            }
            Command::LayersFinal { session, layers } => {
                self.layers_final(session, layers.chunk, layers.layers);
            }
            Command::FenceFailed { session, chunk, error } => {
                self.end_session(session, Cause::Fence { chunk, error });
            }
            Command::OpenReceiver { session, room, bootstrap_addr, options } => {
                self.open_receiver(session, room, bootstrap_addr, *options);
            }
            Command::InitReceiver { session, pages, aux } => self.init_receiver(session, pages, aux),
            Command::Groups { session, groups } => self.take_groups(session, groups),
            Command::Abort { session } => self.end_session(session, Cause::Aborted),
            Command::Shutdown => {
                self.stopping = true;
                let sessions: Vec<SessionId> =
                    self.senders.keys().chain(self.receivers.keys()).copied().collect();
                for session in each(sessions) {
                    self.end_session(session, Cause::WorkerStopped);
                }
            }
        }
    }

    /// Fails a session, whichever kind it is. No effect on one that has ended.
    pub(super) fn end_session(&mut self, session: SessionId, cause: Cause) {
        if self.senders.contains_key(&session) {
            self.fail_sender(session, cause);
        } else {
            self.fail_receiver(session, cause);
        }
    }

    fn on_frame(&mut self, from: Origin, bytes: Bytes) {
        let Ok(frame) = Frame::decode(&bytes) else {
            self.frames_dropped += 1;
            return;
        };
        let Some((peer, origin)) = self.peers.with_link(frame.link) else {
            return match frame.body {
                Body::Hello(hello) => self.on_hello(from, hello),
                _ => self.frames_dropped += 1,
            };
        };
        match frame.body {
            Body::Hello(hello) => return self.on_hello(from, hello),
            // The answers to a hello are known by their nonce, and may come by another connection.
            Body::Welcome(welcome) => return self.on_welcome(from, peer, welcome),
            Body::Refused(refused) => return self.on_refused(from, peer, refused),
            // Whoever else knows the link has no right to it.
            _ if origin.is_some_and(|origin| origin != from) => {
                self.frames_dropped += 1;
                return;
            }
            _ => self.heard_from(peer),
        }
        match frame.body {
            Body::Hello(_) | Body::Welcome(_) | Body::Refused(_) => {}
            Body::Register(register) => self.on_register(peer, register),
            Body::Registered(registered) => self.on_registered(peer, registered.attempt),
            Body::Done(done) => self.on_done(peer, done),
            Body::Progress(progress) => self.on_progress(peer, progress),
            Body::Failed(failed) => self.on_failed(peer, failed),
            Body::Abort(abort) => self.on_abort(peer, abort),
            Body::AbortAck(ack) => self.on_abort_ack(peer, ack.attempt),
            Body::Finish(finish) => self.on_finish(peer, finish),
            Body::Ping(ping) => self.on_ping(peer, ping),
            Body::Pong(pong) => self.on_floor(peer, pong.floor),
            Body::Claim(claim) => self.on_claim(peer, claim),
            Body::Granted(granted) => self.on_granted(peer, granted),
            Body::Heartbeat(heartbeat) => self.on_heartbeat(peer, heartbeat),
            Body::HeartbeatAck(ack) => self.on_heartbeat_ack(peer, ack),
            Body::Release(release) => self.on_release(peer, release),
            Body::Released(released) => self.on_released(peer, released),
            Body::AskWrite(ask) => self.on_ask_write(peer, ask),
            Body::MayWrite(answer) => self.on_may_write(peer, answer),
        }
    }

    fn on_timer(&mut self, timer: Timer) {
        match timer {
            Timer::Deadline(session) => self.on_deadline(session),
            Timer::Repeat(session) => self.on_repeat(session),
            Timer::Quiet(session, peer) => self.on_quiet(session, peer),
            Timer::Peer(peer) => self.on_peer_tick(peer),
            Timer::Lookup(lookup) => self.ask_again(lookup),
            Timer::Registration(peer, attempt) => self.on_registration_expired(peer, attempt),
            Timer::Lease(session) => self.on_lease(session),
            Timer::Heartbeat(peer) => self.on_heartbeat_due(peer),
            Timer::Permission(peer) => self.on_permission_due(peer),
            Timer::Fence(peer) => self.on_fence_due(peer),
            Timer::Sweep(peer) => self.sweep(peer),
            // Posts are pumped after every input.
            Timer::Stuck => {}
            Timer::Rooms => self.expire_rooms(),
        }
    }

    fn on_deadline(&mut self, session: SessionId) {
        let (after, last) = if let Some(sender) = self.senders.get(&session) {
            (sender.deadline, self.posting_obstacle(session))
        } else if let Some(receiver) = self.receivers.get(&session) {
            let lookup = self.last_lookup_error(session).map(Obstacle::Bootstrap);
            (receiver.deadline, lookup.or_else(|| self.posting_obstacle(session)))
        } else {
            return;
        };
        self.end_session(session, Cause::DeadlineExceeded { after, last });
    }

    pub(super) fn output(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    /// Sends a frame to a peer that is up; otherwise it is lost, as frames may be.
    pub(super) fn send(&mut self, peer: PeerId, body: Body) {
        let link = match self.peers.get(peer) {
            Some(Peer { theirs: Some(link), lost: false, .. }) => *link,
            Some(_) if matches!(body, Body::Hello(_)) => Link::NONE,
            _ => return,
        };
        if let Some(frame) = encode(link, body) {
            self.output(Output::Send { peer, frame });
        }
    }

    pub(super) fn status(&mut self, session: SessionId, poll: KvPoll, failure: Option<TransferError>) {
        self.output(Output::Status { session, poll, failure: failure.map(Box::new) });
    }

    pub(super) fn draw_link(&mut self) -> Link {
        self.links_drawn = self.links_drawn.saturating_add(1);
        Link::new(self.links_drawn, self.random.next() as u32)
    }

    /// A pause before the n-th repetition (from 1): doubles up to the maximum, with jitter of an
    /// eighth so that repetitions of many sessions spread.
    pub(super) fn backoff(&mut self, first: std::time::Duration, times: u32) -> std::time::Duration {
        let pause =
            first.saturating_mul(1 << times.saturating_sub(1).min(16)).min(self.config.timing.retry_max);
        let spread = u64::try_from(pause.as_nanos() / 8).unwrap_or(u64::MAX).max(1);
        pause + std::time::Duration::from_nanos(self.random.next() % spread)
    }
}

/// A frame of ours as bytes; `None` if it is too long to be one.
pub(super) fn encode(link: Link, body: Body) -> Option<Bytes> {
    Frame { link, body }.encode().ok()
}
