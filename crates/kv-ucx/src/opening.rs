//! Ways to peers and their beginning: hellos, welcomes, and what else comes in messages.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{MAX_FRAME, Origin, PeerId, TransportError, TransportEvent, WayEnd};
use kv_host::{Host, Life, ProcessIdentity, Token};

use crate::ffi::engine::Arrived;
use crate::message::{self, Hello, Kind, MAX_KEY, Welcome};
use crate::metadata::{self, Metadata, Name};
use crate::remote::{Remote, RemoteId};
use crate::transport::UcxTransport;
use crate::way::{Session, Stage, Way, WayId};

/// After so long without an answer, a hello is sent again: a peer may have lost its own connection to this side just
/// when the answer was on it.
const AGAIN: Duration = Duration::from_secs(1);

impl UcxTransport {
    /// Begins to open the way to the peer of the metadata.
    pub(crate) fn open_way(&mut self, peer: PeerId, bytes: &[u8]) -> Result<(), TransportError> {
        // What was registered is part of what the peer may need; it cannot change from now on.
        self.given.hash()?;
        let Metadata { name, host, process, regions } = Metadata::decode(bytes)?;
        let hash = metadata::hash(bytes);
        if let Some(way) = self.peers.get(&peer).and_then(|id| self.ways.get(id)) {
            let remote = self.remotes.get(way.remote).filter(|remote| remote.is_standing());
            let same = way.hash == hash && remote.is_some_and(|remote| remote.name == name);
            return if same {
                Ok(())
            } else {
                Err(TransportError::Unsupported(
                    "the id is that of a connected peer, which has other metadata",
                ))
            };
        }
        if self.peers.len() >= self.config.max_peers {
            return Err(TransportError::WouldBlock);
        }
        let token = Token::random()?;
        let remote = self.meet(name, host, process)?;
        let id = self.next_id();
        let until = self.now + self.config.handshake_timeout;
        self.ways.insert(id, Way::new(peer, remote, token, hash, regions, until));
        self.by_token.insert(token, id);
        self.peers.insert(peer, id);
        if let Some(remote) = self.remotes.get_mut(remote) {
            remote.ways.insert(id);
        }
        if self.remotes.get(remote).is_some_and(|remote| remote.life.is_over()) {
            self.break_off(remote);
        } else {
            self.ask_again(id);
        }
        Ok(())
    }

    /// The remote of a name, which is met now if it is not known.
    fn meet(&mut self, name: Name, host: Host, process: ProcessIdentity) -> Result<RemoteId, TransportError> {
        if let Some(id) = self.remotes.by_name(&name) {
            return Ok(id);
        }
        // Where the network is another one, this side cannot see what a dead process has left in its connections.
        let near = self.given.host.check(&host).is_ok();
        let life = if near { process.watch(&host) } else { Life::Unseen };
        if self.remotes.len() >= self.config.max_known {
            let oldest = self.remotes.oldest_idle().ok_or(TransportError::WouldBlock)?;
            self.break_off(oldest);
        }
        let secret = Token::random()?;
        let endpoint = match life.is_over() {
            true => self.engine.closed(),
            false => self.engine.open(&name.address).map_err(|failure| self.backend(failure))?,
        };
        let id = self.next_id();
        if let Life::Watched(process) = &life
            && let Err(error) = self.watch.add(id, process)
        {
            self.engine.close(endpoint);
            return Err(error.into());
        }
        let parting = self.parted.parting(&name);
        self.remotes.insert(id, Remote::new(name, (host, process), life, endpoint, secret));
        // Otherwise the peer goes on by an endpoint that leads nowhere since this side has closed its own.
        if let Some(parting) = parting
            && self.engine.send(endpoint, message::header(Kind::Parted, parting), Bytes::new()).is_err()
        {
            self.break_off_after_failure(id);
        }
        Ok(id)
    }

    /// Says hello on a way that is not open, or gives the way up when its time is over.
    pub(crate) fn ask_again(&mut self, id: WayId) {
        let Some(way) = self.ways.get(&id) else { return };
        let Stage::Opening { until } = way.stage else { return };
        let Some(remote) = self.remotes.get(way.remote).filter(|remote| remote.is_standing()) else { return };
        if until <= self.now {
            self.end_way(id, WayEnd::Lost);
            return;
        }
        let name = self.given.name().clone();
        let hello = Hello {
            to: remote.name.token,
            hash: way.hash,
            from: name,
            host: self.given.host,
            process: self.given.process,
            parting: remote.parting,
        };
        let (endpoint, header) = (remote.endpoint, message::header(Kind::Hello, way.token));
        let remote = way.remote;
        self.opening.insert((until.min(self.now + AGAIN), id));
        if self.engine.send(endpoint, header, hello.encode()).is_err() {
            self.break_off_after_failure(remote);
        }
    }

    /// Looks at a message.
    pub(crate) fn on_message(&mut self, Arrived { header, body }: Arrived) {
        let known = match message::read_header(&header) {
            Some((Kind::Hello, way)) => self.on_hello(way, &body),
            Some((Kind::Welcome, way)) => self.on_welcome(way, &body),
            Some((Kind::Frame, session)) => self.on_frame(session, body),
            Some((Kind::Goodbye, session)) => {
                self.remotes.end_session(session);
                Some(())
            }
            Some((Kind::Parted, parting)) => {
                // Of an endpoint that this side has closed, too, nothing is left to be ended.
                if let Some(remote) = self.remotes.by_parting(parting) {
                    self.break_off(remote);
                }
                Some(())
            }
            Some((Kind::Farewell, parting)) => {
                if let Some(remote) = self.remotes.by_parting(parting) {
                    self.on_farewell(remote);
                }
                Some(())
            }
            None => None,
        };
        self.stats.strangers += u64::from(known.is_none());
    }

    /// A transport asks for a session, and gets it at the address of the name that it gives.
    fn on_hello(&mut self, way: Token, body: &[u8]) -> Option<()> {
        let Hello { to, hash, from, host, process, parting } = Hello::decode(body)?;
        if to != self.given.name().token || hash != self.given.hash().ok()? {
            return None;
        }
        let id = self.meet(from, host, process).ok()?;
        let session = self.remotes.session(id, way, Token::random().ok()?)?;
        let remote = self.remotes.get_mut(id)?;
        remote.their_parting = Some(parting);
        let (endpoint, parting) = (remote.endpoint, remote.parting);
        // One who asks and asks, and takes no answer, is not answered. A peer that does take them asks again.
        if self.engine.unsent(endpoint) >= self.config.outbound_bytes {
            return Some(());
        }
        let welcome = Welcome { session, keys: self.own_keys()?, parting };
        if self.engine.send(endpoint, message::header(Kind::Welcome, way), welcome.encode()).is_err() {
            self.break_off_after_failure(id);
        }
        Some(())
    }

    /// The keys of this side's regions.
    fn own_keys(&mut self) -> Option<Vec<Bytes>> {
        if self.keys.is_none() {
            let key = |region| self.engine.key(region).ok().map(Bytes::from);
            self.keys = (0..self.given.regions().len()).map(key).collect();
        }
        self.keys.clone().filter(|keys| keys.iter().all(|key| key.len() <= MAX_KEY))
    }

    /// A peer has answered a hello.
    fn on_welcome(&mut self, way: Token, body: &[u8]) -> Option<()> {
        let id = *self.by_token.get(&way)?;
        let way = self.ways.get_mut(&id)?;
        let Stage::Opening { .. } = way.stage else { return Some(()) };
        let Welcome { session: token, keys: packed, parting } = Welcome::decode(body)?;
        if packed.len() != way.regions.len() {
            return None;
        }
        if let Some(remote) = self.remotes.get_mut(way.remote) {
            remote.their_parting = Some(parting);
        }
        let keys = vec![None; packed.len()];
        way.stage = Stage::Open(Session { token, packed, keys });
        self.stirred.insert(id);
        Some(())
    }

    fn on_frame(&mut self, session: Token, frame: Bytes) -> Option<()> {
        let Some(from) = self.remotes.by_session(session).map(Origin) else {
            self.on_stray_frame(session);
            return None;
        };
        (frame.len() <= MAX_FRAME).then_some(())?;
        self.posts.tell(TransportEvent::Frame { from, frame });
        Some(())
    }

    /// A frame of no session. If the session was a peer's until this side has parted from it, the peer is told.
    fn on_stray_frame(&mut self, session: Token) {
        let Some(peer) = self.parted.by_session(session, self.now) else { return };
        // If that fails, a later frame has it tried again. A peer that is known has been told when it was met.
        let _ = self.meet(peer.name, peer.host, peer.process);
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout)]
mod tests {
    use std::time::{Duration, Instant};

    use kv_core::{PeerId, Region, RegionRole, Time, Transport};
    use kv_host::Arena;

    use super::*;
    use crate::config::UcxConfig;
    use crate::library::Ucx;

    /// Most bytes of frames that wait.
    const MOST: usize = 2 * MAX_FRAME;

    #[test]
    fn an_answer_that_came_in_a_pause_of_this_process_opens_the_way() {
        let arena = Arena::new(4096).unwrap();
        let Some(mut here) = transport(&arena, 1) else { return };
        let mut there = transport(&arena, 1).unwrap();
        here.config.handshake_timeout = Duration::from_millis(500);
        here.connect(PeerId(1), &there.metadata().unwrap()).unwrap();
        let (mut events, begun) = (Vec::new(), Instant::now());
        // Only UCX goes on here, until the answer has come and the time for opening is over.
        while !here.engine.has_news() || begun.elapsed() < here.config.handshake_timeout {
            assert!(begun.elapsed() < Duration::from_secs(60), "no answer");
            here.engine.progress();
            there.poll(Time::ZERO, &mut events);
        }
        here.poll(Time::ZERO, &mut events);
        assert_eq!(events, [], "the peer has answered");
        let way = here.ways.values().next().unwrap();
        assert!(matches!(way.stage, Stage::Open(_)), "{:?}", way.stage);
    }

    /// Otherwise posts would end of which no byte has moved, for want of a key.
    #[test]
    fn a_welcome_with_fewer_or_more_keys_than_regions_opens_no_way() {
        let arena = Arena::new(4096).unwrap();
        let Some(mut here) = transport(&arena, 1) else { return };
        let there = transport(&arena, 1).unwrap();
        here.connect(PeerId(1), &there.metadata().unwrap()).unwrap();
        let token = here.ways.values().next().unwrap().token;
        for (keys, opens) in [(0, false), (2, false), (1, true)] {
            let secret = Token::random().unwrap();
            let welcome = Welcome { session: secret, keys: vec![Bytes::new(); keys], parting: secret };
            let header = message::header(Kind::Welcome, token);
            here.on_message(Arrived { header, body: welcome.encode() });
            let way = here.ways.values().next().unwrap();
            assert_eq!(matches!(way.stage, Stage::Open(_)), opens, "{keys} keys");
        }
        assert_eq!(here.stats().strangers, 2);
    }

    /// A transport over TCP on the loopback device; `None`, and the reason why nothing is tested, without UCX.
    fn transport(arena: &Arena, regions: u64) -> Option<UcxTransport> {
        let ucx = kv_conformance::needed("UCX", Ucx::load(None))?;
        let config = UcxConfig::default().with(|config| {
            (config.devices, config.transports) = (vec!["lo".to_owned()], vec!["tcp".to_owned()]);
            config.outbound_bytes = MOST;
        });
        let mut transport = UcxTransport::new(ucx, config).unwrap();
        transport.add_memory(arena).unwrap();
        for region in 0..regions {
            let region = Region::dram(RegionRole::Kv, arena.addr() + 4096 * region, 4096, 1);
            transport.register(&region).unwrap();
        }
        Some(transport)
    }

    #[test]
    fn hellos_without_end_of_a_peer_that_takes_no_answer_make_it_wait_for_few_answers() {
        const REGIONS: u64 = 64;
        let arena = Arena::new(4096 * REGIONS as usize).unwrap();
        let Some(mut here) = transport(&arena, REGIONS) else { return };
        let there = transport(&arena, 1).unwrap();
        let (name, host, process) = (there.given.name(), there.given.host, there.given.process);
        let (to, hash) = (here.given.name().token, here.given.hash().unwrap());
        let parting = Token::random().unwrap();
        let hello = Hello { to, hash, from: name.clone(), host, process, parting };
        let way = Token::random().unwrap();
        let mut most = 0;
        for _ in 0..20_000 {
            let header = message::header(Kind::Hello, way);
            here.on_message(Arrived { header, body: hello.encode() });
            let remote = here.remotes.by_name(name).and_then(|id| here.remotes.get(id)).unwrap();
            most = here.engine.unsent(remote.endpoint).max(most);
        }
        let welcome = MAX_KEY * REGIONS as usize;
        assert!((welcome..MOST + welcome).contains(&most), "{most} bytes wait");
    }
}
