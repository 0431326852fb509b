//! The router: sends each request to a prefill rank and a decode rank, and collects the results.
//!
//! The router never sees a byte of KV. For a hand-over it needs only what is in [`Command`]: a room number, which
//! both sides get, and `kv_transfer_params`.
//!
//! * Push: the router sends the request to both sides at once, and itself writes the parameters that tell the
//!   decode side where the KV comes from.
//! * Pull: the router sends the request to the prefill side first. The answer has the parameters for the decode
//!   side, and the router passes them on unchanged. The decode side's parameters for the next turn are passed on
//!   in the same way.
//!
//! A request whose rank has died or whose transfer has failed is sent again, in a new room and to ranks that serve.
//! Its prompt is then computed once more.

mod harm;
mod rank;
mod rolling;
mod run;

pub use rank::{Harm, Rank, Side};
pub use rolling::Respawn;
pub use run::{Harmed, Moment, Plan, PlannedHarm, Purpose, Routed, Run};

use harm::Due;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::Range;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::{EngineId, Room};
use serde_json::Value;

use super::cli::Mode;
use super::control::{Command, Decoded, Event, Reach};
use super::error::ExampleError;
use super::process::{self, Process};
use super::progress::Progress;
use super::workload::{Chat, new_room};

/// How long ranks may take to come up: a checkpoint is read from disk.
const READY_WITHIN: Duration = Duration::from_secs(300);
/// How late the end of a session may reach the router; ranks keep the deadlines themselves.
const GRACE: Duration = Duration::from_secs(5);
/// How much longer the router waits for ranks at the end than the ranks wait for their pages.
const FINISH_GRACE: Duration = Duration::from_secs(15);
/// Time for the transfer of a request that is routed again, or is to show that survivors serve: they may
/// have more to do than before.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often one turn is sent, at most.
const ATTEMPTS: usize = 3;

/// The router: its ranks, and the requests that it has sent.
pub struct Router {
    ranks: Vec<Rank>,
    events: Receiver<(usize, Option<Event>)>,
    sender: Sender<(usize, Option<Event>)>,
    page_bytes: u64,
    routed: Vec<Routed>,
    /// The number of the request in each room.
    rooms: BTreeMap<u64, usize>,
    harm: Option<Harmed>,
    /// What the workers have recorded, as JSON.
    records: Vec<String>,
    rolling: Option<rolling::Rolling>,
    /// What the router has planned, and for when.
    due: Vec<(Instant, Due)>,
}

/// A turn that is to be routed.
struct Turn {
    chat: usize,
    turn: usize,
    prompt: Vec<u32>,
    keep_as: Option<u64>,
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
            records: Vec::new(),
            rolling: None,
            due: Vec::new(),
        }
    }

    /// Adds a rank that is reached over this pair; `child` is its process, if the router has started it.
    pub fn add(
        &mut self,
        side: Side,
        input: impl Read + Send + 'static,
        output: impl Write + Send + 'static,
        child: Option<Child>,
    ) {
        let index = self.ranks.len();
        let number = self.ranks.iter().filter(|rank| rank.side == side).count() as u32;
        self.ranks.push(Rank::new(side, number, Process::new(output, child)));
        process::listen(index, input, self.sender.clone());
    }

    /// Waits until all ranks are up.
    pub fn wait_ready(&mut self) -> Result<(), ExampleError> {
        let end = Instant::now() + READY_WITHIN;
        let mut waiting: Vec<bool> = self.ranks.iter().map(|_| true).collect();
        while let Some(missing) = waiting.iter().position(|waiting| *waiting) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(Event::Ready { page_bytes, reach, .. }))) => {
                    self.page_bytes = page_bytes;
                    self.ranks[index].reach = reach;
                    waiting[index] = false;
                }
                Ok((_, Some(_))) => {}
                Ok((index, None)) => return Err(self.lost(index, "has ended before it was ready")),
                Err(_) => return Err(self.lost(missing, "was not ready in time")),
            }
        }
        Ok(())
    }

    fn lost(&self, index: usize, how: &str) -> ExampleError {
        let rank = self.ranks.get(index).map(Rank::name).unwrap_or_default();
        ExampleError::Rank { rank, how: how.to_owned() }
    }

    /// Routes all chats and waits for their ends, then for the ranks' accounts.
    pub fn run(mut self, chats: &[Chat], plan: &Plan, progress: &Progress) -> Result<Run, ExampleError> {
        let started = Instant::now();
        let turns = chats.first().map_or(1, |first| 1 + first.follow_ups.len()) as u32;
        self.begin(chats, plan)?;
        let mut end = started + plan.deadline * turns + GRACE;
        if let Some(harm) = plan.harm {
            end += PATIENCE * ATTEMPTS as u32 + harm.at.unwrap_or_default() + harm.resume.unwrap_or_default();
        }
        self.due.extend(plan.harm.and_then(|harm| harm.at).map(|at| (started + at, Due::Harm)));
        self.collect(chats, plan, end, progress)?;
        if self.harm.is_some() {
            self.try_survivors(chats, plan)?;
            self.collect(chats, plan, Instant::now() + PATIENCE + GRACE, progress)?;
        }
        let wall = started.elapsed();
        self.finish(plan)?;
        let Router { ranks, routed: requests, harm, records, page_bytes, .. } = self;
        Ok(Run { requests, ranks, harm, records, wall, page_bytes, lease: plan.lease })
    }

    /// Sends the next turn of a chat, if it has one and the last turn was answered.
    fn next_turn(&mut self, chats: &[Chat], number: usize, plan: &Plan) -> Result<(), ExampleError> {
        let chat = &chats[number];
        let last = self.routed.iter().rev().find(|routed| routed.chat == number);
        let turn = last.map_or(0, |last| last.turn + 1);
        let (prompt, kept) = match last {
            None => (chat.prompt.clone(), None),
            Some(last) => {
                let Some(follow_up) = chat.follow_ups.get(last.turn) else { return Ok(()) };
                let answer = last.decoded.iter().flat_map(|decoded| &decoded.samples);
                let answer = answer.map(|sample| sample.token);
                let prompt = last.prompt.iter().copied().chain(answer).chain(follow_up.iter().copied());
                (prompt.collect(), last.kept().cloned())
            }
        };
        let keep = turn < chat.follow_ups.len() && plan.mode != Mode::Push;
        // Every prefill rank meets every decode rank, and each turn goes to another prefill rank than
        // the one before.
        let turn = Turn { chat: number, turn, prompt, keep_as: keep.then(new_room) };
        self.route(turn, kept, Purpose::Answer, plan).map(drop)
    }

    /// Sends one turn to a prefill rank and a decode rank, if there are any. Returns its number in
    /// [`Run::requests`].
    fn route(
        &mut self,
        turn: Turn,
        kept: Option<Value>,
        purpose: Purpose,
        plan: &Plan,
    ) -> Result<Option<usize>, ExampleError> {
        let Turn { chat, turn, prompt, keep_as } = turn;
        let (prefill, decode) = (self.serving(Side::Prefill), self.serving(Side::Decode));
        if prefill.is_empty() || decode.is_empty() {
            return Ok(None);
        }
        let routed = Routed {
            chat,
            turn,
            purpose,
            again: None,
            room: new_room(),
            keep_as,
            prefill: prefill[(chat + turn) % prefill.len()],
            decode: decode[chat / prefill.len() % decode.len()],
            passed_on: false,
            reading: false,
            prompt,
            prefilled: None,
            decoded: None,
            orphaned: None,
        };
        self.start(routed, kept, plan).map(Some)
    }

    fn start(&mut self, routed: Routed, kept: Option<Value>, plan: &Plan) -> Result<usize, ExampleError> {
        let index = self.routed.len();
        self.rooms.insert(routed.room, index);
        self.routed.push(routed);
        self.send_prefill(index, kept, plan)?;
        if plan.mode == Mode::Push {
            let params = self.expect_push(index, plan)?;
            self.pass_on(index, params, plan)?;
        }
        Ok(index)
    }

    /// Sends again the requests from `first` on that can no longer be answered. Without a planned kill or
    /// stop nothing is sent again, because each failure is then a problem.
    fn route_again(&mut self, requests: Range<usize>, plan: &Plan) -> Result<(), ExampleError> {
        for index in requests.filter(|_| plan.harm.is_some()) {
            let lost = &self.routed[index];
            let attempt = match lost.purpose {
                Purpose::Answer => 1,
                Purpose::AnswerAgain { attempt } => attempt,
                Purpose::Proof => ATTEMPTS,
            };
            if attempt >= ATTEMPTS || lost.again.is_some() || !lost.is_lost(&self.ranks) {
                continue;
            }
            let Routed { chat, turn, keep_as, .. } = *lost;
            let (prompt, keep_as) = (lost.prompt.clone(), keep_as.map(|_| new_room()));
            let turn = Turn { chat, turn, prompt, keep_as };
            let again = self.route(turn, None, Purpose::AnswerAgain { attempt: attempt + 1 }, plan)?;
            self.routed[index].again = again;
        }
        Ok(())
    }

    /// After a kill or stop, sends one more request to each pair of ranks that serve.
    fn try_survivors(&mut self, chats: &[Chat], plan: &Plan) -> Result<(), ExampleError> {
        let (prefill, decode) = (self.serving(Side::Prefill), self.serving(Side::Decode));
        let pairs = prefill.iter().flat_map(|prefill| decode.iter().map(move |decode| (*prefill, *decode)));
        for ((prefill, decode), (chat, said)) in pairs.zip(chats.iter().enumerate().cycle()) {
            let routed = Routed {
                chat,
                turn: 0,
                purpose: Purpose::Proof,
                again: None,
                room: new_room(),
                keep_as: None,
                prefill,
                decode,
                passed_on: false,
                reading: false,
                prompt: said.prompt.clone(),
                prefilled: None,
                decoded: None,
                orphaned: None,
            };
            self.start(routed, None, plan)?;
        }
        Ok(())
    }

    fn serving(&self, side: Side) -> Vec<usize> {
        let of_side = |index: &usize| self.ranks[*index].side == side && self.ranks[*index].serves();
        (0..self.ranks.len()).filter(of_side).collect()
    }

    /// How long the transfer of a request may take.
    fn deadline_ms(&self, index: usize, plan: &Plan) -> u64 {
        let first = self.routed[index].purpose == Purpose::Answer;
        let deadline = if first { plan.deadline } else { plan.deadline.max(PATIENCE) };
        deadline.as_millis() as u64
    }

    /// Sends a prompt to its prefill rank, with what the decode rank of the last turn has kept.
    fn send_prefill(&mut self, index: usize, kept: Option<Value>, plan: &Plan) -> Result<(), ExampleError> {
        let Routed { room, prefill, .. } = self.routed[index];
        let params = kept.unwrap_or_else(|| TransferParams::prefill(plan.mode.into()).to_value());
        let prompt = self.routed[index].prompt.clone();
        let deadline_ms = self.deadline_ms(index, plan);
        self.ranks[prefill].send(&Command::Prefill { room, prompt, deadline_ms, params })
    }

    /// In push mode: the parameters of the decode side for a request that is not computed yet.
    fn expect_push(&self, index: usize, plan: &Plan) -> Result<Value, ExampleError> {
        let Routed { room, prefill, .. } = self.routed[index];
        let registered = Reach { engine: Side::Prefill.to_string(), addr: plan.bootstrap.clone() };
        let Reach { engine, addr } = self.ranks[prefill].reach.as_ref().unwrap_or(&registered);
        let (host, port) = addr.rsplit_once(':').unwrap_or((addr, ""));
        let port = port.parse().unwrap_or(0);
        let engine = EngineId::new(engine)?;
        let mut remote = RemoteKv::new(engine, Room::Number(room), host.trim_matches(['[', ']']), port);
        remote.dp_rank = Some(self.ranks[prefill].number);
        Ok(TransferParams::decode(plan.mode.into(), remote).to_value())
    }

    /// Sends a request to its decode rank.
    fn pass_on(&mut self, index: usize, params: Value, plan: &Plan) -> Result<(), ExampleError> {
        let deadline_ms = self.deadline_ms(index, plan);
        let others = self.serving(Side::Decode);
        let routed = &mut self.routed[index];
        if self.ranks[routed.decode].drained
            && let Some(&other) = others.get(routed.chat % others.len().max(1))
        {
            // It would refuse the request, and any other rank can read the pages.
            routed.decode = other;
        }
        if !self.ranks[routed.decode].serves() || routed.again.is_some() {
            // Nobody is going to read it.
            let (room, prefill) = (routed.room, routed.prefill);
            return self.ranks[prefill].send(&Command::Cancel { room });
        }
        routed.passed_on = true;
        self.ranks[routed.decode].send(&Command::Decode {
            room: routed.room,
            prompt: routed.prompt.clone(),
            max_new_tokens: plan.max_new_tokens,
            deadline_ms,
            params,
            keep_as: routed.keep_as,
        })
    }

    /// Handles events until every half of every request has ended, its rank is gone, or its time is over.
    fn collect(
        &mut self,
        chats: &[Chat],
        plan: &Plan,
        end: Instant,
        progress: &Progress,
    ) -> Result<(), ExampleError> {
        while self.waits_for_moment()
            || self.rolls()
            || !self.routed.iter().all(|request| request.ended(&self.ranks))
        {
            let until = self.due_before(end);
            let received = self.events.recv_timeout(until.saturating_duration_since(Instant::now()));
            let harmed = self.harm.is_some();
            self.do_what_is_due(plan);
            if self.harm.is_some() && !harmed {
                self.route_again(0..self.routed.len(), plan)?;
            }
            let (index, event) = match received {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => continue,
                Err(_) => break,
            };
            let Some(event) = event else {
                self.orphan(index, plan);
                self.route_again(0..self.routed.len(), plan)?;
                continue;
            };
            match event {
                Event::Finished(pages) => {
                    self.has_drained(index, pages)?;
                    continue;
                }
                Event::Ready { .. } => {
                    self.is_ready(index, chats, plan)?;
                    continue;
                }
                _ => {}
            }
            let request = event.room().and_then(|room| self.rooms.get(&room).copied());
            let Some(request) = request else { continue };
            match event {
                Event::Answer { params, .. } => {
                    self.pass_on(request, params, plan)?;
                    self.prepare_harm(request, plan);
                }
                Event::Chunk { sent, of, .. }
                    if plan.mode == Mode::Push
                        && (1..of).contains(&sent)
                        && plan.harm.is_some_and(|harm| harm.at.is_none()) =>
                {
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
                    self.decoded(request, decoded, chats, plan)?;
                }
                // The others come at other times, or need nothing done.
                _ => {}
            }
            match self.harm.is_some() && !harmed {
                true => self.route_again(0..self.routed.len(), plan)?,
                false => self.route_again(request..request + 1, plan)?,
            }
        }
        Ok(())
    }

    fn decoded(
        &mut self,
        request: usize,
        decoded: Decoded,
        chats: &[Chat],
        plan: &Plan,
    ) -> Result<(), ExampleError> {
        let Routed { purpose, again, .. } = self.routed[request];
        // A rank that was stopped may answer when somebody else has done so.
        let goes_on = decoded.error.is_none() && purpose != Purpose::Proof && again.is_none();
        let failed = decoded.error.is_some();
        self.routed[request].decoded = Some(decoded);
        if failed && plan.harm.is_none() && self.routed[request].prefilled.is_none() {
            // The prefill rank may wait for a receiver that will not come.
            let Routed { room, prefill, .. } = self.routed[request];
            self.ranks[prefill].send(&Command::Cancel { room })?;
        }
        if goes_on {
            self.next_turn(chats, self.routed[request].chat, plan)?;
        }
        Ok(())
    }

    fn finish(&mut self, plan: &Plan) -> Result<(), ExampleError> {
        for rank in self.ranks.iter_mut().filter(|rank| rank.harmed == Some(Harm::Stop) && rank.is_silent()) {
            // What its peers keep because it may still write into it, only its death sets free.
            rank.kill();
        }
        for rank in &mut self.ranks {
            rank.send(&Command::Finish)?;
        }
        let end = Instant::now() + plan.finish_within + FINISH_GRACE;
        while self.ranks.iter().any(|rank| !rank.is_silent() && rank.accounting.is_none()) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(Event::Finished(accounting)))) => {
                    self.ranks[index].accounting = Some(accounting)
                }
                Ok((_, Some(Event::Recorded { record }))) => self.records.push(record),
                Ok((index, None)) => self.ranks[index].set_silent(),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
