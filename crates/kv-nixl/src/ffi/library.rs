//! Loading a shared library.

use std::ffi::{CStr, CString};
use std::path::Path;

/// Loads a shared library for good, and looks for these symbols in it. `Err` says what is wrong.
pub(crate) fn load_library(path: &Path, symbols: &[&CStr]) -> Result<(), String> {
    use std::os::unix::ffi::OsStrExt;
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| "its path has a NUL in it".to_owned())?;
    // SAFETY: the name is a C string. Loading runs the library's initializers: the caller was asked
    // for this library by its user.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: `dlerror` returns null or a C string that stays valid until the next call of the
        // family on this thread.
        let reason = unsafe {
            let text = libc::dlerror();
            if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
        };
        return Err(reason.unwrap_or_else(|| "dlopen failed".to_owned()));
    }
    // SAFETY: the library is loaded and never unloaded.
    let missing: Vec<_> =
        symbols.iter().filter(|symbol| unsafe { libc::dlsym(library, symbol.as_ptr()) }.is_null()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("it is another version of NIXL: it lacks {missing:?}"))
}
