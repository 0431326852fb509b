//! Entrances for fuzzing: what a peer's bytes pass through before NIXL sees anything of them.

use bytes::Bytes;

use crate::connections::transport_metadata::TransportMetadata;
use crate::foreign::agent_metadata::AgentMetadata;
use crate::notifications::envelope::Notification;

/// The metadata of a transport: what is accepted encodes again to something that means the same.
pub fn metadata(bytes: &[u8]) {
    if let Ok(read) = TransportMetadata::decode(bytes) {
        let again = read.encode().and_then(|bytes| TransportMetadata::decode(&bytes));
        assert_eq!(again.as_ref(), Ok(&read));
    }
}

/// A notification: what is accepted is what it would be encoded as.
pub fn notification(bytes: &[u8]) {
    if let Some(read) = Notification::decode(&Bytes::copy_from_slice(bytes)) {
        assert_eq!(read.encode(), bytes);
    }
}

/// The metadata of a foreign agent: what is accepted names memory that can be, and every byte of it is
/// part of something.
pub fn agent_metadata(bytes: &[u8]) {
    if let Ok(read) = AgentMetadata::parse(bytes) {
        assert!(!read.name.is_empty() && !read.backends.is_empty());
        assert!(read.memory.iter().all(|range| range.addr.checked_add(range.len).is_some()));
        assert!(read.memory.len() * 24 < bytes.len());
        let (_, cut) = bytes.split_last().unwrap_or((&0, &[]));
        assert!(AgentMetadata::parse(cut).is_err());
    }
}
