//! Small values that both workers must have alike, compared when the workers meet.

use serde::{Deserialize, Serialize};

use super::{Geometry, GeometryError, Layout};
use crate::error::Mismatch;
use crate::hash::Fnv1a;
use crate::meter::each;

/// Most constants of one cache.
pub const MAX_CONSTANTS: usize = 16;

/// Most bytes of a value that peers are told as it is. Of a longer value they are told the hash.
const SHOWN: usize = 16;

/// A value without which the bytes of a cache mean something else, such as the fixed scales of an fp8
/// cache. Peers are told values of up to 16 bytes; of longer ones, the length and a hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Constant {
    name: String,
    len: u64,
    /// The value, or its hash.
    value: Vec<u8>,
}

impl Constant {
    /// A name that both engines use, of 1 to 64 bytes, and the bytes of the value, the same on every
    /// rank: for scales of heads, those of all heads of the model. A value that every worker measures for
    /// itself is sent with the request instead, as a slot of a [cache group](super::CacheGroup).
    ///
    /// ```
    /// use kv_core::layout::Constant;
    /// use kv_core::{ArgsError, Geometry, KvArgs, Layout, Region, RegionRole};
    ///
    /// let cache = |scale: f32| -> Result<Geometry, ArgsError> {
    ///     let constants = vec![Constant::new("k_scale", &scale.to_le_bytes())];
    ///     let args = KvArgs::builder("engine", 0)
    ///         .pages(100, 16)
    ///         .layout(Layout::default().with(|layout| layout.constants = constants))
    ///         .region(Region::dram(RegionRole::Kv, 0x1000, 100 * 64, 64));
    ///     Ok(args.build()?.geometry().clone())
    /// };
    /// assert!(cache(0.5)?.check(&cache(0.5)?).is_ok());
    /// let mismatch = cache(0.5)?.check(&cache(0.25)?).unwrap_err();
    /// assert_eq!(mismatch.field, "layout.constants (k_scale)");
    /// assert_eq!((&*mismatch.ours, &*mismatch.theirs), ("4 bytes (0000003f)", "4 bytes (0000803e)"));
    /// # Ok::<(), ArgsError>(())
    /// ```
    pub fn new(name: &str, value: &[u8]) -> Constant {
        let told = if value.len() > SHOWN { &Fnv1a::of(value).to_be_bytes() } else { value };
        Constant { name: name.to_owned(), len: value.len() as u64, value: told.to_vec() }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The value as a text, in hexadecimal digits.
    fn shown(&self) -> String {
        let Constant { len, value, .. } = self;
        let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        if *len > SHOWN as u64 {
            format!("{len} bytes with hash {digits}")
        } else {
            format!("{len} bytes ({digits})")
        }
    }
}

impl Layout {
    pub(super) fn validate_constants(&self) -> Result<(), GeometryError> {
        let within = |field, got: usize, min, max: usize| match (min..=max).contains(&got) {
            true => Ok(()),
            false => Err(GeometryError::Range { field, got: got as u64, min: min as u64, max: max as u64 }),
        };
        within("layout.constants.len", self.constants.len(), 0, MAX_CONSTANTS)?;
        each(&self.constants).try_for_each(|Constant { name, value, .. }| {
            within("layout.constants.name.len", name.len(), 1, 64)?;
            within("layout.constants.value.len", value.len(), 0, SHOWN)
        })
    }
}

impl Geometry {
    /// Both sides have the same constants, in any order.
    pub(super) fn check_constants(&self, peer: &Geometry) -> Result<(), Mismatch> {
        let (ours, theirs) = (&self.layout.constants, &peer.layout.constants);
        for Constant { name, .. } in each(ours).chain(theirs) {
            let of = |all: &[Constant]| {
                let found = all.iter().find(|constant| constant.name == *name);
                found.map_or_else(|| "absent".to_owned(), Constant::shown)
            };
            let (ours, theirs) = (of(ours), of(theirs));
            if ours != theirs {
                // Escaped: the peer chose the characters.
                let field = format!("layout.constants ({})", name.escape_debug());
                return Err(Mismatch { field, ours, theirs });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::KvArgs;
    use crate::layout::{Region, RegionRole};

    fn cache(constants: &[(&str, &[u8])]) -> Geometry {
        let constants = constants.iter().map(|(name, value)| Constant::new(name, value)).collect();
        let layout = Layout::default().with(|layout| layout.constants = constants);
        let region = Region::dram(RegionRole::Kv, 0x1000, 640, 64);
        KvArgs::builder("e", 0)
            .pages(10, 16)
            .layout(layout)
            .region(region)
            .build()
            .unwrap()
            .geometry()
            .clone()
    }

    #[test]
    fn constants_are_compared_in_any_order_and_named_with_both_values() {
        let ours = cache(&[("k", b"one"), ("v", b"two")]);
        assert_eq!(ours.check(&cache(&[("v", b"two"), ("k", b"one")])), Ok(()));
        let refused = |theirs: &[(&str, &[u8])]| {
            let (theirs, mismatch) = (cache(theirs), ours.check(&cache(theirs)).unwrap_err());
            let back = theirs.check(&ours).unwrap_err();
            assert_eq!((&mismatch.field, &mismatch.ours), (&back.field, &back.theirs));
            (mismatch.field, mismatch.theirs)
        };
        let other = ("layout.constants (v)".to_owned(), "5 bytes (6f74686572)".to_owned());
        assert_eq!(refused(&[("k", b"one"), ("v", b"other")]), other);
        let long = [7; SHOWN + 1];
        let hash = format!("17 bytes with hash {:016x}", Fnv1a::of(&long));
        assert_eq!(refused(&[("k", b"one"), ("v", &long)]), ("layout.constants (v)".to_owned(), hash));
        assert_eq!(refused(&[("k", b"one")]), ("layout.constants (v)".to_owned(), "absent".to_owned()));
        // A worker of an older version has none, and skips those of others: the newer one refuses.
        let bytes = rmp_serde::to_vec_named(&cache(&[])).unwrap();
        assert!(!bytes.windows(9).any(|part| part == b"constants"));
        assert_eq!(ours.check(&rmp_serde::from_slice(&bytes).unwrap()).unwrap_err().theirs, "absent");
        let bytes = rmp_serde::to_vec_named(&ours).unwrap();
        assert_eq!(rmp_serde::from_slice::<Geometry>(&bytes).unwrap(), ours);
    }

    #[test]
    fn the_number_and_the_names_of_constants_are_bounded() {
        let names = vec![("k", &b""[..]); MAX_CONSTANTS];
        assert_eq!(cache(&names).validate(), Ok(()));
        let refused = |constants: Vec<Constant>| {
            let mut geometry = cache(&[]);
            geometry.layout.constants = constants;
            geometry.validate().unwrap_err()
        };
        let range = |field, got, min, max| GeometryError::Range { field, got, min, max };
        let many = vec![Constant::new("k", b""); MAX_CONSTANTS + 1];
        assert_eq!(refused(many), range("layout.constants.len", 17, 0, 16));
        for len in [0, 65] {
            let name = Constant::new(&"x".repeat(len), b"");
            assert_eq!(refused(vec![name]), range("layout.constants.name.len", len as u64, 1, 64));
        }
        let long = Constant { value: vec![0; SHOWN + 1], ..Constant::new("k", b"") };
        assert_eq!(refused(vec![long]), range("layout.constants.value.len", 17, 0, 16));
    }
}
