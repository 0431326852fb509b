//! All ranks of an engine that drain together.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::kv::Draining;

/// The ranks of an engine that were told to drain, by [`EngineGroup::begin_drain`](super::EngineGroup::begin_drain).
/// [`worker::Draining`](crate::worker::Draining) says what holds for each rank meanwhile. Dropping this value
/// changes nothing.
#[derive(Debug)]
#[must_use = "this tells when the engine is empty"]
pub struct EngineDraining {
    ranks: Vec<Draining>,
}

impl EngineDraining {
    pub(super) fn new(ranks: Vec<Draining>) -> EngineDraining {
        EngineDraining { ranks }
    }

    /// True once every rank is empty, or has stopped. Never blocks. Changes that wait for
    /// [`EngineGroup::drain`](super::EngineGroup::drain) may hold commands of open sessions back: a scheduler goes
    /// on calling it.
    pub fn is_empty(&self) -> bool {
        self.ranks.iter().all(Draining::is_empty)
    }
}

/// Resolves when every rank is empty, or has stopped.
impl Future for EngineDraining {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // Every rank is asked, so that the task is woken by each.
        let ready = self.get_mut().ranks.iter_mut().map(|rank| Pin::new(rank).poll(cx).is_ready());
        if ready.fold(true, |all, ready| all & ready) { Poll::Ready(()) } else { Poll::Pending }
    }
}
