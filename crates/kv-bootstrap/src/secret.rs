//! The secret that servers and clients may share.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

/// Shortest secret, in bytes: 128 bits in hexadecimal digits are twice as long.
const MIN: usize = 16;
/// Longest secret, in bytes.
const MAX: usize = 512;

/// What a client shows a server to be let in: 16 to 512 printable ASCII characters without spaces.
///
/// It is sent in clear text. It keeps out whoever can reach the port, not whoever can read the
/// network; for that, put TLS in front of the server and of its clients.
#[derive(Clone)]
pub struct Secret(Arc<str>);

/// A text that cannot be a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// Too short to be one, or too long for a header field.
    #[error("the secret has {got} bytes; it must have {min} to {max}")]
    Length {
        /// Its length.
        got: usize,
        /// The shortest allowed.
        min: usize,
        /// The longest allowed.
        max: usize,
    },
    /// A character that a header field cannot carry: often the line end of the file it was read from.
    #[error("byte {at} of the secret is not a printable ASCII character")]
    Character {
        /// Where.
        at: usize,
    },
}

impl Secret {
    /// Takes a text as a secret.
    pub fn new(text: &str) -> Result<Secret, SecretError> {
        if !(MIN..=MAX).contains(&text.len()) {
            return Err(SecretError::Length { got: text.len(), min: MIN, max: MAX });
        }
        match text.bytes().position(|byte| !byte.is_ascii_graphic()) {
            Some(at) => Err(SecretError::Character { at }),
            None => Ok(Secret(text.into())),
        }
    }

    /// The header field that shows it, with its line end.
    pub(crate) fn field(&self) -> String {
        format!("Authorization: Bearer {}\r\n", self.0)
    }

    /// Whether an `Authorization` header field shows it. How long that takes depends on the length
    /// of what was shown, never on where it differs.
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
