//! The machine of a worker that speaks vLLM's dialect: routes every input to the half that is concerned.

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::{Command, Resource};
use kv_core::trace::{Event, KvWhat};
use kv_core::{KvArgs, KvPoll, PeerId, Quarantine, Time, TransferError};

use super::config::VllmConfig;
use super::consumer::Consumer;
use super::context::Context;
use super::geometry::CacheError;
use super::notification::Notification;
use super::producer::Producer;
use crate::effects::Out;
use crate::gauges::Ignored;
use crate::message::{Incoming, Message};
use crate::telling::Telling;

/// The machine of one rank towards vLLM engines: senders, whose KV vLLM engines take, and receivers, which take the
/// KV of vLLM engines.
///
/// Each half knows its own sessions, peers and posts, and ignores those of the other half.
#[derive(Debug)]
pub(crate) struct VllmMachine {
    cx: Context,
    telling: Telling,
    producer: Producer,
    consumer: Consumer,
}

impl VllmMachine {
    pub(crate) fn new(args: &KvArgs, config: &VllmConfig) -> Result<VllmMachine, CacheError> {
        let cx = Context { gauges: config.gauges.clone(), ..Context::default() };
        let (producer, consumer) = (Producer::new(args, config)?, Consumer::new(args, config)?);
        Ok(VllmMachine { cx, telling: Telling::default(), producer, consumer })
    }

    fn command(&mut self, command: Command) {
        let VllmMachine { cx, producer, consumer, .. } = self;
        match command {
            Command::OpenSender { session, room, receivers, options } => {
                producer.open(cx, session, (room, receivers), &options);
            }
            Command::InitSender { session, num_pages, aux } => producer.init(cx, session, num_pages, aux),
            Command::Send { session, chunk } => producer.send(cx, session, chunk),
            Command::BeginChunk { session, chunk } => drop(producer.begin_chunk(cx, session, chunk)),
            Command::LayersFinal { session, layers } => {
                producer.layers_final(cx, session, layers.chunk, layers.layers);
            }
            Command::ReadyEventFailed { session, chunk, error } => {
                producer.ready_event_failed(cx, session, chunk, error);
            }
            Command::OpenReceiver { session, room, bootstrap_addr, options } => {
                consumer.open(cx, session, (room, bootstrap_addr), *options);
            }
            Command::InitReceiver { session, pages, aux } => consumer.init(cx, session, pages, aux),
            Command::RequestCacheGroups { session, groups } if producer.has(session) => {
                producer.groups(cx, session, groups);
            }
            Command::RequestCacheGroups { session, groups } => consumer.groups(cx, session, groups),
            Command::Abort { session } => {
                producer.abort(cx, session);
                consumer.abort(cx, session);
            }
            Command::Drain => {
                producer.drain();
                consumer.drain();
            }
            Command::Shutdown => {
                producer.stop(cx);
                consumer.stop(cx);
            }
        }
    }

    /// Takes what became of a post or of a way. Each half ignores what it has not begun.
    fn transport(&mut self, input: Input<Command>) {
        let VllmMachine { cx, producer, consumer, .. } = self;
        match input {
            Input::Posted { post, result } if producer.has_post(post) => producer.posted(cx, post, result),
            Input::Posted { post, result } => consumer.posted(cx, post, result),
            Input::Connected { peer, .. } => {
                let _ = producer.connected(cx, peer) || consumer.connected(cx, peer);
            }
            Input::ConnectFailed { peer, error } => {
                let _ = consumer.connect_failed(cx, peer, &error) || producer.lost(cx, peer, Some(error));
            }
            Input::PeerGone { peer, end } => {
                let _ = producer.lost(cx, peer, None) || consumer.peer_gone(cx, peer, end);
            }
            // This machine revokes nothing and looks nothing up.
            _ => {}
        }
    }

    /// Takes what arrived from a foreign engine. What nobody expects is counted.
    fn incoming(&mut self, frame: &[u8]) {
        let taken = match Incoming::decode(frame) {
            Some(Incoming::Message { peer: Some(peer), message }) => self.message(PeerId(peer), &message),
            Some(Incoming::Message { peer: None, .. }) => Err(Ignored::NotAsked),
            Some(Incoming::Notification { agent, bytes }) => self.notification(&agent, &bytes),
            None => Err(Ignored::Malformed),
        };
        if let Err(why) = taken {
            self.cx.ignore(why);
        }
    }

    fn message(&mut self, peer: PeerId, message: &Message) -> Result<(), Ignored> {
        let VllmMachine { cx, producer, consumer, .. } = self;
        let taken = producer.message(cx, peer, &message.0) || consumer.message(cx, peer, &message.0);
        if taken { Ok(()) } else { Err(Ignored::NotAsked) }
    }

    fn notification(&mut self, agent: &str, bytes: &Bytes) -> Result<(), Ignored> {
        let VllmMachine { cx, producer, consumer, .. } = self;
        match Notification::decode(bytes).map_err(|_| Ignored::Malformed)? {
            Notification::Heartbeat(ids) => {
                producer.heartbeat(cx, &ids);
                Ok(())
            }
            // The ids of receivers have a suffix that this worker draws: no sender has the same id by chance.
            Notification::Done { request, count } if consumer.written(cx, agent, request, count) => Ok(()),
            Notification::Done { request, count } => producer.read(cx, agent, request, count),
            Notification::Registration(found) => producer.register(cx, agent, *found),
        }
    }
}

impl Machine for VllmMachine {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;
    type Trace = KvWhat;

    fn handle(&mut self, now: Time, input: Input<Command>) {
        self.cx.now = now;
        match input {
            Input::Command(command) => {
                self.telling.command(&mut self.cx.log, now, &command);
                self.command(command);
            }
            Input::Frame { frame, .. } => self.incoming(&frame),
            Input::Timeout => {
                self.producer.timeout(&mut self.cx);
                self.consumer.timeout(&mut self.cx);
            }
            input => {
                if let Input::Posted { post, result } = &input {
                    self.telling.posted(&mut self.cx.log, now, *post, result);
                }
                self.transport(input);
            }
        }
    }

    fn poll_output(&mut self) -> Option<Out> {
        let out = self.cx.effects.poll()?;
        let Context { log, effects, now, .. } = &mut self.cx;
        let held = match &out {
            Output::Status { session, .. } => self.producer.has(*session) || self.consumer.has(*session),
            _ => false,
        };
        self.telling.output(log, *now, &out, effects, held);
        Some(out)
    }

    fn next_timeout(&self) -> Option<Time> {
        self.producer.next_timeout().into_iter().chain(self.consumer.next_timeout()).min()
    }

    fn leased(&self) -> usize {
        self.producer.leased()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        let (now, count) = (self.cx.now, usize::saturating_add);
        let both = self.producer.quarantine(now).into_iter().chain(self.consumer.quarantine(now));
        Quarantine::gather(both, count)
    }

    fn listen(&mut self, on: bool) {
        self.cx.log.listen(on);
    }

    fn poll_trace(&mut self) -> Option<Event<KvWhat>> {
        self.cx.log.next()
    }
}
