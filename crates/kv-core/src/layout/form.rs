//! What one region says of itself where it differs from the rest of the cache.

use serde::{Deserialize, Serialize};

use super::axes::Axes;
use super::shape::Holds;

/// Most different ranges of elements of a head that the regions of one cache may hold.
pub const MAX_ELEMENT_RANGES: usize = 8;

/// What a region says of itself where it differs from the rest of the cache. The default: nothing.
///
/// Engines need this whose keys and values have different axes, whose layers differ in heads or head
/// size, or who keep a latent in two tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Form {
    /// The order of the axes in the region's items; `None` for [`Layout::axes`](super::Layout::axes).
    pub axes: Option<Axes>,
    /// The heads that this rank holds of the region's layers, and the heads that the model has there;
    /// `None` for the heads of the [`Geometry`](super::Geometry) or of the cache group.
    pub heads: Option<(u32, u32)>,
    /// The elements of a whole head in the region's layers; `None` for
    /// [`Geometry::head_dim`](super::Geometry::head_dim).
    pub head_dim: Option<u32>,
    /// The elements of each head that the region holds, first and one past the last; `None` for all.
    pub elements: Option<(u32, u32)>,
}

impl Form {
    /// True if the region does not differ from the rest of the cache.
    pub fn is_plain(&self) -> bool {
        *self == Form::default()
    }
}

/// [`Holds`] and [`Form`] in one value, as they travel. A region with a form of its own is one that
/// older versions do not know: they refuse the geometry, instead of overlooking the form.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) enum Content {
    #[default]
    Opaque,
    Key,
    Value,
    KeyValue,
    Latent,
    Index,
    State(u8),
    Formed(Holds, Option<Axes>, Option<(u32, u32)>, Option<u32>, Option<(u32, u32)>),
}

impl From<(Holds, Form)> for Content {
    fn from((holds, form): (Holds, Form)) -> Content {
        let Form { axes, heads, head_dim, elements } = form;
        match holds {
            _ if !form.is_plain() => Content::Formed(holds, axes, heads, head_dim, elements),
            Holds::Opaque => Content::Opaque,
            Holds::Key => Content::Key,
            Holds::Value => Content::Value,
            Holds::KeyValue => Content::KeyValue,
            Holds::Latent => Content::Latent,
            Holds::Index => Content::Index,
            Holds::State(number) => Content::State(number),
        }
    }
}

impl From<Content> for (Holds, Form) {
    fn from(content: Content) -> (Holds, Form) {
        let holds = match content {
            Content::Formed(holds, axes, heads, head_dim, elements) => {
                return (holds, Form { axes, heads, head_dim, elements });
            }
            Content::Opaque => Holds::Opaque,
            Content::Key => Holds::Key,
            Content::Value => Holds::Value,
            Content::KeyValue => Holds::KeyValue,
            Content::Latent => Holds::Latent,
            Content::Index => Holds::Index,
            Content::State(number) => Holds::State(number),
        };
        (holds, Form::default())
    }
}
