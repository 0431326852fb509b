//! The renewal of leases at the prefill side: one heartbeat frame in, its answer out.

use std::error::Error;
use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use kv_transfer::prelude::*;
use kv_transfer::unstable::Origin;
use kv_transfer::unstable::proto::{Command, Input, Node, NodeConfig, Output};
use kv_transfer::unstable::wire::{
    Acquire, Body, ConversationId, Delivery, Frame, Heartbeat, Hello, Register, VERSIONS,
};
use kv_transfer::{Attempt, Incarnation, SessionId, Time, TransferMode};

const US: Incarnation = Incarnation::from_random(1);
const READER: Incarnation = Incarnation::from_random(2);
const THEIR_CONVERSATION: ConversationId = ConversationId(1 << 32 | 7);

/// Renews 10 000 leases by one frame: of neighbouring attempts, and of every second attempt.
pub(crate) fn heartbeats(criterion: &mut Criterion) -> Result<(), Box<dyn Error>> {
    const LEASES: u32 = 10_000;
    let mut group = criterion.benchmark_group("heartbeat");
    group.throughput(Throughput::Elements(LEASES.into()));
    for (name, step) in [("neighbouring leases", 1), ("every second lease", 2)] {
        let mut prefill = Prefill::with_leases(LEASES * step)?;
        let low_watermark = Attempt(1);
        let leases: Vec<(u64, u32)> = match step {
            1 => vec![(1, LEASES)],
            _ => (0..LEASES).map(|lease| (1 + u64::from(lease * step), 1)).collect(),
        };
        let body =
            Body::Heartbeat(Heartbeat { number: 1, low_watermark, leases, asked: Vec::new(), writes: false });
        let frame = Frame { conversation: prefill.conversation, body }.encode()?;
        let heartbeat = || Input::Frame { from: Origin(1), frame: frame.clone() };
        let answer = prefill.renew(heartbeat());
        assert_eq!(renewed_by(answer)?, LEASES, "not all leases were renewed");
        group.bench_function(BenchmarkId::new(name, LEASES), |b| {
            b.iter(|| prefill.renew(black_box(heartbeat())));
        });
    }
    group.finish();
    Ok(())
}

/// A prefill machine whose senders are all acquired by the same decode worker.
struct Prefill {
    node: Node,
    now: Time,
    /// The conversation by which the machine wants to be addressed.
    conversation: ConversationId,
}

impl Prefill {
    fn with_leases(leases: u32) -> Result<Prefill, Box<dyn Error>> {
        let args = |engine: &str| {
            let len = u64::from(leases) * 64;
            let region = Region::dram(RegionRole::Kv, 0x1000, len, 64);
            KvArgs::builder(engine, 0).pages(leases, 16).region(region).build()
        };
        let config = NodeConfig::new(args("prefill")?, US, "bench", Default::default());
        let reader = args("decode")?;
        let mut prefill = Prefill {
            node: Node::new(config),
            now: Time::from_nanos(1_000_000_000),
            conversation: ConversationId::NONE,
        };
        let hello = Hello {
            versions: VERSIONS,
            to: US,
            worker: reader.worker().clone(),
            incarnation: READER,
            conversation: THEIR_CONVERSATION,
            nonce: 1,
            transport: "bench".to_owned(),
            metadata: Default::default(),
            geometry: Some(Box::new(reader.geometry().clone())),
            suffixed: false,
            service: "kv".to_owned(),
        };
        for body in prefill.says(ConversationId::NONE, Body::Hello(hello))? {
            if let Body::Welcome(welcome) = body {
                prefill.conversation = welcome.conversation;
            }
        }
        let pool = PagePool::new(leases);
        for page in 0..leases {
            let (session, room) = (SessionId(page.into()), Room::Number(page.into()));
            let mode = Some(TransferMode::Pull);
            let options = Box::new(SessionOptions::default().with(|options| options.mode = mode));
            prefill.command(Command::OpenSender { session, room: room.clone(), receivers: 1, options });
            prefill.command(Command::InitSender { session, num_pages: 1, aux: None });
            let chunk = pool.adopt(PageList::from_pages([page])?)?;
            prefill.command(Command::Send { session, chunk });
            let attempt = Attempt(1 + u64::from(page));
            let delivery = Delivery::Read(Acquire { lease_id: Some(session), number: 1 });
            let acquire =
                Register { attempt, low_watermark: Attempt(1), room, ranks: 1, ttl_ms: 60_000, delivery };
            let granted = prefill.says(prefill.conversation, Body::Register(acquire))?;
            assert!(matches!(granted[..], [Body::Granted(_)]), "{granted:?}");
        }
        Ok(prefill)
    }

    fn command(&mut self, command: Command) {
        self.node.handle(self.now, Input::Command(command));
        while self.node.poll_output().is_some() {}
    }

    /// Gives the machine a frame. Returns its answers.
    fn says(&mut self, conversation: ConversationId, body: Body) -> Result<Vec<Body>, Box<dyn Error>> {
        self.node.handle(
            self.now,
            Input::Frame { from: Origin(1), frame: Frame { conversation, body }.encode()? },
        );
        let mut answers = Vec::new();
        while let Some(output) = self.node.poll_output() {
            if let Output::Send { frame, .. } = output {
                answers.push(Frame::decode(&frame)?.body);
            }
        }
        Ok(answers)
    }

    /// Gives the machine a heartbeat. Returns its answer.
    fn renew(&mut self, heartbeat: Input) -> Option<Output> {
        self.now = self.now + Duration::from_micros(1);
        self.node.handle(self.now, heartbeat);
        std::iter::from_fn(|| self.node.poll_output()).last()
    }
}

/// How many leases an answer renews.
fn renewed_by(answer: Option<Output>) -> Result<u32, Box<dyn Error>> {
    let Some(Output::Send { frame, .. }) = answer else {
        return Err("the prefill machine does not answer the heartbeat".into());
    };
    match Frame::decode(&frame)?.body {
        Body::HeartbeatAck(ack) => Ok(ack.leases.iter().map(|&(_, count)| count).sum()),
        other => Err(format!("the answer to the heartbeat is another frame: {other:?}").into()),
    }
}
