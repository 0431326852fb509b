//! UCX's configuration file, in a directory of its own that exists while NIXL is loaded.
//!
//! UCX reads `ucx.conf` of its working directory once, when it is loaded. The environment overrides the file.

use std::fmt::Write as _;
use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use kv_host::OsError;

use crate::library::guards::Guard;

const NAME: &str = "ucx.conf";
/// Directories that other processes have left behind or put in the way, before that is an error.
const ATTEMPTS: u32 = 64;

/// A directory that holds nothing but a configuration file. Dropping the value deletes the directory.
#[derive(Debug)]
pub(crate) struct ConfigDirectory(PathBuf);

impl ConfigDirectory {
    /// Makes the directory, for this user only, below the directory for temporary files.
    pub(crate) fn new(content: &str) -> Result<ConfigDirectory, OsError> {
        let mut attempt = 0;
        let directory = loop {
            let name = format!("kv-nixl-{}-{attempt}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => break ConfigDirectory(path),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && attempt < ATTEMPTS => attempt += 1,
                Err(error) => return Err(OsError::new("mkdir", error)),
            }
        };
        std::fs::write(directory.0.join(NAME), content).map_err(|error| OsError::new("write", error))?;
        Ok(directory)
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ConfigDirectory {
    fn drop(&mut self) {
        // A directory that stays behind holds a few settings, and is in nobody's way.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file with these settings, in which the settings of the user's file, if there is one, win.
pub(crate) fn content(settings: &[Guard], users: Option<&str>) -> String {
    let mut content = String::new();
    for Guard { name, value, .. } in settings {
        let _ = writeln!(content, "{name} = {value}");
    }
    content + users.unwrap_or_default()
}

/// The user's file in the current directory, which UCX would have read.
pub(crate) fn of_the_user() -> Option<String> {
    // Names and values are ASCII; comments may be in any encoding.
    std::fs::read(NAME).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_private_apart_from_each_other_and_gone_when_dropped() {
        let (first, second) = (ConfigDirectory::new("A = 1\n").unwrap(), ConfigDirectory::new("").unwrap());
        assert_ne!(first.path(), second.path());
        assert_eq!(std::fs::read_to_string(first.path().join("ucx.conf")).unwrap(), "A = 1\n");
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(first.path()).unwrap());
        assert_eq!(mode & 0o777, 0o700);
        let paths = [first.path().to_owned(), second.path().to_owned()];
        drop((first, second));
        assert!(paths.iter().all(|path| !path.exists()));
    }

    #[test]
    fn the_users_file_comes_last_because_ucx_takes_the_last_value() {
        let guard = Guard { name: "UCX_MODULES", value: "^ib".to_owned(), why: "" };
        let users = "[section]\nUCX_MODULES = all\n";
        assert_eq!(content(&[guard], Some(users)), "UCX_MODULES = ^ib\n[section]\nUCX_MODULES = all\n");
    }
}
