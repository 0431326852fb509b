//! The form of a transport's metadata: four magic bytes, which name the kind of transport and its version, and then a
//! value as msgpack. What the value holds is the transport's.

use bytes::Bytes;
use kv_core::wire::lengths_fit;
use kv_core::{MAX_REGIONS, TransportError};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest metadata of a transport, in bytes.
pub const MAX: usize = (64 << 10) + 64 * MAX_REGIONS;

/// The bytes that are given to peers.
pub fn encode(magic: [u8; 4], value: &impl Serialize) -> Result<Bytes, TransportError> {
    let mut out = magic.to_vec();
    rmp_serde::encode::write(&mut out, value)
        .map_err(|_| TransportError::Metadata("this transport's own metadata cannot be encoded"))?;
    Ok(out.into())
}

/// Reads bytes that a peer, or a stranger, sent. The caller checks what the value says. `foreign` is the reason for which
/// metadata with other magic bytes is refused.
///
/// # Errors
///
/// [`TransportError::Metadata`], with the reason.
pub fn decode<T: DeserializeOwned>(
    magic: [u8; 4],
    foreign: &'static str,
    bytes: &[u8],
) -> Result<T, TransportError> {
    if bytes.len() > MAX {
        return Err(TransportError::Metadata("it is too long"));
    }
    let body = bytes.strip_prefix(&magic).ok_or(TransportError::Metadata(foreign))?;
    let value = if lengths_fit(body) { rmp_serde::from_slice(body).ok() } else { None };
    value.ok_or(TransportError::Metadata("it is damaged"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: [u8; 4] = *b"KVX\x03";

    #[test]
    fn metadata_is_refused_with_the_reason_that_names_what_is_wrong() {
        let read = |bytes: &[u8]| decode::<Vec<String>>(MAGIC, "it is foreign", bytes);
        let refused = |reason| Err(TransportError::Metadata(reason));
        let value = vec!["one".to_owned(), "two".to_owned()];
        let bytes = encode(MAGIC, &value).unwrap();
        assert_eq!(read(&bytes), Ok(value));
        for len in 0..bytes.len() {
            let reason = if len < MAGIC.len() { "it is foreign" } else { "it is damaged" };
            assert_eq!(read(&bytes[..len]), refused(reason), "{len} bytes");
        }
        assert_eq!(read(&[b"KVX\x02", &bytes[4..]].concat()), refused("it is foreign"), "another version");
        assert_eq!(read(&[&MAGIC[..], &[0x92, 1, 2]].concat()), refused("it is damaged"), "another type");
        // A list that promises more than there is.
        assert_eq!(read(&[&MAGIC[..], &[0xdd, 0xff, 0xff, 0xff, 0xff]].concat()), refused("it is damaged"));
        let longest = vec!["x".repeat(MAX - MAGIC.len() - 6)];
        let bytes = encode(MAGIC, &longest).unwrap();
        assert_eq!(bytes.len(), MAX);
        assert_eq!(read(&bytes), Ok(longest));
        assert_eq!(read(&[&bytes[..], &[0]].concat()), refused("it is too long"));
    }
}
