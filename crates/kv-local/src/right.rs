//! The right to write, as a page that two processes share: the owner of the memory, and the peer that copies
//! into it (the copier).
//!
//! The owner makes one page for each connection and sends its descriptor with the hello. The copier marks the
//! page's first word before each slice of a write and clears the mark afterwards; the owner revokes the right
//! in the same word. Both use one atomic operation, so one of the two comes first:
//!
//! | the word is | the copier marks | the owner revokes |
//! |---|---|---|
//! | free | marked: it copies a slice | revoked: no slice begins any more |
//! | marked | – | marked and revoked: the owner waits for the copier to clear its mark, or to die |
//! | revoked | refused: the copier ends its posts | – |
//!
//! The second word counts slices of writes and of reads. It shows the owner that the copier is at work on
//! a connection that carries no messages.
//!
//! The page protects against a peer that hangs or is stopped, not against a hostile process of the same
//! user, which can write into the shared memory anyway. A peer that writes anything else into the page
//! delays the revocation of its own right until its process ends, ends its own copies, or clears its mark
//! early and then writes into pages that the owner has reused. Neither side can block or crash the other.

use std::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

use kv_host::{Mapping, MemoryFile, OsError};

/// Length of the page's file, in bytes.
pub(crate) const RIGHT_LEN: usize = 4096;
/// Offset of the word with the state, in bytes.
const STATE: usize = 0;
/// Offset of the word that counts slices, in bytes: in a cache line of its own.
const SLICES: usize = 64;
/// Bit of the state: the copier is copying a slice.
const MARKED: u64 = 1;
/// Bit of the state: no further slice may begin.
const REVOKED: u64 = 2;

/// The page that stands for the right to write through one connection.
#[derive(Debug)]
pub(crate) struct Right {
    mapping: Mapping,
}

impl Right {
    /// Makes a page for the owner, and the file that the owner sends to the copier.
    pub(crate) fn grant() -> Result<(Right, MemoryFile), OsError> {
        let file = MemoryFile::create("kv-right", RIGHT_LEN as u64, false)?;
        let right = Right::of(&file)?;
        right.state().store(0, Ordering::SeqCst);
        Ok((right, file))
    }

    /// Maps the page for the copier, from a file with [`RIGHT_LEN`] bytes.
    pub(crate) fn of(file: &MemoryFile) -> Result<Right, OsError> {
        let mapping = file.map(0, RIGHT_LEN)?;
        mapping.keep_from_children()?;
        Ok(Right { mapping })
    }

    /// For the copier: marks that a slice begins. False if the right is revoked: then no byte may be copied.
    #[must_use]
    pub(crate) fn mark(&self) -> bool {
        let marked = self.state().compare_exchange(0, MARKED, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        // No byte of the slice is in place before the mark is.
        order_with_copies();
        marked
    }

    /// For the copier: clears the mark after a slice.
    pub(crate) fn clear(&self) {
        // All bytes of the slice are in place before the mark is gone.
        order_with_copies();
        self.state().fetch_and(!MARKED, Ordering::SeqCst);
    }

    /// For the copier, which alone counts here: counts a slice of a write or of a read.
    pub(crate) fn count(&self) {
        self.slices().store(self.slices().load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// For the owner: revokes the right. True once no slice is being copied any more.
    pub(crate) fn revoke(&self) -> bool {
        self.state().fetch_or(REVOKED, Ordering::SeqCst) & MARKED == 0
    }

    /// For the owner: true if the right was revoked, which is for ever.
    pub(crate) fn is_revoked(&self) -> bool {
        self.state().load(Ordering::SeqCst) & REVOKED != 0
    }

    /// For the owner: the number of slices that the copier has counted.
    pub(crate) fn copied(&self) -> u64 {
        self.slices().load(Ordering::Relaxed)
    }

    /// Address of the page.
    #[cfg(test)]
    pub(crate) fn addr(&self) -> u64 {
        std::ptr::from_ref(self.state()) as u64
    }

    fn state(&self) -> &AtomicU64 {
        self.mapping.word(STATE)
    }

    fn slices(&self) -> &AtomicU64 {
        self.mapping.word(SLICES)
    }
}

/// Orders the copies of a slice with the atomic operation that the caller makes before or after this call. On
/// x86 that operation, a locked instruction, is itself ordered with all stores, also with those that bypass
/// the caches.
fn order_with_copies() {
    if cfg!(not(target_arch = "x86_64")) {
        fence(Ordering::SeqCst);
    }
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn a_revoked_right_starts_no_slice_and_a_slice_delays_revocation() {
        let (owner, file) = Right::grant().unwrap();
        let copier = Right::of(&file).unwrap();
        assert!(copier.mark());
        assert!(!owner.is_revoked());
        assert!(!owner.revoke());
        assert!(!owner.revoke());
        assert!(owner.is_revoked());
        copier.clear();
        assert!(owner.revoke());
        assert!(!copier.mark());
        copier.count();
        assert_eq!(owner.copied(), 1);
    }

    #[test]
    fn rubbish_in_the_page_delays_only_the_revocation_and_never_blocks() {
        let (owner, file) = Right::grant().unwrap();
        let peer = Right::of(&file).unwrap();
        for rubbish in [u64::MAX, MARKED, REVOKED, 1 << 63, 0] {
            peer.state().store(rubbish, Ordering::SeqCst);
            assert_eq!(owner.revoke(), rubbish & MARKED == 0);
            // The other way round, nonsense that an owner writes ends the copies.
            assert!(!peer.mark());
        }
    }

    #[test]
    fn no_slice_is_under_way_once_the_right_is_revoked() {
        for _ in 0..200 {
            let (owner, file) = Right::grant().unwrap();
            let copying = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let copier = Right::of(&file).unwrap();
                    while copier.mark() {
                        copying.store(true, Ordering::SeqCst);
                        copying.store(false, Ordering::SeqCst);
                        copier.clear();
                        copier.count();
                    }
                });
                while owner.copied() < 100 {
                    thread::yield_now();
                }
                while !owner.revoke() {}
                for _ in 0..100 {
                    assert!(!copying.load(Ordering::SeqCst));
                }
            });
        }
    }
}
