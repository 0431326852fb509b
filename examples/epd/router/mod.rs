//! The router: sends each image to an encoder, and each prompt to the prefill and decode processes when the
//! encoders have answered. It sees no byte of an image, an embedding or KV.

mod run;

pub use run::{Killed, Member, Plan, Role, Routed, Run, Sent, Work};

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use kv_examples::control::{Command, Event, NamedError};
use kv_examples::error::ExampleError;
use kv_examples::process::{Process, listen};
use kv_examples::workload::new_room;
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::{EngineId, Room, TransferMode};
use serde_json::{Map, Value};

use crate::error::EpdError;
use crate::messages::{EncodeCommand, Encoded, EpdEvent, PrefillCommand, Said};
use crate::requests::Request;

/// How long processes may take to come up.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// How much later than its deadline the end of a request may reach the router.
const GRACE: Duration = Duration::from_secs(5);
/// How long the router waits at the end for the reports of the processes.
const FINISH_WITHIN: Duration = Duration::from_secs(60);

/// The router: its processes, and the requests that it has sent.
pub struct Router {
    members: Vec<Member>,
    events: Receiver<(usize, Option<Said>)>,
    sender: Sender<(usize, Option<Said>)>,
    routed: Vec<Routed>,
    /// The request, and the place in it, of each item that was sent to an encoder.
    items: Vec<(usize, usize)>,
    /// The encoder of each content hash, so that an image is computed once in the fleet.
    directory: BTreeMap<String, usize>,
    killed: Option<Killed>,
}

impl Router {
    /// A router without processes.
    pub fn new() -> Router {
        let (sender, events) = channel();
        let (members, routed, items) = (Vec::new(), Vec::new(), Vec::new());
        Router { members, events, sender, routed, items, directory: BTreeMap::new(), killed: None }
    }

    /// Adds a process that is reached over this pair of streams; `child` is the process, if the router has
    /// started it.
    pub fn add(
        &mut self,
        role: Role,
        input: impl Read + Send + 'static,
        output: impl Write + Send + 'static,
        child: Option<Child>,
    ) {
        let index = self.members.len();
        let number = self.of(role).count();
        let process = Process::new(output, child);
        let (pages, blocks) = (None, None);
        self.members.push(Member { role, number, killed: false, pages, blocks, ready: false, process });
        listen(index, input, self.sender.clone());
    }

    /// Sends all requests in rounds, waits for their ends, and then for the reports of the processes.
    pub fn run(mut self, work: &Work<'_>) -> Result<Run, EpdError> {
        let Work { requests, plan, .. } = *work;
        self.wait_ready()?;
        let started = Instant::now();
        for round in 0..plan.rounds {
            // Without its only prefill process, the service can answer nothing more.
            if self.of(Role::Prefill).all(|index| !self.members[index].process.serves()) {
                break;
            }
            let since = Instant::now();
            for number in 0..requests.len() {
                self.begin(round, number, since, requests)?;
            }
            self.collect(work, since + plan.deadline + GRACE)?;
        }
        let wall = started.elapsed();
        self.finish()?;
        let Router { members, routed: requests, killed, .. } = self;
        Ok(Run { requests, members, killed, wall })
    }

    fn of(&self, role: Role) -> impl Iterator<Item = usize> {
        let members = self.members.iter().enumerate();
        members.filter(move |(_, member)| member.role == role).map(|(index, _)| index)
    }

    fn wait_ready(&mut self) -> Result<(), EpdError> {
        let end = Instant::now() + READY_WITHIN;
        while let Some(missing) = self.members.iter().position(|member| !member.ready) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(Said::Rank(Event::Ready { .. }) | Said::Epd(EpdEvent::EncoderReady)))) => {
                    self.members[index].ready = true;
                }
                Ok((_, Some(_))) => {}
                Ok((index, None)) => return Err(self.lost(index, "has ended before it was ready").into()),
                Err(_) => return Err(self.lost(missing, "was not ready in time").into()),
            }
        }
        Ok(())
    }

    fn lost(&self, index: usize, how: &str) -> ExampleError {
        ExampleError::Rank { rank: self.members[index].name(), how: how.to_owned() }
    }

    /// Sends the images of a request to their encoders.
    fn begin(
        &mut self,
        round: usize,
        number: usize,
        since: Instant,
        requests: &[Request],
    ) -> Result<(), EpdError> {
        let index = self.routed.len();
        let mut items = Vec::new();
        for (place, item) in requests[number].items.iter().enumerate() {
            let encoder = self.encoder_of(&item.image.hash);
            if let Some(encoder) = encoder {
                let command = EncodeCommand::Encode {
                    item: self.items.len(),
                    index: place as u32,
                    image: item.image.clone(),
                };
                self.items.push((index, place));
                self.members[encoder].process.send(&command)?;
            }
            items.push(Sent { encoder, encoded: None, settled: encoder.is_none() });
        }
        self.routed.push(Routed {
            round,
            request: number,
            items,
            inputs: None,
            prefilled: None,
            decoded: None,
            orphaned: None,
            wall: None,
            room: new_room(),
            since,
            passed_on: false,
        });
        Ok(())
    }

    /// The encoder of an image: the one that has its embedding, or else the next in turn.
    fn encoder_of(&mut self, hash: &str) -> Option<usize> {
        let serving: Vec<usize> =
            self.of(Role::Encoder).filter(|index| self.members[*index].process.serves()).collect();
        if let Some(known) = self.directory.get(hash).filter(|index| serving.contains(index)) {
            return Some(*known);
        }
        let next = *serving.get(self.directory.len() % serving.len().max(1))?;
        self.directory.insert(hash.to_owned(), next);
        Some(next)
    }

    /// Handles events until every request has ended, or its time is over.
    fn collect(&mut self, work: &Work<'_>, end: Instant) -> Result<(), EpdError> {
        self.pass_on_settled(work)?;
        while !self.routed.iter().all(Routed::ended) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(said))) => self.hear(index, said, work)?,
                Ok((index, None)) => self.gone(index),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
            self.pass_on_settled(work)?;
            for routed in self.routed.iter_mut().filter(|routed| routed.wall.is_none() && routed.ended()) {
                routed.wall = Some(routed.since.elapsed());
                work.progress.decoded.inc(1);
            }
        }
        Ok(())
    }

    fn hear(&mut self, index: usize, said: Said, work: &Work<'_>) -> Result<(), EpdError> {
        let Work { plan, progress, .. } = *work;
        match said {
            Said::Epd(EpdEvent::Encoded(encoded)) => {
                progress.encoded.inc(1);
                self.settle(encoded.item, Some(encoded));
            }
            Said::Epd(EpdEvent::NotEncoded { item, .. }) => self.settle(item, None),
            Said::Epd(EpdEvent::Inputs { room, items }) => {
                progress.arrived.inc(items.len() as u64);
                if let Some(request) = self.routed.iter().position(|routed| routed.room == room) {
                    self.routed[request].inputs = Some(items);
                    self.decode(request, work)?;
                }
            }
            Said::Rank(Event::Chunk { room, sent, of }) if plan.kill == Some(Role::Prefill) && sent < of => {
                let request = self.routed.iter().position(|routed| routed.room == room);
                let moment =
                    format!("when {sent} of {of} pages of request {} had been sent", request.unwrap_or(0));
                self.kill(index, moment);
            }
            Said::Rank(Event::Prefilled(half)) => {
                if let Some(routed) = self.routed.iter_mut().find(|routed| routed.room == half.room) {
                    routed.prefilled = Some(half);
                }
            }
            Said::Rank(Event::Decoded(half)) => {
                if let Some(routed) = self.routed.iter_mut().find(|routed| routed.room == half.room) {
                    routed.decoded = Some(half);
                }
            }
            Said::Rank(Event::Finished(pages)) => self.members[index].pages = Some(pages),
            Said::Epd(EpdEvent::Closed(blocks)) => self.members[index].blocks = Some(blocks),
            Said::Rank(_) | Said::Epd(EpdEvent::EncoderReady) => {}
        }
        Ok(())
    }

    /// Notes the answer of an encoder.
    fn settle(&mut self, item: usize, encoded: Option<Encoded>) {
        let Some(&(request, place)) = self.items.get(item) else { return };
        if let Some(sent) = self.routed.get_mut(request).and_then(|routed| routed.items.get_mut(place)) {
            (sent.encoded, sent.settled) = (encoded, true);
        }
    }

    /// Sends the prefill process the requests whose encoders have all answered.
    fn pass_on_settled(&mut self, work: &Work<'_>) -> Result<(), EpdError> {
        let Some(prefill) = self.of(Role::Prefill).next() else { return Ok(()) };
        for index in 0..self.routed.len() {
            let routed = &mut self.routed[index];
            if routed.passed_on || routed.ended() || !routed.items.iter().all(|sent| sent.settled) {
                continue;
            }
            routed.passed_on = true;
            let encoded = routed.items.iter().filter_map(|sent| sent.encoded.as_ref());
            let params = encoded.filter_map(|encoded| encoded.ec_transfer_params.as_object().cloned());
            let request = &work.requests[routed.request];
            let command = PrefillCommand::Prefill {
                room: routed.room,
                prompt: request.prompt.clone(),
                items: request.items.clone(),
                ec_transfer_params: Value::Object(params.flatten().collect::<Map<String, Value>>()),
                deadline_ms: work.plan.deadline.as_millis() as u64,
                params: TransferParams::prefill(TransferMode::Push).to_value(),
            };
            self.members[prefill].process.send(&command)?;
            if work.plan.kill == Some(Role::Encoder) {
                self.kill_encoder_of(index);
            }
        }
        Ok(())
    }

    /// Kills an encoder from which the prefill process has just been told to fetch an image of this request,
    /// and which has yet to answer for other images: once the prefill process has fetched from the encoder
    /// before, or else when the encoder has answered for half of its images.
    fn kill_encoder_of(&mut self, request: usize) {
        let sent_to = |encoder: usize| {
            let items = self.routed.iter().flat_map(|routed| &routed.items);
            items.filter(move |sent| sent.encoder == Some(encoder))
        };
        let has_met = |encoder: usize| {
            let arrived = self.routed.iter().filter(|routed| routed.inputs.is_some());
            arrived.flat_map(|routed| &routed.items).any(|sent| sent.encoder == Some(encoder))
        };
        let victim = |sent: &Sent| {
            let encoder = sent.encoder.filter(|_| sent.encoded.is_some())?;
            let open = sent_to(encoder).filter(|sent| !sent.settled).count();
            let half = open * 2 <= sent_to(encoder).count();
            (open > 0 && (half || has_met(encoder))).then_some((encoder, open))
        };
        let victim = self.routed[request].items.iter().find_map(victim);
        if let Some((encoder, open)) = victim {
            let moment = format!(
                "when request {request} had been told to fetch from it, and {open} images waited for it"
            );
            self.kill(encoder, moment);
        }
    }

    /// Sends a request to the decode process, as the prefill process is about to compute it.
    fn decode(&mut self, request: usize, work: &Work<'_>) -> Result<(), EpdError> {
        let Some(decode) = self.of(Role::Decode).next() else { return Ok(()) };
        let routed = &self.routed[request];
        let (host, port) = work.plan.bootstrap.rsplit_once(':').unwrap_or((&work.plan.bootstrap, ""));
        let port = port.parse().unwrap_or(0);
        let engine = EngineId::new("prefill").map_err(ExampleError::Id)?;
        let remote = RemoteKv::new(engine, Room::Number(routed.room), host, port);
        let command = Command::Decode {
            room: routed.room,
            prompt: work.requests[routed.request].prompt.clone(),
            max_new_tokens: work.plan.max_new_tokens,
            deadline_ms: work.plan.deadline.as_millis() as u64,
            params: TransferParams::decode(TransferMode::Push, remote).to_value(),
            keep_as: None,
        };
        Ok(self.members[decode].process.send(&command)?)
    }

    /// Kills a process, once in a run.
    fn kill(&mut self, index: usize, moment: String) {
        if self.killed.is_none() {
            let member = &mut self.members[index];
            member.process.kill();
            member.killed = true;
            self.killed = Some(Killed { process: member.name(), moment });
        }
    }

    /// Notes that a process is gone. Requests whose encoder is gone go on without its answers; a prefill or
    /// decode process takes its requests with it.
    fn gone(&mut self, index: usize) {
        let member = &mut self.members[index];
        member.process.set_silent(true);
        let (role, name, killed) = (member.role, member.name(), member.killed);
        if role == Role::Encoder {
            let items = self.routed.iter_mut().flat_map(|routed| &mut routed.items);
            items.filter(|sent| sent.encoder == Some(index)).for_each(|sent| sent.settled = true);
            return;
        }
        let (error, how) = if killed { ("RankKilled", "was killed") } else { ("RankDied", "is gone") };
        for routed in self.routed.iter_mut().filter(|routed| !routed.ended()) {
            routed.orphaned = Some(NamedError::new(error, format_args!("{name} {how}")));
        }
    }

    /// Ends the processes, and collects their reports.
    fn finish(&mut self) -> Result<(), EpdError> {
        for member in &mut self.members {
            match member.role {
                Role::Encoder => member.process.send(&EncodeCommand::Finish)?,
                Role::Prefill => member.process.send(&PrefillCommand::Finish)?,
                Role::Decode => member.process.send(&Command::Finish)?,
            }
        }
        let end = Instant::now() + FINISH_WITHIN;
        while self.members.iter().any(|member| !member.process.is_silent() && !member.closed()) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((index, Some(Said::Rank(Event::Finished(pages))))) => {
                    self.members[index].pages = Some(pages)
                }
                Ok((index, Some(Said::Epd(EpdEvent::Closed(blocks))))) => {
                    self.members[index].blocks = Some(blocks);
                }
                Ok((index, None)) => self.members[index].process.set_silent(true),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        Ok(())
    }
}
