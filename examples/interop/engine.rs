//! Our engine: the caches of its ranks, the workers that speak the peer's dialect, and one allocator for all
//! ranks.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use kv_transfer::bootstrap::KvBootstrapServer;
use kv_transfer::{
    AuxIndex, EngineGroup, EngineReceiver, KvArgs, KvManager, KvSession, PagePool, Room, Worker,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::cache::RankCache;
use crate::error::PairError;
use crate::options::{Dialect, Options};
use crate::receive::Wanted;
use crate::start::{self, Started};

/// Our engine.
pub struct Engine {
    /// All ranks as one manager.
    pub group: EngineGroup,
    /// Which blocks are free on all ranks.
    pub pool: PagePool,
    started: Started,
    caches: Vec<RankCache>,
    bootstrap: String,
    peer_block: usize,
    /// Sessions whose pages did not come back in time.
    left: Vec<EngineReceiver>,
    server: Option<KvBootstrapServer>,
}

impl Engine {
    /// Starts the engine. A prefill engine's cache is full of KV.
    pub fn start(options: &Options) -> Result<Engine, PairError> {
        let cache = &options.cache;
        let caches: Vec<RankCache> =
            (0..cache.tp).map(|rank| RankCache::new(cache, rank)).collect::<Result<_, _>>()?;
        let args: Vec<KvArgs> = caches
            .iter()
            .map(|cache| cache.args(&options.engine_id, options.mode))
            .collect::<Result<_, _>>()?;
        let server = match options.own_bootstrap && cache.dialect == Dialect::Sglang {
            true => Some(KvBootstrapServer::start(&options.bootstrap)?),
            false => None,
        };
        let bootstrap =
            server.as_ref().map_or(options.bootstrap.clone(), |server| server.local_addr().to_string());
        let started = start::start(options, &bootstrap, &caches, args)?;
        let group = EngineGroup::new(started.workers.iter().map(Worker::manager).collect())?;
        let pool = PagePool::new(cache.blocks as u32);
        let (peer_block, left) = (cache.peer_block(), Vec::new());
        Ok(Engine { group, pool, started, caches, bootstrap, peer_block, left, server })
    }

    /// Where vLLM's workers shake hands with this engine.
    pub fn side_channel(&self) -> Option<String> {
        self.started.side_channel.as_ref().map(|side_channel| side_channel.local_addr().to_string())
    }

    /// The bootstrap server of this engine's prefill ranks.
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// True once every rank is known to the bootstrap server, if there is any.
    pub fn is_published(&self) -> bool {
        use kv_transfer::Publication;
        let published =
            |manager: &kv_transfer::Manager| !matches!(manager.publication(), Publication::Pending { .. });
        self.group.managers().iter().all(published)
    }

    /// The arguments of the first rank.
    pub fn args(&self) -> &KvArgs {
        self.group.args()
    }

    /// Fills every block of every rank by the rule.
    pub fn fill(&self) -> Result<(), PairError> {
        self.caches.iter().try_for_each(RankCache::fill)
    }

    /// Writes zeros to all memory.
    pub fn clear(&self) -> Result<(), PairError> {
        self.caches.iter().try_for_each(RankCache::clear)
    }

    /// How many pairs of a region and a block of a request differ from the rule, on all ranks, and its aux
    /// row.
    pub fn wrong(&self, wanted: &Wanted) -> Result<usize, PairError> {
        let mut wrong = 0;
        for cache in &self.caches {
            wrong += cache.wrong(&wanted.blocks, &wanted.source, self.peer_block, wanted.prefix)?;
        }
        if let (Some(AuxIndex(row)), Room::Number(room)) = (wanted.aux, &wanted.room) {
            wrong += usize::from(self.aux(row)? != ((*room & 0x7fff_ffff) as u32, *room));
        }
        Ok(wrong)
    }

    /// Writes the aux row of a request: its first token, which follows from the room, and the room.
    pub fn write_aux(&self, row: u32, room: u64) -> Result<(), PairError> {
        for cache in &self.caches {
            cache.write_aux(0, row as usize, &((room & 0x7fff_ffff) as u32).to_le_bytes())?;
            cache.write_aux(9, row as usize, &room.to_le_bytes())?;
        }
        Ok(())
    }

    /// The first token and the room in an aux row of the first rank.
    pub fn aux(&self, row: u32) -> Result<(u32, u64), PairError> {
        let (mut token, mut room) = ([0; 4], [0; 8]);
        if let Some(cache) = self.caches.first() {
            cache.read_aux(0, row as usize, &mut token)?;
            cache.read_aux(9, row as usize, &mut room)?;
        }
        Ok((u32::from_le_bytes(token), u64::from_le_bytes(room)))
    }

    /// Bytes of one block on all ranks.
    pub fn bytes_per_block(&self) -> u64 {
        let managers = self.group.managers().iter();
        managers.map(|manager| manager.args().geometry().bytes_per_page()).sum()
    }

    /// What is in quarantine, in words.
    pub fn quarantine(&self) -> Vec<String> {
        self.group.quarantine().iter().map(ToString::to_string).collect()
    }

    /// Keeps a session whose pages did not come back in time.
    pub fn leave(&mut self, session: EngineReceiver) {
        self.left.push(session);
    }

    /// Takes back the pages of such sessions that have come back since.
    pub fn sweep(&mut self) -> Result<(), PairError> {
        self.group.drain(|_| {});
        let Engine { left, pool, .. } = self;
        let mut back = Vec::new();
        left.retain_mut(|session| match session.reclaim() {
            Some(reclaimed) => {
                back.push(reclaimed.pages);
                false
            }
            None => true,
        });
        back.into_iter().try_for_each(|pages| Ok(pool.release(pages).map(drop)?))
    }

    /// Sleeps until one of the descriptors is readable, for `patience` at most.
    pub fn wait(&self, on: &[BorrowedFd<'_>], patience: Duration) {
        let mut fds: Vec<PollFd<'_>> =
            on.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let patience =
            Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
        // An interrupted sleep is a short one.
        let _ = poll(&mut fds, Some(&patience));
    }

    /// Stops the workers, and then the bootstrap server.
    pub fn stop(self) {
        let Engine { started, server, left, .. } = self;
        drop(left);
        for stopping in started
            .workers
            .into_iter()
            .map(|worker| worker.begin_stop(Duration::from_secs(1)))
            .collect::<Vec<_>>()
        {
            stopping.wait();
        }
        if let Some(server) = server {
            server.stop();
        }
    }
}

impl AsFd for Engine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.group.as_fd()
    }
}
