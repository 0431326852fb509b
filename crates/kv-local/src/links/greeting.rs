//! What hellos lead to.

use bytes::Bytes;
use kv_host::{Process, Proof};
use rustix::event::epoll;

use super::process_key;
use crate::handshake::{Hello, Lent, Refusal};
use crate::link::{Identity, LinkId, Lost, Stage};
use crate::metadata::Metadata;
use crate::plane::LocalPlane;
use crate::right::Right;

/// Links of one process that may end with a slice under way before no more of it are accepted: what is kept
/// of each costs a descriptor and a page.
const MAX_MARKED: usize = 8;

impl LocalPlane {
    pub(super) fn on_hello(&mut self, id: LinkId, body: Bytes) -> Result<(), Refusal> {
        let hello = Hello::decode(body)?;
        if self.strangers.contains(&id) {
            self.on_stranger_hello(id, hello)
        } else {
            self.on_welcome(id, &hello)
        }
    }

    /// Somebody who has our metadata says who it is: we answer in kind.
    pub(super) fn on_stranger_hello(&mut self, id: LinkId, hello: Hello) -> Result<(), Refusal> {
        let metadata = Metadata::decode(&hello.metadata).map_err(|_| Refusal::Metadata)?;
        if metadata.token == self.token {
            return Err(Refusal::NotThem);
        }
        let own = self.own_metadata().map_err(|_| Refusal::Metadata)?;
        let Some(link) = self.links.get_mut(&id) else {
            return Ok(());
        };
        let lent = Lent::check(link.connection.take_fds(), &metadata, self.config.max_sparse)?;
        let process = Process::behind(link.connection.socket()).map_err(|_| Refusal::Process)?;
        link.proven = match metadata.process.check(&process) {
            Proof::Proven => true,
            Proof::Unknown => false,
            Proof::Refuted => return Err(Refusal::Impostor),
        };
        let same = |lost: &&Lost| lost.process.as_ref().is_some_and(|other| other.is(&process));
        let got = self.lost.values().filter(same).filter(|lost| lost.is_marked()).count();
        if got > MAX_MARKED {
            return Err(Refusal::Marked { got, max: MAX_MARKED });
        }
        let (right, page) = Right::grant().map_err(|_| Refusal::Right)?;
        epoll::add(&self.epoll, &process, process_key(id), epoll::EventFlags::IN)
            .map_err(|_| Refusal::Process)?;
        let answer = Hello { expected: metadata.token, metadata: own };
        link.lent = Some(lent);
        link.granted = Some(right);
        link.process = Some(process);
        link.identity = Some(Identity { bytes: hello.metadata, metadata });
        link.stage = Stage::Welcoming;
        link.connection.queue_hello(answer.encode(), page.into(), self.arenas.clone());
        self.strangers.remove(&id);
        self.unclaimed.insert(id);
        self.sweep_at = self.sweep_at.min(self.now + self.config.unclaimed_timeout);
        self.flush(id);
        while self.unclaimed.len() > self.config.max_unclaimed || self.lent() > self.config.max_lent {
            if !self.evict_unclaimed() {
                break;
            }
        }
        Ok(())
    }

    /// Descriptors that unclaimed links have lent us.
    fn lent(&self) -> usize {
        let lent = self.unclaimed.iter().filter_map(|id| self.links.get(id)?.lent.as_ref());
        lent.map(|lent| 1 + lent.arenas.len()).sum()
    }

    /// Closes the unclaimed link that has been silent for longest, but none of a connected peer: there
    /// the goodbye would be taken for the end of our copies, which go on over the other link. False if
    /// there is none.
    pub(super) fn evict_unclaimed(&mut self) -> bool {
        let peers = self.tokens();
        let mut silent = None;
        for id in &self.unclaimed {
            let Some(link) = self.links.get_mut(id) else {
                continue;
            };
            if link.token().is_none_or(|token| !peers.contains(&token)) {
                link.notice_copies(self.now);
                let order = (link.heard, *id);
                silent = Some(silent.map_or(order, |least| order.min(least)));
            }
        }
        let Some((_, id)) = silent else {
            return false;
        };
        self.stats.refused += 1;
        self.close(id);
        true
    }

    /// The peer that we dialed answers.
    pub(super) fn on_welcome(&mut self, id: LinkId, hello: &Hello) -> Result<(), Refusal> {
        let Some(link) = self.links.get_mut(&id) else {
            return Ok(());
        };
        let Some(identity) = link.identity.as_ref().filter(|identity| identity.bytes == hello.metadata)
        else {
            return Err(Refusal::NotThem);
        };
        let metadata = &identity.metadata;
        let lent = Lent::check(link.connection.take_fds(), metadata, self.config.max_sparse)?;
        link.memory = Some(lent.map(metadata).map_err(|_| Refusal::Arena)?);
        link.stage = Stage::Open;
        link.connection.open();
        self.run.extend(link.waiting.drain(..));
        self.populating.push_back(id);
        self.flush(id);
        Ok(())
    }
}
