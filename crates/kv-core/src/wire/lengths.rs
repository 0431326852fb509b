//! Whether the lengths in a msgpack text can be true.

use crate::meter::step;

/// True if every list, map and text in these msgpack bytes has as many bytes after it as its length
/// promises at least: one for each item. Readers make room for a list before they read it, so that a
/// length without a list would cost what no byte has paid for.
pub fn lengths_fit(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    // Values that are still to come.
    let mut promised: usize = 1;
    while promised > 0 {
        step(1);
        let Some((&first, after)) = rest.split_first() else { return false };
        // Bytes of the length, bytes of the value beside those that its length counts, and how many
        // values a unit of the length stands for; none, if it counts bytes.
        let (width, extra, values) = match first {
            0x80..=0x8f | 0xde | 0xdf => (wide(first, 0xde, 2), 0, Some(2)),
            0x90..=0x9f | 0xdc | 0xdd => (wide(first, 0xdc, 2), 0, Some(1)),
            0xa0..=0xbf | 0xd9..=0xdb => (wide(first, 0xd9, 1), 0, None),
            0xc4..=0xc6 => (wide(first, 0xc4, 1), 0, None),
            0xc7..=0xc9 => (wide(first, 0xc7, 1), 1, None),
            0xcc | 0xd0 => (0, 1, None),
            0xcd | 0xd1 => (0, 2, None),
            0xce | 0xd2 | 0xca => (0, 4, None),
            0xcf | 0xd3 | 0xcb => (0, 8, None),
            0xd4..=0xd8 => (0, 1 + (1 << (first - 0xd4)), None),
            _ => (0, 0, None),
        };
        let Some((length, after)) = after.split_at_checked(width) else { return false };
        let length = match first {
            0x80..=0x9f => usize::from(first & 0x0f),
            0xa0..=0xbf => usize::from(first & 0x1f),
            _ => length.iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte)),
        };
        let skip = extra + if values.is_none() { length } else { 0 };
        let Some(after) = after.get(skip..) else { return false };
        promised = promised - 1 + length.saturating_mul(values.unwrap_or(0));
        if promised > after.len() {
            return false;
        }
        rest = after;
    }
    true
}

/// Bytes of a length that follows: none for a kind that has it in its first byte.
fn wide(first: u8, narrowest: u8, bytes: usize) -> usize {
    first.checked_sub(narrowest).map_or(0, |step| bytes << step)
}

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::*;

    #[derive(Serialize)]
    struct All {
        small: (u8, i8, bool, Option<()>),
        wide: (u16, u32, u64, i16, i32, i64, f32, f64),
        texts: [String; 4],
        lists: (Vec<u8>, Vec<u64>, Vec<u64>),
        map: std::collections::BTreeMap<u32, String>,
    }

    fn all(len: usize) -> All {
        All {
            small: (7, -7, true, None),
            wide: (1 << 15, 1 << 31, 1 << 63, -300, -70_000, -1 << 40, 1.5, 1.5),
            texts: [1, 40, 300, 70_000].map(|len| "x".repeat(len)),
            lists: (vec![1; 3], vec![1 << 40; len], vec![0; 70_000]),
            map: (0..len as u32).map(|key| (key, "value".to_owned())).collect(),
        }
    }

    #[test]
    fn what_a_writer_writes_fits_and_no_truncation_of_it_does() {
        for len in [0, 15, 16, 70_000] {
            for bytes in [rmp_serde::to_vec(&all(len)).unwrap(), rmp_serde::to_vec_named(&all(len)).unwrap()]
            {
                assert!(lengths_fit(&bytes));
                for cut in [0, 1, bytes.len() / 3, bytes.len() - 1] {
                    assert!(!lengths_fit(&bytes[..cut]), "{cut} of {}", bytes.len());
                }
            }
        }
        // Extensions and bytes, as rmp does not write them by itself.
        let extension =
            [&[0x97, 0xd4, 1, 2, 0xd8, 1], &[3; 16][..], &[0xc7, 1, 5, 6, 0xc8, 0, 1, 5, 6, 0xc4, 1, 9]];
        let more = [&[0xc9, 0, 0, 0, 0, 5][..], &[0xc6, 0, 0, 0, 1, 9]];
        assert!(lengths_fit(&[extension.concat(), more.concat()].concat()));
    }

    #[test]
    fn a_length_beyond_the_bytes_does_not_fit_however_deep_it_stands() {
        for promise in
            [&[0xdd, 0xff, 0xff, 0xff, 0xff][..], &[0xdc, 0, 9], &[0x9f], &[0x8f], &[0xdb, 0, 0, 1, 0]]
        {
            let mut bytes = vec![0x91; 20];
            bytes.extend(promise);
            bytes.extend([0; 4]);
            assert!(!lengths_fit(&bytes), "{promise:02x?}");
        }
    }
}
