//! Sessions as futures, on any executor.

use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll};

use kv_core::{Cause, KvPoll, KvSession, Phase, Reclaimed, TransferError};

use crate::group::EngineSession;
use crate::kv::Session;
use crate::worker::waiters::Waiting;

/// Awaits what [`poll`](KvSession::poll), [`failure`](KvSession::failure) and [`reclaim`](KvSession::reclaim) tell,
/// for servers that run a task per request. No thread is started, and no executor is needed besides the server's own.
///
/// Dropping a future changes nothing: no session is aborted, and no page is lost. The session does that when the
/// session itself is dropped. So the futures are fit for `select!` and for timeouts.
///
/// Wakers are called on the worker's thread. A waker that blocks, on a lock or on a channel without room, holds up the
/// transfers and heartbeats of all peers. Those of tokio and other executors do not block.
///
/// ```
/// use kv_core::{Backpressure, KvReceiver, KvSession, Pages, Reclaimed, TransferError};
/// use kv_poll::{AwaitSession, Manager, Receiver};
///
/// /// Receives into the pages; the decode can begin when this has returned.
/// async fn receive(manager: &Manager, receiver: &mut Receiver, mut pages: Pages) -> Result<(), TransferError> {
///     receiver.ready().await?;
///     while let Err(Backpressure(refused)) = receiver.init(pages, None) {
///         pages = refused; // the worker has no room for commands
///         manager.command_room().await;
///     }
///     receiver.finished().await.map(drop)
/// }
///
/// /// Ends a request, whatever has become of the request.
/// async fn end(mut receiver: Receiver) -> Option<Reclaimed> {
///     receiver.abort();
///     receiver.reclaimed().await
/// }
/// ```
pub trait AwaitSession: KvSession + Hidden + Sized {
    /// Resolves with the state of the session when the session is in this state or in a later one, in the order
    /// `Bootstrapping`, `WaitingForInput`, `Transferring`, `Success`; with the failure if the session has failed.
    fn until(&self, state: KvPoll) -> Until<'_, Self> {
        Until { session: self, state, waits: Waits::on(self) }
    }

    /// Resolves when the session waits for its scheduler: for `send` on a sender, for `init` on a receiver. Input may
    /// be given before, too; a server awaits this to keep pages for other requests until the peer has been found.
    /// Short for [`until`](AwaitSession::until) with `WaitingForInput`.
    fn ready(&self) -> Until<'_, Self> {
        self.until(KvPoll::WaitingForInput)
    }

    /// Resolves when every byte is in place, or with the failure. On a sender in pull mode: when every reader has
    /// released the pages. The pages of a session that failed may still be in quarantine then. Short for
    /// [`until`](AwaitSession::until) with `Success`.
    fn finished(&self) -> Until<'_, Self> {
        self.until(KvPoll::Success)
    }

    /// Resolves after the end of the session, when no data operation touches the pages any more, and takes back what
    /// the session was lent. `None` if nothing can come back: the session was reclaimed before, or the worker has
    /// stopped before the pages were quiet ([`StopReport`](crate::StopReport) counts such pages).
    ///
    /// The future waits for the end of the session, and does not end the session: call
    /// [`abort`](KvSession::abort) before, or wait until the session has [finished](AwaitSession::finished).
    fn reclaimed(&mut self) -> TakeBack<'_, Self> {
        let waits = Waits::on(self);
        TakeBack { session: self, waits }
    }
}

/// Waits for a state of a session; see [`AwaitSession::until`].
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Until<'a, S> {
    session: &'a S,
    state: KvPoll,
    waits: Waits,
}

impl<S: AwaitSession> Future for Until<'_, S> {
    type Output = Result<KvPoll, TransferError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Until { session, state, waits } = self.get_mut();
        waits.look(cx, session, |session| {
            session.attend();
            match session.poll() {
                KvPoll::Failed => Poll::Ready(Err(session.failure().unwrap_or_else(|| {
                    TransferError::new(session.room().clone(), Phase::Transfer, Cause::WorkerStopped)
                }))),
                poll if poll >= *state => Poll::Ready(Ok(poll)),
                _ => Poll::Pending,
            }
        })
    }
}

/// Waits for what a session was lent; see [`AwaitSession::reclaimed`].
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct TakeBack<'a, S> {
    session: &'a mut S,
    waits: Waits,
}

impl<S: AwaitSession> Future for TakeBack<'_, S> {
    type Output = Option<Reclaimed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Reclaimed>> {
        let TakeBack { session, waits } = self.get_mut();
        waits.look(cx, session, |session| {
            session.attend();
            match session.reclaim() {
                Some(reclaimed) => Poll::Ready(Some(reclaimed)),
                None if session.is_beyond_reclaim() => Poll::Ready(session.reclaim()),
                None => Poll::Pending,
            }
        })
    }
}

/// What the task of a future is registered with: the session, and while commands of the session wait for room in a
/// ring, the rings. A worker that takes commands wakes no other tasks: there may be thousands.
#[derive(Debug)]
struct Waits {
    session: Waiting,
    room: Option<Waiting>,
}

impl Waits {
    fn on(session: &impl Hidden) -> Waits {
        Waits { session: session.waiting(), room: None }
    }

    /// Looks as [`Waiting::look`] does.
    fn look<S: Deref<Target: Hidden>, T>(
        &mut self,
        cx: &Context<'_>,
        session: &mut S,
        mut look: impl FnMut(&mut S) -> Poll<T>,
    ) -> Poll<T> {
        let looked = self.session.look(cx, || look(session));
        if looked.is_ready() {
            return looked;
        }
        self.room = session.rings().map(|fresh| self.room.take().unwrap_or(fresh));
        match &mut self.room {
            Some(room) => room.look(cx, || look(session)),
            None => looked,
        }
    }
}

impl<Role> AwaitSession for Session<Role> {}
impl<Role> AwaitSession for EngineSession<Role> {}

/// What the sessions of this crate have besides what schedulers call.
pub trait Hidden: Send + Sync {
    /// The registration of a task that waits for a change.
    #[doc(hidden)]
    fn waiting(&self) -> Waiting;

    /// The registration of a task whose session has commands that wait for room; `None` if it has none.
    #[doc(hidden)]
    fn rings(&self) -> Option<Waiting> {
        None
    }

    /// Does what a drain would do for the session.
    #[doc(hidden)]
    fn attend(&self) {}

    /// True if nothing will come back any more.
    #[doc(hidden)]
    fn is_beyond_reclaim(&self) -> bool;
}

#[cfg(test)]
mod tests;
