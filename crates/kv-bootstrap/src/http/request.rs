//! The server's side: requests.

use bytes::{Buf, BytesMut};

use super::chunked::{ChunkError, Chunked};
use super::{MAX_FIELDS, content_length, has_token, head_end};

/// A whole request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// The target's path, as it was sent.
    pub(crate) path: String,
    /// The target's query, as it was sent, without the question mark.
    pub(crate) query: String,
    /// `None` if the request did not say that it has a body; an empty one otherwise counts.
    pub(crate) body: Option<Vec<u8>>,
    pub(crate) keep_alive: bool,
    /// False for HTTP/1.0.
    pub(crate) http11: bool,
    /// The `Authorization` field, if there is exactly one.
    pub(crate) authorization: Option<Vec<u8>>,
}

/// Why a request cannot be read. The connection is of no use afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("the request is not HTTP/1.1")]
    Head,
    #[error("the header exceeds {max} bytes or 64 fields")]
    HeadTooLarge { max: usize },
    #[error("the HTTP version is not supported")]
    Version,
    #[error("Content-Length is not one number")]
    Length,
    #[error("both Content-Length and Transfer-Encoding are given")]
    Framing,
    #[error("the transfer coding is not supported")]
    TransferEncoding,
    #[error("the expectation is not supported")]
    Expectation,
    #[error("the body has {got} bytes; at most {max} are allowed")]
    BodyTooLarge { got: u64, max: usize },
    #[error("the chunked body exceeds {max} bytes")]
    ChunksTooLarge { max: usize },
    #[error("the chunked body is malformed")]
    Chunk,
}

impl RequestError {
    pub(crate) fn status(self) -> u16 {
        match self {
            RequestError::Head | RequestError::Length | RequestError::Framing | RequestError::Chunk => 400,
            RequestError::BodyTooLarge { .. } | RequestError::ChunksTooLarge { .. } => 413,
            RequestError::Expectation => 417,
            RequestError::HeadTooLarge { .. } => 431,
            RequestError::TransferEncoding => 501,
            RequestError::Version => 505,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestLimits {
    pub(crate) max_head: usize,
    pub(crate) max_body: usize,
}

/// What became of the bytes so far.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    NeedMore,
    /// The client waits for `100 Continue` before it sends the body. Said once.
    Continue,
    Complete(Request),
}

/// Which part of a request is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Head,
    Body,
}

/// Reads requests from a stream of bytes, one after the other.
#[derive(Debug)]
pub(crate) struct RequestParser {
    limits: RequestLimits,
    scanned: usize,
    body: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    head: Request,
    framing: Framing,
    bytes: Vec<u8>,
    expects: bool,
}

#[derive(Debug)]
enum Framing {
    Length(usize),
    Chunked(Chunked),
}

impl RequestParser {
    pub(crate) fn new(limits: RequestLimits) -> RequestParser {
        RequestParser { limits, scanned: 0, body: None }
    }

    pub(crate) fn stage(&self) -> Stage {
        if self.body.is_some() { Stage::Body } else { Stage::Head }
    }

    /// Forgets an unfinished request.
    pub(crate) fn reset(&mut self) {
        *self = RequestParser::new(self.limits);
    }

    /// Bytes held for an unfinished body, and set aside for it.
    pub(crate) fn buffered(&self) -> usize {
        self.body.as_ref().map_or(0, |pending| pending.bytes.capacity())
    }

    /// Takes from `input` what belongs to the next request.
    pub(crate) fn parse(&mut self, input: &mut BytesMut) -> Result<Progress, RequestError> {
        let mut pending = match self.body.take() {
            Some(pending) => pending,
            None => match self.parse_head(input)? {
                Some(pending) => pending,
                None => return Ok(Progress::NeedMore),
            },
        };
        if pending.receive(input, self.limits.max_body)? {
            let mut request = pending.head;
            request.body = request.body.map(|_| pending.bytes);
            return Ok(Progress::Complete(request));
        }
        let expects = std::mem::take(&mut pending.expects);
        self.body = Some(pending);
        Ok(if expects { Progress::Continue } else { Progress::NeedMore })
    }

    fn parse_head(&mut self, input: &mut BytesMut) -> Result<Option<Pending>, RequestError> {
        // Empty lines before a request are to be ignored (RFC 9112, 2.2).
        let blank = input.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        if self.scanned == 0 {
            input.advance(blank);
        }
        let max = self.limits.max_head;
        let Some(end) = head_end(input, &mut self.scanned) else {
            return if input.len() > max { Err(RequestError::HeadTooLarge { max }) } else { Ok(None) };
        };
        self.scanned = 0;
        if end > max {
            return Err(RequestError::HeadTooLarge { max });
        }
        let head = input.split_to(end);
        read_head(&head, self.limits).map(Some)
    }
}

impl Pending {
    fn receive(&mut self, input: &mut BytesMut, max: usize) -> Result<bool, RequestError> {
        match &mut self.framing {
            Framing::Length(left) => {
                let len = (*left).min(input.len());
                self.bytes.extend_from_slice(&input.split_to(len));
                *left -= len;
                Ok(*left == 0)
            }
            Framing::Chunked(chunked) => {
                chunked.decode(input, &mut self.bytes, max).map_err(|error| match error {
                    ChunkError::Malformed => RequestError::Chunk,
                    ChunkError::TooLarge => RequestError::ChunksTooLarge { max },
                })
            }
        }
    }
}

fn read_head(bytes: &[u8], limits: RequestLimits) -> Result<Pending, RequestError> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err(RequestError::Head),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(RequestError::HeadTooLarge { max: limits.max_head });
        }
        Err(httparse::Error::Version) => return Err(RequestError::Version),
        Err(_) => return Err(RequestError::Head),
    }
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(RequestError::Head);
    };
    let http11 = version == 1;
    let fields = parsed.headers;
    let all = |name: &'static str| {
        fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
    };

    let length = content_length(all("content-length")).map_err(|()| RequestError::Length)?;
    let mut codings = all("transfer-encoding");
    let (framing, has_body) = match (codings.next(), length) {
        (None, None) => (Framing::Length(0), false),
        (None, Some(length)) => {
            let max = limits.max_body;
            match usize::try_from(length) {
                Ok(length) if length <= max => (Framing::Length(length), true),
                _ => return Err(RequestError::BodyTooLarge { got: length, max }),
            }
        }
        (Some(_), Some(_)) => return Err(RequestError::Framing),
        // HTTP/1.0 has no transfer codings.
        (Some(_), None) if !http11 => return Err(RequestError::Framing),
        (Some(coding), None) => {
            if !coding.trim_ascii().eq_ignore_ascii_case(b"chunked") || codings.next().is_some() {
                return Err(RequestError::TransferEncoding);
            }
            (Framing::Chunked(Chunked::default()), true)
        }
    };

    let mut expects = false;
    for value in all("expect").filter(|_| http11) {
        if !value.eq_ignore_ascii_case(b"100-continue") {
            return Err(RequestError::Expectation);
        }
        expects = true;
    }
    let close = all("connection").any(|value| has_token(value, "close"));
    let keep = all("connection").any(|value| has_token(value, "keep-alive"));
    let mut shown = all("authorization");
    let authorization = shown.next().filter(|_| shown.next().is_none()).map(<[u8]>::to_vec);
    let (path, query) = split_target(target);
    let head = Request {
        method: method.to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        body: has_body.then(Vec::new),
        keep_alive: !close && (http11 || keep),
        http11,
        authorization,
    };
    Ok(Pending { head, framing, bytes: Vec::new(), expects })
}

/// Path and query of a target in origin form, or in the absolute form that proxies send.
fn split_target(target: &str) -> (&str, &str) {
    let scheme = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"));
    let target = match scheme.and_then(|scheme| target.get(scheme.len()..)) {
        Some(rest) => rest.find(['/', '?']).and_then(|at| rest.get(at..)).unwrap_or("/"),
        None => target,
    };
    target.split_once('?').unwrap_or((target, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RequestLimits = RequestLimits { max_head: 256, max_body: 32 };

    fn parse_all(text: &[u8]) -> Result<(Vec<Request>, usize), RequestError> {
        let mut parser = RequestParser::new(LIMITS);
        let mut input = BytesMut::from(text);
        let (mut requests, mut continues) = (Vec::new(), 0);
        loop {
            match parser.parse(&mut input)? {
                Progress::NeedMore => break,
                Progress::Continue => continues += 1,
                Progress::Complete(request) => requests.push(request),
            }
        }
        let mut parser = RequestParser::new(LIMITS);
        let (mut input, mut bytewise) = (BytesMut::new(), Vec::new());
        for byte in text {
            input.extend_from_slice(&[*byte]);
            while let Progress::Complete(request) = parser.parse(&mut input)? {
                bytewise.push(request);
            }
        }
        assert_eq!(bytewise, requests, "whole and byte by byte agree");
        Ok((requests, continues))
    }

    fn one(text: &str) -> Result<Request, RequestError> {
        let (mut requests, _) = parse_all(text.as_bytes())?;
        assert_eq!(requests.len(), 1, "{text:?}");
        Ok(requests.remove(0))
    }

    #[test]
    fn pipelined_requests_are_told_apart() {
        let text = "\r\nPUT /a?x=1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc\
                    POST /b HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nde\r\n0\r\n\r\n\
                    GET http://host:1/c?y HTTP/1.1\nConnection: Foo, Close\n\nGET /un";
        let (requests, continues) = parse_all(text.as_bytes()).unwrap();
        assert_eq!(continues, 0);
        let short: Vec<_> = requests
            .iter()
            .map(|r| (r.path.as_str(), r.query.as_str(), r.body.as_deref(), r.keep_alive))
            .collect();
        let expected: [(&str, &str, Option<&[u8]>, bool); 3] =
            [("/a", "x=1", Some(b"abc"), true), ("/b", "", Some(b"de"), true), ("/c", "y", None, false)];
        assert_eq!(short, expected);
    }

    #[test]
    fn http10_closes_unless_it_asks_to_stay() {
        assert!(!one("GET / HTTP/1.0\r\n\r\n").unwrap().keep_alive);
        assert!(one("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").unwrap().keep_alive);
    }

    #[test]
    fn continue_is_asked_for_once_and_only_if_the_body_is_missing() {
        let head = "PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
        assert_eq!(parse_all(head.as_bytes()).unwrap(), (vec![], 1));
        let mut parser = RequestParser::new(LIMITS);
        let mut input = BytesMut::from(head);
        assert_eq!(parser.parse(&mut input), Ok(Progress::Continue));
        assert_eq!(parser.parse(&mut input), Ok(Progress::NeedMore));
        input.extend_from_slice(b"ab");
        assert!(matches!(parser.parse(&mut input), Ok(Progress::Complete(_))));
    }

    #[test]
    fn every_malformed_request_has_its_status() {
        let cases = [
            ("GET\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nBad Name: x\r\n\r\n", 400),
            ("GET / HTTP/2.0\r\n\r\n", 505),
            ("PUT / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            ("PUT / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
            ("PUT / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("PUT / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
            ("PUT / HTTP/1.1\r\nContent-Length: 33\r\n\r\n", 413),
            ("PUT / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n", 413),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n21\r\n", 413),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n", 400),
            ("PUT / HTTP/1.1\r\nExpect: coffee\r\nContent-Length: 1\r\n\r\n", 417),
        ];
        for (text, status) in cases {
            assert_eq!(parse_all(text.as_bytes()).unwrap_err().status(), status, "{text:?}");
        }
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(300));
        assert_eq!(one(&long).unwrap_err().status(), 431);
        let endless = "x".repeat(300);
        assert_eq!(parse_all(endless.as_bytes()).unwrap_err().status(), 431);
        let fields = format!("GET / HTTP/1.1\r\n{}\r\n", "a:\r\n".repeat(65));
        let mut parser = RequestParser::new(RequestLimits { max_head: 4096, max_body: 0 });
        let error = parser.parse(&mut BytesMut::from(fields.as_str())).unwrap_err();
        assert_eq!(error.status(), 431);
    }
}
