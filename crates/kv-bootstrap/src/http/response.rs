//! The client's side of HTTP: responses are parsed here.

use bytes::BytesMut;

use super::body::Body;
use super::error::HttpError;
use super::head::{Fields, MAX_FIELDS, take_head};

/// Longest status line with all header fields, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Most interim (1xx) responses before the final one.
const MAX_INTERIM: u32 = 8;

/// A response that has arrived completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    pub(crate) keep_alive: bool,
}

/// Reads responses from a stream of bytes, one after the other. None of the requests may have been HEAD.
#[derive(Debug)]
pub(crate) struct ResponseParser {
    max_body: usize,
    scanned: usize,
    interim: u32,
    pending: Option<(Response, Body)>,
}

impl ResponseParser {
    pub(crate) fn new(max_body: usize) -> ResponseParser {
        ResponseParser { max_body, scanned: 0, interim: 0, pending: None }
    }

    /// Takes the bytes of the next response from `input`; `eof` says that no more bytes will come. Returns
    /// `None` until the response is complete.
    pub(crate) fn parse(&mut self, input: &mut BytesMut, eof: bool) -> Result<Option<Response>, HttpError> {
        loop {
            let (mut response, mut body) = match self.pending.take() {
                Some(pending) => pending,
                None => match take_head(input, &mut self.scanned, MAX_HEAD)? {
                    Some(head) => read_head(&head, self.max_body)?,
                    None if eof && !input.is_empty() => return Err(HttpError::Truncated),
                    None => return Ok(None),
                },
            };
            if (100..200).contains(&response.status) {
                self.interim += 1;
                if self.interim > MAX_INTERIM {
                    return Err(HttpError::Interim { max: MAX_INTERIM });
                }
                continue;
            }
            if body.receive(input, eof)? {
                self.interim = 0;
                response.body = body.into_bytes();
                return Ok(Some(response));
            }
            self.pending = Some((response, body));
            return if eof { Err(HttpError::Truncated) } else { Ok(None) };
        }
    }
}

fn read_head(bytes: &[u8], max_body: usize) -> Result<(Response, Body), HttpError> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Response::new(&mut fields);
    if !matches!(parsed.parse(bytes), Ok(httparse::Status::Complete(_))) {
        return Err(HttpError::Head);
    }
    let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
        return Err(HttpError::Head);
    };
    let fields = Fields(parsed.headers);
    let body = match status {
        100..200 | 204 | 304 => Body::none(),
        _ => Body::of(fields, true, max_body)?.unwrap_or_else(|| Body::until_close(max_body)),
    };
    let keep_alive = fields.keep_alive(version == 1) && !body.ends_with_connection();
    Ok((Response { status, body: Vec::new(), keep_alive }, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, eof: bool) -> Result<Vec<(u16, String, bool)>, HttpError> {
        let mut parser = ResponseParser::new(32);
        let mut input = BytesMut::from(text);
        let mut found = Vec::new();
        while let Some(response) = parser.parse(&mut input, eof)? {
            found.push((response.status, String::from_utf8(response.body).unwrap(), response.keep_alive));
        }
        Ok(found)
    }

    #[test]
    fn the_end_of_a_response_is_found_by_length_chunks_or_close() {
        let text = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK\
                    HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n\
                    HTTP/1.1 204 None\r\nConnection: close\r\n\r\n\
                    HTTP/1.0 200 OK\r\n\r\nthe rest";
        let expected = [
            (200, "OK".to_owned(), true),
            (404, "x".to_owned(), true),
            (204, String::new(), false),
            (200, "the rest".to_owned(), false),
        ];
        assert_eq!(parse(text, true).unwrap(), expected);
        assert_eq!(parse(text, false).unwrap(), expected[..3]);
    }

    #[test]
    fn malformed_and_oversized_responses_are_typed_errors() {
        let cases = [
            ("SSH-2.0-x\r\n\r\n", HttpError::Head),
            ("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", HttpError::Length),
            ("HTTP/1.1 200 OK\r\nContent-Length: 33\r\n\r\n", HttpError::BodyTooLarge { got: 33, max: 32 }),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: br\r\n\r\n", HttpError::TransferEncoding),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n!\r\n", HttpError::Chunk),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n",
                HttpError::ChunksTooLarge { max: 32 },
            ),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", HttpError::Truncated),
            ("HTTP/1.1 20", HttpError::Truncated),
        ];
        for (text, error) in cases {
            assert_eq!(parse(text, true), Err(error), "{text:?}");
        }
        assert_eq!(parse(&"x".repeat(MAX_HEAD + 1), false), Err(HttpError::HeadTooLarge { max: MAX_HEAD }));
        assert_eq!(
            parse(&format!("HTTP/1.0 200 OK\r\n\r\n{}", "x".repeat(33)), false),
            Err(HttpError::BodyTooLarge { got: 33, max: 32 })
        );
        assert_eq!(parse(&"HTTP/1.1 100 Go on\r\n\r\n".repeat(9), false), Err(HttpError::Interim { max: 8 }));
    }
}
