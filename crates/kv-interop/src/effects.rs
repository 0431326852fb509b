//! The outputs of a dialect's machine, and the ids that the machine draws.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_core::machine::Output;
use kv_core::proto::Resource;
use kv_core::{KvPoll, PeerId, Post, PostId, SessionId, Time, TransferError};

use crate::message::{Message, Way};

/// An output of a dialect's machine.
pub(crate) type Out = Output<KvPoll, Resource, TransferError>;

/// Outputs that the worker has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    out: VecDeque<Out>,
    peers: u64,
    posts: u64,
}

impl Effects {
    pub(crate) fn poll(&mut self) -> Option<Out> {
        self.out.pop_front()
    }

    /// True if the next output hands something back that this session was lent.
    pub(crate) fn releases(&self, of: SessionId) -> bool {
        matches!(self.out.front(), Some(Output::Release { session, .. }) if *session == of)
    }

    /// Opens a way, under a peer id that was never used before.
    pub(crate) fn connect(&mut self, way: &Way) -> PeerId {
        self.peers += 1;
        let peer = PeerId(self.peers);
        self.out.push_back(Output::Connect { peer, transport: way.offer() });
        peer
    }

    pub(crate) fn disconnect(&mut self, peer: PeerId) {
        self.out.push_back(Output::Disconnect { peer });
    }

    /// Sends a message on a side channel.
    pub(crate) fn say(&mut self, peer: PeerId, parts: Vec<Bytes>) {
        self.out.push_back(Output::Send { peer, frame: Message(parts).encode() });
    }

    /// Sends a notification to an agent.
    pub(crate) fn notify(&mut self, peer: PeerId, bytes: Bytes) {
        self.out.push_back(Output::Send { peer, frame: bytes });
    }

    /// Allows writes to a foreign agent for good: foreign engines know no permission that ends.
    pub(crate) fn permit(&mut self, peer: PeerId) {
        self.out.push_back(Output::Permit { peer, until: Time::MAX });
    }

    pub(crate) fn next_post(&mut self) -> PostId {
        self.posts += 1;
        PostId(self.posts)
    }

    pub(crate) fn post(&mut self, peer: PeerId, post: Post) {
        self.out.push_back(Output::Post { peer, post });
    }

    pub(crate) fn cancel(&mut self, post: PostId) {
        self.out.push_back(Output::Cancel { post });
    }

    /// The state of a session that has not ended.
    pub(crate) fn status(&mut self, session: SessionId, poll: KvPoll) {
        self.out.push_back(Output::Status { session, poll, failure: None });
    }

    /// The end of a session: in success, or with this error.
    pub(crate) fn end(&mut self, session: SessionId, failure: Option<TransferError>) {
        let poll = if failure.is_some() { KvPoll::Failed } else { KvPoll::Success };
        self.out.push_back(Output::Status { session, poll, failure: failure.map(Box::new) });
    }

    /// Hands back what a session was lent.
    pub(crate) fn release(&mut self, session: SessionId, resource: Resource) {
        self.out.push_back(Output::Release { session, resource });
    }

    pub(crate) fn push(&mut self, out: Out) {
        self.out.push_back(out);
    }
}
