//! Short names of causes, for labels of metrics. The names are a fixed list: nothing that a peer sends is part of one.

use super::cause::Cause;
use super::peer::PeerCause;
use crate::names::names;

names! {
    /// A short name of the kind of cause, in lower case with underscores. A cause that the peer told has the name
    /// of the [`PeerCause`].
    Cause {
        Cause::Aborted => "aborted",
        Cause::WorkerStopped => "worker_stopped",
        Cause::Draining => "draining",
        Cause::DeadlineExceeded { .. } => "deadline_exceeded",
        Cause::Bootstrap(..) => "bootstrap",
        Cause::Connect(..) => "connect",
        Cause::TooManyPeers { .. } => "too_many_peers",
        Cause::Incompatible(..) => "incompatible",
        Cause::Versions { .. } => "versions",
        Cause::PeerLost => "peer_lost",
        Cause::WayLost => "way_lost",
        Cause::PeerRestarted => "peer_restarted",
        Cause::PeerUnresponsive { .. } => "peer_unresponsive",
        Cause::PageCount { .. } => "page_count",
        Cause::TooManyPages { .. } => "too_many_pages",
        Cause::InitOrder => "init_order",
        Cause::BadPages(..) => "bad_pages",
        Cause::Layers(..) => "layers",
        Cause::ReadyEvent { .. } => "ready_event",
        Cause::BadAux { .. } => "bad_aux",
        Cause::AuxOneSided { .. } => "aux_one_sided",
        Cause::UnknownGroup { .. } => "unknown_group",
        Cause::BadGroup { .. } => "bad_group",
        Cause::GroupItems { .. } => "group_items",
        Cause::Post(..) => "post",
        Cause::LeaseExpired => "lease_expired",
        Cause::LeasePages { .. } => "lease_pages",
        Cause::LeaseOutOfRange(..) => "lease_out_of_range",
        Cause::StaleLease { .. } => "stale_lease",
        Cause::AmbiguousRoom { .. } => "ambiguous_room",
        Cause::Protocol(..) => "protocol",
        ;
        Cause::ByPeer(cause) => cause.name(),
    }
}

names! {
    /// A short name of the kind of cause, in lower case with underscores. A cause that only a newer version knows
    /// is `other`, whatever the peer calls it.
    PeerCause {
        PeerCause::Aborted => "aborted",
        PeerCause::WorkerStopped => "worker_stopped",
        PeerCause::DeadlineExceeded => "deadline_exceeded",
        PeerCause::PageCount { .. } => "page_count",
        PeerCause::AuxOneSided { .. } => "aux_one_sided",
        PeerCause::GroupItems { .. } => "group_items",
        PeerCause::BadArguments => "bad_arguments",
        PeerCause::DataOperation => "data_operation",
        PeerCause::DataRefused => "data_refused",
        PeerCause::OtherRankLost => "other_rank_lost",
        PeerCause::Incompatible(..) => "incompatible",
        PeerCause::ReceiverCount { .. } => "receiver_count",
        PeerCause::OutOfRange => "out_of_range",
        PeerCause::Overloaded => "overloaded",
        PeerCause::LeaseExpired => "lease_expired",
        PeerCause::UnknownLease { .. } => "unknown_lease",
        PeerCause::LeaseConsumed { .. } => "lease_consumed",
        PeerCause::Mode { .. } => "mode",
        PeerCause::AmbiguousRoom { .. } => "ambiguous_room",
        PeerCause::EntryMissing => "entry_missing",
        PeerCause::EntryNotReady => "entry_not_ready",
        PeerCause::EntrySize { .. } => "entry_size",
        PeerCause::Versions { .. } => "versions",
        PeerCause::Unknown => "unknown",
        PeerCause::Protocol => "protocol",
        PeerCause::Internal => "internal",
        PeerCause::Other { .. } => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_a_peer_invents_does_not_choose_its_name() {
        let invented = PeerCause::Other { name: "anything at all".to_owned() };
        assert_eq!(invented.name(), "other");
        assert_eq!(Cause::ByPeer(invented).name(), "other");
        assert_eq!(Cause::ByPeer(PeerCause::LeaseExpired).name(), Cause::LeaseExpired.name());
    }
}
