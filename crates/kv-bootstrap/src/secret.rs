//! The secret that servers and clients may share.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

/// Shortest secret, in bytes. (128 random bits in hexadecimal digits have 32.)
const MIN: usize = 16;
/// Longest secret, in bytes.
const MAX: usize = 512;

/// The secret by which a server recognizes its clients: 16 to 512 printable ASCII characters without spaces.
///
/// Clients send the secret in clear text. So it keeps out clients that can reach the port, but not those that
/// can read the network: against these, put TLS in front of the server and of its clients.
///
/// Two secrets are compared in a time that does not depend on where they differ, and the debug form shows
/// nothing of the text.
#[derive(Clone)]
pub struct Secret(Arc<str>);

/// Why a text cannot be a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// The text is too short to be secret, or too long for a header field.
    #[error("the secret has {got} bytes; it must have {min} to {max}")]
    Length {
        /// Length of the text, in bytes.
        got: usize,
        /// Shortest length allowed, in bytes.
        min: usize,
        /// Longest length allowed, in bytes.
        max: usize,
    },
    /// The text has a character that a header field cannot carry: often the line end of the file that the
    /// secret was read from.
    #[error("byte {at} of the secret is not a printable ASCII character; remove spaces and line ends")]
    Character {
        /// Position of the first such byte, from 0.
        at: usize,
    },
}

impl Secret {
    /// A secret with this text, which is used as it is: nothing is trimmed.
    pub fn new(text: &str) -> Result<Secret, SecretError> {
        if !(MIN..=MAX).contains(&text.len()) {
            return Err(SecretError::Length { got: text.len(), min: MIN, max: MAX });
        }
        match text.bytes().position(|byte| !byte.is_ascii_graphic()) {
            Some(at) => Err(SecretError::Character { at }),
            None => Ok(Secret(text.into())),
        }
    }

    /// The `Authorization` header field that carries the secret, with its line end.
    pub(crate) fn field(&self) -> String {
        format!("Authorization: Bearer {}\r\n", self.0)
    }

    /// True if the value of an `Authorization` header field carries the secret. The time that this takes
    /// depends on the length of the value, never on where it differs.
    pub(crate) fn admits(&self, shown: Option<&[u8]>) -> bool {
        let Some((scheme, token)) = shown.and_then(|value| value.split_at_checked("Bearer ".len())) else {
            return false;
        };
        scheme.eq_ignore_ascii_case(b"Bearer ") && self.is(token.trim_ascii())
    }

    fn is(&self, token: &[u8]) -> bool {
        let ours = self.0.as_bytes().iter().cycle();
        let differing = token.iter().zip(ours).fold(0, |all, (a, b)| black_box(all | (a ^ b)));
        black_box(differing) == 0 && token.len() == self.0.len()
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.is(other.0.as_bytes())
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_secret_is_admitted() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        for shown in ["Bearer 0123456789abcdef", "bearer  0123456789abcdef", "BEARER 0123456789abcdef "] {
            assert!(secret.admits(Some(shown.as_bytes())), "{shown}");
        }
        let twice = "Bearer 0123456789abcdef0123456789abcdef";
        let wrong =
            ["", "Bearer", "Bearer ", "Bearer 0", "Bearer 0123456789abcdeF", "Basic 0123456789abcdef", twice];
        for shown in wrong {
            assert!(!secret.admits(Some(shown.as_bytes())), "{shown}");
        }
        assert!(!secret.admits(None));
    }

    #[test]
    fn secrets_are_fit_for_a_header_and_never_shown_in_logs() {
        assert_eq!(Secret::new("short"), Err(SecretError::Length { got: 5, min: 16, max: 512 }));
        assert_eq!(Secret::new(&"x".repeat(513)), Err(SecretError::Length { got: 513, min: 16, max: 512 }));
        assert_eq!(Secret::new("0123456789abcdef\r\nX: y"), Err(SecretError::Character { at: 16 }));
        assert_eq!(Secret::new("0123456789 abcdef"), Err(SecretError::Character { at: 10 }));
        assert!(!format!("{:?}", Secret::new("0123456789abcdef").unwrap()).contains("0123"));
    }
}
