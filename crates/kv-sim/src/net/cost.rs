//! What one input of a node has cost, in outputs and their bytes.

use std::fmt::Debug;

use kv_core::RankRecord;
use kv_core::machine::{Input, Output};

/// What a step costs that has nothing of its own to tell, in bytes.
const STEP: usize = 64;

/// What one input has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Bytes of the input, as they came over a wire.
    pub input: usize,
    /// It came from a peer: nothing but its bytes, and what this worker's scheduler wants, may cost anything.
    pub of_peer: bool,
    /// Outputs.
    pub outputs: usize,
    /// Their bytes.
    pub bytes: usize,
    /// What the node held before or after it, whichever was more.
    pub held: Held,
}

/// What a node holds, as far as its steps may depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Sessions of its own scheduler.
    pub sessions: usize,
    /// Peers that it knows.
    pub peers: usize,
    /// What its peers have in it.
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

    /// Adds an output.
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
