//! Which half of which request a registration is of, as far as this can be told from outside of the machines.

use std::collections::BTreeMap;

use kv_core::wire::ConversationId;
use kv_core::{Attempt, Room};

use crate::kv::ledger::{Ledger, Leg, LegId};
use crate::net::lives::LifeId;

/// The attempts at which hosts have registered, or have asked for leases.
///
/// The room of a registration does not name a half: a scheduler may open a second half in a room while the first
/// one still repeats its registration. But the attempt of a half is its own in a conversation, and the half was
/// open before the attempt was first sent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Attempts {
    /// By the host that registers, the conversation as the addressee names it, and the attempt.
    sent: BTreeMap<(LifeId, ConversationId, Attempt), Sent>,
}

#[derive(Debug, Clone)]
struct Sent {
    /// When the attempt was first sent, in global time.
    first: u64,
    /// The half that the attempt is of, once no other half can be meant.
    leg: Option<LegId>,
}

impl Attempts {
    /// Notes that a host registers now. Returns the earliest of the halves that can be meant; `None` if there
    /// is none.
    pub(crate) fn note(
        &mut self,
        ledger: &Ledger,
        now: u64,
        (from, conversation, attempt): (LifeId, ConversationId, Attempt),
        room: &Room,
    ) -> Option<LegId> {
        let key = (from, conversation, attempt);
        let Sent { first, leg } = *self.sent.entry(key).or_insert(Sent { first: now, leg: None });
        if leg.is_some() {
            return leg;
        }
        let attempts = (from, conversation, Attempt(0))..=(from, conversation, Attempt(u64::MAX));
        let has_other = |id: LegId| self.sent.range(attempts.clone()).any(|(_, sent)| sent.leg == Some(id));
        let is_meant = |&(id, leg): &(LegId, &Leg)| {
            let is_there = leg.life == Some(from) && leg.is_open() && leg.opened_at <= first;
            is_there && leg.room == *room && !has_other(id)
        };
        let meant: Vec<(LegId, u64)> =
            ledger.legs.iter().enumerate().filter(is_meant).map(|(id, leg)| (id, leg.opened_at)).collect();
        if let [(leg, _)] = meant[..] {
            self.sent.insert(key, Sent { first, leg: Some(leg) });
        }
        meant.into_iter().min_by_key(|&(_, opened_at)| opened_at).map(|(leg, _)| leg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::ledger::Side;

    const HOST: LifeId = 7;

    fn opened_at(times: &[u64]) -> Ledger {
        let open = |(request, &opened_at): (usize, &u64)| Leg {
            life: Some(HOST),
            opened_at,
            ..Leg::unopened(request, (Side::Receiver, 0), Room::Number(9))
        };
        Ledger { legs: times.iter().enumerate().map(open).collect(), ..Ledger::new() }
    }

    fn note(attempts: &mut Attempts, ledger: &Ledger, now: u64, attempt: u64) -> Option<LegId> {
        attempts.note(ledger, now, (HOST, ConversationId(1), Attempt(attempt)), &Room::Number(9))
    }

    #[test]
    fn a_repeated_registration_is_not_of_a_half_that_was_opened_since() {
        let mut attempts = Attempts::default();
        assert_eq!(note(&mut attempts, &opened_at(&[10]), 10, 1), Some(0));
        assert_eq!(note(&mut attempts, &opened_at(&[10, 20]), 30, 1), Some(0));
    }

    #[test]
    fn a_second_half_in_the_room_is_known_by_its_own_attempt() {
        let mut attempts = Attempts::default();
        assert_eq!(note(&mut attempts, &opened_at(&[10]), 10, 1), Some(0));
        assert_eq!(note(&mut attempts, &opened_at(&[10, 20]), 30, 2), Some(1));
    }

    #[test]
    fn where_two_halves_can_be_meant_the_earlier_one_is() {
        let mut attempts = Attempts::default();
        let ledger = opened_at(&[10, 20]);
        assert_eq!(note(&mut attempts, &ledger, 30, 1), Some(0));
        assert_eq!(note(&mut attempts, &ledger, 30, 2), Some(0));
    }
}
