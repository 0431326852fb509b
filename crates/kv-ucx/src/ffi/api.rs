//! The library, loaded once and for good.

use std::ffi::c_uint;
use std::path::Path;

use super::bindings::{UCP_API_MAJOR, UCP_API_MINOR, Ucp};
use super::log;

/// UCX's functions. The library stays loaded until the process ends: UCX has a thread of its own.
pub(crate) struct Api {
    pub(crate) ucp: Ucp,
    pub(crate) version: (u32, u32, u32),
}

/// The version of UCX's interface for which the crate was built: the library may be newer, not older.
pub(crate) const BUILT_FOR: (u32, u32) = (UCP_API_MAJOR, UCP_API_MINOR);

impl Api {
    /// Loads the library at a path; `is_first` if nothing else in this process can be using it. `Err` is the reason, in
    /// the loader's words.
    pub(crate) fn load(path: &Path, is_first: bool) -> Result<Api, String> {
        use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
        // SAFETY: loading runs the library's initializers; the library is the one that the user has named or
        // installed as UCX. It is never unloaded.
        let library =
            unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| words(&error))?;
        if is_first {
            log::to_stderr(&library);
        }
        // SAFETY: the functions are looked up by their names, and have the types of UCX's headers.
        let ucp = unsafe { Ucp::from_library(library) }.map_err(|error| words(&error))?;
        let (mut major, mut minor, mut release): (c_uint, c_uint, c_uint) = (0, 0, 0);
        // SAFETY: three numbers are written.
        unsafe { ucp.ucp_get_version(&raw mut major, &raw mut minor, &raw mut release) };
        Ok(Api { ucp, version: (major, minor, release) })
    }
}

fn words(error: &libloading::Error) -> String {
    // The loader's own words are the source of the error, where there are any.
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
