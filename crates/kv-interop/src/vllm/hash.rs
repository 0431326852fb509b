//! vLLM's compatibility hash: what two engines compare before they decode anything else.

use std::collections::BTreeMap;

use kv_core::{Mismatch, TransferMode};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The version of vLLM's NIXL connector that this crate speaks.
pub const NIXL_CONNECTOR_VERSION: u32 = 15;

/// What a worker shows to vLLM engines as its hash, and what the worker expects of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compatibility {
    /// The hash of these factors and of the session's transfer mode.
    Factors(Box<Factors>),
    /// This hash, as the engines of the fleet log it when they start (`NIXL compatibility hash: …`). Engines in pull
    /// mode have another hash than engines in push mode.
    Hash(String),
    /// No comparison. The vLLM engines must run with `enforce_handshake_compat=false`, too.
    Unchecked,
}

/// Everything over which vLLM computes the hash, with vLLM's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Factors {
    /// The version of vLLM, such as `0.33.0`.
    pub vllm_version: String,
    /// The version of vLLM's connector; [`NIXL_CONNECTOR_VERSION`] is the one that this crate speaks.
    pub nixl_connector_version: u32,
    /// The model, as it was named to vLLM.
    pub model: String,
    /// The type of the weights, such as `torch.bfloat16`.
    pub dtype: String,
    /// KV heads of the model, on all ranks together.
    pub num_kv_heads: u32,
    /// Elements of a head.
    pub head_size: u32,
    /// Layers of the model, on all ranks together.
    pub num_hidden_layers: u32,
    /// The attention backend, such as `FLASH_ATTN`.
    pub attn_backend_name: String,
    /// The type of the cache, as configured: `auto` or a name such as `fp8`.
    pub cache_dtype: String,
    /// Whether vLLM's manager of hybrid caches is on.
    pub is_hma_enabled: bool,
    /// What vLLM computes of a draft model; null without one.
    pub speculative_config: Value,
}

impl Compatibility {
    /// The hash for this transfer mode; empty if nothing is compared.
    pub fn shown(&self, mode: TransferMode) -> String {
        match self {
            Compatibility::Factors(factors) => factors.hash(mode),
            Compatibility::Hash(hash) => hash.clone(),
            Compatibility::Unchecked => String::new(),
        }
    }

    /// The name of the attention backend that is shown beside the hash.
    pub(crate) fn attn_backend_name(&self) -> &str {
        match self {
            Compatibility::Factors(factors) => &factors.attn_backend_name,
            _ => "FLASH_ATTN",
        }
    }

    /// Compares a peer's hash with the own one.
    pub(crate) fn check(&self, mode: TransferMode, theirs: &str) -> Result<(), Mismatch> {
        let ours = self.shown(mode);
        if *self == Compatibility::Unchecked || ours == theirs {
            return Ok(());
        }
        Err(Mismatch { field: "compatibility_hash".to_owned(), ours, theirs: theirs.to_owned() })
    }
}

impl Factors {
    /// The SHA-256 of the factors as Python writes them in JSON with sorted keys, in hexadecimal digits.
    pub fn hash(&self, mode: TransferMode) -> String {
        let factors: BTreeMap<&str, Value> = BTreeMap::from([
            ("vllm_version", self.vllm_version.as_str().into()),
            ("nixl_connector_version", self.nixl_connector_version.into()),
            ("model", self.model.as_str().into()),
            ("dtype", self.dtype.as_str().into()),
            ("num_kv_heads", self.num_kv_heads.into()),
            ("head_size", self.head_size.into()),
            ("num_hidden_layers", self.num_hidden_layers.into()),
            ("attn_backend_name", self.attn_backend_name.as_str().into()),
            ("cache_dtype", self.cache_dtype.as_str().into()),
            ("is_hma_enabled", self.is_hma_enabled.into()),
            ("speculative_config", self.speculative_config.clone()),
            ("transfer_mode", mode.to_string().into()),
        ]);
        let mut text = String::new();
        write_object(factors.iter().map(|(key, value)| (*key, value)), &mut text);
        Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Writes a value as Python's `json.dumps(value, sort_keys=True)` does.
fn write_json(value: &Value, out: &mut String) {
    match value {
        Value::String(text) => write_text(text, out),
        Value::Array(items) => {
            out.push('[');
            for (number, item) in items.iter().enumerate() {
                out.push_str(if number > 0 { ", " } else { "" });
                write_json(item, out);
            }
            out.push(']');
        }
        Value::Object(fields) => {
            let sorted: BTreeMap<&str, &Value> =
                fields.iter().map(|(key, value)| (key.as_str(), value)).collect();
            write_object(sorted.into_iter(), out);
        }
        other => out.push_str(&other.to_string()),
    }
}

fn write_object<'a>(fields: impl Iterator<Item = (&'a str, &'a Value)>, out: &mut String) {
    out.push('{');
    for (number, (key, value)) in fields.enumerate() {
        out.push_str(if number > 0 { ", " } else { "" });
        write_text(key, out);
        out.push_str(": ");
        write_json(value, out);
    }
    out.push('}');
}

/// A text as Python writes it: everything but ASCII as the escapes of its UTF-16 units.
fn write_text(text: &str, out: &mut String) {
    out.push('"');
    for unit in text.encode_utf16() {
        match unit {
            0x22 => out.push_str("\\\""),
            0x5c => out.push_str("\\\\"),
            0x08 => out.push_str("\\b"),
            0x09 => out.push_str("\\t"),
            0x0a => out.push_str("\\n"),
            0x0c => out.push_str("\\f"),
            0x0d => out.push_str("\\r"),
            0x20..0x7f => out.extend(char::from_u32(unit.into())),
            other => out.push_str(&format!("\\u{other:04x}")),
        }
    }
    out.push('"');
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    pub(crate) fn factors() -> Factors {
        Factors {
            vllm_version: "0.33.0".to_owned(),
            nixl_connector_version: NIXL_CONNECTOR_VERSION,
            model: "fake/model".to_owned(),
            dtype: "torch.bfloat16".to_owned(),
            num_kv_heads: 1,
            head_size: 8,
            num_hidden_layers: 2,
            attn_backend_name: "FLASH_ATTN".to_owned(),
            cache_dtype: "auto".to_owned(),
            is_hma_enabled: true,
            speculative_config: Value::Null,
        }
    }

    #[test]
    fn the_hash_is_the_one_that_vllm_computes_for_the_same_factors() {
        let pull = factors().hash(TransferMode::Pull);
        assert_eq!(pull, "32e6d192ca7a0a43ffaf9b816b08feba2970628f0ff4497e5db8a88e834966c6");
        assert_ne!(factors().hash(TransferMode::Push), pull);
    }

    #[test]
    fn json_has_pythons_separators_order_and_escapes() {
        let mut text = String::new();
        write_json(&json!({"b": [1, null, true], "a": {"z": "é\n\"😀\u{7f}", "y": []}}), &mut text);
        assert_eq!(
            text,
            "{\"a\": {\"y\": [], \"z\": \"\\u00e9\\n\\\"\\ud83d\\ude00\\u007f\"}, \"b\": [1, null, true]}"
        );
    }

    #[test]
    fn another_hash_is_refused_with_both_and_an_unchecked_one_is_not() {
        let ours = Compatibility::Factors(Box::new(factors()));
        let hash = ours.shown(TransferMode::Pull);
        assert_eq!(ours.check(TransferMode::Pull, &hash), Ok(()));
        let refused = ours.check(TransferMode::Push, &hash).unwrap_err();
        assert_eq!((refused.field.as_str(), refused.theirs), ("compatibility_hash", hash.clone()));
        assert_eq!(Compatibility::Hash(hash.clone()).check(TransferMode::Push, &hash), Ok(()));
        assert_eq!(Compatibility::Unchecked.check(TransferMode::Push, &hash), Ok(()));
    }
}
