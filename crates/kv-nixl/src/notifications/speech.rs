//! What is said to an agent, by whether it is one of ours.

use std::time::Instant;

use crate::foreign::agent_metadata::Digests;
use crate::notifications::allowance::Allowance;
use crate::notifications::arrivals::charge;
use crate::notifications::doorbell::Button;

/// What is said to an agent, and what is believed of what it says. Nothing of [`Speech::Ours`] can be
/// sent to a foreign agent, because what it would need is not there.
#[derive(Debug)]
pub(crate) enum Speech {
    /// The agent is a transport like this one.
    Ours(Dialogue),
    /// The agent is anybody's.
    Foreign(Monologue),
}

impl Speech {
    /// True if a frame of this length may be sent now: an agent of ours has confirmed enough of what was
    /// sent before, a foreign one has been sent little enough of late.
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

    /// To a foreign agent whose metadata has these digests.
    pub(crate) fn foreign(digests: Digests) -> Speech {
        Speech::Foreign(Monologue { allowance: Allowance::new(Instant::now()), digests })
    }

    /// The beginning of a dialogue with the transport of this token; `near` if it is on this host.
    pub(crate) fn ours(token: u64, near: bool) -> Speech {
        let button = near.then(|| Button::new(token)).flatten();
        Speech::Ours(Dialogue { token, button, theirs: None, said_farewell: false, sent: 0, confirmed: 0 })
    }
}

/// What is said to a foreign agent: raw notifications, as far as the allowance goes.
#[derive(Debug)]
pub(crate) struct Monologue {
    pub(crate) allowance: Allowance,
    /// By which a successor of the agent is told from it.
    pub(crate) digests: Digests,
}

/// What two transports of ours know of each other's notifications.
#[derive(Debug)]
pub(crate) struct Dialogue {
    /// The peer's transport, which every notification names.
    pub(crate) token: u64,
    /// If the peer is on this host.
    pub(crate) button: Option<Button>,
    /// The number of the peer's connection to us, as it tells in what it sends: our proof, to it alone,
    /// that a farewell is ours.
    pub(crate) theirs: Option<u64>,
    /// The peer has said that it will not touch our memory any more.
    pub(crate) said_farewell: bool,
    /// Bytes of frames sent, and confirmed by the peer.
    pub(crate) sent: u64,
    pub(crate) confirmed: u64,
}

impl Dialogue {
    /// The peer says how much has arrived. It cannot make us believe in more than was sent.
    pub(crate) fn confirm(&mut self, count: u64) {
        self.confirmed = self.confirmed.max(count.min(self.sent));
    }
}
