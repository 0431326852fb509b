//! Short names of an enum's variants, for labels of metrics: a fixed list, of which nothing that a peer sends is part.

/// Declares the method `name` of an enum, and the list of all names, which cannot lack one.
macro_rules! names {
    (
        $(#[$doc:meta])+
        $type:ident { $($variant:pat => $name:literal,)+ $(; $($other:pat => $its:expr,)+)? }
    ) => {
        impl $type {
            /// All values of [`name`](Self::name) that this type declares, in the order of its variants.
            pub const NAMES: &[&str] = &[$($name,)+];

            $(#[$doc])+
            pub fn name(&self) -> &'static str {
                match self {
                    $($variant => $name,)+
                    $($($other => $its,)+)?
                }
            }
        }
    };
}

pub(crate) use names;
