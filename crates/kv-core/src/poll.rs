//! The state of a session as its scheduler sees it.

use std::fmt;

use crate::machine::SessionStatus;

/// The state of a session, with the names, values and order of SGLang's `KVPoll`.
///
/// The order is the agreement rule: when several ranks hold one request, the request is in the
/// **minimum** of their states. One failed rank fails the request; otherwise the slowest rank
/// governs.
///
/// | from | to | when |
/// |---|---|---|
/// | `Bootstrapping` | `WaitingForInput` | sender: every receiver has registered (push), or at once (pull, auto); receiver: the handshake is done |
/// | `WaitingForInput` | `Transferring` | sender: the first layers are final, which they are at once with `send`; receiver: `init` gave the pages |
/// | `Bootstrapping` | `Transferring` | sender only: layers were final before the last receiver registered |
/// | `Transferring` | `Success` | every byte is in place, the aux row included; on a pull sender, every reader has released the pages |
/// | any but `Success` | `Failed` | see [`TransferError`](crate::TransferError) |
///
/// `Failed` and `Success` are final.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KvPoll {
    /// The session ended without success; `failure()` names the cause.
    Failed = 0,
    /// Waiting for the peer: for its rank record, for the handshake, and on a sender for the
    /// receiver's pages.
    Bootstrapping = 1,
    /// Waiting for the local scheduler: for `send` on a sender, for `init` on a receiver.
    WaitingForInput = 2,
    /// Bytes are moving, or may be moving.
    Transferring = 3,
    /// Every byte is in place, the aux row included.
    Success = 4,
}

impl KvPoll {
    /// The state with this number, 0 to 4; `None` for every other number.
    pub const fn from_u8(value: u8) -> Option<KvPoll> {
        match value {
            0 => Some(KvPoll::Failed),
            1 => Some(KvPoll::Bootstrapping),
            2 => Some(KvPoll::WaitingForInput),
            3 => Some(KvPoll::Transferring),
            4 => Some(KvPoll::Success),
            _ => None,
        }
    }

    /// True for `Failed` and `Success`, which never change again.
    pub const fn is_terminal(self) -> bool {
        matches!(self, KvPoll::Failed | KvPoll::Success)
    }
}

impl SessionStatus for KvPoll {
    const OPENED: KvPoll = KvPoll::Bootstrapping;
    const FAILED: KvPoll = KvPoll::Failed;

    fn is_terminal(self) -> bool {
        KvPoll::is_terminal(self)
    }

    fn to_u8(self) -> u8 {
        self as u8
    }

    fn from_u8(number: u8) -> Option<KvPoll> {
        KvPoll::from_u8(number)
    }
}

impl fmt::Display for KvPoll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_agree_by_minimum_and_one_failure_wins() {
        let ranks = [KvPoll::Success, KvPoll::Transferring, KvPoll::WaitingForInput];
        assert_eq!(ranks.iter().min(), Some(&KvPoll::WaitingForInput));
        assert_eq!(KvPoll::Failed.min(KvPoll::Success), KvPoll::Failed);
    }

    #[test]
    fn numbers_round_trip_and_only_five_exist() {
        for value in 0..=u8::MAX {
            match KvPoll::from_u8(value) {
                Some(poll) => assert_eq!(poll as u8, value),
                None => assert!(value > 4),
            }
        }
    }
}
