//! A directory for the files of one run.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use crate::error::EpdError;

/// A new directory under the system's directory for temporary files. Dropping it removes the directory and
/// the files in it.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes a directory with a random name.
    pub fn new() -> Result<Scratch, EpdError> {
        let number = RandomState::new().hash_one(std::process::id());
        let path = std::env::temp_dir().join(format!("kv-epd-{number:016x}"));
        match std::fs::create_dir(&path) {
            Ok(()) => Ok(Scratch(path)),
            Err(source) => Err(EpdError::File { path, source }),
        }
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
