//! Peers that say what no well-behaved peer says: neither the values of labels nor the loud lines grow with them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Command, Input, Node, NodeConfig, Output};
use kv_core::random::SplitMix64;
use kv_core::trace::KvWhat;
use kv_core::wire::{Abort, Body, ConversationId, Delivery, Destination, Frame, Hello, Register, VERSIONS};
use kv_core::{
    Attempt, Incarnation, KvArgs, Origin, PageList, PeerCause, Region, RegionRole, Room, SessionId,
    SessionOptions, Time, WayEnd,
};
use kv_observe::{Metrics, WORKER};
use kv_poll::worker::Listener;
use metrics_util::debugging::DebuggingRecorder;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

const HERE: Incarnation = Incarnation::from_random(9);
const NAMED: usize = 4;

fn args(engine: &str) -> KvArgs {
    let region = Region::dram(RegionRole::Kv, 0x1_0000, 32 * 64, 64);
    KvArgs::builder(engine, 0).pages(32, 16).region(region).build().unwrap()
}

/// A prefill worker to which everybody may speak.
struct Victim {
    node: Node,
    args: KvArgs,
    listener: Listener<KvWhat>,
    now: Time,
    random: SplitMix64,
}

impl Victim {
    /// The outputs of an input.
    fn input(&mut self, input: Input) -> Vec<Output> {
        self.now = self.now + Duration::from_micros(100);
        self.node.handle(self.now, input);
        while let Some(event) = self.node.poll_trace() {
            self.listener.tell(self.args.worker(), &event);
        }
        std::iter::from_fn(|| self.node.poll_output()).collect()
    }

    fn hear(&mut self, from: u64, conversation: ConversationId, body: Body) -> Vec<Output> {
        let frame = Frame { conversation, body }.encode().unwrap();
        self.input(Input::Frame { from: Origin(from), frame })
    }

    /// An engine that nobody knows greets, asks for a request, fails for a reason of its own, speaks noise, and dies.
    /// Returns whether it was welcomed.
    fn meet(&mut self, number: u64) -> bool {
        let theirs = args(&format!("stranger-{number}"));
        let hello = Hello {
            versions: VERSIONS,
            to: HERE,
            worker: theirs.worker().clone(),
            incarnation: Incarnation::from_random(1000 + number),
            conversation: ConversationId::new(1, 1),
            nonce: 1,
            transport: "test".to_owned(),
            metadata: Bytes::from_static(b"stranger"),
            geometry: Some(Box::new(theirs.geometry().clone())),
            suffixed: false,
            service: "kv".to_owned(),
        };
        let said = self.hear(number, ConversationId::NONE, Body::Hello(hello));
        let welcome = said.iter().find_map(|output| match output {
            Output::Send { peer, frame } => match Frame::decode(frame).unwrap().body {
                Body::Welcome(welcome) => Some((*peer, welcome.conversation)),
                _ => None,
            },
            _ => None,
        });
        let Some((peer, conversation)) = welcome else { return false };
        self.request(number, conversation);
        self.noise(number, conversation);
        self.input(Input::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } });
        true
    }

    /// A request whose id and whose cause of failure the client and the peer have chosen.
    fn request(&mut self, number: u64, conversation: ConversationId) {
        let room = Room::request(&format!("client-{number}")).unwrap();
        let options = Box::new(SessionOptions::default());
        let (session, receivers) = (SessionId(number), 1);
        self.input(Input::Command(Command::OpenSender { session, room: room.clone(), receivers, options }));
        let pages = PageList::from_pages([1]).unwrap();
        let groups = Default::default();
        let (first_page, total_pages, aux, aux_here, ask, permit_ms) = (0, 1, None, true, 1, 10_000);
        let to = Destination { pages, first_page, total_pages, aux, aux_here, groups, ask, permit_ms };
        let (attempt, low_watermark) = (Attempt(1), Attempt(0));
        let delivery = Delivery::Write(to);
        let (ranks, ttl_ms) = (1, 60_000);
        let register = Register { attempt, low_watermark, room: room.clone(), ranks, ttl_ms, delivery };
        self.hear(number, conversation, Body::Register(register));
        let cause = PeerCause::Other { name: format!("cause-{number}") };
        let abort = Abort { failed_ms_ago: None, low_watermark, attempt, room, lease_id: None, cause };
        self.hear(number, conversation, Body::Abort(abort));
    }

    /// Bytes of all kinds: of no message, and of a message with a byte turned.
    fn noise(&mut self, number: u64, conversation: ConversationId) {
        let room = Room::request(&format!("noise-{number}")).unwrap();
        let cause = PeerCause::Aborted;
        let (low_watermark, attempt) = (Attempt(0), Attempt(7));
        let body =
            Body::Abort(Abort { failed_ms_ago: None, low_watermark, attempt, room, lease_id: None, cause });
        let good = Frame { conversation, body }.encode().unwrap();
        for _ in 0..20 {
            let mut bytes = good.to_vec();
            let at = self.random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << self.random.below(8);
            bytes.truncate(1 + self.random.below(2 * bytes.len() as u64) as usize);
            self.input(Input::Frame { from: Origin(number), frame: bytes.into() });
        }
    }
}

/// Counts loud lines about peers.
struct Loud(Arc<AtomicUsize>);

impl<S: Subscriber> Layer<S> for Loud {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == WORKER && *event.metadata().level() <= Level::INFO {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

static SEED: LazyLock<u64> = LazyLock::new(|| {
    let drawn = u64::from(std::process::id());
    let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(drawn);
    println!("SEED={seed}");
    seed
});

#[test]
fn strangers_with_ever_new_names_causes_and_requests_make_no_new_series_and_few_lines() {
    let recorder = Arc::new(DebuggingRecorder::new());
    let metrics = Metrics::to(Arc::clone(&recorder) as _).with(|metrics| metrics.max_peers = NAMED);
    let loud = Arc::new(AtomicUsize::new(0));
    let lines = tracing_subscriber::registry().with(Loud(Arc::clone(&loud)));
    let _guard = tracing::subscriber::set_default(lines);
    let args = args("here");
    let mut node = Node::new(NodeConfig::new(args.clone(), HERE, "test", Bytes::from_static(b"here")));
    node.listen(true);
    let listener = metrics.listener().and(kv_observe::spans());
    let (now, random) = (Time::from_nanos(1_000_000_000), SplitMix64::new(*SEED));
    let mut victim = Victim { node, args, listener, now, random };
    let series = || {
        let all = recorder.snapshotter().snapshot().into_vec().into_iter();
        all.map(|(key, ..)| key.key().to_string()).collect::<BTreeSet<String>>()
    };
    let welcomed = (0..1000).filter(|number| victim.meet(*number)).count();
    let few = series();
    let welcomed = welcomed + (1000..3000).filter(|number| victim.meet(*number)).count();
    let many = series();
    assert!(welcomed > 2900, "{welcomed} strangers were welcomed");
    let by_chance: Vec<&String> =
        many.difference(&few).filter(|name| !name.contains("frames_ignored")).collect();
    assert!(by_chance.is_empty(), "3000 strangers have series that 1000 have not: {by_chance:?}");
    assert!(many.len() < 60, "{} series", many.len());
    for text in ["client-", "noise-", "cause-", "stranger-4/", "stranger-17"] {
        let chosen: Vec<&String> = many.iter().filter(|name| name.contains(text)).collect();
        assert!(chosen.is_empty(), "{text}: {chosen:?}");
    }
    let failures = many.iter().filter(|name| name.contains("failures_total"));
    assert_eq!(failures.count(), NAMED + 1, "a series for each peer with a name, and one for all others");
    let seconds = (victim.now - Time::from_nanos(1_000_000_000)).as_secs() as usize + 1;
    let loud = loud.load(Ordering::Relaxed);
    assert!(loud > 0 && loud <= 17 * seconds, "{loud} lines about peers in {seconds} s");
}
