//! Checks that the lengths in msgpack bytes can be true, before any memory is allocated for them.

use crate::meter::step;

/// True if the first msgpack value in these bytes is complete, and every list, map and text in it
/// is followed by at least one byte for each item that its length promises. Readers allocate room
/// for a list before they read it; without this check, a false length would cost memory that no
/// byte has paid for. Bytes after the first value are not examined.
pub fn lengths_fit(bytes: &[u8]) -> bool {
    walk(bytes).is_some()
}

/// Walks along the first value; `None` if the value is incomplete, or if a length in it is longer
/// than the bytes that follow.
fn walk(bytes: &[u8]) -> Option<()> {
    let mut at: usize = 0;
    // Values that are still to come.
    let mut promised: usize = 1;
    while promised > 0 {
        step(1);
        let first = *bytes.get(at)?;
        promised -= 1;
        at += match WIDTHS[usize::from(first)] {
            0 => {
                let (width, values) = lengthy(first, bytes.get(at + 1..)?)?;
                promised = promised.saturating_add(values);
                if promised > bytes.len().checked_sub(at + width)? {
                    return None;
                }
                width
            }
            width => usize::from(width),
        };
    }
    (at <= bytes.len()).then_some(())
}

/// How many bytes a value with this first byte takes; 0 if the number depends on a length.
const WIDTHS: [u8; 256] = {
    let mut widths = [1; 256];
    let mut first = 0;
    while first < 256 {
        widths[first] = match first {
            0x80..=0xbf | 0xc4..=0xc9 | 0xd9..=0xdf => 0,
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 => 3,
            0xce | 0xd2 | 0xca => 5,
            0xcf | 0xd3 | 0xcb => 9,
            0xd4..=0xd8 => 2 + (1 << (first - 0xd4)),
            _ => 1,
        };
        first += 1;
    }
    widths
};

/// For a value with a length: how many bytes it takes without the values in it, and how many values it has.
fn lengthy(first: u8, after: &[u8]) -> Option<(usize, usize)> {
    // Bytes of the length, and bytes of the value that neither it nor its length counts.
    let (width, extra) = match first {
        0xde | 0xdc | 0xda | 0xc5 => (2, 0),
        0xdf | 0xdd | 0xdb | 0xc6 => (4, 0),
        0xd9 | 0xc4 => (1, 0),
        0xc7..=0xc9 => (1 << (first - 0xc7), 1),
        _ => (0, 0),
    };
    let length = match first {
        0x80..=0x9f => usize::from(first & 0x0f),
        0xa0..=0xbf => usize::from(first & 0x1f),
        _ => after.get(..width)?.iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte)),
    };
    Some(match first {
        0x80..=0x8f | 0xde | 0xdf => (1 + width, length.saturating_mul(2)),
        0x90..=0x9f | 0xdc | 0xdd => (1 + width, length),
        _ => (1 + width + extra + length, 0),
    })
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
    fn encoded_lengths_fit_their_bytes_and_no_truncation_does() {
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
    fn a_length_beyond_the_bytes_is_refused_at_any_depth() {
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
