//! HTTP/1.1 as bytes in, messages out: no sockets here. `httparse` reads the heads. The framing of bodies is
//! code of this crate, because every line, trailer and body has a bound (see the crate's documentation).

mod body;
mod chunked;
mod error;
mod head;
mod reply;
mod request;
mod response;
mod target;

pub(crate) use reply::Reply;
pub(crate) use request::{Progress, Request, RequestLimits, RequestParser, Stage};
pub(crate) use response::{Response, ResponseParser};
pub(crate) use target::{Query, decode_query, encode_value};
