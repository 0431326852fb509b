//! Errors in an id.

/// Why a text is not accepted as an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// The id is empty or too long.
    #[error("{field} has {got} bytes; allowed are 1 to {max}")]
    Length {
        /// The name of the field: `engine_id`, `request_id` or `content_hash`.
        field: &'static str,
        /// The length of the text in bytes.
        got: usize,
        /// The longest id allowed, in bytes.
        max: usize,
    },
    /// The id contains a control character, which would break logs and headers.
    #[error("{field} contains a control character")]
    ControlCharacter {
        /// The name of the field: `engine_id`, `request_id` or `content_hash`.
        field: &'static str,
    },
}
