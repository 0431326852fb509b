//! What can be wrong with transfer parameters.

use std::fmt;

use kv_core::{IdError, PagesError};
use serde_json::Value;

/// Longest rendering of a refused value in an error, in characters.
const SHOWN: usize = 64;

/// Parameters that were refused. They come through clients and routers: answer the request with an
/// error, or compute it without a transfer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParamsError {
    /// The text is too long to be looked at.
    #[error("transfer parameters of {got} bytes; at most {max} are allowed")]
    TooLong {
        /// Its length.
        got: usize,
        /// The bound.
        max: usize,
    },
    /// The text is no JSON.
    #[error("transfer parameters are no JSON: error in line {line}, column {column}")]
    NotJson {
        /// Line of the first error, from 1.
        line: usize,
        /// Column of it.
        column: usize,
    },
    /// A field that this direction needs is absent, or null.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A value of another type.
    #[error("{field} must be {expected}, and is {got}")]
    Type {
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        got: Shown,
    },
    /// A number out of range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        got: Shown,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// A list, text or object with too many elements, bytes or keys.
    #[error("{field} has {got} elements; at most {max} are allowed")]
    TooMany {
        /// The field.
        field: &'static str,
        /// How many it has.
        got: usize,
        /// The bound.
        max: usize,
    },
    /// Two fields that contradict each other.
    #[error("{field} is {got}, but {other} says {expected}")]
    Conflict {
        /// The field.
        field: &'static str,
        /// Its value.
        got: Shown,
        /// The field that it must agree with.
        other: &'static str,
        /// What that says.
        expected: Shown,
    },
    /// An engine or request id that is none.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A list of pages that is none.
    #[error(transparent)]
    Pages(#[from] PagesError),
}

/// A refused value as JSON, cut off after 64 characters.
#[derive(Clone, PartialEq, Eq)]
pub struct Shown(String);

impl Shown {
    /// What the value looks like.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&Value> for Shown {
    fn from(value: &Value) -> Shown {
        Shown(match value {
            // Not rendered: they may be as large as a request may be.
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
