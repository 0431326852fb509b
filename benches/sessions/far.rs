//! The prefill worker, in a process of its own, which does what its parent tells it line by line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kv_transfer::prelude::*;

use crate::side::{Batch, Sending, Shape, Side};
use crate::way::Way;
use crate::{Error, cpus};

/// The variable that makes a process the prefill worker: transport, shape, and the bootstrap server.
const FAR: &str = "KV_BENCH_SESSIONS_FAR";

/// What a prefill worker is started with.
pub(crate) struct Order {
    pub(crate) way: String,
    shape: Shape,
    addr: String,
}

impl Order {
    /// The order, if this process is a prefill worker.
    pub(crate) fn of_this_process() -> Result<Option<Order>, Error> {
        let Some(told) = std::env::var_os(FAR) else {
            return Ok(None);
        };
        let told = told.to_string_lossy().into_owned();
        let [way, pages, regions, item, addr] = words(&told)?;
        let shape = Shape { pages: pages.parse()?, regions: regions.parse()?, item: item.parse()? };
        Ok(Some(Order { way: way.to_owned(), shape, addr: addr.to_owned() }))
    }
}

fn words<const N: usize>(line: &str) -> Result<[&str; N], Error> {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.try_into().map_err(|_| format!("{line:?} does not have {N} words").into())
}

/// Runs the prefill worker until its standard input ends.
pub(crate) fn serve(order: &Order, ways: &[Way]) -> Result<(), Error> {
    let way = ways.iter().find(|way| way.name() == order.way).ok_or("no such transport here")?;
    let side = Side::start(way, WorkerRole::Prefill, order.shape, Some(&order.addr))?;
    answer("ready")?;
    let mut sending: Option<Sending> = None;
    for line in std::io::stdin().lines() {
        let line = line?;
        match line.split_once(' ') {
            Some((kind @ ("open" | "hold"), numbers)) => {
                let [first, count, each] = words(numbers)?;
                let first = first.parse()?;
                let batch = Batch { rooms: first..first + count.parse::<u64>()?, each: each.parse()? };
                sending = Some(side.senders(&order.addr, &batch, kind == "hold")?);
                answer("done")?;
            }
            None if line == "send" => {
                let begun = sending.as_mut().ok_or("nothing is held")?.send()?;
                answer(&format!("{begun:.9}"))?;
            }
            None if line == "settle" => {
                side.settled(sending.take().ok_or("nothing is open")?)?;
                answer("done")?;
            }
            _ => return Err(format!("what is {line:?}?").into()),
        }
    }
    Ok(())
}

pub(crate) fn answer(line: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes())?;
    Ok(out.flush()?)
}

/// A child process that is told what to do line by line, and is killed when this is dropped.
pub(crate) struct Told {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Told {
    /// Starts this program again, which finds `value` in the variable.
    pub(crate) fn start(variable: &str, value: &str) -> Result<Told, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(variable, value).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = cpus::there(|| command.spawn())?;
        let input = process.stdin.take().ok_or("no input of the child")?;
        let output = BufReader::new(process.stdout.take().ok_or("no output of the child")?);
        let mut told = Told { process, input, output };
        told.answered("ready")?;
        Ok(told)
    }

    pub(crate) fn tell(&mut self, line: &str) -> Result<(), Error> {
        Ok(self.input.write_all(format!("{line}\n").as_bytes())?)
    }

    /// The child's next line.
    pub(crate) fn answer(&mut self) -> Result<String, Error> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        match line.trim() {
            "" => Err(format!("the child has ended: {:?}", self.process.try_wait()).into()),
            line => Ok(line.to_owned()),
        }
    }

    fn answered(&mut self, wanted: &str) -> Result<(), Error> {
        match self.answer()? {
            line if line == wanted => Ok(()),
            line => Err(format!("the child says {line:?}").into()),
        }
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A prefill worker, as its parent sees it.
pub(crate) struct Far {
    told: Told,
    pub(crate) addr: String,
    _server: KvBootstrapServer,
}

impl Far {
    /// Starts a prefill worker, with a bootstrap server of its own.
    pub(crate) fn start(way: &Way, shape: &Shape) -> Result<Far, Error> {
        let server = KvBootstrapServer::start("127.0.0.1:0")?;
        let addr = server.local_addr().to_string();
        let Shape { pages, regions, item } = shape;
        let order = format!("{} {pages} {regions} {item} {addr}", way.name());
        Ok(Far { told: Told::start(FAR, &order)?, addr, _server: server })
    }

    /// Opens the senders of a batch, which send their pages now, or when told so if they are on `hold`.
    pub(crate) fn open(&mut self, batch: &Batch, hold: bool) -> Result<(), Error> {
        let Batch { rooms, each } = batch;
        let kind = if hold { "hold" } else { "open" };
        self.told.tell(&format!("{kind} {} {} {each}", rooms.start, rooms.end - rooms.start))?;
        self.told.answered("done")
    }

    /// Tells the senders that are on hold to send. [`Far::sent`] says when they did.
    pub(crate) fn send(&mut self) -> Result<(), Error> {
        self.told.tell("send")
    }

    /// When the senders were told to send, by the clock of [`now`](crate::side::now).
    pub(crate) fn sent(&mut self) -> Result<f64, Error> {
        Ok(self.told.answer()?.parse()?)
    }

    /// Waits until all senders have ended.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        self.told.tell("settle")?;
        self.told.answered("done")
    }
}
