//! Reads `tokenizer.json`, and converts text to tokens and back.

use std::path::{Path, PathBuf};

use super::CheckpointError;

/// A tokenizer of a checkpoint.
pub struct Tokenizer {
    file: PathBuf,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads `tokenizer.json` in the directory `dir`.
    pub fn load(dir: &Path) -> Result<Tokenizer, CheckpointError> {
        let file = dir.join("tokenizer.json");
        match tokenizers::Tokenizer::from_file(&file) {
            Ok(inner) => Ok(Tokenizer { file, inner }),
            Err(source) => Err(CheckpointError::Tokenizer { file, source }),
        }
    }

    /// The tokens of a text, without special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, CheckpointError> {
        let encoding = self.inner.encode(text, false).map_err(|source| self.failed(source))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text that these tokens stand for.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, CheckpointError> {
        self.inner.decode(tokens, true).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: tokenizers::Error) -> CheckpointError {
        CheckpointError::Tokenizer { file: self.file.clone(), source }
    }
}
