//! The router: gives each request to a prefill and a decode rank, and collects what becomes of it.
//!
//! It never sees a byte of KV. All that a router needs for a hand-over is in [`Command`]: a room
//! number that both sides are told, and `kv_transfer_params`.
//!
//! * Push: both sides are told at once. The router writes the parameters of the decode side itself:
//!   whom to expect the KV from.
//! * Pull: the prefill side is told first. Its answer holds the parameters of the decode side, and
//!   the router passes them on as they are; so it does with those that the decode side gives for the
//!   next turn.

mod rank;
mod run;

pub use rank::{Harm, Rank, Side};
pub use run::{Harmed, Moment, Plan, Routed, Run};

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::{EngineId, Room};
use serde_json::Value;

use super::cli::Mode;
use super::control::{Command, Decoded, Event, NamedError};
use super::error::ExampleError;
use super::progress::Progress;
use super::prompts::{Conversation, new_room};

/// How long ranks may take to come up: a checkpoint is read from disk.
const READY_WITHIN: Duration = Duration::from_secs(300);
/// What a session's end may be late at the router: its deadline is kept by the rank.
const GRACE: Duration = Duration::from_secs(5);
/// How long ranks may take to end everything and account for their pages.
const FINISH_WITHIN: Duration = Duration::from_secs(60);

/// The router.
pub struct Router {
    ranks: Vec<Rank>,
    events: Receiver<(usize, Option<Event>)>,
    sender: Sender<(usize, Option<Event>)>,
    page_bytes: u64,
    routed: Vec<Routed>,
    /// Which request has this room.
    rooms: BTreeMap<u64, usize>,
    harm: Option<Harmed>,
    /// When the harm is to be done that is prepared: to the decode rank of this request.
    harm_due: Option<(Instant, usize)>,
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
        Router {
            ranks: Vec::new(),
            events,
            sender,
            page_bytes: 0,
            routed: Vec::new(),
            rooms: BTreeMap::new(),
            harm: None,
            harm_due: None,
        }
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
        self.ranks.push(Rank::new(side, number, Box::new(output), child));
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

    /// Routes all conversations and waits for their ends, then for the ranks' accounts.
    pub fn run(
        mut self,
        conversations: &[Conversation],
        plan: &Plan,
        progress: &Progress,
    ) -> Result<Run, ExampleError> {
        let started = Instant::now();
        let turns = conversations.first().map_or(1, |first| 1 + first.follow_ups.len()) as u32;
        for number in 0..conversations.len() {
            self.next_turn(conversations, number, plan)?;
        }
        self.collect(conversations, plan, started + plan.deadline * turns + GRACE, progress)?;
        let wall = started.elapsed();
        self.finish()?;
        let Router { ranks, routed: requests, harm, page_bytes, .. } = self;
        Ok(Run { requests, ranks, harm, wall, page_bytes, lease: plan.lease })
    }

    /// Sends the next turn of a conversation, if it has one and the last one was answered.
    fn next_turn(
        &mut self,
        conversations: &[Conversation],
        number: usize,
        plan: &Plan,
    ) -> Result<(), ExampleError> {
        let conversation = &conversations[number];
        let last = self.routed.iter().rev().find(|routed| routed.conversation == number);
        let turn = last.map_or(0, |last| last.turn + 1);
        let (prompt, kept) = match last {
            None => (conversation.prompt.clone(), None),
            Some(last) => {
                let Some(follow_up) = conversation.follow_ups.get(last.turn) else { return Ok(()) };
                let answer = last.decoded.iter().flat_map(|decoded| &decoded.samples);
                let answer = answer.map(|sample| sample.token);
                let prompt = last.prompt.iter().copied().chain(answer).chain(follow_up.iter().copied());
                (prompt.collect(), last.kept().cloned())
            }
        };
        // Every prefill rank meets every decode rank, and each turn goes to another prefill rank than
        // the one before.
        let (prefill, decode) = (self.alive(Side::Prefill), self.alive(Side::Decode));
        if prefill.is_empty() || decode.is_empty() {
            return Ok(());
        }
        let keep = turn < conversation.follow_ups.len() && plan.mode != Mode::Push;
        let routed = Routed {
            conversation: number,
            turn,
            room: new_room(),
            keep_as: keep.then(new_room),
            prefill: prefill[(number + turn) % prefill.len()],
            decode: decode[number / prefill.len() % decode.len()],
            passed_on: false,
            reading: false,
            prompt,
            prefilled: None,
            decoded: None,
            orphaned: None,
        };
        let index = self.routed.len();
        self.rooms.insert(routed.room, index);
        self.routed.push(routed);
        self.send_prefill(index, kept, plan)?;
        if plan.mode == Mode::Push {
            let params = self.expect_push(index, plan)?;
            self.pass_on(index, params, plan)?;
        }
        Ok(())
    }

    fn alive(&self, side: Side) -> Vec<usize> {
        let of_side = |index: &usize| self.ranks[*index].side == side && !self.ranks[*index].is_gone();
        (0..self.ranks.len()).filter(of_side).collect()
    }

    /// The prompt, and what the last turn's decode rank keeps of it, as that rank has put it.
    fn send_prefill(&mut self, index: usize, kept: Option<Value>, plan: &Plan) -> Result<(), ExampleError> {
        let Routed { room, prefill, .. } = self.routed[index];
        let params = kept.unwrap_or_else(|| TransferParams::prefill(plan.mode.into()).to_value());
        let prompt = self.routed[index].prompt.clone();
        let deadline_ms = plan.deadline.as_millis() as u64;
        self.ranks[prefill].send(&Command::Prefill { room, prompt, deadline_ms, params })
    }

    /// Push: what a decode rank has to know of a request that is not computed yet.
    fn expect_push(&self, index: usize, plan: &Plan) -> Result<Value, ExampleError> {
        let Routed { room, prefill, .. } = self.routed[index];
        let (host, port) = plan.bootstrap.rsplit_once(':').unwrap_or((&plan.bootstrap, ""));
        let port = port.parse().unwrap_or(0);
        let engine = EngineId::new(&Side::Prefill.to_string())?;
        let mut remote = RemoteKv::new(engine, Room::Number(room), host.trim_matches(['[', ']']), port);
        remote.dp_rank = Some(self.ranks[prefill].number);
        Ok(TransferParams::decode(plan.mode.into(), remote).to_value())
    }

    /// The decode rank's half.
    fn pass_on(&mut self, index: usize, params: Value, plan: &Plan) -> Result<(), ExampleError> {
        let routed = &mut self.routed[index];
        if self.ranks[routed.decode].is_gone() {
            // Nobody is going to read it.
            let (room, prefill) = (routed.room, routed.prefill);
            return self.ranks[prefill].send(&Command::Cancel { room });
        }
        routed.passed_on = true;
        self.ranks[routed.decode].send(&Command::Decode {
            room: routed.room,
            prompt: routed.prompt.clone(),
            max_new_tokens: plan.max_new_tokens,
            deadline_ms: plan.deadline.as_millis() as u64,
            params,
            keep_as: routed.keep_as,
        })
    }

    /// Takes in events until every half has ended, its rank is gone, or its time is over.
    fn collect(
        &mut self,
        conversations: &[Conversation],
        plan: &Plan,
        end: Instant,
        progress: &Progress,
    ) -> Result<(), ExampleError> {
        while !self.routed.iter().all(|request| request.ended(&self.ranks)) {
            let until = self.harm_due.map_or(end, |(due, _)| due.min(end));
            let received = self.events.recv_timeout(until.saturating_duration_since(Instant::now()));
            if let Some((_, request)) = self.harm_due.take_if(|(due, _)| *due <= Instant::now()) {
                self.harm_waited_for(request, plan);
            }
            let (index, event) = match received {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => continue,
                Err(_) => break,
            };
            let Some(event) = event else {
                self.orphan(index, plan);
                continue;
            };
            let request = event.room().and_then(|room| self.rooms.get(&room).copied());
            let Some(request) = request else { continue };
            match event {
                Event::Answer { params, .. } => {
                    self.pass_on(request, params, plan)?;
                    self.prepare_harm(request, plan);
                }
                Event::Chunk { sent, of, .. } if plan.mode == Mode::Push && sent > 0 && sent < of => {
                    self.harm(request, Moment::Sending { sent, of }, plan);
                }
                Event::Reading { .. } if plan.mode != Mode::Push => {
                    self.routed[request].reading = true;
                    self.prepare_harm(request, plan);
                }
                Event::Prefilled(prefilled) => {
                    self.routed[request].prefilled = Some(prefilled);
                    progress.prefilled.inc(1);
                }
                Event::Decoded(decoded) => {
                    progress.decoded.inc(1);
                    self.decoded(request, decoded, conversations, plan)?;
                }
                Event::Chunk { .. } | Event::Reading { .. } | Event::Ready { .. } | Event::Finished(_) => {}
            }
        }
        Ok(())
    }

    fn decoded(
        &mut self,
        request: usize,
        decoded: Decoded,
        conversations: &[Conversation],
        plan: &Plan,
    ) -> Result<(), ExampleError> {
        let goes_on = decoded.error.is_none();
        self.routed[request].decoded = Some(decoded);
        if goes_on {
            self.next_turn(conversations, self.routed[request].conversation, plan)?;
        }
        Ok(())
    }

    /// Pull: a prefill rank is harmed while its pages are read. A decode rank is harmed while it has
    /// more requests than room, after some heartbeats; if that never happens, at the end.
    fn prepare_harm(&mut self, request: usize, plan: &Plan) {
        let Some((_, side)) = plan.harm.filter(|_| self.harm.is_none()) else { return };
        let reading = self.routed[request].reading;
        let all_answered = self.routed.iter().all(|routed| routed.passed_on);
        match side {
            Side::Prefill if reading => self.harm(request, Moment::Reading, plan),
            Side::Prefill => {}
            Side::Decode if self.waiting_with(request) >= 2 => {
                self.harm_due.get_or_insert((Instant::now() + plan.lease / 2, request));
            }
            Side::Decode if reading && all_answered => self.harm(request, Moment::Reading, plan),
            Side::Decode => {}
        }
    }

    /// How many requests wait for room on the decode rank of this one.
    fn waiting_with(&self, request: usize) -> usize {
        let decode = self.routed[request].decode;
        self.routed.iter().filter(|routed| routed.decode == decode && routed.waits()).count()
    }

    fn harm_waited_for(&mut self, request: usize, plan: &Plan) {
        let requests = self.waiting_with(request);
        if requests > 0 {
            self.harm(request, Moment::Waiting { requests }, plan);
        }
    }

    /// Harms the planned side's rank of a request that is in transfer, once.
    fn harm(&mut self, request: usize, moment: Moment, plan: &Plan) {
        let Some((harm, side)) = plan.harm.filter(|_| self.harm.is_none()) else { return };
        let victim = match side {
            Side::Prefill => self.routed[request].prefill,
            Side::Decode => self.routed[request].decode,
        };
        self.ranks[victim].harm(harm);
        self.harm = Some(Harmed { harm, rank: self.ranks[victim].name(), request, moment });
        if harm == Harm::Stop {
            // Its pipe stays open: nobody else is going to notice.
            self.orphan(victim, plan);
        }
    }

    /// A rank is gone: requests of which its half had not ended get no word from it any more.
    fn orphan(&mut self, index: usize, plan: &Plan) {
        self.ranks[index].set_gone();
        let name = self.ranks[index].name();
        let (error, what) = match self.ranks[index].harmed {
            Some(Harm::Kill) => ("RankKilled", "was killed"),
            Some(Harm::Stop) => ("RankStopped", "was stopped"),
            None => ("RankDied", "is gone"),
        };
        let mut cancelled = Vec::new();
        for request in &mut self.routed {
            let unheard = (request.prefill == index && request.prefilled.is_none())
                || (request.decode == index && request.decoded.is_none());
            if unheard {
                request.orphaned = Some(NamedError::new(error, format_args!("{name} {what}")));
            }
            // In push mode it may never have registered, so that nobody but the router can know. In
            // pull mode the lease ends by itself.
            if plan.mode == Mode::Push && request.decode == index && request.prefilled.is_none() {
                cancelled.push((request.prefill, request.room));
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
        while self.ranks.iter().any(|rank| !rank.is_gone() && rank.accounting.is_none()) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(Event::Finished(accounting)))) => {
                    self.ranks[index].accounting = Some(accounting)
                }
                Ok((index, None)) => self.ranks[index].set_gone(),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        Ok(())
    }
}
