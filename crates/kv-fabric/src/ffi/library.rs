//! [`Library`]: libfabric, loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::sys;
use crate::error::FabricError;

/// The environment variable that names libfabric's file.
const VARIABLE: &str = "KV_FABRIC_LIB";
/// The name by which the dynamic loader knows libfabric.
const NAME: &str = "libfabric.so.1";
/// Most libraries beside libfabric that are loaded before it.
const COMPANIONS: usize = 32;
/// The oldest version whose providers this crate uses: 1.14.
const OLDEST: (u32, u32) = (1, 14);

pub(crate) type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const sys::fi_info,
    *mut *mut sys::fi_info,
) -> c_int;
pub(crate) type FreeInfo = unsafe extern "C" fn(*mut sys::fi_info);
pub(crate) type DupInfo = unsafe extern "C" fn(*const sys::fi_info) -> *mut sys::fi_info;
pub(crate) type Fabric =
    unsafe extern "C" fn(*mut sys::fi_fabric_attr, *mut *mut sys::fid_fabric, *mut c_void) -> c_int;
type Version = unsafe extern "C" fn() -> u32;
type StrError = unsafe extern "C" fn(c_int) -> *const c_char;

/// The functions of libfabric that are symbols. A library stays loaded until the process ends.
#[derive(Debug)]
pub(crate) struct Library {
    path: PathBuf,
    pub(crate) getinfo: GetInfo,
    pub(crate) freeinfo: FreeInfo,
    pub(crate) dupinfo: DupInfo,
    pub(crate) fabric: Fabric,
    version: Version,
    strerror: StrError,
}

impl Library {
    /// The library at `path`; if there is none, the one that `KV_FABRIC_LIB` names; otherwise the one that the
    /// dynamic loader finds. A process has one libfabric: the one that was loaded first.
    pub(crate) fn get(path: Option<&Path>) -> Result<&'static Library, FabricError> {
        static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);
        let named = std::env::var_os(VARIABLE).map(PathBuf::from);
        let path = path.map(Path::to_owned).or(named).unwrap_or_else(|| PathBuf::from(NAME));
        let mut loaded = LOADED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match *loaded {
            Some(library) if library.path == path => Ok(library),
            Some(library) => Err(FabricError::Library {
                path,
                cause: format!("{} is loaded already", library.path.display()),
            }),
            None => {
                let library: &'static Library = Box::leak(Box::new(Library::load(path)?));
                *loaded = Some(library);
                Ok(library)
            }
        }
    }

    fn load(path: PathBuf) -> Result<Library, FabricError> {
        let handle = open_with_companions(&path)?;
        let symbol = |name: &'static CStr| {
            // SAFETY: the handle is open, and the name ends with a zero.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if found.is_null() {
                Err(FabricError::Symbol { name: name.to_str().unwrap_or("?") })
            } else {
                Ok(found)
            }
        };
        // SAFETY: libfabric's headers declare these symbols with these types.
        let library = unsafe {
            Library {
                getinfo: std::mem::transmute::<*mut c_void, GetInfo>(symbol(c"fi_getinfo")?),
                freeinfo: std::mem::transmute::<*mut c_void, FreeInfo>(symbol(c"fi_freeinfo")?),
                dupinfo: std::mem::transmute::<*mut c_void, DupInfo>(symbol(c"fi_dupinfo")?),
                fabric: std::mem::transmute::<*mut c_void, Fabric>(symbol(c"fi_fabric")?),
                version: std::mem::transmute::<*mut c_void, Version>(symbol(c"fi_version")?),
                strerror: std::mem::transmute::<*mut c_void, StrError>(symbol(c"fi_strerror")?),
                path,
            }
        };
        let got = library.version();
        if got < OLDEST { Err(FabricError::Version { got, least: OLDEST }) } else { Ok(library) }
    }

    /// The file from which the library was loaded, or the name by which the dynamic loader found it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Major and minor number of the library's version.
    pub(crate) fn version(&self) -> (u32, u32) {
        // SAFETY: the function has no requirements.
        let version = unsafe { (self.version)() };
        (version >> 16, version & 0xffff)
    }

    /// The version of the interface to ask for: that of the headers, or that of an older library.
    pub(crate) fn interface(&self) -> u32 {
        let (major, minor) = self.version().min((sys::FI_MAJOR_VERSION, sys::FI_MINOR_VERSION));
        major << 16 | minor
    }

    /// What a negative result of a call means.
    pub(crate) fn text(&self, code: i32) -> &'static str {
        // SAFETY: the function takes any number, and returns a constant string that ends with a zero.
        let text = unsafe { CStr::from_ptr((self.strerror)(code.wrapping_abs())) };
        text.to_str().unwrap_or("an unknown error")
    }
}

/// Opens a library. Libraries that it needs, and that the dynamic loader does not find, are taken from the library's
/// own directory: packages that were unpacked without root are in no directory that the loader knows.
fn open_with_companions(path: &Path) -> Result<*mut c_void, FabricError> {
    let refused = |cause: String| FabricError::Library { path: path.to_owned(), cause };
    let mut last = String::new();
    for _ in 0..COMPANIONS {
        let cause = match open(path) {
            Ok(handle) => return Ok(handle),
            Err(cause) => cause,
        };
        if cause == last {
            return Err(refused(cause));
        }
        if !open_missing(path, &cause, COMPANIONS) {
            return Err(refused(cause));
        }
        last = cause;
    }
    Err(refused(last))
}

/// Opens the library that the loader's message misses, if it lies beside `path`, after those that it misses itself.
fn open_missing(path: &Path, cause: &str, depth: usize) -> bool {
    let missing = cause.split_once(": cannot open shared object file").map(|(name, _)| name);
    let Some(missing) = missing.filter(|name| !name.contains('/') && depth > 0) else { return false };
    let Some(beside) = path.parent().map(|directory| directory.join(missing)).filter(|file| file.exists())
    else {
        return false;
    };
    for _ in 0..depth {
        match open(&beside) {
            Ok(_) => return true,
            Err(cause) if open_missing(&beside, &cause, depth - 1) => {}
            Err(_) => return false,
        }
    }
    false
}

fn open(path: &Path) -> Result<*mut c_void, String> {
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| "the path has a zero byte".to_owned())?;
    // SAFETY: the name ends with a zero. The initialisers of libfabric and of what it links are trusted, as those of
    // every library that a process loads.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: the message of the last failed call on this thread; copied before the next call.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return Err("the dynamic loader gives no reason".to_owned());
    }
    // SAFETY: a message that is not null ends with a zero.
    Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_its_path() {
        let path = PathBuf::from("/nowhere/libfabric.so.1");
        let Err(FabricError::Library { path: named, cause }) = Library::load(path.clone()) else {
            panic!("loaded from nowhere")
        };
        assert_eq!(named, path);
        assert!(cause.contains("cannot open shared object file"), "{cause}");
    }

    #[test]
    fn a_library_without_libfabrics_functions_is_an_error_that_names_the_first() {
        let error = Library::load(PathBuf::from("libc.so.6")).unwrap_err();
        assert_eq!(error, FabricError::Symbol { name: "fi_getinfo" });
    }

    #[test]
    fn a_process_keeps_the_library_that_it_has_loaded_first() {
        let library = Library::get(None).unwrap();
        assert!(std::ptr::eq(library, Library::get(None).unwrap()));
        let other = Library::get(Some(Path::new("/other/libfabric.so.1"))).unwrap_err();
        assert!(other.to_string().contains("is loaded already"), "{other}");
        assert_eq!(library.text(-libc::ECONNREFUSED), "Connection refused");
    }
}
