//! Which transfer parameters were used before.
//!
//! Parameters of vLLM name the blocks of a request, and not for which reader the blocks are kept. Once a reader has
//! told an engine that it reads a request no more, the engine gives the blocks to other requests, and reads of them
//! still succeed, with other bytes. An engine counts what it is told: a rank that tells twice is taken for another
//! rank, which may still read. So, of a second session with the same parameters:
//!
//! - There is none after the first one has told the engine, or is about to.
//! - Before, the lease counts from the opening of the first one.

use kv_core::hash::Fnv1a;
use kv_core::{RemoteRequest, Time};

use crate::vllm::expiring::Expiring;

/// Most parameters that are remembered.
const MAX_USED: usize = 1 << 16;

/// The parameters of sessions that were opened here.
#[derive(Debug)]
pub(super) struct Used(Expiring<u64, Use>);

#[derive(Debug, Clone, Copy)]
struct Use {
    /// When the first session was opened.
    first: Time,
    /// True once the engine was told that the request is read no more.
    over: bool,
}

impl Used {
    pub(super) fn new() -> Used {
        Used(Expiring::new(MAX_USED, usize::MAX))
    }

    /// When a session with these parameters was opened for the first time, which is now if none was; `None` if the
    /// engine does not keep the blocks for another session. Remembered until `until`.
    pub(super) fn open(&mut self, now: Time, remote: &RemoteRequest, until: Time) -> Option<Time> {
        self.0.expire(now);
        let name = name_of(remote);
        let first = match self.0.get(&name) {
            Some(Use { over: true, .. }) => return None,
            Some(found) => found.first,
            None => now,
        };
        self.0.insert(name, until, 0, Use { first, over: false });
        Some(first)
    }

    /// The engine is told that the request of a session is read no more. Remembered until `until`.
    pub(super) fn end(&mut self, remote: &RemoteRequest, until: Time) {
        self.0.insert(name_of(remote), until, 0, Use { first: Time::ZERO, over: true });
    }
}

fn name_of(remote: &RemoteRequest) -> u64 {
    let mut hash = Fnv1a::new();
    for text in [remote.engine.as_str(), remote.request.as_str()] {
        hash.write(text.as_bytes());
        hash.write(&[0]);
    }
    for blocks in &remote.block_ids {
        blocks.iter().for_each(|block| hash.write(&block.to_le_bytes()));
    }
    let moment = remote.expires_at.map_or(0, |moment| moment.as_nanos());
    hash.write(&moment.to_le_bytes());
    hash.finish()
}
