//! [`HttpBootstrapClient`]: keeps registrations alive and answers lookups, without blocking.

mod endpoint;
mod pool;
mod publication;
mod purpose;
pub(crate) mod resolve;
mod sglang;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    BootstrapClient, BootstrapError, BootstrapEvent, LookupId, Parallel, RankQuery, RankRecord, Replica, Time,
};

use crate::client::endpoint::Outcome;
use crate::client::pool::Pool;
use crate::client::publication::{Answered, Publication};
use crate::client::purpose::{Key, Purpose};
use crate::client::sglang::SglangLookups;
pub use crate::client::sglang::SglangQuery;
#[cfg(feature = "fuzz")]
pub(crate) use crate::client::sglang::read_all;
use crate::config::ClientConfig;
use crate::error::BootstrapClientError;
use crate::http::{Response, encode_value};
use crate::record::{NotFoundJson, NotReadyJson, RankJson};
use crate::secret::Secret;

/// Longest single sleep inside `flush`.
const FLUSH_STEP: Duration = Duration::from_millis(20);

/// A client of any number of bootstrap servers, with one keep-alive connection to each.
///
/// # Contract
///
/// - Call [`poll`](BootstrapClient::poll) until it returns `None` whenever the descriptor is
///   readable, [`next_timeout`](BootstrapClient::next_timeout) is due, or a method was called.
/// - No method waits for a server, a name server or a lock, with one exception: [`flush`](Self::flush).
/// - A lookup ends in exactly one event, [`ClientConfig::request_timeout`] after the call at the
///   latest if `poll` is called then. Equal lookups that are not sent yet share one request. The lookups of
///   [`SglangQuery`] take up to three requests, and `Lives` as long as its page says.
/// - A registration is renewed after every third of its lease, made again when the server has forgotten
///   it, and retried without end. Each failed attempt makes a `PublishFailed` event; while the owner does not
///   poll, only the latest such event of a server is kept. If the address is not `host:port`, or the server
///   does not accept the secret, the event has the `retry_in` [`Duration::MAX`]: the client gives that
///   registration up.
/// - A record with an offer [`SGLANG_SERVICE`](crate::SGLANG_SERVICE) is registered by `PUT /route` with a server
///   that does not know `/v1/ranks`, and again whenever that server has lost the registration. SGLang's own server
///   has no withdrawal: its entry stays until the rank's engine registers anew.
/// - After `withdraw`, either keep polling until the servers have been told, or call `flush`. A registration
///   whose server could not be told ends with its lease.
pub struct HttpBootstrapClient {
    pool: Pool<Purpose>,
    publications: BTreeMap<Key, Publication>,
    sglang: SglangLookups,
    events: VecDeque<BootstrapEvent>,
    next_serial: u64,
}

impl HttpBootstrapClient {
    /// A client without connections and registrations.
    pub fn new(config: ClientConfig) -> Result<HttpBootstrapClient, BootstrapClientError> {
        Ok(HttpBootstrapClient {
            pool: Pool::new(config)?,
            publications: BTreeMap::new(),
            sglang: SglangLookups::default(),
            events: VecDeque::new(),
            next_serial: 0,
        })
    }

    /// Blocks until every withdrawal has ended, because the server was told or cannot be reached, but no
    /// longer than `at_most`. Returns true if all of them have ended. Events that come meanwhile are kept for
    /// `poll`.
    ///
    /// This is the only method that blocks, for the very end of a worker. 200 ms are enough for servers that
    /// are alive.
    pub fn flush(&mut self, now: Time, at_most: Duration) -> bool {
        let start = Instant::now();
        loop {
            let elapsed = start.elapsed();
            let at = now + elapsed;
            self.progress(at, Duration::ZERO);
            if !self.pool.pending().any(|purpose| matches!(purpose, Purpose::Withdraw)) {
                return true;
            }
            let Some(left) = at_most.checked_sub(elapsed).filter(|left| !left.is_zero()) else {
                return false;
            };
            self.progress(at, left.min(FLUSH_STEP));
        }
    }

    /// Waits for socket events for `wait` at most, then does everything that can be done at `now`.
    fn progress(&mut self, now: Time, wait: Duration) {
        let mut outcomes = Vec::new();
        self.pool.wait(now, wait, &mut outcomes);
        self.take_steps(now, &mut outcomes);
        self.sglang.take_steps(&mut self.pool, &mut self.events, now);
        self.pool.advance(now, &mut outcomes);
        for outcome in outcomes {
            self.conclude(now, outcome);
        }
    }

    /// Submits the requests of the registrations whose next step is due.
    fn take_steps(&mut self, now: Time, outcomes: &mut Vec<Outcome<Purpose>>) {
        let due: Vec<Key> = self
            .publications
            .iter()
            .filter(|(_, publication)| publication.due().is_some_and(|due| due <= now))
            .map(|(key, _)| key.clone())
            .collect();
        for key in due {
            let Some(publication) = self.publications.get_mut(&key) else { continue };
            let serial = publication.serial;
            let Some(bytes) = publication.step(now) else { continue };
            let addr = key.0.clone();
            outcomes.extend(self.pool.submit(now, &addr, Purpose::Step { key, serial }, bytes).err());
        }
    }

    /// Turns a request that has ended into events, and into the next step of its registration.
    fn conclude(&mut self, now: Time, (request, answer): Outcome<Purpose>) {
        match request.purpose {
            Purpose::Withdraw => {}
            Purpose::Sglang(step) => {
                self.sglang.conclude(&mut self.pool, &mut self.events, now, step, answer);
            }
            Purpose::Lookup { query, lookups } => {
                let answer = answer.and_then(|response| read_ranks(&query, response));
                for lookup in lookups {
                    self.events.push_back(match answer.clone() {
                        Ok(ranks) => BootstrapEvent::Found { lookup, ranks },
                        Err(error) => BootstrapEvent::Failed { lookup, error },
                    });
                }
            }
            Purpose::Step { key, serial } => {
                let Some(publication) = self.publications.get_mut(&key) else { return };
                if publication.serial != serial {
                    return;
                }
                match publication.answered(now, request.asked, answer, &self.pool.config) {
                    Answered::Quiet => {}
                    Answered::Published => self.events.push_back(BootstrapEvent::Published { addr: key.0 }),
                    Answered::Failed { error, mut retry_in } => {
                        if !error.is_retryable() {
                            self.publications.remove(&key);
                            retry_in = Duration::MAX;
                        }
                        let same = |event: &BootstrapEvent| matches!(event, BootstrapEvent::PublishFailed { addr, .. } if *addr == key.0);
                        self.events.retain(|event| !same(event));
                        self.events.push_back(BootstrapEvent::PublishFailed { addr: key.0, error, retry_in });
                    }
                }
            }
        }
    }
}

impl BootstrapClient for HttpBootstrapClient {
    fn publish(&mut self, now: Time, addr: &str, record: RankRecord) {
        let key = (addr.to_owned(), record.worker.clone());
        self.next_serial += 1;
        match Publication::new(self.next_serial, now, addr, &record, &self.pool.config) {
            Some(publication) => {
                self.publications.insert(key, publication);
            }
            None => {
                let error = BootstrapError::Malformed("this worker's own record cannot be written as JSON");
                let addr = addr.to_owned();
                self.events.push_back(BootstrapEvent::PublishFailed { addr, error, retry_in: Duration::MAX });
            }
        }
    }

    fn leave(&mut self, now: Time) {
        self.publications.values_mut().for_each(|publication| publication.leave(now));
        self.progress(now, Duration::ZERO);
    }

    fn withdraw(&mut self, now: Time) {
        for ((addr, _), publication) in std::mem::take(&mut self.publications) {
            if let Some(bytes) = publication.withdraw() {
                // A full queue means that the server does not answer: the registration ends with its lease.
                let _ = self.pool.submit(now, &addr, Purpose::Withdraw, bytes);
            }
        }
        self.progress(now, Duration::ZERO);
    }

    fn lookup(&mut self, now: Time, lookup: LookupId, addr: &str, query: &RankQuery) {
        if let Some(question) = SglangQuery::of(query) {
            let question = (lookup, addr, question);
            return self.sglang.ask(&mut self.pool, &mut self.events, now, question);
        }
        for purpose in self.pool.queued_mut(addr) {
            match purpose {
                // All lookups of the request time out with the one that was asked first.
                Purpose::Lookup { query: same, lookups } if same == query => return lookups.push(lookup),
                _ => {}
            }
        }
        let purpose = Purpose::Lookup { query: query.clone(), lookups: vec![lookup] };
        let bytes = question(addr, self.pool.config.secret.as_ref(), query);
        if let Err(outcome) = self.pool.submit(now, addr, purpose, bytes) {
            self.conclude(now, outcome);
        }
    }

    fn poll(&mut self, now: Time) -> Option<BootstrapEvent> {
        if self.events.is_empty() {
            self.progress(now, Duration::ZERO);
        }
        self.events.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        if !self.events.is_empty() {
            return Some(Time::ZERO);
        }
        let steps = self.publications.values().filter_map(Publication::due);
        steps.chain(self.pool.next_timeout()).chain(self.sglang.next_timeout()).min()
    }

    fn as_raw_fd(&self) -> Option<RawFd> {
        Some(self.pool.as_raw_fd())
    }
}

impl std::fmt::Debug for HttpBootstrapClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpBootstrapClient")
            .field("servers", &self.pool.addrs().collect::<Vec<_>>())
            .field("publications", &self.publications.len())
            .finish_non_exhaustive()
    }
}

fn question(host: &str, secret: Option<&Secret>, query: &RankQuery) -> Bytes {
    let secret = secret.map(Secret::field).unwrap_or_default();
    let role = query.role.name();
    let replica = match query.replica {
        Replica::Rank(rank) => format!("dp_rank={rank}"),
        Replica::Modulo(number) => format!("modulo={number}"),
    };
    let service = encode_value(&query.service);
    let target = format!("/v1/ranks?role={role}&service={service}&{replica}");
    Bytes::from(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n{secret}\r\n"))
}

/// The ranks of an answer, if the answer has all ranks of one replica, in the order of their places.
fn read_ranks(query: &RankQuery, response: Response) -> Result<Vec<RankRecord>, BootstrapError> {
    match response.status {
        200 => {}
        401 => return Err(BootstrapError::Unauthorized),
        404 => {
            let left = serde_json::from_slice::<NotFoundJson>(&response.body).is_ok_and(|json| json.left);
            return Err(if left { BootstrapError::Draining } else { BootstrapError::UnknownRank });
        }
        503 => {
            let missing = serde_json::from_slice::<NotReadyJson>(&response.body);
            let missing = missing.map_err(|_| BootstrapError::Status(503))?;
            return Err(BootstrapError::NotReady {
                registered: missing.registered,
                expected: missing.expected,
            });
        }
        status => return Err(BootstrapError::Status(status)),
    }
    let list: Vec<RankJson> = serde_json::from_slice(&response.body)
        .map_err(|_| BootstrapError::Malformed("the body is not a list of rank records"))?;
    let ranks: Result<Vec<RankRecord>, _> = list.into_iter().map(RankJson::into_record).collect();
    let ranks = ranks.map_err(|_| BootstrapError::Malformed("a rank record is not valid"))?;
    let Some(first) = ranks.first() else { return Err(BootstrapError::Malformed("the list has no ranks")) };
    let groups = &first.parallel;
    let sizes = |groups: &Parallel| (groups.tp_size, groups.pcp_size, groups.pp_size, groups.dp_size);
    let (tp_size, pcp_size, pp_size, dp_size) = sizes(groups);
    let dp_rank = match query.replica {
        Replica::Rank(rank) => u64::from(rank),
        Replica::Modulo(number) => number % u64::from(dp_size),
    };
    if ranks.len() as u64 != u64::from(groups.replica_ranks()) {
        return Err(BootstrapError::Malformed("the list does not have all ranks of the replica"));
    }
    let stage = |pp| (0..pcp_size).flat_map(move |cp| (0..tp_size).map(move |tp| (pp, cp, tp)));
    let mut places = (0..pp_size).flat_map(stage);
    for rank in &ranks {
        let groups = &rank.parallel;
        if !rank.offers.iter().any(|offer| offer.service == query.service) {
            return Err(BootstrapError::Malformed("a rank does not offer the service"));
        }
        if rank.role != query.role
            || rank.worker.engine != first.worker.engine
            || sizes(groups) != (tp_size, pcp_size, pp_size, dp_size)
        {
            return Err(BootstrapError::Malformed("the ranks are of different engines or roles"));
        }
        let place = (groups.pp_rank, groups.pcp_rank, groups.tp_rank);
        if places.next() != Some(place) || u64::from(groups.dp_rank) != dp_rank {
            return Err(BootstrapError::Malformed("the ranks are out of order, or of another replica"));
        }
    }
    Ok(ranks)
}
