//! One request's sessions on all ranks: where they stand together, and what some have yet to be told.

use std::collections::VecDeque;

use kv_core::{Cause, ChunkId, FinalLayers, Groups, KvPoll, KvSession, Reclaimed, SessionId, TransferError};

use super::deal::Deal;
use crate::consensus::{OPENING, Standing};
use crate::kv::{Receiver, Sender};
use crate::said::{ToReceiver, ToSender};

/// A half of a transfer on one rank, with what can be said to it.
pub(super) trait Half: KvSession {
    /// A call that full queues may refuse.
    type Said;

    /// Makes the call; what was said comes back if there is no room.
    fn say(&mut self, said: Self::Said) -> Result<(), Self::Said>;

    /// Pages that are given in a call.
    fn pages_in(said: &Self::Said) -> usize;

    /// The call that gives these items.
    fn to_give(groups: Groups) -> Self::Said;

    /// The items of such a call.
    fn given(said: Self::Said) -> Groups;
}

impl Half for Sender {
    type Said = ToSender;

    fn say(&mut self, said: ToSender) -> Result<(), ToSender> {
        said.tell(self)
    }

    fn pages_in(said: &ToSender) -> usize {
        match said {
            ToSender::Send(chunk) | ToSender::Begin(chunk) => chunk.len(),
            ToSender::Init(..) | ToSender::Final(_) | ToSender::Groups(_) => 0,
        }
    }

    fn to_give(groups: Groups) -> ToSender {
        ToSender::Groups(groups)
    }

    fn given(said: ToSender) -> Groups {
        if let ToSender::Groups(groups) = said { groups } else { Groups::none() }
    }
}

impl Half for Receiver {
    type Said = ToReceiver;

    fn say(&mut self, said: ToReceiver) -> Result<(), ToReceiver> {
        said.tell(self)
    }

    fn pages_in(said: &ToReceiver) -> usize {
        if let ToReceiver::Init(pages, _) = said { pages.len() } else { 0 }
    }

    fn to_give(groups: Groups) -> ToReceiver {
        ToReceiver::Groups(groups)
    }

    fn given(said: ToReceiver) -> Groups {
        if let ToReceiver::Groups(groups) = said { groups } else { Groups::none() }
    }
}

/// The sessions of one request, in the order of ranks.
pub(super) struct Members<S: Half> {
    ranks: Vec<Rank<S>>,
    /// Their numbers.
    pub(super) ids: Vec<SessionId>,
    /// Given so far; they are numbered alike on all ranks.
    chunks: u32,
    /// Which pages are whose.
    pub(super) deal: Deal,
    /// What some ranks are told after the last chunk only.
    withheld: Vec<(usize, S::Said)>,
    /// What the scheduler was told last.
    told: Standing,
    /// What a rank that was reclaimed had failed of.
    failure: Option<TransferError>,
    aborted: bool,
    /// There is no handle any more.
    pub(super) abandoned: bool,
}

struct Rank<S: Half> {
    /// `None` once it was reclaimed.
    session: Option<S>,
    /// What its queue had no room for, in order. Always empty on the first rank that is concerned:
    /// there the caller is refused.
    waiting: VecDeque<S::Said>,
    /// Pages that its session was given.
    pages: usize,
    reclaimable: bool,
    reclaimed: Reclaimed,
}

impl<S: Half> Rank<S> {
    /// Says something, after what waits.
    fn say(&mut self, said: S::Said) -> Result<(), S::Said> {
        let Some(session) = self.session.as_mut().filter(|_| self.waiting.is_empty()) else {
            return Err(said);
        };
        let pages = S::pages_in(&said);
        session.say(said)?;
        self.pages += pages;
        Ok(())
    }
}

impl<S: Half> Members<S> {
    pub(super) fn new(sessions: Vec<S>, deal: Deal) -> Members<S> {
        let rank = |session| Rank {
            session: Some(session),
            waiting: VecDeque::new(),
            pages: 0,
            reclaimable: false,
            reclaimed: Reclaimed::default(),
        };
        let ids = sessions.iter().map(KvSession::id).collect();
        Members {
            ids,
            ranks: sessions.into_iter().map(rank).collect(),
            chunks: 0,
            deal,
            withheld: Vec::new(),
            told: OPENING,
            failure: None,
            aborted: false,
            abandoned: false,
        }
    }

    pub(super) fn sessions(&self) -> impl Iterator<Item = &S> {
        self.ranks.iter().filter_map(|rank| rank.session.as_ref())
    }

    /// The minimum of all ranks' states.
    pub(super) fn poll(&self) -> KvPoll {
        // A rank that was reclaimed has ended: its end was counted when it was noted.
        let open = self.sessions().map(KvSession::poll);
        open.chain(Some(self.told.poll).filter(|poll| poll.is_terminal())).min().unwrap_or(self.told.poll)
    }

    /// Why the request has failed: a rank that failed for itself says it better than one that was
    /// aborted because of another.
    pub(super) fn failure(&self) -> Option<TransferError> {
        let all = self.failure.iter().cloned().chain(self.sessions().filter_map(KvSession::failure));
        all.min_by_key(|error| error.cause == Cause::Aborted)
    }

    pub(super) fn abort(&mut self) {
        self.aborted = true;
        for rank in &mut self.ranks {
            if let Some(session) = &mut rank.session {
                session.abort();
            }
        }
    }

    pub(super) fn note(&mut self, rank: usize, reclaimable: bool) {
        if let Some(rank) = self.ranks.get_mut(rank) {
            rank.reclaimable = reclaimable;
        }
    }

    /// Says something to each rank, to some of them nothing. The first rank that is concerned may
    /// refuse: then nobody has heard anything. What another one has no room for waits here.
    pub(super) fn say(&mut self, all: impl IntoIterator<Item = Option<S::Said>>) -> Result<(), S::Said> {
        let mut first = true;
        for (rank, said) in self.ranks.iter_mut().zip(all) {
            let Some(said) = said else { continue };
            if let Err(said) = rank.say(said) {
                if first {
                    return Err(said);
                }
                rank.waiting.push_back(said);
            }
            first = false;
        }
        Ok(())
    }

    /// Keeps back what a rank is to be told after the last chunk. None of it gives pages.
    pub(super) fn withhold(&mut self, rank: usize, said: S::Said) {
        self.withheld.push((rank, said));
    }

    /// Says what was kept back.
    fn say_withheld(&mut self) {
        for (rank, said) in std::mem::take(&mut self.withheld) {
            let Some(rank) = self.ranks.get_mut(rank) else { continue };
            if let Err(said) = rank.say(said) {
                rank.waiting.push_back(said);
            }
        }
    }

    /// True if a rank has not heard everything.
    pub(super) fn is_behind(&self) -> bool {
        self.ranks.iter().any(|rank| !rank.waiting.is_empty())
    }

    /// Tells the ranks what they have not heard, and lets all fail when one has. What is new for the
    /// scheduler is returned.
    pub(super) fn settle(&mut self) -> Option<Standing> {
        for rank in &mut self.ranks {
            if rank.session.as_ref().is_none_or(|session| session.poll().is_terminal()) {
                // These pages are other ranks' copies of a list, which this rank has not been given.
                rank.waiting.clear();
            }
            let mut waiting = std::mem::take(&mut rank.waiting);
            while let Some(said) = waiting.pop_front() {
                if let Err(said) = rank.say(said) {
                    waiting.push_front(said);
                    break;
                }
            }
            rank.waiting = waiting;
        }
        let poll = self.poll();
        if poll == KvPoll::Failed && !self.aborted {
            self.abort();
        }
        let reclaimable = poll.is_terminal() && self.ranks.iter().all(|rank| rank.reclaimable);
        let standing = Standing { poll, reclaimable };
        let news = standing != self.told;
        self.told = standing;
        news.then_some(standing)
    }

    /// What all ranks hand back, once all do.
    pub(super) fn reclaim(&mut self) -> Option<Reclaimed> {
        if !self.sessions().all(|session| session.poll().is_terminal()) {
            return None;
        }
        // From now on nobody is left to ask.
        (self.told.poll, self.failure) = (self.poll(), self.failure());
        for rank in &mut self.ranks {
            match rank.session.take().map(KvSession::reclaim_all) {
                Some(Ok(reclaimed)) => rank.reclaimed = reclaimed,
                Some(Err(session)) => rank.session = Some(session),
                None => {}
            }
        }
        if self.ranks.iter().any(|rank| rank.session.is_some()) {
            return None;
        }
        let skipped: Vec<u16> =
            self.ranks.iter().flat_map(|rank| rank.reclaimed.skipped.iter().copied()).collect();
        // The first rank was given everything that any was given. If one returns less than it got, no
        // more than that is known to be free on all.
        let lost = self.ranks.iter().any(|rank| rank.reclaimed.pages.len() != rank.pages);
        let mut all = self.ranks.iter_mut().map(|rank| std::mem::take(&mut rank.reclaimed));
        let least = match lost {
            true => all.min_by_key(|reclaimed| reclaimed.pages.len()),
            false => all.next(),
        };
        let mut least = least.unwrap_or_default();
        least.skipped = skipped;
        least.skipped.sort_unstable();
        least.skipped.dedup();
        Some(least)
    }
}

impl Members<Sender> {
    /// The next pages were given, as a chunk with the number that is returned.
    pub(super) fn gave(&mut self, pages: usize, is_final: bool) -> ChunkId {
        let number = self.chunks;
        self.chunks += 1;
        if self.deal.gave(pages, number) {
            self.say_withheld();
        }
        if is_final {
            // To some ranks it was only begun.
            let begun = (0..self.ranks.len()).filter(|&rank| self.deal.withholds(rank, number));
            let all = |rank| (rank, ToSender::Final(FinalLayers::all(ChunkId(number))));
            self.withheld.extend(begun.map(all));
        }
        ChunkId(number)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use kv_core::{Backpressure, PageList, Pages, PeerCause, Phase, Room};

    use super::*;

    /// What a rank's session is made to do, and what it was told.
    #[derive(Debug)]
    struct Script {
        poll: KvPoll,
        cause: Option<Cause>,
        quiet: bool,
        room: usize,
        heard: Vec<Pages>,
        aborted: bool,
    }

    struct Fake {
        room: Room,
        script: Rc<RefCell<Script>>,
    }

    impl KvSession for Fake {
        fn id(&self) -> SessionId {
            SessionId(1)
        }

        fn room(&self) -> &Room {
            &self.room
        }

        fn poll(&self) -> KvPoll {
            self.script.borrow().poll
        }

        fn failure(&self) -> Option<TransferError> {
            let cause = self.script.borrow().cause.clone()?;
            Some(TransferError { room: self.room.clone(), peer: None, phase: Phase::Rendezvous, cause })
        }

        fn abort(&mut self) {
            self.script.borrow_mut().aborted = true;
        }

        fn give_groups(&mut self, _: Groups) -> Result<(), Backpressure<Groups>> {
            Ok(())
        }

        fn reclaim(self) -> Result<Pages, Self> {
            self.reclaim_all().map(|reclaimed| reclaimed.pages)
        }

        fn reclaim_all(self) -> Result<Reclaimed, Self> {
            if !self.script.borrow().quiet {
                return Err(self);
            }
            let mut pages = Pages::none();
            for token in std::mem::take(&mut self.script.borrow_mut().heard) {
                pages.append(token).unwrap();
            }
            Ok(Reclaimed { pages, ..Reclaimed::default() })
        }
    }

    impl Half for Fake {
        type Said = Pages;

        fn say(&mut self, said: Pages) -> Result<(), Pages> {
            let mut script = self.script.borrow_mut();
            if script.room == 0 {
                return Err(said);
            }
            script.room -= 1;
            script.heard.push(said);
            Ok(())
        }

        fn pages_in(said: &Pages) -> usize {
            said.len()
        }

        fn to_give(_: Groups) -> Pages {
            Pages::none()
        }

        fn given(_: Pages) -> Groups {
            Groups::none()
        }
    }

    fn pages(list: &[u32]) -> Pages {
        Pages::claim(PageList::from_pages(list.iter().copied()).unwrap()).unwrap()
    }

    fn three() -> (Members<Fake>, Vec<Rc<RefCell<Script>>>) {
        let script = || Script {
            poll: KvPoll::Bootstrapping,
            cause: None,
            quiet: false,
            room: usize::MAX,
            heard: Vec::new(),
            aborted: false,
        };
        let scripts: Vec<_> = (0..3).map(|_| Rc::new(RefCell::new(script()))).collect();
        let fake = |script: &Rc<RefCell<Script>>| Fake { room: Room::from(1), script: Rc::clone(script) };
        let deal = Deal::new(std::iter::empty(), None, 0);
        (Members::new(scripts.iter().map(fake).collect(), deal), scripts)
    }

    fn say(members: &mut Members<Fake>, list: &[u32]) -> Result<(), Pages> {
        members.say((0..3).map(|_| Some(pages(list))))
    }

    fn set(
        script: &Rc<RefCell<Script>>,
        members: &mut Members<Fake>,
        rank: usize,
        poll: KvPoll,
        quiet: bool,
    ) {
        script.borrow_mut().poll = poll;
        script.borrow_mut().quiet = quiet;
        members.note(rank, quiet);
    }

    #[test]
    fn a_request_stands_where_its_slowest_rank_stands() {
        let (mut members, scripts) = three();
        for (rank, script) in scripts.iter().enumerate() {
            assert_eq!(members.settle(), None);
            set(script, &mut members, rank, KvPoll::WaitingForInput, false);
        }
        let standing = |poll, reclaimable| Some(Standing { poll, reclaimable });
        assert_eq!(members.settle(), standing(KvPoll::WaitingForInput, false));
        set(&scripts[0], &mut members, 0, KvPoll::Success, true);
        set(&scripts[1], &mut members, 1, KvPoll::Transferring, false);
        assert_eq!((members.settle(), members.poll()), (None, KvPoll::WaitingForInput));
        set(&scripts[2], &mut members, 2, KvPoll::Success, false);
        assert_eq!(members.settle(), standing(KvPoll::Transferring, false));
        set(&scripts[1], &mut members, 1, KvPoll::Success, true);
        assert_eq!(members.settle(), standing(KvPoll::Success, false));
        assert_eq!(members.reclaim(), None);
        set(&scripts[2], &mut members, 2, KvPoll::Success, true);
        assert_eq!(members.settle(), standing(KvPoll::Success, true));
        assert_eq!(members.reclaim(), Some(Reclaimed::default()));
    }

    #[test]
    fn one_failed_rank_fails_the_others_and_no_page_is_free_before_all_are_quiet() {
        let (mut members, scripts) = three();
        say(&mut members, &[4, 5]).unwrap();
        set(&scripts[0], &mut members, 0, KvPoll::Success, true);
        scripts[1].borrow_mut().cause = Some(Cause::ByPeer(PeerCause::Aborted));
        set(&scripts[1], &mut members, 1, KvPoll::Failed, true);
        let failed = |reclaimable| Some(Standing { poll: KvPoll::Failed, reclaimable });
        assert_eq!(members.settle(), failed(false));
        assert!(scripts[2].borrow().aborted);
        assert_eq!(members.reclaim(), None);
        scripts[2].borrow_mut().cause = Some(Cause::Aborted);
        set(&scripts[2], &mut members, 2, KvPoll::Failed, false);
        assert_eq!((members.settle(), members.reclaim()), (None, None));
        // The one that failed for itself says why, not the one that was made to.
        let cause = members.failure().map(|error| error.cause);
        assert_eq!(cause, Some(Cause::ByPeer(PeerCause::Aborted)));
        set(&scripts[2], &mut members, 2, KvPoll::Failed, true);
        assert_eq!(members.settle(), failed(true));
        assert_eq!(members.reclaim().map(|reclaimed| reclaimed.pages), Some(pages(&[4, 5])));
        assert_eq!(members.poll(), KvPoll::Failed);
    }

    #[test]
    fn a_full_queue_of_the_first_rank_refuses_and_one_of_another_keeps_the_order() {
        let (mut members, scripts) = three();
        scripts[0].borrow_mut().room = 3;
        scripts[2].borrow_mut().room = 1;
        for page in 0..3 {
            say(&mut members, &[page]).unwrap();
        }
        assert_eq!(say(&mut members, &[3]), Err(pages(&[3])));
        let heard = |rank: usize| scripts[rank].borrow().heard.len();
        assert_eq!([heard(0), heard(1), heard(2)], [3, 3, 1]);
        assert!(members.is_behind());
        scripts[2].borrow_mut().room = 1;
        assert_eq!(members.settle(), None);
        assert_eq!((heard(2), members.is_behind()), (2, true));
        scripts[2].borrow_mut().room = 9;
        members.settle();
        assert_eq!((heard(2), members.is_behind()), (3, false));
        let order: Vec<_> = scripts[2].borrow().heard.iter().map(|pages| pages.list().clone()).collect();
        assert_eq!(order, [0, 1, 2].map(|page| pages(&[page]).list().clone()));
    }

    #[test]
    fn pages_that_a_failed_rank_was_never_told_of_are_free_on_it_and_lost_ones_are_not() {
        let (mut members, scripts) = three();
        scripts[1].borrow_mut().room = 1;
        say(&mut members, &[1]).unwrap();
        say(&mut members, &[2]).unwrap();
        for (rank, script) in scripts.iter().enumerate() {
            set(script, &mut members, rank, KvPoll::Failed, true);
        }
        members.settle();
        assert!(!members.is_behind());
        assert_eq!(members.reclaim().map(|reclaimed| reclaimed.pages), Some(pages(&[1, 2])));

        let (mut members, scripts) = three();
        say(&mut members, &[1, 2]).unwrap();
        for (rank, script) in scripts.iter().enumerate() {
            set(script, &mut members, rank, KvPoll::Success, true);
        }
        scripts[2].borrow_mut().heard = vec![pages(&[1])];
        assert_eq!(members.reclaim().map(|reclaimed| reclaimed.pages), Some(pages(&[1])));
    }
}
