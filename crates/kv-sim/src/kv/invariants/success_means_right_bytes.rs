//! When a receiver succeeds, each of its pages and its aux row hold what one sender of the same request
//! wrote, and keep these bytes until they are handed back. When a sender succeeds, as many receivers as it
//! expected have received everything.

use std::collections::BTreeMap;

use kv_core::{KvPoll, Op};

use super::shares;
use crate::kv::fact::{Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::kv::items::{DRAFTS, GROUPS, SLOTS, State};
use crate::kv::ledger::{Leg, LegId, Side};
use crate::kv::memory::Memory;
use crate::net::lives::{HoldId, Slot};

#[derive(Default, Clone)]
pub(crate) struct SuccessMeansRightBytes {
    /// For each sender, the receivers into whose pages its bytes went, and the number of these bytes.
    written: BTreeMap<LegId, BTreeMap<LegId, u64>>,
    /// For each successful receiver, the sender whose content it has.
    content: BTreeMap<LegId, LegId>,
    /// For each successful receiver, every sender whose content it could have.
    served_by: BTreeMap<LegId, Vec<LegId>>,
}

impl Invariant for SuccessMeansRightBytes {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Written { flight, piece, .. } => {
                let owner = |hold: HoldId| view.ledger.holds[hold as usize].leg;
                if piece.local_hold == 0 || piece.remote_hold == 0 {
                    return Ok(());
                }
                let (from, to) = match view.flights[flight].op {
                    Op::Write => (piece.local_hold, piece.remote_hold),
                    Op::Read => (piece.remote_hold, piece.local_hold),
                };
                *self.written.entry(owner(from)).or_default().entry(owner(to)).or_default() += piece.len;
                Ok(())
            }
            Fact::Own(KvFact::Status { leg, to: KvPoll::Success, .. }) => match view.ledger.legs[leg].side {
                Side::Receiver => self.receiver_succeeds(view, leg),
                Side::Sender => self.sender_succeeds(view, leg),
            },
            Fact::Own(KvFact::Skipped { leg, skipped }) => self.truly_skipped(view, leg, skipped),
            Fact::Own(KvFact::Released { leg: Some(leg), .. }) => match self.content.remove(&leg) {
                Some(sender) => {
                    right(view, leg, sender).map_err(|wrong| format!("after success of leg {leg}: {wrong}"))
                }
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

impl SuccessMeansRightBytes {
    fn receiver_succeeds(&mut self, view: &View<'_>, leg: LegId) -> Verdict {
        let receiver = &view.ledger.legs[leg];
        if receiver.inited_at.is_none() {
            return Err(format!("leg {leg} succeeds without ever having had pages"));
        }
        let mut nearest = format!("no sender of room {} was ever opened", receiver.room);
        for (sender, candidate) in view.ledger.legs.iter().enumerate() {
            if !could_serve(candidate, receiver) || !is_meant(view, (sender, candidate), receiver) {
                continue;
            }
            match right(view, leg, sender) {
                Ok(()) => {
                    self.content.entry(leg).or_insert(sender);
                    self.served_by.entry(leg).or_default().push(sender);
                }
                Err(wrong) => nearest = wrong,
            }
        }
        let Some(senders) = self.served_by.get(&leg) else {
            return Err(format!("leg {leg} (room {}) succeeds with wrong bytes: {nearest}", receiver.room));
        };
        // Of each source one of those must be right.
        let serves = |slot: &Slot| senders.iter().any(|&sender| view.ledger.legs[sender].slot == *slot);
        match receiver.servers.iter().find(|slot| !serves(slot)) {
            Some(slot) => Err(format!("leg {leg} succeeds without a sender in slot {slot}: {nearest}")),
            None => Ok(()),
        }
    }

    /// Checks that a receiver is told of exactly those groups that its sender did not have.
    fn truly_skipped(&self, view: &View<'_>, leg: LegId, skipped: &[u16]) -> Verdict {
        let receiver = &view.ledger.legs[leg];
        let said = skipped == [DRAFTS as u16];
        if let (Some(pair), true) = (&view.params.unequal, self.served_by.contains_key(&leg)) {
            let senders = view.ledger.legs.iter().filter(|sender| could_serve(sender, receiver));
            let (may_skip, may_have) = shares::may_skip(view, pair, receiver, senders.clone());
            return match (said, skipped) {
                (true, _) if may_skip => Ok(()),
                (false, []) if may_have => shares::right_drafts(view, pair, receiver, senders)
                    .map_err(|wrong| format!("after success of leg {leg}: {wrong}")),
                _ => Err(format!("leg {leg} is told that groups {skipped:?} were left out")),
            };
        }
        let wants = receiver.state.wants[DRAFTS] > 0;
        let lacks = |&sender: &LegId| view.ledger.legs[sender].state.wants[DRAFTS] == 0;
        let truth = match self.served_by.get(&leg) {
            Some(senders) => senders.iter().any(|sender| (wants && lacks(sender)) == said),
            None => !said,
        };
        match truth && (said || skipped.is_empty()) {
            true => Ok(()),
            false => Err(format!("leg {leg} is told that groups {skipped:?} were left out")),
        }
    }

    fn sender_succeeds(&self, view: &View<'_>, leg: LegId) -> Verdict {
        let sender = &view.ledger.legs[leg];
        if sender.life.is_none() {
            return Ok(());
        }
        if sender.pulls && view.params.unequal.is_none() {
            return readers_have_succeeded(view, leg);
        }
        // Where engines differ, one that reads from several may fail after it is done with this one.
        let none = BTreeMap::new();
        let written = self.written.get(&leg).unwrap_or(&none);
        let served = view.ledger.legs.iter().enumerate().filter(|(id, receiver)| {
            could_serve(sender, receiver)
                && receiver.life.is_some()
                && written.get(id).copied().unwrap_or(0) >= bytes_between(view, sender, receiver)
        });
        let served = served.count();
        if served < sender.receivers as usize {
            return Err(format!(
                "sender leg {leg} (room {}) succeeds, but {served} of {} receivers have all their bytes: {written:?}",
                sender.room, sender.receivers,
            ));
        }
        Ok(())
    }
}

/// The number of bytes of a request that one half sends to the other.
pub(super) fn bytes_between(view: &View<'_>, sender: &Leg, receiver: &Leg) -> u64 {
    let params = view.params;
    let aux = if sender.wants_aux && receiver.wants_aux { params.item_len as u64 } else { 0 };
    let Some(unequal) = &params.unequal else {
        let pages = if receiver.pulls { receiver.num_pages } else { sender.num_pages };
        // What is optional may be wanted by nobody.
        let slots = sender.state.wants[SLOTS].min(receiver.state.wants[SLOTS]);
        let state = slots * params.state_item_len(SLOTS);
        return (params.kv_regions * params.item_len * pages + state) as u64 + aux;
    };
    let from_here = params.rank(sender.slot).1 == unequal.aux_source(params.rank(receiver.slot).1);
    shares::bytes_between(view, unequal, sender, receiver) + if from_here { aux } else { 0 }
}

/// Checks that a sender that is read succeeds only when its readers have reported that they are done.
fn readers_have_succeeded(view: &View<'_>, leg: LegId) -> Verdict {
    let sender = &view.ledger.legs[leg];
    let read = |receiver: &&Leg| {
        receiver.side == Side::Receiver && receiver.poll == KvPoll::Success && could_serve(sender, receiver)
    };
    let readers = view.ledger.legs.iter().filter(read).count();
    if readers < sender.receivers as usize {
        return Err(format!(
            "sender leg {leg} (room {}) succeeds, but {readers} of {} receivers have",
            sender.room, sender.receivers
        ));
    }
    Ok(())
}

pub(super) fn could_serve(sender: &Leg, receiver: &Leg) -> bool {
    sender.side == Side::Sender
        && receiver.side == Side::Receiver
        && sender.life.is_some()
        && receiver.servers.contains(&sender.slot)
        && sender.is_of(receiver)
}

/// True if a receiver may have the pages of this sender: a receiver that was told whose pages to read may
/// have no others from that host.
fn is_meant(view: &View<'_>, (id, sender): (LegId, &Leg), receiver: &Leg) -> bool {
    let here = |meant: &&LegId| view.ledger.legs[**meant].slot == sender.slot;
    let mut meant = receiver.meant.iter().filter(here).peekable();
    meant.peek().is_none() || meant.any(|meant| *meant == id)
}

/// Checks every byte of a receiver's pages against what a sender wrote.
fn right(view: &View<'_>, leg: LegId, sender: LegId) -> Verdict {
    let (receiver, sender_leg) = (&view.ledger.legs[leg], &view.ledger.legs[sender]);
    let Some(life) = receiver.life else { return Err("it was never opened".to_owned()) };
    if let Some(unequal) = &view.params.unequal {
        shares::right(view, unequal, (receiver, life), sender_leg)?;
        return right_row(view, receiver, sender_leg, &view.memories[life]);
    }
    let prefix = sender_leg.num_pages.checked_sub(receiver.pages.len()).filter(|_| receiver.pulls);
    if receiver.pages.len() != sender_leg.num_pages && prefix.is_none() {
        return Err(format!("{} pages registered, {} announced", receiver.pages.len(), sender_leg.num_pages));
    }
    let memory = &view.memories[life];
    for (position, &page) in receiver.pages.iter().enumerate() {
        if let Some(region) =
            memory.wrong_page(page, sender_leg.key, (prefix.unwrap_or(0) + position) as u32, u64::MAX)
        {
            return Err(format!(
                "page {page} (position {position}), region {region}, is not that of leg {sender}"
            ));
        }
    }
    let nothing = receiver.pulls && receiver.pages.is_empty() && receiver.state.wants == [0; GROUPS];
    if !nothing {
        right_state(view, receiver, sender_leg)?;
    }
    right_row(view, receiver, sender_leg, memory)
}

fn right_row(view: &View<'_>, receiver: &Leg, sender: &Leg, memory: &Memory) -> Verdict {
    let source = view.params.row_source(receiver.slot);
    match receiver.row {
        Some(_) if !sender.wants_aux => Err("an aux row that nobody sent".to_owned()),
        None if sender.wants_aux && !receiver.pulls => Err("an aux row that nobody received".to_owned()),
        Some(row) if memory.wrong_row(row, sender.key, source).is_some() => {
            Err(format!("aux row {row} is not that of room {}", sender.room))
        }
        _ => Ok(()),
    }
}

/// Checks every item of a receiver's cache groups, except for the groups that the sender does not have.
fn right_state(view: &View<'_>, receiver: &Leg, sender: &Leg) -> Verdict {
    let Some(life) = receiver.life else { return Ok(()) };
    let (here, there) = (&receiver.state, &sender.state);
    let all = 0..u64::MAX;
    for group in 0..GROUPS {
        let optional = group == DRAFTS && (here.wants[group] == 0 || there.wants[group] == 0);
        if optional {
            continue;
        }
        let end = |state: &State| state.first[group] as usize + state.wants[group];
        if end(here) != end(there) || here.items[group].len() != here.wants[group] {
            return Err(format!("group {group}: {here:?} received, {there:?} sent"));
        }
        for (position, &item) in (here.first[group]..).zip(&here.items[group]) {
            if view.memories[life].wrong_state(group as u16, item, (sender.key, position), &all).is_some() {
                return Err(format!(
                    "item {item} of group {group} (position {position}) is not the sender's"
                ));
            }
        }
    }
    Ok(())
}
