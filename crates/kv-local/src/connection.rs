//! One connected socket that never blocks, with the messages in both directions. [`framing`](crate::framing)
//! has their form.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_host::OsError;

use crate::framing::{Broken, Message};
use crate::handshake::OPENING;
use crate::inbound::{Inbound, Received};
use crate::outbound::Outbound;

/// A socket that does not block, with the bytes that came and the messages that wait to be written.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    inbound: Inbound,
    /// The messages that wait to be written.
    pub(crate) outbound: Outbound,
}

impl Connection {
    /// A connection on a socket that does not block. `limit` bounds the queue of frames, in bytes; the peer's
    /// hello must begin with `opening`.
    pub(crate) fn new(socket: OwnedFd, limit: usize, opening: [u8; OPENING]) -> Connection {
        Connection { socket, inbound: Inbound::new(opening), outbound: Outbound::new(limit) }
    }

    /// The socket, for epoll and for the kernel's word about the peer.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Writes as many bytes as the socket takes, 64 KiB at most. `scratch` is overwritten.
    pub(crate) fn flush(&mut self, scratch: &mut Vec<u8>) -> Result<(), OsError> {
        self.outbound.flush(&self.socket, scratch)
    }

    /// Reads at most `scratch.len()` bytes.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<Received, Broken> {
        self.inbound.receive(&self.socket, scratch)
    }

    /// The next complete message, if one has arrived.
    pub(crate) fn next_message(&mut self) -> Result<Option<Message>, Broken> {
        self.inbound.next_message()
    }

    /// The descriptors that came with the hello.
    pub(crate) fn take_fds(&mut self) -> Vec<OwnedFd> {
        self.inbound.take_fds()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use bytes::Bytes;
    use kv_core::MAX_FRAME;

    use super::*;
    use crate::handshake::MAX_HELLO;

    const OPENS: [u8; OPENING] = [7; OPENING];

    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Connection::new(ours.into(), 4 << 20, OPENS), theirs)
    }

    fn drain(connection: &mut Connection) -> Result<Vec<Message>, Broken> {
        let mut messages = Vec::new();
        let mut scratch = vec![0; 1000];
        loop {
            while let Some(message) = connection.next_message()? {
                messages.push(message);
            }
            if !matches!(connection.receive(&mut scratch)?, Received::Bytes(_)) {
                return Ok(messages);
            }
        }
    }

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend_from_slice(body);
        bytes
    }

    /// Sends a hello without descriptors.
    fn greeting(hello: &[u8]) -> Vec<u8> {
        [message(1, hello), message(4, b"")].concat()
    }

    #[test]
    fn messages_are_whole_however_the_stream_is_cut() {
        let (mut ours, mut theirs) = pair();
        let hello = [&OPENS[..], b"me"].concat();
        let stream = [greeting(&hello), message(2, b""), message(2, &[9; 7000]), message(3, b"")].concat();
        let mut got = Vec::new();
        for piece in stream.chunks(613) {
            theirs.write_all(piece).unwrap();
            got.extend(drain(&mut ours).unwrap());
        }
        let wanted = [
            Message::Hello(Bytes::from(hello)),
            Message::Frame(Bytes::new()),
            Message::Frame(Bytes::from(vec![9; 7000])),
            Message::Goodbye,
        ];
        assert_eq!(got, wanted);
        drop(theirs);
        assert_eq!(ours.receive(&mut [0; 8]), Ok(Received::End));
    }

    #[test]
    fn a_length_is_refused_before_its_body_is_awaited() {
        for (kind, len, greeted) in [
            (1u8, MAX_HELLO as u32 + 1, false),
            (2, MAX_FRAME as u32 + 1, true),
            (2, u32::MAX, true),
            (3, 1, true),
        ] {
            let (mut ours, mut theirs) = pair();
            if greeted {
                theirs.write_all(&greeting(&OPENS)).unwrap();
            }
            theirs.write_all(&len.to_le_bytes()).unwrap();
            theirs.write_all(&[kind]).unwrap();
            assert!(matches!(drain(&mut ours), Err(Broken::Length { .. })), "{kind}");
        }
    }

    #[test]
    fn frames_before_the_hello_and_a_second_hello_break_the_connection() {
        let (mut ours, mut theirs) = pair();
        theirs.write_all(&message(2, b"early")).unwrap();
        assert_eq!(drain(&mut ours), Err(Broken::Kind(2)));
        let (mut ours, mut theirs) = pair();
        theirs.write_all(&[greeting(&OPENS), message(1, &OPENS)].concat()).unwrap();
        assert_eq!(drain(&mut ours), Err(Broken::Kind(1)));
        let (mut ours, mut theirs) = pair();
        theirs.write_all(&[message(1, &OPENS), message(2, b"early")].concat()).unwrap();
        assert_eq!(drain(&mut ours), Err(Broken::Kind(2)));
    }

    #[test]
    fn a_hello_for_somebody_else_is_refused_before_the_rest_of_it_is_awaited() {
        for wrong in 0..OPENING {
            let (mut ours, mut theirs) = pair();
            let mut opening = OPENS;
            opening[wrong] ^= 1;
            theirs.write_all(&(MAX_HELLO as u32).to_le_bytes()).unwrap();
            theirs.write_all(&[1]).unwrap();
            theirs.write_all(&opening).unwrap();
            assert_eq!(drain(&mut ours), Err(Broken::Opening), "{wrong}");
        }
    }

    #[test]
    fn a_full_queue_refuses_frames_and_a_goodbye_takes_their_place() {
        let (mut ours, theirs) = pair();
        ours.outbound.open();
        let frame = Bytes::from(vec![1; MAX_FRAME]);
        let mut accepted = 0;
        while ours.outbound.queue_frame(frame.clone()) {
            accepted += 1;
            ours.flush(&mut Vec::new()).unwrap();
            assert!(accepted < 100);
        }
        assert!(accepted >= 3);
        ours.outbound.queue_goodbye();
        theirs.set_nonblocking(true).unwrap();
        let mut reader = Connection::new(theirs.into(), 0, OPENS);
        reader.inbound = Inbound::greeted();
        let mut got = Vec::new();
        while got.last() != Some(&Message::Goodbye) {
            ours.flush(&mut Vec::new()).unwrap();
            got.extend(drain(&mut reader).unwrap());
        }
        // The frame of which a part was written arrives whole, the others not at all.
        assert_eq!(got, [Message::Frame(frame), Message::Goodbye]);
        assert_eq!(ours.outbound.queued(), 0);
    }
}
