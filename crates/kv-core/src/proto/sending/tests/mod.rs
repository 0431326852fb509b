//! The sending side alone: the tests play its receiver, message by message.

mod attempts;
mod leases;

use std::time::Duration;

use crate::command::Resource;
use crate::error::Cause;
use crate::id::{Attempt, Incarnation, PeerId, Room, SessionId, WorkerId};
use crate::lease::{Lease, TransferMode};
use crate::page_list::PageList;
use crate::pages::Pages;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::HelloHeard;
use crate::proto::ending::Ending;
use crate::proto::io::{NodeConfig, Output};
use crate::proto::sending::Sending;
use crate::session_options::SessionOptions;
use crate::time::Time;
use crate::transport::{Descriptor, Origin};
use crate::wire::{Body, ConversationId, Frame, Hello};
use crate::{KvArgs, Region, RegionRole};

const SESSION: SessionId = SessionId(1);
const ATTEMPT: Attempt = Attempt(1);
const FROM: Origin = Origin(7);

/// Bytes of one page.
const PAGE: u64 = 64;

/// A sending side, and a peer that has said hello.
struct Alone {
    cx: Context,
    sending: Sending,
    peer: PeerId,
}

/// An output, reduced to what the tests compare.
#[derive(Debug, PartialEq, Eq)]
enum Out {
    Says(KvPoll),
    Fails(Cause),
    Tells(Box<Body>),
    Posts(Vec<Descriptor>),
    Cancels,
    Back(Vec<u32>),
}

fn tells(body: Body) -> Out {
    Out::Tells(Box::new(body))
}

fn args(engine: &str, pages: u32) -> KvArgs {
    let region = Region::dram(RegionRole::Kv, 0x1000, u64::from(pages) * PAGE, PAGE);
    KvArgs::builder(engine, 0).pages(pages, 16).region(region).build().unwrap()
}

fn list(pages: &[u32]) -> PageList {
    PageList::from_pages(pages.iter().copied()).unwrap()
}

impl Alone {
    fn new() -> Alone {
        let config =
            NodeConfig::new(args("prefill", 8), Incarnation::from_random(7), "local", Default::default());
        let (mut cx, there) = (Context::new(config), args("decode", 16));
        let mut hello = Hello {
            versions: cx.config.versions.get(),
            metadata: Default::default(),
            transport: cx.config.transports[0].name.clone(),
            to: cx.config.incarnation,
            incarnation: Incarnation::from_random(8),
            conversation: ConversationId::new(1, 1),
            nonce: 5,
            worker: WorkerId::clone(there.worker()),
            geometry: Some(Box::new(there.geometry().clone())),
            service: "kv".to_owned(),
            suffixed: false,
        };
        let HelloHeard::Goes(peer) = cx.hear_hello(FROM, &mut hello) else { panic!("a first hello") };
        assert!(cx.answer_hello(peer, FROM, &hello));
        let sending = Sending::new(cx.config.args.geometry());
        let mut alone = Alone { cx, sending, peer };
        alone.outputs();
        alone
    }

    /// Opens the session in room 9, and gives it these pages as its only chunk.
    fn open(&mut self, mode: TransferMode, lease: Lease) {
        let options = SessionOptions { mode: Some(mode), lease: Some(lease), ..SessionOptions::default() };
        self.sending.open_sender(&mut self.cx, SESSION, Room::Number(9), 1, options);
    }

    fn give(&mut self, pages: &[u32]) {
        self.sending.init_sender(&mut self.cx, SESSION, pages.len(), None);
        self.sending.send_chunk(&mut self.cx, SESSION, Pages::unpooled(list(pages)).unwrap());
    }

    /// Sets the time to this many seconds after the beginning.
    fn at(&mut self, seconds: u64) {
        self.cx.fx.advance(Time::ZERO + Duration::from_secs(seconds));
    }

    /// The outputs since the last call, except welcomes, questions and connections.
    fn outputs(&mut self) -> Vec<Out> {
        let outputs = std::iter::from_fn(|| self.cx.fx.next_output()).filter_map(|output| match output {
            Output::Status { failure: Some(failure), .. } => Some(Out::Fails(failure.cause)),
            Output::Status { poll, .. } => Some(Out::Says(poll)),
            Output::Send { frame, .. } => match Frame::decode(&frame).unwrap().body {
                Body::Heartbeat(_) | Body::Welcome(_) => None,
                body => Some(tells(body)),
            },
            Output::Post { post, .. } => Some(Out::Posts(post.descriptors)),
            Output::Cancel { .. } => Some(Out::Cancels),
            Output::Release { resource: Resource::Pages(pages), .. } => {
                Some(Out::Back(pages.list().iter().collect()))
            }
            Output::Connect { .. } | Output::Permit { .. } => None,
            other => panic!("{other:?}"),
        });
        outputs.collect()
    }

    /// The statuses and the pages among the outputs.
    fn ends(&mut self) -> Vec<Out> {
        self.outputs().into_iter().filter(|out| !matches!(out, Out::Tells(_))).collect()
    }

    /// The messages among the outputs.
    fn told(&mut self) -> Vec<Body> {
        let told = self.outputs().into_iter().filter_map(|out| match out {
            Out::Tells(body) => Some(*body),
            _ => None,
        });
        told.collect()
    }

    /// Checks that nothing is left except what is remembered for latecomers.
    fn assert_over(&self) {
        assert_eq!((self.sending.len(), self.sending.pages_leased(), self.cx.posts.in_flight()), (0, 0, 0));
    }
}
