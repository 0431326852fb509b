//! One-sided reads and writes between simulated memories, piece by piece.

use kv_core::{Op, PeerId, PlaneError, Post, PostId, RegionRole};

use crate::calendar::{Event, Report};
use crate::clock::{MS, US};
use crate::fact::Fact;
use crate::flight::{Flight, Piece};
use crate::host::{Conn, Engine};
use crate::ledger::LifeId;
use crate::planted::Planted;
use crate::rng::mix;
use crate::world::World;

impl World {
    pub(crate) fn post(&mut self, life: LifeId, peer: PeerId, post: Post) {
        self.counters.posts += 1;
        self.trace.fold(post.id.0);
        self.trace
            .note(self.now, || format!("  life {life} posts {} to peer {peer}: {:?}", post.id, post.descs));
        let in_flight = self.hosts[life].flying + 1;
        let way = self.hosts[life].conns.get(&peer).map(|conn| conn.way);
        let to_peer = way.map_or(0, |way| self.ways[way].flying) + 1;
        self.tell(&Fact::Posted { life, post: &post, to_peer, in_flight });
        self.hosts[life].flying = in_flight;
        let id = post.id;
        let conn = self.hosts[life].conns.get(&peer).copied();
        let Some(conn) = conn.filter(|conn| !conn.dead) else {
            return self.refuse(life, id, PlaneError::PeerGone);
        };
        if self.healed.is_none() && self.rng.chance(self.params.dma.refuse) {
            return self.refuse(life, id, PlaneError::WouldBlock);
        }
        let mut pieces = match self.pieces(life, conn.target, &post) {
            Ok(pieces) => pieces,
            Err(what) => return self.tell(&Fact::BadDescriptor { life, what }),
        };
        if self.planted == Some(Planted::NeighboursShare) {
            self.take_neighbours_share(life, conn.target, post.op, &mut pieces);
        }
        if self.planted == Some(Planted::PlaceForgotten) {
            self.forget_places(life, conn.target, post.op, &mut pieces);
        }
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
        let ends = |step: usize| pieces.len() * step / steps;
        let mut cuts = Vec::new();
        if post.op == Op::Write {
            cuts.extend((1..=steps).rev().map(ends));
        } else {
            let mut moments: Vec<u64> = (0..steps).map(|_| self.now + self.rng.below(span)).collect();
            moments.sort_unstable();
            for (step, &at) in moments.iter().enumerate() {
                self.calendar.enter(at, Event::Move { flight, upto: ends(step + 1) });
            }
        }
        let pause = span / steps as u64;
        let stuck = !healed && self.is_stuck(conn.target, &post);
        self.counters.stuck += u64::from(stuck);
        if self.planted == Some(Planted::NotifyEarly)
            && let Some(notify) = &post.notify
        {
            self.transmit(life, conn, notify.clone(), "notify");
        }
        self.flights.push(Flight {
            life,
            peer,
            op: post.op,
            way: conn.way,
            target: conn.target,
            post: post.id,
            pieces,
            moved: 0,
            notify: post.notify,
            fails_after,
            outcome: None,
            cuts,
            pause,
            slice: None,
            waits: false,
            looked: false,
            stuck,
            cancelled: false,
            over: false,
        });
        self.ways[conn.way].flying += 1;
        if self.planted == Some(Planted::EndBeforeQuiet) {
            self.ways[conn.way].flying -= 1;
            self.hosts[life].flying -= 1;
            self.report_later(span / 2, life, Report::Posted { post: post.id, result: Ok(()) });
        }
        if let Some(gone_at) = conn.gone_at {
            self.doom(flight, gone_at);
        }
        if post.op == Op::Write {
            self.begin_later(flight);
        } else {
            self.calendar.enter(self.now + span, Event::Land { flight });
        }
    }

    /// Of some peers all posts are stuck, of others some; of most, none.
    fn is_stuck(&mut self, target: LifeId, post: &Post) -> bool {
        let rate = self.params.ways.stuck;
        let all = rate > 0 && mix(self.params.seed ^ target as u64).is_multiple_of(8);
        post.op == Op::Write && (all || self.rng.chance(rate))
    }

    // ---- slices of writes --------------------------------------------------------------------

    fn begin_later(&mut self, flight: usize) {
        let pause = self.rng.below(self.flights[flight].pause + 1);
        self.calendar.enter(self.now + pause, Event::Begin { flight });
    }

    /// The writer's transport reads its clock, and begins the next slice if it may.
    pub(crate) fn begin_slice(&mut self, flight: usize) {
        let known = &self.flights[flight];
        let way = &self.ways[known.way];
        if known.over || known.slice.is_some() || known.stuck || !self.ledger.lives[known.life].alive {
            return;
        }
        let Some(&upto) = known.cuts.last() else { return };
        if way.revoked {
            self.counters.refused_slices += 1;
            self.flights[flight].outcome.get_or_insert(Err(PlaneError::Revoked));
            return self.land(flight);
        }
        let (source, destination) = (self.hosts[known.life].slot, self.hosts[known.target].slot);
        if let Some(until) = self.net.blocked_until(source, destination, self.now) {
            let late = self.rng.below(MS);
            return self.calendar.enter(until + late, Event::Begin { flight });
        }
        let looked = std::mem::take(&mut self.flights[flight].looked);
        let way = &self.ways[self.flights[flight].way];
        let checks = self.planted != Some(Planted::PermissionUnchecked) && !looked;
        if checks && !way.is_open(&self.ledger, self.now) {
            self.counters.unpermitted += 1;
            let known = &mut self.flights[flight];
            known.waits = true;
            if known.cancelled {
                // Nothing of it is under way, and nothing may ever be.
                known.outcome.get_or_insert(Err(PlaneError::Cancelled));
                self.land(flight);
            }
            return;
        }
        let mut len = self.slice_len(flight);
        let known = &self.flights[flight];
        let way = &self.ways[known.way];
        if checks && way.copies() {
            // As much is copied as fits into the permission, if nobody stops the copier.
            let now = self.ledger.lives[known.life].clock.local(self.now);
            let left = way.permit.map_or(0, |until| until.since(now).as_nanos() as u64);
            len = len.min(left / 2);
        }
        let known = &mut self.flights[flight];
        known.cuts.pop();
        known.slice = Some(upto);
        self.calendar.enter(self.now + len, Event::End { flight });
    }

    /// The writer is stopped before it has begun a slice: between its look at the clock and the begin, if
    /// the bug is planted.
    pub(crate) fn stop_before_slice(&mut self, flight: usize) {
        if self.planted == Some(Planted::StoppedAfterTheLook) {
            let known = &self.flights[flight];
            let open = self.ways[known.way].is_open(&self.ledger, self.now);
            self.flights[flight].looked |= open && !known.cuts.is_empty();
        }
    }

    /// For how long a slice is under way, if its writer is not stopped.
    fn slice_len(&mut self, flight: usize) -> u64 {
        let ways = &self.params.ways;
        let copies = self.ways[self.flights[flight].way].copies();
        let most = if copies { ways.slice_max } else { ways.bound };
        let (long, short) = (ways.long, self.flights[flight].pause.min(most));
        let healed = self.healed.is_some();
        match (!healed && self.rng.chance(long), self.rng.chance(200)) {
            // Hardware may need all the time that it was promised to need at most.
            (true, true) => most,
            (true, false) => self.rng.below(most + 1),
            (false, _) => self.rng.below(short + 1),
        }
    }

    /// The slice that is under way has arrived.
    pub(crate) fn end_slice(&mut self, flight: usize) {
        let known = &self.flights[flight];
        let way = &self.ways[known.way];
        let Some(upto) = known.slice else { return };
        let (life, alive) = (known.life, self.ledger.lives[known.life].alive);
        if !alive && way.copies() {
            self.flights[flight].slice = None;
            return;
        }
        let clock = &self.ledger.lives[life].clock;
        let late = way.permit.is_some_and(|until| clock.local(self.now) > until);
        self.counters.late_slices += u64::from(late);
        self.move_upto(flight, upto);
        if self.is_over() {
            return;
        }
        let known = &mut self.flights[flight];
        known.slice = None;
        if !self.revoking.is_empty() {
            self.tell_revoked();
        }
        let known = &self.flights[flight];
        let failed = known.fails_after.is_some_and(|limit| known.moved >= limit);
        if known.outcome.is_some() || failed || known.cuts.is_empty() {
            self.land(flight);
        } else {
            self.begin_later(flight);
        }
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
        self.move_upto(flight, upto);
    }

    fn move_upto(&mut self, flight: usize, upto: usize) {
        while self.flights[flight].moved < upto {
            let known = &self.flights[flight];
            if known.over || known.fails_after.is_some_and(|limit| known.moved >= limit) {
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
        let target = match self.slots[self.hosts[target].slot] {
            Some(successor) if self.planted == Some(Planted::ReadsSuccessor) => successor,
            _ => target,
        };
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
        if !matches!(self.hosts[life].engine, Engine::Plane(_)) {
            let holder = self.memories[life].holder(piece.local_region, piece.local_offset);
            self.tell(&Fact::Written { flight, piece, life, holder });
        }
        self.memories[life].overwrite(piece.local_region, piece.local_offset, &bytes);
        self.counters.bytes_moved += piece.len;
        self.counters.bytes_read += piece.len;
    }

    pub(crate) fn land(&mut self, flight: usize) {
        let known = &self.flights[flight];
        // While a slice is under way nobody may say that it is over.
        if known.over || known.stuck || known.slice.is_some() {
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
        if !failing && known.op == Op::Read {
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
        let (post, way, notify) = (known.post, known.way, known.notify.take());
        if self.planted != Some(Planted::EndBeforeQuiet) {
            self.hosts[life].flying -= 1;
            self.ways[way].flying -= 1;
        }
        if result.is_err() {
            self.counters.dma_errors += 1;
        }
        // The poster notices when it runs again; its frame leaves then.
        let pause = match self.hosts[life].is_driven() {
            // It lies there until the driver asks.
            true => 0,
            false => self.ledger.lives[life].paused_until.saturating_sub(self.now),
        };
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
        let waits = self.flights[flight].waits && self.flights[flight].slice.is_none();
        if !waits && !self.rng.chance(self.params.dma.cancel) {
            self.counters.cancels_ignored += 1;
            return;
        }
        self.counters.cancels_honoured += 1;
        self.flights[flight].outcome.get_or_insert(Err(PlaneError::Cancelled));
        let soon = self.rng.below(MS);
        self.calendar.enter(self.now + soon, Event::Land { flight });
    }
}
