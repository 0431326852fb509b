//! What must be true of hosts that drain.

use std::time::Duration;

use kv_core::{Op, SessionId};
use kv_ec::EcPoll;

use super::ledger::{Heard, Session};
use super::oracle::{Verdict, broken};
use super::service::EcWorld;
use crate::net::flight::{Flight, Piece};
use crate::net::lives::LifeId;

const LOSE_NOTHING: &str = "drains_lose_nothing";

impl EcWorld {
    /// A host that drains opens nothing more.
    pub(super) fn opened_before_the_drain(
        &self,
        life: LifeId,
        id: SessionId,
        session: &Session,
        to: EcPoll,
    ) -> Verdict {
        let late = self.lives[life].draining.is_some_and(|since| session.opened_at > since);
        match late && to != EcPoll::Failed {
            true => broken(
                LOSE_NOTHING,
                format!("session {id} of life {life}, which drains, becomes {to}: {session:?}"),
            ),
            false => Ok(()),
        }
    }

    /// A host that drains serves no request that came later.
    pub(super) fn serves_what_came_before(&self, producer: LifeId, heard: Option<&Heard>) -> Verdict {
        let Some(since) = self.lives[producer].draining else { return Ok(()) };
        match heard {
            Some(heard) if heard.at > since && !self.did_at_once(producer, heard.at) => broken(
                LOSE_NOTHING,
                format!("life {producer}, which drains since {since}, serves what came later: {heard:?}"),
            ),
            _ => Ok(()),
        }
    }

    /// Nothing reads or writes the entries of a host that is empty, except a reader whose lease has run out, and a
    /// reader that has told the host that the entry is wanted no longer.
    pub(super) fn empty_is_still(&self, life: LifeId) -> Verdict {
        if self.lives[life].emptied.is_none() {
            return Ok(());
        }
        let leases_last = self.service.params.lossless && self.service.params.lease >= Duration::from_secs(1);
        let counts = |flight: &&Flight| {
            let by_peer = flight.target == life && leases_last && !self.reads_in_vain(flight);
            !flight.over && (flight.life == life || by_peer)
        };
        match self.flights.iter().find(counts) {
            Some(flight) => broken(
                LOSE_NOTHING,
                format!("life {life} is empty while {} of life {} is under way", flight.post, flight.life),
            ),
            None => Ok(()),
        }
    }

    /// True if nothing comes of a read any more, and the host that is read knows so: the reader has given the transfer
    /// up, and keeps the blocks that are filled from everybody until the read has ended. Whatever the read still copies,
    /// or the host's end, does no harm. The promise is the KV cache's, too: pages that are read come back with the word
    /// of the reader, and only pages that are written wait for the last post.
    fn reads_in_vain(&self, flight: &Flight) -> bool {
        let (ledger, reader) = (&self.service.ledger, flight.life);
        let desk = &ledger.desks[reader];
        let is_vain = |piece: &Piece| {
            let block = (piece.local_offset / self.service.params.block_bytes as u64) as usize;
            let transfer = (reader, flight.target, desk.filled_by[block]);
            desk.moving[block] == 0 && ledger.reads_given_up.contains(&transfer)
        };
        flight.op == Op::Read && flight.pieces.iter().all(is_vain)
    }

    /// At rest no host drains: each was empty, and was replaced.
    pub(super) fn drains_have_ended(&self) -> Verdict {
        match self.lives.iter().position(|life| life.alive && life.draining.is_some()) {
            Some(life) => broken(LOSE_NOTHING, format!("life {life} still drains when all is still")),
            None => Ok(()),
        }
    }
}
