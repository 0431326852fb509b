//! The chunked transfer coding, with a bound on every line, on the trailer and on the body.

use bytes::{Buf, BytesMut};

/// Longest line with a chunk's size and extensions, or with one trailer field, in bytes.
const MAX_LINE: usize = 4096;
/// Longest trailer, in bytes, all fields together.
const MAX_TRAILER: usize = 8192;

/// Reads one chunked body.
#[derive(Debug, Default)]
pub(crate) struct Chunked {
    state: State,
    trailer: usize,
    /// Bytes of the present line that have been searched for the line's end.
    scanned: usize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Size,
    Data(u64),
    DataEnd,
    Trailer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkError {
    Malformed,
    TooLarge,
}

impl Chunked {
    /// Moves the bytes of the body from `input` to `body`, which grows to `max` bytes at most. Returns true
    /// at the end of the body.
    pub(crate) fn decode(
        &mut self,
        input: &mut BytesMut,
        body: &mut Vec<u8>,
        max: usize,
    ) -> Result<bool, ChunkError> {
        loop {
            match &mut self.state {
                State::Size => {
                    let Some(line) = take_line(input, &mut self.scanned)? else { return Ok(false) };
                    let size = parse_size(&line)?;
                    let room = (max - body.len().min(max)) as u64;
                    if size > room {
                        return Err(ChunkError::TooLarge);
                    }
                    self.state = if size == 0 { State::Trailer } else { State::Data(size) };
                }
                State::Data(left) => {
                    let len = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                    body.extend_from_slice(&input.split_to(len));
                    *left -= len as u64;
                    if *left > 0 {
                        return Ok(false);
                    }
                    self.state = State::DataEnd;
                }
                State::DataEnd => {
                    if input.len() < 2 {
                        return Ok(false);
                    }
                    if !input.starts_with(b"\r\n") {
                        return Err(ChunkError::Malformed);
                    }
                    input.advance(2);
                    self.state = State::Size;
                }
                State::Trailer => {
                    let Some(line) = take_line(input, &mut self.scanned)? else { return Ok(false) };
                    if line.is_empty() {
                        return Ok(true);
                    }
                    self.trailer += line.len() + 2;
                    if self.trailer > MAX_TRAILER {
                        return Err(ChunkError::TooLarge);
                    }
                }
            }
        }
    }
}

/// The next line without its CRLF. A bare LF is refused: two readers that disagree on where a
/// chunk ends can be made to disagree on where a request ends.
/// `from` is how far earlier searches came, so that a line that comes byte by byte is searched once.
fn take_line(input: &mut BytesMut, from: &mut usize) -> Result<Option<BytesMut>, ChunkError> {
    let Some(found) = input.iter().take(MAX_LINE).skip(*from).position(|byte| *byte == b'\n') else {
        *from = input.len();
        return if input.len() >= MAX_LINE { Err(ChunkError::TooLarge) } else { Ok(None) };
    };
    let end = std::mem::take(from) + found;
    let mut line = input.split_to(end + 1);
    if !line.ends_with(b"\r\n") {
        return Err(ChunkError::Malformed);
    }
    line.truncate(end - 1);
    Ok(Some(line))
}

fn parse_size(line: &[u8]) -> Result<u64, ChunkError> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii_end();
    if digits.is_empty() || digits.len() > 16 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(ChunkError::Malformed);
    }
    let text = std::str::from_utf8(digits).map_err(|_| ChunkError::Malformed)?;
    u64::from_str_radix(text, 16).map_err(|_| ChunkError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &[u8], max: usize) -> (Result<bool, ChunkError>, Vec<u8>, usize) {
        let (mut whole, mut body) = (BytesMut::from(text), Vec::new());
        let result = Chunked::default().decode(&mut whole, &mut body, max);
        let (mut decoder, mut input, mut bytewise) = (Chunked::default(), BytesMut::new(), Vec::new());
        let mut last = Ok(false);
        for byte in text {
            input.extend_from_slice(&[*byte]);
            last = decoder.decode(&mut input, &mut bytewise, max);
            if last != Ok(false) {
                break;
            }
        }
        assert_eq!((last, &bytewise), (result, &body), "whole and byte by byte agree");
        (result, body, whole.len())
    }

    #[test]
    fn bodies_are_put_together_and_the_rest_is_left() {
        let text = b"3;name=value\r\nabc\r\n0a\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\nrest";
        assert_eq!(decode(text, 13), (Ok(true), b"abc0123456789".to_vec(), 4));
        assert_eq!(decode(text, 12).0, Err(ChunkError::TooLarge));
    }

    #[test]
    fn a_line_that_comes_byte_by_byte_is_searched_once() {
        let (mut decoder, mut input, mut body) = (Chunked::default(), BytesMut::new(), Vec::new());
        for byte in [b"1;".to_vec(), vec![b'x'; 4000]].concat() {
            assert_eq!(decoder.scanned, input.len(), "only what is new will be looked at");
            input.extend_from_slice(&[byte]);
            assert_eq!(decoder.decode(&mut input, &mut body, 10), Ok(false));
        }
        input.extend_from_slice(b"\r\na\r\n0\r\n\r\n");
        assert_eq!(decoder.decode(&mut input, &mut body, 10), Ok(true));
        assert_eq!((body.as_slice(), decoder.scanned), (&b"a"[..], 0));
    }

    #[test]
    fn malformed_chunks_of_a_body_are_refused() {
        for text in
            ["\r\n", "x\r\n", "+1\r\na\r\n", "1\na\r\n", "1\r\nab\r\n", "fffffffffffffffff\r\n", "-1\r\n"]
        {
            assert_eq!(decode(text.as_bytes(), 100).0, Err(ChunkError::Malformed), "{text:?}");
        }
    }

    #[test]
    fn sizes_extensions_and_trailers_are_bounded() {
        assert_eq!(decode(b"ffffffffffffffff\r\n", 100).0, Err(ChunkError::TooLarge));
        assert_eq!(decode(&[b'0'; MAX_LINE], 100).0, Err(ChunkError::TooLarge));
        let trailer = [b"0\r\n".to_vec(), b"a: b\r\n".repeat(2000)].concat();
        assert_eq!(decode(&trailer, 100).0, Err(ChunkError::TooLarge));
    }
}
