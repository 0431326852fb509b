//! SGLang's lookups at a bootstrap server: where the ranks of a prefill engine are, which replica serves a room,
//! and whether the engine lives. SGLang's own server and the server of this crate answer them.

mod answers;
mod ends;
mod health;
mod query;
mod records;
mod requests;

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::{BootstrapError, BootstrapEvent, LookupId, Replica, Time};
use serde_json::json;

use self::answers::{ok, read_rank, read_rooms, read_sizes};
use self::ends::{Events, fail, found};
use self::health::Heartbeats;
use self::records::{places, record};
use self::requests::{get, of_rank, route, send};
use super::pool::Pool;
use super::purpose::Purpose;
use crate::http::Response;
use crate::sglang::SglangRank;

pub(super) use self::answers::listed;
pub use self::query::SglangQuery;
pub(super) use self::requests::{get_route, put_route};

/// The lookups that are under way.
///
/// | lookup | requests |
/// |---|---|
/// | `Ranks` | `GET /route` for the sizes; `POST /query_dp_ranks` if needed; `GET /route` for each rank |
/// | `Lives` | `GET /health` at every heartbeat |
/// | `Serves` | `POST /register_dp_rank` |
#[derive(Debug, Default)]
pub(super) struct SglangLookups {
    gathers: BTreeMap<u64, Gather>,
    next_gather: u64,
    heartbeats: Heartbeats,
}

/// The purpose of one request.
#[derive(Debug)]
pub(super) enum Step {
    Sizes { addr: String, asks: Vec<Ask> },
    Rooms { addr: String, sizes: Box<SglangRank>, asks: Vec<(LookupId, u64)> },
    Rank { gather: u64, at: usize },
    Health { addr: String },
    Serves { lookup: LookupId },
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    lookup: LookupId,
    replica: Replica,
}

/// The ranks of one replica, while they come in.
#[derive(Debug)]
struct Gather {
    addr: String,
    lookups: Vec<LookupId>,
    ranks: Vec<SglangRank>,
    missing: usize,
}

impl SglangLookups {
    pub(super) fn ask(
        &mut self,
        pool: &mut Pool<Purpose>,
        events: &mut Events,
        now: Time,
        (lookup, addr, query): (LookupId, &str, SglangQuery),
    ) {
        match query {
            SglangQuery::Ranks(replica) => {
                let ask = Ask { lookup, replica };
                for purpose in pool.queued_mut(addr) {
                    if let Purpose::Sglang(Step::Sizes { asks, .. }) = purpose {
                        return asks.push(ask);
                    }
                }
                let step = Step::Sizes { addr: addr.to_owned(), asks: vec![ask] };
                self.submit(pool, events, now, addr, step, get(addr, &route([-1; 4])));
            }
            SglangQuery::Lives => {
                let until = now + pool.config.watch;
                self.heartbeats.watch(now, addr, lookup, until);
                self.take_steps(pool, events, now);
            }
            SglangQuery::Serves { room, dp_rank } => {
                let body = json!({"bootstrap_room": room, "dp_rank": dp_rank}).to_string();
                let bytes = send("POST /register_dp_rank", addr, &body);
                self.submit(pool, events, now, addr, Step::Serves { lookup }, bytes);
            }
        }
    }

    /// Sends the heartbeats that are due, and answers those who have waited for the time of a watch.
    pub(super) fn take_steps(&mut self, pool: &mut Pool<Purpose>, events: &mut Events, now: Time) {
        for addr in self.heartbeats.due(events, now) {
            let bytes = get(&addr, "/health");
            self.submit(pool, events, now, &addr.clone(), Step::Health { addr }, bytes);
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.heartbeats.next_timeout()
    }

    fn submit(
        &mut self,
        pool: &mut Pool<Purpose>,
        events: &mut Events,
        now: Time,
        addr: &str,
        step: Step,
        bytes: Bytes,
    ) {
        if let Err((request, answer)) = pool.submit(now, addr, Purpose::Sglang(step), bytes)
            && let Purpose::Sglang(step) = request.purpose
        {
            self.conclude(pool, events, now, step, answer);
        }
    }

    /// Takes the answer to one request.
    pub(super) fn conclude(
        &mut self,
        pool: &mut Pool<Purpose>,
        events: &mut Events,
        now: Time,
        step: Step,
        answer: Result<Response, BootstrapError>,
    ) {
        match step {
            Step::Sizes { addr, asks } => match answer.and_then(|response| read_sizes(&response)) {
                Ok(sizes) => self.choose_replicas(pool, events, now, addr, sizes, asks),
                Err(error) => fail(events, asks.iter().map(|ask| ask.lookup), &error),
            },
            Step::Rooms { addr, sizes, asks } => match answer.and_then(|response| read_rooms(&response)) {
                Ok(known) => {
                    let mut replicas = BTreeMap::<u32, Vec<LookupId>>::new();
                    for (lookup, room) in asks {
                        match known.get(&room) {
                            Some(dp) => replicas.entry(*dp).or_default().push(lookup),
                            None => fail(events, [lookup], &BootstrapError::UnknownRank),
                        }
                    }
                    self.gather(pool, events, now, &addr, &sizes, replicas);
                }
                Err(error) => fail(events, asks.iter().map(|ask| ask.0), &error),
            },
            Step::Rank { gather, at } => {
                let answer = answer.and_then(|response| read_rank(&response));
                self.take_rank(events, gather, at, answer);
            }
            Step::Health { addr } => {
                let answer = answer.and_then(|response| ok(&response));
                self.heartbeats.answered(events, now, &pool.config, &addr, answer);
            }
            Step::Serves { lookup } => events.push_back(match answer.and_then(|response| ok(&response)) {
                Ok(()) => found(lookup),
                Err(error) => BootstrapEvent::Failed { lookup, error },
            }),
        }
    }

    /// Finds the replica of each lookup, and asks the server for those that only the server knows.
    fn choose_replicas(
        &mut self,
        pool: &mut Pool<Purpose>,
        events: &mut Events,
        now: Time,
        addr: String,
        sizes: SglangRank,
        asks: Vec<Ask>,
    ) {
        let dp_size = sizes.parallel.dp_size;
        let (mut replicas, mut rooms) = (BTreeMap::<u32, Vec<LookupId>>::new(), Vec::new());
        for Ask { lookup, replica } in asks {
            match replica {
                Replica::Rank(dp) => replicas.entry(dp).or_default().push(lookup),
                // The remainder is smaller than a u32.
                Replica::Modulo(room) if dp_size == 1 || sizes.follow_bootstrap_room => {
                    replicas.entry((room % u64::from(dp_size)) as u32).or_default().push(lookup);
                }
                Replica::Modulo(room) => rooms.push((lookup, room)),
            }
        }
        if !rooms.is_empty() {
            let list: Vec<u64> = rooms.iter().map(|(_, room)| *room).collect();
            let bytes = send("POST /query_dp_ranks", &addr, &json!({ "bootstrap_rooms": list }).to_string());
            let step = Step::Rooms { addr: addr.clone(), sizes: Box::new(sizes.clone()), asks: rooms };
            self.submit(pool, events, now, &addr, step, bytes);
        }
        self.gather(pool, events, now, &addr, &sizes, replicas);
    }

    /// Asks for every rank of these replicas.
    fn gather(
        &mut self,
        pool: &mut Pool<Purpose>,
        events: &mut Events,
        now: Time,
        addr: &str,
        sizes: &SglangRank,
        replicas: BTreeMap<u32, Vec<LookupId>>,
    ) {
        for (dp, lookups) in replicas {
            if dp >= sizes.parallel.dp_size {
                fail(events, lookups, &BootstrapError::UnknownRank);
                continue;
            }
            let ranks: Vec<SglangRank> = places(sizes, dp).collect();
            let number = self.next_gather;
            self.next_gather += 1;
            let requests: Vec<Bytes> = ranks.iter().map(|rank| get(addr, &of_rank(rank))).collect();
            let missing = ranks.len();
            self.gathers.insert(number, Gather { addr: addr.to_owned(), lookups, ranks, missing });
            for (at, bytes) in requests.into_iter().enumerate() {
                if !self.gathers.contains_key(&number) {
                    break;
                }
                self.submit(pool, events, now, addr, Step::Rank { gather: number, at }, bytes);
            }
        }
    }

    fn take_rank(
        &mut self,
        events: &mut Events,
        number: u64,
        at: usize,
        answer: Result<(String, u16), BootstrapError>,
    ) {
        // The ranks of a lookup that has failed for another rank are of no use.
        let Some(gather) = self.gathers.get_mut(&number) else { return };
        let failed = match (answer, gather.ranks.get_mut(at)) {
            (Ok((ip, port)), Some(rank)) => {
                (rank.rank_ip, rank.rank_port) = (ip, port);
                gather.missing -= 1;
                if gather.missing > 0 {
                    return;
                }
                None
            }
            (Err(error), _) => Some(error),
            (Ok(_), None) => None,
        };
        let Some(Gather { addr, lookups, ranks, .. }) = self.gathers.remove(&number) else { return };
        let records = match failed {
            Some(error) => Err(error),
            None => ranks.iter().map(|rank| record(&addr, rank)).collect::<Result<Vec<_>, _>>(),
        };
        for lookup in lookups {
            events.push_back(match records.clone() {
                Ok(ranks) => BootstrapEvent::Found { lookup, ranks },
                Err(error) => BootstrapEvent::Failed { lookup, error },
            });
        }
    }
}

/// Reads the bytes as every answer that SGLang's server may give, and makes records of what is valid.
#[cfg(feature = "fuzz")]
pub(crate) fn read_all(body: &[u8]) {
    let response = Response { status: 200, body: body.to_vec(), keep_alive: true };
    let _ = read_rooms(&response);
    let rank = read_rank(&response);
    if let Ok(sizes) = read_sizes(&response) {
        assert!(places(&sizes, 0).count() as u64 <= answers::MAX_RANKS);
        if let (Some(rank), Ok((ip, port))) = (places(&sizes, 0).last(), rank) {
            let rank = rank.with(|rank| (rank.rank_ip, rank.rank_port) = (ip, port));
            let record = record("10.0.0.1:8998", &rank);
            assert!(record.is_ok_and(|record| SglangRank::of(&record) == Some(Ok(rank))));
        }
    }
}
