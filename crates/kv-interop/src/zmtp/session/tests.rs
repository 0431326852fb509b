//! Streams of bytes as a peer sends them: whole, in pieces of every length, and hostile.

use super::*;
use crate::zmtp::write_message;

/// What libzmq 4.3.5 sends on a PUSH socket: greeting, READY, a PING, and two messages.
fn stream() -> (Vec<u8>, Vec<Heard>) {
    let long = Bytes::from(vec![7; 300]);
    let messages = [vec![Bytes::from_static(b"one")], vec![Bytes::new(), long.clone(), Bytes::new()]];
    let ready = b"\x04\x27\x05READY\x0bSocket-Type\0\0\0\x04PUSH\x08Identity\0\0\0\0";
    let ping = b"\x04\x09\x04PING\0\x0aok";
    let mut bytes = [&greeting::ours()[..], ready, ping].concat();
    for message in &messages {
        bytes.extend(write_message(message).concat());
    }
    let [one, two] = messages.map(Heard::Message);
    let pong = Bytes::from_static(b"\x04\x07\x04PONGok");
    let greeted = Heard::Greeted(write_ready("PULL"));
    (bytes, vec![greeted, Heard::Ready, Heard::Ping(pong), one, two])
}

fn pull() -> Session {
    Session::new(SocketType::Pull, MAX_MESSAGE)
}

/// What is heard of a stream that comes in these pieces.
fn heard<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<Heard>, ZmtpError> {
    let (mut session, mut heard) = (pull(), Vec::new());
    for mut piece in pieces {
        while let Some(next) = session.take(&mut piece)? {
            heard.push(next);
        }
        assert!(piece.is_empty());
    }
    Ok(heard)
}

/// A session that is ready, for frames.
fn ready() -> Session {
    let mut session = pull();
    let (bytes, _) = stream();
    let mut opening = &bytes[..64 + 41];
    assert!(matches!(session.take(&mut opening), Ok(Some(Heard::Greeted(_)))));
    assert_eq!(session.take(&mut opening), Ok(Some(Heard::Ready)));
    assert!(opening.is_empty() && session.is_ready());
    session
}

fn refused(mut bytes: &[u8]) -> ZmtpError {
    let mut session = ready();
    loop {
        match session.take(&mut bytes) {
            Ok(Some(_)) => {}
            Ok(None) => panic!("nothing is refused"),
            Err(error) => return error,
        }
    }
}

#[test]
fn a_stream_means_the_same_wherever_it_is_cut_in_two_or_three() {
    let (bytes, expected) = stream();
    assert_eq!(heard([&bytes[..]]), Ok(expected.clone()));
    for first in 0..=bytes.len() {
        let (head, tail) = bytes.split_at(first);
        assert_eq!(heard([head, tail]), Ok(expected.clone()), "cut at {first}");
        for second in (0..=tail.len()).step_by(7) {
            let (middle, tail) = tail.split_at(second);
            assert_eq!(heard([head, middle, tail]), Ok(expected.clone()), "cut at {first} and {second}");
        }
    }
    for len in [1, 2, 3, 9, 64] {
        assert_eq!(heard(bytes.chunks(len)), Ok(expected.clone()), "in pieces of {len}");
    }
}

#[test]
fn a_length_that_is_announced_costs_nothing_and_too_much_is_refused_at_the_header() {
    // One hundred megabytes, and the most that eight bytes can say.
    for announced in [100 << 20, u64::MAX] {
        let header = [&[2][..], &announced.to_be_bytes()].concat();
        assert_eq!(refused(&header), ZmtpError::Length { what: "message", got: announced, max: MAX_MESSAGE });
    }
    // The bound is for all parts together.
    let part = Bytes::from(vec![1; MAX_MESSAGE - 10]);
    let two = write_message(&[part.clone(), Bytes::from(vec![1; 11])]).concat();
    let got = MAX_MESSAGE as u64 + 1;
    assert_eq!(refused(&two), ZmtpError::Length { what: "message", got, max: MAX_MESSAGE });
    let mut fits = ready();
    let two = write_message(&[part, Bytes::from(vec![1; 10])]).concat();
    assert!(matches!(fits.take(&mut &two[..]), Ok(Some(Heard::Message(parts))) if parts.len() == 2));
    assert_eq!(fits.held(), 0);
    // What is allowed is held only as far as it has come.
    let mut session = ready();
    let header = [&[2][..], &(MAX_MESSAGE as u64).to_be_bytes()].concat();
    assert_eq!(session.take(&mut &header[..]), Ok(None));
    for came in 1..=1000 {
        assert_eq!(session.take(&mut &[0][..]), Ok(None));
        assert_eq!(session.held(), came);
        assert!(session.frames.room_taken() <= 2 * came.max(8), "{}", session.frames.room_taken());
    }
}

#[test]
fn messages_of_too_many_parts_and_commands_too_long_are_refused() {
    let mut most = ready();
    let parts = write_message(&vec![Bytes::new(); MAX_PARTS]).concat();
    assert!(
        matches!(most.take(&mut &parts[..]), Ok(Some(Heard::Message(parts))) if parts.len() == MAX_PARTS)
    );
    let parts = write_message(&vec![Bytes::new(); MAX_PARTS + 1]).concat();
    assert_eq!(refused(&parts), ZmtpError::Parts { max: MAX_PARTS });
    let endless = b"\x01\x00".repeat(1 << 20);
    assert_eq!(refused(&endless), ZmtpError::Parts { max: MAX_PARTS });
    let command = [&[6][..], &(MAX_COMMAND as u64 + 1).to_be_bytes()].concat();
    let got = MAX_COMMAND as u64 + 1;
    assert_eq!(refused(&command), ZmtpError::Length { what: "command", got, max: MAX_COMMAND });
    for flags in [5, 7, 8, 0x80] {
        assert_eq!(refused(&[flags, 0]), ZmtpError::Flags(flags));
    }
}

#[test]
fn what_comes_before_ready_and_sockets_that_do_not_fit_are_refused() {
    let after_greeting = |bytes: &[u8]| heard([&greeting::ours()[..], bytes]).unwrap_err();
    assert_eq!(after_greeting(b"\x00\x01x"), ZmtpError::NotReady { got: "a message" });
    assert_eq!(after_greeting(b"\x04\x07\x04PING\0\0"), ZmtpError::NotReady { got: "another command" });
    assert_eq!(after_greeting(b"\x04\x09\x05ERROR\x02no"), ZmtpError::Refused { reason: "no".to_owned() });
    let error = after_greeting(&write_ready("DEALER"));
    assert_eq!(error, ZmtpError::SocketType { ours: "PULL", theirs: "DEALER".to_owned() });
    assert_eq!(error.to_string(), "the peer's socket is \"DEALER\", which does not go with PULL");
}
