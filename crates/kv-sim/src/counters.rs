//! Counters with names, of one world or of many.

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

            /// Every count with its name.
            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$(($label, self.$field)),*]
            }
        }
    };
}
pub(crate) use counters;

/// Counts by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    /// One more of these.
    pub fn count(&mut self, name: String) {
        *self.0.entry(name).or_default() += 1;
    }

    /// Adds other counts.
    pub fn merge(&mut self, other: &Tally) {
        for (name, count) in &other.0 {
            *self.0.entry(name.clone()).or_default() += count;
        }
    }

    /// The counts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, count)| (&**name, *count))
    }
}

/// Counts of frames by kind, with the first frame of each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kinds(BTreeMap<Option<u8>, (Bytes, u64)>);

impl Kinds {
    /// One more frame of this kind.
    pub fn count(&mut self, kind: Option<u8>, frame: &Bytes) {
        self.0.entry(kind).or_insert_with(|| (frame.clone(), 0)).1 += 1;
    }

    /// Adds other counts.
    pub fn merge(&mut self, other: &Kinds) {
        for (kind, (frame, count)) in &other.0 {
            self.0.entry(*kind).or_insert_with(|| (frame.clone(), 0)).1 += count;
        }
    }

    /// The counts; a kind is called by the first word of what its first frame says, if `show` tells that.
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
