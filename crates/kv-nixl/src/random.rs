//! Numbers that nobody can guess.

use std::io::ErrorKind;

use rustix::rand::{GetRandomFlags, getrandom};

/// One of the kernel.
pub(crate) fn random() -> Result<u64, ErrorKind> {
    let mut bytes = [0; 8];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(8) => Ok(u64::from_le_bytes(bytes)),
        Ok(_) => Err(ErrorKind::UnexpectedEof),
        Err(error) => Err(error.kind()),
    }
}
