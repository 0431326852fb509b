//! The answers of SGLang's bootstrap protocol, from a server of SGLang or of this crate.

use std::collections::BTreeMap;

use kv_core::BootstrapError;

use crate::http::Response;
use crate::sglang::{InfoJson, Int, RankInfoJson, SglangRank};

/// Most ranks of a replica that a lookup asks for.
pub(super) const MAX_RANKS: u64 = 1024;

/// How many ranks an answer of `GET /route` says are registered: `u32::MAX` for all of them, `None` if the rank that
/// was asked for is not.
pub(in crate::client) fn listed(answer: &Result<Response, BootstrapError>) -> Option<u32> {
    match answer {
        Ok(response) if response.status == 200 => Some(u32::MAX),
        Ok(response) if response.status == 503 => registered(&response.body),
        _ => None,
    }
}

/// The answer 200, or why there is none.
pub(super) fn ok(response: &Response) -> Result<(), BootstrapError> {
    match response.status {
        200 => Ok(()),
        401 => Err(BootstrapError::Unauthorized),
        404 => Err(BootstrapError::UnknownRank),
        503 => Err(match registered(&response.body) {
            // SGLang does not say how many ranks there will be.
            Some(registered) => {
                BootstrapError::NotReady { registered, expected: registered.saturating_add(1) }
            }
            None => BootstrapError::UnknownRank,
        }),
        status => Err(BootstrapError::Status(status)),
    }
}

/// The number in SGLang's "Prefill server not fully registered yet (1 workers registered)."
fn registered(body: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(body.get(..128).unwrap_or(body)).ok()?;
    let (_, rest) = text.split_once('(')?;
    let (number, _) = rest.split_once(" workers registered")?;
    number.parse().ok()
}

/// The sizes of an engine, as a rank without an address.
pub(super) fn read_sizes(response: &Response) -> Result<SglangRank, BootstrapError> {
    ok(response)?;
    let info: InfoJson = serde_json::from_slice(&response.body)
        .map_err(|_| BootstrapError::Malformed("the body does not describe a prefill engine"))?;
    let sizes = info.into_rank();
    let sizes =
        sizes.map_err(|_| BootstrapError::Malformed("a field of the prefill engine is out of range"))?;
    let groups = &sizes.parallel;
    let ranks = u64::from(groups.tp_size).saturating_mul(groups.pcp_size.into());
    if ranks.saturating_mul(groups.pp_size.into()) > MAX_RANKS {
        return Err(BootstrapError::Malformed("a replica has more than 1024 ranks"));
    }
    Ok(sizes)
}

/// The data-parallel rank that serves each room, of the rooms that the server knows.
pub(super) fn read_rooms(response: &Response) -> Result<BTreeMap<u64, u32>, BootstrapError> {
    ok(response)?;
    let rooms: BTreeMap<String, Int> = serde_json::from_slice(&response.body)
        .map_err(|_| BootstrapError::Malformed("the body does not name the replicas of rooms"))?;
    // Every client may register a room: a number that is of no replica is that client's mistake.
    let known = |(room, dp): (String, Int)| Some((room.parse().ok()?, u32::try_from(dp.0).ok()?));
    Ok(rooms.into_iter().filter_map(known).collect())
}

/// The host and the port of a rank.
pub(super) fn read_rank(response: &Response) -> Result<(String, u16), BootstrapError> {
    ok(response)?;
    let info: RankInfoJson = serde_json::from_slice(&response.body)
        .map_err(|_| BootstrapError::Malformed("the body is not the address of a rank"))?;
    info.into_addr().ok_or(BootstrapError::Malformed("the address of a rank is out of range"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_sglangs_server_say_whether_to_ask_again() {
        let error = |status, body: &str| {
            ok(&Response { status, body: body.as_bytes().to_vec(), keep_alive: true }).unwrap_err()
        };
        let text = "Prefill server not fully registered yet (3 workers registered).";
        assert_eq!(error(503, text), BootstrapError::NotReady { registered: 3, expected: 4 });
        assert_eq!(error(503, "tp_rank 0 is dead"), BootstrapError::UnknownRank);
        assert_eq!(error(503, &"(".repeat(1000)), BootstrapError::UnknownRank);
        assert_eq!(error(404, ""), BootstrapError::UnknownRank);
        assert_eq!(error(500, ""), BootstrapError::Status(500));
    }
}
