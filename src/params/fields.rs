//! The fields of a JSON object, by type. A null counts as an absent field: vLLM's routers write absent
//! fields as null. A number may also be written as a float without a fraction (`5600.0`) or as a text
//! (`"5600"`): routers that decode numbers as doubles, and routers that template JSON, write such numbers.

use serde_json::{Map, Value};

use super::error::ParamsError;

/// An object whose fields are looked up by name.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// The object that `value` must be.
    pub fn of(field: &'static str, value: &'a Value) -> Result<Fields<'a>, ParamsError> {
        value.as_object().map(Fields).ok_or_else(|| mistyped(field, "an object", value))
    }

    /// The value of a field; `None` if the field is absent or null.
    pub fn get(self, field: &'static str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    /// A boolean; false if the field is absent or null.
    pub fn flag(self, field: &'static str) -> Result<bool, ParamsError> {
        let Some(value) = self.get(field) else { return Ok(false) };
        value.as_bool().ok_or_else(|| mistyped(field, "a boolean", value))
    }

    /// A text of at most `max` bytes.
    pub fn text(self, field: &'static str, max: usize) -> Result<Option<&'a str>, ParamsError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let text = value.as_str().ok_or_else(|| mistyped(field, "a text", value))?;
        bounded(field, text.len(), max)?;
        Ok(Some(text))
    }

    /// A whole number from `min` to `max`.
    pub fn number(self, field: &'static str, min: u64, max: u64) -> Result<Option<u64>, ParamsError> {
        self.get(field).map(|value| number(field, value, min, max)).transpose()
    }

    /// A whole number from `min` to `max` that fits 32 bits.
    pub fn small(self, field: &'static str, min: u32, max: u32) -> Result<Option<u32>, ParamsError> {
        let number = self.number(field, u64::from(min), u64::from(max))?;
        Ok(number.map(|number| u32::try_from(number).unwrap_or(max)))
    }

    /// A number with or without a fraction.
    pub fn real(self, field: &'static str) -> Result<Option<f64>, ParamsError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        real(value).map(Some).ok_or_else(|| mistyped(field, "a number", value))
    }

    /// A list of at most `max` elements.
    pub fn list(self, field: &'static str, max: usize) -> Result<Option<&'a [Value]>, ParamsError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| mistyped(field, "a list", value))?;
        bounded(field, list.len(), max)?;
        Ok(Some(list))
    }

    /// 64 bits as a text of hexadecimal digits: a router in JavaScript would round them as a number.
    pub fn bits(self, field: &'static str) -> Result<Option<u64>, ParamsError> {
        let Some(text) = self.text(field, usize::MAX)? else { return Ok(None) };
        let hex = text.len() <= 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let bits = if hex { u64::from_str_radix(text, 16).ok() } else { None };
        let refused =
            || ParamsError::Type { field, expected: "1 to 16 hexadecimal digits", got: text.into() };
        bits.map(Some).ok_or_else(refused)
    }
}

/// The value of a field that must be there.
pub(super) fn required<T>(field: &'static str, value: Option<T>) -> Result<T, ParamsError> {
    value.ok_or(ParamsError::Missing { field })
}

/// The whole number that `value` must be.
pub(super) fn number(field: &'static str, value: &Value, min: u64, max: u64) -> Result<u64, ParamsError> {
    let whole = whole(value).ok_or_else(|| mistyped(field, "a whole number", value))?;
    let in_range = u64::try_from(whole).ok().filter(|number| (min..=max).contains(number));
    in_range.ok_or_else(|| ParamsError::Range { field, got: value.into(), min, max })
}

/// The whole number of a JSON number, of a float without a fraction, or of a text of decimal digits. A float
/// of 2^53 or more may have been rounded, and is no whole number.
fn whole(value: &Value) -> Option<i128> {
    const EXACT: f64 = (1u64 << 53) as f64;
    match value {
        Value::String(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => digits.parse().ok(),
        Value::Number(number) => {
            let integer = number.as_u64().map(i128::from).or(number.as_i64().map(i128::from));
            let float = || number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() < EXACT);
            integer.or_else(|| float().map(|float| float as i128))
        }
        _ => None,
    }
}

/// The number that `value` is, or that its text says. Texts that Rust reads as numbers and JSON does not
/// ("inf", "nan", "+1") are none.
pub(super) fn real(value: &Value) -> Option<f64> {
    let Some(text) = value.as_str() else { return value.as_f64() };
    let digits = text.starts_with(|first: char| first.is_ascii_digit());
    text.parse().ok().filter(|number: &f64| digits && number.is_finite())
}

/// Refuses a field with more than `max` elements, bytes or keys.
pub(super) fn bounded(field: &'static str, got: usize, max: usize) -> Result<(), ParamsError> {
    if got > max { Err(ParamsError::TooMany { field, got, max }) } else { Ok(()) }
}

pub(super) fn mistyped(field: &'static str, expected: &'static str, got: &Value) -> ParamsError {
    ParamsError::Type { field, expected, got: got.into() }
}
