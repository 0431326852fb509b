//! The metadata of all members as one piece of bytes, for owners that ask a transport for its metadata and
//! not for its offers. The form: four magic bytes with the version, a count (one byte), then for each member
//! the length of the name (two bytes), the name, the version (two), the length of the metadata (four), and
//! the metadata. Numbers are little-endian.

use bytes::{BufMut, Bytes, BytesMut};
use kv_core::{MAX_NAME, TransportError, TransportOffer};

use crate::ways::MAX_MEMBERS;

/// "KV ways", version 1.
const MAGIC: [u8; 4] = *b"KVW\x01";

pub(crate) fn encode(offers: &[TransportOffer]) -> Result<Bytes, TransportError> {
    let long = |_| TransportError::Metadata("a member's metadata or name is too long to be encoded");
    let mut out = BytesMut::from(&MAGIC[..]);
    out.put_u8(u8::try_from(offers.len()).map_err(long)?);
    for offer in offers {
        out.put_u16_le(u16::try_from(offer.name.len()).map_err(long)?);
        out.put_slice(offer.name.as_bytes());
        out.put_u16_le(offer.version);
        out.put_u32_le(u32::try_from(offer.metadata.len()).map_err(long)?);
        out.put_slice(&offer.metadata);
    }
    Ok(out.freeze())
}

/// Reads metadata that a peer sent. Time and memory are bounded by the length of `bytes`.
pub(crate) fn decode(bytes: &[u8]) -> Result<Vec<TransportOffer>, TransportError> {
    let Some(rest) = bytes.strip_prefix(&MAGIC) else {
        return Err(TransportError::Metadata("it is not the metadata of several transports, version 1"));
    };
    let damaged = TransportError::Metadata("it is damaged");
    read(rest).ok_or(damaged)
}

fn read(mut rest: &[u8]) -> Option<Vec<TransportOffer>> {
    let count = usize::from(*rest.split_off_first()?);
    if !(1..=MAX_MEMBERS).contains(&count) {
        return None;
    }
    let mut offers: Vec<TransportOffer> = Vec::with_capacity(count);
    for _ in 0..count {
        let len = usize::from(u16::from_le_bytes(number(&mut rest)?));
        let name = std::str::from_utf8(rest.split_off(..len)?).ok()?.to_owned();
        let version = u16::from_le_bytes(number(&mut rest)?);
        let len = u32::from_le_bytes(number(&mut rest)?) as usize;
        let metadata = Bytes::copy_from_slice(rest.split_off(..len)?);
        let known = offers.iter().any(|offer| offer.name == name);
        if known || !(1..=MAX_NAME).contains(&name.len()) {
            return None;
        }
        offers.push(TransportOffer { name, version, metadata });
    }
    rest.is_empty().then_some(offers)
}

fn number<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    rest.split_off(..N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_lengthened_or_duplicate_metadata_is_refused() {
        let offers = ["local", "nixl"].map(|name| TransportOffer::new(name, Bytes::from(vec![7; 300])));
        let bytes = encode(&offers).unwrap();
        assert_eq!(decode(&bytes).unwrap(), offers);
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
        let twice = [offers[0].clone(), offers[0].clone()];
        assert!(decode(&encode(&twice).unwrap()).is_err());
        assert!(decode(&encode(&vec![offers[0].clone(); 17]).unwrap()).is_err());
        assert!(decode(&encode(&[]).unwrap()).is_err());
    }
}
