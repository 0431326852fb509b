//! The body of a message, as its head frames it.

use bytes::BytesMut;

use super::chunked::{ChunkError, Chunked};
use super::error::HttpError;
use super::head::Fields;

/// A body that is being read, of at most `max` bytes.
#[derive(Debug)]
pub(super) struct Body {
    framing: Framing,
    bytes: Vec<u8>,
    max: usize,
}

#[derive(Debug)]
enum Framing {
    Length(usize),
    Chunked(Chunked),
    UntilClose,
}

impl Body {
    /// A body without bytes.
    pub(super) fn none() -> Body {
        Body { framing: Framing::Length(0), bytes: Vec::new(), max: 0 }
    }

    /// A body that ends with the connection.
    pub(super) fn until_close(max: usize) -> Body {
        Body { framing: Framing::UntilClose, bytes: Vec::new(), max }
    }

    /// The body that the header fields announce; `None` if they announce no body.
    pub(super) fn of(fields: Fields<'_>, http11: bool, max: usize) -> Result<Option<Body>, HttpError> {
        let mut codings = fields.all("transfer-encoding");
        let framing = match (codings.next(), fields.content_length()?) {
            (None, None) => return Ok(None),
            (None, Some(got)) => match usize::try_from(got) {
                Ok(length) if length <= max => Framing::Length(length),
                _ => return Err(HttpError::BodyTooLarge { got, max }),
            },
            (Some(_), Some(_)) => return Err(HttpError::Framing),
            // HTTP/1.0 has no transfer codings.
            (Some(_), None) if !http11 => return Err(HttpError::Framing),
            (Some(coding), None) => {
                if !coding.trim_ascii().eq_ignore_ascii_case(b"chunked") || codings.next().is_some() {
                    return Err(HttpError::TransferEncoding);
                }
                Framing::Chunked(Chunked::default())
            }
        };
        Ok(Some(Body { framing, bytes: Vec::new(), max }))
    }

    /// Takes the bytes of the body that `input` has; `eof` says that no more bytes will come. Returns true at
    /// the end of the body.
    pub(super) fn receive(&mut self, input: &mut BytesMut, eof: bool) -> Result<bool, HttpError> {
        let max = self.max;
        match &mut self.framing {
            Framing::Length(left) => {
                let len = (*left).min(input.len());
                self.bytes.extend_from_slice(&input.split_to(len));
                *left -= len;
                Ok(*left == 0)
            }
            Framing::Chunked(chunked) => {
                chunked.decode(input, &mut self.bytes, max).map_err(|error| match error {
                    ChunkError::Malformed => HttpError::Chunk,
                    ChunkError::TooLarge => HttpError::ChunksTooLarge { max },
                })
            }
            Framing::UntilClose => {
                let len = self.bytes.len() + input.len();
                if len > max {
                    return Err(HttpError::BodyTooLarge { got: len as u64, max });
                }
                self.bytes.extend_from_slice(&input.split_to(input.len()));
                Ok(eof)
            }
        }
    }

    pub(super) fn ends_with_connection(&self) -> bool {
        matches!(self.framing, Framing::UntilClose)
    }

    /// Bytes of memory that the body takes so far.
    pub(super) fn buffered(&self) -> usize {
        self.bytes.capacity()
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}
