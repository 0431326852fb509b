//! What hellos lead to.

use bytes::Bytes;
use rustix::event::epoll;

use super::process_key;
use crate::handshake::{Hello, Process, Refusal, check_arenas};
use crate::link::{Identity, LinkId, Stage};
use crate::metadata::Metadata;
use crate::plane::LocalPlane;
use crate::remote::PeerMemory;

impl LocalPlane {
    pub(super) fn on_hello(&mut self, id: LinkId, body: Bytes) -> Result<(), Refusal> {
        let hello = Hello::decode(body)?;
        if hello.expected != self.token {
            return Err(Refusal::NotMe);
        }
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
        let fds = link.connection.take_fds();
        check_arenas(&fds, &metadata)?;
        let process = Process::of(link.connection.socket()).map_err(|_| Refusal::Process)?;
        epoll::add(&self.epoll, process.pidfd(), process_key(id), epoll::EventFlags::IN)
            .map_err(|_| Refusal::Process)?;
        let answer = Hello { expected: metadata.token, metadata: own };
        link.fds = fds;
        link.process = Some(process);
        link.identity = Some(Identity { bytes: hello.metadata, metadata });
        link.stage = Stage::Welcoming;
        link.connection.queue_hello(answer.encode(), self.arenas.clone());
        self.strangers.remove(&id);
        self.unclaimed.insert(id);
        self.sweep_at = self.sweep_at.min(self.now + self.config.unclaimed_timeout);
        self.flush(id);
        if self.unclaimed.len() > self.config.max_unclaimed {
            self.evict_unclaimed();
        }
        Ok(())
    }

    /// Closes the oldest unclaimed link, but none of a connected peer: there the goodbye would be
    /// taken for the end of our copies, which go on over the other link.
    pub(super) fn evict_unclaimed(&mut self) {
        let peers = self.tokens();
        let is_stranger = |id: &LinkId| {
            let identity = self.links.get(id).and_then(|link| link.identity.as_ref());
            identity.is_none_or(|identity| !peers.contains(&identity.metadata.token))
        };
        if let Some(oldest) = self.unclaimed.iter().copied().find(is_stranger) {
            self.stats.refused += 1;
            self.close(oldest);
        }
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
        let fds = link.connection.take_fds();
        check_arenas(&fds, &identity.metadata)?;
        link.memory = Some(PeerMemory::map(&fds, &identity.metadata).map_err(|_| Refusal::Arena)?);
        link.stage = Stage::Open;
        link.connection.open();
        self.run.extend(link.waiting.drain(..));
        self.populating.push_back(id);
        self.flush(id);
        Ok(())
    }
}
