//! Who is next: the posts that wait at a peer, and the peers that have some.

use std::collections::VecDeque;

use kv_core::PostId;

use crate::connections::id::RemoteId;

/// Whether a post goes into one request together with others, or into several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Short,
    Long,
}

/// Posts that wait for their turns: long ones, and short ones, which would otherwise wait for a part
/// of every long one. Each kind is served in a circle.
#[derive(Debug, Default)]
pub(crate) struct RunQueue {
    short: Waiting,
    long: Waiting,
}

/// Posts of one kind.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) posts: VecDeque<PostId>,
    /// The peer is in the transport's line of those with posts of this kind.
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

/// Peers with something to send, next one first.
#[derive(Debug, Default)]
pub(crate) struct Line {
    short: VecDeque<RemoteId>,
    long: VecDeque<RemoteId>,
    /// The last turn that had something to tell left the long posts out.
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
