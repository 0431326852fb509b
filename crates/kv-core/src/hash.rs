//! The one small hash function of this workspace. It is a published one, so that other languages
//! can compute the same values; it does not resist somebody who looks for collisions.

/// A running FNV-1a hash of 64 bits (Fowler, Noll and Vo; offset basis `0xcbf29ce484222325`, prime
/// `0x100000001b3`).
#[derive(Debug, Clone, Copy)]
pub struct Fnv1a(u64);

impl Fnv1a {
    /// The hash of no bytes.
    pub const fn new() -> Fnv1a {
        Fnv1a(0xcbf2_9ce4_8422_2325)
    }

    /// The hash of these bytes alone.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut hash = Fnv1a::new();
        hash.write(bytes);
        hash.finish()
    }

    /// Adds bytes to the hash.
    pub fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The hash of all bytes that were added so far.
    pub const fn finish(self) -> u64 {
        self.0
    }
}

impl Default for Fnv1a {
    fn default() -> Fnv1a {
        Fnv1a::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_published_fnv1a_vectors() {
        for (text, hash) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            assert_eq!(Fnv1a::of(text.as_bytes()), hash, "{text}");
        }
    }
}
