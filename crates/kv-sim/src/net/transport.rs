//! The virtual transport: connections, and the frames that travel on them. Reads and writes are in
//! `posts.rs`.

use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::Input;
use kv_core::{Directions, MAX_FRAME, Origin, OsError, PeerId, WayEnd, WriteFence};

use crate::clock::MS;
use crate::net::calendar::{Event, Report};
use crate::net::fact::{Effects, Fact};
use crate::net::flight::WayId;
use crate::net::host::{Conn, Engine};
use crate::net::lives::{LifeId, Passage, Road, passage, road_and_life, roads_of};
use crate::net::service::Service;
use crate::net::world::World;
use crate::planted::Planted;

impl<S: Service> World<S> {
    // ---- connections -------------------------------------------------------------------------

    pub(crate) fn connect(&mut self, life: LifeId, peer: PeerId, metadata: &[u8]) {
        let target = road_and_life(metadata).filter(|&(_, target)| target < self.hosts.len());
        self.trace.note(self.now, || format!("  life {life} connects peer {peer} = life {target:?}"));
        let fails = self.healed.is_none() && self.rng.chance(self.params.dma.connect_fail);
        let delay = 1 + self.rng.below(2 * MS);
        let Some((road, target)) = target else {
            let way = self.open_way(life, life, 0);
            self.report_later(delay, life, Report::ConnectFailed { peer, way });
            return;
        };
        let way = self.open_way(life, target, road);
        self.counters.second_ways += u64::from(road > 0);
        let slots = (self.hosts[life].slot, self.hosts[target].slot);
        let refused = self.net.refused(road, slots, self.now)
            || matches!(self.passage(road, (life, target)), Passage::Nowhere | Passage::Refused);
        let mut conn = Conn { target, road, way, dead: fails || refused, gone_at: None };
        if conn.dead {
            self.report_later(delay, life, Report::ConnectFailed { peer, way });
        } else if !self.lives[target].alive {
            // Nobody is there: noticed at once, or only later. What is posted until then ends around then.
            let after = match self.rng.chance(500) {
                true => delay,
                false => self.rng.tail(MS, self.params.chaos.detect_max),
            };
            conn.gone_at = Some(self.now + after);
            self.report_later(0, life, Report::Connected { peer, way });
            self.report_later(after, life, Report::PeerGone { peer, way });
        } else {
            self.report_later(0, life, Report::Connected { peer, way });
        }
        self.hosts[life].conns.insert(peer, conn);
    }

    fn passage(&self, road: Road, ends: (LifeId, LifeId)) -> Passage {
        passage(self.params.seed, &self.params.ways, road, ends)
    }

    pub(crate) fn report_later(&mut self, delay: u64, life: LifeId, report: Report) {
        self.calendar.enter(self.now + delay, Event::Report { life, report });
    }

    pub(crate) fn report_connected(&mut self, life: LifeId, peer: PeerId, way: WayId) {
        if !matches!(self.hosts[life].engine, Engine::Node(_)) {
            return;
        }
        let known = self.hosts[life].conns.get(&peer).filter(|conn| conn.way == way && !conn.dead);
        if let Some(conn) = known {
            let fence = self.declared_fence(conn.target, life, conn.road);
            let directions = Directions::BOTH;
            self.feed(life, "connected", Input::Connected { peer, directions, fence });
        }
    }

    pub(crate) fn report_connect_failed(&mut self, life: LifeId, peer: PeerId, way: WayId) {
        if let Some(conn) = self.hosts[life].conns.get_mut(&peer).filter(|conn| conn.way == way) {
            conn.dead = true;
            self.counters.connect_failures += 1;
            if !matches!(self.hosts[life].engine, Engine::Node(_)) {
                // A transport that connects in the background says so when it fails.
                return self.report_peer_gone(life, peer, way);
            }
            let error = OsError::new("connect", std::io::ErrorKind::ConnectionRefused).into();
            self.feed(life, "connect failed", Input::ConnectFailed { peer, error });
        }
    }

    pub(crate) fn report_peer_gone(&mut self, life: LifeId, peer: PeerId, way: WayId) {
        let Some(conn) = self.hosts[life].conns.get_mut(&peer).filter(|conn| conn.way == way) else { return };
        conn.dead = true;
        self.peer_gone(life, peer);
    }

    /// Reports to a machine that its connection to a peer has ended.
    pub(crate) fn peer_gone(&mut self, life: LifeId, peer: PeerId) {
        let Some(conn) = self.hosts[life].conns.get(&peer) else { return };
        let (target, road) = (conn.target, conn.road);
        let end = self.way_end(life, target, road);
        self.counters.peers_gone += 1;
        self.counters.ways_lost += u64::from(end == WayEnd::Lost);
        self.trace.note(self.now, || format!("  peer {peer} of life {life} is gone: {end:?}"));
        let from = self.hosts[target].slot;
        self.feed(life, "peer gone", Input::PeerGone { peer, end });
        let still = |conn: &Conn| self.hosts[conn.target].slot == from;
        let stopped = self.lives[life].paused_until > self.now;
        if !stopped && !self.hosts[life].conns.values().any(still) {
            self.tell(&Fact::CutOff { life, from });
        }
    }

    /// What a transport reports about the end of its connection: that the peer's process is dead, if this is
    /// so and can be proven, and for how long its hardware may go on; otherwise only that the connection is
    /// lost.
    fn way_end(&mut self, life: LifeId, target: LifeId, road: Road) -> WayEnd {
        let fence = self.declared_fence(target, life, road);
        // The bound is by the clock of the hardware; this one may be faster.
        let quiet_after = match fence {
            WriteFence::Within(bound) => bound + bound / 32 + Duration::from_nanos(1),
            _ => Duration::ZERO,
        };
        let dead = WayEnd::Dead { quiet_after };
        let (seed, ways) = (self.params.seed, &self.params.ways);
        match self.planted {
            Some(Planted::LivingCalledDead) => return WayEnd::Dead { quiet_after: Duration::ZERO },
            Some(Planted::LostCalledDead) => return dead,
            Some(Planted::FirstWayIsAll) if road == roads_of(seed, ways, target)[0] => return dead,
            _ => {}
        }
        let hardware = matches!(fence, WriteFence::Within(_));
        let proven = !hardware || self.healed.is_some() || !self.rng.chance(self.params.ways.unproven);
        if self.lives[target].alive || !proven { WayEnd::Lost } else { dead }
    }

    // ---- frames ------------------------------------------------------------------------------

    pub(crate) fn send(&mut self, life: LifeId, peer: PeerId, bytes: Bytes) {
        self.tell(&Fact::Sent { life, bytes: bytes.len() });
        S::sent(self, life, &bytes);
        let Some(&conn) = self.hosts[life].conns.get(&peer) else { return };
        if bytes.len() > MAX_FRAME {
            return;
        }
        let Some(bytes) = S::spoil_sent(self, (life, conn.target), peer, bytes) else { return };
        self.transmit(life, conn, bytes, "frame");
    }

    pub(crate) fn transmit(&mut self, from: LifeId, conn: Conn, bytes: Bytes, what: &str) {
        self.counters.frames += 1;
        let to = conn.target;
        let now = self.now;
        self.counters.frames_by_kind.count(bytes.get(2).copied(), &bytes);
        self.trace.frame(now, &bytes, || format!("  {what} life {from} -> life {to}: {}", S::show(&bytes)));
        if conn.dead || conn.gone_at.is_some() && self.lives[to].alive {
            return;
        }
        if self.passage(conn.road, (from, to)) == Passage::Swallowed {
            self.counters.swallowed += 1;
            self.trace.note(now, || "    swallowed".to_owned());
            return;
        }
        let (source, destination) = (self.hosts[from].slot, self.hosts[to].slot);
        let partition = self.net.blocked_until(conn.road, (source, destination), self.now);
        if partition.is_some() && self.rng.chance(700) {
            self.counters.partitioned += 1;
            self.trace.note(now, || "    lost to the partition".to_owned());
            return;
        }
        S::overheard(self, source, to, &bytes);
        let net = self.net.params().clone();
        if self.rng.chance(net.drop) {
            self.counters.dropped += 1;
            self.trace.note(now, || "    lost".to_owned());
            return;
        }
        let copies = 1 + u64::from(self.rng.chance(net.duplicate));
        self.counters.duplicated += copies - 1;
        for _ in 0..copies {
            let mut delay = net.delay / 2 + self.rng.below(net.delay);
            if self.rng.chance(net.tail) {
                delay = self.rng.tail(net.delay, net.delay_max);
            }
            if u128::from(delay) > self.params.timing.retry_first.as_nanos() {
                self.counters.delayed += 1;
            }
            let start = partition.unwrap_or(self.now).max(self.now);
            self.calendar
                .enter(start + delay, Event::Frame { from, to, road: conn.road, bytes: bytes.clone() });
        }
        if self.rng.chance(net.garbage) {
            let garbage = self.garbage(&bytes);
            let delay = self.rng.below(net.delay);
            self.report_later(delay, to, Report::Garbage { bytes: garbage });
        }
        if self.rng.chance(net.spurious) {
            let delay = self.rng.below(net.delay);
            self.report_later(delay, to, Report::SpuriousTimeout);
        }
    }

    /// Bytes that are no frame: noise, or the beginning of a frame.
    fn garbage(&mut self, frame: &Bytes) -> Bytes {
        if self.rng.chance(500) {
            let len = self.rng.index(40);
            let mut noise: Vec<u8> = (0..len).map(|_| self.rng.bits() as u8).collect();
            S::disguise(&mut noise);
            noise.into()
        } else {
            frame.slice(..self.rng.index(frame.len()))
        }
    }

    pub(crate) fn deliver(&mut self, (from, to): (LifeId, LifeId), road: Road, bytes: Bytes) {
        if let Engine::Stranger(_) = self.hosts[to].engine {
            return S::tell_stranger(self, from, to, &bytes);
        }
        let slot = self.hosts[to].slot;
        let Some(at) = self.slots[slot] else { return };
        if !roads_of(self.params.seed, &self.params.ways, at).contains(&road) {
            // A later life has not every transport of the former one.
            return;
        }
        if at != to {
            let misdeliver = self.net.params().misdeliver;
            if self.planted != Some(Planted::FenceDropped) && !self.rng.chance(misdeliver) {
                return;
            }
        }
        self.arrive((from, to), (at, road), bytes);
    }

    /// Delivers a frame that one life sent to another, to that life or to its successor `at`.
    pub(crate) fn arrive(&mut self, (from, to): (LifeId, LifeId), (at, road): (LifeId, Road), bytes: Bytes) {
        if at != to {
            self.counters.misdelivered += 1;
            // A timer that is due anyway is not what the frame does.
            self.feed(at, "timeout", Input::Timeout);
        }
        if !self.lives[from].alive {
            self.counters.posthumous += 1;
        }
        let Some(bytes) = S::spoil_arrival(self, (from, to), at, bytes) else { return };
        self.trace.note(self.now, || format!("deliver   life {from} -> life {at}: {}", S::show(&bytes)));
        S::arrives(self, from, at, &bytes);
        let effects: Effects =
            self.feed(at, "frame", Input::Frame { from: origin(road, from), frame: bytes });
        self.tell(&Fact::Handled { at, from, addressed: to, effects });
    }
}

/// The connection over one transport on which frames of a life arrive, as receivers tell it from others.
fn origin(road: Road, from: LifeId) -> Origin {
    Origin(((road as u64) << 32) | (from as u64 + 1))
}
