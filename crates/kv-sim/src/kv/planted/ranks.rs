//! Planted bugs that only engines of different shapes can show: a rank mistakes its source, its layers, or
//! its share of heads.

use bytes::Bytes;
use kv_core::wire::{Body, Frame, Progress};
use kv_core::{Op, RegionRole};

use crate::kv::params::Params;
use crate::kv::sabotage::Registered;
use crate::kv::service::KvWorld;
use crate::net::calendar::Event;
use crate::net::flight::Piece;
use crate::net::lives::LifeId;
use crate::planted::Planted;

/// Every stage of the decode engine but the first counts its layers from one too low.
pub(super) fn count_stages_wrongly(params: &mut Params) {
    let Some(pair) = params.unequal.as_mut() else { return };
    for stage in pair.engines[1].stages.iter_mut().filter(|stage| stage.start > 0) {
        *stage = stage.start - 1..stage.end - 1;
    }
}

impl KvWorld {
    /// True if a life is of the first rank from which another life gets its cache.
    pub(super) fn is_first_source(&self, source: LifeId, receiver: LifeId) -> bool {
        let slots = [source, receiver].map(|life| self.hosts[life].slot);
        self.service.params.servers(&[slots[0]], slots[1]).first() == Some(&slots[0])
    }

    /// Items of cache groups are never written.
    pub(crate) fn loses_state(&self, life: LifeId, piece: &Piece) -> bool {
        let region = self.memories[life].regions().get(piece.local_region as usize);
        self.planted == Some(Planted::LostState)
            && region.is_some_and(|region| region.role == RegionRole::State)
    }

    /// With the planted bug, pieces of cache groups are of the heads before the heads that are wanted.
    pub(crate) fn take_neighbours_share(&self, life: LifeId, target: LifeId, op: Op, pieces: &mut [Piece]) {
        for piece in pieces {
            let (source, region, offset) = match op {
                Op::Write => (life, piece.local_region, &mut piece.local_offset),
                Op::Read => (target, piece.remote_region, &mut piece.remote_offset),
            };
            let share = self.memories[source].neighbours_share(region, *offset, piece.len);
            *offset = share.unwrap_or(*offset);
        }
    }

    /// With the last completion notice of one source, forges one of every other source.
    pub(super) fn forge_others(&mut self, from: LifeId, at: LifeId, bytes: &Bytes) {
        let Ok(Frame { body: Body::Progress(done), .. }) = Frame::decode(bytes) else { return };
        let rooms = &mut self.service.sabotage.rooms;
        let of_done =
            |known: &&Registered| (known.receiver, known.source, known.attempt) == (at, from, done.attempt);
        let Some(known) = rooms.iter().find(of_done).filter(|_| done.total.is_some()) else { return };
        let room = known.room.clone();
        // Once: what is forged has others, too.
        let all: Vec<_> = rooms.extract_if(.., |known| known.receiver == at && known.room == room).collect();
        let siblings = self.planted == Some(Planted::OneSiblingEnough);
        let forged = |other: &&Registered| {
            other.source != from && (!siblings || self.are_siblings(other.source, from))
        };
        let forged: Vec<_> = all.iter().filter(forged).collect();
        for other in forged {
            let Some(&conversation) = self.service.sabotage.conversations.get(&(at, other.source)) else {
                continue;
            };
            let (done, skipped) = (vec![(0, 1)], Vec::new());
            let done = Progress { attempt: other.attempt, done, total: Some(1), skipped };
            let Ok(bytes) = (Frame { conversation, body: Body::Progress(done) }).encode() else { continue };
            self.calendar.enter(self.now + 1, Event::Frame { from: other.source, to: at, road: 0, bytes });
        }
    }
}
