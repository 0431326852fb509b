//! Transfer parameters from JSON. Every bound is checked before anything is copied.

use kv_core::ContentHash;
use serde_json::{Map, Value};

use super::error::{EcParamsError, Problem, shown};
use super::{EcTransferParams, Held, Item, MAX_EXTRA_KEYS, MAX_INDICES, MAX_ITEMS, MAX_PARAMS_BYTES};

/// The name of the parameters as a whole.
const WHOLE: &str = "ec_transfer_params";
/// The name of the value of an item's key.
const VALUE: &str = "value";
const KNOWN: [&str; 7] =
    ["modality", "item_indices", "metadata", "peer_host", "peer_port", "size_bytes", "shape"];
/// Longest `modality`, in bytes.
const MAX_MODALITY: usize = 64;
/// Longest `peer_host`, in bytes: that of a domain name.
const MAX_HOST: usize = 255;

impl EcTransferParams {
    /// Reads the text of one JSON object of at most [`MAX_PARAMS_BYTES`] bytes.
    pub fn parse(text: &str) -> Result<EcTransferParams, EcParamsError> {
        at_most(WHOLE, text.len(), MAX_PARAMS_BYTES)?;
        match serde_json::from_str(text) {
            Ok(value) => EcTransferParams::from_value(&value),
            Err(error) => {
                let (line, column) = (error.line(), error.column());
                Err(EcParamsError::of(WHOLE, Problem::NotJson { line, column }))
            }
        }
    }

    /// Reads the parameters from JSON that is parsed already. A null counts as parameters without items.
    pub fn from_value(value: &Value) -> Result<EcTransferParams, EcParamsError> {
        if value.is_null() {
            return Ok(EcTransferParams::default());
        }
        let map = object(WHOLE, value)?;
        at_most(WHOLE, map.len(), MAX_ITEMS)?;
        let item = |(hash, value): (&String, &Value)| {
            let hash = ContentHash::new(hash).map_err(|error| EcParamsError::of(WHOLE, error.into()))?;
            let item = Item::from_value(value).map_err(|error| error.in_item(&hash))?;
            Ok((hash, item))
        };
        Ok(EcTransferParams { items: map.iter().map(item).collect::<Result<_, EcParamsError>>()? })
    }
}

impl Item {
    fn from_value(value: &Value) -> Result<Item, EcParamsError> {
        let map = object(VALUE, value)?;
        let get = |field: &str| map.get(field).filter(|value| !value.is_null());
        let modality = get("modality").map_or(Ok(""), |value| text("modality", value, MAX_MODALITY))?;
        let metadata = get("metadata").map(|value| object("metadata", value)).transpose()?;
        at_most("metadata", metadata.map_or(0, Map::len), MAX_EXTRA_KEYS)?;
        let unknown = || map.iter().filter(|(key, _)| !KNOWN.contains(&key.as_str()));
        at_most("unknown", unknown().count(), MAX_EXTRA_KEYS)?;
        Ok(Item {
            modality: modality.to_owned(),
            item_indices: get("item_indices").map_or_else(|| Ok(Vec::new()), indices)?,
            metadata: metadata.cloned().unwrap_or_default(),
            held: get("peer_host").map(|host| held(host, get)).transpose()?,
            unknown: unknown().map(|(key, value)| (key.clone(), value.clone())).collect(),
        })
    }
}

fn indices(value: &Value) -> Result<Vec<u32>, EcParamsError> {
    let field = "item_indices";
    let list = list(field, value)?;
    at_most(field, list.len(), MAX_INDICES)?;
    list.iter().map(|index| Ok(whole(field, index, 0, u64::from(u32::MAX))? as u32)).collect()
}

/// The fields that are all there if one of them, `peer_host`, is.
fn held<'a>(host: &Value, get: impl Fn(&str) -> Option<&'a Value>) -> Result<Held, EcParamsError> {
    let need = |field| get(field).ok_or(EcParamsError::of(field, Problem::Missing));
    let peer_host = text("peer_host", host, MAX_HOST)?;
    if peer_host.is_empty() {
        return Err(EcParamsError::of("peer_host", Problem::mistyped("the name of a host", host)));
    }
    let shape = need("shape")?;
    let [rows, width] = list("shape", shape)? else {
        return Err(EcParamsError::of("shape", Problem::mistyped("a list of rows and width", shape)));
    };
    Ok(Held {
        peer_host: peer_host.to_owned(),
        peer_port: whole("peer_port", need("peer_port")?, 1, u64::from(u16::MAX))? as u16,
        size_bytes: whole("size_bytes", need("size_bytes")?, 1, u64::MAX)?,
        rows: whole("shape[0]", rows, 1, u64::from(u32::MAX))? as u32,
        width: whole("shape[1]", width, 1, u64::from(u32::MAX))? as u32,
    })
}

/// A whole number from `min` to `max`, in any of the forms in which routers write one.
fn whole(field: &'static str, value: &Value, min: u64, max: u64) -> Result<u64, EcParamsError> {
    // A float above 2^53 may be a rounded number.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = match value {
        Value::String(digits)
            if (1..=20).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit()) =>
        {
            digits.parse().ok()
        }
        Value::Number(number) if number.is_i64() || number.is_u64() => number.as_u64(),
        other => match other.as_f64() {
            Some(real) if real.fract() == 0.0 && real.abs() <= EXACT => (real >= 0.0).then_some(real as u64),
            _ => return Err(EcParamsError::of(field, Problem::mistyped("a whole number", value))),
        },
    };
    let in_range = number.filter(|number| (min..=max).contains(number));
    in_range.ok_or_else(|| EcParamsError::of(field, Problem::Range { got: shown(value), min, max }))
}

fn object<'a>(field: &'static str, value: &'a Value) -> Result<&'a Map<String, Value>, EcParamsError> {
    value.as_object().ok_or_else(|| EcParamsError::of(field, Problem::mistyped("an object", value)))
}

fn list<'a>(field: &'static str, value: &'a Value) -> Result<&'a [Value], EcParamsError> {
    let list =
        value.as_array().ok_or_else(|| EcParamsError::of(field, Problem::mistyped("a list", value)))?;
    Ok(list)
}

fn text<'a>(field: &'static str, value: &'a Value, max: usize) -> Result<&'a str, EcParamsError> {
    let text = value.as_str().ok_or_else(|| EcParamsError::of(field, Problem::mistyped("a text", value)))?;
    at_most(field, text.len(), max)?;
    Ok(text)
}

fn at_most(field: &'static str, got: usize, max: usize) -> Result<(), EcParamsError> {
    let problem = Problem::TooLong { got, max };
    if got > max { Err(EcParamsError::of(field, problem)) } else { Ok(()) }
}
