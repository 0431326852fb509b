//! The errors of transfer parameters: what is wrong with which field.

use std::fmt;

use kv_core::{IdError, PagesError};
use serde_json::Value;

/// Longest text of a refused value in an error, in characters.
const SHOWN: usize = 64;

/// Transfer parameters that were refused. Parameters come through clients and routers, so a server answers
/// such a request with an error, or computes the prompt without a transfer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParamsError {
    /// The JSON text is longer than [`MAX_PARAMS_BYTES`](super::MAX_PARAMS_BYTES), and was not parsed.
    #[error("transfer parameters have {got} bytes; at most {max} are allowed")]
    TooLong {
        /// Length of the text, in bytes.
        got: usize,
        /// Longest text allowed, in bytes.
        max: usize,
    },
    /// The text is not valid JSON.
    #[error("transfer parameters are not valid JSON: the first error is in line {line}, column {column}")]
    NotJson {
        /// Line of the first error, from 1.
        line: usize,
        /// Column of the first error, from 1.
        column: usize,
    },
    /// A field that this direction needs is absent, or null.
    #[error("{field} is missing or null; parameters in this direction must have it")]
    Missing {
        /// Name of the JSON key.
        field: &'static str,
    },
    /// A value has the wrong JSON type, or is not one of the words allowed.
    #[error("{field} must be {expected}, and is {got}")]
    Type {
        /// Name of the JSON key.
        field: &'static str,
        /// The type or the words allowed, as a phrase: "a list", "push, pull or auto".
        expected: &'static str,
        /// The value that the JSON has.
        got: Shown,
    },
    /// A number is out of its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// Name of the JSON key.
        field: &'static str,
        /// The value that the JSON has.
        got: Shown,
        /// Smallest value that is allowed.
        min: u64,
        /// Largest value that is allowed.
        max: u64,
    },
    /// A list, text or object has too many elements, bytes or keys.
    #[error("{field} has {got} elements; at most {max} are allowed")]
    TooMany {
        /// Name of the JSON key.
        field: &'static str,
        /// Elements of the list, bytes of the text, or keys of the object.
        got: usize,
        /// Most elements, bytes or keys allowed.
        max: usize,
    },
    /// Two fields contradict each other.
    #[error("{field} is {got}, but {other} says {expected}")]
    Conflict {
        /// Name of the JSON key that was refused.
        field: &'static str,
        /// The value of `field`.
        got: Shown,
        /// The field that `field` must agree with.
        other: &'static str,
        /// The value that `other` has, or asks for.
        expected: Shown,
    },
    /// A text is not a valid engine id or request id.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A list in `remote_block_ids` is not a valid list of pages.
    #[error(transparent)]
    Pages(#[from] PagesError),
}

/// A refused value as JSON, cut off after 64 characters.
#[derive(Clone, PartialEq, Eq)]
pub struct Shown(String);

impl Shown {
    /// The text that error messages show: JSON of at most 64 characters, or "a list of 7 elements".
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&Value> for Shown {
    fn from(value: &Value) -> Shown {
        Shown(match value {
            // Lists and objects are only counted: they may be as large as a request may be.
            Value::Array(items) => format!("a list of {} elements", items.len()),
            Value::Object(map) => format!("an object of {} keys", map.len()),
            Value::String(text) => {
                let cut: String = text.chars().take(SHOWN).collect();
                format!("{cut:?}{}", if cut.len() < text.len() { "…" } else { "" })
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {
                value.to_string().chars().take(SHOWN).collect()
            }
        })
    }
}

impl From<u64> for Shown {
    fn from(number: u64) -> Shown {
        Shown(number.to_string())
    }
}

impl From<bool> for Shown {
    fn from(flag: bool) -> Shown {
        Shown(flag.to_string())
    }
}

impl From<&str> for Shown {
    fn from(text: &str) -> Shown {
        Shown::from(&Value::from(text))
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
