//! Revoking the right to write, and what is kept of links that have ended.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use kv_core::{PeerId, Time};
use kv_host::{Process, Token};

use crate::link::{Link, LinkId, Lost};
use crate::table::Links;

/// First pause before a revocation that waits for the end of a slice is checked again; the pause doubles.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// Longest pause before such a revocation is checked again.
const LOOK_RARELY: Duration = Duration::from_millis(10);
/// How long the death of a peer is awaited after its connection was lost.
pub(crate) const DYING: Duration = Duration::from_millis(500);

/// Revocations that are under way, and links that have ended before it was proven that their peers copy
/// nothing more.
#[derive(Debug, Default)]
pub(crate) struct Revoking {
    lost: HashMap<LinkId, Lost>,
    /// Peers whose connection was lost a moment ago, and until when their death is awaited.
    dying: BTreeMap<PeerId, Time>,
    /// Revocations that are not answered yet, with the links on which slices may be under way.
    asked: BTreeMap<PeerId, BTreeSet<LinkId>>,
    /// When to check those links again.
    look_at: Option<Time>,
    /// The present pause between two checks.
    look_again: Duration,
}

impl Revoking {
    /// Revokes a peer's right to write, on every link that its process may write through. (There are two such
    /// links if both sides have connected at once, and some may have ended.) [`answered`](Revoking::answered)
    /// returns the peer once no slice is under way.
    pub(crate) fn ask(&mut self, peer: PeerId, links: &Links, now: Time) {
        let served = links.id_of(peer).and_then(|id| links.get(id)?.token());
        let served = served.or_else(|| self.token_of_lost(peer));
        let of_peer = |token: Option<Token>| token.is_some() && token == served;
        let open = links.iter().filter(|(_, link)| of_peer(link.token())).map(|(id, _)| id);
        let ended = self.lost.iter().filter(|(_, lost)| of_peer(lost.token)).map(|(id, _)| *id);
        let all: BTreeSet<LinkId> = open.chain(ended).collect();
        self.asked.entry(peer).or_default().extend(all);
        self.look_again = LOOK_AGAIN;
        self.look_at = Some(now + LOOK_AGAIN);
    }

    /// The peers whose revocation is complete: no slice of theirs is under way any more.
    pub(crate) fn answered(&mut self, links: &Links) -> Vec<PeerId> {
        let lost = &self.lost;
        let mut answered = Vec::new();
        self.asked.retain(|peer, asked| {
            asked.retain(|id| is_marked(*id, links, lost));
            if asked.is_empty() {
                answered.push(*peer);
            }
            !asked.is_empty()
        });
        answered
    }

    /// Sets the next check of unanswered revocations. Returns the processes of ended links that need not be
    /// kept any more.
    pub(crate) fn settle(&mut self, now: Time) -> Vec<Process> {
        match self.look_at {
            _ if self.asked.is_empty() => self.look_at = None,
            Some(at) if at <= now => {
                self.look_again = (2 * self.look_again).min(LOOK_RARELY);
                self.look_at = Some(now + self.look_again);
            }
            _ => {}
        }
        let over = self.lost.extract_if(|_, lost| lost.peer.is_none() && !lost.is_marked());
        over.filter_map(|(_, lost)| lost.process).collect()
    }

    /// Keeps the rest of a link that has ended without proof that its peer copies nothing more. `peer` is the
    /// peer whose death the owner must be told. Returns the process if nothing needs to be kept.
    pub(crate) fn keep(&mut self, id: LinkId, link: &mut Link, peer: Option<PeerId>) -> Option<Process> {
        let (token, process, granted) = (link.token(), link.process.take(), link.granted.take());
        let lost = Lost { peer, token, process, granted };
        // This revokes the right to write of the link, even if no revocation was asked for.
        let is_marked = lost.is_marked();
        if peer.is_none() && !is_marked {
            return lost.process;
        }
        // The process is still watched, under the same number.
        self.lost.insert(id, lost);
        None
    }

    /// Notes that the connection to a peer was lost. The peer's death is awaited for the time [`DYING`].
    pub(crate) fn await_death(&mut self, peer: PeerId, now: Time) {
        self.dying.insert(peer, now + DYING);
    }

    /// The peers whose connections were lost and who have not been proven dead in the time [`DYING`] since.
    pub(crate) fn living(&mut self, now: Time) -> Vec<PeerId> {
        let due = self.dying.iter().filter(|(_, due)| **due <= now);
        let living: Vec<PeerId> = due.map(|(peer, _)| *peer).collect();
        self.dying.retain(|_, due| *due > now);
        living
    }

    /// Notes that a peer is proven dead, or has said goodbye. Either completes the peer's revocation, unless
    /// slices may be under way on other links.
    pub(crate) fn dead(&mut self, peer: PeerId, links: &Links) {
        self.dying.remove(&peer);
        if let Some(asked) = self.asked.get_mut(&peer) {
            asked.retain(|id| is_marked(*id, links, &self.lost));
            if asked.is_empty() {
                self.asked.remove(&peer);
            }
        }
    }

    /// Notes that the process of a link has ended: the rights that the process had, on any link, need no
    /// revocation. Returns the rest of the link, if the link had ended before.
    pub(crate) fn process_ended(&mut self, id: LinkId, links: &mut Links) -> Option<Lost> {
        let (link, lost) = (links.get(id), self.lost.get(&id));
        let process = link.and_then(|link| link.process.as_ref());
        let dead = process.or_else(|| lost?.process.as_ref())?;
        let token = lost.map_or_else(|| link.and_then(Link::token), |lost| lost.token);
        let of_dead = |other: Option<Token>, process: &Option<Process>| {
            other == token && process.as_ref().is_some_and(|process| process.is(dead))
        };
        let open = links.iter().filter(|(_, link)| of_dead(link.token(), &link.process));
        let ended = self.lost.iter().filter(|(_, lost)| of_dead(lost.token, &lost.process));
        let all: Vec<LinkId> = open.map(|(id, _)| id).chain(ended.map(|(id, _)| *id)).collect();
        for id in all {
            if let Some(link) = links.get_mut(id) {
                link.granted = None;
            }
            if let Some(lost) = self.lost.get_mut(&id) {
                lost.granted = None;
            }
        }
        self.lost.remove(&id)
    }

    /// Notes that the owner need not be told any more about a peer whose link was lost.
    pub(crate) fn forget(&mut self, peer: PeerId) {
        self.dying.remove(&peer);
        for lost in self.lost.values_mut().filter(|lost| lost.peer == Some(peer)) {
            lost.peer = None;
        }
    }

    /// True if the connection to a peer was lost and the owner is still to be told the peer's end.
    pub(crate) fn has_lost(&self, peer: PeerId) -> bool {
        self.lost.values().any(|lost| lost.peer == Some(peer))
    }

    /// The token of a peer whose connection was lost.
    pub(crate) fn token_of_lost(&self, peer: PeerId) -> Option<Token> {
        self.lost.values().find(|lost| lost.peer == Some(peer))?.token
    }

    /// How many ended links of a process may still have a slice under way.
    pub(crate) fn marked_of(&self, process: &Process) -> usize {
        let same = |lost: &&Lost| lost.process.as_ref().is_some_and(|other| other.is(process));
        self.lost.values().filter(same).filter(|lost| lost.is_marked()).count()
    }

    /// When the next check is due, if nothing else happens before.
    pub(crate) fn next(&self) -> Option<Time> {
        let look = self.look_at.filter(|_| !self.asked.is_empty());
        look.into_iter().chain(self.dying.values().copied()).min()
    }

    #[cfg(test)]
    pub(crate) fn lost(&self) -> usize {
        self.lost.len()
    }

    /// Clears the marks of all ended links, as if their peers had done so.
    #[cfg(test)]
    pub(crate) fn clear_marks(&self) {
        self.lost.values().filter_map(|lost| lost.granted.as_ref()).for_each(crate::right::Right::clear);
    }

    #[cfg(test)]
    pub(crate) fn is_asked(&self) -> bool {
        !self.asked.is_empty()
    }
}

/// Revokes the right to write of one link. True if a slice may still be under way on the link.
fn is_marked(id: LinkId, links: &Links, lost: &HashMap<LinkId, Lost>) -> bool {
    let open = links.get(id).and_then(|link| link.granted.as_ref());
    let granted = open.or_else(|| lost.get(&id)?.granted.as_ref());
    granted.is_some_and(|right| !right.revoke())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::right::Right;
    use crate::table::tests::link;

    const PEER: PeerId = PeerId(7);

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    /// A link that serves the peer, whose right it has granted, and the peer's own view of that right.
    fn served(links: &mut Links) -> (LinkId, Right) {
        let (right, page) = Right::grant().unwrap();
        let id = links.insert(Link { granted: Some(right), ..link() });
        links.serve(id, PEER);
        (id, Right::of(&page).unwrap())
    }

    #[test]
    fn a_lost_link_is_kept_while_its_peer_or_its_slice_is_awaited() {
        let (mut links, mut revoking) = (Links::default(), Revoking::default());
        for (peer, marked, kept) in
            [(None, false, 0), (Some(PEER), false, 1), (None, true, 1), (Some(PEER), true, 1)]
        {
            let (id, copier) = served(&mut links);
            assert!(!marked || copier.mark());
            assert!(revoking.keep(id, links.get_mut(id).unwrap(), peer).is_none());
            assert!(!copier.mark(), "the right ends with its link");
            assert_eq!((revoking.lost(), revoking.has_lost(PEER)), (kept, peer.is_some()));
            revoking.forget(PEER);
            copier.clear();
            revoking.settle(at(0));
            assert_eq!(revoking.lost(), 0, "{peer:?}, marked: {marked}");
        }
    }

    #[test]
    fn a_revocation_is_polled_ever_less_often_until_its_slice_ends() {
        let (mut links, mut revoking) = (Links::default(), Revoking::default());
        let (id, copier) = served(&mut links);
        // A link without a token cannot be attributed to a peer.
        revoking.asked.insert(PEER, BTreeSet::from([id]));
        assert!(copier.mark());
        (revoking.look_again, revoking.look_at) = (LOOK_AGAIN, Some(at(1)));
        let mut looks = Vec::new();
        for now in 0..40 {
            assert_eq!(revoking.answered(&links), []);
            let next = revoking.next();
            revoking.settle(at(now));
            if revoking.next() != next {
                looks.push(now);
            }
        }
        assert_eq!(looks, [1, 3, 7, 15, 25, 35]);
        copier.clear();
        assert_eq!(revoking.answered(&links), [PEER]);
        assert_eq!(revoking.answered(&links), [], "it is answered once");
        assert_eq!(revoking.next(), None);
    }

    #[test]
    fn a_death_answers_the_revocation_only_once_no_slice_is_under_way_anywhere() {
        let (mut links, mut revoking) = (Links::default(), Revoking::default());
        let ((one, first), (two, second)) = (served(&mut links), served(&mut links));
        assert!(first.mark() && second.mark());
        revoking.asked.insert(PEER, BTreeSet::from([one, two]));
        links.get_mut(one).unwrap().granted = None;
        revoking.dead(PEER, &links);
        assert!(revoking.is_asked(), "the other link is still written through");
        second.clear();
        revoking.dead(PEER, &links);
        assert!(!revoking.is_asked());
    }

    #[test]
    fn a_peer_is_reported_alive_only_after_waiting_for_its_death() {
        let mut revoking = Revoking::default();
        revoking.await_death(PEER, at(0));
        assert_eq!(revoking.next(), Some(Time::ZERO + DYING));
        assert_eq!(revoking.living(at(499)), []);
        assert_eq!(revoking.living(at(500)), [PEER]);
        assert_eq!(revoking.living(at(500)), []);
        revoking.await_death(PEER, at(500));
        revoking.dead(PEER, &Links::default());
        assert_eq!(revoking.living(at(5000)), []);
    }
}
