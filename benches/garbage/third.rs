//! The third process: it idles, spins, or sends garbage, as its parent tells it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use kv_transfer::bootstrap::HttpBootstrapClient;
use kv_transfer::unstable::wire::{Body, ConversationId, Frame, Hello, VERSIONS};
use kv_transfer::unstable::{
    BootstrapClient, BootstrapEvent, KV_SERVICE, RankQuery, RankRecord, Replica, Transport, TransportEvent,
    Wanted,
};
use kv_transfer::{Incarnation, LookupId, PeerId, Region, RegionRole, Time, WorkerRole};

use crate::Error;
use crate::frames::Garbage;
use crate::side::{args, role_of, transport};

/// The variable that makes a process the third one: the role of the worker that gets the garbage, and the
/// address of the bootstrap server.
pub(crate) const THIRD: &str = "KV_BENCH_GARBAGE_THIRD";
/// How long a connection may take to come about.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the process spins or sends garbage before it checks what its parent wants.
const LOOK: Duration = Duration::from_millis(1);

/// What the third process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Idle,
    Spin,
    Garbage,
}

impl What {
    pub(crate) const ALL: [What; 3] = [What::Idle, What::Spin, What::Garbage];

    pub(crate) fn name(self) -> &'static str {
        match self {
            What::Idle => "idles",
            What::Spin => "spins",
            What::Garbage => "sends garbage",
        }
    }
}

/// The third process, as its parent sees it.
pub(crate) struct Third {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    last: String,
}

impl Third {
    pub(crate) fn start(role: WorkerRole, addr: &str) -> Result<Third, Error> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(THIRD, format!("{role:?} {addr}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().ok_or("no input of the third process")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no output of the third process")?);
        Ok(Third { child, orders, answers, last: String::new() })
    }

    /// Tells the process what to do, and returns once it does.
    pub(crate) fn tell(&mut self, what: What) -> Result<(), Error> {
        writeln!(self.orders, "{}", what.name())?;
        self.last.clear();
        if self.answers.read_line(&mut self.last)? == 0 {
            return Err("the third process has ended".into());
        }
        Ok(())
    }

    /// The process's own report of the garbage that it has sent.
    pub(crate) fn sent(&self) -> &str {
        self.last.trim()
    }
}

impl Drop for Third {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the third process until its standard input ends.
pub(crate) fn live(told: &str) -> Result<(), Error> {
    let (role, addr) = told.split_once(' ').ok_or("the parent has told too little")?;
    let (tell, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let what = What::ALL.into_iter().find(|what| what.name() == line);
            if what.is_some_and(|what| tell.send(what).is_ok()) {
                continue;
            }
            break;
        }
        std::process::exit(0);
    });
    let mut liar = None;
    let mut what = orders.recv()?;
    loop {
        if what == What::Garbage && liar.is_none() {
            liar = Some(Liar::new(find(role_of(role)?, addr)?)?);
        }
        println!("{}", liar.as_ref().map_or(String::new(), Liar::sent));
        std::io::stdout().flush()?;
        what = match what {
            What::Idle => orders.recv()?,
            What::Spin => until_told(&orders, |_| Ok(()))?,
            What::Garbage => {
                let begun = Instant::now();
                let liar = liar.as_mut().ok_or("nobody to lie to")?;
                let next = until_told(&orders, |until| liar.lie(until))?;
                liar.time += begun.elapsed();
                next
            }
        };
    }
}

/// Burns a processor until something else is wanted.
fn until_told(
    orders: &Receiver<What>,
    mut act: impl FnMut(Instant) -> Result<(), Error>,
) -> Result<What, Error> {
    loop {
        match orders.try_recv() {
            Ok(what) => return Ok(what),
            Err(TryRecvError::Disconnected) => return Err("the parent process is gone".into()),
            Err(TryRecvError::Empty) => {}
        }
        let until = Instant::now() + LOOK;
        act(until)?;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
}

/// The record of the serving worker at the bootstrap server.
fn find(role: WorkerRole, addr: &str) -> Result<RankRecord, Error> {
    let mut client = HttpBootstrapClient::new(Default::default())?;
    let query = RankQuery { role, service: KV_SERVICE.to_owned(), replica: Replica::Rank(0) };
    let start = Instant::now();
    let now = || Time::from_nanos(start.elapsed().as_nanos() as u64);
    client.lookup(now(), LookupId(0), addr, &query);
    while start.elapsed() < PATIENCE {
        match client.poll(now()) {
            Some(BootstrapEvent::Found { ranks, .. }) => {
                return ranks.into_iter().next().ok_or_else(|| "no rank of the serving worker".into());
            }
            Some(BootstrapEvent::Failed { .. }) => client.lookup(now(), LookupId(0), addr, &query),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Err("the serving worker is not registered".into())
}

/// A peer that greets a worker as any peer may, and then sends garbage.
struct Liar {
    to: RankRecord,
    garbage: Garbage,
    way: Way,
    frames: u64,
    bytes: u64,
    time: Duration,
}

/// A connection to the worker.
struct Way {
    transport: kv_transfer::local::LocalTransport,
    _arena: kv_transfer::local::Arena,
}

const WORKER: PeerId = PeerId(1);

impl Liar {
    fn new(to: RankRecord) -> Result<Liar, Error> {
        let (way, hello, conversation) = Way::open(&to)?;
        let garbage = Garbage::new(hello, conversation);
        Ok(Liar { to, garbage, way, frames: 0, bytes: 0, time: Duration::ZERO })
    }

    /// Sends as many frames as the connection takes, until a moment.
    fn lie(&mut self, until: Instant) -> Result<(), Error> {
        let mut events = Vec::new();
        while Instant::now() < until {
            for _ in 0..16 {
                let frame = self.garbage.next();
                let len = frame.len() as u64;
                if self.way.transport.send(WORKER, frame).is_err() {
                    break;
                }
                self.frames += 1;
                self.bytes += len;
            }
            events.clear();
            self.way.transport.poll(Time::from_nanos(1), &mut events);
            if events.iter().any(|event| matches!(event, TransportEvent::PeerGone { .. })) {
                let (way, hello, conversation) = Way::open(&self.to)?;
                self.way = way;
                self.garbage = Garbage::new(hello, conversation);
            }
        }
        Ok(())
    }

    fn sent(&self) -> String {
        let seconds = self.time.as_secs_f64().max(1e-9);
        let (rate, mebibytes) = (self.frames as f64 / seconds, self.bytes as f64 / seconds / 1048576.0);
        format!("it sent {} frames of garbage: {rate:.0} a second, {mebibytes:.1} MiB/s", self.frames)
    }
}

impl Way {
    /// Connects to the worker and greets it. Returns the connection, the hello, and the conversation by which
    /// the worker wants to be addressed.
    fn open(to: &RankRecord) -> Result<(Way, Hello, ConversationId), Error> {
        let (mut transport, arena) = transport()?;
        let args = args("liar", arena.addr())?;
        let region = Region::dram(RegionRole::Kv, arena.addr(), arena.len() as u64, 4096);
        transport.register(&region)?;
        let there = Wanted::kv(transport.name()).choose(to)?.transport;
        transport.connect(WORKER, &there.metadata)?;
        let start = Instant::now();
        let hello = Hello {
            versions: VERSIONS,
            to: to.incarnation,
            worker: args.worker().clone(),
            incarnation: Incarnation::from_random(u64::from(std::process::id())),
            conversation: ConversationId::new(1, 7),
            nonce: 1,
            transport: there.name.clone(),
            metadata: transport.metadata()?,
            geometry: Some(Box::new(args.geometry().clone())),
            suffixed: false,
            service: "kv".to_owned(),
        };
        let frame =
            Frame { conversation: ConversationId::NONE, body: Body::Hello(hello.clone()) }.encode()?;
        transport.send(WORKER, frame)?;
        let mut events = Vec::new();
        while start.elapsed() < PATIENCE {
            transport.poll(Time::from_nanos(1), &mut events);
            for event in events.drain(..) {
                if let TransportEvent::Frame { frame, .. } = event
                    && let Ok(Frame { body: Body::Welcome(welcome), .. }) = Frame::decode(&frame)
                {
                    return Ok((Way { transport, _arena: arena }, hello, welcome.conversation));
                }
            }
        }
        Err("the serving worker does not answer a hello".into())
    }
}
