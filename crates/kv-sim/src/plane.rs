//! The virtual plane: connections, frames, and one-sided writes between simulated memories.

use bytes::Bytes;
use kv_core::proto::Input;
use kv_core::wire::{Body, Frame, VERSION};
use kv_core::{MAX_FRAME, Op, PeerId, PlaneError, Post, PostId, RegionRole};

use crate::calendar::{Event, Report};
use crate::clock::{MS, US};
use crate::fact::{Effects, Fact};
use crate::flight::{Flight, Piece};
use crate::host::{Conn, life_of};
use crate::ledger::LifeId;
use crate::planted::Planted;
use crate::world::World;

impl World {
    // ---- connections -------------------------------------------------------------------------

    pub(crate) fn connect(&mut self, life: LifeId, peer: PeerId, metadata: &[u8]) {
        let target = life_of(metadata).filter(|&target| target < self.hosts.len());
        self.trace.note(self.now, || format!("  life {life} connects peer {peer} = life {target:?}"));
        let fails = self.healed.is_none() && self.rng.chance(self.params.dma.connect_fail);
        let delay = 1 + self.rng.below(2 * MS);
        let Some(target) = target else {
            self.report_later(delay, life, Report::ConnectFailed { peer });
            return;
        };
        let mut conn = Conn { target, dead: fails, gone_at: None, quiet_at: 0 };
        if fails {
            self.report_later(delay, life, Report::ConnectFailed { peer });
        } else if !self.ledger.lives[target].alive {
            // Nobody is there: noticed at once, or only later.
            conn.quiet_at = self.ledger.lives[target].strays_until;
            if self.rng.chance(500) {
                // What is posted until then ends around then.
                conn.gone_at = Some(self.now + delay);
                self.report_later(delay, life, Report::ConnectFailed { peer });
            } else {
                let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
                conn.gone_at = Some(detected);
                self.report_later(detected - self.now, life, Report::PeerGone { peer });
            }
        }
        self.hosts[life].conns.insert(peer, conn);
    }

    pub(crate) fn report_later(&mut self, delay: u64, life: LifeId, report: Report) {
        self.calendar.enter(self.now + delay, Event::Report { life, report });
    }

    pub(crate) fn report_connect_failed(&mut self, life: LifeId, peer: PeerId) {
        if let Some(conn) = self.hosts[life].conns.get_mut(&peer) {
            conn.dead = true;
            self.counters.connect_failures += 1;
            let error = PlaneError::Os { call: "connect", kind: std::io::ErrorKind::ConnectionRefused };
            self.feed(life, "connect failed", Input::ConnectFailed { peer, error });
        }
    }

    pub(crate) fn report_peer_gone(&mut self, life: LifeId, peer: PeerId) {
        let Some(conn) = self.hosts[life].conns.get_mut(&peer) else { return };
        conn.dead = true;
        let conn_target = conn.target;
        let left = conn.quiet_at.saturating_sub(self.now);
        let quiet_after = self.ledger.lives[life].clock.span(left) + std::time::Duration::from_nanos(1);
        let quiet_after = if left == 0 { std::time::Duration::ZERO } else { quiet_after };
        self.counters.peers_gone += 1;
        self.trace
            .note(self.now, || format!("  peer {peer} of life {life} is gone, quiet after {quiet_after:?}"));
        let from = self.hosts[conn_target].slot;
        self.feed(life, "peer gone", Input::PeerGone { peer, quiet_after });
        let still = |conn: &Conn| self.hosts[conn.target].slot == from;
        if !self.hosts[life].conns.values().any(still) {
            self.tell(&Fact::CutOff { life, from });
        }
    }

    // ---- frames ------------------------------------------------------------------------------

    pub(crate) fn send(&mut self, life: LifeId, peer: PeerId, bytes: Bytes) {
        self.tell(&Fact::Sent { life, bytes: bytes.len() });
        if name_of(&bytes) == "frame: Granted"
            && let Ok(Frame { body: Body::Granted(granted), .. }) = Frame::decode(&bytes)
            && let Some(&leg) = self.hosts[life].sessions.get(&granted.grant)
        {
            self.tell(&Fact::Granted { leg });
        }
        let Some(&conn) = self.hosts[life].conns.get(&peer) else { return };
        if bytes.len() > MAX_FRAME {
            return;
        }
        let Some(bytes) = self.sabotage_frame(life, conn.target, bytes) else { return };
        self.transmit(life, conn, bytes, "frame");
    }

    fn transmit(&mut self, from: LifeId, conn: Conn, bytes: Bytes, what: &str) {
        self.counters.frames += 1;
        let to = conn.target;
        let (now, kind) = (self.now, name_of(&bytes));
        *self.counters.frames_by_kind.entry(kind).or_default() += 1;
        self.trace.frame(now, &bytes, || format!("  {what} life {from} -> life {to}: {}", show(&bytes)));
        if conn.dead || conn.gone_at.is_some() && self.ledger.lives[to].alive {
            return;
        }
        let (source, destination) = (self.hosts[from].slot, self.hosts[to].slot);
        let partition = self.net.blocked_until(source, destination, self.now);
        if partition.is_some() && self.rng.chance(700) {
            self.counters.partitioned += 1;
            self.trace.note(now, || "    lost to the partition".to_owned());
            return;
        }
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
            self.calendar.enter(start + delay, Event::Frame { from, to, bytes: bytes.clone() });
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
            if let [first, second, third, ..] = noise.as_mut_slice() {
                (*first, *second, *third) = (0x94, VERSION, *third % 20);
            }
            noise.into()
        } else {
            frame.slice(..self.rng.index(frame.len()))
        }
    }

    pub(crate) fn deliver(&mut self, from: LifeId, to: LifeId, bytes: Bytes) {
        let slot = self.hosts[to].slot;
        let Some(at) = self.slots[slot] else { return };
        if at != to {
            let misdeliver = self.net.params().misdeliver;
            if self.planted != Some(Planted::FenceDropped) && !self.rng.chance(misdeliver) {
                return;
            }
            self.counters.misdelivered += 1;
            // A timer that is due anyway is not what the frame does.
            self.feed(at, "timeout", Input::Timeout);
        }
        if !self.ledger.lives[from].alive {
            self.counters.posthumous += 1;
        }
        let bytes = self.sabotage_delivery(from, to, at, bytes);
        self.trace.note(self.now, || format!("deliver   life {from} -> life {at}: {}", show(&bytes)));
        self.cover_frame(from, at, &bytes);
        let effects: Effects = self.feed(at, "frame", Input::Frame(bytes));
        self.tell(&Fact::Handled { at, from, addressed: to, effects });
    }

    // ---- posts -------------------------------------------------------------------------------

    pub(crate) fn post(&mut self, life: LifeId, peer: PeerId, post: Post) {
        self.counters.posts += 1;
        self.trace.fold(post.id.0);
        self.trace
            .note(self.now, || format!("  life {life} posts {} to peer {peer}: {:?}", post.id, post.descs));
        let in_flight = self.hosts[life].flying + 1;
        self.tell(&Fact::Posted { life, post: &post, in_flight });
        self.hosts[life].flying = in_flight;
        let id = post.id;
        let conn = self.hosts[life].conns.get(&peer).copied();
        let Some(conn) = conn.filter(|conn| !conn.dead) else {
            return self.refuse(life, id, PlaneError::PeerGone);
        };
        if self.healed.is_none() && self.rng.chance(self.params.dma.refuse) {
            return self.refuse(life, id, PlaneError::WouldBlock);
        }
        let pieces = match self.pieces(life, conn.target, &post) {
            Ok(pieces) => pieces,
            Err(what) => return self.tell(&Fact::BadDescriptor { life, what }),
        };
        self.launch(life, peer, conn, post, pieces);
    }

    fn refuse(&mut self, life: LifeId, post: PostId, error: PlaneError) {
        self.counters.dma_refused += 1;
        self.hosts[life].flying -= 1;
        self.report_later(0, life, Report::Posted { post, result: Err(error) });
    }

    /// Cuts descriptors where items end on either side.
    fn pieces(&self, life: LifeId, target: LifeId, post: &Post) -> Result<Vec<Piece>, &'static str> {
        let (local, remote) = (&self.memories[life], &self.memories[target]);
        if post.descs.is_empty() {
            return Err("no descriptors");
        }
        let mut pieces = Vec::new();
        for desc in &post.descs {
            if desc.len == 0 {
                return Err("a descriptor without length");
            }
            if local.piece(desc.local_region, desc.local_offset, desc.len).is_none() {
                return Err("a descriptor that leaves its local region");
            }
            if remote.piece(desc.remote_region, desc.remote_offset, desc.len).is_none() {
                return Err("a descriptor that leaves its remote region");
            }
            let item = |memory: &crate::memory::Memory, region: u32| {
                memory.regions()[region as usize].item_len as u64
            };
            let (local_item, remote_item) =
                (item(local, desc.local_region), item(remote, desc.remote_region));
            let mut at = 0;
            while at < desc.len {
                let (from, to) = (desc.local_offset + at, desc.remote_offset + at);
                let len =
                    (local_item - from % local_item).min(remote_item - to % remote_item).min(desc.len - at);
                pieces.push(Piece {
                    local_region: desc.local_region,
                    local_offset: from,
                    remote_region: desc.remote_region,
                    remote_offset: to,
                    len,
                    local_hold: local.holder(desc.local_region, from),
                    remote_hold: remote.holder(desc.remote_region, to),
                });
                at += len;
            }
        }
        Ok(pieces)
    }

    fn launch(&mut self, life: LifeId, peer: PeerId, conn: Conn, post: Post, mut pieces: Vec<Piece>) {
        let dma = self.params.dma.clone();
        let healed = self.healed.is_some();
        self.rng.shuffle(&mut pieces);
        let mut span = dma.time / 4 + self.rng.below(dma.time) + US;
        if !healed && self.rng.chance(dma.slow) {
            let slow = self.rng.tail(dma.time, dma.time_max);
            span = if self.rng.chance(500) { slow } else { self.rng.below(dma.time_max) } + US;
            if u128::from(span) > self.params.timing.session_deadline.as_nanos() {
                self.counters.dma_slow += 1;
            }
        }
        let fails_after = (!healed && self.rng.chance(dma.error)).then(|| self.rng.index(pieces.len() + 1));
        let flight = self.flights.len();
        let steps = 1 + self.rng.index(pieces.len().min(4));
        let mut moments: Vec<u64> = (0..steps).map(|_| self.now + self.rng.below(span)).collect();
        moments.sort_unstable();
        for (step, &at) in moments.iter().enumerate() {
            let upto = pieces.len() * (step + 1) / steps;
            self.calendar.enter(at, Event::Move { flight, upto });
        }
        if self.planted == Some(Planted::NotifyEarly)
            && let Some(notify) = &post.notify
        {
            self.transmit(life, conn, notify.clone(), "notify");
        }
        self.flights.push(Flight {
            life,
            peer,
            op: post.op,
            target: conn.target,
            post: post.id,
            pieces,
            moved: 0,
            notify: post.notify,
            fails_after,
            outcome: None,
            stops_at: u64::MAX,
            cancelled: false,
            over: false,
        });
        if self.planted == Some(Planted::EndBeforeQuiet) {
            // Its pieces have moved by then, but its end is still to come.
            self.hosts[life].flying -= 1;
            self.report_later(span, life, Report::Posted { post: post.id, result: Ok(()) });
            span *= 2;
        }
        if let Some(gone_at) = conn.gone_at {
            if self.ledger.lives[conn.target].alive {
                self.flights[flight].stops_at = self.now;
            }
            self.doom(flight, gone_at);
        }
        self.calendar.enter(self.now + span, Event::Land { flight });
    }

    /// The connection of a flight is dying: it ends around the moment at which that is noticed.
    pub(crate) fn doom(&mut self, flight: usize, gone_at: u64) {
        let left = gone_at.saturating_sub(self.now);
        let at = self.now + if self.rng.chance(500) { self.rng.below(left + 1) } else { left };
        // A plane stays silent while it cannot prove that the wire is quiet.
        let late =
            if self.rng.chance(300) { self.rng.below(600 * MS) } else { self.rng.tail(2 * MS, 200 * MS) };
        self.flights[flight].outcome = Some(Err(PlaneError::PeerGone));
        self.calendar.enter(at + late, Event::Land { flight });
    }

    pub(crate) fn move_pieces(&mut self, flight: usize, upto: usize) {
        let (life, target) = (self.flights[flight].life, self.flights[flight].target);
        let (source, destination) = (self.hosts[life].slot, self.hosts[target].slot);
        if let Some(until) = self.net.blocked_until(source, destination, self.now) {
            let late = self.rng.below(MS);
            self.calendar.enter(until + late, Event::Move { flight, upto });
            return;
        }
        while self.flights[flight].moved < upto {
            let known = &self.flights[flight];
            if known.is_quiet(self.now) || known.fails_after.is_some_and(|limit| known.moved >= limit) {
                return;
            }
            let piece = known.pieces[known.moved];
            self.flights[flight].moved += 1;
            self.move_piece(flight, piece);
            if self.is_over() {
                return;
            }
        }
    }

    fn move_piece(&mut self, flight: usize, piece: Piece) {
        let known = &self.flights[flight];
        let (life, target, moved) = (known.life, known.target, known.moved);
        if known.op == Op::Read {
            return self.read_piece(flight, piece);
        }
        if self.ledger.lives[life].alive {
            let holder = self.memories[life].holder(piece.local_region, piece.local_offset);
            self.tell(&Fact::Read { flight, piece, holder });
        } else {
            self.counters.stray_writes += 1;
        }
        let mut into = target;
        if !self.ledger.lives[target].alive {
            let successor = self.slots[self.hosts[target].slot];
            match successor {
                Some(successor) if self.planted == Some(Planted::WriteIntoSuccessor) => into = successor,
                _ => return,
            }
        }
        if self.planted == Some(Planted::LostPiece) && moved % 3 == 1 || self.loses_state(life, &piece) {
            return;
        }
        let source = self.memories[life].piece(piece.local_region, piece.local_offset, piece.len);
        let Some(bytes) = source.map(<[u8]>::to_vec) else { return };
        let holder = self.memories[into].holder(piece.remote_region, piece.remote_offset);
        self.tell(&Fact::Written { flight, piece, life: into, holder });
        self.memories[into].overwrite(piece.remote_region, piece.remote_offset, &bytes);
        self.counters.bytes_moved += piece.len;
    }

    fn loses_state(&self, life: LifeId, piece: &Piece) -> bool {
        let region = self.memories[life].regions().get(piece.local_region as usize);
        self.planted == Some(Planted::LostState)
            && region.is_some_and(|region| region.role == RegionRole::State)
    }

    /// A piece comes from the target, whose scheduler may have used the page for something else
    /// meanwhile: nothing but the lease protects it.
    fn read_piece(&mut self, flight: usize, piece: Piece) {
        let known = &self.flights[flight];
        let (life, target, moved) = (known.life, known.target, known.moved);
        let alive = |life: LifeId| self.ledger.lives[life].alive;
        if !alive(life) || !alive(target) || self.planted == Some(Planted::LostPiece) && moved % 3 == 1 {
            return;
        }
        if self.loses_state(life, &piece) {
            return;
        }
        let source = self.memories[target].piece(piece.remote_region, piece.remote_offset, piece.len);
        let Some(bytes) = source.map(<[u8]>::to_vec) else { return };
        let holder = self.memories[target].holder(piece.remote_region, piece.remote_offset);
        self.counters.torn_reads += u64::from(holder != piece.remote_hold);
        if self.hosts[life].node.is_some() {
            let holder = self.memories[life].holder(piece.local_region, piece.local_offset);
            self.tell(&Fact::Written { flight, piece, life, holder });
        }
        self.memories[life].overwrite(piece.local_region, piece.local_offset, &bytes);
        self.counters.bytes_moved += piece.len;
        self.counters.bytes_read += piece.len;
    }

    pub(crate) fn land(&mut self, flight: usize) {
        let known = &self.flights[flight];
        if known.over {
            return;
        }
        let (life, target, peer) = (known.life, known.target, known.peer);
        if !self.ledger.lives[life].alive {
            // What is left of it lands, or not; nobody is told.
            return;
        }
        let total = known.pieces.len();
        let failing = known.fails_after.is_some() || known.outcome.is_some();
        if !failing && !self.ledger.lives[target].alive {
            // The plane is silent until it knows; doomed at the crash.
            return;
        }
        if !failing {
            self.move_pieces(flight, total);
            if self.is_over() {
                return;
            }
            if self.flights[flight].moved < total {
                // Blocked by a partition: tried again when the pieces have moved.
                let again = self.rng.below(MS) + MS;
                self.calendar.enter(self.now + again, Event::Land { flight });
                return;
            }
        }
        let backend = PlaneError::Backend { call: "transfer", status: "remote error" };
        let known = &mut self.flights[flight];
        let default = if known.fails_after.is_some() { Err(backend) } else { Ok(()) };
        let result = known.outcome.get_or_insert(default).clone();
        known.over = true;
        let (post, notify) = (known.post, known.notify.take());
        if self.planted != Some(Planted::EndBeforeQuiet) {
            self.hosts[life].flying -= 1;
        }
        if result.is_err() {
            self.counters.dma_errors += 1;
        }
        // The poster notices when it runs again; its frame leaves then.
        let pause = self.ledger.lives[life].paused_until.saturating_sub(self.now);
        let noticed = self.rng.below(200 * US) + pause;
        if let (Ok(()), Some(notify)) = (&result, notify)
            && self.planted != Some(Planted::NotifyEarly)
            && let Some(&conn) = self.hosts[life].conns.get(&peer)
            && let Some(notify) = self.sabotage_frame(life, target, notify)
        {
            self.transmit(life, conn, notify, "notify");
        }
        if self.planted != Some(Planted::EndBeforeQuiet) {
            self.report_later(noticed, life, Report::Posted { post, result });
        }
    }

    pub(crate) fn cancel(&mut self, life: LifeId, post: PostId) {
        let mut flights = self.flights.iter().enumerate();
        let found = flights.find(|(_, flight)| flight.life == life && flight.post == post && !flight.over);
        let Some((flight, _)) = found else { return };
        self.flights[flight].cancelled = true;
        self.tell(&Fact::Cancelled { flight });
        if !self.rng.chance(self.params.dma.cancel) {
            self.counters.cancels_ignored += 1;
            return;
        }
        self.counters.cancels_honoured += 1;
        self.flights[flight].outcome.get_or_insert(Err(PlaneError::Cancelled));
        let soon = self.rng.below(MS);
        self.calendar.enter(self.now + soon, Event::Land { flight });
    }
}

/// What a frame is, in one word.
fn name_of(bytes: &[u8]) -> &'static str {
    match bytes.get(2) {
        Some(1) => "frame: Hello",
        Some(2) => "frame: Welcome",
        Some(3) => "frame: Refused",
        Some(4) => "frame: Register",
        Some(5) => "frame: Registered",
        Some(6) => "frame: Done",
        Some(7) => "frame: Progress",
        Some(8) => "frame: Failed",
        Some(9) => "frame: Abort",
        Some(10) => "frame: AbortAck",
        Some(11) => "frame: Finish",
        Some(12) => "frame: Ping",
        Some(13) => "frame: Pong",
        Some(14) => "frame: Claim",
        Some(15) => "frame: Granted",
        Some(16) => "frame: Heartbeat",
        Some(17) => "frame: HeartbeatAck",
        Some(18) => "frame: Release",
        Some(19) => "frame: Released",
        _ => "frame: other",
    }
}

/// What a frame says.
pub(crate) fn show(bytes: &[u8]) -> String {
    match Frame::decode(bytes) {
        Ok(Frame { link, body: Body::Hello(hello) }) => {
            format!(
                "{:x} Hello {{ to: {}, link: {:x}, nonce: {:x} }}",
                link.0, hello.to, hello.link.0, hello.nonce
            )
        }
        Ok(frame) => format!("{:x} {:?}", frame.link.0, frame.body),
        Err(error) => format!("{error}"),
    }
}
