//! What a received frame, or a long silence, means for the sessions with a peer.

use std::time::Duration;

use crate::id::PeerId;
use crate::wire::{Body, Hello};

/// The message of a frame, and its sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) enum Heard {
    /// A hello, from a worker that may be unknown.
    Hello(Hello),
    /// Another message of a peer, in its conversation.
    From(PeerId, Body),
}

/// What a hello means for the sessions with its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proto) enum HelloHeard {
    /// Nothing: the hello is dropped, or is answered already.
    Nothing,
    /// The conversation begins or goes on, and the hello must be answered.
    Goes(PeerId),
    /// The peer has lost its side of the conversation, and all sessions with it. The sessions must
    /// end here, too, before a new conversation begins.
    Forgotten(PeerId),
}

/// What an answer to a hello of ours means for the sessions with the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) enum AnswerHeard {
    /// Nothing: the answer is not for a hello of ours.
    Nothing,
    /// The peer answers from now on: it accepts this worker, or refuses it for good.
    Up {
        /// True if the peer has forgotten the former conversation.
        forgot: bool,
        /// True if the peer refuses this worker for good.
        refuses: bool,
    },
    /// Another incarnation of the worker has answered. Nothing was heard of the peer itself.
    AnotherLife,
}

/// What must be done about a hello that was not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proto) enum Unanswered {
    /// Send the hello again.
    Repeat,
    /// The peer may be reached by another transport.
    NextWay,
    /// The sessions that wait for the answer must stop waiting: it has not come for too long.
    GiveUp {
        /// The time since the first hello.
        silent_for: Duration,
    },
}

/// How long a peer has been silent on which something depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proto) enum Silence {
    /// The peer has been silent for a while.
    Short,
    /// The peer has been silent for so long that it is given up now.
    TooLong,
    /// The peer was given up before.
    GivenUp,
}
