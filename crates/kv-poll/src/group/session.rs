//! The handle on one request's sessions on all ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kv_core::{
    AuxIndex, Backpressure, ChunkId, Fence, FinalLayers, GrantRef, GroupItems, Groups, Incarnation,
    KvManager, KvPoll, KvReceiver, KvSender, KvSession, PageList, Pages, Reclaimed, Room, SessionId,
    TransferError,
};

use super::deal::Deal;
use super::fence::SharedFence;
use super::members::{Half, Members};
use super::roster::Roster;
use super::{Shared, Table};
use crate::kv::{Receiver, Sender};
use crate::said::{ToReceiver, ToSender};

/// The sending half of a transfer, on all ranks of a prefill engine.
pub type GroupSender = GroupSession<Sender>;
/// The receiving half of a transfer, on all ranks of a decode engine.
pub type GroupReceiver = GroupSession<Receiver>;

/// One half of one transfer on all ranks of an engine. It is used like a rank's own
/// [`Session`](crate::Session); its number is that of the first rank's.
///
/// Calls take the group's lock, which is never held for long. Dropping a session without reclaiming
/// it aborts it, and its pages go to [`RankGroup::orphans`](super::RankGroup::orphans), items of
/// state groups to [`RankGroup::orphan_groups`](super::RankGroup::orphan_groups).
#[must_use = "dropping a session aborts it"]
#[allow(private_bounds)]
pub struct GroupSession<S: Kind> {
    shared: Arc<Shared>,
    id: SessionId,
    room: Room,
    closed: bool,
    kind: std::marker::PhantomData<fn() -> S>,
}

/// Which of the group's tables a session is in.
pub(super) trait Kind: Half {
    fn of(table: &mut Table) -> &mut Roster<Self>;
}

impl Kind for Sender {
    fn of(table: &mut Table) -> &mut Roster<Sender> {
        &mut table.senders
    }
}

impl Kind for Receiver {
    fn of(table: &mut Table) -> &mut Roster<Receiver> {
        &mut table.receivers
    }
}

#[allow(private_bounds)]
impl<S: Kind> GroupSession<S> {
    pub(super) fn new(shared: Arc<Shared>, room: Room, sessions: Vec<S>, deal: Deal) -> GroupSession<S> {
        // A group has a rank: see `RankGroup::new`.
        let id = sessions.first().map_or(SessionId(0), KvSession::id);
        S::of(&mut shared.lock()).enter(id, sessions, deal);
        GroupSession { shared, id, room, closed: false, kind: std::marker::PhantomData }
    }

    fn look<T>(&self, look: impl FnOnce(&Members<S>) -> Option<T>) -> Option<T> {
        look(S::of(&mut self.shared.lock()).get(self.id)?)
    }

    /// Says the same to all ranks: the original to the first, to the others copies of what concerns them.
    fn say(
        &mut self,
        original: S::Said,
        mut copy: impl FnMut(&Deal, usize) -> Option<S::Said>,
    ) -> Result<(), S::Said> {
        let ranks = self.shared.managers.len();
        let mut table = self.shared.lock();
        let Some(members) = S::of(&mut table).touch(self.id) else { return Err(original) };
        let copies: Vec<_> = (1..ranks).map(|rank| copy(&members.deal, rank)).collect();
        members.say([Some(original)].into_iter().chain(copies))
    }
}

impl<S: Kind> KvSession for GroupSession<S> {
    fn id(&self) -> SessionId {
        self.id
    }

    fn room(&self) -> &Room {
        &self.room
    }

    fn poll(&self) -> KvPoll {
        self.look(|members| Some(members.poll())).unwrap_or(KvPoll::Failed)
    }

    fn failure(&self) -> Option<TransferError> {
        self.look(Members::failure)
    }

    fn abort(&mut self) {
        if let Some(members) = S::of(&mut self.shared.lock()).touch(self.id) {
            members.abort();
        }
    }

    fn give_groups(&mut self, groups: Groups) -> Result<(), Backpressure<Groups>> {
        let mut copies: Vec<_> = (1..self.shared.managers.len()).map(|_| copy_groups(&groups)).collect();
        self.say(S::to_give(groups), |_, _| copies.pop().flatten().map(S::to_give))
            .map_err(|said| Backpressure(S::given(said)))
    }

    fn reclaim(self) -> Result<Pages, Self> {
        let shared = Arc::clone(&self.shared);
        let Reclaimed { pages, groups, .. } = self.reclaim_all()?;
        S::of(&mut shared.lock()).keep(groups);
        Ok(pages)
    }

    fn reclaim_all(mut self) -> Result<Reclaimed, Self> {
        let shared = Arc::clone(&self.shared);
        let mut table = shared.lock();
        let roster = S::of(&mut table);
        match roster.touch(self.id).and_then(Members::reclaim) {
            Some(reclaimed) => {
                roster.forget(self.id);
                self.closed = true;
                Ok(reclaimed)
            }
            None => Err(self),
        }
    }
}

impl KvSender for GroupSession<Sender> {
    /// The first rank's; see [`grants`](KvSender::grants).
    fn grant(&self) -> GrantRef {
        let none = GrantRef { incarnation: Incarnation::from_random(0), nonce: self.id, pages: None };
        self.grants().into_iter().next().unwrap_or(none)
    }

    fn grants(&self) -> Vec<GrantRef> {
        self.look(|members| Some(members.sessions().map(KvSender::grant).collect())).unwrap_or_default()
    }

    fn init(&mut self, num_pages: usize, aux: Option<AuxIndex>) -> Result<(), Backpressure<()>> {
        let said = |deal: &Deal, rank| Some(ToSender::Init(deal.count(rank, num_pages), aux));
        self.say(ToSender::Init(num_pages, aux), said).map_err(|_| Backpressure(()))?;
        self.change(|members| members.deal.announce(num_pages));
        Ok(())
    }

    fn send(&mut self, chunk: Pages) -> Result<(), Backpressure<Pages>> {
        self.give(chunk, true).map(drop)
    }

    fn begin_chunk(&mut self, chunk: Pages) -> Result<ChunkId, Backpressure<Pages>> {
        self.give(chunk, false)
    }

    /// Each rank is told of the layers that it has.
    fn layers_final(&mut self, layers: FinalLayers) -> Result<(), Backpressure<FinalLayers>> {
        let FinalLayers { chunk, layers, fence } = layers;
        let fence = fence.map(SharedFence::new);
        let announce = |layers: Option<Range<u32>>| {
            let fence = fence.clone().map(|fence| Box::new(fence) as Box<dyn Fence>);
            ToSender::Final(FinalLayers { chunk, layers, fence })
        };
        let held = self.shared.managers.iter().map(|manager| manager.args().geometry().kv_layers());
        let mut parts = shares(layers.clone(), &held.collect::<Vec<_>>());
        let mut table = self.shared.lock();
        let told = match Sender::of(&mut table).touch(self.id) {
            Some(members) => {
                let later = |(rank, part): (usize, &mut Option<_>)| {
                    let withheld = members.deal.withholds(rank, chunk.0);
                    part.take_if(|_| withheld).map(|part| (rank, part))
                };
                let withheld: Vec<_> = parts.iter_mut().enumerate().filter_map(later).collect();
                let told = members.say(parts.into_iter().map(|part| part.map(&announce)));
                for (rank, part) in withheld.into_iter().filter(|_| told.is_ok()) {
                    members.withhold(rank, announce(part));
                }
                told
            }
            None => Ok(()),
        };
        told.map_err(|_| match announce(layers) {
            ToSender::Final(layers) => Backpressure(layers),
            _ => Backpressure(FinalLayers::all(chunk)),
        })
    }
}

impl GroupSession<Sender> {
    /// Gives all ranks their parts of a chunk, which is final, or will be announced to be.
    fn give(&mut self, chunk: Pages, is_final: bool) -> Result<ChunkId, Backpressure<Pages>> {
        let list = chunk.list().clone();
        let to = |is_final| if is_final { ToSender::Send } else { ToSender::Begin };
        let said = |deal: &Deal, rank| {
            let is_final = is_final && !deal.would_withhold(rank, list.len());
            copy(deal.next(rank, &list)).map(to(is_final))
        };
        self.say(to(is_final)(chunk), said).map_err(into_chunk)?;
        let number = self.change(|members| members.gave(list.len(), is_final));
        Ok(number.unwrap_or(ChunkId(0)))
    }

    fn change<T>(&mut self, change: impl FnOnce(&mut Members<Sender>) -> T) -> Option<T> {
        Sender::of(&mut self.shared.lock()).touch(self.id).map(change)
    }
}

impl KvReceiver for GroupSession<Receiver> {
    fn init(&mut self, pages: Pages, aux: Option<AuxIndex>) -> Result<(), Backpressure<Pages>> {
        let list = pages.list().clone();
        let said = |deal: &Deal, rank| copy(deal.all(rank, &list)).map(|pages| ToReceiver::Init(pages, aux));
        self.say(ToReceiver::Init(pages, aux), said).map_err(|said| match said {
            ToReceiver::Init(pages, _) => Backpressure(pages),
            ToReceiver::Groups(_) => Backpressure(Pages::none()),
        })
    }
}

impl<S: Kind> Drop for GroupSession<S> {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        if let Some(members) = S::of(&mut self.shared.lock()).touch(self.id) {
            members.abandoned = true;
            members.abort();
        }
    }
}

impl<S: Kind> fmt::Debug for GroupSession<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupSession").field("id", &self.id).field("room", &self.room).finish_non_exhaustive()
    }
}

/// Which layers each rank is told of: those of an announcement that it holds. If they are not all
/// held by somebody, the first rank is told of all of them, and says so.
fn shares(layers: Option<Range<u32>>, held: &[Option<(u32, u32)>]) -> Vec<Option<Option<Range<u32>>>> {
    let Some(layers) = layers else { return vec![Some(None); held.len()] };
    let share = |held: &Option<(u32, u32)>| match *held {
        Some((first, end)) => layers.start.max(first)..layers.end.min(end),
        None => layers.clone(),
    };
    let shares: Vec<Range<u32>> = held.iter().map(share).collect();
    let covered = |layer: u32| shares.iter().any(|share| share.contains(&layer));
    let bound = shares.iter().map(|share| share.end).max().unwrap_or(0);
    if layers.is_empty() || bound < layers.end || !layers.clone().all(covered) {
        let first = Some(Some(layers.clone()));
        return [first].into_iter().chain(held.iter().skip(1).map(|_| None)).collect();
    }
    shares.into_iter().map(|share| (!share.is_empty()).then_some(Some(share))).collect()
}

/// The same pages, of another rank's cache.
fn copy(list: PageList) -> Option<Pages> {
    let copy = Pages::claim(list).ok();
    debug_assert!(copy.is_some(), "a list that was owned names a page twice");
    copy
}

fn copy_groups(groups: &Groups) -> Option<Groups> {
    let mut copies = Groups::none();
    for GroupItems { group, first, items } in groups.iter() {
        copies.push(GroupItems::from_number(*group, *first, copy(items.list().clone())?)).ok()?;
    }
    Some(copies)
}

fn into_chunk(said: ToSender) -> Backpressure<Pages> {
    match said {
        ToSender::Send(chunk) | ToSender::Begin(chunk) => Backpressure(chunk),
        _ => Backpressure(Pages::none()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_ranks_get_the_same_items_of_the_same_groups() {
        let pages = |list: &[u32]| Pages::claim(PageList::from_pages(list.iter().copied()).unwrap()).unwrap();
        let mut groups = Groups::none();
        groups.push(GroupItems::new(0, pages(&[7]))).unwrap();
        groups.push(GroupItems::from_number(3, 12, pages(&[5, 1, 2]))).unwrap();
        assert_eq!(copy_groups(&groups), Some(groups));
    }

    #[test]
    fn each_stage_of_a_pipeline_is_told_of_its_layers() {
        let stages = [Some((0, 4)), Some((0, 4)), Some((4, 8))];
        assert_eq!(shares(None, &stages), [Some(None), Some(None), Some(None)]);
        assert_eq!(shares(Some(2..5), &stages), [Some(Some(2..4)), Some(Some(2..4)), Some(Some(4..5))]);
        assert_eq!(shares(Some(6..7), &stages), [None, None, Some(Some(6..7))]);
        // Nobody has them: the first rank says what is wrong.
        for wrong in [Some(7..9), Some(3..3), Some(8..20)] {
            assert_eq!(shares(wrong.clone(), &stages), [Some(wrong), None, None]);
        }
        assert_eq!(shares(Some(1..2), &[None, None]), [Some(Some(1..2)), Some(Some(1..2))]);
    }
}
