//! The size of an embedding.

/// The shape of one embedding: `rows` rows of `row_bytes` bytes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of the embedding, one for each placeholder token of the item.
    pub rows: u32,
    /// Bytes of one row: its width in elements times the bytes of an element.
    pub row_bytes: u32,
}

impl Shape {
    /// Bytes of the whole embedding.
    pub fn bytes(self) -> u64 {
        u64::from(self.rows) * u64::from(self.row_bytes)
    }

    /// How many blocks of `block_bytes` bytes hold the embedding; the last block may be filled in part. A result
    /// above `u32::MAX` is `u32::MAX`, and a block length of zero counts as one byte.
    pub fn blocks(self, block_bytes: u32) -> u32 {
        let blocks = self.bytes().div_ceil(u64::from(block_bytes.max(1)));
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_takes_whole_blocks_and_never_overflows() {
        let shape = Shape { rows: 880, row_bytes: 5120 };
        assert_eq!((shape.bytes(), shape.blocks(5120), shape.blocks(8192)), (4_505_600, 880, 550));
        assert_eq!(Shape { rows: 3, row_bytes: 10 }.blocks(16), 2);
        assert_eq!(Shape { rows: 0, row_bytes: 10 }.blocks(16), 0);
        let largest = Shape { rows: u32::MAX, row_bytes: u32::MAX };
        assert_eq!((largest.blocks(1), largest.blocks(0)), (u32::MAX, u32::MAX));
    }
}
