//! The directions inside an item of a region, and their order in memory.

use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::ser::SerializeTuple;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A direction inside an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Axis {
    /// The layers of the region.
    Layer,
    /// The parts of a layer: keys before values.
    Part,
    /// The tokens of a page.
    Token,
    /// The heads of this rank, in the order of the model.
    Head,
    /// The elements of a head (`head_dim`), in packs of [`Axes::pack`] neighbours.
    Dim,
}

/// The order of the axes inside an item, outermost first.
///
/// The elements of a head lie innermost in most caches ([`NHD`], [`HND`]). Where they do not, the
/// item ends with a *pack*: some neighbouring elements of one token and one head.
///
/// ```
/// use kv_core::layout::{Axes, Axis, HDN, HND};
///
/// // The paged cache of vllm.rs and candle-vllm: keys [blocks, heads, head_dim / 8, block, 8],
/// // and values [blocks, heads, head_dim, block].
/// let (keys, values) = (HDN.packed(8), HDN);
/// assert_eq!(keys.order(), [Axis::Layer, Axis::Part, Axis::Head, Axis::Dim, Axis::Token]);
/// assert_eq!((keys.pack(), values.pack()), (8, 1));
/// // Elements that lie innermost are together in any case.
/// assert_eq!(HND.packed(8), HND);
/// assert_eq!(Axes::new([Axis::Layer, Axis::Part, Axis::Head, Axis::Token]), HND);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Axes {
    order: [Axis; 5],
    /// 1 if the elements lie innermost.
    pack: u32,
}

impl Axes {
    /// These axes, with the elements of a head innermost.
    pub const fn new(order: [Axis; 4]) -> Axes {
        let [first, second, third, fourth] = order;
        Axes { order: [first, second, third, fourth, Axis::Dim], pack: 1 }
    }

    /// These axes, with the elements of a head at any place among them.
    pub const fn with_dim(order: [Axis; 5]) -> Axes {
        Axes { order, pack: 1 }
    }

    /// The same order, in which `elements` neighbouring elements of a head lie together, innermost.
    pub const fn packed(mut self, elements: u32) -> Axes {
        self.pack = if self.dim_is_innermost() { 1 } else { elements };
        self
    }

    /// The axes, outermost first. Within [`Axis::Dim`], the packs are meant.
    pub const fn order(self) -> [Axis; 5] {
        self.order
    }

    /// How many neighbouring elements of a head lie together; 1 where all of them do.
    pub const fn pack(self) -> u32 {
        self.pack
    }

    /// True if all elements of a head lie together.
    pub const fn dim_is_innermost(self) -> bool {
        matches!(self.order, [.., Axis::Dim])
    }

    /// True if every axis is named once.
    pub(crate) fn is_complete(self) -> bool {
        let mut order = self.order;
        order.sort_unstable();
        order.windows(2).all(|pair| pair[0] != pair[1])
    }
}

/// Token-major pages (`NHD`): layers, then keys before values, then tokens, then heads.
pub const NHD: Axes = Axes::new([Axis::Layer, Axis::Part, Axis::Token, Axis::Head]);
/// Head-major pages (`HND`): layers, then keys before values, then heads, then tokens.
pub const HND: Axes = Axes::new([Axis::Layer, Axis::Part, Axis::Head, Axis::Token]);
/// Head-major pages with key and value of a token side by side, as vLLM packs them.
pub const HND_PACKED: Axes = Axes::new([Axis::Layer, Axis::Head, Axis::Token, Axis::Part]);
/// Token-major pages with key and value of a head side by side.
pub const NHD_PACKED: Axes = Axes::new([Axis::Layer, Axis::Token, Axis::Head, Axis::Part]);
/// Pages with the tokens inside the elements of a head: the values of a paged cache as they are, and
/// with [`packed`](Axes::packed) the keys.
pub const HDN: Axes = Axes::with_dim([Axis::Layer, Axis::Part, Axis::Head, Axis::Dim, Axis::Token]);

impl fmt::Display for Axes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = if self.dim_is_innermost() { &self.order[..4] } else { &self.order[..] };
        for (place, axis) in shown.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            write!(out, "{comma}{axis:?}")?;
        }
        if self.dim_is_innermost() { Ok(()) } else { write!(out, ", packed {}", self.pack) }
    }
}

impl fmt::Debug for Axes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "[{self}]")
    }
}

/// The four axes if the elements lie innermost. Otherwise all five and the pack, a list that older
/// versions refuse.
impl Serialize for Axes {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let innermost = self.dim_is_innermost();
        let shown = if innermost { &self.order[..4] } else { &self.order[..] };
        let mut list = out.serialize_tuple(if innermost { 4 } else { 6 })?;
        for axis in shown {
            list.serialize_element(axis)?;
        }
        if !innermost {
            list.serialize_element(&self.pack)?;
        }
        list.end()
    }
}

impl<'de> Deserialize<'de> for Axes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Axes, D::Error> {
        from.deserialize_seq(AxesVisitor)
    }
}

struct AxesVisitor;

impl<'de> Visitor<'de> for AxesVisitor {
    type Value = Axes;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("four axes, or five axes and the elements of a pack")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Axes, A::Error> {
        let mut order = [Axis::Dim; 5];
        let mut count = 0;
        while count < order.len() {
            match list.next_element()? {
                Some(axis) => order[count] = axis,
                None if count == 4 => return Ok(Axes { order, pack: 1 }),
                None => return Err(A::Error::invalid_length(count, &self)),
            }
            count += 1;
        }
        let pack = list.next_element()?.ok_or_else(|| A::Error::invalid_length(count, &self))?;
        match list.next_element::<serde::de::IgnoredAny>()? {
            None => Ok(Axes { order, pack: 1 }.packed(pack)),
            Some(_) => Err(A::Error::invalid_length(count + 2, &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_with_innermost_elements_are_the_four_names_of_older_versions() {
        assert_eq!(serde_json::to_string(&HND).unwrap(), r#"["Layer","Part","Head","Token"]"#);
        assert_eq!(rmp_serde::to_vec(&NHD).unwrap(), rmp_serde::to_vec(&NHD.order()[..4]).unwrap());
        let paged = rmp_serde::to_vec(&HDN.packed(8)).unwrap();
        assert!(rmp_serde::from_slice::<[Axis; 4]>(&paged).is_err());
        for axes in [NHD, HND_PACKED, HDN, HDN.packed(8)] {
            let bytes = rmp_serde::to_vec_named(&axes).unwrap();
            assert_eq!(rmp_serde::from_slice::<Axes>(&bytes).unwrap(), axes);
        }
    }

    #[test]
    fn lists_of_any_other_length_are_not_axes() {
        let axis = r#""Head""#;
        for count in [0, 1, 3, 5, 6, 7] {
            let list = vec![axis; count].join(",");
            assert!(serde_json::from_str::<Axes>(&format!("[{list}]")).is_err(), "{count}");
        }
        assert!(serde_json::from_str::<Axes>(r#"["Layer","Part","Head","Dim","Token",8,1]"#).is_err());
        assert!(!Axes::new([Axis::Head; 4]).is_complete() && HDN.is_complete() && NHD.is_complete());
    }

    #[test]
    fn axes_are_shown_without_elements_that_lie_innermost() {
        assert_eq!(
            format!("{NHD:?} {HDN}"),
            "[Layer, Part, Token, Head] Layer, Part, Head, Dim, Token, packed 1"
        );
    }
}
