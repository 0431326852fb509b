//! Frames that are ignored: the reasons, and a count for each reason.

use std::fmt;

/// Declares the reasons: each has a name for metrics, a sentence for people and a place in the counts.
macro_rules! reasons {
    ($($(#[$doc:meta])* $reason:ident = $name:literal, $sentence:literal;)+) => {
        /// Why a frame was ignored.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Dropped {
            $($(#[$doc])* $reason,)+
        }

        impl Dropped {
            /// All reasons, in the order in which a frame is examined.
            pub const ALL: &[Dropped] = &[$(Dropped::$reason,)+];

            /// A short name of the reason, in lower case with underscores, for labels of metrics.
            pub fn name(self) -> &'static str {
                match self {
                    $(Dropped::$reason => $name,)+
                }
            }
        }

        impl fmt::Display for Dropped {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Dropped::$reason => $sentence,)+
                })
            }
        }
    };
}

reasons! {
    /// The frame is longer than allowed, or its bytes are not a message.
    Damaged = "damaged", "it is damaged";
    /// The frame is in a version of the wire that is not spoken with this peer.
    OtherVersion = "other_version", "it is in a version that is not spoken here";
    /// The frame holds a kind of message that only newer versions know.
    UnknownKind = "unknown_kind", "it is a message of a newer version";
    /// The frame names no conversation that is known here. It may be of a conversation that was
    /// forgotten, or of an earlier incarnation of either worker.
    UnknownConversation = "unknown_conversation", "it belongs to no conversation that is known";
    /// The frame came on another connection than the earlier frames of the same sender.
    WrongOrigin = "wrong_origin", "it came on another connection than its author's";
    /// The hello contradicts itself, or names a worker that speaks on another connection.
    BadHello = "bad_hello", "the hello contradicts itself, or is not from the worker that it names";
    /// The sender is new, and the table of peers is full.
    NoRoom = "no_room", "there is no room for another peer";
    /// The message is about an attempt that is over, or whose number is far from all other attempts
    /// of the sender.
    NoSuchAttempt = "no_such_attempt", "its attempt is over, or far from all others";
    /// The message's list of attempts does not rise.
    Disordered = "disordered", "its list of attempts is in no order";
}

/// How many frames were ignored since the start, by reason.
///
/// ```
/// use kv_core::trace::{Dropped, DroppedFrames};
///
/// let mut ignored = DroppedFrames::default();
/// ignored.count(Dropped::Damaged);
/// ignored.count(Dropped::NoRoom);
/// ignored.count(Dropped::NoRoom);
/// assert_eq!((ignored.of(Dropped::NoRoom), ignored.of(Dropped::BadHello), ignored.total()), (2, 0, 3));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedFrames([u64; Dropped::ALL.len()]);

impl DroppedFrames {
    /// Counts one more frame.
    pub fn count(&mut self, why: Dropped) {
        self.0[why as usize] += 1;
    }

    /// How many frames were ignored for this reason.
    pub fn of(&self, why: Dropped) -> u64 {
        self.0[why as usize]
    }

    /// How many frames were ignored for any reason.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}
