//! The router: gives each request to a prefill and a decode rank, and collects what becomes of it.
//!
//! It never sees a byte of KV. All that a router needs for a hand-over is in [`Command`]: a room
//! number that both sides are told, and for the decode side the address of the bootstrap server and
//! the prefill rank that serves.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::control::{Accounting, Command, Decoded, Event, NamedError, Prefilled};
use super::error::ExampleError;
use super::progress::Progress;
use super::prompts::Request;

/// How long ranks may take to come up: a checkpoint is read from disk.
const READY_WITHIN: Duration = Duration::from_secs(300);
/// What a session's end may be late at the router: its deadline is kept by the rank.
const GRACE: Duration = Duration::from_secs(5);
/// How long ranks may take to end everything and account for their pages.
const FINISH_WITHIN: Duration = Duration::from_secs(60);

/// One side of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Computes prompts.
    Prefill,
    /// Continues them.
    Decode,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Side::Prefill { "prefill" } else { "decode" })
    }
}

/// A rank as the router sees it. Dropping it ends the rank's process.
pub struct Rank {
    /// Its side.
    pub side: Side,
    /// Its number on that side.
    pub number: u32,
    /// What it had at the end.
    pub accounting: Option<Accounting>,
    /// True if the router killed it on purpose.
    pub killed: bool,
    commands: Option<Box<dyn Write + Send>>,
    child: Option<Child>,
}

impl Rank {
    /// `prefill/0`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.side, self.number)
    }

    fn send(&mut self, command: &Command) -> Result<(), ExampleError> {
        // A rank that is gone is noticed by its reader.
        let Some(commands) = &mut self.commands else { return Ok(()) };
        let mut line = serde_json::to_vec(command).map_err(ExampleError::Command)?;
        line.push(b'\n');
        if commands.write_all(&line).and_then(|()| commands.flush()).is_err() {
            self.commands = None;
        }
        Ok(())
    }

    /// SIGKILL: the process gets no chance to say goodbye.
    fn kill(&mut self) {
        self.killed = true;
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
        // Not before: the end of its input is an order to stop in an orderly way.
        self.commands = None;
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // An end of its input is the order to exit; the signal is for ranks that do not listen.
        self.commands = None;
        if let Some(child) = &mut self.child {
            let patience = Instant::now() + Duration::from_secs(2);
            while Instant::now() < patience && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What to do with the requests.
pub struct Plan {
    /// Where the prefill ranks are registered.
    pub bootstrap: String,
    /// Tokens to generate for each.
    pub max_new_tokens: usize,
    /// Time for each transfer.
    pub deadline: Duration,
    /// Kill a rank of this side as soon as one of its requests is mid-transfer.
    pub kill: Option<Side>,
}

/// What became of everything.
pub struct Run {
    /// The requests, in order.
    pub requests: Vec<Routed>,
    /// The ranks, with their accounts.
    pub ranks: Vec<Rank>,
    /// The kill, if there was one.
    pub kill: Option<Kill>,
    /// From the first request until the last had ended.
    pub wall: Duration,
    /// Bytes of a page, over all regions.
    pub page_bytes: u64,
}

/// A kill that happened.
#[derive(Debug, Clone, Serialize)]
pub struct Kill {
    /// Which rank.
    pub rank: String,
    /// Whose transfer was under way.
    pub request: usize,
    /// Pages of it that had been given to the transfer.
    pub sent: usize,
    /// Pages it has.
    pub of: usize,
}

/// A request and what became of its halves.
pub struct Routed {
    /// The request.
    pub request: Request,
    /// Position of its prefill rank in [`Run::ranks`].
    pub prefill: usize,
    /// Position of its decode rank in [`Run::ranks`].
    pub decode: usize,
    /// What the prefill rank said.
    pub prefilled: Option<Prefilled>,
    /// What the decode rank said.
    pub decoded: Option<Decoded>,
    /// Set if a half's rank died before it could say anything.
    pub orphaned: Option<NamedError>,
}

impl Routed {
    fn ended(&self, ranks: &[Rank]) -> bool {
        let gone = |rank: usize| ranks.get(rank).is_some_and(|rank| rank.commands.is_none());
        (self.prefilled.is_some() || gone(self.prefill)) && (self.decoded.is_some() || gone(self.decode))
    }
}

/// The router.
pub struct Router {
    ranks: Vec<Rank>,
    events: Receiver<(usize, Option<Event>)>,
    sender: Sender<(usize, Option<Event>)>,
    page_bytes: u64,
}

impl Default for Router {
    fn default() -> Router {
        Router::new()
    }
}

impl Router {
    /// A router without ranks.
    pub fn new() -> Router {
        let (sender, events) = channel();
        Router { ranks: Vec::new(), events, sender, page_bytes: 0 }
    }

    /// Adds a rank that is reached through this pair; `child` is its process, if it is ours.
    pub fn add(
        &mut self,
        side: Side,
        input: impl Read + Send + 'static,
        output: impl Write + Send + 'static,
        child: Option<Child>,
    ) {
        let index = self.ranks.len();
        let number = self.ranks.iter().filter(|rank| rank.side == side).count() as u32;
        let (commands, accounting) = (Some(Box::new(output) as _), None);
        self.ranks.push(Rank { side, number, accounting, killed: false, commands, child });
        let sender = self.sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(input).lines().map_while(Result::ok) {
                let Ok(event) = serde_json::from_str(&line) else { break };
                if sender.send((index, Some(event))).is_err() {
                    return;
                }
            }
            let _ = sender.send((index, None));
        });
    }

    /// Waits until all ranks are up.
    pub fn wait_ready(&mut self) -> Result<(), ExampleError> {
        let end = Instant::now() + READY_WITHIN;
        let mut waiting: Vec<bool> = self.ranks.iter().map(|_| true).collect();
        while let Some(missing) = waiting.iter().position(|waiting| *waiting) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(Event::Ready { page_bytes, .. }))) => {
                    self.page_bytes = page_bytes;
                    waiting[index] = false;
                }
                Ok((_, Some(_))) => {}
                Ok((index, None)) => return Err(self.lost(index, "ended before it was ready")),
                Err(_) => return Err(self.lost(missing, "did not come up in time")),
            }
        }
        Ok(())
    }

    fn lost(&self, index: usize, how: &str) -> ExampleError {
        let rank = self.ranks.get(index).map(Rank::name).unwrap_or_default();
        ExampleError::Rank { rank, how: how.to_owned() }
    }

    /// Routes all requests and waits for their ends, then for the ranks' accounts.
    pub fn run(
        mut self,
        requests: Vec<Request>,
        plan: &Plan,
        progress: &Progress,
    ) -> Result<Run, ExampleError> {
        let started = Instant::now();
        let mut routed = self.route(requests, plan)?;
        let kill = self.collect(&mut routed, plan, started + plan.deadline + GRACE, progress);
        let wall = started.elapsed();
        self.finish()?;
        Ok(Run { requests: routed, ranks: self.ranks, kill, wall, page_bytes: self.page_bytes })
    }

    fn route(&mut self, requests: Vec<Request>, plan: &Plan) -> Result<Vec<Routed>, ExampleError> {
        let side =
            |side| (0..self.ranks.len()).filter(|i| self.ranks[*i].side == side).collect::<Vec<usize>>();
        let (prefill, decode) = (side(Side::Prefill), side(Side::Decode));
        let deadline_ms = plan.deadline.as_millis() as u64;
        let mut routed = Vec::with_capacity(requests.len());
        for (i, request) in requests.into_iter().enumerate() {
            // Every prefill rank meets every decode rank.
            let (prefill, decode) = (prefill[i % prefill.len()], decode[i / prefill.len() % decode.len()]);
            let (room, prompt) = (request.room, request.prompt.clone());
            self.ranks[prefill].send(&Command::Prefill { room, prompt: prompt.clone(), deadline_ms })?;
            let prefill_dp_rank = self.ranks[prefill].number;
            self.ranks[decode].send(&Command::Decode {
                room,
                prompt,
                max_new_tokens: plan.max_new_tokens,
                deadline_ms,
                bootstrap: plan.bootstrap.clone(),
                prefill_dp_rank,
            })?;
            routed.push(Routed { request, prefill, decode, prefilled: None, decoded: None, orphaned: None });
        }
        Ok(routed)
    }

    /// Takes in events until every half has ended, its rank is gone, or its time is over.
    fn collect(
        &mut self,
        routed: &mut [Routed],
        plan: &Plan,
        end: Instant,
        progress: &Progress,
    ) -> Option<Kill> {
        let mut kill = None;
        let rooms: BTreeMap<u64, usize> =
            routed.iter().enumerate().map(|(i, routed)| (routed.request.room, i)).collect();
        while !routed.iter().all(|request| request.ended(&self.ranks)) {
            let (index, event) = match self.events.recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            };
            match event {
                Some(Event::Chunk { room, sent, of }) if kill.is_none() && sent > 0 && sent < of => {
                    let Some(&request) = rooms.get(&room) else { continue };
                    let victim = match plan.kill {
                        None => continue,
                        Some(Side::Prefill) => routed[request].prefill,
                        Some(Side::Decode) => routed[request].decode,
                    };
                    self.ranks[victim].kill();
                    kill = Some(Kill { rank: self.ranks[victim].name(), request, sent, of });
                }
                Some(Event::Prefilled(prefilled)) => {
                    if let Some(&request) = rooms.get(&prefilled.room) {
                        routed[request].prefilled = Some(prefilled);
                        progress.prefilled.inc(1);
                    }
                }
                Some(Event::Decoded(decoded)) => {
                    if let Some(&request) = rooms.get(&decoded.room) {
                        routed[request].decoded = Some(decoded);
                        progress.decoded.inc(1);
                    }
                }
                Some(_) => {}
                None => self.orphan(index, routed),
            }
        }
        kill
    }

    /// A rank is gone: requests of which its half had not ended get no word from it any more.
    fn orphan(&mut self, index: usize, routed: &mut [Routed]) {
        self.ranks[index].commands = None;
        let (name, killed) = (self.ranks[index].name(), self.ranks[index].killed);
        let mut cancelled = Vec::new();
        for request in routed {
            let unheard = (request.prefill == index && request.prefilled.is_none())
                || (request.decode == index && request.decoded.is_none());
            if unheard {
                let error = if killed { "RankKilled" } else { "RankDied" };
                request.orphaned = Some(NamedError::new(error, format_args!("{name} is gone")));
            }
            if request.decode == index && request.prefilled.is_none() {
                let room = request.request.room;
                cancelled.push((request.prefill, room));
            }
        }
        for (prefill, room) in cancelled {
            // A rank that cannot be told is gone too, and the router hears of that.
            let _ = self.ranks[prefill].send(&Command::Cancel { room });
        }
    }

    fn finish(&mut self) -> Result<(), ExampleError> {
        for rank in &mut self.ranks {
            rank.send(&Command::Finish)?;
        }
        let end = Instant::now() + FINISH_WITHIN;
        while self.ranks.iter().any(|rank| rank.commands.is_some() && rank.accounting.is_none()) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(Event::Finished(accounting)))) => {
                    self.ranks[index].accounting = Some(accounting)
                }
                Ok((index, None)) => self.ranks[index].commands = None,
                Ok(_) => {}
                Err(_) => break,
            }
        }
        Ok(())
    }
}
