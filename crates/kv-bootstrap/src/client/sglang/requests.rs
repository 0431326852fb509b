//! The HTTP requests of SGLang's bootstrap protocol, as a decode worker and a prefill rank send them.

use bytes::Bytes;

use crate::place::Place;
use crate::sglang::SglangRank;

pub(super) fn get(host: &str, target: &str) -> Bytes {
    Bytes::from(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
}

pub(super) fn send(what: &str, host: &str, body: &str) -> Bytes {
    let length = body.len();
    Bytes::from(format!(
        "{what} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    ))
}

/// The registration of a rank with SGLang's own server.
pub(in crate::client) fn put_route(host: &str, rank: &SglangRank) -> Bytes {
    send("PUT /route", host, &String::from_utf8_lossy(&rank.encode()))
}

/// The question whether a rank is still registered with SGLang's own server.
pub(in crate::client) fn get_route(host: &str, rank: &SglangRank) -> Bytes {
    get(host, &of_rank(rank))
}

/// The target of `GET /route` for a place. -1 in all four places asks for the sizes of the engine.
pub(super) fn route([dp, cp, tp, pp]: [i64; 4]) -> String {
    format!("/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}")
}

/// The target of `GET /route` for the place of a rank.
pub(super) fn of_rank(rank: &SglangRank) -> String {
    let Place { dp, cp, tp, pp } = Place::of(&rank.parallel);
    route([dp, cp, tp, pp].map(i64::from))
}
