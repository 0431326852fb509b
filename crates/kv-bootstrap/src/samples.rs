//! Records for tests.

use bytes::Bytes;
use kv_core::{
    EngineId, Incarnation, Parallel, RankRecord, ServiceOffer, TransportOffer, WorkerId, WorkerRole,
};

/// A record of the rank `rank` of `engine`. `life` makes the incarnation; `tp`, `pp` and `dp` are each a pair
/// of size and rank.
pub(crate) fn record(
    engine: &str,
    rank: u32,
    life: u64,
    tp: (u32, u32),
    pp: (u32, u32),
    dp: (u32, u32),
) -> RankRecord {
    let parallel = Parallel::default().with(|parallel| {
        parallel.tp_size = tp.0;
        parallel.tp_rank = tp.1;
        parallel.pp_size = pp.0;
        parallel.pp_rank = pp.1;
        parallel.dp_size = dp.0;
        parallel.dp_rank = dp.1;
    });
    let metadata = Bytes::from(format!("{engine}/{rank}/{life}"));
    let transport = TransportOffer { name: "local".to_owned(), version: 1, metadata };
    let who = (WorkerId { engine: EngineId::new(engine).unwrap(), rank }, Incarnation::from_random(life));
    RankRecord::new(who, WorkerRole::Prefill, parallel, vec![transport], vec![offer("kv")]).unwrap()
}

/// An offer of a service, with data that no service can read.
pub(crate) fn offer(service: &str) -> ServiceOffer {
    let (service, compatibility) = (service.to_owned(), String::new());
    ServiceOffer { service, min: 1, max: 2, compatibility, data: Bytes::from_static(b"\xffdata\0") }
}
