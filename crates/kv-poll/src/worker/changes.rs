//! The changes of a worker's sessions, as a stream.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use kv_core::machine::Machine;

use super::poll_set::Change;
use super::shared::Shared;
use super::waiters::{Awaited, Waiters, Waiting};

/// The changes that [`PollSet::drain`](super::PollSet::drain) reports, one by one, on any executor. The stream has
/// no end: a worker that has stopped may still report that the last sessions can be reclaimed.
///
/// Several streams and drains of one worker share the changes: each change is reported to one of them. A stream takes
/// one change at a time, so that one that is kept and not polled, or dropped, keeps no change from the others.
pub struct Changes<M: Machine> {
    shared: Arc<Shared<M>>,
    waiting: Waiting,
}

impl<M: Machine + 'static> Changes<M> {
    pub(super) fn new(shared: Arc<Shared<M>>) -> Changes<M> {
        let waiting = Waiting::on([Arc::new(Set(Arc::clone(&shared))) as Arc<dyn Awaited>]);
        Changes { shared, waiting }
    }
}

/// The poll set of a worker, as a thing that tasks wait for.
pub(super) struct Set<M: Machine>(pub(super) Arc<Shared<M>>);

impl<M: Machine> Awaited for Set<M> {
    fn waiters(&self) -> &Waiters {
        self.0.poll_set.waiters()
    }
}

impl<M: Machine> Stream for Changes<M> {
    type Item = Change<M::Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Change<M::Status>>> {
        let Changes { shared, waiting } = self.get_mut();
        waiting.look(cx, || {
            let change = shared.poll_set.next();
            change.map_or(Poll::Pending, |change| Poll::Ready(Some(change)))
        })
    }
}

impl<M: Machine> fmt::Debug for Changes<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").field("of", &self.shared.poll_set).finish_non_exhaustive()
    }
}
