//! Contents: entries of an encoder cache, which are named by a hash of what they were computed from.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::IdError;
use crate::id::{Text, has_control, text_id};

/// Longest content hash, in bytes.
pub const MAX_CONTENT_HASH: usize = 256;

text_id!(
    /// Names the content that an entry of an encoder cache was computed from, such as an image: two items with
    /// equal content have equal hashes on every worker (vLLM: `mm_hash`). The hash is a text of 1 to
    /// [`MAX_CONTENT_HASH`] bytes, which this project only compares; clones share the text.
    ContentHash, "content_hash", MAX_CONTENT_HASH
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_hashes_are_texts_of_bounded_length_and_compare_by_text() {
        let longest = "x".repeat(MAX_CONTENT_HASH);
        assert_eq!(ContentHash::new(&longest).unwrap().as_str(), longest);
        let (field, max) = ("content_hash", MAX_CONTENT_HASH);
        for text in [String::new(), longest + "x"] {
            let got = text.len();
            assert_eq!(ContentHash::new(&text), Err(IdError::Length { field, got, max }));
        }
        assert_eq!(ContentHash::new("a\nb"), Err(IdError::ControlCharacter { field }));
        let hash = ContentHash::new("3f9a").unwrap();
        assert_eq!(serde_json::to_string(&hash).unwrap(), "\"3f9a\"");
        assert_eq!(serde_json::from_str::<ContentHash>("\"3f9a\"").unwrap(), hash);
        assert!(ContentHash::new("3f99").unwrap() < hash);
    }
}
