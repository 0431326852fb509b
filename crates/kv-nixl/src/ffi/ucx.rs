//! The calls of UCX that set its settings after it is loaded, and that say what it has read.
//!
//! NIXL's plugin brings its own copy of UCX, so the calls are looked up through the plugin. Functions that
//! the copy lacks are passed over.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr;

use kv_host::printed;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::ffi::library::Library;

type SetValue = unsafe extern "C" fn(*const c_char, *const c_char) -> i8;
type ParseFile = unsafe extern "C" fn(*const c_char, *const c_char, c_int);
type Nullary = unsafe extern "C" fn();
type PrintGlobal = unsafe extern "C" fn(*mut libc::FILE, c_uint);
type ReadConfig = unsafe extern "C" fn(*const c_char, *const c_char, *mut *mut c_void) -> i8;
type PrintConfig = unsafe extern "C" fn(*const c_void, *mut libc::FILE, *const c_char, c_uint);
type ReleaseConfig = unsafe extern "C" fn(*mut c_void);

/// `UCS_CONFIG_PRINT_CONFIG`: one line `NAME=value` for each setting.
const VALUES: c_uint = 1;

/// Functions of libc that UCX overwrites to see memory come and go.
const INTERCEPTED: [&CStr; 4] = [c"mmap", c"munmap", c"mremap", c"madvise"];
/// Bytes of a function's code that are compared. UCX writes a jump, of 5 bytes at least.
const CODE: usize = 16;

/// The copy of UCX that NIXL's plugin uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ucx(Library);

impl Ucx {
    /// Loads NIXL's plugin for UCX. UCX's initializers run, and read some settings for good. `Err` is the reason
    /// in the loader's words; nothing of UCX has run then.
    pub(crate) fn load(plugin: &Path) -> Result<Ucx, String> {
        Library::load(plugin).map(Ucx)
    }

    /// The file of the library that keeps UCX's settings.
    pub(crate) fn file(self) -> Option<PathBuf> {
        use std::os::unix::ffi::OsStrExt;
        let symbol = self.0.symbol(c"ucs_global_opts")?;
        let mut found = libc::Dl_info {
            dli_fname: ptr::null(),
            dli_fbase: ptr::null_mut(),
            dli_sname: ptr::null(),
            dli_saddr: ptr::null_mut(),
        };
        // SAFETY: the symbol is an address in a loaded library, and the result has its own place.
        if unsafe { libc::dladdr(symbol.as_ptr(), &raw mut found) } == 0 || found.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the name is a C string of the loader, which lives as long as the library: for good.
        let name = unsafe { CStr::from_ptr(found.dli_fname) };
        std::fs::canonicalize(std::ffi::OsStr::from_bytes(name.to_bytes())).ok()
    }

    /// Sets a setting that UCX's initializers have read already. To be called before anything uses this copy
    /// of UCX, and by one thread.
    pub(crate) fn set_global(self, name: &str, value: &str) {
        // SAFETY: UCX's function has this type.
        let set = unsafe { self.0.function::<SetValue>(c"ucs_global_opts_set_value") };
        if let (Some(set), Ok(name), Ok(value)) = (set, CString::new(name), CString::new(value)) {
            // SAFETY: both are C strings, which UCX copies. Nothing uses this copy of UCX yet.
            unsafe { set(name.as_ptr(), value.as_ptr()) };
        }
    }

    /// Hands UCX a configuration file for the settings that UCX reads later. The rule of
    /// [`set_global`](Ucx::set_global) applies.
    pub(crate) fn read_config_file(self, content: &[u8]) {
        // SAFETY: UCX's function has this type.
        let parse = unsafe { self.0.function::<ParseFile>(c"ucs_config_parse_config_file") };
        let file = memfd_create(c"ucx.conf", MemfdFlags::CLOEXEC).map(File::from);
        let (Some(parse), Ok(mut file)) = (parse, file) else { return };
        let name = CString::new(file.as_raw_fd().to_string());
        if let (Ok(()), Ok(name)) = (file.write_all(content), name) {
            // SAFETY: both are C strings, which name a file that is open until the call has returned.
            // Nothing uses this copy of UCX yet.
            unsafe { parse(c"/proc/self/fd".as_ptr(), name.as_ptr(), 1) };
        }
    }

    /// Opens UCX's log anew, in the place that the settings name now. The rule of
    /// [`set_global`](Ucx::set_global) applies.
    pub(crate) fn reopen_log(self) {
        // SAFETY: UCX's functions have this type.
        let functions = unsafe {
            (self.0.function::<Nullary>(c"ucs_log_cleanup"), self.0.function::<Nullary>(c"ucs_log_init"))
        };
        if let (Some(cleanup), Some(init)) = functions {
            // SAFETY: nothing uses this copy of UCX yet, so nothing is logged between the log's end and its
            // new beginning.
            unsafe {
                cleanup();
                init();
            }
        }
    }

    /// The settings that UCX has read, and those that an agent made now would have: lines `NAME=value`. Empty
    /// if UCX cannot say.
    pub(crate) fn settings(self) -> String {
        self.global_settings() + &self.context_settings()
    }

    fn global_settings(self) -> String {
        // SAFETY: UCX's function has this type.
        let print = unsafe { self.0.function::<PrintGlobal>(c"ucs_global_opts_print") };
        // SAFETY: the stream is open, and UCX reads its own settings only.
        print.map(|print| printed(|stream| unsafe { print(stream, VALUES) })).unwrap_or_default()
    }

    fn context_settings(self) -> String {
        // SAFETY: UCX's functions, which are public, have these types.
        let functions = unsafe {
            (
                self.0.function::<ReadConfig>(c"ucp_config_read"),
                self.0.function::<PrintConfig>(c"ucp_config_print"),
                self.0.function::<ReleaseConfig>(c"ucp_config_release"),
            )
        };
        let (Some(read), Some(print), Some(release)) = functions else { return String::new() };
        let mut config = ptr::null_mut();
        // SAFETY: no prefix and no file are allowed, and the configuration goes to a pointer of its own.
        if unsafe { read(ptr::null(), ptr::null(), &raw mut config) } != 0 {
            return String::new();
        }
        // SAFETY: the configuration is read, the stream open, and the title a C string.
        let settings = printed(|stream| unsafe { print(config, stream, c"".as_ptr(), VALUES) });
        // SAFETY: the configuration is released once, and not used after.
        unsafe { release(config) };
        settings
    }
}

/// The first bytes of the functions that UCX overwrites if its setting `MEM_MMAP_HOOK_MODE` says so.
pub(crate) fn intercepted_code() -> Vec<[u8; CODE]> {
    let of = |name: &CStr| {
        // SAFETY: the name is a C string.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        if symbol.is_null() {
            return [0; CODE];
        }
        // SAFETY: the symbol is a function of libc, whose code is readable and longer than that. Only a
        // library that is being loaded writes code, and this thread or none is loading UCX.
        unsafe { symbol.cast::<[u8; CODE]>().read_unaligned() }
    };
    INTERCEPTED.map(of).to_vec()
}
