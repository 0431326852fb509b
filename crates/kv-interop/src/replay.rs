//! Recorded exchanges of real engines, and a machine of ours in the place of one of them.
//!
//! `scripts/record.sh` writes the recordings. A line is what one side has said to the other, in the order of
//! time, with addresses, ports, names and NIXL's metadata replaced by fixed values. The machine under test is
//! given the same addresses and names, so that its words can be compared with those of the engine that it
//! replaces.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::{Command, Resource};
use kv_core::{
    Directions, KvArgs, KvPoll, LookupId, Origin, PageList, PagePool, Pages, PeerId, Post, Time,
    TransferError, WriteFence,
};
use serde::Deserialize;
use serde_json::Value;

use crate::effects::Out;
use crate::message::{Incoming, Message, Way};

/// Where the recordings put the first region, and how far the next one is.
pub(crate) const BASE: u64 = 1 << 40;
pub(crate) const APART: u64 = 1 << 32;

/// One thing that a side has said.
#[derive(Debug, Clone, Deserialize)]
struct Line {
    by: String,
    via: String,
    #[serde(default)]
    parts: Vec<String>,
    #[serde(default)]
    json: Value,
}

/// What both sides of a pair have said.
pub(crate) struct Recording(Vec<Line>);

impl Recording {
    pub(crate) fn new(text: &str) -> Recording {
        let lines = text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap());
        Recording(lines.collect())
    }

    /// The messages or notifications of a side, in order.
    pub(crate) fn said(&self, by: &str, via: &str) -> Vec<Vec<Bytes>> {
        let lines = self.0.iter().filter(|line| line.by == by && line.via == via);
        lines.map(|line| line.parts.iter().map(|part| bytes(part)).collect()).collect()
    }

    /// The notifications of a side.
    pub(crate) fn notified(&self, by: &str) -> Vec<Bytes> {
        self.said(by, "notification").into_iter().flatten().collect()
    }

    /// The transfer parameters that the router has carried.
    pub(crate) fn params(&self) -> Vec<Value> {
        self.0.iter().filter(|line| line.via == "params").map(|line| line.json.clone()).collect()
    }
}

fn bytes(hex: &str) -> Bytes {
    let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digits).collect()
}

/// A machine of ours in the place of an engine.
pub(crate) struct Stage<M> {
    machine: M,
    pool: PagePool,
    /// What the machine wants of its transport, and was not looked at yet.
    out: VecDeque<Out>,
    states: Vec<KvPoll>,
    failures: Vec<String>,
}

impl<M> Stage<M>
where
    M: Machine<Command = Command, Status = KvPoll, Resource = Resource, Failure = TransferError>,
{
    pub(crate) fn new(machine: M, args: &KvArgs) -> Stage<M> {
        let pool = PagePool::new(args.geometry().num_pages);
        Stage { machine, pool, out: VecDeque::new(), states: Vec::new(), failures: Vec::new() }
    }

    pub(crate) fn input(&mut self, input: Input<Command>) {
        self.machine.handle(Time::ZERO + Duration::from_secs(1), input);
        while let Some(out) = self.machine.poll_output() {
            match out {
                Output::Status { poll, failure, .. } => {
                    self.states.push(poll);
                    self.failures.extend(failure.map(|failure| failure.to_string()));
                }
                Output::Release { resource: Resource::Pages(pages), .. } => {
                    self.pool.release(pages).unwrap();
                }
                Output::Release { .. } | Output::Permit { .. } | Output::Disconnect { .. } => {}
                other => self.out.push_back(other),
            }
        }
    }

    pub(crate) fn command(&mut self, command: Command) {
        self.input(Input::Command(command));
    }

    pub(crate) fn pages(&self, pages: &[u32]) -> Pages {
        self.pool.adopt(PageList::from_pages(pages.iter().copied()).unwrap()).unwrap()
    }

    /// A message of the other side: an answer of a peer, or one for the listening socket.
    pub(crate) fn hear(&mut self, peer: Option<PeerId>, parts: &[Bytes]) {
        let (peer, message) = (peer.map(|peer| peer.0), Message(parts.to_vec()));
        let frame = Incoming::Message { peer, message }.encode();
        self.input(Input::Frame { from: Origin(1), frame });
    }

    /// A notification of the other side's agent.
    pub(crate) fn notified(&mut self, agent: &str, bytes: &Bytes) {
        let frame = Incoming::Notification { agent: agent.to_owned(), bytes: bytes.clone() }.encode();
        self.input(Input::Frame { from: Origin(2), frame });
    }

    /// The way that the machine opens next, if there is any. The way is open when this returns.
    pub(crate) fn way(&mut self) -> Option<(PeerId, Way)> {
        let at = self.out.iter().position(|out| matches!(out, Output::Connect { .. }))?;
        let Some(Output::Connect { peer, transport }) = self.out.remove(at) else { return None };
        let (directions, fence) = (Directions::BOTH, WriteFence::AtDeath);
        self.input(Input::Connected { peer, directions, fence });
        Some((peer, Way::of(&transport)?))
    }

    /// The question that the machine asks a bootstrap server next.
    pub(crate) fn lookup(&mut self) -> LookupId {
        let at = self.out.iter().position(|out| matches!(out, Output::Lookup { .. })).expect("a lookup");
        let Some(Output::Lookup { lookup, .. }) = self.out.remove(at) else { unreachable!() };
        lookup
    }

    /// All that the machine has sent, as messages to a side channel.
    pub(crate) fn said(&mut self) -> Vec<Vec<Bytes>> {
        self.sent().iter().map(|frame| Message::decode(frame).unwrap().0).collect()
    }

    /// All that the machine has sent, as it is.
    pub(crate) fn sent(&mut self) -> Vec<Bytes> {
        let (sent, out) =
            self.out.drain(..).partition::<Vec<Out>, _>(|out| matches!(out, Output::Send { .. }));
        self.out = out.into();
        let frame = |out| match out {
            Output::Send { frame, .. } => frame,
            _ => unreachable!(),
        };
        sent.into_iter().map(frame).collect()
    }

    /// The posts that the machine has begun. They have ended when this returns.
    pub(crate) fn posts(&mut self) -> Vec<Post> {
        let (posts, out) =
            self.out.drain(..).partition::<Vec<Out>, _>(|out| matches!(out, Output::Post { .. }));
        self.out = out.into();
        let post = |out| match out {
            Output::Post { post, .. } => post,
            _ => unreachable!(),
        };
        let posts: Vec<Post> = posts.into_iter().map(post).collect();
        for post in &posts {
            self.input(Input::Posted { post: post.id, result: Ok(()) });
        }
        posts
    }

    /// Why sessions have failed so far.
    pub(crate) fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Checks that so many sessions have ended in success, no other in failure, and that all pages are back.
    pub(crate) fn succeeded(&self, sessions: usize) {
        let successes = self.states.iter().filter(|state| **state == KvPoll::Success).count();
        assert_eq!((successes, &self.failures[..], self.pool.num_out()), (sessions, &[][..], 0));
        assert!(self.out.is_empty(), "{:?}", self.out);
    }
}
