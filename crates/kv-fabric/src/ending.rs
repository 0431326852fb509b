//! How posts and ways end: with proof that no data operation touches memory any more.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{PeerId, Time, TransportError, TransportEvent, WayEnd};
use kv_host::{Life, clock};

use crate::completing::Flight;
use crate::message::{Header, Kind};
use crate::posts::TransferId;
use crate::transfer::Notify;
use crate::transport::FabricTransport;
use crate::way::{Stage, WayId};

/// How long the end of a process on this host is awaited after its connection has failed.
const DYING: Duration = Duration::from_secs(1);
/// How often a way that waits for its end is looked at.
const AGAIN: Duration = Duration::from_millis(5);
/// How long a way that was disconnected goes on sending its frames.
const LEAVING: Duration = Duration::from_secs(2);
/// How long a transport that is dropped awaits what is under way, and then that its farewells are sent.
const FAREWELL: Duration = Duration::from_millis(100);

impl FabricTransport {
    /// The way to a peer to whom something can be sent.
    pub(crate) fn usable(&self, peer: PeerId) -> Result<WayId, TransportError> {
        let id = self.peers.get(&peer).copied().ok_or(TransportError::PeerGone)?;
        let usable = self.ways.get(&id).is_some_and(|way| way.is_usable());
        if usable { Ok(id) } else { Err(TransportError::PeerGone) }
    }

    /// Begins no more of a post. The post ends with this error once its slices have ended.
    pub(crate) fn give_up(&mut self, id: TransferId, error: TransportError) {
        let Some(transfer) = self.posts.get_mut(id) else { return };
        let way = transfer.way;
        transfer.failed.get_or_insert(error);
        if transfer.is_over() {
            if let Some(way) = self.ways.get_mut(&way) {
                way.parked.retain(|(parked, _)| *parked != id);
            }
            self.settle(id);
            if let Some(way) = self.ways.get_mut(&way) {
                way.shorten_lines(&self.posts);
            }
        }
    }

    /// Ends a post if nothing of it is under way and nothing more is to come.
    pub(crate) fn settle(&mut self, id: TransferId) {
        let Some(transfer) = self.posts.get_mut(id).filter(|transfer| transfer.is_over()) else { return };
        let (failed, way) = (transfer.failed.take(), self.ways.get_mut(&transfer.way));
        let notify = std::mem::replace(&mut transfer.notify, Notify::None);
        if let (Notify::Announced { sequence, len }, Some(way)) = (&notify, way) {
            way.announced -= 1;
            way.announced_bytes -= len;
            let open = matches!(way.stage, Stage::Open | Stage::Leaving { .. }) && !way.severed;
            if failed.is_some() && open {
                // All writes that were begun have ended, so that none is counted after this.
                let withdraw = Header { sequence: *sequence, ..Header::new(way.key, Kind::Withdraw) };
                way.push(withdraw, Bytes::new());
            }
        }
        match (failed, notify) {
            (Some(error), _) => self.posts.end(id, Err(error)),
            (None, Notify::After(frame)) => {
                if let Some(way) = self.ways.get_mut(&transfer.way) {
                    way.parked.push_back((id, frame));
                }
            }
            (None, _) => self.posts.end(id, Ok(())),
        }
    }

    /// The owner has disconnected a peer: slices under way are awaited, and frames are sent.
    pub(crate) fn leave(&mut self, id: WayId) {
        let until = self.now + LEAVING;
        let Some(way) = self.ways.get_mut(&id) else { return };
        way.peer = None;
        way.permitted = Time::ZERO;
        match way.stage {
            Stage::Greeting { .. } => {
                way.stage = Stage::Leaving { until };
                way.drop_outgoing();
            }
            Stage::Open => {
                way.stage = Stage::Leaving { until };
                way.push(Header::new(way.key, Kind::Bye), Bytes::new());
            }
            Stage::Leaving { .. } | Stage::Broken { .. } => {}
        }
        self.give_up_all(id);
        self.stirred.insert(id);
        self.look_at(id, self.now);
    }

    fn give_up_all(&mut self, id: WayId) {
        for transfer in self.posts.of_way(id) {
            self.give_up(transfer, TransportError::PeerGone);
        }
    }

    /// The process of a way's peer has ended.
    pub(crate) fn process_ended(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        if let Life::Watched(process) = &way.life {
            self.watch.forget(process);
        }
        way.life = Life::Dead;
        self.break_way(id, None);
        self.look_at(id, self.now);
    }

    /// A way is of no use any more: nothing more is begun on it. `end` is what is known about the peer.
    pub(crate) fn break_way(&mut self, id: WayId, end: Option<WayEnd>) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        match way.stage {
            Stage::Greeting { .. } | Stage::Open => {
                let dying = if matches!(way.life, Life::Watched(_)) { DYING } else { Duration::ZERO };
                way.stage = Stage::Broken { until: self.now + dying, end };
            }
            Stage::Leaving { .. } | Stage::Broken { .. } => {}
        }
        way.drop_outgoing();
        self.give_up_all(id);
        self.look_at(id, self.now);
    }

    /// Looks at a way at this time, or before.
    pub(crate) fn look_at(&mut self, id: WayId, at: Time) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        match way.due {
            Some(due) if due <= at => {}
            due => {
                if let Some(due) = due {
                    self.timers.remove(&(due, id));
                }
                way.due = Some(at);
                self.timers.insert((at, id));
            }
        }
    }

    /// Does what is due.
    pub(crate) fn serve_timers(&mut self) {
        // Ways that are looked at may be due again at once: each is looked at once in a call.
        let mut due = Vec::new();
        while let Some((at, id)) = self.timers.first().copied()
            && at <= self.now
        {
            self.timers.remove(&(at, id));
            if let Some(way) = self.ways.get_mut(&id) {
                way.due = None;
                due.push(id);
            }
        }
        for id in due {
            self.look(id);
        }
    }

    fn look(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        match way.stage {
            Stage::Greeting { until } if until <= self.now => self.break_way(id, Some(WayEnd::Lost)),
            Stage::Greeting { .. } => self.greet(id),
            Stage::Open if self.now.since(way.heard) >= self.config.silence => {
                self.break_way(id, Some(WayEnd::Lost))
            }
            Stage::Open => self.greet(id),
            Stage::Leaving { until } => {
                let dead = way.life.is_over();
                if dead || until <= self.now {
                    way.drop_outgoing();
                }
                if way.under_way() == 0 && way.outgoing.is_empty() {
                    return self.finish(id, None);
                }
                if dead && way.reading == 0 {
                    self.sever(id);
                }
                self.look_at(id, self.now + AGAIN);
            }
            Stage::Broken { until, end } => self.look_at_broken(id, until, end),
        }
    }

    /// A broken way ends when nothing is under way any more.
    ///
    /// While slices are under way, the connection is closed only if they are writes: libfabric 1.17 frees the
    /// entry of a read twice if the connection is closed in the middle of its bytes. Reads end when the kernel reports
    /// the end of the connection: at once for a process that has ended, and after the kernel's own time (some fifteen
    /// minutes) for a host that is gone.
    fn look_at_broken(&mut self, id: WayId, until: Time, end: Option<WayEnd>) {
        let Some(way) = self.ways.get(&id) else { return };
        let dead = way.life.is_over();
        if !dead && end.is_none() && self.now < until {
            return self.look_at(id, self.now + AGAIN);
        }
        let may_close = way.reading == 0;
        let is_quiet = way.under_way() == 0;
        if may_close && (dead || !is_quiet) {
            // What the peer has written and this side has not taken in is thrown away with the connection.
            self.sever(id);
        }
        if !is_quiet {
            return self.look_at(id, self.now + AGAIN);
        }
        let end = if dead { WayEnd::Dead { quiet_after: Duration::ZERO } } else { WayEnd::Lost };
        self.finish(id, Some(end));
    }

    /// Closes the connection to the endpoint of a way. Nothing more is begun to it, by whatever way.
    fn sever(&mut self, id: WayId) {
        let Some(name) = self.ways.get(&id).map(|way| way.name.clone()) else { return };
        let same = self.ways.iter().filter(|(_, way)| way.name == name).map(|(id, _)| *id);
        for other in same.collect::<Vec<_>>() {
            self.break_way(other, None);
            if let Some(way) = self.ways.get_mut(&other) {
                way.severed = true;
            }
        }
        let guests = self.guests.all().filter(|(_, guest)| guest.name == name).map(|(id, _)| id);
        for guest in guests.collect::<Vec<_>>() {
            self.forget_guest(guest);
        }
        self.addresses.sever(&mut self.endpoint, &name);
    }

    /// Removes a way. Its posts end, and then the owner is told of the peer's end, if it asked for the peer.
    fn finish(&mut self, id: WayId, end: Option<WayEnd>) {
        let Some(way) = self.ways.remove(&id) else { return };
        if let Some(due) = way.due {
            self.timers.remove(&(due, id));
        }
        self.stirred.remove(&id);
        self.blocked.remove(&id);
        self.keys.remove(&way.key);
        if let Life::Watched(process) = &way.life {
            self.watch.forget(process);
        }
        self.addresses.give_back(&mut self.endpoint, &way.name);
        for transfer in self.posts.of_way(id) {
            let failed = self.posts.get_mut(transfer).and_then(|transfer| transfer.failed.take());
            self.posts.end(transfer, Err(failed.unwrap_or(TransportError::PeerGone)));
        }
        if let (Some(peer), Some(end)) = (way.peer, end) {
            self.peers.remove(&peer);
            self.posts.tell(TransportEvent::PeerGone { peer, end });
        }
    }

    /// Awaits for a moment what is under way. If nothing is left, guests are told that nothing will come any more.
    pub(crate) fn take_leave(&mut self) {
        let ids: Vec<WayId> = self.ways.keys().copied().collect();
        for id in ids {
            self.give_up_all(id);
        }
        let moving = |this: &FabricTransport| this.ways.values().any(|way| way.writing + way.reading > 0);
        let begun = Instant::now();
        while moving(self) && begun.elapsed() < FAREWELL {
            self.serve(Instant::now());
        }
        if moving(self) {
            return;
        }
        let guests: Vec<_> = self.guests.all().map(|(_, guest)| (guest.address, guest.key)).collect();
        let ways = self.ways.values().filter(|way| way.stage == Stage::Open);
        let byes = ways.map(|way| (way.address, Header::new(way.key, Kind::Bye)));
        let farewells = guests.iter().map(|(address, key)| (*address, Header::new(*key, Kind::Farewell)));
        let messages: Vec<_> = byes.chain(farewells).collect();
        for (address, header) in messages {
            let _ = self.endpoint.send(address, [&header.encode(), &[]], Flight::Reply);
        }
        self.now = clock::now();
        let begun = Instant::now();
        while self.endpoint.is_sending() && begun.elapsed() < FAREWELL {
            self.take_completions();
        }
    }
}
