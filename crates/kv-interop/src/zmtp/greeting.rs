//! The greeting: 64 bytes with which each side begins, without waiting for the other.

use super::error::ZmtpError;

/// Length of a greeting in bytes.
pub(super) const LEN: usize = 64;
/// The name of the mechanism without security, filled up with zeros to 20 bytes.
const NULL: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// Where the mechanism stands in the greeting.
const MECHANISM: std::ops::Range<usize> = 12..32;

/// This side's greeting, byte for byte what libzmq 4.3 sends: version 3.1, mechanism NULL. Bytes 1 to 8 would be
/// the length of a frame in ZMTP 1.
pub(crate) fn ours() -> [u8; LEN] {
    let mut greeting = [0; LEN];
    (greeting[0], greeting[8], greeting[9]) = (0xff, 1, 0x7f);
    (greeting[10], greeting[11]) = (3, 1);
    greeting[MECHANISM].copy_from_slice(NULL);
    greeting
}

/// A peer's greeting while its bytes come in.
#[derive(Debug)]
pub(super) struct Greeting {
    bytes: [u8; LEN],
    filled: usize,
}

impl Greeting {
    pub(super) fn new() -> Greeting {
        Greeting { bytes: [0; LEN], filled: 0 }
    }

    /// Takes bytes away from the input. True when the greeting is there and can be accepted. Every byte that
    /// cannot be accepted is refused as soon as the byte is there.
    pub(super) fn take(&mut self, input: &mut &[u8]) -> Result<bool, ZmtpError> {
        let (now, later) = input.split_at(input.len().min(LEN - self.filled));
        self.bytes[self.filled..self.filled + now.len()].copy_from_slice(now);
        self.filled += now.len();
        *input = later;
        self.check()?;
        Ok(self.filled == LEN)
    }

    fn check(&self) -> Result<(), ZmtpError> {
        let bytes = &self.bytes[..self.filled];
        for (at, want) in [(0, 0xff), (9, 0x7f)] {
            match bytes.get(at) {
                Some(&got) if got != want => return Err(ZmtpError::Signature { at, got, want }),
                _ => {}
            }
        }
        match bytes.get(10) {
            Some(&theirs) if theirs < 3 => return Err(ZmtpError::Version { theirs }),
            _ => {}
        }
        match bytes.get(MECHANISM) {
            Some(mechanism) if mechanism != NULL => {
                let name = mechanism.split(|byte| *byte == 0).next().unwrap_or_default();
                Err(ZmtpError::Mechanism { theirs: String::from_utf8_lossy(name).into_owned() })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<bool, ZmtpError> {
        Greeting::new().take(&mut &*bytes)
    }

    #[test]
    fn greetings_of_versions_3_with_null_are_taken_and_others_refused_with_the_field() {
        let mut theirs = ours();
        for version in [(3, 0), (3, 1), (4, 7)] {
            (theirs[10], theirs[11]) = version;
            // The byte as-server and the filler have no meaning with NULL.
            (theirs[32], theirs[63]) = (1, 9);
            assert_eq!(read(&theirs), Ok(true));
        }
        let with = |at: usize, byte: u8| {
            let mut greeting = ours();
            greeting[at] = byte;
            read(&greeting[..=at.max(31)])
        };
        assert_eq!(with(0, b'G'), Err(ZmtpError::Signature { at: 0, got: b'G', want: 0xff }));
        assert_eq!(with(9, 0), Err(ZmtpError::Signature { at: 9, got: 0, want: 0x7f }));
        assert_eq!(with(10, 2), Err(ZmtpError::Version { theirs: 2 }));
        assert_eq!(with(12, b'M'), Err(ZmtpError::Mechanism { theirs: "MULL".to_owned() }));
        assert_eq!(with(16, b'2'), Err(ZmtpError::Mechanism { theirs: "NULL2".to_owned() }));
        assert_eq!(read(b"GET / HTTP/1.1\r\n").unwrap_err().to_string(), {
            "byte 0 of the greeting is 0x47; ZMTP has 0xff there"
        });
    }
}
