//! Entry points for fuzzing: functions through which the bytes of clients and servers pass. Each returns true if all of
//! the bytes are accepted. Not a public API.

use std::net::{IpAddr, Ipv4Addr};

use bytes::BytesMut;
use kv_core::{RankRecord, ServiceOffer, Time};

use crate::config::{RegistryConfig, ServerConfig};
use crate::http::{Progress, Request, RequestLimits, RequestParser, ResponseParser};
use crate::record::RankJson;
use crate::routes::{From, Tables};
use crate::sglang::{SglangRank, Verdict, WatchOrder};

/// Parses the bytes of one connection as requests and answers them with small tables. Asserts that the
/// requests are the same however the stream is cut into pieces. They are accepted if no answer is a refusal.
pub fn requests(bytes: &[u8]) -> bool {
    let whole = parse(bytes, bytes.len().max(1));
    let cut = parse(bytes, 7);
    if let (Ok(whole), Ok(cut)) = (&whole, &cut) {
        assert_eq!(whole, cut, "cut into pieces, the stream holds other requests");
    }
    let config = ServerConfig {
        registry: RegistryConfig { max_ranks: 8, max_bytes: 1 << 16, ..RegistryConfig::default() },
        max_route_ranks: 8,
        max_dp_ranks: 8,
        ..ServerConfig::default()
    };
    let mut tables = Tables::new(&config, 2);
    let mut accepted = whole.as_ref().is_ok_and(|requests| !requests.is_empty());
    for (at, request) in (0..).zip(whole.unwrap_or_else(|requests| requests)) {
        let now = Time::from_nanos(at * 1_000_000_000);
        // Several clients in turn, so that the limits of one client are reached too.
        let client = IpAddr::V4(Ipv4Addr::from_bits((at % 3) as u32)).into();
        let reply = tables.answer(now, From { client, desk: (at % 2) as usize }, &request);
        accepted &= reply.status < 400;
        let parts = reply.encode(request.http11, request.keep_alive, request.method == "HEAD");
        assert!(!parts.is_empty());
        tables.expire(now);
        // Of the ports that are to be watched, some live, some are silent, some are dead.
        for (desk, order) in tables.take_orders() {
            let WatchOrder::Begin { seq, .. } = order else { continue };
            let verdicts =
                [Verdict::Lives, Verdict::Silent, Verdict::Dead, Verdict::Refused, Verdict::Unknown];
            tables.judge(desk, seq, verdicts[(seq % 5) as usize]);
        }
    }
    accepted
}

/// The requests in the bytes; `Err` with the requests before the first malformed one.
fn parse(bytes: &[u8], piece: usize) -> Result<Vec<Request>, Vec<Request>> {
    let mut parser = RequestParser::new(RequestLimits { max_head: 4096, max_body: 1 << 16 });
    let (mut input, mut requests) = (BytesMut::new(), Vec::new());
    for piece in bytes.chunks(piece) {
        input.extend_from_slice(piece);
        loop {
            match parser.parse(&mut input) {
                Ok(Progress::NeedMore) => break,
                Ok(Progress::Continue) => {}
                Ok(Progress::Complete(request)) => requests.push(request),
                Err(_) => return Err(requests),
            }
        }
    }
    Ok(requests)
}

/// Parses the bytes of a connection as answers of a server, and the rank records in the answers; SGLang's too.
pub fn responses(bytes: &[u8]) -> bool {
    let mut parser = ResponseParser::new(1 << 16);
    let (mut input, mut accepted) = (BytesMut::new(), false);
    for piece in bytes.chunks(61) {
        input.extend_from_slice(piece);
        while let Ok(Some(response)) = parser.parse(&mut input, false) {
            accepted = true;
            crate::client::read_all(&response.body);
            if let Ok(ranks) = serde_json::from_slice::<Vec<RankJson>>(&response.body) {
                ranks.into_iter().for_each(|rank| _ = valid_record(rank));
            }
        }
    }
    // The end of the stream ends the last answer.
    let end = parser.parse(&mut input, true);
    end.is_ok_and(|last| (accepted || last.is_some()) && input.is_empty())
}

/// Parses the bytes as the JSON of one rank record, and as the data of an offer to SGLang's decode workers.
pub fn record(bytes: &[u8]) -> bool {
    let rank = SglangRank::decode(bytes);
    if let Ok(rank) = &rank {
        let again = SglangRank::decode(&rank.encode());
        // A system of one replica is written as attention with one replica.
        assert_eq!(again, Ok(rank.clone().with(|rank| rank.system_dp &= rank.parallel.dp_size != 1)));
    }
    serde_json::from_slice::<RankJson>(bytes).is_ok_and(valid_record) || rank.is_ok()
}

/// True if the JSON is a record.
fn valid_record(json: RankJson) -> bool {
    let Ok(record) = json.into_record() else { return false };
    for offer in &record.offers {
        if let Ok(geometry) = offer.geometry(record.parallel) {
            // A geometry that passes the check of the KV service can be offered to others unchanged.
            let again = ServiceOffer::kv(&geometry).and_then(|offer| {
                let record = RankRecord { offers: vec![offer.clone()], ..record.clone() };
                record.check().map(|()| offer)
            });
            assert!(
                again.is_err() || again.is_ok_and(|offer| offer.geometry(record.parallel) == Ok(geometry))
            );
        }
    }
    assert_eq!(RankJson::new(&record, None).into_record(), Ok(record));
    true
}
