//! What one input of a node has cost, in outputs and their bytes.

use kv_core::RankRecord;
use kv_core::proto::{Command, Input, NodeGauges, Output};

/// What a step costs that has nothing of its own to tell, in bytes.
const STEP: usize = 64;

/// What one input has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Cost {
    /// Bytes of the input, as they came over a wire.
    pub(crate) input: usize,
    /// It came from a peer: nothing but its bytes, and what this worker's scheduler wants, may cost anything.
    pub(crate) of_peer: bool,
    /// Outputs.
    pub(crate) outputs: usize,
    /// Their bytes.
    pub(crate) bytes: usize,
    /// What the node held before or after it, whichever was more.
    pub(crate) held: Held,
}

/// What a node holds, as far as its steps may depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Held {
    /// Sessions of its own scheduler.
    pub(crate) sessions: usize,
    pub(crate) peers: usize,
    /// What its peers have in it.
    pub(crate) of_peers: usize,
}

impl Held {
    pub(crate) fn of(gauges: &NodeGauges) -> Held {
        Held {
            sessions: gauges.senders + gauges.receivers,
            peers: gauges.peers,
            of_peers: gauges.registrations + gauges.incoming + gauges.failed_rooms,
        }
    }

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
    pub(crate) fn of(input: &Input, held: Held) -> Cost {
        let bytes = match input {
            Input::Frame { frame, .. } => frame.len(),
            Input::Found { ranks, .. } => ranks.iter().map(rank_len).sum(),
            Input::Command(Command::Shutdown) => STEP,
            _ => STEP,
        };
        let of_peer = matches!(input, Input::Frame { .. });
        Cost { input: bytes, of_peer, held, ..Cost::default() }
    }

    /// Adds an output.
    pub(crate) fn add(&mut self, output: &Output) {
        self.outputs += 1;
        self.bytes += match output {
            Output::Send { frame, .. } => frame.len(),
            Output::Connect { metadata, .. } => metadata.len(),
            Output::Lookup { addr, .. } => addr.len() + STEP,
            // Bounded by what the scheduler has given, and by windows of their own.
            Output::Post { .. } | Output::Release { .. } | Output::ReleaseGroups { .. } => STEP,
            Output::Status { failure: Some(failure), .. } => format!("{failure:?}").len(),
            _ => STEP,
        };
    }
}
