//! [`printed`]: what a C library writes to a stream, as text.

use std::ffi::c_char;
use std::{ptr, slice};

/// The text that `print` writes to a C stream, which is open during the call only. Empty if libc has no stream to give.
pub fn printed(print: impl FnOnce(*mut libc::FILE)) -> String {
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
    let bytes = unsafe { slice::from_raw_parts(text.cast::<u8>(), len) };
    let printed = String::from_utf8_lossy(bytes).into_owned();
    // SAFETY: the buffer was allocated by libc for us, and is not used after.
    unsafe { libc::free(text.cast()) };
    printed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_c_code_prints_is_returned_whole() {
        let line = c"a line that a library prints\n";
        let text = printed(|stream| {
            for _ in 0..1000 {
                // SAFETY: the stream is open, and the line a C string.
                unsafe { libc::fputs(line.as_ptr(), stream) };
            }
        });
        assert_eq!(text, "a line that a library prints\n".repeat(1000));
        assert_eq!(printed(|_| ()), "");
    }
}
