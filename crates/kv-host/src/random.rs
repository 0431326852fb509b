//! Random bytes that nobody can guess.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::OsError;

/// `N` bytes of the kernel's randomness, for tokens and names.
pub fn random<const N: usize>() -> Result<[u8; N], OsError> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match getrandom(rest, GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(OsError::new("getrandom", error)),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_filled_and_no_two_draws_are_alike() {
        // More than the kernel gives at once to a caller that a signal may interrupt.
        let (one, two) = (random::<1000>().unwrap(), random::<1000>().unwrap());
        assert_ne!(one, two);
        assert!(one.rchunks(16).all(|bytes| bytes.iter().any(|byte| *byte != 0)));
    }
}
