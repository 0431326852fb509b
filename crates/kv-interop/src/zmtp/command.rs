//! The commands of ZMTP: READY and ERROR in the handshake, PING and PONG afterwards.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::error::ZmtpError;
use super::frame::write_command;

/// Longest context of a PING, which a PONG repeats, in bytes.
const CONTEXT: usize = 16;
/// Most bytes of a peer's reason in an ERROR that are kept.
const REASON: usize = 255;

/// A command of a peer, as far as this side knows the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Command {
    /// The peer's socket is of this type. The other properties have no use here.
    Ready {
        socket_type: String,
    },
    Error {
        reason: String,
    },
    /// The peer wants a PONG with the same context.
    Ping {
        context: Bytes,
    },
    /// PONG, SUBSCRIBE, CANCEL, or a command of a later version.
    Other,
}

impl Command {
    pub(super) fn parse(mut body: Bytes) -> Result<Command, ZmtpError> {
        let command = |field| ZmtpError::Command { command: "of any name", field };
        let name = short(&mut body).ok_or(command("name"))?;
        match &name[..] {
            b"READY" => ready(body),
            b"ERROR" => {
                let reason =
                    short(&mut body).ok_or(ZmtpError::Command { command: "ERROR", field: "reason" })?;
                let reason = String::from_utf8_lossy(&reason[..reason.len().min(REASON)]).into_owned();
                Ok(Command::Error { reason })
            }
            // Two bytes say after which silence the peer will close.
            b"PING" if body.len() < 2 => Err(ZmtpError::Command { command: "PING", field: "ttl" }),
            b"PING" if body.len() - 2 > CONTEXT => {
                Err(ZmtpError::Command { command: "PING", field: "context" })
            }
            b"PING" => Ok(Command::Ping { context: body.split_off(2) }),
            _ => Ok(Command::Other),
        }
    }
}

fn ready(mut body: Bytes) -> Result<Command, ZmtpError> {
    let cut = |field| ZmtpError::Command { command: "READY", field };
    let mut socket_type = None;
    while !body.is_empty() {
        let name = short(&mut body).ok_or(cut("property name"))?;
        let len = body.try_get_u32().map_err(|_| cut("property length"))? as usize;
        if len > body.len() {
            return Err(cut("property value"));
        }
        let value = body.split_to(len);
        // Names of properties may be written in small letters.
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket_type = Some(String::from_utf8_lossy(&value).into_owned());
        }
    }
    Ok(Command::Ready { socket_type: socket_type.ok_or(cut("Socket-Type"))? })
}

/// Bytes after a length of one byte.
fn short(body: &mut Bytes) -> Option<Bytes> {
    let len = usize::from(body.try_get_u8().ok()?);
    (len <= body.len()).then(|| body.split_to(len))
}

/// READY of a socket of this type, with an empty identity, as libzmq writes it.
pub(super) fn write_ready(socket_type: &str) -> Bytes {
    let mut body = BytesMut::new();
    body.put_slice(b"\x05READY");
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        body.put_u8(name.len() as u8);
        body.put_slice(name.as_bytes());
        body.put_u32(value.len() as u32);
        body.put_slice(value.as_bytes());
    }
    write_command(&body)
}

/// The answer to a PING with this context.
pub(super) fn write_pong(context: &[u8]) -> Bytes {
    write_command(&[b"\x04PONG", context].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &'static [u8]) -> Result<Command, ZmtpError> {
        Command::parse(Bytes::from_static(bytes))
    }

    #[test]
    fn commands_are_read_as_libzmq_writes_them() {
        let ready = b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0";
        assert_eq!(parse(ready), Ok(Command::Ready { socket_type: "ROUTER".to_owned() }));
        let body = write_ready("ROUTER");
        assert_eq!(body[..], [b"\x04\x29", &ready[..]].concat());
        assert_eq!(parse(b"\x04PING\0\x0aabc"), Ok(Command::Ping { context: Bytes::from_static(b"abc") }));
        assert_eq!(write_pong(b"abc")[..], b"\x04\x08\x04PONGabc"[..]);
        assert_eq!(parse(b"\x05ERROR\x02no"), Ok(Command::Error { reason: "no".to_owned() }));
        assert_eq!(parse(b"\x09SUBSCRIBEtopic"), Ok(Command::Other));
    }

    #[test]
    fn commands_that_are_cut_off_name_the_field() {
        let field = |bytes| match parse(bytes) {
            Err(ZmtpError::Command { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(b""), "name");
        assert_eq!(field(b"\x06READY"), "name");
        assert_eq!(field(b"\x05READY"), "Socket-Type");
        assert_eq!(field(b"\x05READY\x0bSocket"), "property name");
        assert_eq!(field(b"\x05READY\x0bSocket-Type\0\0"), "property length");
        assert_eq!(field(b"\x05READY\x0bSocket-Type\xff\xff\xff\xffPULL"), "property value");
        assert_eq!(field(b"\x05ERROR\x02n"), "reason");
        assert_eq!(field(b"\x04PING\0"), "ttl");
        assert_eq!(field(b"\x04PING\0\0seventeen bytes..."), "context");
    }
}
