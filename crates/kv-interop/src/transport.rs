//! [`InteropTransport`]: NIXL and ZeroMQ side channels as one transport.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    Directions, MAX_FRAME, Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError,
    TransportEvent, TransportOffer, TransportWait, WriteFence,
};

use crate::agents::Agents;
use crate::channels::{ChannelConfig, ChannelCounts, ChannelError, Channels, Event};
use crate::message::{Incoming, Message, Way};

/// Most bytes of notifications that wait for one agent.
const MAX_KEPT: usize = 4 << 20;
/// What a notification that waits counts beside its bytes.
const OVERHEAD: usize = 64;
/// How soon notifications that wait are tried again.
const KEPT_RETRY: Duration = Duration::from_millis(10);
/// Most agents with an [`Origin`] of their own. Notifications of all others share one.
const MAX_NAMES: usize = 4096;
/// Most notifications that one call of `poll` passes on.
const NOTIFICATIONS_PER_POLL: usize = 256;
/// Longest sleep while notifications are expected.
const EXPECTING_SLEEP: Duration = Duration::from_micros(500);
/// How long notifications are expected after the last frame to or from an agent: two heartbeats of vLLM.
const EXPECTING: Duration = Duration::from_secs(10);

/// Where the origins of connections to the listening socket begin, and those of the worker's own connections.
/// Below are those of agents.
const CONNECTIONS: u64 = 1 << 32;
const ANSWERS: u64 = 1 << 62;

/// The transport under a dialect's machine: foreign NIXL agents, and the ZeroMQ sockets of foreign engines.
///
/// Beyond the contract of [`Transport`], with the words of [`message`](crate::message):
///
/// - [`connect_by`](Transport::connect_by) takes the [offer of a `Way`](Way::offer). A connection is made in the
///   background, and what is sent meanwhile waits. A way that cannot be opened ends with
///   [`PeerGone`](TransportEvent::PeerGone) as [`Lost`](kv_core::WayEnd::Lost), without another try: after the
///   first refusal, or after [`connect_timeout`](ChannelConfig::connect_timeout). The port of a `Push` peer has
///   been bound by the process that told the port: two refusals in a row are the proof that the process is dead.
/// - A side channel takes the frames of a [`Message`]: a `Request` peer sends them one at a time, each after the
///   answer to the one before, so that a question without an answer holds up those behind it until the peer is
///   disconnected. An agent takes raw notifications. What the agent's allowance has no room for waits here, up
///   to 4 MiB; beyond, `send` answers [`WouldBlock`](TransportError::WouldBlock).
/// - [`poll`](Transport::poll) brings every message and notification as the frame of an [`Incoming`].
/// - The end of an open side channel is noticed while nothing is being sent. It is
///   [`Dead`](kv_core::WayEnd::Dead) if the port then refuses two connections in a row, 100 ms apart, which the
///   system does when the process that had bound the port has ended; otherwise `Lost`.
/// - The [`metadata`](Transport::metadata) are empty, and there are no offers: nothing of the transport is published.
/// - NIXL has no descriptor to wait on. The transport sleeps at most 0.5 ms until ten seconds after the last
///   frame to or from an agent, two heartbeats of vLLM, and as long as NIXL sleeps otherwise. Messages of side
///   channels end the sleep at once.
#[derive(Debug)]
pub struct InteropTransport<A> {
    agents: A,
    channels: Channels,
    /// The peers that are agents, with the notifications that wait for each.
    waiting: BTreeMap<PeerId, Waiting>,
    /// The origin of each agent that has sent a notification.
    origins: BTreeMap<Arc<str>, u64>,
    /// When the last frame was sent to an agent, or came from one.
    stirred: Option<Instant>,
    /// More notifications may be there than the last `poll` has passed on.
    more: bool,
    events: Vec<Event>,
}

#[derive(Debug, Default)]
struct Waiting {
    notifications: VecDeque<Bytes>,
    size: usize,
}

impl<A: Agents> InteropTransport<A> {
    /// A transport of these agents. With [`ChannelConfig::listen`], the transport's PULL socket listens from now on.
    ///
    /// # Errors
    ///
    /// [`ChannelError`] if the address to listen on cannot be used, or the system refuses a descriptor.
    pub fn new(agents: A, config: ChannelConfig) -> Result<InteropTransport<A>, ChannelError> {
        Ok(InteropTransport {
            agents,
            channels: Channels::new(config)?,
            waiting: BTreeMap::new(),
            origins: BTreeMap::new(),
            stirred: None,
            more: false,
            events: Vec::new(),
        })
    }

    /// The transport of the agents, for the metadata that go into a handshake.
    pub fn agents(&self) -> &A {
        &self.agents
    }

    /// The address of the PULL socket, with the port that the system picked; `None` without
    /// [`ChannelConfig::listen`].
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.channels.local_addr()
    }

    /// A handle that reads the counts of the side channels while a worker owns the transport.
    pub fn counts(&self) -> ChannelCounts {
        self.channels.counts().clone()
    }

    fn open(&mut self, peer: PeerId, way: Option<Way>) -> Result<(), TransportError> {
        if self.channels.has(peer) || self.waiting.contains_key(&peer) {
            return Err(TransportError::Unsupported("the id is that of a connected peer"));
        }
        match way.ok_or(TransportError::Metadata("the offer holds no way to a foreign engine"))? {
            Way::Request { addr } => self.channels.request(peer, &addr),
            Way::Push { addr } => self.channels.push(peer, &addr),
            Way::Agent { metadata, regions } => {
                self.agents.connect_agent(peer, &metadata, &regions)?;
                self.waiting.insert(peer, Waiting::default());
                self.stir();
                Ok(())
            }
        }
    }

    fn stir(&mut self) {
        self.stirred = Some(Instant::now());
    }

    /// Sends the notifications that wait, as far as the agents' allowances have room.
    fn send_waiting(&mut self) {
        for (peer, waiting) in &mut self.waiting {
            while let Some(next) = waiting.notifications.front() {
                if self.agents.send(*peer, next.clone()) == Err(TransportError::WouldBlock) {
                    break;
                }
                waiting.size -= next.len() + OVERHEAD;
                waiting.notifications.pop_front();
            }
        }
    }

    /// Passes on the notifications that have come.
    fn take_notifications(&mut self, events: &mut Vec<TransportEvent>) {
        self.more = true;
        for _ in 0..NOTIFICATIONS_PER_POLL {
            let Some((agent, bytes)) = self.agents.next_notification() else {
                self.more = false;
                break;
            };
            self.stir();
            let from = self.origin(&agent);
            let frame = Incoming::Notification { agent: agent.as_ref().to_owned(), bytes }.encode();
            self.pass_on(from, frame, events);
        }
    }

    /// The origin of an agent of this name: the same for as long as this transport lives.
    fn origin(&mut self, agent: &Arc<str>) -> Origin {
        let next = self.origins.len() as u64;
        match self.origins.get(agent) {
            Some(number) => Origin(*number),
            None if self.origins.len() < MAX_NAMES => {
                self.origins.insert(Arc::clone(agent), next);
                Origin(next)
            }
            None => Origin(MAX_NAMES as u64),
        }
    }

    fn pass_on(&self, from: Origin, frame: Bytes, events: &mut Vec<TransportEvent>) {
        if frame.len() > MAX_FRAME {
            self.channels.counts().0.dropped();
        } else {
            events.push(TransportEvent::Frame { from, frame });
        }
    }

    /// Passes on what has come by side channels.
    fn take_messages(&mut self, events: &mut Vec<TransportEvent>) {
        let mut came = std::mem::take(&mut self.events);
        self.channels.poll(&mut came);
        for event in came.drain(..) {
            match event {
                Event::Answer { peer, parts } => {
                    self.pass_on(Origin(ANSWERS + peer.0), Incoming::reply(peer, parts).encode(), events);
                }
                Event::Message { connection, parts } => {
                    let incoming = Incoming::Message { peer: None, message: Message(parts) };
                    self.pass_on(Origin(CONNECTIONS + connection), incoming.encode(), events);
                }
                Event::Gone { peer, end } => events.push(TransportEvent::PeerGone { peer, end }),
            }
        }
        self.events = came;
    }

    /// The longest sleep that the side channels and expected notifications allow.
    fn longest_sleep(&self) -> Option<Duration> {
        let kept = self.waiting.values().any(|waiting| !waiting.notifications.is_empty());
        let expecting = self.stirred.is_some_and(|stirred| stirred.elapsed() < EXPECTING);
        let agents = expecting.then_some(EXPECTING_SLEEP).into_iter().chain(kept.then_some(KEPT_RETRY));
        agents.chain(self.channels.sleep()).min()
    }
}

impl<A: Agents> Transport for InteropTransport<A> {
    fn name(&self) -> &'static str {
        "interop"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.agents.register(region)
    }

    /// Empty, because no worker connects a transport of this kind. Fails if the agents have no metadata.
    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.agents.agent_metadata().map(|_| Bytes::new())
    }

    /// Empty: what a foreign engine needs goes by its own handshake.
    fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        Ok(Vec::new())
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        let offer = TransportOffer::new(self.name(), Bytes::copy_from_slice(metadata));
        self.open(peer, Way::of(&offer))
    }

    fn connect_by(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        self.open(peer, Way::of(transport))
    }

    fn disconnect(&mut self, peer: PeerId) {
        match self.waiting.remove(&peer) {
            Some(_) => self.agents.disconnect(peer),
            None => self.channels.disconnect(peer),
        }
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        let Some(waiting) = self.waiting.get_mut(&peer) else {
            return self.channels.send(peer, Message::decode(&frame).map(|message| message.0));
        };
        let sent = match waiting.notifications.is_empty() {
            true => self.agents.send(peer, frame.clone()),
            false => Err(TransportError::WouldBlock),
        };
        if sent == Err(TransportError::WouldBlock) && waiting.size + frame.len() + OVERHEAD <= MAX_KEPT {
            waiting.size += frame.len() + OVERHEAD;
            waiting.notifications.push_back(frame);
            return Ok(());
        }
        self.stir();
        sent
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if self.channels.has(peer) {
            return Err(TransportError::Unsupported("a post to a side channel"));
        }
        self.stir();
        self.agents.post(peer, post)
    }

    fn cancel(&mut self, post: PostId) {
        self.agents.cancel(post);
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        self.agents.permit(peer, until);
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        self.agents.write_fence(peer)
    }

    fn revoke(&mut self, peer: PeerId) {
        self.agents.revoke(peer);
    }

    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        let before = events.len();
        self.agents.poll(now, events);
        // Frames of other workers cannot be meant for a foreign dialect.
        let mut at = 0;
        events.retain(|event| {
            at += 1;
            at <= before || !matches!(event, TransportEvent::Frame { .. })
        });
        for event in events.iter().skip(before) {
            if let TransportEvent::PeerGone { peer, .. } = event {
                self.waiting.remove(peer);
            }
        }
        self.take_notifications(events);
        self.take_messages(events);
        self.send_waiting();
    }

    fn wait(&self) -> TransportWait {
        let with = |mut fds: Vec<RawFd>| {
            fds.push(self.channels.as_raw_fd());
            fds
        };
        let sleep = self.longest_sleep();
        match self.agents.wait() {
            _ if self.more || sleep == Some(Duration::ZERO) => TransportWait::Now,
            TransportWait::Now => TransportWait::Now,
            TransportWait::Readable(fds) => match sleep {
                Some(sleep) => TransportWait::ReadableOrAfter(with(fds), sleep),
                None => TransportWait::Readable(with(fds)),
            },
            TransportWait::ReadableOrAfter(fds, longest) => {
                let sleep = sleep.map_or(longest, |sleep| sleep.min(longest));
                TransportWait::ReadableOrAfter(with(fds), sleep)
            }
        }
    }

    fn directions(&self, peer: Option<PeerId>) -> Directions {
        self.agents.directions(peer)
    }
}

#[cfg(test)]
pub(crate) mod tests;
