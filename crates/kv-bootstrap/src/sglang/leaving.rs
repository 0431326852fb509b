//! How registrations end: by a dead port, by a lease, by the word of their owner, or with their engine.

use kv_core::{Incarnation, Time, WorkerId};

use super::engine::{Engine, Life, Rank};
use super::ports::{Verdict, WatchOrder};
use super::table::RouteTable;
use crate::place::Place;

impl RouteTable {
    /// Takes what the watcher has found at the port of the entry `seq`.
    pub(crate) fn judge(&mut self, seq: u64, verdict: Verdict) {
        let Some((id, place)) = self.watched.get(&seq).copied() else { return };
        if verdict == Verdict::Dead {
            self.drop_rank(id, place, "is dead: its port refuses connections");
            return;
        }
        let engine = self.engine.iter_mut().chain(&mut self.rival).find(|engine| engine.id == id);
        let Some(rank) = engine.and_then(|engine| engine.ranks.get_mut(&place)) else { return };
        rank.life = match (verdict, rank.life) {
            (Verdict::Lives, _) => Life::Lives,
            (Verdict::Refused, _) => Life::Refused,
            (Verdict::Silent, _) | (_, Life::Silent) => Life::Silent,
            (Verdict::Unknown | Verdict::Dead, _) => Life::Unknown,
        };
        if matches!(rank.life, Life::Refused | Life::Silent) {
            self.unwell.insert(seq);
        } else {
            self.unwell.remove(&seq);
        }
    }

    /// Prolongs the entry of a worker's rank record.
    pub(crate) fn renew(&mut self, worker: &WorkerId, incarnation: Incarnation, expires: Time) {
        let Some((id, place)) = self.owned.get(worker).copied() else { return };
        let engine = self.engine.iter_mut().chain(&mut self.rival).find(|engine| engine.id == id);
        let rank = engine.and_then(|engine| engine.ranks.get_mut(&place));
        if let Some(rank) = rank.filter(|rank| rank.is_of(worker, incarnation))
            && let Some(old) = rank.expires.replace(expires)
        {
            self.expiry.remove(old, (id, place));
            self.expiry.insert(expires, (id, place));
        }
    }

    /// The worker of a rank record awaits no further peers. Once that holds for all ranks, the engine is not found
    /// any more. The engine's health is unchanged: decode ranks that it serves watch it.
    pub(crate) fn leave(&mut self, worker: &WorkerId) {
        let Some((id, place)) = self.owned.get(worker).copied() else { return };
        let engine = self.engine.iter_mut().chain(&mut self.rival).find(|engine| engine.id == id);
        if let Some(rank) = engine.and_then(|engine| engine.ranks.get_mut(&place)) {
            rank.leaving = true;
        }
    }

    /// Removes the entry of a worker's rank record: of this incarnation, or of any.
    pub(crate) fn withdraw(&mut self, worker: &WorkerId, incarnation: Option<Incarnation>) {
        let Some((id, place)) = self.owned.get(worker).copied() else { return };
        let engine = self.engine.iter().chain(&self.rival).find(|engine| engine.id == id);
        let rank = engine.and_then(|engine| engine.ranks.get(&place));
        if rank.is_some_and(|rank| incarnation.is_none_or(|incarnation| rank.is_of(worker, incarnation))) {
            self.drop_rank(id, place, "has been withdrawn");
        }
    }

    /// Removes the ranks whose lease has ended.
    pub(crate) fn expire(&mut self, now: Time) {
        while let Some((id, place)) = self.expiry.pop_due(now) {
            self.drop_rank(id, place, "has not renewed its lease");
        }
    }

    /// Removes a rank that has left, and remembers how if the engine that serves has lost the rank.
    fn drop_rank(&mut self, id: u64, place: Place, how: &str) {
        let serves = self.engine.as_ref().is_some_and(|engine| engine.id == id);
        let slot = if serves { &mut self.engine } else { &mut self.rival };
        let Some(engine) = slot.as_mut().filter(|engine| engine.id == id) else { return };
        self.bytes -= engine.bytes;
        let was_whole = engine.whole_once;
        let rank = engine.remove(place);
        if engine.ranks.is_empty() {
            *slot = None;
        } else {
            self.bytes += engine.bytes;
        }
        if let Some(rank) = rank {
            if serves && was_whole {
                self.lost = Some(format!("{place} at {} {how}", rank.info));
            }
            self.gone(id, place, &rank, true);
        }
        if self.engine.is_none() {
            self.engine = self.rival.take();
        }
    }

    /// Removes an engine with all its ranks.
    pub(super) fn forget(&mut self, engine: Engine) {
        self.bytes -= engine.bytes;
        for (place, rank) in &engine.ranks {
            self.gone(engine.id, *place, rank, true);
        }
    }

    /// Removes what points to an entry that is no longer in its engine.
    pub(super) fn gone(&mut self, id: u64, place: Place, rank: &Rank, end_watch: bool) {
        if let Some(expires) = rank.expires {
            self.expiry.remove(expires, (id, place));
        }
        if let Some((worker, _)) = &rank.owner
            && self.owned.get(worker) == Some(&(id, place))
        {
            self.owned.remove(worker);
        }
        if rank.watched && end_watch {
            self.watched.remove(&rank.seq);
            self.unwell.remove(&rank.seq);
            self.orders.push(WatchOrder::End { seq: rank.seq });
        }
    }
}
