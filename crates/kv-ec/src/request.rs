//! The entries of one request, which may come from several producers.

use kv_core::{ContentHash, OpenError};

use crate::connector::{Availability, EcConnector, Fetch, FetchFailure};
use crate::machine::{EcPoll, Want};
use crate::store::EntryGuard;

/// How far the entries of a request are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestPoll {
    /// At least one entry is on its way: leave the request in the waiting queue.
    Deferred,
    /// All entries are here, and stay while the request lives: schedule the request.
    Ready,
    /// No entry is on its way any more, and at least one will not come: encode the
    /// [missing](Request::missing) items locally, or fail the request.
    EncodeLocally,
}

/// The entries that one request needs, in the order in which they were wanted.
///
/// Entries that have come stay pinned while the others are on their way, so that no step finds one of them
/// evicted. Dropping the request ends its fetches and unpins its entries.
#[derive(Debug)]
pub struct Request {
    items: Vec<Item>,
}

#[derive(Debug)]
struct Item {
    hash: ContentHash,
    state: State,
}

#[derive(Debug)]
enum State {
    Here(EntryGuard),
    Deferred(Fetch),
    /// With the reason, which the worker has told.
    Missing(Option<FetchFailure>),
}

impl EcConnector {
    /// Wants all entries of one request: those that are here are pinned, and the others are fetched.
    ///
    /// # Errors
    ///
    /// An entry is not here, and the worker has stopped or has as many sessions as it may have. Nothing is
    /// wanted then.
    pub fn request(&self, wants: impl IntoIterator<Item = Want>) -> Result<Request, OpenError> {
        let item = |want: Want| {
            let hash = want.hash.clone();
            let state = match self.ensure_cache_available(want)? {
                Availability::Here(entry) => State::Here(entry),
                Availability::Deferred(fetch) => State::Deferred(fetch),
            };
            Ok(Item { hash, state })
        };
        Ok(Request { items: wants.into_iter().map(item).collect::<Result<_, _>>()? })
    }
}

impl Request {
    /// How far the entries are. Costs one atomic load for each entry that is on its way.
    pub fn poll(&mut self) -> RequestPoll {
        let mut poll = RequestPoll::Ready;
        for item in &mut self.items {
            item.look();
            match item.state {
                State::Here(_) => {}
                State::Deferred(_) => return RequestPoll::Deferred,
                State::Missing(_) => poll = RequestPoll::EncodeLocally,
            }
        }
        poll
    }

    /// The entries that are here, each with its position among those that were wanted.
    pub fn entries(&self) -> impl Iterator<Item = (usize, &EntryGuard)> {
        self.items.iter().enumerate().filter_map(|(index, item)| match &item.state {
            State::Here(entry) => Some((index, entry)),
            _ => None,
        })
    }

    /// The entries that will not come, each with its position, its hash and the reason.
    pub fn missing(&self) -> impl Iterator<Item = (usize, &ContentHash, Option<&FetchFailure>)> {
        self.items.iter().enumerate().filter_map(|(index, item)| match &item.state {
            State::Missing(why) => Some((index, &item.hash, why.as_ref())),
            _ => None,
        })
    }

    /// Puts in an entry that was encoded locally, in place of one that will not come. The entry comes back if
    /// its hash is another one, or if nothing is missing at this position.
    pub fn fill(&mut self, index: usize, entry: EntryGuard) -> Result<(), EntryGuard> {
        match self.items.get_mut(index) {
            Some(item) if matches!(item.state, State::Missing(_)) && item.hash == *entry.hash() => {
                item.state = State::Here(entry);
                Ok(())
            }
            _ => Err(entry),
        }
    }
}

impl Item {
    fn look(&mut self) {
        let State::Deferred(fetch) = &mut self.state else { return };
        self.state = match fetch.poll() {
            EcPoll::Ready => fetch.entry().map_or(State::Missing(None), State::Here),
            EcPoll::Failed => State::Missing(fetch.failure()),
            EcPoll::Waiting | EcPoll::Transferring => return,
        };
    }
}
