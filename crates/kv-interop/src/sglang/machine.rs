//! The machine that speaks SGLang's protocol.

use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::{Command, Resource};
use kv_core::trace::KvWhat;
use kv_core::{Cause, KvArgs, KvPoll, Quarantine, Time, TransferError};

use super::cache::OurCache;
use super::codec::{Registration, SglangMessage};
use super::config::{SglangConfig, SglangConfigError};
use super::receiver::Receiving;
use super::sender::Sending;
use crate::effects::Effects;
use crate::message::Incoming;

/// A worker of the KV cache among SGLang 0.5.23's workers: the decode side of SGLang's prefill engines, or the
/// prefill side of SGLang's decode engines.
///
/// The machine is driven as every [`Machine`]. Its transport reaches peers by [`Way`](crate::message::Way)s, and
/// brings what arrives at this worker's PULL socket as [`Incoming`].
///
/// # As the decode side
///
/// - A room is a number above 0, and a room has one session at a time. A room whose former session is in
///   quarantine cannot be opened.
/// - Every receiver needs an aux row. A receiver succeeds when all prefill ranks have said that their pages are in
///   place and the row holds the room of the request.
/// - Pages of a session that failed come back when each prefill rank that may write has acknowledged the abort,
///   or is proven dead. SGLang's prefill rank acknowledges no abort after a write that NIXL refused; such pages
///   stay in quarantine until that process has ended.
/// - SGLang's prefill engine does not tell when its scheduler aborts a request: the deadline ends the session.
///
/// # As the prefill side
///
/// - The scheduler gives all pages of a request, as with the native protocol; the pages of the decode rank's
///   prefix are not written.
/// - Every sender needs an aux row, in which the server has written the room ([`write_room`](super::write_room)).
/// - A chunk is written when all its layers are final.
/// - A decode rank is told of a success or a failure, and its abort is acknowledged, once no post of this worker
///   writes for the request any more.
pub struct SglangMachine {
    now: Time,
    effects: Effects,
    receiving: Receiving,
    sending: Sending,
    counters: SglangCounters,
}

/// What the machine has dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SglangCounters {
    /// Messages that are none of SGLang's, or break the form of one.
    pub malformed: u64,
    /// Messages for a room, rank or agent that this worker does not know, or knows no more.
    pub unexpected: u64,
}

impl SglangMachine {
    /// The machine of a worker. Fails if SGLang's protocol cannot express the worker's cache.
    pub fn new(args: &KvArgs, config: SglangConfig) -> Result<SglangMachine, SglangConfigError> {
        let cache = config.check(args)?;
        Ok(SglangMachine::of(args, config, cache))
    }

    /// The machine of a worker whose cache was checked.
    pub(super) fn of(args: &KvArgs, config: SglangConfig, cache: OurCache) -> SglangMachine {
        let SglangConfig { agent, metadata, pull: (ip, port), aux_rooms, timing, limits, seed, .. } = config;
        let kv = || cache.order.iter().filter_map(|at| cache.regions.get(*at));
        let parallel = cache.geometry.parallel;
        let registration = Registration {
            ip,
            port,
            agent,
            metadata,
            kv_ptrs: cache.addresses(cache.order.iter().copied()),
            kinds: kv().map(|region| region.memory).collect(),
            item_lens: kv().map(|region| region.item_len).collect(),
            layer_ids: Vec::new(),
            aux_ptrs: cache.addresses(cache.geometry.aux_regions()),
            has_state: false,
            device: kv().map(|region| region.device).next().unwrap_or(0),
            tp_size: parallel.tp_size,
            tp_rank: parallel.tp_rank,
            slots: cache.geometry.num_pages,
            dcp_size: 1,
            dcp_rank: 0,
        };
        SglangMachine {
            now: Time::ZERO,
            effects: Effects::default(),
            sending: Sending::new(cache.clone(), args, (timing, limits)),
            receiving: Receiving::new(cache, registration, aux_rooms, (timing, limits), seed),
            counters: SglangCounters::default(),
        }
    }

    /// What the machine has dropped so far.
    pub fn counters(&self) -> SglangCounters {
        self.counters
    }

    fn command(&mut self, command: Command) {
        let (effects, now) = (&mut self.effects, self.now);
        match command {
            Command::OpenReceiver { session, room, bootstrap_addr, options } => {
                self.receiving.open(effects, now, (session, room, bootstrap_addr), &options);
            }
            Command::InitReceiver { session, pages, aux } => {
                self.receiving.init(effects, now, session, (pages, aux));
            }
            Command::OpenSender { session, room, receivers, options } => {
                self.sending.open(effects, now, (session, room, receivers), &options);
            }
            Command::InitSender { session, num_pages, aux } => {
                self.sending.init(effects, session, (num_pages, aux));
            }
            Command::BeginChunk { session, chunk } => {
                self.sending.begin(effects, session, chunk);
            }
            Command::Send { session, chunk } => {
                if let Some(chunk) = self.sending.begin(effects, session, chunk) {
                    self.sending.finish(effects, session, (chunk, None));
                }
            }
            Command::LayersFinal { session, layers } => {
                self.sending.finish(effects, session, (layers.chunk, layers.layers));
            }
            Command::ReadyEventFailed { session, chunk, error } => {
                self.sending.not_ready(effects, session, Cause::ReadyEvent { chunk, error });
            }
            Command::Abort { session } => {
                self.receiving.abort(effects, now, session);
                self.sending.abort(effects, session);
            }
            Command::Shutdown => {
                self.receiving.shut_down(effects, now);
                self.sending.shut_down(effects);
            }
            Command::RequestCacheGroups { session, groups } if self.sending.knows(session) => {
                self.sending.refuse_groups(effects, (session, groups));
            }
            Command::RequestCacheGroups { session, groups } => {
                self.receiving.refuse_groups(effects, now, (session, groups));
            }
        }
    }

    fn arrived(&mut self, frame: &[u8]) {
        let (effects, now) = (&mut self.effects, self.now);
        let message = match Incoming::decode(frame) {
            Some(Incoming::Message { message, .. }) => SglangMessage::decode(&message.0).ok(),
            // SGLang's agents notify nobody.
            Some(Incoming::Notification { .. }) | None => None,
        };
        let expected = match message {
            Some(SglangMessage::Status(status)) => self.receiving.told(effects, now, status),
            Some(SglangMessage::AbortAck(ack)) => self.receiving.stopped(effects, now, &ack),
            Some(SglangMessage::Registration(registration)) => self.sending.register(effects, *registration),
            Some(SglangMessage::Request(request)) => self.sending.request(effects, now, request),
            Some(SglangMessage::Abort(abort)) => self.sending.aborted(effects, &abort),
            None => {
                self.counters.malformed += 1;
                return;
            }
        };
        self.counters.unexpected += u64::from(!expected);
    }
}

impl Machine for SglangMachine {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;
    type Trace = KvWhat;

    fn handle(&mut self, now: Time, input: Input<Command>) {
        self.now = self.now.max(now);
        let now = self.now;
        let effects = &mut self.effects;
        match input {
            Input::Command(command) => self.command(command),
            Input::Frame { frame, .. } => self.arrived(&frame),
            Input::Connected { peer, .. } => self.receiving.connected(effects, now, peer),
            Input::ConnectFailed { peer, error } => {
                if !self.sending.connect_failed(effects, peer, &error) {
                    self.receiving.connect_failed(effects, now, peer, &error);
                }
            }
            Input::PeerGone { peer, end } => {
                if !self.sending.gone(effects, (peer, end)) {
                    self.receiving.gone(effects, now, (peer, end));
                }
            }
            Input::Found { lookup, ranks } => self.receiving.found(effects, now, lookup, ranks),
            Input::LookupFailed { lookup, error } => {
                self.receiving.lookup_failed(effects, now, lookup, &error);
            }
            Input::Posted { post, result } => self.sending.posted(effects, post, result),
            Input::Revoked { .. } | Input::Timeout => {}
        }
        self.receiving.tick(&mut self.effects, now);
        self.sending.tick(&mut self.effects, now);
    }

    fn poll_output(&mut self) -> Option<Output<KvPoll, Resource, TransferError>> {
        self.effects.poll()
    }

    fn next_timeout(&self) -> Option<Time> {
        [self.receiving.next_due(), self.sending.next_due()].into_iter().flatten().min()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        let all = self.receiving.quarantine(self.now).into_iter().chain(self.sending.quarantine(self.now));
        Quarantine::gather(all, |a, b| a.saturating_add(b))
    }
}
