//! The protocol machine of one worker: routes each input to the part that handles it.

#[cfg(feature = "model")]
mod model;
mod peers;
mod posts;
mod service;

use crate::asked::Asked;
use crate::command::Command;
use crate::error::{Cause, Obstacle, PeerCause};
use crate::id::{PeerId, SessionId};
use crate::meter::{each, step};
use crate::proto::context::{Admits, Context};
use crate::proto::conversation::{Heard, Peer};
use crate::proto::ending::Ending;
use crate::proto::io::{Input, NodeConfig, Output};
use crate::proto::receiving::Receiving;
use crate::proto::sending::Sending;
use crate::proto::timer::Timer;
use crate::quarantine::Quarantine;
use crate::time::Time;
use crate::trace::{DroppedFrames, Event, KvWhat};
use crate::transport::Origin;
use crate::wire::Body;

/// The protocol machine of one worker. It does no I/O and reads no clock. The same machine runs
/// under the worker's thread over real transports, and under the simulator in virtual time.
///
/// # Contract
///
/// - **Inputs**: [`handle`](Node::handle), one at a time, with the time now. Times never go back.
/// - **Outputs**: after every input, [`poll_output`](Node::poll_output) is called until it
///   returns `None`, and each output is carried out in order, before the next input.
/// - **Time**: [`Input::Timeout`] is due at [`next_timeout`](Node::next_timeout). A late timeout is
///   allowed, and an early one does nothing.
/// - **Ends**: every session that was opened gets exactly one final [`Output::Status`], at the
///   latest at its deadline; every `Pages` and `RequestCacheGroups` value that went in comes out in exactly
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
#[cfg_attr(feature = "model", derive(Clone))]
pub struct Node {
    /// The parts that sending and receiving share.
    cx: Context,
    sending: Sending,
    receiving: Receiving,
}

/// How much the machine holds at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct NodeGauges {
    /// How many peers are known.
    pub peers: usize,
    /// Transports of peers that have failed and are remembered.
    pub failed_ways: usize,
    /// Sending sessions that have not ended, or whose pages have not come back.
    pub senders: usize,
    /// Receiving sessions that have not ended, or whose pages have not come back.
    pub receivers: usize,
    /// Registrations that wait for a sender.
    pub registrations: usize,
    /// Attempts of peers that are not over, waiting registrations included, and the results that
    /// are kept of attempts that are over.
    pub incoming: usize,
    /// How many of `incoming` are results of attempts that are over.
    pub results: usize,
    /// Runs of peers' attempts that are noted as over.
    pub closed_runs: usize,
    /// Runs of pages in waiting registrations.
    pub waiting_runs: usize,
    /// Receivers that sending sessions have met.
    pub targets: usize,
    /// Ranks that serve receiving sessions, counted for each session.
    pub sources: usize,
    /// Runs of pages and items in leases whose reads are not planned yet.
    pub granted_runs: usize,
    /// Receivers and sources that have something to post.
    pub queued: usize,
    /// Numbers of heartbeats, acquire messages and welcomes that peers may still answer.
    pub numbers: usize,
    /// Addresses of bootstrap servers whose answers are remembered.
    pub addresses: usize,
    /// Failed rooms that are remembered for receivers and senders that come late.
    pub failed_rooms: usize,
    /// Posts that have not ended.
    pub posts: usize,
    /// Lookups that were not answered yet.
    pub lookups: usize,
    /// Timers that are set.
    pub timers: usize,
    /// Complete pages that are pinned for readers.
    pub pages_leased: usize,
    /// Ended leases that are remembered for readers that come late.
    pub ended_leases: usize,
    /// Attempts at peers that are over here without an acknowledgement of the peer.
    pub draining: usize,
    /// Senders that lack receivers.
    pub awaiting: usize,
    /// Peers that are not given up, and have yet to hear that an attempt was served, or to acknowledge the end of one.
    pub owed: usize,
    /// Frames that were ignored since the start, by reason.
    pub dropped: DroppedFrames,
}

impl Node {
    /// A machine without sessions and peers.
    pub fn new(config: NodeConfig) -> Node {
        let sending = Sending::new(config.args.geometry());
        Node { sending, receiving: Receiving::default(), cx: Context::new(config) }
    }

    /// Takes one input. Afterwards [`poll_output`](Node::poll_output) must be drained.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.cx.fx.advance(now);
        self.excuse_peers();
        match input {
            Input::Command(command) => self.on_command(command),
            Input::Frame { from, frame } => self.on_frame(from, &frame),
            Input::Posted { post, result } => self.on_posted(post, result),
            Input::Connected { peer, directions, fence } => self.cx.way_opened(peer, directions, fence),
            Input::ConnectFailed { peer, error } => self.on_connect_failed(peer, error),
            Input::PeerGone { peer, end } => self.on_peer_gone(peer, end),
            Input::Revoked { peer } => self.on_revoked(peer),
            Input::Found { lookup, ranks } => self.receiving.on_found(&mut self.cx, lookup, ranks),
            Input::LookupFailed { lookup, error } => {
                self.receiving.on_lookup_failed(&mut self.cx, lookup, error)
            }
            Input::Timeout => {}
        }
        while let Some(timer) = self.cx.fx.next_timer() {
            step(1);
            self.on_timer(timer);
        }
        self.pump_posts();
    }

    /// A timer that is very late shows that this worker was stopped, or got no processor. Nothing
    /// was received meanwhile, so the silence of peers says nothing about them.
    fn excuse_peers(&mut self) {
        let late =
            self.cx.fx.next_timeout().map_or(std::time::Duration::ZERO, |due| self.cx.fx.now().since(due));
        if late >= self.cx.config.timing.keepalive {
            self.cx.peers.excuse(late, self.cx.fx.now());
        }
    }

    /// The next output to carry out; `None` when drained.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.cx.fx.next_output()
    }

    /// The next request by content that waits for an answer; `None` if there is none. To be called
    /// after every input, until it returns `None`, by a service that is asked
    /// [by content](crate::Service::by_content).
    pub fn poll_asked(&mut self) -> Option<Asked> {
        self.sending.next_asked(&self.cx)
    }

    /// Refuses a request by content for this cause, which the peer is told. No effect on a request
    /// that is over. Outputs must be drained afterwards.
    pub fn refuse_asked(&mut self, now: Time, asked: &Asked, cause: PeerCause) {
        self.cx.fx.advance(now);
        self.sending.refuse_asked(&mut self.cx, asked, cause);
    }

    /// With `true`, keeps events for [`poll_trace`](Node::poll_trace) from now on; with `false`,
    /// stops.
    pub fn listen(&mut self, on: bool) {
        self.cx.fx.listen(on);
    }

    /// The next event; `None` when drained, and while nobody [listens](Node::listen).
    pub fn poll_trace(&mut self) -> Option<Event<KvWhat>> {
        self.cx.fx.next_event()
    }

    /// The one peer that is told something as soon as this command is carried out, and how many bytes are written there
    /// before.
    pub fn addressee(&self, now: Time, command: &Command) -> Option<(PeerId, u64)> {
        match command {
            Command::Send { session, chunk } => self.sending.addressee(&self.cx, now, *session, chunk.len()),
            Command::InitReceiver { session, .. } => Some((self.receiving.addressee(*session)?, 0)),
            _ => None,
        }
    }

    /// When [`Input::Timeout`] is due; `None` if nothing waits for time to pass.
    pub fn next_timeout(&self) -> Option<Time> {
        self.cx.fx.next_timeout()
    }

    /// How much the machine holds at the moment.
    pub fn gauges(&self) -> NodeGauges {
        let sum = |of: &dyn Fn(&Peer) -> usize| self.cx.peers.iter().map(|(_, peer)| of(peer)).sum();
        let dropped = *self.cx.fx.dropped();
        NodeGauges {
            peers: self.cx.peers.len(),
            failed_ways: self.cx.peers.detours.len(),
            senders: self.sending.len(),
            receivers: self.receiving.len(),
            registrations: self.cx.rendezvous.registrations(),
            incoming: sum(&|peer| peer.incoming().live_len() + peer.incoming().results_len()),
            results: sum(&|peer| peer.incoming().results_len()),
            closed_runs: sum(&|peer| peer.incoming().closed_len()),
            waiting_runs: self.cx.rendezvous.waiting_runs(),
            targets: self.sending.targets(),
            sources: self.receiving.sources(),
            granted_runs: self.receiving.granted_runs(),
            queued: self.cx.posts.queued(),
            numbers: sum(&|peer| peer.numbers_len()),
            addresses: self.cx.lookups.addresses(),
            failed_rooms: self.cx.rendezvous.failed_rooms(),
            posts: self.cx.posts.in_flight(),
            lookups: self.cx.lookups.len(),
            timers: self.cx.fx.timers(),
            pages_leased: self.sending.pages_leased(),
            ended_leases: self.sending.ended_leases(),
            draining: sum(&|peer| peer.outgoing().ended_len()),
            awaiting: self.cx.rendezvous.senders(),
            owed: self.cx.peers.iter().filter(|(id, _)| self.cx.is_owed(*id)).count(),
            dropped,
        }
    }

    /// How many complete pages are pinned for readers at the moment.
    pub fn pages_leased(&self) -> usize {
        self.sending.pages_leased()
    }

    /// True while a sender is open whose receivers have not all come.
    pub fn awaits_peers(&self) -> bool {
        self.cx.rendezvous.senders() > 0
    }

    /// True while a peer that is not given up has yet to hear that its attempt was served, or to acknowledge
    /// that an attempt of this worker is over.
    pub fn owes_answers(&self) -> bool {
        self.cx.peers.iter().any(|(id, _)| self.cx.is_owed(id))
    }

    /// The pages and items of ended sessions that may not be used again yet, by peer and reason. A
    /// session that waits for several things is counted under the first of them.
    pub fn quarantine(&self) -> Vec<Quarantine> {
        let receivers = self.receiving.quarantine(&self.cx);
        Quarantine::gather(receivers.chain(self.sending.quarantine(&self.cx)), |a, b| a + b)
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::OpenSender { session, room, receivers, options } => {
                self.sending.open_sender(&mut self.cx, session, room, receivers, *options);
            }
            Command::InitSender { session, num_pages, aux } => {
                self.sending.init_sender(&mut self.cx, session, num_pages, aux)
            }
            Command::Send { session, chunk } => self.sending.send_chunk(&mut self.cx, session, chunk),
            Command::BeginChunk { session, chunk } => {
                self.sending.begin_chunk(&mut self.cx, session, chunk);
            }
            Command::LayersFinal { session, layers } => {
                self.sending.layers_final(&mut self.cx, session, layers.chunk, layers.layers);
            }
            Command::ReadyEventFailed { session, chunk, error } => {
                self.end_session(session, Cause::ReadyEvent { chunk, error });
            }
            Command::OpenReceiver { session, room, bootstrap_addr, options } => {
                self.receiving.open_receiver(&mut self.cx, session, room, bootstrap_addr, *options);
            }
            Command::InitReceiver { session, pages, aux } => {
                self.receiving.init_receiver(&mut self.cx, session, pages, aux)
            }
            Command::RequestCacheGroups { session, groups } if self.sending.has(session) => {
                self.sending.take_groups(&mut self.cx, session, groups);
            }
            Command::RequestCacheGroups { session, groups } => {
                self.receiving.take_groups(&mut self.cx, session, groups);
            }
            Command::Abort { session } => self.end_session(session, Cause::Aborted),
            Command::Drain if self.cx.admits == Admits::All => {
                self.cx.admits = Admits::OpenRooms;
                self.sending.refuse_waiting(&mut self.cx);
                let peers: Vec<PeerId> = self.cx.peers.iter().map(|(id, _)| id).collect();
                for peer in each(peers) {
                    self.cx.say_if_draining(peer);
                }
            }
            Command::Drain => {}
            Command::Shutdown => {
                self.cx.admits = Admits::Nothing;
                let sessions: Vec<SessionId> = self.sending.ids().chain(self.receiving.ids()).collect();
                for session in each(sessions) {
                    self.end_session(session, Cause::WorkerStopped);
                }
            }
        }
    }

    /// Fails a session, whether it sends or receives. No effect on a session that has ended.
    fn end_session(&mut self, session: SessionId, cause: Cause) {
        if self.sending.has(session) {
            self.sending.fail(&mut self.cx, session, cause);
        } else {
            self.receiving.fail(&mut self.cx, session, cause);
        }
    }

    fn on_frame(&mut self, from: Origin, frame: &[u8]) {
        let (peer, body) = match self.cx.hear_frame(from, frame) {
            Some(Heard::Hello(hello)) => return self.on_hello(from, hello),
            Some(Heard::From(peer, body)) => (peer, body),
            None => return,
        };
        match &body {
            Body::Welcome(welcome) => return self.on_welcome(from, peer, welcome),
            Body::Refused(refused) => return self.on_refused(from, peer, refused.clone()),
            _ => self.heard_from(peer),
        }
        self.cx.tell_heard(peer, &body);
        match body {
            Body::Hello(_) | Body::Welcome(_) | Body::Refused(_) => {}
            Body::Register(register) => self.sending.on_room_register(&mut self.cx, peer, register),
            Body::XferReq(request) => self.sending.on_xfer_req(&mut self.cx, peer, request),
            Body::Registered(registered) => {
                self.receiving.on_registered(&mut self.cx, peer, registered.attempt)
            }
            Body::Progress(progress) => self.receiving.on_progress(&mut self.cx, peer, progress),
            Body::Failed(failed) => self.receiving.on_failed(&mut self.cx, peer, failed),
            Body::Abort(abort) => self.sending.on_abort(&mut self.cx, peer, abort),
            Body::AbortAck(ack) => self.receiving.on_abort_ack(&mut self.cx, peer, ack.attempt),
            Body::Granted(granted) => self.receiving.on_granted(&mut self.cx, peer, granted),
            Body::Heartbeat(heartbeat) => self.on_heartbeat(peer, &heartbeat),
            Body::HeartbeatAck(ack) => self.on_heartbeat_ack(peer, ack),
            Body::Release(release) => self.sending.on_release(&mut self.cx, peer, release),
            Body::Released(released) => self.cx.on_released(peer, released),
        }
    }

    fn on_timer(&mut self, timer: Timer) {
        match timer {
            Timer::Deadline(session) => self.on_deadline(session),
            Timer::Repeat(session) => self.receiving.on_repeat(&mut self.cx, session),
            Timer::Quiet(session, peer) => self.receiving.on_quiet(&mut self.cx, session, peer),
            Timer::Peer(peer) => self.on_peer_tick(peer),
            Timer::Lookup(lookup) => self.receiving.ask_again(&mut self.cx, lookup),
            Timer::Registration(peer, attempt) => {
                self.sending.on_registration_expired(&mut self.cx, peer, attempt)
            }
            Timer::Lease(session) => self.sending.on_lease(&mut self.cx, session),
            Timer::Heartbeat(peer) => self.receiving.on_heartbeat_due(&mut self.cx, peer),
            Timer::Permission(peer) => self.sending.on_permission_due(&mut self.cx, peer),
            Timer::WriteFence(peer) => self.on_fence_due(peer),
            Timer::Sweep(peer) => self.sending.sweep(&mut self.cx, peer),
            // Posts are pumped after every input.
            Timer::Stuck => {}
            Timer::Rooms => self.cx.rendezvous.expire(&mut self.cx.fx),
        }
    }

    fn on_deadline(&mut self, session: SessionId) {
        let lookup = || self.receiving.last_lookup_error(&self.cx, session).map(Obstacle::Bootstrap);
        let deadline = self.sending.deadline(session).or_else(|| self.receiving.deadline(session));
        let Some(after) = deadline else { return };
        let last = lookup().or_else(|| self.posting_obstacle(session));
        self.end_session(session, Cause::DeadlineExceeded { after, last });
    }
}
