//! The machine of a worker that speaks vLLM's dialect: routes every input to the half that is concerned.

use bytes::Bytes;
use kv_core::machine::{Input, Machine};
use kv_core::proto::{Command, Resource};
use kv_core::trace::{Event, KvWhat};
use kv_core::{Cause, KvArgs, KvPoll, PeerId, Phase, Quarantine, Time, TransferError};

use super::config::VllmConfig;
use super::context::Context;
use super::gauges::Ignored;
use super::geometry::CacheError;
use super::notification::Notification;
use super::producer::Producer;
use crate::effects::Out;
use crate::message::{Incoming, Message};

/// The machine of one rank towards vLLM engines: senders, whose KV vLLM engines take, and receivers, which take the
/// KV of vLLM engines.
///
/// Each half knows its own sessions, peers and posts, and ignores those of the other half.
#[derive(Debug)]
pub(crate) struct VllmMachine {
    cx: Context,
    producer: Producer,
}

impl VllmMachine {
    pub(crate) fn new(args: &KvArgs, config: &VllmConfig) -> Result<VllmMachine, CacheError> {
        let cx = Context { gauges: config.gauges.clone(), ..Context::default() };
        Ok(VllmMachine { cx, producer: Producer::new(args, config)? })
    }

    fn command(&mut self, command: Command) {
        let (cx, producer) = (&mut self.cx, &mut self.producer);
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
            Command::OpenReceiver { session, room, .. } => {
                let cause = Cause::Protocol("this machine has no receivers");
                cx.effects.end(session, Some(TransferError::new(room, Phase::Bootstrap, cause)));
            }
            Command::InitReceiver { session, pages, .. } => cx.effects.release(session, pages.into()),
            Command::RequestCacheGroups { session, groups } => producer.groups(cx, session, groups),
            Command::Abort { session } => producer.abort(cx, session),
            Command::Shutdown => producer.stop(cx),
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
        let taken = self.producer.message(&mut self.cx, peer, &message.0);
        if taken { Ok(()) } else { Err(Ignored::NotAsked) }
    }

    fn notification(&mut self, agent: &str, bytes: &Bytes) -> Result<(), Ignored> {
        let (cx, producer) = (&mut self.cx, &mut self.producer);
        match Notification::decode(bytes).map_err(|_| Ignored::Malformed)? {
            Notification::Heartbeat(ids) => {
                producer.heartbeat(cx, &ids);
                Ok(())
            }
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
            Input::Command(command) => self.command(command),
            Input::Frame { frame, .. } => self.incoming(&frame),
            Input::Timeout => self.producer.timeout(&mut self.cx),
            Input::Posted { post, result } => drop(self.producer.posted(&mut self.cx, post, result)),
            Input::Connected { peer, .. } => drop(self.producer.connected(&mut self.cx, peer)),
            Input::ConnectFailed { peer, error } => {
                self.producer.lost(&mut self.cx, peer, Some(error));
            }
            Input::PeerGone { peer, .. } => drop(self.producer.lost(&mut self.cx, peer, None)),
            // This machine revokes nothing and looks nothing up.
            Input::Revoked { .. } | Input::Found { .. } | Input::LookupFailed { .. } => {}
        }
    }

    fn poll_output(&mut self) -> Option<Out> {
        self.cx.effects.poll()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.producer.next_timeout()
    }

    fn leased(&self) -> usize {
        self.producer.leased()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        self.producer.quarantine(self.cx.now)
    }

    fn listen(&mut self, on: bool) {
        self.cx.log.listen(on);
    }

    fn poll_trace(&mut self) -> Option<Event<KvWhat>> {
        self.cx.log.next()
    }
}
