//! Why tensors cannot be regions.

/// Why tensors cannot be the KV cache of a worker. The field names the tensor: `caches[3].0` are the keys of layer 3,
/// `caches[3].1` its values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CandleError {
    /// There are no layers.
    #[error("caches has 0 layers; it must have 1 to {max}")]
    Layers {
        /// Most layers.
        max: usize,
    },
    /// A tensor has another number of dimensions than `[blocks, block, heads, head_dim]`, or one of them is zero or
    /// more than 2³² - 1.
    #[error("{field} has the shape {got:?}; it must have four dimensions, each from 1 to 4294967295")]
    Shape {
        /// The name of the tensor.
        field: String,
        /// The shape of the tensor.
        got: Vec<usize>,
    },
    /// A tensor differs from the first one in its shape, its element type or its device.
    #[error("the {what} of {field} is {got}, and that of caches[0].0 is {first}")]
    Differs {
        /// What differs: `shape`, `dtype` or `device`.
        what: &'static str,
        /// The name of the tensor.
        field: String,
        /// The value of the tensor.
        got: String,
        /// The value of the first tensor.
        first: String,
    },
    /// A tensor is a view whose elements do not lie one after the other. Make the cache contiguous when it is made:
    /// a copy would be another cache.
    #[error("{field} is not contiguous: shape {shape:?}, strides {strides:?}")]
    NotContiguous {
        /// The name of the tensor.
        field: String,
        /// The shape of the tensor.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<usize>,
    },
    /// A tensor ends beyond its storage.
    #[error("{field} ends at element {end} of a storage of {len}")]
    Bounds {
        /// The name of the tensor.
        field: String,
        /// The element after the tensor's last.
        end: usize,
        /// Elements of the storage.
        len: usize,
    },
    /// The elements of this type are no whole bytes.
    #[error("the dtype of {field} is {dtype}, whose elements are no whole bytes")]
    DType {
        /// The name of the tensor.
        field: String,
        /// The element type of the tensor.
        dtype: &'static str,
    },
    /// The tensor is on another kind of device. [`KvTensors::placed`](crate::KvTensors::placed) takes the address of a
    /// tensor on any device.
    #[error("{field} is on {device}, and not on {wanted}")]
    Device {
        /// The name of the tensor.
        field: String,
        /// The device of the tensor.
        device: String,
        /// The kind of device on which this function finds tensors.
        wanted: &'static str,
    },
}
