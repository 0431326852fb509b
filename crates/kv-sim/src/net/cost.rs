//! The cost of one input of a machine: the outputs that it causes, and their bytes.

use std::fmt::Debug;

use kv_core::RankRecord;
use kv_core::machine::{Input, Output};

/// The size, in bytes, at which an input or output without content is counted.
const STEP: usize = 64;

/// The cost of one input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Bytes of the input, as they came in a frame.
    pub input: usize,
    /// True if the input came from a peer. It may then cost only what its bytes, and the wishes of the host's
    /// own scheduler, allow.
    pub of_peer: bool,
    /// The number of outputs.
    pub outputs: usize,
    /// The size of the outputs, in bytes.
    pub bytes: usize,
    /// The sizes of the machine's tables before or after the input, whichever were larger.
    pub held: Held,
}

/// The sizes of a machine's tables on which the cost of its steps may depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// The number of sessions of the host's own scheduler.
    pub sessions: usize,
    /// The number of peers that the machine knows.
    pub peers: usize,
    /// The number of entries that peers have in the machine's tables.
    pub of_peers: usize,
}

impl Held {
    pub(crate) fn or(self, other: Held) -> Held {
        Held {
            sessions: self.sessions.max(other.sessions),
            peers: self.peers.max(other.peers),
            of_peers: self.of_peers.max(other.of_peers),
        }
    }
}

/// Bytes of a rank record that a machine reads.
fn rank_len(rank: &RankRecord) -> usize {
    let metadata = rank.transports.iter().map(|transport| transport.metadata.len());
    STEP * 4 + metadata.chain(rank.offers.iter().map(|offer| offer.data.len())).sum::<usize>()
}

impl Cost {
    /// Of an input that has led to nothing yet.
    pub(crate) fn of<C>(input: &Input<C>, held: Held) -> Cost {
        let bytes = match input {
            Input::Frame { frame, .. } => frame.len(),
            Input::Found { ranks, .. } => ranks.iter().map(rank_len).sum(),
            _ => STEP,
        };
        let of_peer = matches!(input, Input::Frame { .. });
        Cost { input: bytes, of_peer, held, ..Cost::default() }
    }

    /// Counts one more output.
    pub(crate) fn add<S, R, F: Debug>(&mut self, output: &Output<S, R, F>) {
        self.outputs += 1;
        self.bytes += match output {
            Output::Send { frame, .. } => frame.len(),
            Output::Connect { transport, .. } => transport.metadata.len(),
            Output::Lookup { addr, .. } => addr.len() + STEP,
            // Bounded by what the scheduler has given, and by windows of their own.
            Output::Post { .. } | Output::Release { .. } => STEP,
            Output::Status { failure: Some(failure), .. } => format!("{failure:?}").len(),
            _ => STEP,
        };
    }
}
