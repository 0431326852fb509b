//! A worker that takes no new requests, until nothing needs it any more.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use kv_core::machine::Machine;

use super::port::Port;
use super::waiters::Waiting;

/// A worker that was told to drain, by [`Port::begin_drain`](super::Port::begin_drain).
///
/// The worker stays usable, and a drain cannot be taken back:
///
/// * Opening a session is refused with [`OpenError::Draining`](kv_core::OpenError::Draining); the caller keeps
///   what it was going to give. A session that another thread was opening at the same moment may fail with
///   [`Cause::Draining`](kv_core::Cause::Draining) instead.
/// * Sessions that are open end as they would have: by success, by their own failure, or by their deadline.
///   Leases run to their end: a fixed one for its duration, and a renewable one until its readers have read, or
///   heartbeats stop, or the deadline of its session. The longest deadline of an open session is thus the bound
///   of the drain, plus the time until the pages of failed sessions are quiet.
/// * Peers are told at once, and ask the bootstrap server anew for each later request. A peer that asks for a
///   session that is not open here is refused at once, with
///   [`PeerCause::WorkerStopped`](kv_core::PeerCause::WorkerStopped), which older releases know, too: its router
///   can send the request elsewhere without waiting for a deadline.
/// * The worker leaves its bootstrap server as soon as no open session awaits a peer that may still look for
///   it. A replica is found until all of its ranks have left.
///
/// The worker is *empty* when every session has ended, everything lent to sessions is back, and every peer knows
/// how its requests have ended (a peer that does not acknowledge an end, or whose connection is lost, is given five
/// seconds, and one whose next life has answered is told no more). An empty worker stays empty, and stopping it
/// loses none of its sessions. A receiver hears of the last write a moment before the sender's transport says that
/// the write has ended: if the receiver's process ends in that moment, the sender's half fails with
/// [`Cause::PeerLost`](kv_core::Cause::PeerLost), although the bytes are there. The ranks of an engine are
/// therefore stopped when all of them are empty.
///
/// Dropping this value changes nothing.
#[must_use = "this tells when the worker is empty"]
pub struct Draining<M: Machine> {
    port: Port<M>,
    waiting: Waiting,
}

impl<M: Machine + 'static> Draining<M> {
    pub(super) fn new(port: Port<M>) -> Draining<M> {
        let waiting = Waiting::on([port.awaited()]);
        Draining { port, waiting }
    }

    /// True once the worker is empty, and once it has stopped. Never blocks.
    pub fn is_empty(&self) -> bool {
        self.port.is_drained()
    }
}

/// Resolves when the worker is empty, or has stopped.
impl<M: Machine + 'static> Future for Draining<M> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Draining { port, waiting } = self.get_mut();
        waiting.look(cx, || if port.is_drained() { Poll::Ready(()) } else { Poll::Pending })
    }
}

impl<M: Machine> fmt::Debug for Draining<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draining").field("is_empty", &self.port.is_drained()).finish_non_exhaustive()
    }
}
