//! What is said to an agent: a transport of this crate is told more than a foreign agent.

use std::time::Instant;

use crate::foreign::agent_metadata::Digests;
use crate::notifications::allowance::Allowance;
use crate::notifications::arrivals::charge;
use crate::notifications::datagrams::PeerSocket;

/// What is said to an agent, and what is believed of the agent's words. Nothing of [`Speech::Ours`] can be
/// sent to a foreign agent, because the numbers that it takes are not there.
#[derive(Debug)]
pub(crate) enum Speech {
    /// The agent is of a transport of this crate.
    Ours(Dialogue),
    /// The agent is of another program.
    Foreign(Monologue),
}

impl Speech {
    /// True if a frame of this length may be sent now: a transport of this crate has confirmed enough of the
    /// earlier bytes, or a foreign agent was sent few enough of late.
    pub(crate) fn has_room(&self, len: usize, most: usize) -> bool {
        match self {
            Speech::Ours(dialogue) => {
                dialogue.sent.saturating_sub(dialogue.confirmed) + charge(len) <= most as u64
            }
            Speech::Foreign(monologue) => {
                monologue.allowance.covers(charge(len), most as u64, Instant::now())
            }
        }
    }

    /// Speech to a foreign agent whose metadata has these digests.
    pub(crate) fn foreign(digests: Digests) -> Speech {
        Speech::Foreign(Monologue { allowance: Allowance::new(Instant::now()), digests })
    }

    /// Speech to the transport with this token, whose socket is reached if the transport is on this host.
    pub(crate) fn ours(token: u64, socket: Option<PeerSocket>) -> Speech {
        Speech::Ours(Dialogue {
            token,
            socket,
            theirs: None,
            said_farewell: false,
            sent: 0,
            confirmed: 0,
            may_wake: true,
            may_be_woken: true,
        })
    }
}

/// Speech to a foreign agent: raw notifications, as far as the allowance goes.
#[derive(Debug)]
pub(crate) struct Monologue {
    pub(crate) allowance: Allowance,
    /// Digests of the agent's metadata, by which a successor of the same name is told from the agent.
    pub(crate) digests: Digests,
}

/// What two transports of this crate know of each other's notifications.
#[derive(Debug)]
pub(crate) struct Dialogue {
    /// The token of the peer's transport, which every notification names.
    pub(crate) token: u64,
    /// The socket to the peer, if the peer is on this host.
    pub(crate) socket: Option<PeerSocket>,
    /// The number of the peer's connection to this transport, from the peer's notifications: the proof, for
    /// the peer alone, that a farewell comes from here.
    pub(crate) theirs: Option<u64>,
    /// The peer has said that it will not touch this transport's memory any more.
    pub(crate) said_farewell: bool,
    /// Bytes of frames that were sent, and of those the bytes that the peer has confirmed.
    pub(crate) sent: u64,
    pub(crate) confirmed: u64,
    /// True if a frame has come since this side has woken the peer, or since the peer has woken this side.
    pub(crate) may_wake: bool,
    pub(crate) may_be_woken: bool,
}

impl Dialogue {
    /// Takes the peer's count of what has arrived. A count above what was sent is not believed.
    pub(crate) fn confirm(&mut self, count: u64) {
        self.confirmed = self.confirmed.max(count.min(self.sent));
    }
}
