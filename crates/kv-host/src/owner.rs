//! [`check_owner`]: whether another user of this host can change a file that was found by a search.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::geteuid;

use crate::error::{OsError, OwnerError};

/// The mode's bit by which every user may write.
const OTHERS_WRITE: u32 = 0o002;

/// Refuses a library that a search has found, if another user could have put it there: what is loaded runs as this process.
/// The file, and so many `folders` above it, must belong to the process's effective user or to root, and must not be
/// writable by others (`o+w`). A symbolic link must belong to one of the two, as well as what it leads to.
///
/// A folder that its group can write is accepted: with the umask 002, which gives each user a group of their own, all
/// folders are so. Who is in the group of a folder is up to its owner.
///
/// # Errors
///
/// [`OwnerError::Foreign`] names the first path, from the file upwards, that another user can change; [`OwnerError::Os`]
/// one of which nothing can be read.
pub fn check_owner(file: &Path, folders: usize) -> Result<(), OwnerError> {
    let ours = geteuid().as_raw();
    for path in file.ancestors().take(1 + folders) {
        // A link, and what it leads to.
        for metadata in [fs::symlink_metadata(path), fs::metadata(path)] {
            let metadata = metadata.map_err(|error| unread(path, error))?;
            let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
            // Every link has the mode 0777, which means nothing.
            let by_others = !metadata.is_symlink() && mode & OTHERS_WRITE != 0;
            if by_others || (owner != ours && owner != 0) {
                return Err(OwnerError::Foreign { path: path.to_owned(), owner, ours, mode });
            }
        }
    }
    Ok(())
}

fn unread(path: &Path, error: io::Error) -> OwnerError {
    OwnerError::Os { path: path.to_owned(), cause: OsError::new("stat", error) }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
    use std::path::PathBuf;

    use super::*;

    /// A user that nobody is.
    const STRANGER: u32 = 54_321;

    /// `a/b/library` in a new folder.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Tree {
            let tree = Tree(std::env::temp_dir().join(format!("kv-host-{name}-{}", std::process::id())));
            fs::create_dir_all(tree.at("a/b")).unwrap();
            fs::write(tree.at("a/b/library"), b"code").unwrap();
            tree.at("a/b/library").ancestors().take(3).for_each(|path| set_mode(path, 0o755));
            tree
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.join(path)
        }

        /// The path that is refused, and its owner and mode.
        fn refused(&self, folders: usize) -> Option<(PathBuf, u32, u32)> {
            match check_owner(&self.at("a/b/library"), folders) {
                Ok(()) => None,
                Err(OwnerError::Foreign { path, owner, mode, .. }) => Some((path, owner, mode)),
                Err(error) => panic!("{error}"),
            }
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_library_is_refused_if_everybody_can_write_it_or_a_folder_above_it() {
        let tree = Tree::new("mode");
        let ours = geteuid().as_raw();
        assert_eq!(tree.refused(2), None);
        for (folders, path) in ["a/b/library", "a/b", "a"].into_iter().enumerate() {
            let path = tree.at(path);
            set_mode(&path, 0o775);
            assert_eq!(tree.refused(2), None, "its group may");
            set_mode(&path, 0o757);
            for asked in 0..3 {
                let refused = (asked >= folders).then(|| (path.clone(), ours, 0o757));
                assert_eq!(tree.refused(asked), refused, "{asked} folders above the library");
            }
            set_mode(&path, 0o755);
        }
    }

    #[test]
    fn a_library_of_another_user_is_refused_wherever_a_link_leads() {
        let tree = Tree::new("owner");
        let library = tree.at("a/b/library");
        assert_eq!(check_owner(Path::new("/etc/passwd"), 2), Ok(()), "they are root's");
        if let Err(error) = chown(&library, Some(STRANGER), None) {
            println!("SKIPPED: a_library_of_another_user_is_refused_wherever_a_link_leads: {error}");
            return;
        }
        assert_eq!(tree.refused(0), Some((library.clone(), STRANGER, 0o755)));
        let error = check_owner(&library, 0).unwrap_err().to_string();
        assert!(error.contains("a/b/library") && error.contains("54321"), "{error}");
        // A link of ours to a file of theirs, and a link of theirs to a file of ours.
        let theirs = tree.at("theirs");
        fs::rename(&library, &theirs).unwrap();
        symlink(&theirs, &library).unwrap();
        assert_eq!(tree.refused(0), Some((library.clone(), STRANGER, 0o755)));
        chown(&theirs, Some(geteuid().as_raw()), None).unwrap();
        assert_eq!(tree.refused(2), None);
        lchown(&library, Some(STRANGER), None).unwrap();
        assert_eq!(tree.refused(0), Some((library, STRANGER, 0o777)));
    }

    #[test]
    fn a_path_that_leads_nowhere_is_an_error_that_names_it() {
        let tree = Tree::new("nowhere");
        let path = tree.at("a/b/library");
        fs::remove_file(&path).unwrap();
        let error = check_owner(&path, 2).unwrap_err();
        assert!(
            matches!(&error, OwnerError::Os { path: named, cause } if *named == path && cause.errno == Some(2))
        );
    }
}
