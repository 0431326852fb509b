//! The first bytes of every connection: who dials, whom, and for which way; and the answer.
//!
//! Both greetings have a fixed length, so that a stranger costs no more memory than one greeting.
//!
//! | hello of the dialer | bytes | welcome of the other side | bytes |
//! |---|---|---|---|
//! | magic bytes with the version | 4 | magic bytes with the version | 4 |
//! | number of the connection in the way, from 0 | 4 | 0 | 4 |
//! | identity that the dialer expects | 48 | identity of the answering side | 48 |
//! | identity of the dialer | 48 | the dialer's way, repeated | 16 |
//! | number of the way, random | 16 | its clock, in nanoseconds | 8 |

use kv_core::Time;
use kv_host::Token;

use crate::metadata::Identity;

/// Length of a hello, in bytes.
pub(crate) const HELLO: usize = 8 + 2 * Identity::LEN + Token::LEN;
/// Length of a welcome, in bytes.
pub(crate) const WELCOME: usize = 8 + Identity::LEN + Token::LEN + 8;

const ASKS: [u8; 4] = *b"KVt\x02";
const ANSWERS: [u8; 4] = *b"KVw\x02";

/// What the side that dials says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Number of this connection among those of the way; 0 is the one that carries frames.
    pub(crate) number: u32,
    /// Whom the dialer wants to reach.
    pub(crate) to: Identity,
    /// Who the dialer says it is.
    pub(crate) from: Identity,
    /// The way that this connection is part of: random, and the same in all connections of a way.
    pub(crate) way: Token,
}

/// The answer to a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// Who answers.
    pub(crate) from: Identity,
    /// The way that was asked for.
    pub(crate) way: Token,
    /// The answering side's clock.
    pub(crate) clock: Time,
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        let mut at = Fill(&mut out);
        at.put(&ASKS);
        at.put(&self.number.to_le_bytes());
        at.identity(&self.to);
        at.identity(&self.from);
        at.put(&self.way.to_bytes());
        out
    }

    /// `None` for anything that is not a hello of this version.
    pub(crate) fn decode(bytes: &[u8; HELLO]) -> Option<Hello> {
        let mut at = Take(bytes);
        (at.take::<4>()? == ASKS).then_some(())?;
        Some(Hello {
            number: u32::from_le_bytes(at.take()?),
            to: at.identity()?,
            from: at.identity()?,
            way: Token::from_bytes(at.take()?),
        })
    }

    /// True if the first bytes of a hello, so far as they have come, are those of this version.
    pub(crate) fn may_begin_with(bytes: &[u8]) -> bool {
        bytes.iter().zip(ASKS).all(|(got, wanted)| *got == wanted)
    }
}

impl Welcome {
    pub(crate) fn encode(&self) -> [u8; WELCOME] {
        let mut out = [0; WELCOME];
        let mut at = Fill(&mut out);
        at.put(&ANSWERS);
        at.put(&[0; 4]);
        at.identity(&self.from);
        at.put(&self.way.to_bytes());
        at.put(&self.clock.as_nanos().to_le_bytes());
        out
    }

    /// `None` for anything that is not a welcome of this version.
    pub(crate) fn decode(bytes: &[u8; WELCOME]) -> Option<Welcome> {
        let mut at = Take(bytes);
        (at.take::<4>()? == ANSWERS).then_some(())?;
        at.take::<4>()?;
        Some(Welcome {
            from: at.identity()?,
            way: Token::from_bytes(at.take()?),
            clock: Time::from_nanos(u64::from_le_bytes(at.take()?)),
        })
    }
}

struct Fill<'a>(&'a mut [u8]);

impl Fill<'_> {
    fn put(&mut self, bytes: &[u8]) {
        if let Some((here, rest)) = std::mem::take(&mut self.0).split_at_mut_checked(bytes.len()) {
            here.copy_from_slice(bytes);
            self.0 = rest;
        }
    }

    fn identity(&mut self, identity: &Identity) {
        self.put(&identity.token.to_bytes());
        self.put(&identity.hash);
    }
}

struct Take<'a>(&'a [u8]);

impl Take<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (here, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*here)
    }

    fn identity(&mut self) -> Option<Identity> {
        Some(Identity { token: Token::from_bytes(self.take()?), hash: self.take()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &[u8]) -> Identity {
        Identity::of(Token::random().unwrap(), name)
    }

    #[test]
    fn greetings_survive_the_trip_and_greetings_of_another_version_are_refused() {
        let way = Token::random().unwrap();
        let hello = Hello { number: 3, to: identity(b"to"), from: identity(b"from"), way };
        let mut bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Some(hello));
        assert!((0..=HELLO).all(|len| Hello::may_begin_with(&bytes[..len])));
        bytes[3] = 1;
        assert_eq!(Hello::decode(&bytes), None);
        assert!(Hello::may_begin_with(&bytes[..3]) && !Hello::may_begin_with(&bytes[..4]));

        let welcome = Welcome { from: identity(b"from"), way, clock: Time::from_nanos(u64::MAX - 5) };
        let mut bytes = welcome.encode();
        assert_eq!(Welcome::decode(&bytes), Some(welcome));
        bytes[0] = b'H';
        assert_eq!(Welcome::decode(&bytes), None);
    }
}
