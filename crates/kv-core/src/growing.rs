//! Reading lists that grow as their items come: memory is never allocated for the number of items
//! that a peer promises.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads a list, for a field's `deserialize_with`.
pub(crate) fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    up_to(from, usize::MAX)
}

/// Reads a list of at most `most` items. Reading stops after that, so that a list that is too long
/// costs no more than an allowed one.
pub(crate) fn up_to<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
    most: usize,
) -> Result<Vec<T>, D::Error> {
    from.deserialize_seq(List { most, items: PhantomData })
}

struct List<T> {
    most: usize,
    items: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while list.len() < self.most
            && let Some(item) = items.next_element()?
        {
            list.push(item);
        }
        Ok(list)
    }
}
