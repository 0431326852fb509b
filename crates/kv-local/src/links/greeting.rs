//! Answering the hellos of strangers, and the hellos by which dialed peers answer.

use bytes::Bytes;
use kv_host::{Process, Proof};

use crate::handshake::{Hello, Lent, Refusal};
use crate::link::{Identity, LinkId, Stage};
use crate::metadata::Metadata;
use crate::right::Right;
use crate::transport::LocalTransport;

/// Most ended links of one process that may have a slice under way. With more of them, no link of the process
/// is accepted, because the rest of each costs a descriptor and a page.
const MAX_MARKED: usize = 8;

impl LocalTransport {
    pub(super) fn on_hello(&mut self, id: LinkId, body: Bytes) -> Result<(), Refusal> {
        let hello = Hello::decode(body)?;
        if self.links.strangers().contains(&id) {
            self.on_stranger_hello(id, hello)
        } else {
            self.on_welcome(id, &hello)
        }
    }

    /// Checks the hello of a stranger, who has this transport's metadata, and queues this side's hello.
    fn on_stranger_hello(&mut self, id: LinkId, hello: Hello) -> Result<(), Refusal> {
        let metadata = Metadata::decode(&hello.metadata).map_err(|_| Refusal::Metadata)?;
        if metadata.token == self.given.token() {
            return Err(Refusal::NotThem);
        }
        let own = self.given.metadata().map_err(|_| Refusal::Metadata)?;
        let Some(link) = self.links.get_mut(id) else {
            return Ok(());
        };
        let lent = Lent::check(link.connection.take_fds(), &metadata, self.config.max_sparse)?;
        let process = Process::behind(link.connection.socket()).map_err(|_| Refusal::Process)?;
        link.proven = match metadata.process.check(&process) {
            Proof::Proven => true,
            Proof::Unknown => false,
            Proof::Refuted => return Err(Refusal::Impostor),
        };
        let got = self.revoking.marked_of(&process);
        if got > MAX_MARKED {
            return Err(Refusal::Marked { got, max: MAX_MARKED });
        }
        let (right, page) = Right::grant().map_err(|_| Refusal::Right)?;
        self.watch.watch_process(id, &process).map_err(|_| Refusal::Process)?;
        let answer = Hello { expected: metadata.token, metadata: own };
        link.lent = Some(lent);
        link.granted = Some(right);
        link.process = Some(process);
        link.identity = Some(Identity { bytes: hello.metadata, metadata });
        link.stage = Stage::Welcoming;
        link.connection.outbound.queue_hello(answer.encode(), page.into(), self.given.arenas().to_vec());
        self.links.introduce(id);
        self.sweep_at = self.sweep_at.min(self.now + self.config.unclaimed_timeout);
        self.flush(id);
        self.evict_above_limits();
        Ok(())
    }

    fn evict_above_limits(&mut self) {
        let config = (self.config.max_unclaimed, self.config.max_lent);
        while self.links.unclaimed().len() > config.0 || self.links.lent() > config.1 {
            if !self.evict_unclaimed() {
                break;
            }
        }
    }

    /// Closes the unclaimed link that has been silent for longest, but no link of a connected peer: the peer
    /// would take the goodbye for the end of this side's copies, which go on over the other link. False if
    /// there is no link to close.
    fn evict_unclaimed(&mut self) -> bool {
        let peers = self.links.tokens();
        let mut silent = None;
        for id in self.links.unclaimed().clone() {
            let Some(link) = self.links.get_mut(id) else {
                continue;
            };
            if link.token().is_none_or(|token| !peers.contains(&token)) {
                link.notice_copies(self.now);
                let order = (link.heard, id);
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

    /// Checks the hello by which a dialed peer answers, and opens the link.
    fn on_welcome(&mut self, id: LinkId, hello: &Hello) -> Result<(), Refusal> {
        let Some(link) = self.links.get_mut(id) else {
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
        link.connection.outbound.open();
        self.posts.run(link.waiting.drain(..));
        self.populate(id);
        self.flush(id);
        Ok(())
    }
}
