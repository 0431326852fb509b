//! The pages of an engine: who has them, who waits for them, and which of them are kept for later requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_transfer::allocator::{PageAllocator, RunAllocator};
use kv_transfer::queue::AuxRows;
use kv_transfer::{AuxIndex, Pages};
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex as Turn, Notify};

use super::prefix::{EntryId, PrefixCache};

/// The pages and aux rows of one engine. Requests wait for room in the order in which they came.
pub struct Store {
    books: Mutex<Books>,
    /// Held by the request that waits at the head of the line. Tokio's lock is fair.
    turn: Turn<()>,
    /// Pages have come back.
    freed: Notify,
    /// No request has pages any more.
    emptied: Notify,
    page_tokens: usize,
}

struct Books {
    allocator: RunAllocator,
    cache: PrefixCache,
    aux_rows: AuxRows,
    /// What each request has, by a number that is never used again.
    taken: HashMap<u64, Holding>,
    next: u64,
}

/// What a request has.
struct Holding {
    /// Kept pages with the first tokens, which others may read at the same time.
    shared: Vec<EntryId>,
    /// The pages that only this request has, in order; those that are lent to a session are missing.
    own: Pages,
    /// The number of pages that are lent.
    lent: usize,
    /// Pages with the same KV as kept ones. The request may still read them.
    double: Pages,
    aux: AuxIndex,
}

/// How many pages an engine has, and where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PageCounts {
    /// All pages.
    pub capacity: usize,
    /// Pages with nothing in them.
    pub free: usize,
    /// Pages that are kept for later requests and that no request reads now.
    pub cached: usize,
    /// Pages that a request has, or that its session has, or that it reads.
    pub held: usize,
    /// Requests that have pages.
    pub requests: usize,
}

impl PageCounts {
    /// Pages that nobody has and that are not free either.
    pub fn leaked(&self) -> usize {
        self.capacity.saturating_sub(self.free + self.cached + self.held)
    }
}

/// The pages of one request. When this value is dropped, they go back to the store; those that are lent to a session
/// must have been [restored](Taken::restore) before.
pub struct Taken {
    store: Arc<Store>,
    id: u64,
    /// The numbers of all pages, in order.
    numbers: Vec<u32>,
    /// How many of the first pages hold their KV already.
    prefix_pages: usize,
    aux: AuxIndex,
}

impl Store {
    /// A store of `pages` free pages of `page_tokens` tokens, with `aux_rows` aux rows.
    pub fn new(pages: u32, page_tokens: usize, aux_rows: u32) -> Arc<Store> {
        let books = Books {
            allocator: RunAllocator::new(pages),
            cache: PrefixCache::new(page_tokens),
            aux_rows: AuxRows::new(aux_rows),
            taken: HashMap::new(),
            next: 0,
        };
        Arc::new(Store {
            books: Mutex::new(books),
            turn: Turn::new(()),
            freed: Notify::new(),
            emptied: Notify::new(),
            page_tokens,
        })
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there are pages for a request of these tokens that grows to `total` tokens, and an aux row. Pages
    /// that hold the first tokens already are shared; at least the last token is never among them, because its
    /// logits are wanted. The caller has checked that the request fits into an empty cache.
    pub async fn take(self: &Arc<Store>, tokens: &[u32], total: usize) -> Taken {
        let _turn = self.turn.lock().await;
        loop {
            // Registered before the look, so that pages that come back in between are noticed.
            let freed = self.freed.notified();
            let known = tokens.split_last().map_or(tokens, |(_, before)| before);
            if let Some(taken) = self.try_take(known, total) {
                return taken;
            }
            freed.await;
        }
    }

    /// Pages for the KV of exactly these tokens, which fill them, and an aux row, if both are there now and no request
    /// waits. All pages that hold tokens already are shared, the last one, too.
    pub fn take_now(self: &Arc<Store>, tokens: &[u32]) -> Option<Taken> {
        let _turn = self.turn.try_lock().ok()?;
        self.try_take(tokens, tokens.len())
    }

    /// How many of the first tokens have their KV in kept pages, up to the last page with tokens that were generated
    /// here; and how many tokens the pages with generated tokens hold.
    pub fn answers(&self, tokens: &[u32]) -> (usize, usize) {
        let (pages, generated) = self.books().cache.answers(tokens);
        (pages * self.page_tokens, generated * self.page_tokens)
    }

    fn try_take(self: &Arc<Store>, known: &[u32], total: usize) -> Option<Taken> {
        let mut guard = self.books();
        let books = &mut *guard;
        if books.aux_rows.available() == 0 {
            return None;
        }
        let shared = books.cache.begin_use(known);
        let needed = total.div_ceil(self.page_tokens).saturating_sub(shared.len());
        while books.allocator.available() < needed {
            let Some(pages) = books.cache.evict() else { break };
            books.free(pages);
        }
        let Some(own) = books.allocator.allocate(needed) else {
            shared.iter().for_each(|(entry, _)| books.cache.end_use(*entry));
            return None;
        };
        // There is one: it was looked for before.
        let aux = books.aux_rows.take().unwrap_or(AuxIndex(0));
        let numbers = shared.iter().map(|(_, number)| *number).chain(own.list().iter()).collect();
        let prefix_pages = shared.len();
        let id = books.next;
        books.next += 1;
        let shared = shared.into_iter().map(|(entry, _)| entry).collect();
        books.taken.insert(id, Holding { shared, own, lent: 0, double: Pages::none(), aux });
        Some(Taken { store: Arc::clone(self), id, numbers, prefix_pages, aux })
    }

    /// Gives up all pages that are kept and that no request reads.
    pub fn forget_prefixes(&self) {
        let mut books = self.books();
        while let Some(pages) = books.cache.evict() {
            books.free(pages);
        }
        drop(books);
        self.freed.notify_one();
    }

    /// Waits until no request has pages.
    pub async fn unused(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.books().taken.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    /// Where the pages are.
    pub fn counts(&self) -> PageCounts {
        let books = self.books();
        let in_use = books.cache.in_use();
        // Counted from the requests, so that the sum shows what is missing.
        let of = |holding: &Holding| holding.own.len() + holding.lent + holding.double.len();
        let own: usize = books.taken.values().map(of).sum();
        PageCounts {
            capacity: books.allocator.capacity(),
            free: books.allocator.available(),
            cached: books.cache.len() - in_use,
            held: own + in_use,
            requests: books.taken.len(),
        }
    }
}

impl Books {
    fn free(&mut self, pages: Pages) {
        // All pages are of this allocator. Should it refuse some, they are lost to it, and the counts say so.
        let _ = self.allocator.free(pages);
    }
}

impl Taken {
    /// The numbers of all pages, in order.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// How many of the first pages hold their KV already.
    pub fn prefix_pages(&self) -> usize {
        self.prefix_pages
    }

    /// The aux row of the request.
    pub fn aux(&self) -> AuxIndex {
        self.aux
    }

    /// Lends the first `count` of the request's own pages, for a session that writes them.
    pub fn lend(&self, count: usize) -> Pages {
        let mut books = self.store.books();
        let Some(holding) = books.taken.get_mut(&self.id) else { return Pages::none() };
        let rest = holding.own.split_off(count);
        let lent = std::mem::replace(&mut holding.own, rest);
        holding.lent += lent.len();
        lent
    }

    /// Takes back what was lent: the request has the pages again, before its other pages.
    pub fn restore(&self, pages: Pages) {
        let mut books = self.store.books();
        let Some(holding) = books.taken.get_mut(&self.id) else { return };
        holding.lent = holding.lent.saturating_sub(pages.len());
        let rest = std::mem::replace(&mut holding.own, pages);
        if let Err(strangers) = holding.own.append(rest) {
            books.free(strangers);
        }
    }

    /// Lets later requests share the full pages of these tokens, whose KV is in the pages. The request may go on
    /// reading its pages, and writes none of these any more. The tokens from `generated` on were generated here.
    pub fn keep(&self, tokens: &[u32], generated: usize) {
        let mut guard = self.store.books();
        let books = &mut *guard;
        let Some(holding) = books.taken.get_mut(&self.id) else { return };
        let size = self.store.page_tokens;
        for (number, page) in tokens.chunks_exact(size).enumerate().skip(holding.shared.len()) {
            let rest = holding.own.split_off(1);
            let pages = std::mem::replace(&mut holding.own, rest);
            if pages.is_empty() {
                break;
            }
            let (entry, double) = books.cache.keep(
                holding.shared.last().copied(),
                page,
                pages,
                (number + 1) * size > generated,
            );
            holding.shared.push(entry);
            if let Some(Err(strangers)) = double.map(|double| holding.double.append(double)) {
                let _ = books.allocator.free(strangers);
            }
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut books = self.store.books();
        if let Some(Holding { shared, own, double, aux, .. }) = books.taken.remove(&self.id) {
            // The last page first, because a page can be evicted only after those that hang from it.
            shared.into_iter().rev().for_each(|entry| books.cache.end_use(entry));
            books.free(own);
            books.free(double);
            books.aux_rows.give(aux);
        }
        let empty = books.taken.is_empty();
        drop(books);
        self.store.freed.notify_one();
        if empty {
            self.store.emptied.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests;
