//! Counted steps: what an input costs a machine, in a unit that does not depend on the processor.
//!
//! Every loop whose length is decided by a peer, a scheduler or kept state counts its rounds.
//! Without the feature `meter` the counting is compiled to nothing.

#[cfg(feature = "meter")]
thread_local! {
    static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// How many steps this thread has counted since the thread began.
#[cfg(feature = "meter")]
pub fn steps() -> u64 {
    STEPS.with(std::cell::Cell::get)
}

/// Counts `count` steps for this thread.
#[inline(always)]
pub(crate) fn step(count: usize) {
    #[cfg(feature = "meter")]
    STEPS.with(|steps| steps.set(steps.get().saturating_add(count as u64)));
    #[cfg(not(feature = "meter"))]
    let _ = count;
}

/// The same items, each of which counts one step when taken.
#[cfg(feature = "meter")]
#[inline(always)]
pub(crate) fn each<I: IntoIterator>(items: I) -> Each<I::IntoIter> {
    Each(items.into_iter())
}

/// The same items, without counting.
#[cfg(not(feature = "meter"))]
#[inline(always)]
pub(crate) fn each<I: IntoIterator>(items: I) -> I::IntoIter {
    items.into_iter()
}

/// The iterator that [`each`] returns.
#[cfg(feature = "meter")]
#[derive(Debug, Clone)]
pub(crate) struct Each<I>(I);

#[cfg(feature = "meter")]
impl<I: Iterator> Iterator for Each<I> {
    type Item = I::Item;

    #[inline(always)]
    fn next(&mut self) -> Option<I::Item> {
        step(1);
        self.0.next()
    }

    #[inline(always)]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}
