//! The pages of a decode cache, and the place of each page: free, in transfer, in quarantine, held, or
//! running.

use kv_core::{PageList, Pages};

use crate::allocator::{FreeError, FreeReason, PageAllocator};

/// Where the pages of a decode cache are. Every page is counted in exactly one place, so the places always
/// add up to `capacity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accounting {
    /// All pages of the cache.
    pub capacity: usize,
    /// Pages that are free in the allocator.
    pub free: usize,
    /// Pages that the sessions of live requests have.
    pub in_transfer: usize,
    /// Pages that the sessions of failed requests have: a data operation may still touch them.
    pub quarantined: usize,
    /// Pages in these queues: about to be given to a session, or of a request that waits for `pop_waiting`.
    pub held: usize,
    /// Pages that the server has: of running requests.
    pub with_server: usize,
    /// Pages that sessions did not give back when they ended. More than zero shows a bug in the `KvManager`.
    pub lost: usize,
}

impl Accounting {
    /// The sum of all places, which equals `capacity`.
    pub fn sum(&self) -> usize {
        self.free + self.in_transfer + self.quarantined + self.held + self.with_server + self.lost
    }
}

/// Where a page can be that is not free in the allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Transfer,
    Quarantine,
    Held,
    Server,
}

/// An allocator with a count of pages for each place that they can be in.
#[derive(Debug)]
pub(super) struct Cache<A> {
    allocator: A,
    places: [usize; 4],
    lost: usize,
}

impl<A: PageAllocator> Cache<A> {
    /// A cache over the pages of `allocator`. Pages that are not free there count as the server's.
    pub(super) fn new(allocator: A) -> Cache<A> {
        let mut places = [0; 4];
        places[Place::Server as usize] = allocator.capacity().saturating_sub(allocator.available());
        Cache { allocator, places, lost: 0 }
    }

    pub(super) fn capacity(&self) -> usize {
        self.allocator.capacity()
    }

    pub(super) fn available(&self) -> usize {
        self.allocator.available()
    }

    pub(super) fn at(&self, place: Place) -> usize {
        self.places[place as usize]
    }

    pub(super) fn allocate(&mut self, n: usize, to: Place) -> Option<Pages> {
        let pages = self.allocator.allocate(n)?;
        self.places[to as usize] += pages.len();
        Some(pages)
    }

    pub(super) fn shift(&mut self, n: usize, from: Place, to: Place) {
        self.places[from as usize] = self.places[from as usize].saturating_sub(n);
        self.places[to as usize] += n;
    }

    /// Frees pages that the server holds.
    pub(super) fn release(&mut self, pages: Pages) -> Result<(), FreeError> {
        let (given, held) = (pages.len(), self.at(Place::Server));
        if given > held {
            return Err(FreeError { pages, reason: FreeReason::NotHeld { given, held } });
        }
        self.allocator.free(pages)?;
        self.places[Place::Server as usize] -= given;
        Ok(())
    }

    /// Frees pages of a request that had `given` pages at `from`. Missing pages are lost: a data operation
    /// might still write there, so they are not used again.
    pub(super) fn give_back(&mut self, pages: Pages, given: usize, from: Place) {
        let returned = if pages.len() <= given { pages.len() } else { 0 };
        let freed = if returned == pages.len() && self.allocator.free(pages).is_ok() { returned } else { 0 };
        self.places[from as usize] = self.places[from as usize].saturating_sub(given);
        self.lost += given - freed;
    }

    pub(super) fn lost(&self) -> PageList {
        self.allocator.lost()
    }

    pub(super) fn accounting(&self) -> Accounting {
        Accounting {
            capacity: self.capacity(),
            free: self.available(),
            in_transfer: self.at(Place::Transfer),
            quarantined: self.at(Place::Quarantine),
            held: self.at(Place::Held),
            with_server: self.at(Place::Server),
            lost: self.lost,
        }
    }
}
