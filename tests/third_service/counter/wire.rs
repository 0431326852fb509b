//! The two messages of the service.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

/// A message between a holder and a client.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    /// A client wants a number. The question is repeated until it is answered, and the holder recognizes
    /// repetitions by `question`. The holder sends `asked` back as it is. `client` is the metadata of the
    /// client's transport.
    Ask { question: u64, asked: u64, client: Bytes },
    /// A holder leases a number to the client for so long from now.
    Leased { question: u64, asked: u64, number: u64, lasts: Duration, client: Bytes },
}

const ASK: u8 = 1;
const LEASED: u8 = 2;

impl Message {
    pub fn encode(&self) -> Bytes {
        let mut frame = BytesMut::new();
        match self {
            Message::Ask { question, asked, client } => {
                frame.put_u8(ASK);
                frame.put_u64(*question);
                frame.put_u64(*asked);
                frame.put_slice(client);
            }
            Message::Leased { question, asked, number, lasts, client } => {
                frame.put_u8(LEASED);
                frame.put_u64(*question);
                frame.put_u64(*asked);
                frame.put_u64(*number);
                frame.put_u64(u64::try_from(lasts.as_nanos()).unwrap_or(u64::MAX));
                frame.put_slice(client);
            }
        }
        frame.freeze()
    }

    /// The message in a frame; `None` if there is none.
    pub fn decode(frame: &[u8]) -> Option<Message> {
        let (kind, rest) = frame.split_first()?;
        let (question, rest) = take(rest)?;
        let (asked, rest) = take(rest)?;
        match *kind {
            ASK => Some(Message::Ask { question, asked, client: Bytes::copy_from_slice(rest) }),
            LEASED => {
                let (number, rest) = take(rest)?;
                let (nanos, rest) = take(rest)?;
                let (lasts, client) = (Duration::from_nanos(nanos), Bytes::copy_from_slice(rest));
                Some(Message::Leased { question, asked, number, lasts, client })
            }
            _ => None,
        }
    }
}

fn take(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_be_bytes(*number), rest))
}
