//! Reading the messages of newer versions: unknown fields are skipped, and unknown values are told
//! apart from broken ones.

use std::fmt;
use std::io::ErrorKind::UnexpectedEof;
use std::marker::PhantomData;

use bytes::Bytes;
use rmp_serde::decode::Error::InvalidMarkerRead;
use rmp_serde::decode::ReadSlice;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{DeserializeOwned, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::lengths::lengths_fit;

/// How deep values in a frame may be nested, those of unknown fields included.
const MAX_DEPTH: usize = 16;

/// The value in these bytes, which must be one value of this type and nothing after it; otherwise
/// `None`.
pub(crate) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    if lengths_fit(bytes) { read_bounded(bytes) } else { None }
}

/// As [`read`], for a type that allocates room for the items of a list only as they come.
pub(super) fn read_bounded<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let mut from = rmp_serde::Deserializer::from_read_ref(bytes);
    from.set_max_depth(MAX_DEPTH);
    let value = T::deserialize(&mut from).ok();
    if value.is_some() && is_at_end(&mut from) { value } else { None }
}

/// True if not even the first byte of another value is left. Of all types, the decoder looks for the first byte of an
/// optional value in the fewest steps.
fn is_at_end<'de, R: ReadSlice<'de>>(from: &mut rmp_serde::Deserializer<R>) -> bool {
    matches!(<Option<()>>::deserialize(from), Err(InvalidMarkerRead(error)) if error.kind() == UnexpectedEof)
}

/// The fields of a message as an array. A newer version may have appended more fields, which are
/// skipped.
pub(super) struct Fields<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Fields<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Fields<T>, D::Error> {
        from.deserialize_seq(FieldsVisitor(PhantomData))
    }
}

struct FieldsVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for FieldsVisitor<T> {
    type Value = Fields<T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("the fields of a message")
    }

    #[inline]
    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<Fields<T>, A::Error> {
        let known = T::deserialize(SeqAccessDeserializer::new(&mut fields))?;
        while fields.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Fields(known))
    }
}

/// The cause of a failure, with its fields by name, encoded as bytes of its own: a newer version
/// may have more causes, and more fields.
pub(super) mod cause {
    use super::*;
    use crate::error::PeerCause;

    pub fn serialize<S: Serializer>(cause: &PeerCause, out: S) -> Result<S::Ok, S::Error> {
        write_by_name(cause, out)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PeerCause, D::Error> {
        let bytes = Bytes::deserialize(from)?;
        // By its name, not by its position: a position means different causes in different
        // versions.
        let Variant(name) = read(&bytes).ok_or_else(|| D::Error::custom("a cause has no name"))?;
        Ok(read(&bytes).unwrap_or_else(|| PeerCause::other(name)))
    }
}

/// A geometry, with its fields by name, encoded as bytes of its own; `None` if it holds a value
/// that this version does not know, so that its owner can be told so.
pub(super) mod geometry {
    use super::*;
    use crate::layout::Geometry;

    pub fn serialize<S: Serializer>(geometry: &Option<Box<Geometry>>, out: S) -> Result<S::Ok, S::Error> {
        match geometry {
            Some(geometry) => write_by_name(geometry, out),
            None => out.serialize_bytes(&[]),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Box<Geometry>>, D::Error> {
        Ok(read(&Bytes::deserialize(from)?))
    }
}

fn write_by_name<T: Serialize, S: Serializer>(value: &T, out: S) -> Result<S::Ok, S::Error> {
    let bytes = rmp_serde::to_vec_named(value).map_err(serde::ser::Error::custom)?;
    out.serialize_bytes(&bytes)
}

/// The name of an enum's variant, with any name and any fields.
struct Variant(String);

impl<'de> Deserialize<'de> for Variant {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Variant, D::Error> {
        from.deserialize_any(VariantVisitor)
    }
}

struct VariantVisitor;

impl<'de> Visitor<'de> for VariantVisitor {
    type Value = Variant;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a name, or a map from a name to fields")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Variant, E> {
        Ok(Variant(name.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Variant, A::Error> {
        let (name, IgnoredAny) = map.next_entry()?.ok_or_else(|| A::Error::custom("no name"))?;
        Ok(Variant(name))
    }
}
