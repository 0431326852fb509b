//! The cache groups of the simulated requests: a group of slots that both sides name, and a group of pages.
//! Where engines are alike, the pages are those of a draft model, which either side may leave out; where
//! engines differ, they may be window pages, which neither side may leave out.

use kv_core::proto::{Command, Input};
use kv_core::{CacheGroupItems, PageList, Pages, RequestCacheGroups, SessionId};

use crate::kv::fact::{Fact, KvFact};
use crate::kv::items::{DRAFTS, GROUPS, SLOTS, State};
use crate::kv::ledger::{LegId, Side};
use crate::kv::service::KvWorld;
use crate::net::lives::{LifeId, Slot};

impl KvWorld {
    /// Draws how many draft pages a request has, and where a window in them may begin.
    pub(crate) fn draw_drafts(&mut self) -> (usize, usize) {
        let Some(pair) = &self.service.params.unequal else { return (self.rng.index(4), 0) };
        let smallest = [true, false].map(|prefill| pair.item_tokens(prefill, DRAFTS));
        let (room, windows) =
            (self.service.params.state_items as usize * smallest[0].min(smallest[1]), pair.windows);
        let tokens = self.rng.index(room.min(9) + 1);
        // What nobody may leave out begins before its end.
        let begins = if windows { tokens.max(1) } else { tokens + 1 };
        (tokens, self.rng.index(begins))
    }

    /// The same where engines differ. A rank does not name items of groups that it does not hold. A sender
    /// has all items of the request, or all that lie in the window; a receiver wants the last of them.
    fn draw_share(&mut self, request: usize, side: Side, slot: Slot) -> State {
        let drawn = &self.service.requests[request];
        let (mut slots, tokens, window) = (drawn.slots, drawn.drafts, drawn.window);
        if side == Side::Receiver && drawn.disagree {
            slots = self.other_slots(slots);
        }
        let (prefill, rank) = self.service.params.rank(slot);
        let windows = self.service.params.unequal.as_ref().is_some_and(|pair| pair.windows);
        let (whole, left_out) = (self.rng.chance(500), self.rng.chance(250) && !windows);
        let later = if windows { (tokens - window).max(1) } else { tokens - window + 1 };
        let begin = match side {
            Side::Sender if whole => 0,
            Side::Sender => window,
            Side::Receiver => window + self.rng.index(later),
        };
        let mut state = State::default();
        let Some(pair) = &self.service.params.unequal else { return state };
        if pair.holds_group(prefill, rank, SLOTS) {
            state.wants[SLOTS] = slots.min(self.service.params.state_items as usize);
        }
        if pair.holds_group(prefill, rank, DRAFTS) && !left_out {
            let size = pair.item_tokens(prefill, DRAFTS);
            state.first[DRAFTS] = (begin / size) as u32;
            state.wants[DRAFTS] = tokens.div_ceil(size) - begin / size;
        }
        state
    }

    /// Another number of slots than the sender has, at times.
    fn other_slots(&mut self, slots: usize) -> usize {
        match (self.rng.chance(300), slots) {
            (false, _) => slots,
            (true, 1..) if self.rng.chance(500) => slots - 1,
            (true, _) => (slots + 1).min(self.service.params.state_items as usize),
        }
    }

    /// Draws which items of the cache groups a request has, and which of them one half names.
    pub(crate) fn draw_state(&mut self, request: usize, side: Side, slot: Slot) -> State {
        let items = self.service.params.state_items as usize;
        if items == 0 {
            return State::default();
        }
        if self.service.params.unequal.is_some() {
            return self.draw_share(request, side, slot);
        }
        let drawn = &self.service.requests[request];
        let (mut slots, mut drafts) = (drawn.slots.min(items), drawn.drafts.min(items));
        let disagree = drawn.disagree;
        let mut first = 0;
        if side == Side::Receiver && drafts > 0 {
            first = self.rng.index(drafts + 1);
            drafts -= first;
        }
        if self.rng.chance(250) {
            // The other side may have it.
            (first, drafts) = (0, 0);
        }
        if side == Side::Receiver && disagree {
            slots = self.other_slots(slots);
        }
        State { wants: [slots, drafts], first: [0, first as u32], ..State::default() }
    }

    /// True if a host has too few free items for a half.
    pub(crate) fn lacks_items(&self, leg: LegId, life: LifeId) -> bool {
        let (wants, free) =
            (&self.service.ledger.legs[leg].state.wants, &self.service.stock[life].free_items);
        wants.iter().zip(free).any(|(wanted, free)| *wanted > free.len())
    }

    /// Gives a session the items of its cache groups, if it has any.
    pub(crate) fn give_items(&mut self, leg: LegId, life: LifeId) {
        let State { wants, first, .. } = self.service.ledger.legs[leg].state.clone();
        if wants == [0; GROUPS] {
            return;
        }
        let hold = self.service.ledger.hold(leg, Vec::new());
        let mut groups = RequestCacheGroups::none();
        for group in 0..GROUPS {
            if wants[group] == 0 {
                continue;
            }
            let free = &mut self.service.stock[life].free_items[group];
            let items = free.split_off(free.len() - wants[group]);
            for &item in &items {
                self.memories[life].items[group][item as usize] = hold;
            }
            let list =
                PageList::from_pages(items.iter().copied()).ok().and_then(|list| Pages::unpooled(list).ok());
            let named = list.map(|list| CacheGroupItems::from_number(group as u16, first[group], list));
            let pushed = named.is_some_and(|named| groups.push(named).is_ok());
            debug_assert!(pushed, "free items are distinct");
            self.service.ledger.legs[leg].state.items[group] = items;
        }
        let known = &mut self.service.ledger.legs[leg];
        known.state.hold = hold;
        known.holds.push(hold);
        let session = known.session;
        self.lives[life].holds_out += 1;
        self.service.counters.stateful += 1;
        self.feed(life, "groups", Input::Command(Command::RequestCacheGroups { session, groups }));
    }

    /// Computes the items of a sender: they are final with the last chunk.
    pub(crate) fn fill_items(&mut self, leg: LegId, life: LifeId) {
        let known = &self.service.ledger.legs[leg];
        if known.state.hold == 0 || !known.holds.contains(&known.state.hold) {
            return;
        }
        for (group, items) in known.state.items.iter().enumerate() {
            for (position, &item) in (known.state.first[group]..).zip(items) {
                self.memories[life].fill_item(group as u16, item, known.key, position);
            }
        }
        let hold = known.state.hold;
        self.service.ledger.announce(hold, &(0..64));
    }

    /// Takes back the items of a session's cache groups, all together.
    pub(crate) fn release_items(
        &mut self,
        life: LifeId,
        session: SessionId,
        groups: RequestCacheGroups,
        skipped: &[u16],
    ) {
        self.trace.note(self.now, || format!("  life {life} session {session} releases {groups:?}"));
        let mut back: [Vec<u32>; GROUPS] = Default::default();
        for items in groups {
            if let Some(back) = back.get_mut(usize::from(items.group)) {
                back.extend(items.items.list().iter());
            }
        }
        let leg = self.service.stock[life].sessions.get(&session).copied();
        let hold = leg.and_then(|leg| {
            let known = &self.service.ledger.legs[leg];
            let held = known.state.hold != 0 && known.holds.contains(&known.state.hold);
            (held && known.state.items == back).then_some(known.state.hold)
        });
        let all: Vec<u32> = back.concat();
        self.trace.fold(all.len() as u64);
        if let Some(leg) = leg {
            self.tell(&Fact::Own(KvFact::Skipped { leg, skipped }));
        }
        self.tell(&Fact::Own(KvFact::Released { life, session, leg, hold, pages: &all }));
        let out = &mut self.lives[life].holds_out;
        *out = out.saturating_sub(1);
        self.last_change = self.now;
        let (Some(leg), Some(hold)) = (leg, hold) else { return };
        self.service.ledger.legs[leg].holds.retain(|&held| held != hold);
        self.service.counters.skipped += skipped.len() as u64;
        for (group, items) in back.into_iter().enumerate() {
            for item in items {
                self.memories[life].poison_item(group as u16, item);
                self.memories[life].items[group][item as usize] = 0;
                self.service.stock[life].free_items[group].push(item);
            }
        }
        self.free_row_if_over(leg, life);
    }
}
