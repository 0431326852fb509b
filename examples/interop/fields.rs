//! Fields of the JSON that the two sides of a pair give each other.

use serde_json::Value;

use crate::error::PairError;

impl PairError {
    /// A key is missing, or has another type.
    pub fn json(what: &'static str, field: &'static str, json: &Value) -> PairError {
        let json = json.to_string().chars().take(300).collect();
        PairError::Json { what, field, json }
    }
}

/// A text.
pub fn text<'a>(what: &'static str, json: &'a Value, field: &'static str) -> Result<&'a str, PairError> {
    json.get(field).and_then(Value::as_str).ok_or_else(|| PairError::json(what, field, json))
}

/// A number from 0.
pub fn number(what: &'static str, json: &Value, field: &'static str) -> Result<usize, PairError> {
    let number = json.get(field).and_then(Value::as_u64);
    number.map(|number| number as usize).ok_or_else(|| PairError::json(what, field, json))
}

/// A list.
pub fn list<'a>(what: &'static str, json: &'a Value, field: &'static str) -> Result<&'a [Value], PairError> {
    let list = json.get(field).and_then(Value::as_array);
    list.map(Vec::as_slice).ok_or_else(|| PairError::json(what, field, json))
}

/// A list of block numbers; none if the key is missing.
pub fn blocks(what: &'static str, json: &Value, field: &'static str) -> Result<Vec<u32>, PairError> {
    let Some(list) = json.get(field).filter(|list| !list.is_null()) else { return Ok(Vec::new()) };
    serde_json::from_value(list.clone()).map_err(|_| PairError::json(what, field, json))
}
