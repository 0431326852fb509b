//! Whose turn is next: the posts that wait at a peer, and the peers that have such posts.

use std::collections::VecDeque;

use kv_core::PostId;

use crate::connections::id::RemoteId;

/// Whether a post shares a request with others, or takes several requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Short,
    Long,
}

/// Posts to one peer that wait for their turns: long posts, and short posts, which would otherwise wait for a
/// part of every long post. Each kind is served in a circle.
#[derive(Debug, Default)]
pub(crate) struct RunQueue {
    short: Waiting,
    long: Waiting,
}

/// The posts of one length.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) posts: VecDeque<PostId>,
    /// The peer stands in the transport's line for posts of this length.
    pub(crate) in_line: bool,
}

impl RunQueue {
    pub(crate) fn of(&mut self, length: Length) -> &mut Waiting {
        match length {
            Length::Short => &mut self.short,
            Length::Long => &mut self.long,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.short.posts.clear();
        self.long.posts.clear();
    }
}

/// The peers that have something to send, in the order of their turns.
#[derive(Debug, Default)]
pub(crate) struct Line {
    short: VecDeque<RemoteId>,
    long: VecDeque<RemoteId>,
    /// The last turn had something to report, and left the long posts out.
    pub(crate) long_waited: bool,
}

impl Line {
    pub(crate) fn is_empty(&self) -> bool {
        self.short.is_empty() && self.long.is_empty()
    }

    pub(crate) fn of(&mut self, length: Length) -> &mut VecDeque<RemoteId> {
        match length {
            Length::Short => &mut self.short,
            Length::Long => &mut self.long,
        }
    }
}
