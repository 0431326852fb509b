//! [`Compatibility`]: everything that changes an embedding, as one hash.

use std::collections::BTreeMap;
use std::fmt;

use sha2::{Digest, Sha256};

/// Everything besides the content that an embedding depends on, such as the model and its processor's settings.
/// Two workers exchange embeddings only if their [`hash`](Compatibility::hash)es are equal.
///
/// The fields that most often differ between two deployments of one model are the settings of its processor
/// (such as the largest number of pixels) and its revision: an embedding that was computed with other settings
/// has the right shape and the wrong numbers.
///
/// ```
/// use kv_ec::Compatibility;
///
/// let ours = Compatibility::new("Qwen/Qwen2.5-VL-7B-Instruct", "bfloat16", 3584, 7168)
///     .revision("cc594898137f460bfe9f0759e9844b3ce807cfb5")
///     .processor("max_pixels", "12845056")
///     .processor("min_pixels", "3136");
/// let theirs = ours.clone().processor("max_pixels", "1003520");
/// assert_ne!(ours.hash(), theirs.hash());
/// assert_eq!(ours.hash().len(), 64);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compatibility {
    model: String,
    revision: String,
    dtype: String,
    width: u32,
    extra_widths: Vec<u32>,
    block_bytes: u32,
    processor: BTreeMap<String, String>,
    quantization: String,
    lora: String,
    big_endian: bool,
}

impl Compatibility {
    /// Embeddings of the encoder of `model`: rows of `width` elements of the type `dtype`, in blocks of
    /// `block_bytes` bytes. No revision, no settings, no quantization, no LoRA, no further widths, and the
    /// byte order of this machine.
    pub fn new(model: &str, dtype: &str, width: u32, block_bytes: u32) -> Compatibility {
        Compatibility {
            model: model.to_owned(),
            revision: String::new(),
            dtype: dtype.to_owned(),
            width,
            extra_widths: Vec::new(),
            block_bytes,
            processor: BTreeMap::new(),
            quantization: String::new(),
            lora: String::new(),
            big_endian: cfg!(target_endian = "big"),
        }
    }

    /// The revision of the model's weights: a commit, not the name of a branch.
    pub fn revision(mut self, revision: &str) -> Compatibility {
        self.revision = revision.to_owned();
        self
    }

    /// Widths, in elements, of what a row holds after the embedding itself: one for each deeper layer whose
    /// output the model adds later (DeepStack). Their order counts.
    pub fn extra_widths(mut self, widths: impl IntoIterator<Item = u32>) -> Compatibility {
        self.extra_widths = widths.into_iter().collect();
        self
    }

    /// One setting of the model's processor (vLLM: `mm_processor_kwargs`), which replaces an earlier one with
    /// the same name. The order of settings does not count.
    pub fn processor(mut self, name: &str, value: &str) -> Compatibility {
        self.processor.insert(name.to_owned(), value.to_owned());
        self
    }

    /// How the encoder's weights are quantized, such as `fp8`.
    pub fn quantization(mut self, quantization: &str) -> Compatibility {
        self.quantization = quantization.to_owned();
        self
    }

    /// The LoRA adapter of the encoder, with its revision.
    pub fn lora(mut self, adapter: &str) -> Compatibility {
        self.lora = adapter.to_owned();
        self
    }

    /// Whether the most significant byte of an element comes first.
    pub fn big_endian(mut self, big_endian: bool) -> Compatibility {
        self.big_endian = big_endian;
        self
    }

    /// The hash: SHA-256 as 64 hexadecimal digits in lower case. Hashed are `kv-ec 1` and then the names and
    /// values of all fields, each text after its length (64 bits, little-endian), so that no two different
    /// values are hashed as the same bytes.
    pub fn hash(&self) -> String {
        let mut hash = Sha256::new();
        let mut text = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        text("kv-ec 1");
        for (name, value) in self.fields() {
            text(&name);
            text(&value);
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// All fields by name. A setting of the processor has a name that no other field can have.
    fn fields(&self) -> impl Iterator<Item = (String, String)> {
        let widths: Vec<String> = self.extra_widths.iter().map(u32::to_string).collect();
        let fields = [
            ("model", self.model.clone()),
            ("revision", self.revision.clone()),
            ("dtype", self.dtype.clone()),
            ("width", self.width.to_string()),
            ("extra_widths", widths.join(",")),
            ("block_bytes", self.block_bytes.to_string()),
            ("quantization", self.quantization.clone()),
            ("lora", self.lora.clone()),
            ("big_endian", self.big_endian.to_string()),
        ];
        let settings =
            self.processor.iter().map(|(name, value)| (format!("processor.{name}"), value.clone()));
        fields.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(settings)
    }
}

/// All fields, for a log: where two hashes differ, the two lines say why.
impl fmt::Display for Compatibility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.hash())?;
        self.fields().try_for_each(|(name, value)| write!(f, " {name}={value:?}"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn ours() -> Compatibility {
        Compatibility::new("m", "bfloat16", 3584, 7168)
            .revision("r1")
            .extra_widths([3584, 12])
            .processor("max_pixels", "100")
            .processor("min_pixels", "10")
            .quantization("fp8")
            .lora("l")
            .big_endian(false)
    }

    #[test]
    fn any_field_that_changes_gives_another_hash() {
        let changed = [
            ours(),
            Compatibility { model: "n".into(), ..ours() },
            Compatibility { dtype: "float16".into(), ..ours() },
            Compatibility { width: 3585, ..ours() },
            Compatibility { block_bytes: 7169, ..ours() },
            ours().revision("r2"),
            ours().extra_widths([12, 3584]),
            ours().extra_widths([358412]),
            ours().extra_widths([]),
            ours().processor("max_pixels", "101"),
            ours().processor("fps", ""),
            ours().quantization(""),
            ours().lora("l2"),
            ours().big_endian(true),
        ];
        let hashes: BTreeSet<String> = changed.iter().map(Compatibility::hash).collect();
        assert_eq!(hashes.len(), changed.len());
    }

    #[test]
    fn the_order_of_settings_does_not_count_and_the_last_value_of_one_does() {
        let base = || Compatibility::new("m", "bfloat16", 3584, 7168);
        let forth = base().processor("a", "1").processor("b", "2");
        let back = base().processor("b", "2").processor("a", "7").processor("a", "1");
        assert_eq!((forth.hash(), &forth), (back.hash(), &back));
    }

    #[test]
    fn texts_that_run_into_each_other_are_told_apart() {
        let base = || Compatibility::new("m", "bfloat16", 3584, 7168);
        let all = [
            base().processor("ab", "c"),
            base().processor("a", "bc"),
            base().processor("a", "").processor("bc", ""),
            base().quantization("x").lora("y"),
            base().quantization("xlora").lora("y"),
            base().quantization("xy"),
            base().lora("processor.a"),
            Compatibility::new("mrevision", "bfloat16", 3584, 7168),
        ];
        let hashes: BTreeSet<String> = all.iter().map(Compatibility::hash).collect();
        assert_eq!(hashes.len(), all.len());
    }

    #[test]
    fn the_hash_is_the_same_on_every_machine_and_in_every_release() {
        assert_eq!(ours().hash(), "44a7f0771d046b9af68ff361a4002c694589181453700c9c176172744bfff25b");
        let line = ours().to_string();
        assert!(line.starts_with(&ours().hash()) && line.contains("processor.max_pixels=\"100\""), "{line}");
    }
}
