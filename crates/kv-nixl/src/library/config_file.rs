//! UCX's configuration file, in a directory of its own that exists while NIXL is loaded.
//!
//! UCX reads `ucx.conf` of its working directory when it is loaded. The directory is held by a descriptor from
//! the moment at which this user is seen to be its only owner: the file is written, UCX is loaded, and the file
//! is removed in the directory of the descriptor. So nobody else can put a file in its place, not even where
//! other users may rename what is in the directory for temporary files.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use kv_host::{OsError, random};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, fstat, mkdirat, open, openat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::library::guards::Guard;
use crate::library::ucx_files::{NAME, UcxFiles};

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A directory that holds nothing but a configuration file. Dropping the value deletes the directory.
#[derive(Debug)]
pub(crate) struct ConfigDirectory {
    parent: OwnedFd,
    name: String,
    directory: OwnedFd,
}

impl ConfigDirectory {
    /// Makes the directory, for this user only, in the directory for temporary files.
    pub(crate) fn new(content: &[u8]) -> Result<ConfigDirectory, OsError> {
        let name = format!("kv-nixl-{:016x}", u64::from_ne_bytes(random()?));
        ConfigDirectory::new_in(&std::env::temp_dir(), name, content)
    }

    fn new_in(parent: &Path, name: String, content: &[u8]) -> Result<ConfigDirectory, OsError> {
        let at = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = open(parent, at, Mode::empty()).map_err(|error| OsError::new("open", error))?;
        mkdirat(&parent, &name, Mode::RWXU).map_err(|error| OsError::new("mkdirat", error))?;
        let directory = entered(parent.as_fd(), &name)?;
        // From here on, the directory is removed whatever happens.
        let made = ConfigDirectory { parent, name, directory };
        write(made.as_fd(), content)?;
        Ok(made)
    }
}

impl AsFd for ConfigDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Drop for ConfigDirectory {
    fn drop(&mut self) {
        // What stays behind holds a few settings, and is in nobody's way. UCX may have made a log beside the
        // file.
        for entry in Dir::read_from(&self.directory).into_iter().flatten().flatten() {
            let _ = unlinkat(&self.directory, entry.file_name(), AtFlags::empty());
        }
        let _ = unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Opens a directory that this process has just made. Where other users may rename directories, another one may
/// have come in its place: one of another user, or one that others may write to, is refused.
fn entered(parent: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, OsError> {
    let directory =
        openat(parent, name, DIRECTORY, Mode::empty()).map_err(|error| OsError::new("openat", error))?;
    let found = fstat(&directory).map_err(|error| OsError::new("fstat", error))?;
    let others = Mode::from_raw_mode(found.st_mode) & (Mode::RWXG | Mode::RWXO);
    if found.st_uid != geteuid().as_raw() || !others.is_empty() {
        return Err(OsError::new("mkdirat", Errno::PERM));
    }
    Ok(directory)
}

/// Makes UCX's file in a directory that has none.
fn write(directory: BorrowedFd<'_>, content: &[u8]) -> Result<(), OsError> {
    let new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(directory, NAME, new, Mode::RUSR | Mode::WUSR);
    let mut file = File::from(file.map_err(|error| OsError::new("openat", error))?);
    file.write_all(content).map_err(|error| OsError::new("write", error))
}

/// A file with these settings, and with what UCX's other files say: the working directory of the loading thread
/// is another one, so UCX does not find the files to which relative paths lead.
pub(crate) fn content(settings: &[Guard], files: &UcxFiles) -> Vec<u8> {
    let mut content = String::new();
    for Guard { name, value, .. } in settings {
        let _ = writeln!(content, "{name} = {value}");
    }
    [content.into_bytes(), files.as_one()].concat()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    /// A directory for one test, in which others may do what they like.
    struct Open(PathBuf);

    impl Open {
        fn new(name: &str) -> Open {
            let path = std::env::temp_dir().join(format!("kv-nixl-open-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
            Open(path)
        }

        fn dir(&self, name: &str, mode: u32) -> PathBuf {
            let path = self.0.join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Open {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_directory_is_private_and_gone_with_all_its_files_when_dropped() {
        let place = Open::new("private");
        let made = ConfigDirectory::new_in(&place.0, "a".to_owned(), b"A = 1\n").unwrap();
        let path = place.0.join("a");
        assert_eq!(std::fs::read(path.join(NAME)).unwrap(), b"A = 1\n");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert_eq!(std::fs::metadata(path.join(NAME)).unwrap().mode() & 0o777, 0o600);
        let again = ConfigDirectory::new_in(&place.0, "a".to_owned(), b"").map(|_| ());
        assert_eq!(again, Err(OsError::new("mkdirat", Errno::EXIST)));
        std::fs::write(path.join("own.log"), "a log of UCX").unwrap();
        drop(made);
        assert!(!path.exists());
        assert!(ConfigDirectory::new(b"").unwrap().name != ConfigDirectory::new(b"").unwrap().name);
    }

    #[test]
    fn a_directory_that_others_put_in_place_of_ours_is_refused() {
        let place = Open::new("others");
        let private = place.dir("private", 0o700);
        place.dir("writable", 0o777);
        place.dir("readable", 0o750);
        symlink(&private, place.0.join("link")).unwrap();
        std::fs::write(place.0.join("file"), "").unwrap();
        let foreign = place.dir("foreign", 0o700);
        let is_root = std::os::unix::fs::chown(&foreign, Some(12345), None).is_ok();
        let parent = File::open(&place.0).unwrap();
        let refused = |name| entered(parent.as_fd(), name).unwrap_err().errno;
        assert!(entered(parent.as_fd(), "private").is_ok());
        for name in ["writable", "readable"].iter().chain(is_root.then_some(&"foreign")) {
            assert_eq!(refused(name), Some(libc::EPERM), "{name}");
        }
        assert_eq!((refused("link"), refused("file")), (Some(libc::ENOTDIR), Some(libc::ENOTDIR)));
    }

    #[test]
    fn a_file_that_is_there_already_is_neither_followed_nor_overwritten() {
        let place = Open::new("file");
        let victim = place.0.join("victim");
        std::fs::write(&victim, "untouched").unwrap();
        symlink(&victim, place.dir("ours", 0o700).join(NAME)).unwrap();
        let parent = File::open(&place.0).unwrap();
        let directory = entered(parent.as_fd(), "ours").unwrap();
        let refused = write(directory.as_fd(), b"ours").map_err(|error| error.errno);
        assert_eq!(refused, Err(Some(libc::EEXIST)));
        assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
    }

    #[test]
    fn a_directory_that_is_renamed_away_keeps_its_file_and_loses_it_at_the_end() {
        let place = Open::new("renamed");
        let made = ConfigDirectory::new_in(&place.0, "ours".to_owned(), b"A = 1\n").unwrap();
        std::fs::rename(place.0.join("ours"), place.0.join("away")).unwrap();
        let theirs = place.dir("ours", 0o777).join(NAME);
        std::fs::write(&theirs, "A = 2\n").unwrap();
        let read = crate::ffi::directory::in_directory(made.as_fd(), &|| std::fs::read(NAME).unwrap());
        assert_eq!(read.unwrap(), b"A = 1\n");
        drop(made);
        assert!(theirs.exists() && !place.0.join("away").join(NAME).exists());
    }

    #[test]
    fn the_operators_files_come_after_the_settings() {
        let guard = Guard { name: "UCX_MODULES", value: "^ib".to_owned(), why: "" };
        assert_eq!(content(&[guard], &UcxFiles::default()), b"UCX_MODULES = ^ib\n");
    }
}
