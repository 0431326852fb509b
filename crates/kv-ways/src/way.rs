//! The way of one conversation: its member, and what is still possible over it.

use kv_core::{TransportEvent, WayEnd};

/// The one member by which a peer is reached, until the peer is disconnected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    /// Position of the member in [`Ways`](crate::Ways)' list, from 0.
    pub(crate) member: usize,
    pub(crate) stage: Stage,
}

/// What is proven about a way.
///
/// | from | to | when |
/// |---|---|---|
/// | – | `Open` | the member has connected the peer |
/// | `Open` | `Revoked` | the member says that the peer writes no more |
/// | `Open` | `Lost` | the member has lost the connection, which proves nothing about the peer |
/// | `Revoked` | `Fenced` | the member has lost the connection |
/// | `Lost` | `Fenced` | the member says that the peer writes no more |
/// | any | `Fenced` | the member has proven the peer's death |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Frames and posts pass.
    Open,
    /// Frames pass, and writes of the peer do not.
    Revoked,
    /// This side can send nothing; the peer may go on writing. The same member may open the way again.
    Lost,
    /// Nothing passes in either direction: another member may reach the peer under the same peer id.
    Fenced,
}

impl Stage {
    /// True while this side can send to the peer.
    pub(crate) fn is_connected(self) -> bool {
        matches!(self, Stage::Open | Stage::Revoked)
    }

    /// The stage after an event that the member of this way has reported.
    pub(crate) fn after(self, event: &TransportEvent) -> Stage {
        match (self, event) {
            (_, TransportEvent::PeerGone { end: WayEnd::Dead { .. }, .. }) => Stage::Fenced,
            (Stage::Open, TransportEvent::PeerGone { end: WayEnd::Lost, .. }) => Stage::Lost,
            (Stage::Revoked, TransportEvent::PeerGone { end: WayEnd::Lost, .. }) => Stage::Fenced,
            (Stage::Open, TransportEvent::Revoked { .. }) => Stage::Revoked,
            (Stage::Lost, TransportEvent::Revoked { .. }) => Stage::Fenced,
            (stage, _) => stage,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_core::PeerId;

    use super::*;

    #[test]
    fn a_lost_way_is_fenced_by_death_or_revocation_and_by_nothing_else() {
        use Stage::{Fenced, Lost, Open, Revoked};
        let peer = PeerId(1);
        let lost = TransportEvent::PeerGone { peer, end: WayEnd::Lost };
        let dead = TransportEvent::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
        let revoked = TransportEvent::Revoked { peer };
        let table = [
            (Open, [Lost, Fenced, Revoked]),
            (Revoked, [Fenced, Fenced, Revoked]),
            (Lost, [Lost, Fenced, Fenced]),
            (Fenced, [Fenced, Fenced, Fenced]),
        ];
        for (from, to) in table {
            assert_eq!([&lost, &dead, &revoked].map(|event| from.after(event)), to, "{from:?}");
        }
    }
}
