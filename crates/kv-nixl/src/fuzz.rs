//! Entrances for fuzzing: what a peer's bytes pass through before NIXL sees anything of them.

use bytes::Bytes;

use crate::frame::Notification;
use crate::metadata::Metadata;

/// The metadata of a plane: what is accepted encodes again to something that means the same.
pub fn metadata(bytes: &[u8]) {
    if let Ok(read) = Metadata::decode(bytes) {
        let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
        assert_eq!(again.as_ref(), Ok(&read));
    }
}

/// A notification: what is accepted is what it would be encoded as.
pub fn notification(bytes: &[u8]) {
    if let Some(read) = Notification::decode(&Bytes::copy_from_slice(bytes)) {
        assert_eq!(read.encode(), bytes);
    }
}
