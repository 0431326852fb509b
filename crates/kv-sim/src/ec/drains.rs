//! What must be true of hosts that drain.

use std::time::Duration;

use kv_core::SessionId;
use kv_ec::EcPoll;

use super::ledger::{Heard, Session};
use super::oracle::{Verdict, broken};
use super::service::EcWorld;
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

    /// Nothing reads or writes the entries of a host that is empty, except a reader whose lease has run out.
    pub(super) fn empty_is_still(&self, life: LifeId) -> Verdict {
        if self.lives[life].emptied.is_none() {
            return Ok(());
        }
        let leases_last = self.service.params.lossless && self.service.params.lease >= Duration::from_secs(1);
        let mut flights = self.flights.iter().filter(|flight| !flight.over);
        let touches = flights.find(|flight| flight.life == life || (flight.target == life && leases_last));
        match touches {
            Some(flight) => broken(
                LOSE_NOTHING,
                format!("life {life} is empty while {} of life {} is under way", flight.post, flight.life),
            ),
            None => Ok(()),
        }
    }

    /// At rest no host drains: each was empty, and was replaced.
    pub(super) fn drains_have_ended(&self) -> Verdict {
        match self.lives.iter().position(|life| life.alive && life.draining.is_some()) {
            Some(life) => broken(LOSE_NOTHING, format!("life {life} still drains when all is still")),
            None => Ok(()),
        }
    }
}
