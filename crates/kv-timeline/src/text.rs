//! Texts of bounded length: what a worker or a peer says about a failure.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

/// The longest text that a record keeps, in bytes. The rest is cut off.
pub const MAX_TEXT: usize = 512;

/// A text of at most [`MAX_TEXT`] bytes. A longer one is cut, also where a record is read.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Text(Box<str>);

impl Text {
    /// The beginning of this text.
    pub fn new(text: impl fmt::Display) -> Text {
        Text::from(text.to_string())
    }

    /// The text, at most [`MAX_TEXT`] bytes.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Text {
    fn from(mut text: String) -> Text {
        let end = (0..=MAX_TEXT.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        Text(text.into())
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Text, D::Error> {
        String::deserialize(from).map(Text::from)
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}
