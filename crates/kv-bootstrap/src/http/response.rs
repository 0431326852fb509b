//! The client's side: responses.

use bytes::BytesMut;

use super::chunked::{ChunkError, Chunked};
use super::{MAX_FIELDS, content_length, has_token, head_end};

/// Longest status line with all header fields.
const MAX_HEAD: usize = 16 << 10;
/// Most interim (1xx) responses before the final one.
const MAX_INTERIM: u32 = 8;

/// A whole response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    pub(crate) keep_alive: bool,
}

/// Why a response cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResponseError {
    #[error("the answer is not HTTP/1.1")]
    Head,
    #[error("the answer's header is too large")]
    HeadTooLarge,
    #[error("the answer's Content-Length is not one number")]
    Length,
    #[error("the answer's framing is not supported")]
    Framing,
    #[error("the answer is too large")]
    BodyTooLarge,
    #[error("the answer's chunks are malformed")]
    Chunk,
    #[error("the answer ended early")]
    Truncated,
}

impl ResponseError {
    pub(crate) fn text(self) -> &'static str {
        match self {
            ResponseError::Head => "not HTTP/1.1",
            ResponseError::HeadTooLarge => "header too large",
            ResponseError::Length => "Content-Length is not one number",
            ResponseError::Framing => "framing not supported",
            ResponseError::BodyTooLarge => "too large",
            ResponseError::Chunk => "malformed chunks",
            ResponseError::Truncated => "ended early",
        }
    }
}

/// Reads responses from a stream of bytes, one after the other. None of them may answer HEAD.
#[derive(Debug)]
pub(crate) struct ResponseParser {
    max_body: usize,
    scanned: usize,
    interim: u32,
    body: Option<(Response, Framing)>,
}

#[derive(Debug)]
enum Framing {
    Length(usize),
    Chunked(Chunked),
    UntilClose,
}

impl ResponseParser {
    pub(crate) fn new(max_body: usize) -> ResponseParser {
        ResponseParser { max_body, scanned: 0, interim: 0, body: None }
    }

    /// Takes from `input` what belongs to the next response; `eof` if no more bytes will come.
    pub(crate) fn parse(
        &mut self,
        input: &mut BytesMut,
        eof: bool,
    ) -> Result<Option<Response>, ResponseError> {
        loop {
            let (mut response, mut framing) = match self.body.take() {
                Some(body) => body,
                None => match self.parse_head(input)? {
                    Some(body) => body,
                    None if eof && !input.is_empty() => return Err(ResponseError::Truncated),
                    None => return Ok(None),
                },
            };
            if (100..200).contains(&response.status) {
                self.interim += 1;
                if self.interim > MAX_INTERIM {
                    return Err(ResponseError::Framing);
                }
                continue;
            }
            if self.receive(input, eof, &mut response, &mut framing)? {
                self.interim = 0;
                return Ok(Some(response));
            }
            self.body = Some((response, framing));
            return if eof { Err(ResponseError::Truncated) } else { Ok(None) };
        }
    }

    fn receive(
        &self,
        input: &mut BytesMut,
        eof: bool,
        response: &mut Response,
        framing: &mut Framing,
    ) -> Result<bool, ResponseError> {
        let body = &mut response.body;
        match framing {
            Framing::Length(left) => {
                let len = (*left).min(input.len());
                body.extend_from_slice(&input.split_to(len));
                *left -= len;
                Ok(*left == 0)
            }
            Framing::Chunked(chunked) => {
                chunked.decode(input, body, self.max_body).map_err(|error| match error {
                    ChunkError::Malformed => ResponseError::Chunk,
                    ChunkError::TooLarge => ResponseError::BodyTooLarge,
                })
            }
            Framing::UntilClose => {
                if body.len() + input.len() > self.max_body {
                    return Err(ResponseError::BodyTooLarge);
                }
                body.extend_from_slice(&input.split_to(input.len()));
                Ok(eof)
            }
        }
    }

    fn parse_head(&mut self, input: &mut BytesMut) -> Result<Option<(Response, Framing)>, ResponseError> {
        let Some(end) = head_end(input, &mut self.scanned) else {
            return if input.len() > MAX_HEAD { Err(ResponseError::HeadTooLarge) } else { Ok(None) };
        };
        self.scanned = 0;
        if end > MAX_HEAD {
            return Err(ResponseError::HeadTooLarge);
        }
        let head = input.split_to(end);
        read_head(&head, self.max_body).map(Some)
    }
}

fn read_head(bytes: &[u8], max_body: usize) -> Result<(Response, Framing), ResponseError> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Response::new(&mut fields);
    if !matches!(parsed.parse(bytes), Ok(httparse::Status::Complete(_))) {
        return Err(ResponseError::Head);
    }
    let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
        return Err(ResponseError::Head);
    };
    let fields = parsed.headers;
    let all = |name: &'static str| {
        fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
    };
    let length = content_length(all("content-length")).map_err(|()| ResponseError::Length)?;
    let mut codings = all("transfer-encoding");
    let bodiless = matches!(status, 100..200 | 204 | 304);
    let framing = match (codings.next(), length) {
        _ if bodiless => Framing::Length(0),
        (Some(coding), None) if coding.trim_ascii().eq_ignore_ascii_case(b"chunked") => {
            if codings.next().is_some() {
                return Err(ResponseError::Framing);
            }
            Framing::Chunked(Chunked::default())
        }
        (Some(_), _) => return Err(ResponseError::Framing),
        (None, Some(length)) => match usize::try_from(length) {
            Ok(length) if length <= max_body => Framing::Length(length),
            _ => return Err(ResponseError::BodyTooLarge),
        },
        (None, None) => Framing::UntilClose,
    };
    let close = all("connection").any(|value| has_token(value, "close"));
    let keep = all("connection").any(|value| has_token(value, "keep-alive"));
    let keep_alive = !close && (version == 1 || keep) && !matches!(framing, Framing::UntilClose);
    Ok((Response { status, body: Vec::new(), keep_alive }, framing))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, eof: bool) -> Result<Vec<(u16, String, bool)>, ResponseError> {
        let mut parser = ResponseParser::new(32);
        let mut input = BytesMut::from(text);
        let mut found = Vec::new();
        while let Some(response) = parser.parse(&mut input, eof)? {
            found.push((response.status, String::from_utf8(response.body).unwrap(), response.keep_alive));
        }
        Ok(found)
    }

    #[test]
    fn responses_are_told_apart_by_length_chunks_and_end() {
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
            ("SSH-2.0-x\r\n\r\n", ResponseError::Head),
            ("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", ResponseError::Length),
            ("HTTP/1.1 200 OK\r\nContent-Length: 33\r\n\r\n", ResponseError::BodyTooLarge),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: br\r\n\r\n", ResponseError::Framing),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n!\r\n", ResponseError::Chunk),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n", ResponseError::BodyTooLarge),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", ResponseError::Truncated),
            ("HTTP/1.1 20", ResponseError::Truncated),
        ];
        for (text, error) in cases {
            assert_eq!(parse(text, true), Err(error), "{text:?}");
        }
        assert_eq!(parse(&"x".repeat(MAX_HEAD + 1), false), Err(ResponseError::HeadTooLarge));
        assert_eq!(
            parse(&format!("HTTP/1.0 200 OK\r\n\r\n{}", "x".repeat(33)), false),
            Err(ResponseError::BodyTooLarge)
        );
        assert_eq!(parse(&"HTTP/1.1 100 Go on\r\n\r\n".repeat(9), false), Err(ResponseError::Framing));
    }
}
