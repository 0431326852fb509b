//! Named counters of what happened in one world, or in many.

use std::collections::BTreeMap;

use bytes::Bytes;

/// Makes a struct of counters, each with a name.
macro_rules! counters {
    ($(#[$top:meta])* $type:ident { $($(#[$doc:meta])* $field:ident: $label:literal,)* } $($(#[$more:meta])* $other:ident: $kind:ty,)*) => {
        $(#[$top])*
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct $type {
            $($(#[$doc])* pub $field: u64,)*
            $($(#[$more])* pub $other: $kind,)*
        }

        impl $type {
            /// Adds the counts of another world.
            pub fn merge(&mut self, other: &$type) {
                $(self.$field += other.$field;)*
                $(self.$other.merge(&other.$other);)*
            }

            /// Every count with its name, in the order of the fields.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$(($label, self.$field)),*]
            }
        }
    };
}
pub(crate) use counters;

/// Counts of events that are told apart by a name, such as the cause of a failure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    /// Counts one more event of this name.
    pub fn count(&mut self, name: String) {
        *self.0.entry(name).or_default() += 1;
    }

    /// Adds the counts of another tally to this one.
    pub fn merge(&mut self, other: &Tally) {
        for (name, count) in &other.0 {
            *self.0.entry(name.clone()).or_default() += count;
        }
    }

    /// Every name with its count, in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, count)| (&**name, *count))
    }
}

/// Counts of frames by kind, with the first frame of each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kinds(BTreeMap<Option<u8>, (Bytes, u64)>);

impl Kinds {
    /// Counts one more frame of this kind, and keeps the first frame of each kind.
    pub fn count(&mut self, kind: Option<u8>, frame: &Bytes) {
        self.0.entry(kind).or_insert_with(|| (frame.clone(), 0)).1 += 1;
    }

    /// Adds the counts of other frames to these.
    pub fn merge(&mut self, other: &Kinds) {
        for (kind, (frame, count)) in &other.0 {
            self.0.entry(*kind).or_insert_with(|| (frame.clone(), 0)).1 += count;
        }
    }

    /// The counts, each with the name of its kind: the first capitalized word of what `show` makes of the
    /// first frame of the kind.
    pub fn named(&self, show: impl Fn(&[u8]) -> String) -> Vec<(String, u64)> {
        let named = |(frame, count): &(Bytes, u64)| {
            let said = show(frame);
            let mut words = said.split(|letter: char| !letter.is_alphanumeric());
            let name = words.find(|word| word.starts_with(char::is_uppercase)).unwrap_or("other");
            (name.to_owned(), *count)
        };
        self.0.values().map(named).collect()
    }
}
