//! The calls of UCX that set its settings after it is loaded, and that say what it has read.
//!
//! NIXL's plugin brings its own copy of UCX, so the calls are looked up through the plugin. Functions that the
//! copy lacks are passed over.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr;

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
    /// Loads NIXL's plugin for UCX. UCX's initializers run, and read some settings for good.
    pub(crate) fn load(plugin: &Path) -> Option<Ucx> {
        Library::load(plugin).ok().map(Ucx)
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
        // SAFETY: the symbol is an address in a loaded library, and the result is written to a value of its type.
        if unsafe { libc::dladdr(symbol.as_ptr(), &raw mut found) } == 0 || found.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the name is a C string of the loader, which lives as long as the library, which is for good.
        let name = unsafe { CStr::from_ptr(found.dli_fname) };
        std::fs::canonicalize(std::ffi::OsStr::from_bytes(name.to_bytes())).ok()
    }

    /// Sets a setting that UCX's initializers have read already. To be called before anything uses this copy
    /// of UCX, by no two threads at once.
    pub(crate) fn set_global(self, name: &str, value: &str) {
        let names = (CString::new(name), CString::new(value));
        let (Some(symbol), (Ok(name), Ok(value))) = (self.0.symbol(c"ucs_global_opts_set_value"), names)
        else {
            return;
        };
        // SAFETY: the symbol is UCX's function of this type.
        let set: SetValue = unsafe { std::mem::transmute(symbol) };
        // SAFETY: both are C strings, which UCX copies. Nothing uses this copy of UCX yet.
        unsafe { set(name.as_ptr(), value.as_ptr()) };
    }

    /// Hands UCX a configuration file for the settings that it reads later. The rule of
    /// [`set_global`](Ucx::set_global) applies.
    pub(crate) fn read_config_file(self, content: &str) {
        let Some(symbol) = self.0.symbol(c"ucs_config_parse_config_file") else { return };
        let Ok(mut file) = memfd_create(c"ucx.conf", MemfdFlags::CLOEXEC).map(std::fs::File::from) else {
            return;
        };
        let name = CString::new(file.as_raw_fd().to_string());
        let (Ok(()), Ok(name)) = (file.write_all(content.as_bytes()), name) else { return };
        // SAFETY: the symbol is UCX's function of this type.
        let parse: ParseFile = unsafe { std::mem::transmute(symbol) };
        // SAFETY: both are C strings, which name a file that is open until the call has returned. Nothing uses
        // this copy of UCX yet.
        unsafe { parse(c"/proc/self/fd".as_ptr(), name.as_ptr(), 1) };
    }

    /// Opens UCX's log anew, where its settings say now. The rule of [`set_global`](Ucx::set_global) applies.
    pub(crate) fn reopen_log(self) {
        let symbols = (self.0.symbol(c"ucs_log_cleanup"), self.0.symbol(c"ucs_log_init"));
        let (Some(cleanup), Some(init)) = symbols else { return };
        // SAFETY: the symbols are UCX's functions of this type, which end its log and begin another one. Nothing
        // uses this copy of UCX yet, so nothing is logged in between.
        unsafe {
            std::mem::transmute::<_, Nullary>(cleanup)();
            std::mem::transmute::<_, Nullary>(init)();
        }
    }

    /// The settings that UCX has read, and those that a context made now would have: lines `NAME=value`. Empty if
    /// UCX cannot say.
    pub(crate) fn settings(self) -> String {
        let mut all = String::new();
        if let Some(print) = self.0.symbol(c"ucs_global_opts_print") {
            // SAFETY: the symbol is UCX's function of this type.
            let print: PrintGlobal = unsafe { std::mem::transmute(print) };
            // SAFETY: the stream is open, and UCX reads its own settings only.
            all += &printed(|stream| unsafe { print(stream, VALUES) });
        }
        let context = [c"ucp_config_read", c"ucp_config_print", c"ucp_config_release"];
        if let [Some(read), Some(print), Some(release)] = context.map(|name| self.0.symbol(name)) {
            // SAFETY: the symbols are UCX's functions of these types, which are public.
            let (read, print, release): (ReadConfig, PrintConfig, ReleaseConfig) = unsafe {
                (std::mem::transmute(read), std::mem::transmute(print), std::mem::transmute(release))
            };
            let mut config = ptr::null_mut();
            // SAFETY: no prefix and no file are allowed, and the configuration goes to a pointer of its own.
            if unsafe { read(ptr::null(), ptr::null(), &raw mut config) } == 0 {
                // SAFETY: the configuration is read, the stream open, the title a C string.
                all += &printed(|stream| unsafe { print(config, stream, c"".as_ptr(), VALUES) });
                // SAFETY: the configuration is released once, and not used after.
                unsafe { release(config) };
            }
        }
        all
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
        // SAFETY: the symbol is a function of libc, whose code is readable and longer than that. Code is written
        // only by a library that is being loaded, which happens on this thread or not at all.
        unsafe { symbol.cast::<[u8; CODE]>().read_unaligned() }
    };
    INTERCEPTED.map(of).to_vec()
}

/// What `print` writes to a stream.
fn printed(print: impl FnOnce(*mut libc::FILE)) -> String {
    let (mut text, mut len) = (ptr::null_mut::<c_char>(), 0_usize);
    // SAFETY: both places live until the stream is closed.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut len) };
    if stream.is_null() {
        return String::new();
    }
    print(stream);
    // SAFETY: the stream is open, and not used after.
    unsafe { libc::fclose(stream) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the closed stream has left a buffer of this length, which is ours.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    let printed = String::from_utf8_lossy(bytes).into_owned();
    // SAFETY: the buffer was allocated by libc for us, and is not used after.
    unsafe { libc::free(text.cast()) };
    printed
}
