//! The machine that speaks SGLang's protocol.

use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::{Command, Resource};
use kv_core::trace::{Event, KvWhat, Log, Who};
use kv_core::{Cause, ChunkId, KvArgs, KvPoll, Pages, Quarantine, SessionId, Time, TransferError, WayEnd};

use super::codec::{Registration, SglangMessage};
use super::config::{SglangAgent, SglangConfig, SglangConfigError};
use super::receiver::Receiving;
use super::sender::Sending;
use crate::effects::{Effects, Out};
use crate::gauges::{Ignored, IgnoredGauges};
use crate::message::Incoming;
use crate::telling::Telling;

/// The machine of one rank among SGLang's workers: receivers, whose KV SGLang's prefill ranks write, and senders,
/// whose KV SGLang's decode ranks take. [`start`](super::start) says what callers can rely on.
pub(crate) struct SglangMachine {
    now: Time,
    effects: Effects,
    receiving: Receiving,
    sending: Sending,
    gauges: IgnoredGauges,
    log: Log<KvWhat>,
    telling: Telling,
}

impl SglangMachine {
    /// The machine of a worker. Fails if SGLang's protocol cannot express the worker.
    pub(crate) fn new(
        args: &KvArgs,
        config: SglangConfig,
        agent: SglangAgent,
    ) -> Result<SglangMachine, SglangConfigError> {
        agent.check()?;
        let cache = config.check(args)?;
        let SglangConfig { aux_rooms, timing, limits, gauges, seed, .. } = config;
        let kv = || cache.order.iter().filter_map(|at| cache.regions.get(*at));
        let parallel = cache.geometry.parallel;
        let registration = Registration {
            ip: agent.pull.0,
            port: agent.pull.1,
            agent: agent.name,
            metadata: agent.metadata,
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
        Ok(SglangMachine {
            now: Time::ZERO,
            effects: Effects::default(),
            sending: Sending::new(cache.clone(), args, (timing, limits)),
            receiving: Receiving::new(
                cache,
                registration,
                aux_rooms,
                (timing, limits),
                seed.unwrap_or_default(),
            ),
            gauges,
            log: Log::default(),
            telling: Telling::default(),
        })
    }

    /// What is remembered of requests, on the receiving and on the sending side.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> ([usize; 3], [usize; 4]) {
        (self.receiving.remembered(), self.sending.remembered())
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
                self.begin(session, chunk);
            }
            Command::Send { session, chunk } => {
                if let Some(chunk) = self.begin(session, chunk) {
                    self.sending.finish(&mut self.effects, session, (chunk, None));
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
            Command::Drain => {
                self.receiving.drain();
                self.sending.drain(effects);
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

    fn begin(&mut self, session: SessionId, chunk: Pages) -> Option<ChunkId> {
        let pages = chunk.len();
        let chunk = self.sending.begin(&mut self.effects, session, chunk)?;
        self.log.tell(self.now, session, || KvWhat::ChunkGiven { chunk, pages });
        Some(chunk)
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
            None => return self.ignore(Ignored::Malformed),
        };
        if !expected {
            self.ignore(Ignored::UnknownRequest);
        }
    }

    fn ignore(&mut self, why: Ignored) {
        self.gauges.count(why);
        self.log.tell(self.now, Who::default(), || KvWhat::Dropped(why.traced()));
    }

    fn tell_output(&mut self, out: &Out) {
        let Self { log, telling, now, effects, receiving, sending, .. } = self;
        let held = match out {
            Output::Status { session, poll, .. } => {
                let sends = sending.knows(*session);
                if sends && *poll == KvPoll::WaitingForInput {
                    log.tell(*now, *session, || KvWhat::ReceiverCame);
                }
                sends || receiving.knows(*session)
            }
            Output::Lookup { lookup, .. } => {
                let (session, again) = receiving.asks(*lookup);
                let who = session.map_or_else(Who::default, Who::from);
                log.tell(*now, who, || KvWhat::Asked { again });
                false
            }
            _ => false,
        };
        telling.output(log, *now, out, effects, held);
    }

    /// Tells what an input says of the transport and of the bootstrap server.
    fn tell_input(&mut self, input: &Input<Command>) {
        let Self { log, telling, now, .. } = self;
        match input {
            Input::Command(command) => telling.command(log, *now, command),
            Input::Posted { post, result } => telling.posted(log, *now, *post, result),
            Input::Connected { peer, .. } => log.tell(*now, *peer, || KvWhat::WayOpened),
            Input::ConnectFailed { peer, error } => {
                log.tell(*now, *peer, || KvWhat::ConnectFailed(error.clone()));
            }
            Input::PeerGone { peer, end } => log.tell(*now, *peer, || match end {
                WayEnd::Dead { quiet_after } => KvWhat::PeerDead { quiet_after: *quiet_after },
                WayEnd::Lost => KvWhat::WayLost,
            }),
            Input::Found { lookup, ranks } => {
                let (ranks, sessions) = (ranks.len(), self.receiving.waiting_for(*lookup));
                log.tell(*now, Who::default(), || KvWhat::Answered { ranks, sessions });
            }
            Input::LookupFailed { error, .. } => {
                log.tell(*now, Who::default(), || KvWhat::NotAnswered(error.clone()));
            }
            _ => {}
        }
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
        if self.log.is_heard() {
            self.tell_input(&input);
        }
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
        let out = self.effects.poll()?;
        if self.log.is_heard() {
            self.tell_output(&out);
        }
        Some(out)
    }

    fn next_timeout(&self) -> Option<Time> {
        [self.receiving.next_due(), self.sending.next_due()].into_iter().flatten().min()
    }

    fn awaits_peers(&self) -> bool {
        self.sending.awaits_peers()
    }

    fn listen(&mut self, on: bool) {
        self.log.listen(on);
    }

    fn poll_trace(&mut self) -> Option<Event<KvWhat>> {
        self.log.next()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        let all = self.receiving.quarantine(self.now).into_iter().chain(self.sending.quarantine(self.now));
        Quarantine::gather(all, |a, b| a.saturating_add(b))
    }
}
