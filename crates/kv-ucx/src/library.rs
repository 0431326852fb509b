//! [`Ucx`]: UCX's library, found and loaded at run time.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use kv_host::{OwnerError, check_owner};

use crate::error::LoadError;
use crate::ffi::api::{Api, BUILT_FOR};

/// The file name of the library; the number is that of UCX's binary interface.
const LIBRARY: &str = "libucp.so.0";
/// The library's folder in its package.
const PACKAGED: &str = "libucx/lib";
/// The environment variable that names the library, or its directory.
const BY_NAME: &str = "KV_UCX_LIB";

/// UCX's library, loaded. A process has one, which stays loaded until the process ends.
#[derive(Clone, Copy)]
pub struct Ucx {
    pub(crate) api: &'static Api,
    library: &'static Path,
}

static LOADED: Mutex<Option<Ucx>> = Mutex::new(None);

impl Ucx {
    /// Finds the library and loads it. UCX's log goes to the standard error, unless `UCX_LOG_FILE` or one of UCX's files
    /// names another place. The places of the library, in this order: `library`, if the caller names one (the file, or
    /// its directory); `KV_UCX_LIB`; `target/ucx` of a directory above the current one or above the program, where
    /// `scripts/setup-ucx.sh` puts UCX; where the dynamic loader looks by itself (`LD_LIBRARY_PATH`, the system). A
    /// library that the caller or `KV_UCX_LIB` names is used, or the call fails. A library under `target/ucx` that another
    /// user could have put there is passed over ([`check_owner`]). Later calls return what the first successful call found.
    ///
    /// # Errors
    ///
    /// [`LoadError::Another`] if the process has loaded another copy of UCX, as NIXL brings one; the error otherwise
    /// says what was looked for, and how to get it.
    pub fn load(library: Option<&Path>) -> Result<Ucx, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ucx) = *loaded {
            return Ok(ucx);
        }
        let path = find(library)?;
        let there = copies(&fs::read("/proc/self/maps").unwrap_or_default());
        if let Some(other) = another(&path, &there) {
            return Err(LoadError::Another { path: other });
        }
        let unusable = |reason| LoadError::Unusable { path: path.clone(), reason };
        let api = Api::load(&path, there.is_empty()).map_err(unusable)?;
        let (major, minor, _) = api.version;
        if major != BUILT_FOR.0 || minor < BUILT_FOR.1 {
            return Err(LoadError::Version { path, version: (major, minor), built_for: BUILT_FOR });
        }
        // Never freed: the library is never unloaded.
        let ucx = Ucx { api: Box::leak(Box::new(api)), library: Box::leak(path.into_boxed_path()) };
        *loaded = Some(ucx);
        Ok(ucx)
    }

    /// Looks for the library as [`load`](Ucx::load) does, without loading anything. Returns its path, which is a
    /// bare file name where only the dynamic loader knows the place.
    pub fn look(library: Option<&Path>) -> Result<PathBuf, LoadError> {
        find(library)
    }

    /// The path of the library.
    pub fn library(&self) -> &Path {
        self.library
    }

    /// UCX's version: major, minor, release.
    pub fn version(&self) -> (u32, u32, u32) {
        self.api.version
    }
}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ucx").field("library", &self.library).field("version", &self.version()).finish()
    }
}

fn find(named: Option<&Path>) -> Result<PathBuf, LoadError> {
    let by_variable = env::var_os(BY_NAME).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = named.map(Path::to_owned).or(by_variable) {
        let file = if path.is_dir() { path.join(LIBRARY) } else { path };
        return if file.is_file() { Ok(file) } else { Err(LoadError::Missing { looked: vec![file] }) };
    }
    let (mut looked, mut refused) = (Vec::new(), None);
    for start in [env::current_dir(), env::current_exe()].into_iter().flatten() {
        if let Some(found) = find_above(&start, &mut looked, &mut refused) {
            return Ok(found);
        }
    }
    for dir in env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths).chain(usual()) {
        if dir.join(LIBRARY).is_file() {
            // The bare name: the loader's own search, which may know better.
            return Ok(PathBuf::from(LIBRARY));
        }
        looked.push(dir);
    }
    looked.dedup();
    Err(refused.map_or(LoadError::Missing { looked }, LoadError::Owner))
}

/// The library under `target/ucx` of this directory or of one above it. Anybody may have made such a folder above the
/// directory in which a program happens to be started, as in `/tmp`: what another user could have put there is passed over.
fn find_above(start: &Path, looked: &mut Vec<PathBuf>, refused: &mut Option<OwnerError>) -> Option<PathBuf> {
    for dir in start.ancestors() {
        let root = dir.join("target/ucx");
        let packages = fs::read_dir(&root).into_iter().flatten().flatten();
        let found = packages.map(|entry| entry.path().join(PACKAGED).join(LIBRARY));
        if let Some(found) = found.filter(|path| path.is_file()).max() {
            // From the library up to `target/ucx`.
            match check_owner(&found, Path::new(PACKAGED).components().count() + 2) {
                Ok(()) => return Some(found),
                Err(error) => refused.get_or_insert(error),
            };
        }
        looked.push(root);
    }
    None
}

fn usual() -> impl Iterator<Item = PathBuf> {
    let multiarch = format!("/usr/lib/{}-linux-gnu", env::consts::ARCH);
    ["/usr/local/lib", "/usr/lib64", "/usr/lib", &multiarch].map(PathBuf::from).into_iter()
}

/// The first of these copies of UCX that is not this file.
fn another(path: &Path, copies: &BTreeSet<PathBuf>) -> Option<PathBuf> {
    let same = |other: &Path| match (fs::canonicalize(path), fs::canonicalize(other)) {
        (Ok(path), Ok(other)) => path == other,
        // Found by the loader: whatever is loaded under this name is what the loader gives.
        _ => path.parent() == Some(Path::new("")) && name_of(other).starts_with(b"libucp.so"),
    };
    copies.iter().find(|other| !same(other)).cloned()
}

/// The files of `/proc/PID/maps` that are copies of UCX. A wheel's copies have a hash in their names:
/// `libucp-14c218c5.so.0`.
fn copies(maps: &[u8]) -> BTreeSet<PathBuf> {
    let file = |line: &[u8]| {
        let path = line.get(line.iter().position(|byte| *byte == b'/')?..)?;
        let path = PathBuf::from(OsStr::from_bytes(path));
        let name = name_of(&path);
        (name.starts_with(b"libucp.so") || name.starts_with(b"libucp-")).then_some(path)
    };
    maps.split(|byte| *byte == b'\n').filter_map(file).collect()
}

fn name_of(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_bytes()
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn copies_of_ucx_are_seen_under_both_kinds_of_names_and_others_are_not() {
        let maps = b"7f00-7f01 r-xp 00000000 08:01 7  /a b/nixl_cu12.libs/libucp-14c218c5.so.0.0.0\n\
                     7f01-7f02 r-xp 00000000 08:01 7  /a b/nixl_cu12.libs/libucp-14c218c5.so.0.0.0\n\
                     7f02-7f03 r-xp 00000000 08:01 8  /usr/lib/libucp.so.0.0.0\n\
                     7f03-7f04 r-xp 00000000 08:01 9  /usr/lib/libucs.so.0\n\
                     7f04-7f05 rw-p 00000000 00:00 0  [heap]\n\
                     7f05-7f06 rw-p 00000000 00:00 0  /home/libucpx.so\n";
        let wanted = ["/a b/nixl_cu12.libs/libucp-14c218c5.so.0.0.0", "/usr/lib/libucp.so.0.0.0"];
        assert_eq!(copies(maps), wanted.map(PathBuf::from).into());
    }

    /// A checkout whose `target/ucx` has a library.
    struct Checkout(PathBuf);

    impl Checkout {
        fn new() -> Checkout {
            let checkout = Checkout(env::temp_dir().join(format!("kv-ucx-checkout-{}", std::process::id())));
            let folder = checkout.0.join("target/ucx/package/libucx/lib");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(LIBRARY), b"not loaded here").unwrap();
            checkout
        }

        /// What is found from below here, and why something was passed over.
        fn find(&self) -> (Option<PathBuf>, Option<OwnerError>) {
            let mut refused = None;
            (find_above(&self.0.join("below/it"), &mut Vec::new(), &mut refused), refused)
        }
    }

    impl Drop for Checkout {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_library_in_a_folder_that_another_user_can_change_is_refused_with_its_path_and_owner() {
        let checkout = Checkout::new();
        let library = checkout.0.join("target/ucx/package/libucx/lib").join(LIBRARY);
        let root = checkout.0.join("target/ucx");
        for path in library.ancestors().take_while(|path| path.starts_with(&root)) {
            assert_eq!(checkout.find(), (Some(library.clone()), None));
            let before = fs::metadata(path).unwrap();
            fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
            let (None, Some(refused)) = checkout.find() else { panic!("{path:?} is believed") };
            let words = LoadError::Owner(refused).to_string();
            let owner = format!("{path:?} belongs to user {}", before.uid());
            assert!(words.contains(&owner) && words.contains("KV_UCX_LIB"), "{words}");
            fs::set_permissions(path, before.permissions()).unwrap();
        }
        assert_eq!(checkout.find(), (Some(library), None));
        let nearer = checkout.0.join("below/target/ucx/package/libucx/lib");
        fs::create_dir_all(&nearer).unwrap();
        fs::write(nearer.join(LIBRARY), b"nor here").unwrap();
        assert_eq!(checkout.find().0, Some(nearer.join(LIBRARY)));
        fs::set_permissions(&nearer, Permissions::from_mode(0o777)).unwrap();
        assert!(
            matches!(checkout.find(), (Some(found), Some(_)) if !found.starts_with(&nearer)),
            "it is passed over"
        );
    }

    #[test]
    fn a_named_library_that_is_not_there_is_an_error_with_its_path_and_the_way_to_get_it() {
        let path = Path::new("/nowhere/libucp.so.0");
        let error = Ucx::look(Some(path)).unwrap_err();
        assert_eq!(error, LoadError::Missing { looked: vec![path.to_owned()] });
        let words = error.to_string();
        assert!(words.contains("/nowhere/libucp.so.0") && words.contains("setup-ucx.sh"), "{words}");
    }
}
