//! Fetches and requests as futures, on any executor.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use kv_poll::worker::Waiting;

use crate::connector::{Fetch, FetchFailure};
use crate::machine::EcPoll;
use crate::request::{Request, RequestPoll};

/// For servers that run a task per request: what [`poll`](Fetch::poll) tells, awaited. No thread is started, and no
/// executor is needed besides the server's own.
///
/// Dropping a future changes nothing: the fetch goes on, and an entry that has come stays with the [`Fetch`]. The
/// fetch ends when the `Fetch` itself is dropped. So the futures are fit for `select!` and for timeouts.
///
/// ```
/// use kv_ec::{Availability, EcConnector, EntryGuard, FetchFailure, Want};
///
/// /// The entry; or the reason for which the caller encodes the image itself.
/// async fn fetched(connector: &EcConnector, want: Want) -> Result<Option<EntryGuard>, FetchFailure> {
///     match connector.ensure_cache_available(want) {
///         Ok(Availability::Here(entry)) => Ok(Some(entry)),
///         Ok(Availability::Deferred(mut fetch)) => {
///             fetch.finished().await?;
///             Ok(fetch.entry())
///         }
///         Err(error) => {
///             println!("not even asked for: {error}");
///             Ok(None)
///         }
///     }
/// }
/// ```
impl Fetch {
    /// Resolves with the state of the fetch when the fetch is in this state or in a later one, in the order
    /// `Waiting`, `Transferring`, `Ready`; with the reason if the entry will not come.
    pub fn until(&mut self, state: EcPoll) -> FetchUntil<'_> {
        let waiting = self.waiting();
        FetchUntil { fetch: self, state, waiting }
    }

    /// Resolves when every byte of the entry is in place, so that [`entry`](Fetch::entry) returns the entry; or with
    /// the reason why the entry will not come. Short for [`until`](Fetch::until) with `Ready`. A fetch takes no input,
    /// so there is nothing to await before.
    pub fn finished(&mut self) -> FetchUntil<'_> {
        self.until(EcPoll::Ready)
    }
}

/// Waits for a state of a fetch; see [`Fetch::until`].
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct FetchUntil<'a> {
    fetch: &'a mut Fetch,
    state: EcPoll,
    waiting: Waiting,
}

impl Future for FetchUntil<'_> {
    type Output = Result<EcPoll, FetchFailure>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let FetchUntil { fetch, state, waiting } = self.get_mut();
        let stopped = FetchFailure::WorkerStopped { at: EcPoll::Waiting };
        waiting.look(cx, || match fetch.poll() {
            EcPoll::Failed => Poll::Ready(Err(fetch.failure().unwrap_or(stopped.clone()))),
            poll if poll >= *state => Poll::Ready(Ok(poll)),
            _ => Poll::Pending,
        })
    }
}

impl Request {
    /// Resolves with [`RequestPoll::Ready`] when all entries are pinned, and with [`RequestPoll::EncodeLocally`] when
    /// all fetches have ended and at least one has failed; never with [`RequestPoll::Deferred`].
    ///
    /// Dropping the future changes nothing: the fetches go on, and the entries that have come stay pinned.
    pub fn finished(&mut self) -> RequestFinished<'_> {
        let waiting = self.fetches().map(Fetch::waiting).collect();
        RequestFinished { request: self, waiting }
    }
}

/// Waits for the entries of a request; see [`Request::finished`].
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct RequestFinished<'a> {
    request: &'a mut Request,
    waiting: Waiting,
}

impl Future for RequestFinished<'_> {
    type Output = RequestPoll;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RequestPoll> {
        let RequestFinished { request, waiting } = self.get_mut();
        waiting.look(cx, || match request.poll() {
            RequestPoll::Deferred => Poll::Pending,
            poll => Poll::Ready(poll),
        })
    }
}
