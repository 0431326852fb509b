//! A list that most often has one item: a request has one chunk, one receiver, and one run of pages. The only item lies
//! in the list itself. A list of its own elsewhere would cost an allocation, and often a miss of the processor's caches
//! at its first use after a copy of pages.

use std::fmt;
use std::iter::Chain;
use std::ops::{Deref, DerefMut};

/// A list of any length, whose only item lies in the list itself.
#[derive(Clone)]
pub enum Few<T> {
    /// The only item.
    One(T),
    /// No item, or several, or what is left of several.
    Many(Vec<T>),
}

impl<T> Few<T> {
    /// Appends an item.
    pub fn push(&mut self, item: T) {
        match self {
            Few::Many(items) if items.capacity() == 0 => *self = Few::One(item),
            Few::Many(items) => items.push(item),
            Few::One(_) => {
                if let Few::One(first) = std::mem::take(self) {
                    *self = Few::Many(vec![first, item]);
                }
            }
        }
    }
}

impl<T> Default for Few<T> {
    fn default() -> Few<T> {
        Few::Many(Vec::new())
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match self {
            Few::One(item) => std::slice::from_ref(item),
            Few::Many(items) => items,
        }
    }
}

impl<T> DerefMut for Few<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Few::One(item) => std::slice::from_mut(item),
            Few::Many(items) => items,
        }
    }
}

impl<T> IntoIterator for Few<T> {
    type Item = T;
    type IntoIter = Chain<std::option::IntoIter<T>, std::vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        let (one, many) = match self {
            Few::One(item) => (Some(item), Vec::new()),
            Few::Many(items) => (None, items),
        };
        one.into_iter().chain(many)
    }
}

impl<T: PartialEq> PartialEq for Few<T> {
    fn eq(&self, other: &Few<T>) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Few<T> {}

impl<T: fmt::Debug> fmt::Debug for Few<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_any_length_behaves_like_a_vector_of_its_items() {
        for len in 0..5 {
            let wanted: Vec<usize> = (0..len).collect();
            let mut few = Few::default();
            wanted.iter().for_each(|item| few.push(*item));
            assert_eq!((&*few, few.len(), few.clone()), (&*wanted, len, few.clone()));
            assert_eq!(format!("{few:?}"), format!("{wanted:?}"));
            assert_eq!(few, Few::Many(wanted));
            few.iter_mut().for_each(|item| *item += 7);
            assert_eq!(few.into_iter().collect::<Vec<_>>(), (7..7 + len).collect::<Vec<_>>());
        }
    }
}
