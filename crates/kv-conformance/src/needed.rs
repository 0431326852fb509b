//! [`needed`]: what a test needs of the machine, or the reason why it is skipped.

use std::fmt::Display;

/// What a test needs of the machine, such as a transport's library. `None` if that is missing, and a line that says why:
/// then there is nothing to test.
///
/// # Panics
///
/// If that is missing and the variable `KV_{name}_REQUIRED` is set, as `scripts/test.sh` does for what it has installed.
pub fn needed<T>(name: &str, found: Result<T, impl Display>) -> Option<T> {
    let missing = |error: &_| {
        println!("SKIPPED: {error}");
        assert!(std::env::var_os(format!("KV_{name}_REQUIRED")).is_none(), "{error}");
    };
    found.inspect_err(missing).ok()
}
