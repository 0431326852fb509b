//! A call of the operating system that failed, as a value that can be compared, copied and matched.

use std::io;

/// A call of the operating system that failed.
///
/// A server matches on [`errno`](OsError::errno) where the exact reason decides what to do (`ENOSPC`, `EMFILE`),
/// and on [`kind`](OsError::kind) where the family of reasons does.
///
/// ```
/// use kv_core::OsError;
///
/// let refused = OsError::new("connect", std::io::Error::from_raw_os_error(111));
/// assert_eq!((refused.kind, refused.errno), (std::io::ErrorKind::ConnectionRefused, Some(111)));
/// assert_eq!(refused.to_string(), "connect failed: Connection refused (os error 111)");
///
/// let cut = OsError::new("read", std::io::ErrorKind::UnexpectedEof);
/// assert_eq!(cut.to_string(), "read failed: unexpected end of file");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{call} failed: {}", io::Error::from(*self))]
pub struct OsError {
    /// Name of the call or of the operation, as in its manual page.
    pub call: &'static str,
    /// The family of the error, as the standard library sorts error numbers.
    pub kind: io::ErrorKind,
    /// The error number as Linux counts them (`ENOMEM` is 12); `None` where the operation failed without one: a
    /// connection that ended too early, a name that has no address.
    pub errno: Option<i32>,
}

impl OsError {
    /// The error of a call, with its number if `error` has one.
    pub fn new(call: &'static str, error: impl Into<io::Error>) -> OsError {
        let error = error.into();
        OsError { call, kind: error.kind(), errno: error.raw_os_error() }
    }
}

impl From<OsError> for io::Error {
    fn from(error: OsError) -> io::Error {
        error.errno.map_or_else(|| error.kind.into(), io::Error::from_raw_os_error)
    }
}
