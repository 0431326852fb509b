//! The server's side of HTTP: requests are parsed here.

use bytes::{Buf, BytesMut};

use super::body::Body;
use super::error::HttpError;
use super::head::{Fields, MAX_FIELDS, take_head};

/// A request that has arrived completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// The path of the request's target, as it was sent.
    pub(crate) path: String,
    /// The query of the request's target, as it was sent, without the question mark.
    pub(crate) query: String,
    /// The body, which may be empty; `None` if no header field announced a body.
    pub(crate) body: Option<Vec<u8>>,
    pub(crate) keep_alive: bool,
    /// True for HTTP/1.1, false for HTTP/1.0.
    pub(crate) http11: bool,
    /// The value of the `Authorization` field, if there is exactly one.
    pub(crate) authorization: Option<Vec<u8>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestLimits {
    pub(crate) max_head: usize,
    pub(crate) max_body: usize,
}

/// What the bytes so far amount to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    NeedMore,
    /// The client waits for `100 Continue` before it sends the body. Returned once for each request.
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
    pending: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    head: Request,
    body: Body,
    expects: bool,
}

impl RequestParser {
    pub(crate) fn new(limits: RequestLimits) -> RequestParser {
        RequestParser { limits, scanned: 0, pending: None }
    }

    pub(crate) fn stage(&self) -> Stage {
        if self.pending.is_some() { Stage::Body } else { Stage::Head }
    }

    /// Forgets the request that has begun to arrive, if there is one.
    pub(crate) fn reset(&mut self) {
        *self = RequestParser::new(self.limits);
    }

    /// Bytes of memory that an unfinished body takes.
    pub(crate) fn buffered(&self) -> usize {
        self.pending.as_ref().map_or(0, |pending| pending.body.buffered())
    }

    /// Takes the bytes of the next request from `input`.
    pub(crate) fn parse(&mut self, input: &mut BytesMut) -> Result<Progress, HttpError> {
        let mut pending = match self.pending.take() {
            Some(pending) => pending,
            None => match self.parse_head(input)? {
                Some(pending) => pending,
                None => return Ok(Progress::NeedMore),
            },
        };
        if pending.body.receive(input, false)? {
            let mut request = pending.head;
            request.body = request.body.map(|_| pending.body.into_bytes());
            return Ok(Progress::Complete(request));
        }
        let expects = std::mem::take(&mut pending.expects);
        self.pending = Some(pending);
        Ok(if expects { Progress::Continue } else { Progress::NeedMore })
    }

    fn parse_head(&mut self, input: &mut BytesMut) -> Result<Option<Pending>, HttpError> {
        // Empty lines before a request are to be ignored (RFC 9112, 2.2).
        let blank = input.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        if self.scanned == 0 {
            input.advance(blank);
        }
        let head = take_head(input, &mut self.scanned, self.limits.max_head)?;
        head.map(|head| read_head(&head, self.limits)).transpose()
    }
}

fn read_head(bytes: &[u8], limits: RequestLimits) -> Result<Pending, HttpError> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => {
            return Err(HttpError::HeadTooLarge { max: limits.max_head });
        }
        Err(httparse::Error::Version) => return Err(HttpError::Version),
        Ok(httparse::Status::Partial) | Err(_) => return Err(HttpError::Head),
    }
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(HttpError::Head);
    };
    let (fields, http11) = (Fields(parsed.headers), version == 1);
    let body = Body::of(fields, http11, limits.max_body)?;
    let mut expects = false;
    for value in fields.all("expect").filter(|_| http11) {
        if !value.eq_ignore_ascii_case(b"100-continue") {
            return Err(HttpError::Expectation);
        }
        expects = true;
    }
    let mut shown = fields.all("authorization");
    let authorization = shown.next().filter(|_| shown.next().is_none()).map(<[u8]>::to_vec);
    let (path, query) = split_target(target);
    let head = Request {
        method: method.to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        body: body.is_some().then(Vec::new),
        keep_alive: fields.keep_alive(http11),
        http11,
        authorization,
    };
    Ok(Pending { head, body: body.unwrap_or_else(Body::none), expects })
}

/// The path and the query of a target in origin form, or in the absolute form that proxies send.
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

    fn parse_all(text: &[u8]) -> Result<(Vec<Request>, usize), HttpError> {
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

    fn one(text: &str) -> Result<Request, HttpError> {
        let (mut requests, _) = parse_all(text.as_bytes())?;
        assert_eq!(requests.len(), 1, "{text:?}");
        Ok(requests.remove(0))
    }

    #[test]
    fn pipelined_requests_are_parsed_one_after_the_other() {
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
    fn an_http10_connection_closes_unless_it_asks_for_keep_alive() {
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
    fn every_kind_of_malformed_request_gets_its_own_status() {
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
