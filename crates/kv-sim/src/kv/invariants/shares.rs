//! What the halves of a request owe each other where engines differ: every token for which both halves have
//! room, in the layers and heads that both have, whichever source the token comes from.

use std::ops::Range;

use super::success_means_right_bytes::could_serve;
use crate::kv::fact::View;
use crate::kv::invariant::Verdict;
use crate::kv::items::{DRAFTS, GROUPS, SLOTS, State};
use crate::kv::ledger::{Leg, Side};
use crate::kv::unequal::{Lane, Unequal};
use crate::net::lives::LifeId;

/// The bytes of pages and items that go from a sender to a receiver.
pub(super) fn bytes_between(view: &View<'_>, pair: &Unequal, sender: &Leg, receiver: &Leg) -> u64 {
    let (source, dest) = (view.params.rank(sender.slot).1, view.params.rank(receiver.slot).1);
    let wanted = receiver.prefix..receiver.prefix + receiver.num_pages;
    let tokens = pair.tokens_from((source, sender.num_pages), (dest, wanted));
    let pages = tokens * pair.bytes_per_token(Lane::Kv, source, dest);
    let groups = (0..GROUPS).map(|group| {
        let (sent, wanted) =
            (span(pair, true, group, &sender.state), span(pair, false, group, &receiver.state));
        let tokens = sent.end.min(wanted.end).saturating_sub(sent.start.max(wanted.start));
        tokens * pair.bytes_per_token(Lane::Group(group), source, dest)
    });
    pages + groups.sum::<u64>()
}

/// The range of tokens of the request for which the items of one half have room.
fn span(pair: &Unequal, prefill: bool, group: usize, state: &State) -> Range<u64> {
    let size = pair.item_tokens(prefill, group) as u64;
    let first = u64::from(state.first[group]);
    first * size..(first + state.wants[group] as u64) * size
}

/// Checks every byte of a receiver's pages and slots, and that the sender means the same slots. The pages of
/// a draft model can be checked only when it is known which groups were left out: see [`right_drafts`].
pub(super) fn right(
    view: &View<'_>,
    pair: &Unequal,
    (receiver, life): (&Leg, LifeId),
    sender: &Leg,
) -> Verdict {
    let memory = &view.memories[life];
    let tokens = tokens_of_all(view, pair, receiver);
    for (page, position) in receiver.pages.iter().zip(receiver.prefix..) {
        if let Some(region) = memory.wrong_page(*page, sender.key, position as u32, tokens) {
            return Err(format!(
                "page {page} (position {position}), region {region}, is not that of the request"
            ));
        }
    }
    let (sent, wanted) = (sender.state.wants[SLOTS], receiver.state.wants[SLOTS]);
    let (source, dest) = (view.params.rank(sender.slot).1, view.params.rank(receiver.slot).1);
    let nothing = receiver.pulls && receiver.pages.is_empty() && receiver.state.hold == 0;
    if sent != wanted && !nothing && pair.shares_group(SLOTS, source, dest) {
        return Err(format!("{wanted} slots received, {sent} sent"));
    }
    right_items(view, (receiver, life), SLOTS, &(0..u64::MAX), sender.key)
}

/// The number of tokens of the request that have a page at each of a receiver's senders. Where page sizes
/// differ, a receiver cannot tell that one sender was given a little less than the others.
fn tokens_of_all(view: &View<'_>, pair: &Unequal, receiver: &Leg) -> u64 {
    if pair.counts_alike() {
        return u64::MAX;
    }
    let senders = view.ledger.legs.iter().filter(|sender| could_serve(sender, receiver));
    let tokens = senders.map(|sender| sender.num_pages * pair.page_size(true));
    tokens.min().unwrap_or(0) as u64
}

/// Checks every byte of a receiver's draft pages, if the receiver was told that no sender has left them out.
pub(super) fn right_drafts<'a>(
    view: &View<'_>,
    pair: &Unequal,
    receiver: &Leg,
    senders: impl Iterator<Item = &'a Leg>,
) -> Verdict {
    let Some(life) = receiver.life.filter(|_| receiver.state.wants[DRAFTS] > 0) else { return Ok(()) };
    // What every source has.
    let sources = senders.filter(|sender| sender.state.wants[DRAFTS] > 0).filter(|sender| {
        pair.shares_group(DRAFTS, view.params.rank(sender.slot).1, view.params.rank(receiver.slot).1)
    });
    let spans = sources.map(|sender| (span(pair, true, DRAFTS, &sender.state), sender.key));
    let both = |one: (Range<u64>, u64), other: (Range<u64>, u64)| {
        (one.0.start.max(other.0.start)..one.0.end.min(other.0.end), one.1)
    };
    match spans.reduce(both) {
        Some((tokens, key)) => right_items(view, (receiver, life), DRAFTS, &tokens, key),
        None => Err("draft pages that no source has".to_owned()),
    }
}

fn right_items(
    view: &View<'_>,
    (receiver, life): (&Leg, LifeId),
    group: usize,
    tokens: &Range<u64>,
    key: u64,
) -> Verdict {
    let state = &receiver.state;
    if state.items[group].len() != state.wants[group] {
        return Err(format!("group {group}: {state:?} received"));
    }
    for (position, &item) in (state.first[group]..).zip(&state.items[group]) {
        let wrong = view.memories[life].wrong_state(group as u16, item, (key, position), tokens);
        if let Some(region) = wrong {
            return Err(format!(
                "item {item} of group {group} (position {position}), region {region}, is not that of the request"
            ));
        }
    }
    Ok(())
}

/// Whether a receiver may be told that its draft pages were left out, and whether it may be told that they
/// were not. Both are decided by the items that its senders have; several of the senders may be lives of one
/// slot.
pub(super) fn may_skip<'a>(
    view: &View<'_>,
    pair: &Unequal,
    receiver: &Leg,
    senders: impl Iterator<Item = &'a Leg> + Clone,
) -> (bool, bool) {
    if receiver.state.wants[DRAFTS] == 0 || pair.windows {
        return (false, true);
    }
    let dest = view.params.rank(receiver.slot).1;
    let shares = |slot: &&usize| pair.shares_group(DRAFTS, view.params.rank(**slot).1, dest);
    let mut sources = receiver.servers.iter().filter(shares).peekable();
    if sources.peek().is_none() {
        return (true, false);
    }
    sources.fold((false, true), |(skip, have), slot| {
        let mut at = senders.clone().filter(|leg| leg.side == Side::Sender && leg.slot == *slot);
        let lacks = |leg: &Leg| leg.state.wants[DRAFTS] == 0;
        (skip || at.clone().any(lacks), have && at.any(|leg| !lacks(leg)))
    })
}
