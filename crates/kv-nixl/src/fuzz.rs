//! Entrances for fuzzing: the readers that a peer's bytes pass before NIXL sees the bytes. Each returns true if all of
//! the bytes are accepted.

pub mod samples;

use bytes::Bytes;

use crate::connections::transport_metadata::TransportMetadata;
use crate::foreign::agent_metadata::AgentMetadata;
use crate::notifications::datagrams::{LONGEST, RING, add, parts};
use crate::notifications::envelope::Notification;

/// Reads the metadata of a transport. Accepted metadata, encoded again, means the same.
pub fn metadata(bytes: &[u8]) -> bool {
    let Ok(read) = TransportMetadata::decode(bytes) else { return false };
    let again = read.encode().and_then(|bytes| TransportMetadata::decode(&bytes));
    assert_eq!(again.as_ref(), Ok(&read));
    true
}

/// Reads a notification. An accepted notification, encoded again, has the same bytes.
pub fn notification(bytes: &[u8]) -> bool {
    let Some(read) = Notification::decode(&Bytes::copy_from_slice(bytes)) else { return false };
    assert_eq!(read.encode(), bytes);
    true
}

/// Cuts a datagram into its notifications, and reads these. Put into a datagram again, they are the same bytes; the last
/// one is all that is left if no length fits.
pub fn datagram(bytes: &[u8]) -> bool {
    let (mut rest, mut accepted) = (bytes, bytes.len() <= LONGEST);
    for part in parts(bytes).filter(|_| bytes.len() <= LONGEST) {
        accepted &= notification(part);
        let mut again = Vec::new();
        add(&mut again, part);
        rest = rest.strip_prefix(&again[..]).unwrap_or_else(|| {
            assert_eq!(part, rest);
            &[]
        });
    }
    assert!(rest.is_empty() || bytes.len() > LONGEST);
    accepted || bytes == RING
}

/// Reads the metadata of a foreign agent. Accepted metadata names possible memory, and every byte of the
/// metadata belongs to a field.
pub fn agent_metadata(bytes: &[u8]) -> bool {
    let Ok(read) = AgentMetadata::parse(bytes) else { return false };
    assert!(!read.name.is_empty() && !read.backends.is_empty());
    assert!(read.memory.iter().all(|range| range.addr.checked_add(range.len).is_some()));
    assert!(read.memory.len() * 24 < bytes.len());
    let (_, cut) = bytes.split_last().unwrap_or((&0, &[]));
    assert!(AgentMetadata::parse(cut).is_err());
    true
}
