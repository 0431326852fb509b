//! Waiting for room in the command ring of a worker.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kv_core::machine::Machine;

use super::shared::Shared;
use super::waiters::{Awaited, Waiting};

/// Resolves when the command ring of a worker has room, on any executor. Room is not reserved: another task may be
/// faster, and the command is then refused again. Resolves also once the worker has stopped, because commands are
/// handed back then.
#[must_use = "futures do nothing unless polled"]
pub struct CommandRoom<M: Machine> {
    shared: Arc<Shared<M>>,
    waiting: Waiting,
}

impl<M: Machine + 'static> CommandRoom<M> {
    pub(super) fn new(shared: Arc<Shared<M>>) -> CommandRoom<M> {
        let waiting = Waiting::on([Arc::clone(&shared) as Arc<dyn Awaited>]);
        CommandRoom { shared, waiting }
    }
}

impl<M: Machine> Future for CommandRoom<M> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let CommandRoom { shared, waiting } = self.get_mut();
        waiting.look(cx, || if shared.has_room() { Poll::Ready(()) } else { Poll::Pending })
    }
}

impl<M: Machine> fmt::Debug for CommandRoom<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommandRoom").finish_non_exhaustive()
    }
}
