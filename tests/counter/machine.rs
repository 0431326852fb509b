//! The machine: holder and client in one, because any worker may be both.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use kv_transfer::machine::{Input, Machine, Output};
use kv_transfer::{PeerId, SessionId, Time};

use super::wire::Message;
use super::{Command, Failure, Leased, Resource, Slot, Status};

/// Pause between two questions.
const AGAIN: Duration = Duration::from_millis(20);
/// Most workers that are known at once; others are not answered.
const MAX_PEERS: usize = 64;

/// A worker that leases numbers out, asks others for theirs, or both.
pub struct Counter {
    /// The transport's metadata of this worker.
    metadata: Bytes,
    peers: BTreeMap<Bytes, PeerId>,
    next_peer: u64,
    holder: Option<Holder>,
    clients: BTreeMap<SessionId, Client>,
    outputs: VecDeque<Out>,
    stopping: bool,
}

type Out = Output<Status, Resource, Failure>;

/// The numbers of this worker.
struct Holder {
    session: SessionId,
    lease: Duration,
    free: VecDeque<u64>,
    /// By client and question: which number, until when.
    leases: BTreeMap<(PeerId, u64), (u64, Time)>,
    closed: bool,
}

/// A client's session that has not ended.
enum Client {
    Opened,
    Asking { holder: PeerId, slot: Slot, again: Time, deadline: Time, within: Duration },
    Holding { slot: Slot, until: Time },
}

impl Counter {
    pub fn new(metadata: Bytes) -> Counter {
        Counter {
            metadata,
            peers: BTreeMap::new(),
            next_peer: 1,
            holder: None,
            clients: BTreeMap::new(),
            outputs: VecDeque::new(),
            stopping: false,
        }
    }

    /// The numbers that clients of this worker may use at the moment.
    pub fn numbers(&self) -> impl Iterator<Item = (SessionId, u64)> {
        self.clients.iter().filter_map(|(session, client)| match client {
            Client::Holding { slot, .. } => Some((*session, slot.0?)),
            _ => None,
        })
    }

    fn command(&mut self, now: Time, command: Command) {
        match command {
            Command::Hold { session, numbers, lease } => {
                if self.holder.is_some() || self.stopping {
                    self.status(session, Status::Failed, Some(Failure::Stopped));
                    return self.release(session, Resource::Numbers(numbers));
                }
                let (free, leases) = (numbers.into(), BTreeMap::new());
                self.holder = Some(Holder { session, lease, free, leases, closed: false });
                self.status(session, Status::Open, None);
            }
            Command::Open { session } if self.stopping => {
                self.status(session, Status::Failed, Some(Failure::Stopped));
            }
            Command::Open { session } => drop(self.clients.insert(session, Client::Opened)),
            Command::Ask { session, holder, slot, within, ready: _ } => {
                let asks = matches!(self.clients.get(&session), Some(Client::Opened));
                let Some(holder) = self.peer(holder).filter(|_| asks) else {
                    self.end(session, Some(Failure::HolderGone));
                    return self.release(session, Resource::Slot(slot));
                };
                let deadline = now + within;
                let asking = Client::Asking { holder, slot, again: now, deadline, within };
                self.clients.insert(session, asking);
            }
            Command::NotReady { session, slot, error } => {
                self.end(session, Some(Failure::NotReady(error)));
                self.release(session, Resource::Slot(slot));
            }
            Command::Abort { session } => self.abort(session, Failure::Aborted),
            Command::Shutdown => {
                self.stopping = true;
                let clients: Vec<SessionId> = self.clients.keys().copied().collect();
                let holder = self.holder.iter().map(|holder| holder.session);
                for session in holder.chain(clients).collect::<Vec<_>>() {
                    self.abort(session, Failure::Stopped);
                }
            }
        }
    }

    fn abort(&mut self, session: SessionId, failure: Failure) {
        match &mut self.holder {
            Some(holder) if holder.session == session && !holder.closed => {
                holder.closed = true;
                self.status(session, Status::Failed, Some(failure));
            }
            _ => self.end(session, Some(failure)),
        }
    }

    /// Ends a client's session; its slot comes back.
    fn end(&mut self, session: SessionId, failure: Option<Failure>) {
        let Some(client) = self.clients.remove(&session) else { return };
        let status = if failure.is_some() { Status::Failed } else { Status::Over };
        let slot = match client {
            Client::Opened => None,
            Client::Asking { slot, .. } => Some(slot),
            Client::Holding { slot, .. } if failure.is_none() => Some(slot),
            Client::Holding { .. } => Some(Slot::default()),
        };
        self.status(session, status, failure);
        if let Some(slot) = slot {
            self.release(session, Resource::Slot(slot));
        }
    }

    fn message(&mut self, now: Time, message: Message) {
        match message {
            Message::Ask { question, asked, metadata } => {
                let Some(peer) = self.peer(metadata) else { return };
                let Some(holder) = &mut self.holder else { return };
                let known = holder.leases.get(&(peer, question)).copied();
                let leased = known.or_else(|| {
                    let number = if holder.closed { None } else { holder.free.pop_front() }?;
                    holder.leases.insert((peer, question), (number, now + holder.lease));
                    Some((number, now + holder.lease))
                });
                let Some((number, until)) = leased else { return };
                let answer = Message::Leased { question, asked, number, lasts: until.since(now) };
                self.outputs.push_back(Output::Send { peer, frame: answer.encode() });
            }
            Message::Leased { question, asked, number, lasts } => {
                let session = SessionId(question);
                let Some(Client::Asking { slot, .. }) = self.clients.get_mut(&session) else { return };
                let until = Time::from_nanos(asked).min(now) + lasts;
                if until <= now {
                    // Too late to be of use; the next question gets a lease that lasts.
                    return;
                }
                let slot = Slot(std::mem::take(slot).0.or(Some(number)));
                self.clients.insert(session, Client::Holding { slot, until });
                self.status(session, Status::Open, None);
            }
        }
    }

    /// What time brings about: questions again, ends of leases on both sides.
    fn tick(&mut self, now: Time) {
        let mut ended = Vec::new();
        for (session, client) in &mut self.clients {
            match client {
                Client::Asking { deadline, within, .. } if *deadline <= now => {
                    ended.push((*session, Some(Failure::NoNumber(*within))));
                }
                Client::Asking { holder, again, .. } if *again <= now => {
                    *again = now + AGAIN;
                    let (question, asked) = (session.0, now.as_nanos());
                    let ask = Message::Ask { question, asked, metadata: self.metadata.clone() };
                    self.outputs.push_back(Output::Send { peer: *holder, frame: ask.encode() });
                }
                Client::Holding { until, .. } if *until <= now => ended.push((*session, None)),
                _ => {}
            }
        }
        for (session, failure) in ended {
            self.end(session, failure);
        }
        let Some(holder) = &mut self.holder else { return };
        let free = &mut holder.free;
        holder.leases.retain(|_, (number, until)| {
            let lasts = *until > now;
            if !lasts {
                free.push_back(*number);
            }
            lasts
        });
        if holder.closed && holder.leases.is_empty() {
            let (session, numbers) = (holder.session, Vec::from(std::mem::take(free)));
            self.holder = None;
            self.release(session, Resource::Numbers(numbers));
        }
    }

    /// The peer with this metadata, connected if it was not.
    fn peer(&mut self, metadata: Bytes) -> Option<PeerId> {
        if let Some(peer) = self.peers.get(&metadata) {
            return Some(*peer);
        }
        if self.peers.len() == MAX_PEERS {
            return None;
        }
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        self.peers.insert(metadata.clone(), peer);
        self.outputs.push_back(Output::Connect { peer, metadata });
        Some(peer)
    }

    /// Nothing reaches the peer any more. Leases that it has go on to their ends.
    fn gone(&mut self, gone: PeerId) {
        self.peers.retain(|_, peer| *peer != gone);
        let asks = |client: &Client| matches!(client, Client::Asking { holder, .. } if *holder == gone);
        let failed = self.clients.iter().filter(|(_, client)| asks(client));
        for session in failed.map(|(session, _)| *session).collect::<Vec<_>>() {
            self.end(session, Some(Failure::HolderGone));
        }
    }

    fn status(&mut self, session: SessionId, poll: Status, failure: Option<Failure>) {
        self.outputs.push_back(Output::Status { session, poll, failure: failure.map(Box::new) });
    }

    fn release(&mut self, session: SessionId, resource: Resource) {
        self.outputs.push_back(Output::Release { session, resource });
    }
}

impl Machine for Counter {
    type Command = Command;
    type Status = Status;
    type Resource = Resource;
    type Failure = Failure;
    type Quarantine = Leased;

    fn handle(&mut self, now: Time, input: Input<Command>) {
        match input {
            Input::Command(command) => self.command(now, command),
            Input::Frame { frame, .. } => {
                if let Some(message) = Message::decode(&frame) {
                    self.message(now, message);
                }
            }
            Input::PeerGone { peer, .. } | Input::ConnectFailed { peer, .. } => self.gone(peer),
            _ => {}
        }
        self.tick(now);
    }

    fn poll_output(&mut self) -> Option<Out> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        let clients = self.clients.values().filter_map(|client| match client {
            Client::Opened => None,
            Client::Asking { again, deadline, .. } => Some(*again.min(deadline)),
            Client::Holding { until, .. } => Some(*until),
        });
        let leases = self.holder.iter().flat_map(|holder| holder.leases.values().map(|(_, until)| *until));
        clients.chain(leases).min()
    }

    fn leased(&self) -> usize {
        self.holder.as_ref().map_or(0, |holder| holder.leases.len())
    }

    fn quarantine(&self) -> Vec<Leased> {
        let closed = self.holder.iter().filter(|holder| holder.closed);
        closed.map(|holder| Leased { numbers: holder.leases.len() }).collect()
    }

    fn metadata_in(&self, frame: &[u8]) -> Option<Bytes> {
        match Message::decode(frame)? {
            Message::Ask { metadata, .. } => Some(metadata),
            Message::Leased { .. } => None,
        }
    }
}
