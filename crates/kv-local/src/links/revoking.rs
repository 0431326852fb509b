//! Taking back the right to write, and what is left of links that have ended.

use std::collections::BTreeSet;
use std::mem;

use kv_core::{PeerId, PlaneEvent};
use kv_host::Process;
use rustix::event::epoll;

use super::{LOOK_AGAIN, LOOK_RARELY};
use crate::link::{Link, LinkId, Lost};
use crate::metadata::Token;
use crate::plane::LocalPlane;

impl LocalPlane {
    /// Revokes the right to write of a peer, on every link that its process may write through: when both
    /// sides have connected at once there are two, and some may have ended.
    pub(crate) fn revoke_links(&mut self, peer: PeerId) {
        let served = self.peers.get(&peer).and_then(|id| self.links.get(id)?.token());
        let served = served.or_else(|| self.lost.values().find(|it| it.peer == Some(peer))?.token);
        let of_peer = |token: Option<Token>| token.is_some() && token == served;
        let links = self.links.iter().filter(|(_, link)| of_peer(link.token())).map(|(id, _)| *id);
        let ended = self.lost.iter().filter(|(_, lost)| of_peer(lost.token)).map(|(id, _)| *id);
        let all: BTreeSet<LinkId> = links.chain(ended).collect();
        self.revoking.entry(peer).or_default().extend(all);
        self.look_again = LOOK_AGAIN;
        self.look_at = self.now + self.look_again;
        self.answer_revocations();
    }

    /// Answers revocations whose last slices have ended.
    pub(crate) fn serve_revocations(&mut self) {
        if !self.revoking.is_empty() {
            self.answer_revocations();
            if self.look_at <= self.now {
                self.look_again = (2 * self.look_again).min(LOOK_RARELY);
                self.look_at = self.now + self.look_again;
            }
        }
        if !self.lost.is_empty() {
            self.lost.retain(|_, lost| {
                let keep = lost.peer.is_some() || lost.is_marked();
                if let Some(process) = lost.process.as_ref().filter(|_| !keep) {
                    let _ = epoll::delete(&self.epoll, process);
                }
                keep
            });
        }
    }

    fn answer_revocations(&mut self) {
        let mut revoking = mem::take(&mut self.revoking);
        revoking.retain(|peer, links| {
            links.retain(|id| self.is_marked(*id));
            if links.is_empty() {
                self.events.push(PlaneEvent::Revoked { peer: *peer });
            }
            !links.is_empty()
        });
        self.revoking = revoking;
    }

    /// Revokes the right of one link. Whether a slice of it may still be under way.
    pub(super) fn is_marked(&self, id: LinkId) -> bool {
        let granted = match (self.links.get(&id), self.lost.get(&id)) {
            (Some(Link { granted: Some(right), .. }), _) | (_, Some(Lost { granted: Some(right), .. })) => {
                right
            }
            _ => return false,
        };
        !granted.revoke()
    }

    /// The process of a link is dead: the rights that it had, on whatever links, need no revocation.
    pub(super) fn settle(&mut self, id: LinkId) {
        let (link, lost) = (self.links.get(&id), self.lost.get(&id));
        let process = link.and_then(|link| link.process.as_ref());
        let Some(dead) = process.or_else(|| lost?.process.as_ref()) else {
            return;
        };
        let token = lost.map_or_else(|| link.and_then(Link::token), |lost| lost.token);
        let of_dead = |other: Option<Token>, process: &Option<Process>| {
            other == token && process.as_ref().is_some_and(|process| process.is(dead))
        };
        let links = self.links.iter().filter(|(_, link)| of_dead(link.token(), &link.process));
        let ended = self.lost.iter().filter(|(_, lost)| of_dead(lost.token, &lost.process));
        let all: Vec<LinkId> = links.map(|(id, _)| *id).chain(ended.map(|(id, _)| *id)).collect();
        for id in all {
            if let Some(link) = self.links.get_mut(&id) {
                link.granted = None;
            }
            if let Some(lost) = self.lost.get_mut(&id) {
                lost.granted = None;
            }
        }
    }

    /// Keeps what is left of a link that has ended without proof that its peer copies nothing more.
    /// `peer` is who is to be told when there is proof.
    pub(super) fn keep_lost(&mut self, id: LinkId, peer: Option<PeerId>) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let (token, process, granted) = (link.token(), link.process.take(), link.granted.take());
        let lost = Lost { peer, token, process, granted };
        // What the link stood for ends with it, even if nobody asks.
        let is_marked = lost.is_marked();
        if lost.peer.is_some() || is_marked {
            // The process is still watched by epoll, under the same key.
            self.lost.insert(id, lost);
        } else if let Some(process) = lost.process {
            let _ = epoll::delete(&self.epoll, &process);
        }
    }

    /// Nobody is to be told any more of a peer whose link was lost.
    pub(crate) fn forget_lost(&mut self, peer: PeerId) {
        self.dying.remove(&peer);
        for lost in self.lost.values_mut().filter(|lost| lost.peer == Some(peer)) {
            lost.peer = None;
        }
        self.serve_revocations();
    }
}
