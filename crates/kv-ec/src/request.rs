//! The entries of one request, which may come from several producers.

use std::collections::BTreeSet;

use kv_core::{ContentHash, OpenError};

use crate::claims::Claim;
use crate::connector::{Availability, EcConnector, Fetch, FetchFailure};
use crate::machine::{EcError, EcPoll, Want};
use crate::region::EcRegion;
use crate::room::{Entries, Key, Room};
use crate::store::EntryGuard;

/// What a scheduler does with a request, by the states of its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestPoll {
    /// At least one entry is being fetched: leave the request in the waiting queue.
    Deferred,
    /// All entries are pinned, and stay pinned while the [`Request`] lives: schedule the request.
    Ready,
    /// All fetches have ended, and at least one has failed: encode the [missing](Request::missing) items
    /// locally, or fail the request.
    EncodeLocally,
}

/// The entries that one request needs, in the order in which they were wanted.
///
/// Entries that have come stay pinned while others are still being fetched, so that all entries are in the
/// cache when the request is scheduled. Dropping the value ends its fetches and unpins its entries.
///
/// No two requests wait for room that the other one has: a request has room for all of its entries, or waits with no
/// entry until it is in turn. Requests are in turn in the order in which they were made, as soon as they fit beside
/// those that have room, which keep the room until they are dropped. An entry that has failed while its request waited
/// needs no room any more. A request whose entries are all here takes no
/// turn. So drop a request that is not needed any more. Single fetches
/// ([`ensure_cache_available`](EcConnector::ensure_cache_available)) take no turn.
///
/// If the region can never hold all entries, those that do not fit beside the ones before them are
/// [missing](Request::missing) from the start, as [`EcError::TooLargeTogether`], and no peer is asked for them. A
/// request that waits until the region has lost too many blocks for its entries ends in the same way, with all of
/// them, and those behind it have their turn.
///
/// Room may go after requests had it: blocks are lost, entries are pinned for good, or a transfer that was given up
/// still has blocks, which come back. Then the oldest request that lacks an entry goes on, and younger ones wait
/// again, also those that have a part of their entries. If the room is gone for good, a younger one with a part gives
/// its entries back in the next [`poll`](Request::poll), and ends with [`EcError::RoomLost`]. A request
/// with a part that no longer fits the region at all does so, too, and ends with [`EcError::TooLargeTogether`].
#[derive(Debug)]
pub struct Request {
    items: Vec<Item>,
    /// The failure with which the request has lost its room.
    lost: Option<FetchFailure>,
    /// After the items: other requests may take the room when no entry is pinned any more.
    claim: Claim,
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

/// An entry that a request did not take, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("the request did not take the entry: {why}")]
pub struct NotFilled {
    /// The entry, as the caller gave it.
    pub entry: Box<EntryGuard>,
    /// The reason why the entry came back.
    #[source]
    pub why: FillError,
}

/// Why [`fill`](Request::fill) put no entry in the place of a missing one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FillError {
    /// No entry of this hash is missing at this place.
    #[error("no entry with this hash is missing at {index}")]
    NotMissing {
        /// The position that the caller named.
        index: usize,
    },
    /// The request waits for its turn, and has no entry before. Fill it once its fetches have ended.
    #[error("the request waits for its turn and takes no entry before: {0}")]
    NotInTurn(Box<EcError>),
    /// The request has no room for the entry beside those that are still to come. Fill it once its fetches have
    /// ended.
    #[error(
        "the request has no room for the entry beside the {blocks} blocks of entries that are still to come"
    )]
    NoRoom {
        /// Blocks of the entries that are still to come.
        blocks: u64,
    },
}

impl EcConnector {
    /// Asks for all entries of one request: entries that the cache has are pinned, and the others are fetched.
    ///
    /// # Errors
    ///
    /// As of [`ensure_cache_available`](EcConnector::ensure_cache_available). The fetches that this call has
    /// begun are ended, and no entry stays pinned.
    pub fn request(&self, wants: impl IntoIterator<Item = Want>) -> Result<Request, OpenError> {
        let wants: Vec<Want> = wants.into_iter().collect();
        let now = self.store().lock().room();
        let room = Together::of(&wants, self.region(), &now);
        let claim = self.store().claims().claim(room.entries.clone(), now);
        let mut here: Vec<_> = wants.iter().map(|want| self.here(want).filter(|_| room.has(want))).collect();
        if wants.iter().zip(&here).all(|(want, entry)| entry.is_some() || !room.has(want)) {
            claim.grant();
        } else if !claim
            .hold(wants.iter().zip(&here).filter(|(_, here)| here.is_some()).map(|(want, _)| key(want)))
        {
            // The requests that come first may need the room of these entries.
            here.fill_with(|| None);
        }
        let item = |(mut want, here): (Want, _)| {
            let hash = want.hash.clone();
            want.claim = room.has(&want).then(|| claim.clone());
            let state = match room.refuses(&want) {
                Some(error) => State::Missing(Some(FetchFailure::Machine(Box::new(error)))),
                None => match self.available(want, here)? {
                    Availability::Here(entry) => State::Here(entry),
                    Availability::Deferred(fetch) => State::Deferred(fetch),
                },
            };
            Ok(Item { hash, state })
        };
        let items = wants.into_iter().zip(here).map(item).collect::<Result<_, _>>()?;
        Ok(Request { items, lost: None, claim })
    }
}

impl Request {
    /// What to do with the request now. Costs one atomic load for each entry that is being fetched.
    pub fn poll(&mut self) -> RequestPoll {
        let mut poll = RequestPoll::Ready;
        let had_room = self.lost.is_none();
        for item in &mut self.items {
            match (item.look(), &self.lost) {
                (true, None) => self.lost = item.lost_room(),
                (true, Some(lost)) => item.give_back(lost),
                (false, _) => {}
            }
        }
        if let (true, Some(lost)) = (had_room, &self.lost) {
            self.items.iter_mut().for_each(|item| item.give_back(lost));
        }
        for item in &self.items {
            match item.state {
                State::Here(_) => {}
                State::Deferred(_) => return RequestPoll::Deferred,
                State::Missing(_) => poll = RequestPoll::EncodeLocally,
            }
        }
        poll
    }

    /// The entries that are pinned, each with its position among the [`Want`]s of the request, from 0.
    pub fn entries(&self) -> impl Iterator<Item = (usize, &EntryGuard)> {
        self.items.iter().enumerate().filter_map(|(index, item)| match &item.state {
            State::Here(entry) => Some((index, entry)),
            _ => None,
        })
    }

    /// The entries that will not come, each with its position among the [`Want`]s, its hash and the reason.
    /// [`poll`](Request::poll) finds them; those for which the region has no room are known without a poll.
    pub fn missing(&self) -> impl Iterator<Item = (usize, &ContentHash, Option<&FetchFailure>)> {
        self.items.iter().enumerate().filter_map(|(index, item)| match &item.state {
            State::Missing(why) => Some((index, &item.hash, why.as_ref())),
            _ => None,
        })
    }

    /// Puts an entry that was encoded locally in the place of a missing one.
    ///
    /// # Errors
    ///
    /// [`NotFilled`], with the entry. While a request waits for its turn, it takes no entry; and while it waits for
    /// others of its entries, it takes none for which it has no room
    /// ([`TooLargeTogether`](EcError::TooLargeTogether)): other requests may wait for that room. The entry stays in the
    /// cache as any other if its guard is dropped, and can be pinned again when the fetches of the request have ended.
    pub fn fill(&mut self, index: usize, entry: EntryGuard) -> Result<(), NotFilled> {
        let not_filled = |entry, why| Err(NotFilled { entry: Box::new(entry), why });
        match self.items.get_mut(index) {
            Some(item) if matches!(item.state, State::Missing(_)) && item.hash == *entry.hash() => {
                if let Err(why) = self.claim.fill(&(item.hash.clone(), entry.bytes())) {
                    return not_filled(entry, why);
                }
                item.state = State::Here(entry);
                Ok(())
            }
            _ => not_filled(entry, FillError::NotMissing { index }),
        }
    }
}

impl Request {
    /// The fetches that have not been seen to end.
    pub(crate) fn fetches(&self) -> impl Iterator<Item = &Fetch> {
        self.items.iter().filter_map(|item| match &item.state {
            State::Deferred(fetch) => Some(fetch),
            _ => None,
        })
    }
}

impl Item {
    /// Sees whether the fetch has ended. True if the fetch has ended since the last look.
    fn look(&mut self) -> bool {
        let State::Deferred(fetch) = &mut self.state else { return false };
        self.state = match fetch.poll() {
            EcPoll::Ready => fetch.entry().map_or(State::Missing(None), State::Here),
            EcPoll::Failed => State::Missing(fetch.failure()),
            EcPoll::Waiting | EcPoll::Transferring => return false,
        };
        true
    }

    /// Gives the entry back, because other requests wait for its room.
    fn give_back(&mut self, lost: &FetchFailure) {
        if let State::Here(_) = self.state {
            self.state = State::Missing(Some(lost.clone()));
        }
    }

    /// The failure of a fetch whose request has lost its room. An entry that was refused from the start, for which
    /// the request never had room, was never fetched.
    fn lost_room(&self) -> Option<FetchFailure> {
        match &self.state {
            State::Missing(Some(why @ FetchFailure::Machine(error)))
                if matches!(**error, EcError::RoomLost { .. } | EcError::TooLargeTogether { .. }) =>
            {
                Some(why.clone())
            }
            _ => None,
        }
    }
}

/// Which entries of a request the region can hold at the same time: the first ones that fit. Wants of the same
/// entry count once. An entry that is alone larger than the region is in neither list: the worker refuses it.
struct Together {
    entries: Entries,
    refused: BTreeSet<Key>,
    /// Blocks of all entries, refused or not.
    blocks: u64,
    /// Blocks of the region that the entries can have.
    usable: u32,
}

impl Together {
    fn of(wants: &[Want], region: &EcRegion, room: &Room) -> Together {
        let (mut entries, mut refused, mut blocks, mut fitting) = (Entries::new(), BTreeSet::new(), 0, 0);
        let (block_bytes, region) = (u64::from(region.block_bytes()), u64::from(region.blocks()));
        for want in wants {
            let (key, own) = (key(want), want.bytes.div_ceil(block_bytes));
            if own > region || entries.contains_key(&key) || refused.contains(&key) {
                continue;
            }
            blocks += own;
            if fitting + own > u64::from(room.lasting(|other| *other == key || entries.contains_key(other))) {
                refused.insert(key);
            } else {
                fitting += own;
                entries.insert(key, own);
            }
        }
        let usable = room.lasting(|key| entries.contains_key(key));
        Together { entries, refused, blocks, usable }
    }

    fn has(&self, want: &Want) -> bool {
        self.entries.contains_key(&key(want))
    }

    fn refuses(&self, want: &Want) -> Option<EcError> {
        let &Together { blocks, usable, .. } = self;
        let is_refused = self.refused.contains(&key(want));
        is_refused.then_some(EcError::TooLargeTogether { blocks, region: usable })
    }
}

fn key(want: &Want) -> Key {
    (want.hash.clone(), want.bytes)
}
