//! Receiving: opens receivers for requests that a peer has computed, waits on the poll set, and compares
//! every byte.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kv_transfer::{
    AuxIndex, EngineReceiver, KvManager, KvPoll, KvReceiver, KvSession, OpenError, PageList, Pages, Room,
    SessionId, SessionOptions,
};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::error::PairError;
use crate::harm::Harm;

/// A request that the peer has, and where its KV shall be.
pub struct Wanted {
    /// What the report calls the request.
    pub name: String,
    /// The room of the request.
    pub room: Room,
    /// Where the peer is asked: its side channel, or its bootstrap server.
    pub addr: String,
    /// What the session is told beyond that.
    pub options: SessionOptions,
    /// The blocks of our cache.
    pub blocks: Vec<u32>,
    /// The row of our metadata buffers.
    pub aux: Option<AuxIndex>,
    /// The peer's blocks of the whole prompt, by which the bytes are compared. Nothing is compared if there
    /// are none.
    pub source: Vec<u32>,
    /// Tokens before the first of our blocks.
    pub prefix: usize,
}

/// How long sessions and pages may take, and what is done to the pair meanwhile.
pub struct Conditions {
    /// How long a session may take. The session itself ends by then.
    pub timeout: Duration,
    /// How long pages may be in quarantine after the last session has ended.
    pub settle: Duration,
    /// Aborts the sessions that are left when so many have ended.
    pub abort_after: Option<usize>,
    /// What is done to a process when so many sessions have ended.
    pub harm: Option<Harm>,
}

/// What became of the requests.
pub struct Received {
    requests: Vec<Ended>,
    /// From before the first receiver was opened to the end of the last one.
    elapsed: Duration,
    /// To the first news of a session: the handshake, if the peer was not known.
    first: Option<Duration>,
    /// From the end of the last session to the return of the last page; `None` if pages did not come back.
    quiet: Option<Duration>,
    bytes_per_block: u64,
}

struct Ended {
    wanted: Wanted,
    /// `None` if the session has not ended, which is a bug.
    result: Option<Result<(), String>>,
    wrong: usize,
}

/// A session that was opened and whose pages are not back.
struct Open {
    session: EngineReceiver,
    request: usize,
    ended: bool,
}

/// Receives all requests at once.
pub fn receive(
    engine: &mut Engine,
    wanted: Vec<Wanted>,
    conditions: &mut Conditions,
) -> Result<Received, PairError> {
    engine.clear()?;
    let mut given: Vec<Option<Pages>> = Vec::with_capacity(wanted.len());
    for request in &wanted {
        let list = PageList::from_pages(request.blocks.iter().copied())?;
        given.push(Some(engine.pool.adopt(list)?));
    }
    let requests = wanted.into_iter().map(|wanted| Ended { wanted, result: None, wrong: 0 }).collect();
    let mut run =
        Running { requests, open: BTreeMap::new(), num_ended: 0, first: None, started: Instant::now() };
    let give_up = run.started + conditions.timeout + Duration::from_secs(10);
    let mut elapsed = None;
    let (mut next, mut end) = (0, give_up);
    loop {
        while next < given.len() && run.open(engine, next, &mut given)? {
            next += 1;
        }
        run.step(engine)?;
        run.disturb(conditions);
        if run.num_ended == run.requests.len() && elapsed.is_none() {
            elapsed = Some(run.started.elapsed());
            end = Instant::now() + conditions.settle;
        }
        let over = elapsed.is_some() && run.open.is_empty();
        if over || Instant::now() >= end {
            break;
        }
        engine.wait(&[engine.group.as_fd()], Duration::from_millis(20));
    }
    let elapsed = elapsed.unwrap_or_else(|| run.started.elapsed());
    let quiet = run.open.is_empty().then(|| run.started.elapsed().saturating_sub(elapsed));
    for Open { session, .. } in std::mem::take(&mut run.open).into_values() {
        engine.leave(session);
    }
    for request in &mut run.requests {
        if request.result == Some(Ok(())) && !request.wanted.source.is_empty() {
            request.wrong = engine.wrong(&request.wanted)?;
        }
    }
    let bytes_per_block = engine.bytes_per_block();
    Ok(Received { requests: run.requests, elapsed, first: run.first, quiet, bytes_per_block })
}

struct Running {
    requests: Vec<Ended>,
    open: BTreeMap<SessionId, Open>,
    num_ended: usize,
    first: Option<Duration>,
    started: Instant,
}

impl Running {
    /// Opens the receiver of a request and gives it its pages; false if the worker has no room now.
    fn open(
        &mut self,
        engine: &Engine,
        request: usize,
        given: &mut [Option<Pages>],
    ) -> Result<bool, PairError> {
        let (Some(Ended { wanted, .. }), Some(pages)) = (self.requests.get(request), given.get_mut(request))
        else {
            return Ok(true);
        };
        let opened = engine.group.receiver(&wanted.addr, wanted.room.clone(), wanted.options.clone());
        let mut session = match opened {
            Ok(session) => session,
            Err(OpenError::Backpressure | OpenError::TooManySessions { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        // A group keeps what the ring of a rank has no room for.
        let aux = wanted.aux;
        let mut left = pages.take().unwrap_or_default();
        while let Err(refused) = session.init(left, aux) {
            left = refused.0;
            engine.wait(&[engine.group.as_fd()], Duration::from_millis(1));
        }
        self.open.insert(session.id(), Open { session, request, ended: false });
        Ok(true)
    }

    /// Takes in what has changed.
    fn step(&mut self, engine: &mut Engine) -> Result<(), PairError> {
        let mut changes = Vec::new();
        engine.group.drain(|change| changes.push(change));
        for change in changes {
            if change.poll != KvPoll::Bootstrapping {
                self.first.get_or_insert_with(|| self.started.elapsed());
            }
            let Some(open) = self.open.get_mut(&change.session) else { continue };
            // The session may have ended since the change was told, and its pages be back.
            let back = open.session.reclaim();
            if (back.is_some() || open.session.poll().is_terminal()) && !open.ended {
                open.ended = true;
                self.num_ended += 1;
                let failure = open.session.failure().map(|error| error.to_string());
                if let Some(request) = self.requests.get_mut(open.request) {
                    request.result = Some(failure.map_or(Ok(()), Err));
                }
            }
            if let Some(back) = back {
                engine.pool.release(back.pages)?;
                self.open.remove(&change.session);
            }
        }
        Ok(())
    }

    /// Does what the conditions say, once their time has come.
    fn disturb(&mut self, conditions: &mut Conditions) {
        if conditions.harm.as_ref().is_some_and(|harm| self.num_ended >= harm.after)
            && let Some(harm) = conditions.harm.take()
        {
            harm.inflict();
        }
        if conditions.abort_after.is_some_and(|after| self.num_ended >= after) {
            conditions.abort_after = None;
            self.open.values_mut().for_each(|open| open.session.abort());
        }
    }
}

impl Received {
    /// True if every request has arrived, and no byte is wrong, and every page is back.
    pub fn is_right(&self) -> bool {
        let right = |request: &Ended| request.result == Some(Ok(())) && request.wrong == 0;
        self.requests.iter().all(right) && self.quiet.is_some()
    }

    /// The report, with the keys that the drivers of the peers use.
    pub fn json(&self, engine: &Engine) -> Value {
        let names = |select: &dyn Fn(&Ended) -> bool| -> Vec<&str> {
            self.requests
                .iter()
                .filter(|request| select(request))
                .map(|request| &*request.wanted.name)
                .collect()
        };
        let done = names(&|request| request.result == Some(Ok(())));
        let failed: BTreeMap<&str, &str> = self.requests.iter().filter_map(Ended::failure).collect();
        let wrong: BTreeMap<&str, usize> =
            self.requests.iter().filter(|request| request.wrong > 0).map(Ended::wrong).collect();
        let blocks: usize = self.requests.iter().map(|request| request.wanted.blocks.len()).sum();
        let bytes = blocks as u64 * self.bytes_per_block;
        let seconds = self.elapsed.as_secs_f64().max(1e-9);
        json!({
            "n": self.requests.len(), "done": done.len(), "failed": failed,
            "timed_out": names(&|request| request.result.is_none()), "wrong_bytes": wrong,
            "ms": millis(self.elapsed), "first_ms": self.first.map(millis), "bytes": bytes,
            "GBps": (bytes as f64 / seconds / 1e6).round() / 1e3, "quiet_ms": self.quiet.map(millis),
            "pages_out": engine.pool.num_out(), "quarantine": engine.quarantine(),
        })
    }

    /// Of each request its name, and whether it has arrived.
    pub fn results(&self) -> impl Iterator<Item = (&Wanted, Result<usize, &str>)> {
        self.requests.iter().map(|request| {
            let result = match &request.result {
                Some(Ok(())) => Ok(request.wrong),
                Some(Err(why)) => Err(why.as_str()),
                None => Err("the session has not ended"),
            };
            (&request.wanted, result)
        })
    }
}

impl Ended {
    fn failure(&self) -> Option<(&str, &str)> {
        match &self.result {
            Some(Err(why)) => Some((&self.wanted.name, why)),
            _ => None,
        }
    }

    fn wrong(&self) -> (&str, usize) {
        (&self.wanted.name, self.wrong)
    }
}

/// Milliseconds, to the hundredth.
pub fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e5).round() / 1e2
}
