//! [`Token`]: the name of one life of one transport.

use serde::{Deserialize, Serialize};

use crate::error::OsError;
use crate::random::random;

/// 128 random bits that name one life of one transport: its incarnation. A peer that knows the token has been given
/// the transport's metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token(u64, u64);

impl Token {
    /// The length of a token, in bytes.
    pub const LEN: usize = 16;

    /// A token that nobody can guess.
    pub fn random() -> Result<Token, OsError> {
        Ok(Token::from_bytes(random()?))
    }

    /// The token of these bytes.
    pub fn from_bytes(bytes: [u8; Token::LEN]) -> Token {
        let number = u128::from_le_bytes(bytes);
        Token(number as u64, (number >> 64) as u64)
    }

    /// The bytes of the token.
    pub fn to_bytes(self) -> [u8; Token::LEN] {
        (u128::from(self.0) | u128::from(self.1) << 64).to_le_bytes()
    }
}
