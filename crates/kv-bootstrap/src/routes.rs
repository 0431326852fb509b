//! The routes of the server: the tables behind them, and the answers.
//!
//! | route | answers |
//! |---|---|
//! | `PUT /route` | 200 `OK`; 400; 409; 413; 429; 507 |
//! | `GET /route?prefill_dp_rank=…&prefill_cp_rank=…&target_tp_rank=…&target_pp_rank=…` | 200 JSON; 400; 404; 503 |
//! | `POST /register_dp_rank` | 200 `OK`; 400; 413; 507 |
//! | `POST /query_dp_ranks` | 200 JSON; 400 |
//! | `GET /health` | 200 `OK`; 503 if a rank of SGLang's engine is gone, with the rank |
//! | `GET /v1/health` | 200 `OK` |
//! | `PUT /v1/ranks` | 200 [`GrantJson`]; 400; 401; 409; 429; 507 |
//! | `POST /v1/ranks/renew` | 200 [`GrantJson`]; 400; 401; 404 |
//! | `DELETE /v1/ranks` | 200 `{}`; 400; 401; 404; 409 |
//! | `GET /v1/ranks?role=…&dp_rank=…` (or `&modulo=…`; optional `&service=…`, `&engine=…`) | 200 list of [`RankJson`]; 400; 401; 404 [`NotFoundJson`]; 503 [`NotReadyJson`] |
//!
//! 429 means that the client's share is full, 507 that the server is full; both name the bound and the value
//! that would have exceeded it. A text that is too long is 400 with the field, its length and the maximum.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kv_core::{EngineId, RankRecord, RecordError, Replica, Time, WorkerRole};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::client_addr::ClientAddr;
use crate::config::ServerConfig;
use crate::gauges::BootstrapGauges;
use crate::http::{Query, Reply, Request, decode_query};
use crate::place::Place;
use crate::record::{GrantJson, LeaseJson, NotFoundJson, NotReadyJson, RankJson, RankJsonError};
use crate::registry::{LeaseError, LookupError, RegisterError, Registry};
use crate::secret::Secret;
use crate::sglang::{
    Admitted, Int, ROOM_BYTES, Rooms, RouteJson, RouteLimits, RouteMiss, RouteTable, SglangRank, Verdict,
    WatchOrder,
};

/// Most rooms in one `/query_dp_ranks`.
const MAX_ROOMS: usize = 1 << 16;
/// Longest body of a registration at one of SGLang's routes, in bytes; real bodies have about 1 KiB.
const MAX_SGLANG_BODY: usize = 32 << 10;
/// Lease of a registration that does not name one.
const DEFAULT_LEASE: Duration = Duration::from_secs(5);

/// All tables of the server, with the settings that decide which requests may use them.
#[derive(Debug)]
pub(crate) struct Tables {
    registry: Registry,
    /// SGLang's tables, one for each listening address.
    desks: Vec<Desk>,
    secret: Option<Secret>,
    sglang: bool,
}

/// SGLang's tables of one listening address: those of one engine.
#[derive(Debug)]
struct Desk {
    routes: RouteTable,
    rooms: Rooms,
}

/// Who asks, and at which of the server's listening addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct From {
    pub(crate) client: ClientAddr,
    pub(crate) desk: usize,
}

#[derive(Deserialize)]
struct RegisterDpRank {
    bootstrap_room: Int,
    dp_rank: Int,
}

#[derive(Deserialize)]
struct QueryDpRanks {
    bootstrap_rooms: Vec<Int>,
}

impl Tables {
    /// The tables of a server with this many listening addresses.
    pub(crate) fn new(config: &ServerConfig, addrs: usize) -> Tables {
        let limits = RouteLimits {
            max_ranks: config.max_route_ranks,
            max_per_client: config.max_route_ranks_per_client,
            max_bytes: config.max_route_bytes,
            max_lease: config.registry.max_lease,
            watch: config.watch.is_some(),
        };
        let desk = || Desk {
            routes: RouteTable::new(limits),
            rooms: Rooms::new(config.dp_rank_ttl, config.max_dp_ranks, config.max_dp_ranks_per_client),
        };
        Tables {
            registry: Registry::new(config.registry),
            desks: (0..addrs).map(|_| desk()).collect(),
            secret: config.secret.clone(),
            sglang: config.sglang,
        }
    }

    pub(crate) fn expire(&mut self, now: Time) {
        self.registry.expire(now);
        for desk in &mut self.desks {
            desk.routes.expire(now);
            desk.rooms.expire(now);
        }
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let desks =
            self.desks.iter().flat_map(|desk| [desk.routes.next_timeout(), desk.rooms.next_timeout()]);
        desks.chain([self.registry.next_timeout()]).flatten().min()
    }

    /// How much the tables keep.
    pub(crate) fn gauges(&self) -> BootstrapGauges {
        let mut gauges = BootstrapGauges {
            ranks: self.registry.len(),
            rank_bytes: self.registry.bytes(),
            lookup_steps: self.registry.steps(),
            ..BootstrapGauges::default()
        };
        for desk in &self.desks {
            gauges.route_ranks += desk.routes.places();
            gauges.route_bytes += desk.routes.bytes();
            gauges.rooms += desk.rooms.len();
            gauges.room_bytes += desk.rooms.len() * ROOM_BYTES;
        }
        gauges
    }

    /// The ports that are to be watched from now on, or no longer, each with the listening address.
    pub(crate) fn take_orders(&mut self) -> Vec<(usize, WatchOrder)> {
        let desks = self.desks.iter_mut().enumerate();
        desks
            .flat_map(|(at, desk)| desk.routes.take_orders().into_iter().map(move |order| (at, order)))
            .collect()
    }

    /// Takes what was found at a port that is watched for the table of a listening address.
    pub(crate) fn judge(&mut self, desk: usize, seq: u64, verdict: Verdict) {
        if let Some(desk) = self.desks.get_mut(desk) {
            desk.routes.judge(seq, verdict);
        }
    }

    /// The answer to a request. HEAD is answered as GET; the caller leaves the body out.
    pub(crate) fn answer(&mut self, now: Time, from: From, request: &Request) -> Reply {
        let ours = request.path.starts_with("/v1/") && request.path != "/v1/health";
        let admitted = |secret: &Secret| secret.admits(request.authorization.as_deref());
        if ours && !self.secret.as_ref().is_none_or(admitted) {
            return Reply::unauthorized();
        }
        let result = match (request.path.as_str(), request.method.as_str()) {
            ("/v1/health", "GET" | "HEAD") => Ok(Reply::text(200, "OK")),
            ("/v1/ranks", "PUT") => self.put_rank(now, from, request),
            ("/v1/ranks", "DELETE") => self.delete_rank(now, request),
            ("/v1/ranks", "GET" | "HEAD") => self.get_ranks(now, request),
            ("/v1/ranks", _) => Err(Reply::not_allowed("Allow: GET, HEAD, PUT, DELETE\r\n")),
            ("/v1/ranks/renew", "POST") => self.renew_rank(now, request),
            ("/v1/ranks/renew", _) => Err(Reply::not_allowed("Allow: POST\r\n")),
            ("/health" | "/v1/health", method) if !matches!(method, "GET" | "HEAD") => {
                Err(Reply::not_allowed("Allow: GET, HEAD\r\n"))
            }
            ("/route" | "/register_dp_rank" | "/query_dp_ranks", _) if !self.sglang => {
                Err(Reply::text(404, "404: Not Found"))
            }
            _ => match self.desks.get_mut(from.desk) {
                Some(desk) => desk.answer(now, from.client, request),
                None => Err(Reply::text(404, "404: Not Found")),
            },
        };
        result.unwrap_or_else(|refusal| refusal)
    }

    fn put_rank(&mut self, now: Time, from: From, request: &Request) -> Result<Reply, Reply> {
        let body: RankJson = json_body(request)?;
        let (lease, left) = (lease(body.lease_ms)?, body.left);
        let record = body.into_record().map_err(|error| match error {
            RankJsonError::Record(RecordError::Range { field, got, min, max }) => {
                let error = error.to_string();
                Reply::json(400, &json!({"error": error, "field": field, "got": got, "min": min, "max": max}))
            }
            _ => refusal(400, &error.to_string()),
        })?;
        let admitted = self.admit(now, from, &record)?;
        let granted = self.registry.register(now, from.client, &record, lease).map_err(|error| {
            let status = match error {
                RegisterError::Conflict { .. } => 409,
                RegisterError::ClientFull { .. } => 429,
                RegisterError::Full { .. } => 507,
                RegisterError::Encoding => 500,
            };
            refusal(status, &error.to_string())
        })?;
        for (at, desk) in self.desks.iter_mut().enumerate() {
            if admitted.is_none() || at != from.desk {
                desk.routes.withdraw(&record.worker, None);
            }
        }
        if let Some((admitted, desk)) = admitted.zip(self.desks.get_mut(from.desk)) {
            let owner = (record.worker.clone(), record.incarnation);
            desk.routes.enter(now, admitted, Some(now + granted), Some(owner));
        }
        if left {
            // It is registered: it was a moment ago.
            let _ = self.registry.leave(now, &record.worker, record.incarnation);
            for desk in &mut self.desks {
                desk.routes.leave(&record.worker);
            }
        }
        Ok(grant(granted))
    }

    /// Whether the rank that a record offers to SGLang's decode workers can be served by `/route`; `None` for a
    /// record without such an offer.
    fn admit(&mut self, now: Time, from: From, record: &RankRecord) -> Result<Option<Admitted>, Reply> {
        let Some(rank) = SglangRank::of(record).filter(|_| self.sglang) else { return Ok(None) };
        let rank = rank.map_err(|error| refusal(400, &error.to_string()))?;
        let Some(desk) = self.desks.get_mut(from.desk) else { return Ok(None) };
        let admitted = desk.routes.admit(now, from.client, &rank, Some(&record.worker));
        admitted.map(Some).map_err(|error| refusal(error.status(), &error.to_string()))
    }

    fn renew_rank(&mut self, now: Time, request: &Request) -> Result<Reply, Reply> {
        let body: LeaseJson = json_body(request)?;
        let lease = lease(body.lease_ms)?;
        // A registration of another incarnation is answered as if there were none: the client then registers
        // again, and learns the conflict from that answer.
        let renewed = self.registry.renew(now, &body.worker, body.incarnation, lease);
        let granted = renewed.map_err(|error| refusal(404, &error.to_string()))?;
        for desk in &mut self.desks {
            desk.routes.renew(&body.worker, body.incarnation, now + granted);
        }
        Ok(grant(granted))
    }

    fn delete_rank(&mut self, now: Time, request: &Request) -> Result<Reply, Reply> {
        let body: LeaseJson = json_body(request)?;
        self.registry.withdraw(now, &body.worker, body.incarnation).map_err(|error| {
            let status = match error {
                LeaseError::Unknown(_) => 404,
                LeaseError::OtherIncarnation { .. } => 409,
            };
            refusal(status, &error.to_string())
        })?;
        for desk in &mut self.desks {
            desk.routes.withdraw(&body.worker, Some(body.incarnation));
        }
        Ok(Reply::json(200, &json!({})))
    }

    fn get_ranks(&mut self, now: Time, request: &Request) -> Result<Reply, Reply> {
        let query = decode_query(&request.query).ok_or_else(|| refusal(400, "the query is malformed"))?;
        let role = match query.get("role") {
            Some("prefill") => WorkerRole::Prefill,
            Some("decode") => WorkerRole::Decode,
            Some("encode") => WorkerRole::Encode,
            other => {
                let got = other.unwrap_or("missing");
                return Err(refusal(400, &format!("role is {got}; it must be prefill, decode or encode")));
            }
        };
        let bad = |name, text| refusal(400, &format!("{name} is {text:?}, not a number"));
        let replica = match (query.get("dp_rank"), query.get("modulo")) {
            (Some(text), None) => Replica::Rank(text.parse().map_err(|_| bad("dp_rank", text))?),
            (None, Some(text)) => Replica::Modulo(text.parse().map_err(|_| bad("modulo", text))?),
            _ => return Err(refusal(400, "one of dp_rank and modulo must be given")),
        };
        let engine = query.get("engine").map(EngineId::new).transpose();
        let engine = engine.map_err(|error| refusal(400, &error.to_string()))?;
        match self.registry.lookup(now, role, query.get("service"), replica, engine.as_ref()) {
            Ok(bodies) => Ok(list(bodies)),
            Err(error @ (LookupError::Unknown | LookupError::Left)) => {
                let left = error == LookupError::Left;
                Err(Reply::json(404, &NotFoundJson { error: error.to_string(), left }))
            }
            Err(error @ LookupError::NotReady { registered, expected }) => {
                Err(Reply::json(503, &NotReadyJson { error: error.to_string(), registered, expected }))
            }
        }
    }
}

impl Desk {
    /// The answer to a request at one of SGLang's routes.
    fn answer(&mut self, now: Time, client: ClientAddr, request: &Request) -> Result<Reply, Reply> {
        match (request.path.as_str(), request.method.as_str()) {
            ("/health", _) => {
                self.routes.health(now).map_err(|rank| Reply::text(503, rank))?;
                Ok(Reply::text(200, "OK"))
            }
            ("/route", "PUT") => self.put_route(now, client, request),
            ("/route", "GET") => self.get_route(now, request),
            ("/route", _) => Err(Reply::text(405, "Method not allowed").declared_json()),
            ("/register_dp_rank", "POST") => self.register_dp_rank(now, client, request),
            ("/query_dp_ranks", "POST") => self.query_dp_ranks(now, request),
            ("/register_dp_rank" | "/query_dp_ranks", _) => Err(Reply::not_allowed("Allow: POST\r\n")),
            _ => Err(Reply::text(404, "404: Not Found")),
        }
    }

    fn put_route(&mut self, now: Time, client: ClientAddr, request: &Request) -> Result<Reply, Reply> {
        let claim: RouteJson = short_body(request)?;
        let refused = self.routes.register(now, client, claim);
        refused.map_err(|error| Reply::text(error.status(), error.to_string()))?;
        Ok(Reply::text(200, "OK"))
    }

    fn get_route(&mut self, now: Time, request: &Request) -> Result<Reply, Reply> {
        let query = text_query(request)?;
        let names = ["prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"];
        let mut numbers = [0_i64; 4];
        for (name, number) in names.into_iter().zip(&mut numbers) {
            let text = query.get(name).filter(|text| !text.is_empty());
            let text = text.ok_or_else(|| Reply::text(400, "Missing inputs for bootstrap server."))?;
            let parsed = text.trim().parse();
            *number = parsed.map_err(|_| Reply::text(400, format!("{name} is {text:?}, not an integer")))?;
        }
        let reply = if numbers == [-1; 4] {
            self.routes.info(now).map(|info| Reply::json(200, info))
        } else {
            let mut ranks = numbers.iter().map(|number| u32::try_from(*number).ok());
            let mut next = || ranks.next().flatten();
            let place = match (next(), next(), next(), next()) {
                (Some(dp), Some(cp), Some(tp), Some(pp)) => Some(Place { dp, cp, tp, pp }),
                _ => None,
            };
            self.routes.rank(now, place).map(|rank| Reply::json(200, rank))
        };
        let [dp, cp, tp, pp] = numbers;
        reply.map_err(|miss| match miss {
            RouteMiss::NotReady { registered } => Reply::text(
                503,
                format!("Prefill server not fully registered yet ({registered} workers registered)."),
            ),
            RouteMiss::Unwell(rank) => Reply::text(503, rank),
            RouteMiss::Unknown => Reply::text(
                404,
                format!("Bootstrap info not found for dp_rank={dp} pcp_rank={cp} tp_rank={tp} pp_rank={pp}"),
            ),
        })
    }

    fn register_dp_rank(&mut self, now: Time, client: ClientAddr, request: &Request) -> Result<Reply, Reply> {
        let body: RegisterDpRank = short_body(request)?;
        let rank = i64::try_from(body.dp_rank.0);
        let rank = rank.map_err(|_| Reply::text(400, format!("dp_rank is {}", body.dp_rank.0)))?;
        let full = self.rooms.insert(now, client, body.bootstrap_room.0, rank);
        full.map_err(|error| Reply::text(507, error.to_string()))?;
        Ok(Reply::text(200, "OK"))
    }

    fn query_dp_ranks(&mut self, now: Time, request: &Request) -> Result<Reply, Reply> {
        let QueryDpRanks { bootstrap_rooms: rooms } = text_body(request)?;
        if rooms.len() > MAX_ROOMS {
            let text = format!("bootstrap_rooms has {} rooms; at most {MAX_ROOMS} are allowed", rooms.len());
            return Err(Reply::text(400, text));
        }
        let known = rooms.iter().filter_map(|room| Some((room.0, self.rooms.get(now, room.0)?)));
        let known: BTreeMap<String, i64> = known.map(|(room, rank)| (room.to_string(), rank)).collect();
        Ok(Reply::json(200, &known))
    }
}

/// The body of a request to one of SGLang's routes, whose refusals are plain text.
fn text_body<T: DeserializeOwned>(request: &Request) -> Result<T, Reply> {
    let body = request.body.as_deref().ok_or_else(|| Reply::text(411, "the request has no body"))?;
    serde_json::from_slice(body).map_err(|error| Reply::text(400, format!("the body is not valid: {error}")))
}

/// The body of a request to a registration route of SGLang's, where a long body is refused with 413.
fn short_body<T: DeserializeOwned>(request: &Request) -> Result<T, Reply> {
    match request.body.as_ref().map(Vec::len) {
        Some(got) if got > MAX_SGLANG_BODY => {
            let text = format!("the body has {got} bytes; at most {MAX_SGLANG_BODY} are allowed");
            Err(Reply::text(413, text))
        }
        _ => text_body(request),
    }
}

fn text_query(request: &Request) -> Result<Query, Reply> {
    decode_query(&request.query).ok_or_else(|| Reply::text(400, "the query is malformed"))
}

fn json_body<T: DeserializeOwned>(request: &Request) -> Result<T, Reply> {
    let body = request.body.as_deref().ok_or_else(|| refusal(411, "the request has no body"))?;
    serde_json::from_slice(body).map_err(|error| refusal(400, &format!("the body is not valid: {error}")))
}

fn refusal(status: u16, error: &str) -> Reply {
    Reply::json(status, &json!({ "error": error }))
}

fn lease(millis: Option<u64>) -> Result<Duration, Reply> {
    match millis {
        None => Ok(DEFAULT_LEASE),
        Some(0) => Err(refusal(400, "lease_ms is 0; it must be at least 1")),
        Some(millis) => Ok(Duration::from_millis(millis)),
    }
}

fn grant(lease: Duration) -> Reply {
    let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
    Reply::json(200, &GrantJson { lease_ms })
}

/// A JSON list of values that are JSON texts already. The texts are shared, not copied.
fn list(bodies: Vec<Bytes>) -> Reply {
    let mut parts = Vec::with_capacity(2 * bodies.len() + 1);
    for (number, body) in bodies.into_iter().enumerate() {
        parts.push(Bytes::from_static(if number == 0 { b"[" } else { b"," }));
        parts.push(body);
    }
    parts.push(Bytes::from_static(if parts.is_empty() { b"[]" } else { b"]" }));
    Reply::json_parts(200, parts)
}
