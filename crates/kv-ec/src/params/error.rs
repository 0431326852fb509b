//! Why transfer parameters are not accepted: which item, which field, and what is wrong with its value.

use std::fmt;

use kv_core::ContentHash;
use serde_json::Value;

/// Transfer parameters that were refused. They come through clients and routers: a consumer encodes the item
/// itself, or answers the request with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EcParamsError {
    /// The item that the field belongs to; `None` for the parameters as a whole.
    pub item: Option<ContentHash>,
    /// The JSON key; `ec_transfer_params` for the parameters as a whole, `value` for an item as a whole,
    /// `unknown` for the keys that this module does not know.
    pub field: &'static str,
    /// What is wrong with the value.
    pub problem: Problem,
}

/// What is wrong with a field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The field is absent or null.
    #[error("is missing or null")]
    Missing,
    /// The text is no JSON.
    #[error("is not JSON: the first error is at line {line}, column {column}")]
    NotJson {
        /// The line of the first error; the first line is 1.
        line: usize,
        /// The column of the first error in its line.
        column: usize,
    },
    /// The value has another type.
    #[error("is {got}, and must be {expected}")]
    Type {
        /// The value, cut off after 64 characters.
        got: String,
        /// The type, as a phrase.
        expected: &'static str,
    },
    /// The number is too small or too large.
    #[error("is {got}, and must be {min} to {max}")]
    Range {
        /// The number, as the JSON has it.
        got: String,
        /// Smallest number that is allowed.
        min: u64,
        /// Largest number that is allowed.
        max: u64,
    },
    /// The text, list or object is too long.
    #[error("has a length of {got}, and may have {max} at most")]
    TooLong {
        /// The length: bytes of a text, elements of a list, keys of an object.
        got: usize,
        /// The greatest length allowed.
        max: usize,
    },
    /// The value differs from the value that the consumer expects.
    #[error("is {got}, and {expected} is expected")]
    Conflict {
        /// The value that the JSON has.
        got: u64,
        /// The value that the consumer expects.
        expected: u64,
    },
    /// The key of an item is no content hash.
    #[error("has a key that is no content hash: {0}")]
    Hash(#[from] kv_core::IdError),
}

impl EcParamsError {
    /// The problem of a field, of no item yet.
    pub(super) fn of(field: &'static str, problem: Problem) -> EcParamsError {
        EcParamsError { item: None, field, problem }
    }

    /// The same error in the field of this item.
    pub(super) fn in_item(self, hash: &ContentHash) -> EcParamsError {
        EcParamsError { item: Some(hash.clone()), ..self }
    }
}

impl Problem {
    /// A value of another type than expected.
    pub(super) fn mistyped(expected: &'static str, got: &Value) -> Problem {
        Problem::Type { got: shown(got), expected }
    }
}

/// A value in at most 64 characters of JSON. Lists and objects are not printed, because they may be large.
pub(super) fn shown(value: &Value) -> String {
    const MOST: usize = 64;
    match value {
        Value::Array(list) => format!("a list of length {}", list.len()),
        Value::Object(map) => format!("an object of {} keys", map.len()),
        Value::String(text) if text.len() > MOST => {
            format!("{:?}…", text.chars().take(MOST).collect::<String>())
        }
        short => short.to_string(),
    }
}

impl fmt::Display for EcParamsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(hash) = &self.item {
            write!(f, "item {hash}: ")?;
        }
        write!(f, "{} {}", self.field, self.problem)
    }
}

impl std::error::Error for EcParamsError {}
