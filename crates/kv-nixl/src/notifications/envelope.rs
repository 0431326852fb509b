//! The envelope of a frame, inside a NIXL notification or a datagram.

use bytes::Bytes;

/// Bytes of the envelope, which come before the payload.
pub(crate) const HEADER: usize = 18;

const VERSION: u8 = 2;

/// A notification of this crate.
///
/// NIXL tells a notification's sender by a name that the sender has written, and an address can have a new
/// owner after a restart. So every notification carries the token of the receiving transport, and other
/// transports drop the notification. The number of a connection is drawn at random and told to the other end
/// only: a notification that names the number comes from that end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notification {
    /// The token of the receiving transport.
    pub(crate) to: u64,
    /// The sender's number of its connection to the receiver: counts start at zero with each number. In
    /// [`Kind::Arrived`], the receiver's number of the connection.
    pub(crate) connection: u64,
    /// The content of the notification.
    pub(crate) kind: Kind,
}

/// The content of a notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A frame of the transport's owner.
    Frame(Bytes),
    /// This many bytes, headers included, have arrived on the connection that is named.
    Arrived(u64),
    /// Asks whether the receiver's thread has come so far: behind the requests that the sender has begun.
    Ask(u64),
    /// An answer from the thread itself, outside of NIXL's progress. It counts for the receiver as a frame of 16 bytes,
    /// so that who asks without end and reads nothing gets no more answers than frames.
    Answer(Answer),
    /// No content: a probe finds out whether the connection still works.
    Probe,
    /// The sender ends: none of its requests is on its way, and none will follow. The number is that of the
    /// receiver's connection to the sender, which the receiver has told nobody else.
    Farewell(u64),
}

/// What was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The connection of the question.
    pub(crate) asked: u64,
    /// The number of the question.
    pub(crate) number: u64,
}

impl Answer {
    /// Bytes of an answer.
    pub(crate) const LEN: usize = 16;

    fn encode(self) -> [u8; Answer::LEN] {
        (u128::from(self.asked) | (u128::from(self.number) << 64)).to_le_bytes()
    }

    fn decode(payload: &[u8]) -> Option<Answer> {
        let both = u128::from_le_bytes(payload.try_into().ok()?);
        Some(Answer { asked: both as u64, number: (both >> 64) as u64 })
    }
}

impl Notification {
    /// The bytes of the notification.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, payload): (u8, &[u8]) = match &self.kind {
            Kind::Frame(frame) => (0, frame),
            Kind::Arrived(count) => (1, &count.to_le_bytes()),
            Kind::Probe => (2, &[]),
            Kind::Farewell(proof) => (3, &proof.to_le_bytes()),
            Kind::Ask(number) => (4, &number.to_le_bytes()),
            Kind::Answer(answer) => (5, &answer.encode()),
        };
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.extend([VERSION, kind]);
        bytes.extend(self.to.to_le_bytes());
        bytes.extend(self.connection.to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// The notification in these bytes; `None` if they are no notification of this crate.
    pub(crate) fn decode(bytes: &Bytes) -> Option<Notification> {
        let (head, payload) = bytes.split_at_checked(HEADER)?;
        let number = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
        let (to, connection) = (number(2)?, number(10)?);
        let kind = match (*head.first()?, *head.get(1)?) {
            (VERSION, 0) => None,
            (VERSION, 1) => Some(Kind::Arrived(u64::from_le_bytes(payload.try_into().ok()?))),
            (VERSION, 2) if payload.is_empty() => Some(Kind::Probe),
            (VERSION, 3) => Some(Kind::Farewell(u64::from_le_bytes(payload.try_into().ok()?))),
            (VERSION, 4) => Some(Kind::Ask(u64::from_le_bytes(payload.try_into().ok()?))),
            (VERSION, 5) => Some(Kind::Answer(Answer::decode(payload)?)),
            _ => return None,
        };
        let kind = kind.unwrap_or_else(|| Kind::Frame(bytes.slice(HEADER..)));
        Some(Notification { to, connection, kind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_survive_the_trip_and_no_damage_panics() {
        for kind in [
            Kind::Frame(Bytes::new()),
            Kind::Frame(Bytes::from_static(b"frame")),
            Kind::Arrived(u64::MAX),
            Kind::Probe,
            Kind::Farewell(1 << 60),
            Kind::Ask(9),
            Kind::Answer(Answer { asked: 1 << 60, number: 1 << 50 }),
        ] {
            let sent = Notification { to: 1 << 63, connection: 7, kind };
            let bytes = Bytes::from(sent.encode());
            assert_eq!(Notification::decode(&bytes), Some(sent));
            for len in 0..HEADER {
                assert_eq!(Notification::decode(&bytes.slice(..len)), None);
            }
            for at in 0..bytes.len() {
                for value in [0, 3, 0x7f, 0xff] {
                    let mut damaged = bytes.to_vec();
                    damaged[at] = value;
                    let _ = Notification::decode(&damaged.into());
                }
            }
        }
        let mut longer = Notification { to: 1, connection: 2, kind: Kind::Arrived(3) }.encode();
        longer.push(0);
        assert_eq!(Notification::decode(&longer.into()), None);
    }
}
