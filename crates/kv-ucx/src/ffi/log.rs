//! UCX's log, which UCX writes to the standard output unless it is told otherwise. A process whose output another
//! program reads would send it UCX's words.

use std::ffi::{c_char, c_schar, c_uint};

use kv_host::printed;
use libloading::os::unix::Library;

type Print = unsafe extern "C" fn(*mut libc::FILE, c_uint);
type SetValue = unsafe extern "C" fn(*const c_char, *const c_char) -> c_schar;
type Nullary = unsafe extern "C" fn();

/// `UCS_CONFIG_PRINT_CONFIG`: one line `NAME=value` for each setting.
const VALUES: c_uint = 1;
/// The line of a log whose place is not set.
const UNSET: &str = "UCX_LOG_FILE=";

/// Sends the log to the standard error, if neither the environment nor a file of UCX names another place. UCX must not
/// be in use yet. A UCX without these functions keeps its log where it is.
pub(super) fn to_stderr(library: &Library) {
    // SAFETY: the functions have these types in all versions of UCX that the crate can be built for. The handle of
    // libucp finds those of libucs, which libucp needs.
    let functions = unsafe {
        (
            library.get::<Print>(b"ucs_global_opts_print\0"),
            library.get::<SetValue>(b"ucs_global_opts_set_value\0"),
            library.get::<Nullary>(b"ucs_log_cleanup\0"),
            library.get::<Nullary>(b"ucs_log_init\0"),
        )
    };
    let (Ok(print), Ok(set), Ok(cleanup), Ok(init)) = functions else { return };
    // SAFETY: the stream is open, and UCX reads its own settings only.
    let settings = printed(|stream| unsafe { print(stream, VALUES) });
    if !settings.lines().any(|line| line == UNSET) {
        return;
    }
    // SAFETY: both are C strings. Nothing uses this copy of UCX yet, so that nothing writes to the log while it is
    // opened anew.
    unsafe {
        set(c"LOG_FILE".as_ptr(), c"stderr".as_ptr());
        cleanup();
        init();
    }
}
