//! [`SglangQuery`]: the lookups of SGLang's decode workers, as queries of a bootstrap client.

use kv_core::{RankQuery, Replica, WorkerRole};

use crate::sglang::SGLANG_SERVICE;

const LIVES: &str = "sglang/lives";
const SERVES: &str = "sglang/serves/";

/// A lookup of SGLang's, as a [`RankQuery`] for
/// [`HttpBootstrapClient::lookup`](crate::HttpBootstrapClient). Each ends in one event, as every lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglangQuery {
    /// Where the ranks of a replica of the prefill engine are: `Found` has a record for each rank, in the order of
    /// their places, with the rank's [`SglangRank`](crate::SglangRank) as the only offer. `Replica::Modulo` is the
    /// room: the replica is the room modulo the number of replicas if the engine follows the room, and else what the
    /// prefill worker has said; `UnknownRank` until it has.
    Ranks(Replica),
    /// Whether the engine dies: `Failed` after [`ClientConfig::max_failures`] heartbeats in a row without
    /// the answer 200 to `GET /health`; `Found` without ranks after [`ClientConfig::watch`], if the engine lived
    /// all the time. A worker that still uses the engine asks again.
    ///
    /// [`ClientConfig::max_failures`]: crate::ClientConfig::max_failures
    /// [`ClientConfig::watch`]: crate::ClientConfig::watch
    Lives,
    /// Note that a replica serves a room, for decode workers that ask (`POST /register_dp_rank`): `Found` without
    /// ranks once the server has noted it. For engines of several replicas that do not follow the room.
    Serves {
        /// The room of the request.
        room: u64,
        /// The data-parallel rank that serves the request.
        dp_rank: u32,
    },
}

impl From<SglangQuery> for RankQuery {
    fn from(query: SglangQuery) -> RankQuery {
        let (service, replica) = match query {
            SglangQuery::Ranks(replica) => (SGLANG_SERVICE.to_owned(), replica),
            SglangQuery::Lives => (LIVES.to_owned(), Replica::Rank(0)),
            SglangQuery::Serves { room, dp_rank } => (format!("{SERVES}{dp_rank}"), Replica::Modulo(room)),
        };
        RankQuery { role: WorkerRole::Prefill, service, replica }
    }
}

impl SglangQuery {
    /// The lookup that a query stands for; `None` for a query of another service.
    pub fn of(query: &RankQuery) -> Option<SglangQuery> {
        match (query.service.as_str(), query.service.strip_prefix(SERVES), query.replica) {
            (SGLANG_SERVICE, _, replica) => Some(SglangQuery::Ranks(replica)),
            (LIVES, ..) => Some(SglangQuery::Lives),
            (_, Some(dp_rank), Replica::Modulo(room)) => {
                Some(SglangQuery::Serves { room, dp_rank: dp_rank.parse().ok()? })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lookup_is_equal_after_a_trip_through_a_query() {
        for query in [
            SglangQuery::Ranks(Replica::Rank(3)),
            SglangQuery::Ranks(Replica::Modulo(u64::MAX)),
            SglangQuery::Lives,
            SglangQuery::Serves { room: u64::MAX, dp_rank: 7 },
        ] {
            assert_eq!(SglangQuery::of(&query.into()), Some(query));
        }
        let kv = RankQuery { role: WorkerRole::Prefill, service: "kv".to_owned(), replica: Replica::Rank(0) };
        assert_eq!(SglangQuery::of(&kv), None);
    }
}
