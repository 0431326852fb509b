//! [`Session`]: the encryption of one connection. Plain bytes come from and go to the same places as without: pages
//! are copied between their regions and the records of at most 16 KiB, once on each side.

use std::io::{self, BufRead, ErrorKind, IoSlice, Write};
use std::os::fd::BorrowedFd;

use kv_core::Time;
use kv_host::{Memory, OsError};
use rustls::{CertificateError, Connection};

use crate::inbound::{Inbound, ReceiveError, Received};
use crate::outbound::Outbound;
use crate::sys::{Gather, Scatter};

/// Most encrypted bytes that are read at once, and most plain bytes that are encrypted at once.
pub(crate) const PIECE: usize = 64 << 10;

/// The state of TLS on one connection.
#[derive(Debug)]
pub(crate) struct Session {
    tls: Connection,
    /// Encrypted bytes that have come, of which those from `at` to `end` are not decrypted yet.
    cipher: Vec<u8>,
    at: usize,
    end: usize,
    /// Bytes that are decrypted and have not been taken.
    plain: usize,
    /// True if the other side has said that nothing more comes.
    closed: bool,
}

impl Session {
    pub(crate) fn new(mut tls: Connection) -> Session {
        tls.set_buffer_limit(Some(PIECE));
        Session { tls, cipher: Vec::new(), at: 0, end: 0, plain: 0, closed: false }
    }

    /// True if the other side has shown a certificate; the verifier has accepted it then.
    pub(crate) fn has_shown_a_certificate(&self) -> bool {
        self.tls.peer_certificates().is_some_and(|chain| !chain.is_empty())
    }

    /// True if bytes have come that the socket does not report any more.
    pub(crate) fn has_unread(&self) -> bool {
        self.plain > 0 || self.at < self.end
    }

    /// True if encrypted bytes wait to be written.
    pub(crate) fn has_unwritten(&self) -> bool {
        self.tls.wants_write()
    }

    /// Frees the buffer if it is empty.
    pub(crate) fn tidy(&mut self) {
        if self.at == self.end {
            (self.cipher, self.at, self.end) = (Vec::new(), 0, 0);
        }
    }

    /// Reads at most one record: pages into their places, and at most `room` bytes of what is not pages.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        inbound: &mut Inbound,
        regions: &[Memory],
        room: usize,
    ) -> Result<Received, ReceiveError> {
        let mut fresh = 0;
        loop {
            if self.plain > 0 {
                let mut reader = self.tls.reader();
                let chunk = reader.fill_buf().map_err(|_| ReceiveError::Untrusted(FAILED))?;
                let taken = inbound.accept(chunk, regions, room)?;
                reader.consume(taken);
                self.plain -= taken;
                return Ok(Received::Bytes(taken));
            }
            if self.closed {
                self.at = self.end;
                return Ok(Received::End);
            }
            if self.at < self.end {
                self.decrypt(socket)?;
                continue;
            }
            // A handshake, or a part of a record.
            if fresh > 0 {
                return Ok(Received::Bytes(fresh));
            }
            self.cipher.resize(PIECE, 0);
            (self.at, self.end) = (0, 0);
            let mut scatter = Scatter::new();
            scatter.slice(&mut self.cipher);
            match scatter.receive(socket) {
                // Without a last word from the other side, too: what has come before is complete records.
                Ok(0) => return Ok(Received::End),
                Ok(count) => (self.end, fresh) = (count, count),
                Err(error) if matches!(error.kind, ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    return Ok(Received::Nothing);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Gives bytes that have come to TLS: enough for a record, if so many are there.
    fn decrypt(&mut self, socket: BorrowedFd<'_>) -> Result<(), ReceiveError> {
        let mut rest = self.cipher.get(self.at..self.end).unwrap_or_default();
        let taken = self.tls.read_tls(&mut rest).map_err(|_| ReceiveError::Untrusted(FAILED))?;
        self.at += taken;
        match self.tls.process_new_packets() {
            Ok(state) => {
                self.plain = state.plaintext_bytes_to_read();
                self.closed |= state.peer_has_closed() || taken == 0;
                Ok(())
            }
            Err(error) => {
                // The other side is told why.
                let _ = self.tls.write_tls(&mut Out(socket));
                Err(ReceiveError::Untrusted(reason(&error)))
            }
        }
    }

    /// Encrypts and writes as many bytes as the socket takes, about `most` at most. Returns how many were
    /// encrypted, and whether the socket may take more.
    pub(crate) fn flush(
        &mut self,
        socket: BorrowedFd<'_>,
        outbound: &mut Outbound,
        regions: &[Memory],
        (now, most): (Time, usize),
        scratch: &mut [u8],
    ) -> Result<(usize, bool), OsError> {
        let mut taken = 0;
        loop {
            while self.tls.wants_write() {
                match self.tls.write_tls(&mut Out(socket)) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok((taken, false)),
                    Err(error) if error.kind() == ErrorKind::Interrupted => return Ok((taken, true)),
                    Err(error) => return Err(OsError::new("sendmsg", error)),
                }
            }
            if taken >= most {
                return Ok((taken, true));
            }
            let piece = outbound.copy(regions, now, scratch)?;
            let written = self.tls.writer().write(piece).map_err(|error| OsError::new("encrypt", error))?;
            outbound.advance(written, now);
            if written == 0 {
                return Ok((taken, false));
            }
            taken += written;
        }
    }

    /// Tells the other side that nothing more comes, if the socket takes that at once.
    pub(crate) fn say_goodbye(&mut self, socket: BorrowedFd<'_>) {
        self.tls.send_close_notify();
        while self.tls.wants_write() && self.tls.write_tls(&mut Out(socket)).is_ok() {}
    }
}

/// A socket as a place to write.
struct Out<'a>(BorrowedFd<'a>);

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut gather = Gather::new();
        for piece in pieces {
            if gather.is_full() {
                break;
            }
            gather.slice(piece);
        }
        gather.send(self.0).map_err(|error| error.kind.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const FAILED: &str = "the connection's encryption has failed";

/// What an operator can do something about, in words.
fn reason(error: &rustls::Error) -> &'static str {
    use CertificateError as Certificate;
    match error {
        rustls::Error::InvalidCertificate(problem) => match problem {
            Certificate::Expired | Certificate::ExpiredContext { .. } => "the peer's certificate has expired",
            Certificate::NotValidYet | Certificate::NotValidYetContext { .. } => {
                "the peer's certificate is not valid yet"
            }
            Certificate::UnknownIssuer | Certificate::BadSignature => {
                "no authority of this side has signed the peer's certificate"
            }
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. } => {
                "the peer's certificate is of another address or name"
            }
            _ => "the peer's certificate is not valid",
        },
        rustls::Error::NoCertificatesPresented => "the peer has shown no certificate",
        rustls::Error::AlertReceived(_) => "the peer has refused this side's certificate or settings",
        rustls::Error::InvalidMessage(_) => "the peer does not speak TLS",
        rustls::Error::PeerIncompatible(_) => "the two sides have no version or cipher in common",
        _ => FAILED,
    }
}
