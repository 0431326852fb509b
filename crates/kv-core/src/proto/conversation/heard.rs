//! What was heard, and what something that was heard of a peer, or not heard, means for the sessions with the peer.

use std::time::Duration;

use crate::id::PeerId;
use crate::wire::{Body, Hello};

/// What a frame says, and who.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) enum Heard {
    /// Somebody greets, who need not be known.
    Hello(Hello),
    /// A peer says something else in its conversation.
    From(PeerId, Body),
}

/// What a hello means for the sessions with its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proto) enum HelloHeard {
    /// Nothing: it is dropped, or answered already.
    Nothing,
    /// The conversation begins or goes on; the hello is to be answered.
    Goes(PeerId),
    /// The peer has lost its side of the conversation, and with it all sessions. They are to end here too, before
    /// a new conversation begins.
    Forgotten(PeerId),
}

/// What an answer to a hello of ours means for the sessions with its peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) enum AnswerHeard {
    /// Nothing: it answers no hello of ours.
    Nothing,
    /// The peer can be spoken to: it is up, or refuses for good.
    Up {
        /// It has forgotten the former conversation.
        forgot: bool,
        /// It refuses this worker for good.
        refuses: bool,
    },
    /// Another incarnation answers.
    AnotherLife,
}

/// What is to be done about a hello that was not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proto) enum Unanswered {
    /// Say it again.
    Repeat,
    /// Nobody has answered for so long that who waits for it waits no more.
    GiveUp {
        /// How long it is since the first one.
        silent_for: Duration,
    },
}

/// How a peer that something depends on stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proto) enum Silence {
    /// It was heard a while ago.
    Short,
    /// It is silent for so long that it is given up now.
    TooLong,
    /// It was given up before.
    GivenUp,
}
