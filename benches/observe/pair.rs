//! A prefill machine and a decode machine that serve requests of each other, driven by the caller's thread: no
//! transport, no threads, no clock. What a listener costs is not drowned by wake-ups.

use std::collections::VecDeque;
use std::time::Duration;

use kv_transfer::prelude::*;
use kv_transfer::trace::KvWhat;
use kv_transfer::unstable::proto::{Command, Input, Node, NodeConfig, Output, Resource};
use kv_transfer::unstable::worker::Listener;
use kv_transfer::unstable::{Directions, Origin, RankRecord, ServiceOffer, TransportOffer, WriteFence};
use kv_transfer::{Incarnation, Parallel, SessionId, Time, WorkerId};

use crate::Error;

/// Pages of a request.
pub(crate) const PAGES: u32 = 8;
const ADDR: &str = "127.0.0.1:1";

/// A machine, and what a worker would have beside it.
struct Side {
    node: Node,
    worker: WorkerId,
    pool: PagePool,
    listener: Option<Listener<KvWhat>>,
    inbox: VecDeque<Input>,
    events: u64,
    succeeded: u64,
}

impl Side {
    fn new(engine: &str, incarnation: Incarnation) -> Result<(Side, RankRecord), Error> {
        let region = Region::dram(RegionRole::Kv, 0x1000, u64::from(PAGES) * 4096, 4096);
        let args = KvArgs::builder(engine, 0).pages(PAGES, 16).region(region).build()?;
        let worker = args.worker().clone();
        let transports = vec![TransportOffer::new("bench", Default::default())];
        let offers = vec![ServiceOffer::kv(args.geometry())?];
        let who = (worker.clone(), incarnation);
        let record = RankRecord::new(who, WorkerRole::Prefill, Parallel::default(), transports, offers)?;
        let node = Node::new(NodeConfig::new(args, incarnation, "bench", Default::default()));
        let pool = PagePool::new(PAGES);
        let side =
            Side { node, worker, pool, listener: None, inbox: VecDeque::new(), events: 0, succeeded: 0 };
        Ok((side, record))
    }

    fn command(&mut self, command: Command) {
        self.inbox.push_back(Input::Command(command));
    }

    /// Handles one input, tells the listener, and carries out what follows.
    fn handle(&mut self, now: Time, input: Input, record: &RankRecord, peer: &mut Side) -> Result<(), Error> {
        self.node.handle(now, input);
        if let Some(listener) = &self.listener {
            while let Some(event) = self.node.poll_trace() {
                self.events += 1;
                listener.tell(&self.worker, &event);
            }
        }
        while let Some(output) = self.node.poll_output() {
            match output {
                Output::Connect { peer, .. } => {
                    let (directions, fence) = (Directions::BOTH, WriteFence::Revocable);
                    self.inbox.push_back(Input::Connected { peer, directions, fence });
                }
                Output::Send { frame, .. } => peer.inbox.push_back(Input::Frame { from: Origin(1), frame }),
                Output::Post { post, .. } => {
                    if let Some(frame) = post.notify {
                        peer.inbox.push_back(Input::Frame { from: Origin(1), frame });
                    }
                    self.inbox.push_back(Input::Posted { post: post.id, result: Ok(()) });
                }
                Output::Lookup { lookup, .. } => {
                    self.inbox.push_back(Input::Found { lookup, ranks: vec![record.clone()] });
                }
                Output::Status { poll: KvPoll::Success, .. } => self.succeeded += 1,
                Output::Status { poll: KvPoll::Failed, failure, .. } => {
                    return Err(format!("a request has failed: {failure:?}").into());
                }
                Output::Release { resource: Resource::Pages(pages), .. } => {
                    self.pool.release(pages).map_err(|_| "pages of another pool came back")?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Two machines that have met.
pub(crate) struct Pair {
    prefill: Side,
    decode: Side,
    record: RankRecord,
    now: Time,
    requests: u64,
}

impl Pair {
    /// Two machines to which nobody listens, which have served a request.
    pub(crate) fn new() -> Result<Pair, Error> {
        let (prefill, record) = Side::new("prefill", Incarnation::from_random(1))?;
        let (decode, _) = Side::new("decode", Incarnation::from_random(2))?;
        let mut pair = Pair { prefill, decode, record, now: Time::from_nanos(1_000_000_000), requests: 0 };
        pair.request()?;
        Ok(pair)
    }

    /// Lets each machine tell its events to a listener of its own; to nobody with `None`.
    pub(crate) fn listen(&mut self, listeners: Option<[Listener<KvWhat>; 2]>) {
        let (prefill, decode) = listeners.map_or((None, None), |[one, other]| (Some(one), Some(other)));
        for (side, listener) in [(&mut self.prefill, prefill), (&mut self.decode, decode)] {
            side.node.listen(listener.is_some());
            side.listener = listener;
        }
    }

    /// Events of both sides so far.
    pub(crate) fn events(&self) -> u64 {
        self.prefill.events + self.decode.events
    }

    /// Serves a request by push: both halves are opened, eight pages are written, and all pages come back.
    pub(crate) fn request(&mut self) -> Result<(), Error> {
        self.requests += 1;
        let (session, room) = (SessionId(self.requests), Room::Number(self.requests));
        let options = || Box::new(SessionOptions::default());
        let Pair { prefill, decode, .. } = self;
        prefill.command(Command::OpenSender {
            session,
            room: room.clone(),
            receivers: 1,
            options: options(),
        });
        prefill.command(Command::InitSender { session, num_pages: PAGES as usize, aux: None });
        let all = || PageList::from_pages(0..PAGES);
        let chunk = prefill.pool.adopt(all()?)?;
        prefill.command(Command::Send { session, chunk });
        decode.command(Command::OpenReceiver {
            session,
            room,
            bootstrap_addr: ADDR.to_owned(),
            options: options(),
        });
        let pages = decode.pool.adopt(all()?)?;
        decode.command(Command::InitReceiver { session, pages, aux: None });
        self.run()?;
        let done = [&self.prefill, &self.decode]
            .iter()
            .all(|side| side.succeeded == self.requests && side.pool.num_out() == 0);
        if done { Ok(()) } else { Err("a request has not ended".into()) }
    }

    /// Hands all inputs over until there are none.
    fn run(&mut self) -> Result<(), Error> {
        let Pair { prefill, decode, record, now, .. } = self;
        loop {
            *now = *now + Duration::from_micros(1);
            let prefill_input = prefill.inbox.pop_front();
            let decode_input = decode.inbox.pop_front();
            if prefill_input.is_none() && decode_input.is_none() {
                return Ok(());
            }
            if let Some(input) = prefill_input {
                prefill.handle(*now, input, record, decode)?;
            }
            if let Some(input) = decode_input {
                decode.handle(*now, input, record, prefill)?;
            }
            for side in [&mut *prefill, &mut *decode] {
                if side.node.next_timeout().is_some_and(|at| at <= *now) {
                    side.inbox.push_back(Input::Timeout);
                }
            }
        }
    }
}
