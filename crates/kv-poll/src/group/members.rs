//! The sessions of one request on all ranks: their common state, and the commands that some ranks have yet to
//! take.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use kv_core::proto::Command;
use kv_core::{
    Cause, ChunkId, FinalLayers, KvPoll, KvSession, PageList, Pages, ReadyEvent, Reclaimed, SessionId,
    TransferError,
};

use super::deal::Deal;
use super::parts;
use super::ready_event::SharedReadyEvent;
use crate::consensus::{OPENING, Standing};

/// The sessions of one request, in the order of ranks.
pub(super) struct Members<S: KvSession> {
    ranks: Vec<Rank<S>>,
    /// The number of the session on each rank.
    pub(super) ids: Vec<SessionId>,
    /// Chunks given so far. All ranks number the chunks alike.
    chunks: u32,
    /// Which rank has which of the request's pages.
    deal: Deal,
    /// Commands that some ranks, named by their positions, are told after the last chunk only.
    withheld: Vec<(usize, Command)>,
    /// The ready events that may still be asked, in the order given. The last copy of each is here, so that
    /// an event of the caller is never dropped while the group is locked.
    ready_events: VecDeque<SharedReadyEvent>,
    /// What the scheduler is told of the request, as of the last `settle`.
    told: Standing,
    /// The state with which the request has ended, once sessions may be gone that could be asked for theirs.
    ended: Option<KvPoll>,
    /// Why the session had failed on ranks that were reclaimed.
    failure: Option<TransferError>,
    aborted: bool,
    /// The handle of the request was dropped.
    pub(super) abandoned: bool,
}

struct Rank<S: KvSession> {
    /// The session on this rank; `None` once the session was reclaimed.
    session: Option<S>,
    /// Commands for which the ring of the rank had no room, in order. Always empty on the first rank that a
    /// command is for: there the caller is refused.
    waiting: VecDeque<Command>,
    /// Pages that the session on this rank was given.
    pages: usize,
    reclaimable: bool,
    reclaimed: Reclaimed,
}

impl<S: KvSession> Rank<S> {
    /// Takes back what the session was given; true once nothing is left with the session.
    fn take_back(&mut self) -> bool {
        if let Some(reclaimed) = self.session.as_mut().and_then(KvSession::reclaim) {
            // The worker reports nothing more of a session that is gone.
            (self.session, self.reclaimed, self.reclaimable) = (None, reclaimed, true);
        }
        self.session.is_none()
    }

    /// Gives the session a command; refused while others wait, or if the ring of the rank has no room.
    fn say(&mut self, said: Command) -> Result<(), Command> {
        let Some(session) = self.session.as_mut().filter(|_| self.waiting.is_empty()) else {
            return Err(said);
        };
        let pages = said.pages().map_or(0, Pages::len);
        session.submit(said)?;
        self.pages += pages;
        Ok(())
    }
}

impl<S: KvSession> Members<S> {
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
            ready_events: VecDeque::new(),
            told: OPENING,
            ended: None,
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
        self.sessions().map(KvSession::poll).chain(self.ended).min().unwrap_or(KvPoll::Failed)
    }

    /// What the scheduler is told of the request, as of the last `settle`.
    pub(super) fn told(&self) -> Standing {
        self.told
    }

    /// Why the request has failed. The reason of a rank that failed by itself goes before the reason of a
    /// rank that was aborted because of another rank.
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

    /// The number of the next chunk.
    pub(super) fn next_chunk(&self) -> ChunkId {
        ChunkId(self.chunks)
    }

    /// Gives each rank its part of a command; `layers` are the layers that the ranks hold. Refused if the
    /// first rank has no room: then no rank has got anything.
    pub(super) fn submit(&mut self, command: Command, layers: &[Option<(u32, u32)>]) -> Result<(), Command> {
        let command = match command {
            Command::LayersFinal { session, layers: told } => return self.announce(session, told, layers),
            Command::Abort { .. } => {
                self.abort();
                return Ok(());
            }
            command => command,
        };
        let given = command.pages().map(Pages::len);
        let (announced, is_final) = match &command {
            Command::InitSender { num_pages, .. } => (Some(*num_pages), false),
            command => (None, matches!(command, Command::Send { .. })),
        };
        let copies = parts::copies(&command, &self.deal, self.ranks.len());
        self.say([Some(command)].into_iter().chain(copies))?;
        if let Some(pages) = announced {
            self.deal.announce(pages);
        }
        if let Some(pages) = given {
            self.gave(pages, is_final);
        }
        Ok(())
    }

    /// Tells each rank which of its layers are final.
    fn announce(
        &mut self,
        session: SessionId,
        told: FinalLayers,
        held: &[Option<(u32, u32)>],
    ) -> Result<(), Command> {
        let FinalLayers { chunk, layers, ready_event, .. } = told;
        let ready_event = ready_event.map(SharedReadyEvent::new);
        let announce = |layers| {
            let ready_event =
                ready_event.clone().map(|ready_event| Box::new(ready_event) as Box<dyn ReadyEvent>);
            layers_final(session, (chunk, layers, ready_event))
        };
        let mut shares = parts::shares(layers.clone(), held);
        let later = |(rank, share): (usize, &mut Option<_>)| {
            let withheld = self.deal.withholds(rank, chunk.0);
            share.take_if(|_| withheld).map(|share| (rank, share))
        };
        let withheld: Vec<_> = shares.iter_mut().enumerate().filter_map(later).collect();
        if self.say(shares.into_iter().map(|share| share.map(&announce))).is_err() {
            // No rank has got anything: the announcement goes back as it came.
            let ready_event = ready_event.map(SharedReadyEvent::unshare);
            return Err(layers_final(session, (chunk, layers, ready_event)));
        }
        self.withheld.extend(withheld.into_iter().map(|(rank, share)| (rank, announce(share))));
        while self.ready_events.front().is_some_and(SharedReadyEvent::is_answered) {
            self.ready_events.pop_front();
        }
        self.ready_events.extend(ready_event);
        Ok(())
    }

    /// Notes that pages were given: to a sender, as its next chunk.
    fn gave(&mut self, pages: usize, is_final: bool) {
        let chunk = self.next_chunk();
        self.chunks += 1;
        if self.deal.gave(pages, chunk.0) {
            self.say_withheld();
        }
        if is_final {
            // On some ranks the chunk was only begun.
            for (rank, &session) in self.ids.iter().enumerate() {
                if self.deal.withholds(rank, chunk.0) {
                    let layers = FinalLayers::all(chunk);
                    self.withheld.push((rank, Command::LayersFinal { session, layers }));
                }
            }
        }
    }

    /// Gives each rank its command, if there is one. The first rank with a command may refuse: then no rank
    /// has got anything. A command for which another rank has no room waits here.
    fn say(&mut self, all: impl IntoIterator<Item = Option<Command>>) -> Result<(), Command> {
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

    /// Gives the ranks what was withheld until the last chunk.
    fn say_withheld(&mut self) {
        for (rank, said) in std::mem::take(&mut self.withheld) {
            let Some(rank) = self.ranks.get_mut(rank) else { continue };
            if let Err(said) = rank.say(said) {
                rank.waiting.push_back(said);
            }
        }
    }

    /// True if commands wait for room in the ring of a rank.
    pub(super) fn is_behind(&self) -> bool {
        self.ranks.iter().any(|rank| !rank.waiting.is_empty())
    }

    /// Gives the ranks the commands that wait, and aborts all ranks when one has failed. True if
    /// [`told`](Members::told) is new for the scheduler.
    pub(super) fn settle(&mut self) -> bool {
        for rank in &mut self.ranks {
            if rank.session.as_ref().is_none_or(|session| session.poll().is_terminal()) {
                // Pages in these commands are copies of the first rank's, which this rank was never given.
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
        news
    }

    /// Takes back what the ranks after the first were given; true once nothing is left with any of them.
    fn others_gave_back(&mut self) -> bool {
        let mut all = true;
        for rank in self.ranks.iter_mut().skip(1) {
            all &= rank.take_back();
        }
        all
    }

    /// What the sessions on all ranks hand back, once each of them does.
    pub(super) fn reclaim(&mut self) -> Option<Reclaimed> {
        if !self.sessions().all(|session| session.poll().is_terminal()) {
            return None;
        }
        (self.ended, self.failure) = (Some(self.poll()), self.failure());
        // The first rank comes last: it alone has the tokens of the caller's pool, and what its session does not
        // give back in one piece is free to be taken at once.
        if !self.others_gave_back() || !self.ranks.iter_mut().take(1).all(Rank::take_back) {
            return None;
        }
        let skipped: Vec<u16> =
            self.ranks.iter().flat_map(|rank| rank.reclaimed.skipped.iter().copied()).collect();
        // The first rank was given every page that any rank was given. If a rank returns fewer pages than it
        // was given, only the fewest pages are known to be free on all ranks.
        let lost = self.ranks.iter().any(|rank| rank.reclaimed.pages.len() != rank.pages);
        let mut all = self.ranks.iter_mut().map(|rank| std::mem::take(&mut rank.reclaimed));
        // Only the tokens that the first rank was given are of the caller's pool: others got mirrors.
        let mut first = all.next().unwrap_or_default();
        if let Some(least) = all.map(|other| other.pages).min_by_key(Pages::len).filter(|_| lost)
            && least.len() < first.pages.len()
        {
            first.pages = only(first.pages, least.list());
        }
        first.skipped = skipped;
        first.skipped.sort_unstable();
        first.skipped.dedup();
        Some(first)
    }
}

impl<S: KvSession> Drop for Members<S> {
    /// A group that is dropped before a request is over leaves the sessions of its ranks to their workers, which give
    /// back each what it has. The first rank's session has the tokens: while another rank may still touch the pages,
    /// the session is never dropped, so that its worker cannot give the pages away.
    fn drop(&mut self) {
        if !self.others_gave_back()
            && let Some(mut session) = self.ranks.first_mut().and_then(|rank| rank.session.take())
        {
            session.abort();
            std::mem::forget(session);
        }
    }
}

/// The command with these fields of [`FinalLayers`].
fn layers_final(
    session: SessionId,
    (chunk, layers, ready_event): (ChunkId, Option<Range<u32>>, Option<Box<dyn ReadyEvent>>),
) -> Command {
    let mut told = FinalLayers::all(chunk);
    (told.layers, told.ready_event) = (layers, ready_event);
    Command::LayersFinal { session, layers: told }
}

/// Those pages of a token that a list names. The others are dropped, so that their pool counts them.
fn only(mut pages: Pages, named: &PageList) -> Pages {
    let named: BTreeSet<u32> = named.iter().collect();
    let keep: Vec<bool> = pages.list().iter().map(|page| named.contains(&page)).collect();
    let mut kept = Pages::none();
    for span in keep.chunk_by(bool::eq) {
        let rest = pages.split_off(span.len());
        let head = std::mem::replace(&mut pages, rest);
        if span.contains(&true) {
            let refused = kept.append(head);
            debug_assert!(refused.is_ok(), "parts of one token are of one pool");
        }
    }
    kept
}

#[cfg(test)]
mod tests;
