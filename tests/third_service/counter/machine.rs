//! The machine of the service. It is holder and client in one, because any worker may be both.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use kv_transfer::unstable::machine::{Input, Machine, Output};
use kv_transfer::unstable::{RankQuery, RankRecord, Replica, TransportOffer};
use kv_transfer::{LookupId, PeerId, SessionId, Time};

use super::wire::Message;
use super::{Command, Failure, Leased, ROLE, Resource, SERVICE, Slot, Status, Whom};

/// The pause between two questions of a client.
const AGAIN: Duration = Duration::from_millis(20);
/// Most workers that are known at once; others are not answered.
const MAX_PEERS: usize = 64;
/// The name of the transport between the workers. A transport that is not made of several ignores it.
const TRANSPORT: &str = "local";
/// A client counts its lease shorter by this fraction, because the holder's clock may be that much faster.
const MARGIN: u32 = 1000;

/// Bugs that are planted to see that tests find them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// The holder takes a number back before its lease ends.
    ReturnsEarly,
    /// The client keeps the slot of a session that has failed.
    KeepsSlots,
    /// The client asks on when the time for an answer is over.
    AsksOn,
}

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
    mistake: Option<Mistake>,
}

type Out = Output<Status, Resource, Failure>;

/// The numbers of this worker, as a holder.
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
    Asking(Asking),
    Holding { slot: Slot, until: Time },
}

/// A question of a client that has no answer yet.
struct Asking {
    whom: Whom,
    /// The peer that is asked. `None` until the holder is found, and again when the way to it has ended.
    holder: Option<PeerId>,
    slot: Slot,
    /// When to ask next; never while a bootstrap server is asked.
    again: Time,
    deadline: Time,
    within: Duration,
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
            mistake: None,
        }
    }

    /// The same machine with a bug.
    pub fn mistaken(self, mistake: Option<Mistake>) -> Counter {
        Counter { mistake, ..self }
    }

    /// The numbers that clients of this worker may use, each until when.
    pub fn numbers(&self) -> impl Iterator<Item = (SessionId, u64, Time)> {
        self.clients.iter().filter_map(|(session, client)| match client {
            Client::Holding { slot, until } => Some((*session, slot.0?, *until)),
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
            Command::Ask { session, whom, slot, within, ready: _ } => {
                if !matches!(self.clients.get(&session), Some(Client::Opened)) {
                    return self.release(session, Resource::Slot(slot));
                }
                let asks_for = if self.is(Mistake::AsksOn) { 10 * within } else { within };
                let deadline = now + asks_for;
                let asking = Asking { whom, holder: None, slot, again: now, deadline, within };
                self.clients.insert(session, Client::Asking(asking));
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

    /// Ends a client's session, and hands its slot back.
    fn end(&mut self, session: SessionId, failure: Option<Failure>) {
        let Some(client) = self.clients.remove(&session) else { return };
        let status = if failure.is_some() { Status::Failed } else { Status::Over };
        let slot = match client {
            Client::Opened => None,
            Client::Asking(asking) => Some(asking.slot),
            Client::Holding { slot, .. } if failure.is_none() => Some(slot),
            Client::Holding { .. } => Some(Slot::default()),
        };
        let kept = failure.is_some() && self.is(Mistake::KeepsSlots);
        self.status(session, status, failure);
        if let Some(slot) = slot.filter(|_| !kept) {
            self.release(session, Resource::Slot(slot));
        }
    }

    fn message(&mut self, now: Time, message: Message) {
        match message {
            Message::Ask { question, asked, client } => {
                let Some(peer) = self.peer(client.clone()) else { return };
                let Some(holder) = &mut self.holder else { return };
                let known = holder.leases.get(&(peer, question)).copied();
                let leased = known.or_else(|| {
                    let number = if holder.closed { None } else { holder.free.pop_front() }?;
                    holder.leases.insert((peer, question), (number, now + holder.lease));
                    Some((number, now + holder.lease))
                });
                let Some((number, until)) = leased else { return };
                let answer = Message::Leased { question, asked, number, lasts: until.since(now), client };
                self.outputs.push_back(Output::Send { peer, frame: answer.encode() });
            }
            Message::Leased { question, asked, number, lasts, client } => {
                let session = SessionId(question);
                let Some(Client::Asking(asking)) = self.clients.get_mut(&session) else { return };
                let until = Time::from_nanos(asked).min(now) + (lasts - lasts / MARGIN);
                // An answer to a former life of this worker, or one that came too late to be of use: the
                // next question gets a lease that lasts.
                if client != self.metadata || until <= now {
                    return;
                }
                let slot = Slot(std::mem::take(&mut asking.slot).0.or(Some(number)));
                self.clients.insert(session, Client::Holding { slot, until });
                self.status(session, Status::Open, None);
            }
        }
    }

    /// Does what is due at this time: repeats questions, and ends leases on both sides.
    fn tick(&mut self, now: Time) {
        let mut ended = Vec::new();
        let mut due = Vec::new();
        for (session, client) in &self.clients {
            match client {
                Client::Asking(asking) if asking.deadline <= now => {
                    ended.push((*session, Some(Failure::NoNumber(asking.within))));
                }
                Client::Asking(asking) if asking.again <= now => due.push(*session),
                Client::Holding { until, .. } if *until <= now => ended.push((*session, None)),
                _ => {}
            }
        }
        for (session, failure) in ended {
            self.end(session, failure);
        }
        for session in due {
            self.ask(now, session);
        }
        let early = self.is(Mistake::ReturnsEarly);
        let Some(holder) = &mut self.holder else { return };
        let (free, early) = (&mut holder.free, if early { holder.lease / 2 } else { Duration::ZERO });
        holder.leases.retain(|_, (number, until)| {
            let lasts = *until > now + early;
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

    /// Asks the holder for a number, or a bootstrap server for the holder.
    fn ask(&mut self, now: Time, session: SessionId) {
        let Some(Client::Asking(asking)) = self.clients.get_mut(&session) else { return };
        let (known, whom) = (asking.holder, asking.whom.clone());
        asking.again = if known.is_some() { now + AGAIN } else { Time::MAX };
        match (known, whom) {
            (Some(peer), _) => {
                let (question, asked, client) = (session.0, now.as_nanos(), self.metadata.clone());
                let frame = Message::Ask { question, asked, client }.encode();
                self.outputs.push_back(Output::Send { peer, frame });
            }
            (None, Whom::Worker(metadata)) => self.found(now, session, Some(metadata)),
            (None, Whom::Registered(addr)) => {
                let query = RankQuery { role: ROLE, service: SERVICE.to_owned(), replica: Replica::Rank(0) };
                self.outputs.push_back(Output::Lookup { lookup: LookupId(session.0), addr, query });
            }
        }
    }

    /// The holder of a question is found; with `None`, a bootstrap server knows none at the moment.
    fn found(&mut self, now: Time, session: SessionId, metadata: Option<Bytes>) {
        let known = metadata.map(|metadata| self.peer(metadata));
        let Some(Client::Asking(asking)) = self.clients.get_mut(&session) else { return };
        match known {
            Some(Some(peer)) => {
                asking.holder = Some(peer);
                self.ask(now, session);
            }
            Some(None) => self.end(session, Some(Failure::HolderGone)),
            None => asking.again = now + AGAIN,
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
        let transport = TransportOffer::new(TRANSPORT, metadata);
        self.outputs.push_back(Output::Connect { peer, transport });
        Some(peer)
    }

    /// Forgets a peer that can no longer be reached. Its leases run on to their ends, and a registered holder
    /// is looked up again.
    fn gone(&mut self, now: Time, gone: PeerId) {
        self.peers.retain(|_, peer| *peer != gone);
        self.outputs.push_back(Output::Disconnect { peer: gone });
        let mut failed = Vec::new();
        for (session, client) in &mut self.clients {
            match client {
                Client::Asking(asking) if asking.holder == Some(gone) => match asking.whom {
                    Whom::Worker(_) => failed.push(*session),
                    Whom::Registered(_) => (asking.holder, asking.again) = (None, now + AGAIN),
                },
                _ => {}
            }
        }
        for session in failed {
            self.end(session, Some(Failure::HolderGone));
        }
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
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
    type Trace = Infallible;

    fn handle(&mut self, now: Time, input: Input<Command>) {
        match input {
            Input::Command(command) => self.command(now, command),
            Input::Frame { frame, .. } => {
                if let Some(message) = Message::decode(&frame) {
                    self.message(now, message);
                }
            }
            Input::PeerGone { peer, .. } | Input::ConnectFailed { peer, .. } => self.gone(now, peer),
            Input::Found { lookup, ranks } => {
                let way = |rank: &RankRecord| Some(rank.transports.first()?.metadata.clone());
                self.found(now, SessionId(lookup.0), ranks.first().and_then(way));
            }
            Input::LookupFailed { lookup, .. } => self.found(now, SessionId(lookup.0), None),
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
            Client::Asking(asking) => Some(asking.again.min(asking.deadline)),
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

    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        match Message::decode(frame)? {
            Message::Ask { client, .. } => Some(TransportOffer::new(TRANSPORT, client)),
            Message::Leased { .. } => None,
        }
    }
}
