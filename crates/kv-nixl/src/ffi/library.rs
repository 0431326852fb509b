//! Loading a shared library, and finding its symbols.

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::NonNull;

/// A shared library, which stays loaded for as long as the process lives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library(NonNull<c_void>);

// SAFETY: a handle of the loader belongs to the process, not to a thread, and the loader has a lock.
unsafe impl Send for Library {}

impl Library {
    /// Loads the library at this path. `Err` is the reason in the loader's words.
    pub(crate) fn load(path: &Path) -> Result<Library, String> {
        use std::os::unix::ffi::OsStrExt;
        let name =
            CString::new(path.as_os_str().as_bytes()).map_err(|_| "the path has a NUL in it".to_owned())?;
        // SAFETY: the name is a C string. Loading runs the library's initializers: the caller was asked
        // for this library by its user.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(library).map(Library).ok_or_else(loader_error)
    }

    /// The address of a symbol of the library, or of a library that was loaded with it.
    pub(crate) fn symbol(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library is loaded and never unloaded, and the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }

    /// A function of the library, or of a library that was loaded with it.
    ///
    /// # Safety
    ///
    /// `F` is the type of a pointer to the function of that name.
    pub(crate) unsafe fn function<F: Copy>(self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let symbol = self.symbol(name)?;
        // SAFETY: both are pointers, and the caller promises that `F` is the pointer's type.
        Some(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

fn loader_error() -> String {
    // SAFETY: `dlerror` returns null or a C string that stays valid until the next call of the
    // family on this thread.
    let reason = unsafe {
        let text = libc::dlerror();
        if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
    };
    reason.unwrap_or_else(|| "dlopen failed".to_owned())
}
