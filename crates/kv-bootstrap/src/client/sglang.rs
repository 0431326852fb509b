//! SGLang's questions to a bootstrap server: where the ranks of a prefill engine are, which replica serves a room,
//! and whether the engine lives. They are understood by SGLang's own server and by this crate's.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use kv_core::hash::Fnv1a;
use kv_core::{
    BootstrapError, BootstrapEvent, EngineId, Incarnation, LookupId, RankQuery, RankRecord, Replica, Time,
    TransportOffer, WorkerId, WorkerRole,
};
use serde_json::json;

use super::Purpose;
use super::pool::Pool;
use crate::http::Response;
use crate::place::Place;
use crate::sglang::{InfoJson, Int, RankInfoJson, SGLANG_SERVICE, SglangRank};

/// Most ranks of a replica that a lookup asks for.
const MAX_RANKS: u64 = 1024;
/// The name of the transport under which a record has the address of the rank's ZeroMQ socket.
const ZMQ: &str = "zmq";
const LIVES: &str = "sglang/lives";
const SERVES: &str = "sglang/serves/";

/// A question of SGLang's, as a [`RankQuery`] for
/// [`HttpBootstrapClient::lookup`](crate::HttpBootstrapClient). Each ends in one event, as every lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglangQuery {
    /// Where the ranks of a replica of the prefill engine are: `Found` has a record for each rank, in the order of
    /// their places, with the rank's [`SglangRank`] as the only offer. `Replica::Modulo` is the room: the replica
    /// is the room modulo the number of replicas if the engine follows the room, and else what the prefill worker
    /// has said; `UnknownRank` until it has.
    Ranks(Replica),
    /// Tell me when the engine is dead: `Failed` after [`ClientConfig::max_failures`] heartbeats in a row without
    /// the answer 200 to `GET /health`; `Found` without ranks after [`ClientConfig::watch`], if the engine lived
    /// all the time. Whoever still uses the engine asks again.
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
    /// The question that a query asks; `None` for a query of another service.
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

/// The questions that are being asked.
///
/// | question | requests |
/// |---|---|
/// | `Ranks` | `GET /route` for the sizes; `POST /query_dp_ranks` if needed; `GET /route` for each rank |
/// | `Lives` | `GET /health` at every heartbeat |
/// | `Serves` | `POST /register_dp_rank` |
#[derive(Debug, Default)]
pub(super) struct Questions {
    gathers: BTreeMap<u64, Gather>,
    next_gather: u64,
    watches: BTreeMap<String, Watch>,
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

/// An engine that is asked for its health.
#[derive(Debug)]
struct Watch {
    /// Who wants to know, and until when.
    lookups: Vec<(LookupId, Time)>,
    failures: u32,
    /// When the next heartbeat is due; `None` while one is under way.
    due: Option<Time>,
}

type Events = VecDeque<BootstrapEvent>;

impl Questions {
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
                let watch = self.watches.entry(addr.to_owned());
                let watch = watch.or_insert(Watch { lookups: Vec::new(), failures: 0, due: Some(now) });
                watch.lookups.push((lookup, until));
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
        let mut due = Vec::new();
        self.watches.retain(|addr, watch| {
            if watch.failures == 0 && watch.due.is_some() {
                let over = watch.lookups.extract_if(.., |(_, until)| *until <= now);
                events.extend(over.map(|(lookup, _)| found(lookup)));
            }
            if watch.due.is_some_and(|at| at <= now) && !watch.lookups.is_empty() {
                watch.due = None;
                due.push(addr.clone());
            }
            watch.due.is_none() || !watch.lookups.is_empty()
        });
        for addr in due {
            let bytes = get(&addr, "/health");
            self.submit(pool, events, now, &addr.clone(), Step::Health { addr }, bytes);
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let watches = self.watches.values().filter_map(|watch| {
            let until = watch.lookups.iter().map(|(_, until)| *until).min().filter(|_| watch.failures == 0);
            watch.due.map(|due| until.map_or(due, |until| due.min(until)))
        });
        watches.min()
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
            Step::Health { addr } => self.take_health(pool, events, now, &addr, answer),
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

    fn take_health(
        &mut self,
        pool: &Pool<Purpose>,
        events: &mut Events,
        now: Time,
        addr: &str,
        answer: Result<Response, BootstrapError>,
    ) {
        let Some(watch) = self.watches.get_mut(addr) else { return };
        let error = match answer.and_then(|response| ok(&response)) {
            Ok(()) => {
                watch.failures = 0;
                watch.due = Some(now + pool.config.heartbeat);
                return;
            }
            Err(error) => error,
        };
        watch.failures += 1;
        watch.due = Some(now + pool.config.heartbeat);
        if watch.failures >= pool.config.max_failures
            && let Some(watch) = self.watches.remove(addr)
        {
            fail(events, watch.lookups.into_iter().map(|(lookup, _)| lookup), &error);
        }
    }
}

fn found(lookup: LookupId) -> BootstrapEvent {
    BootstrapEvent::Found { lookup, ranks: Vec::new() }
}

fn fail(events: &mut Events, lookups: impl IntoIterator<Item = LookupId>, error: &BootstrapError) {
    let failed = |lookup| BootstrapEvent::Failed { lookup, error: error.clone() };
    events.extend(lookups.into_iter().map(failed));
}

fn get(host: &str, target: &str) -> Bytes {
    Bytes::from(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
}

fn send(what: &str, host: &str, body: &str) -> Bytes {
    let length = body.len();
    Bytes::from(format!(
        "{what} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    ))
}

/// The registration of a rank with SGLang's own server.
pub(super) fn put_route(host: &str, rank: &SglangRank) -> Bytes {
    send("PUT /route", host, &String::from_utf8_lossy(&rank.encode()))
}

/// The question whether a rank is still registered with SGLang's own server.
pub(super) fn get_route(host: &str, rank: &SglangRank) -> Bytes {
    get(host, &of_rank(rank))
}

/// How many ranks an answer of `GET /route` says are registered: `u32::MAX` for all of them, `None` if the rank that
/// was asked for is not.
pub(super) fn listed(answer: &Result<Response, BootstrapError>) -> Option<u32> {
    match answer {
        Ok(response) if response.status == 200 => Some(u32::MAX),
        Ok(response) if response.status == 503 => registered(&response.body),
        _ => None,
    }
}

fn route([dp, cp, tp, pp]: [i64; 4]) -> String {
    format!("/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}")
}

fn of_rank(rank: &SglangRank) -> String {
    let Place { dp, cp, tp, pp } = Place::of(&rank.parallel);
    route([dp, cp, tp, pp].map(i64::from))
}

/// The ranks of a replica in the order of `(pp_rank, pcp_rank, tp_rank)`.
fn places(sizes: &SglangRank, dp: u32) -> impl Iterator<Item = SglangRank> {
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
fn record(addr: &str, rank: &SglangRank) -> Result<RankRecord, BootstrapError> {
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

/// The answer 200, or why there is none.
fn ok(response: &Response) -> Result<(), BootstrapError> {
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
fn read_sizes(response: &Response) -> Result<SglangRank, BootstrapError> {
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

fn read_rooms(response: &Response) -> Result<BTreeMap<u64, u32>, BootstrapError> {
    ok(response)?;
    let rooms: BTreeMap<String, Int> = serde_json::from_slice(&response.body)
        .map_err(|_| BootstrapError::Malformed("the body does not name the replicas of rooms"))?;
    // Every client may register a room: a number that is of no replica is that client's mistake.
    let known = |(room, dp): (String, Int)| Some((room.parse().ok()?, u32::try_from(dp.0).ok()?));
    Ok(rooms.into_iter().filter_map(known).collect())
}

fn read_rank(response: &Response) -> Result<(String, u16), BootstrapError> {
    ok(response)?;
    let info: RankInfoJson = serde_json::from_slice(&response.body)
        .map_err(|_| BootstrapError::Malformed("the body is not the address of a rank"))?;
    info.into_addr().ok_or(BootstrapError::Malformed("the address of a rank is out of range"))
}

/// Reads the bytes as every answer that SGLang's server may give, and makes records of what is valid.
#[cfg(feature = "fuzz")]
pub(crate) fn read_all(body: &[u8]) {
    let response = Response { status: 200, body: body.to_vec(), keep_alive: true };
    let _ = read_rooms(&response);
    let rank = read_rank(&response);
    if let Ok(sizes) = read_sizes(&response) {
        assert!(places(&sizes, 0).count() as u64 <= MAX_RANKS);
        if let (Some(rank), Ok((ip, port))) = (places(&sizes, 0).last(), rank) {
            let rank = rank.with(|rank| (rank.rank_ip, rank.rank_port) = (ip, port));
            let record = record("10.0.0.1:8998", &rank);
            assert!(record.is_ok_and(|record| SglangRank::of(&record) == Some(Ok(rank))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_question_is_equal_after_a_trip_through_a_query() {
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
