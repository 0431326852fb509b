//! The changes of a group's requests, as a stream.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;

use super::EngineGroup;
use crate::kv::{Change, Manager};
use crate::worker::waiters::Waiting;

/// The changes that [`EngineGroup::drain`] reports, one by one, on any executor; each request once, when the last of
/// the ranks has changed. The stream also hands on commands for which the ring of a rank had no room, as a drain
/// does. The stream has no end.
///
/// A dropped stream loses no change: what the stream has not reported is reported by the next drain or stream.
pub struct EngineChanges {
    group: EngineGroup,
    waiting: Waiting,
}

impl EngineChanges {
    pub(super) fn new(group: EngineGroup) -> EngineChanges {
        let ranks = group.managers().iter();
        let waiting = Waiting::on(ranks.flat_map(|rank| [Manager::awaited(rank), rank.awaited_changes()]));
        EngineChanges { group, waiting }
    }
}

impl Stream for EngineChanges {
    type Item = Change;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Change>> {
        let EngineChanges { group, waiting } = self.get_mut();
        waiting.look(cx, || group.next_change().map_or(Poll::Pending, |change| Poll::Ready(Some(change))))
    }
}

impl fmt::Debug for EngineChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineChanges").field("ranks", &self.group.managers().len()).finish_non_exhaustive()
    }
}
