//! A protocol machine whose behaviour is decided by the room of the session and by one-word frames.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::Machine;
use kv_core::proto::{Command, Input, Output, Resource};
use kv_core::trace::KvWhat;
use kv_core::wire::hello_transport;
use kv_core::{
    Cause, Descriptor, EngineId, FinalLayers, KV_SERVICE, KvPoll, LookupId, Op, Pages, PeerId, Phase, Post,
    PostId, Quarantine, QuarantineReason, RankQuery, Replica, Room, SessionId, Time, TransferError,
    TransportOffer, WorkerId, WorkerRole,
};

use super::{Log, Seen};

/// A machine that obeys at once: what it does is decided by the room of the session and by
/// one-word frames.
pub(super) struct Script {
    log: Log,
    outputs: VecDeque<Output>,
    rooms: BTreeMap<SessionId, Room>,
    held: Vec<(SessionId, Pages)>,
    timeout: Option<Time>,
    shutdown: bool,
    awaits: bool,
    owes: bool,
    busy: bool,
}

/// In this room the machine waits for the word `done`; in all others it succeeds at once.
pub(super) const SLOW: u64 = 1000;
/// In this room the pages stay with the machine after the end.
pub(super) const STUCK: u64 = 2000;

/// In this room the pages go to peer 1.
pub(super) const WRITES: u64 = 3000;

/// Whom stuck pages wait for.
pub(super) fn peer() -> WorkerId {
    WorkerId { engine: EngineId::new("decode").unwrap(), rank: 3 }
}

impl Script {
    pub(super) fn new(log: &Log) -> Script {
        Script {
            log: Arc::clone(log),
            outputs: VecDeque::new(),
            rooms: BTreeMap::new(),
            held: Vec::new(),
            timeout: None,
            shutdown: false,
            awaits: false,
            owes: false,
            busy: false,
        }
    }

    fn see(&self, seen: Seen) {
        self.log.lock().unwrap().push(seen);
    }

    fn end(&mut self, session: SessionId, failure: Option<Cause>) {
        let Some(room) = self.rooms.remove(&session) else { return };
        let poll = if failure.is_some() { KvPoll::Failed } else { KvPoll::Success };
        let failure = failure.map(|cause| Box::new(TransferError::new(room.clone(), Phase::Transfer, cause)));
        self.outputs.push_back(Output::Status { session, poll, failure });
        if room != Room::from(STUCK) {
            self.release(Some(session));
        }
    }

    /// In reverse order, to be awkward.
    fn release(&mut self, of: Option<SessionId>) {
        for (session, pages) in std::mem::take(&mut self.held).into_iter().rev() {
            if of.is_none_or(|of| of == session) {
                self.outputs.push_back(Output::Release { session, resource: pages.into() });
            } else {
                self.held.insert(0, (session, pages));
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::OpenSender { session, room, .. } | Command::OpenReceiver { session, room, .. } => {
                self.see(Seen::Opened(session.0));
                self.rooms.insert(session, room);
                let poll = KvPoll::WaitingForInput;
                self.outputs.push_back(Output::Status { session, poll, failure: None });
                if self.shutdown {
                    self.end(session, Some(Cause::WorkerStopped));
                }
            }
            Command::InitSender { .. } => {}
            Command::BeginChunk { session, chunk } => {
                self.see(Seen::Sent(session.0));
                self.held.push((session, chunk));
                let poll = KvPoll::Transferring;
                self.outputs.push_back(Output::Status { session, poll, failure: None });
            }
            Command::LayersFinal { session, layers: FinalLayers { chunk, layers, .. } } => {
                self.see(Seen::Final(session.0, chunk.0, layers.map_or(0, |layers| layers.start)));
            }
            Command::ReadyEventFailed { session, chunk, error } => {
                self.end(session, Some(Cause::ReadyEvent { chunk, error }));
            }
            Command::RequestCacheGroups { session, groups } => {
                self.outputs.push_back(Output::Release { session, resource: groups.into() });
            }
            Command::Send { session, chunk: pages } | Command::InitReceiver { session, pages, .. } => {
                self.see(Seen::Sent(session.0));
                self.held.push((session, pages));
                let poll = KvPoll::Transferring;
                self.outputs.push_back(Output::Status { session, poll, failure: None });
                let slow = [Room::from(SLOW), Room::from(STUCK)];
                if self.rooms.get(&session).is_some_and(|room| !slow.contains(room)) {
                    self.end(session, None);
                }
            }
            Command::Abort { session } => {
                self.see(Seen::Aborted(session.0));
                self.end(session, Some(Cause::Aborted));
            }
            Command::Drain => self.see(Seen::Drain),
            Command::Shutdown => {
                self.see(Seen::Shutdown);
                self.shutdown = true;
                for session in self.rooms.keys().copied().collect::<Vec<_>>() {
                    self.end(session, Some(Cause::WorkerStopped));
                }
            }
        }
    }

    fn word(&mut self, now: Time, word: &[u8]) {
        let peer = PeerId(1);
        let frame = Bytes::from_static(b"frame");
        match word {
            b"done" => {
                self.see(Seen::Frame("done"));
                for session in self.rooms.keys().copied().collect::<Vec<_>>() {
                    self.end(session, None);
                }
            }
            b"release" => self.release(None),
            b"await" | b"await no more" => {
                self.awaits = word == b"await";
                self.see(Seen::Frame(if self.awaits { "await" } else { "await no more" }));
            }
            b"owe" | b"settle" => {
                self.owes = word == b"owe";
                self.see(Seen::Frame(if self.owes { "owe" } else { "settle" }));
            }
            b"serve" | b"rest" => {
                self.busy = word == b"serve";
                self.see(Seen::Frame(if self.busy { "serve" } else { "rest" }));
            }
            b"look" => self.see(Seen::Frame("look")),
            b"nothing" => {}
            b"outputs" => {
                let descriptors = vec![Descriptor {
                    local_region: 0,
                    remote_region: 0,
                    local_offset: 0,
                    remote_offset: 0,
                    len: 1,
                }];
                let post = |id| Post {
                    id: PostId(id),
                    op: Op::Write,
                    descriptors: descriptors.clone(),
                    notify: None,
                };
                let query = RankQuery {
                    role: WorkerRole::Prefill,
                    service: KV_SERVICE.to_owned(),
                    replica: Replica::Rank(0),
                };
                self.outputs.extend([
                    Output::Connect {
                        peer,
                        transport: TransportOffer::new("script", Bytes::from_static(b"bad")),
                    },
                    Output::Send { peer, frame: frame.clone() },
                    Output::Send { peer: PeerId(2), frame },
                    Output::Post { peer, post: post(1) },
                    Output::Post { peer: PeerId(2), post: post(2) },
                    Output::Cancel { post: PostId(1) },
                    Output::Lookup { lookup: LookupId(5), addr: "nowhere".to_owned(), query },
                    Output::Disconnect { peer },
                ]);
            }
            b"panic" => panic!("a bug in the machine"),
            b"far timer" => self.timeout = Some(now + Duration::from_secs(60)),
            b"timer" => self.timeout = Some(now + Duration::from_millis(30)),
            other => panic!("unknown word {other:?}"),
        }
    }
}

impl Machine for Script {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;
    type Trace = KvWhat;

    fn handle(&mut self, now: Time, input: Input) {
        assert!(self.outputs.is_empty(), "outputs are drained after every input");
        match input {
            Input::Command(command) => self.command(command),
            Input::Frame { from, frame } if hello_transport(&frame).is_some() => {
                self.see(Seen::Hello(from.0))
            }
            Input::Frame { frame, .. } => self.word(now, &frame),
            Input::Posted { post, result } => self.see(Seen::Posted(post.0, result.is_ok())),
            Input::ConnectFailed { .. } => self.see(Seen::ConnectFailed),
            Input::PeerGone { .. } => self.see(Seen::PeerGone),
            Input::Connected { .. } | Input::Revoked { .. } | Input::Found { .. } => {}
            Input::LookupFailed { lookup, .. } => self.see(Seen::LookupFailed(lookup.0)),
            Input::Timeout => {
                assert!(self.timeout.take().is_some_and(|at| at <= now), "not before it is due");
                self.word(now, b"done");
                let query = RankQuery {
                    role: WorkerRole::Prefill,
                    service: KV_SERVICE.to_owned(),
                    replica: Replica::Rank(0),
                };
                let (lookup, addr) = (LookupId(6), "nowhere".to_owned());
                self.outputs.push_back(Output::Lookup { lookup, addr, query });
            }
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.timeout
    }

    fn addressee(&self, _: Time, command: &Command) -> Option<(PeerId, u64)> {
        let Command::Send { session, chunk } = command else { return None };
        let is_written = self.rooms.get(session) == Some(&Room::from(WRITES));
        is_written.then_some((PeerId(1), chunk.len() as u64))
    }

    fn awaits_peers(&self) -> bool {
        self.awaits
    }

    fn owes_answers(&self) -> bool {
        self.owes
    }

    fn is_busy(&self) -> bool {
        self.busy
    }

    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        hello_transport(frame)
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        self.see(Seen::Looked);
        let ended = self.held.iter().filter(|(session, _)| !self.rooms.contains_key(session));
        let entry = |(_, pages): &(SessionId, Pages)| {
            Quarantine::new(Some(peer()), QuarantineReason::Unacknowledged, 1, pages.len())
        };
        Quarantine::gather(ended.map(entry), |a, b| a + b)
    }
}
