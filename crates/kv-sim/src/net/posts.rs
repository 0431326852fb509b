//! One-sided reads and writes between simulated memories, piece by piece.

use kv_core::random::mix;
use kv_core::{Op, PeerId, Post, PostId, TransportError};

use crate::clock::{MS, US};
use crate::net::calendar::{Event, Report};
use crate::net::fact::Fact;
use crate::net::flight::{Flight, Piece};
use crate::net::host::{Conn, Engine};
use crate::net::lives::LifeId;
use crate::net::memory::Memory;
use crate::net::service::Service;
use crate::net::world::World;
use crate::planted::Planted;

impl<S: Service> World<S> {
    pub(crate) fn post(&mut self, life: LifeId, peer: PeerId, post: Post) {
        self.counters.posts += 1;
        self.trace.fold(post.id.0);
        self.trace.note(self.now, || {
            format!("  life {life} posts {} to peer {peer}: {:?}", post.id, post.descriptors)
        });
        let in_flight = self.hosts[life].flying + 1;
        let way = self.hosts[life].conns.get(&peer).map(|conn| conn.way);
        let to_peer = way.map_or(0, |way| self.ways[way].flying) + 1;
        self.tell(&Fact::Posted { life, post: &post, to_peer, in_flight });
        self.hosts[life].flying = in_flight;
        let id = post.id;
        let conn = self.hosts[life].conns.get(&peer).copied();
        let Some(conn) = conn.filter(|conn| !conn.dead) else {
            return self.refuse(life, id, TransportError::PeerGone);
        };
        if self.healed.is_none() && self.rng.chance(self.params.dma.refuse) {
            return self.refuse(life, id, TransportError::WouldBlock);
        }
        let mut pieces = match self.pieces(life, conn.target, &post) {
            Ok(pieces) => pieces,
            Err(what) => return self.tell(&Fact::BadDescriptor { life, what }),
        };
        S::spoil_pieces(self, (life, conn.target), post.op, &mut pieces);
        self.launch(life, peer, conn, post, pieces);
    }

    fn refuse(&mut self, life: LifeId, post: PostId, error: TransportError) {
        self.counters.dma_refused += 1;
        self.hosts[life].flying -= 1;
        self.report_later(0, life, Report::Posted { post, result: Err(error) });
    }

    /// Cuts descriptors where items end on either side.
    fn pieces(&self, life: LifeId, target: LifeId, post: &Post) -> Result<Vec<Piece>, &'static str> {
        let (local, remote) = (&self.memories[life], &self.memories[target]);
        if post.descriptors.is_empty() {
            return Err("no descriptors");
        }
        let mut pieces = Vec::new();
        for descriptor in &post.descriptors {
            if descriptor.len == 0 {
                return Err("a descriptor without length");
            }
            if local.piece(descriptor.local_region, descriptor.local_offset, descriptor.len).is_none() {
                return Err("a descriptor that leaves its local region");
            }
            if remote.piece(descriptor.remote_region, descriptor.remote_offset, descriptor.len).is_none() {
                return Err("a descriptor that leaves its remote region");
            }
            let (local_item, remote_item) =
                (local.item_len(descriptor.local_region), remote.item_len(descriptor.remote_region));
            let mut at = 0;
            while at < descriptor.len {
                let (from, to) = (descriptor.local_offset + at, descriptor.remote_offset + at);
                let len = (local_item - from % local_item)
                    .min(remote_item - to % remote_item)
                    .min(descriptor.len - at);
                pieces.push(Piece {
                    local_region: descriptor.local_region,
                    local_offset: from,
                    remote_region: descriptor.remote_region,
                    remote_offset: to,
                    len,
                    local_hold: local.holder(descriptor.local_region, from),
                    remote_hold: remote.holder(descriptor.remote_region, to),
                });
                at += len;
            }
        }
        Ok(pieces)
    }

    fn launch(&mut self, life: LifeId, peer: PeerId, conn: Conn, post: Post, mut pieces: Vec<Piece>) {
        let healed = self.healed.is_some();
        self.rng.shuffle(&mut pieces);
        let span = self.draw_span();
        let fails_after =
            (!healed && self.rng.chance(self.params.dma.error)).then(|| self.rng.index(pieces.len() + 1));
        let flight = self.flights.len();
        let steps = 1 + self.rng.index(pieces.len().min(4));
        let ends = |step: usize| pieces.len() * step / steps;
        let mut cuts: Vec<usize> = (1..=steps).rev().map(ends).collect();
        if post.op == Op::Read {
            self.enter_moves(flight, std::mem::take(&mut cuts), span);
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
        if self.planted == Some(Planted::EndBeforeQuiet) {
            self.hosts[life].flying -= 1;
            self.report_later(span / 2, life, Report::Posted { post: post.id, result: Ok(()) });
        } else {
            self.ways[conn.way].flying += 1;
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

    /// Plans the moments at which a read copies its pieces, each up to one of `cuts`; the last cut is the
    /// next.
    fn enter_moves(&mut self, flight: usize, cuts: Vec<usize>, span: u64) {
        let mut moments: Vec<u64> = cuts.iter().map(|_| self.now + self.rng.below(span)).collect();
        moments.sort_unstable();
        for (at, upto) in moments.into_iter().zip(cuts.into_iter().rev()) {
            self.calendar.enter(at, Event::Move { flight, upto });
        }
    }

    /// Draws how long a post takes.
    fn draw_span(&mut self) -> u64 {
        let dma = &self.params.dma;
        let span = dma.time / 4 + self.rng.below(dma.time) + US;
        if self.healed.is_some() || !self.rng.chance(dma.slow) {
            return span;
        }
        let slow = self.rng.tail(dma.time, dma.time_max);
        let span = if self.rng.chance(500) { slow } else { self.rng.below(dma.time_max) } + US;
        if u128::from(span) > self.params.timing.session_deadline.as_nanos() {
            self.counters.dma_slow += 1;
        }
        span
    }

    /// Of some peers all posts are stuck, of others some; of most, none.
    fn is_stuck(&mut self, target: LifeId, post: &Post) -> bool {
        let rate = self.params.ways.stuck;
        let all = rate > 0 && mix(self.params.seed ^ target as u64).is_multiple_of(8);
        post.op == Op::Write && (all || self.rng.chance(rate))
    }

    /// Ends a post whose connection is dying, around the moment at which the transport notices.
    pub(crate) fn doom(&mut self, flight: usize, gone_at: u64) {
        let left = gone_at.saturating_sub(self.now);
        let at = self.now + if self.rng.chance(500) { self.rng.below(left + 1) } else { left };
        // A transport stays silent while it cannot prove that the wire is quiet.
        let late =
            if self.rng.chance(300) { self.rng.below(600 * MS) } else { self.rng.tail(2 * MS, 200 * MS) };
        self.flights[flight].outcome = Some(Err(TransportError::PeerGone));
        self.calendar.enter(at + late, Event::Land { flight });
    }

    pub(crate) fn move_pieces(&mut self, flight: usize, upto: usize) {
        let (life, target) = (self.flights[flight].life, self.flights[flight].target);
        let ends = (self.hosts[life].slot, self.hosts[target].slot);
        let road = self.ways[self.flights[flight].way].road;
        if let Some(until) = self.net.blocked_until(road, ends, self.now) {
            let late = self.rng.below(MS);
            self.calendar.enter(until + late, Event::Move { flight, upto });
            return;
        }
        self.move_upto(flight, upto);
    }

    pub(crate) fn move_upto(&mut self, flight: usize, upto: usize) {
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
        if self.lives[life].alive {
            let holder = self.memories[life].holder(piece.local_region, piece.local_offset);
            self.tell(&Fact::Read { flight, piece, holder });
        } else {
            self.counters.stray_writes += 1;
        }
        let mut into = target;
        if !self.lives[target].alive {
            let successor = self.slots[self.hosts[target].slot];
            match successor {
                Some(successor) if self.planted == Some(Planted::WriteIntoSuccessor) => into = successor,
                _ => return,
            }
        }
        if self.planted == Some(Planted::LostPiece) && moved % 3 == 1 || S::loses(self, life, &piece) {
            return;
        }
        let source = self.memories[life].piece(piece.local_region, piece.local_offset, piece.len);
        let Some(bytes) = source.map(<[u8]>::to_vec) else { return };
        let holder = self.memories[into].holder(piece.remote_region, piece.remote_offset);
        self.tell(&Fact::Written { flight, piece, life: into, holder });
        self.memories[into].overwrite(piece.remote_region, piece.remote_offset, &bytes);
        self.counters.bytes_moved += piece.len;
    }

    /// Copies a piece from the target. Only the lease keeps the target's scheduler from using the page for
    /// something else meanwhile.
    fn read_piece(&mut self, flight: usize, piece: Piece) {
        let known = &self.flights[flight];
        let (life, target, moved) = (known.life, known.target, known.moved);
        let alive = |life: LifeId| self.lives[life].alive;
        let target = match self.slots[self.hosts[target].slot] {
            Some(successor) if self.planted == Some(Planted::ReadsSuccessor) => successor,
            _ => target,
        };
        if !alive(life) || !alive(target) || self.planted == Some(Planted::LostPiece) && moved % 3 == 1 {
            return;
        }
        if S::loses(self, life, &piece) {
            return;
        }
        let source = self.memories[target].piece(piece.remote_region, piece.remote_offset, piece.len);
        let Some(bytes) = source.map(<[u8]>::to_vec) else { return };
        let holder = self.memories[target].holder(piece.remote_region, piece.remote_offset);
        self.counters.torn_reads += u64::from(holder != piece.remote_hold);
        if !matches!(self.hosts[life].engine, Engine::Transport(_)) {
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
        if !self.lives[life].alive {
            // What is left of it lands, or not; nobody is told.
            return;
        }
        let total = known.pieces.len();
        let failing = known.fails_after.is_some() || known.outcome.is_some();
        if !failing && !self.lives[target].alive {
            // The transport is silent until it knows; doomed at the crash.
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
        let backend = TransportError::Backend { call: "transfer", status: "remote error", code: None };
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
            false => self.lives[life].paused_until.saturating_sub(self.now),
        };
        let noticed = self.rng.below(200 * US) + pause;
        if let (Ok(()), Some(notify)) = (&result, notify)
            && self.planted != Some(Planted::NotifyEarly)
            && let Some(&conn) = self.hosts[life].conns.get(&peer)
            && let Some(notify) = S::spoil_sent(self, (life, target), peer, notify)
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
        self.flights[flight].outcome.get_or_insert(Err(TransportError::Cancelled));
        let soon = self.rng.below(MS);
        self.calendar.enter(self.now + soon, Event::Land { flight });
    }
}
