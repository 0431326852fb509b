//! What a worker has ignored of what foreign engines said, by reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::trace::Dropped;

/// Declares the reasons: each has a sentence for people and a place in the counts.
macro_rules! reasons {
    ($($(#[$doc:meta])* $reason:ident = $sentence:literal, $traced:ident;)+) => {
        /// Why a message or a notification of a foreign engine was ignored.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Ignored {
            $($(#[$doc])* $reason,)+
        }

        impl Ignored {
            /// All reasons, in the order of their declaration.
            pub const ALL: &[Ignored] = &[$(Ignored::$reason,)+];

            /// The reason as events tell it.
            pub(crate) fn traced(self) -> Dropped {
                match self {
                    $(Ignored::$reason => Dropped::$traced,)+
                }
            }
        }

        impl std::fmt::Display for Ignored {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Ignored::$reason => $sentence,)+
                })
            }
        }
    };
}

reasons! {
    /// The bytes are no message of the engine's protocol.
    Malformed = "it is no message of the engine's protocol", Damaged;
    /// The message or notification names a request that is not known here: the request may have ended. With SGLang,
    /// also a prefill rank or an agent that is not known here.
    UnknownRequest = "its request is not known here", UnknownConversation;
    /// The notification does not fit the request: a reader's to a request that is written, or the reverse.
    OtherMode = "its request is in the other transfer mode", UnknownConversation;
    /// The agent has told the same before.
    Repeated = "its agent has said so before", NoSuchAttempt;
    /// The message came from a peer that was not asked.
    NotAsked = "its sender was asked nothing", WrongOrigin;
    /// The registration is for another engine than this worker's.
    OtherEngine = "the registration is for another engine", UnknownConversation;
    /// The table of registrations without a sender is full, or the registration has waited too long.
    NoRoom = "there is no room for another registration", NoRoom;
}

/// What a worker has ignored since its start. All clones show the numbers of one worker: give one to the worker
/// ([`VllmConfig::gauges`](crate::vllm::VllmConfig::gauges),
/// [`SglangConfig::gauges`](crate::sglang::SglangConfig::gauges)), and keep another.
#[derive(Debug, Clone, Default)]
pub struct IgnoredGauges(Arc<[AtomicU64; Ignored::ALL.len()]>);

impl IgnoredGauges {
    pub(crate) fn count(&self, why: Ignored) {
        self.0[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many messages and notifications were ignored for this reason.
    pub fn of(&self, why: Ignored) -> u64 {
        self.0[why as usize].load(Ordering::Relaxed)
    }

    /// How many messages and notifications were ignored for any reason.
    pub fn total(&self) -> u64 {
        Ignored::ALL.iter().map(|why| self.of(*why)).sum()
    }
}
