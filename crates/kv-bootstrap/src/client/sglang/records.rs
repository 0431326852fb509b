//! The ranks of an SGLang engine as rank records.

use bytes::Bytes;
use kv_core::hash::Fnv1a;
use kv_core::{BootstrapError, EngineId, Incarnation, RankRecord, TransportOffer, WorkerId, WorkerRole};

use crate::sglang::SglangRank;

/// The name of the transport under which a record has the address of the rank's ZeroMQ socket.
const ZMQ: &str = "zmq";

/// The ranks of a replica in the order of `(pp_rank, pcp_rank, tp_rank)`.
pub(super) fn places(sizes: &SglangRank, dp: u32) -> impl Iterator<Item = SglangRank> {
    let groups = sizes.parallel;
    let stage =
        move |pp| (0..groups.pcp_size).flat_map(move |cp| (0..groups.tp_size).map(move |tp| (pp, cp, tp)));
    (0..groups.pp_size).flat_map(stage).map(move |(pp, cp, tp)| {
        sizes.clone().with(|rank| {
            let parallel = &mut rank.parallel;
            (parallel.dp_rank, parallel.pp_rank, parallel.pcp_rank, parallel.tp_rank) = (dp, pp, cp, tp);
        })
    })
}

/// The record of a rank. SGLang's engines have no id and its ranks no incarnation: the bootstrap address stands
/// for the engine, and a rank at another port is another incarnation.
pub(super) fn record(addr: &str, rank: &SglangRank) -> Result<RankRecord, BootstrapError> {
    let invalid = |_| BootstrapError::Malformed("the ranks of the engine make no valid record");
    let engine = EngineId::new(&format!("sglang@{addr}"));
    let engine = engine.map_err(|_| BootstrapError::Malformed("the server's address makes no engine id"))?;
    let groups = &rank.parallel;
    let in_replica = (groups.pp_rank * groups.pcp_size + groups.pcp_rank) * groups.tp_size + groups.tp_rank;
    let number = groups.dp_rank.saturating_mul(groups.replica_ranks()).saturating_add(in_replica);
    let port = format!("{}:{}", rank.rank_ip, rank.rank_port);
    let incarnation = Incarnation::from_random(Fnv1a::of(port.as_bytes()));
    let who = (WorkerId { engine, rank: number }, incarnation);
    let zmq = TransportOffer { name: ZMQ.to_owned(), version: 3, metadata: Bytes::from(port) };
    RankRecord::new(who, WorkerRole::Prefill, rank.parallel, vec![zmq], vec![rank.offer()]).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_rank_is_another_incarnation_of_the_same_worker() {
        let at = |port| {
            let rank = SglangRank::new("10.0.0.1", port, 16).with(|rank| {
                (rank.parallel.tp_size, rank.parallel.tp_rank) = (2, 1);
                (rank.parallel.dp_size, rank.parallel.dp_rank) = (4, 3);
            });
            record("h:1", &rank).unwrap()
        };
        let (one, two) = (at(1), at(2));
        assert_eq!((&one.worker, one.worker.rank), (&two.worker, 7));
        assert_ne!(one.incarnation, two.incarnation);
        assert_eq!(one.transports[0].metadata, b"10.0.0.1:1"[..]);
    }
}
