//! The pages that an engine keeps of finished requests, found by the tokens whose KV they hold.

use std::collections::{BTreeMap, HashMap};

use kv_transfer::Pages;

/// The number of a kept page within the cache. Numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(u64);

/// What the KV of a page depends on: the page before it, and the tokens of the page. Compared whole, so that no
/// hash can give a request the KV of another text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    parent: Option<EntryId>,
    tokens: Box<[u32]>,
}

/// One full page, which nobody writes any more.
#[derive(Debug)]
struct Entry {
    key: Key,
    pages: Pages,
    number: u32,
    /// True if some of its tokens were generated here, so that the prefill engine may not have the KV.
    generated: bool,
    /// Requests that read the page.
    users: usize,
    /// Kept pages whose KV comes right after this page.
    children: usize,
    /// When the page was used last, by the count of uses.
    used: u64,
}

/// A tree of full pages: each page hangs from the page that holds the tokens before. The least recently used leaf
/// that no request reads is evicted first.
#[derive(Debug)]
pub struct PrefixCache {
    page_tokens: usize,
    by_key: HashMap<Key, EntryId>,
    entries: HashMap<EntryId, Entry>,
    /// The entries that may be evicted, by their last use.
    idle: BTreeMap<u64, EntryId>,
    next: u64,
    uses: u64,
}

impl PrefixCache {
    /// An empty cache of pages of `page_tokens` tokens.
    pub fn new(page_tokens: usize) -> PrefixCache {
        let (by_key, entries, idle) = (HashMap::new(), HashMap::new(), BTreeMap::new());
        PrefixCache { page_tokens, by_key, entries, idle, next: 0, uses: 0 }
    }

    /// The number of pages that are kept.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The number of these pages that some request reads.
    pub fn in_use(&self) -> usize {
        self.entries.values().filter(|entry| entry.users > 0).count()
    }

    /// The kept pages that hold the first of these tokens, and begins a use of each: the ids and the page numbers.
    pub fn begin_use(&mut self, tokens: &[u32]) -> Vec<(EntryId, u32)> {
        let mut found = Vec::new();
        let mut parent = None;
        for page in tokens.chunks_exact(self.page_tokens) {
            let Some(&id) = self.by_key.get(&Key { parent, tokens: page.into() }) else { break };
            let Some(number) = self.entries.get(&id).map(|entry| entry.number) else { break };
            self.add_user(id);
            found.push((id, number));
            parent = Some(id);
        }
        found
    }

    /// How many kept pages hold the first of these tokens, up to the last one with generated tokens; and how many
    /// of them have generated tokens.
    pub fn answers(&self, tokens: &[u32]) -> (usize, usize) {
        let (mut last, mut generated) = (0, 0);
        let mut parent = None;
        for (number, page) in (1..).zip(tokens.chunks_exact(self.page_tokens)) {
            let Some(&id) = self.by_key.get(&Key { parent, tokens: page.into() }) else { break };
            if self.entries.get(&id).is_some_and(|entry| entry.generated) {
                (last, generated) = (number, generated + 1);
            }
            parent = Some(id);
        }
        (last, generated)
    }

    /// Ends a use that was begun.
    pub fn end_use(&mut self, id: EntryId) {
        self.uses += 1;
        let used = self.uses;
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.users = entry.users.saturating_sub(1);
            entry.used = used;
        }
        self.note_idle(id);
    }

    /// Keeps a page of one number that holds these tokens after those of `parent`, and begins a use of it. If such
    /// a page is kept already, `pages` comes back, and the use is of the kept page. `generated` says whether some of
    /// the tokens were generated here.
    pub fn keep(
        &mut self,
        parent: Option<EntryId>,
        tokens: &[u32],
        pages: Pages,
        generated: bool,
    ) -> (EntryId, Option<Pages>) {
        let key = Key { parent, tokens: tokens.into() };
        if let Some(&id) = self.by_key.get(&key) {
            self.add_user(id);
            return (id, Some(pages));
        }
        let id = EntryId(self.next);
        self.next += 1;
        if let Some(parent) = parent {
            if let Some(entry) = self.entries.get_mut(&parent) {
                entry.children += 1;
            }
            self.note_idle(parent);
        }
        let number = pages.list().iter().next().unwrap_or_default();
        self.by_key.insert(key.clone(), id);
        self.entries.insert(id, Entry { key, pages, number, generated, users: 1, children: 0, used: 0 });
        (id, None)
    }

    /// Gives up the least recently used page that nobody reads; `None` if there is none.
    pub fn evict(&mut self) -> Option<Pages> {
        let (_, id) = self.idle.pop_first()?;
        let entry = self.entries.remove(&id)?;
        self.by_key.remove(&entry.key);
        if let Some(parent) = entry.key.parent {
            if let Some(parent) = self.entries.get_mut(&parent) {
                parent.children = parent.children.saturating_sub(1);
            }
            self.note_idle(parent);
        }
        Some(entry.pages)
    }

    fn add_user(&mut self, id: EntryId) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.users += 1;
            self.idle.remove(&entry.used);
        }
    }

    /// Enters the page among those that may be evicted, or takes it out from there.
    fn note_idle(&mut self, id: EntryId) {
        let Some(entry) = self.entries.get(&id) else { return };
        if entry.users == 0 && entry.children == 0 {
            self.idle.insert(entry.used, id);
        } else {
            self.idle.remove(&entry.used);
        }
    }
}
