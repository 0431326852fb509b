//! The processes of a run, as their parent sees them.
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use kv_examples::process::{self, Process};

use super::engine::{Command, Event, Spec, State};
use super::{Options, Outcome};
use crate::cache::Shape;

/// How long the parent waits for anything before it gives up.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// How long the blocks of killed processes' requests may take to come back: a lease and its margin.
const BLOCKS_BACK: Duration = Duration::from_secs(60);

/// All processes, numbered in the order in which they were started.
pub struct Fleet {
    processes: Vec<Process>,
    events: Receiver<(usize, Option<Event>)>,
    sender: Sender<(usize, Option<Event>)>,
    /// Events that came before one that was waited for.
    passed_over: VecDeque<(usize, Option<Event>)>,
    servers: Vec<String>,
    spec: Spec,
}

impl Fleet {
    /// No processes yet, which will have caches of this shape.
    pub fn new(options: &Options, shape: Shape, blocks: u32) -> Fleet {
        let (sender, events) = channel();
        let spec = Spec {
            name: String::new(),
            shape,
            blocks,
            tp: 1,
            transport: options.transport,
            servers: None,
            command_queue: options.command_queue,
            deadline_ms: options.deadline,
            check: true,
        };
        Fleet {
            processes: Vec::new(),
            events,
            sender,
            passed_over: VecDeque::new(),
            servers: Vec::new(),
            spec,
        }
    }

    /// Starts a prefill process of so many ranks, and waits until it serves.
    pub fn prefill(&mut self, tp: usize) -> Outcome<usize> {
        let name = format!("prefill-{}", self.processes.len());
        let number = self.start(&Spec { name, tp, ..self.spec.clone() })?;
        match self.next_of(number)? {
            Event::Ready { addr } => self.servers.push(addr),
            other => return Err(format!("not ready: {other:?}").into()),
        }
        Ok(number)
    }

    /// Starts a decode process of so many ranks, and waits until it has found every prefill process.
    pub fn decode(&mut self, name: &str, tp: usize, shape: Shape) -> Outcome<usize> {
        let servers = Some(self.servers.clone());
        let number = self.start(&Spec { name: name.to_owned(), tp, shape, servers, ..self.spec.clone() })?;
        match self.next_of(number)? {
            Event::Ready { .. } => Ok(number),
            other => Err(format!("not ready: {other:?}").into()),
        }
    }

    fn start(&mut self, spec: &Spec) -> Outcome<usize> {
        let (child, input, output) = process::spawn(spec)?;
        let number = self.processes.len();
        process::listen(number, output, self.sender.clone());
        self.processes.push(Process::new(input, Some(child)));
        Ok(number)
    }

    pub fn send(&mut self, number: usize, command: &Command) -> Outcome<()> {
        Ok(self.processes[number].send(command)?)
    }

    /// SIGKILL. What the process has said before is still to come.
    pub fn kill(&mut self, number: usize) {
        self.processes[number].kill();
    }

    /// The next event, and whose it is; `None` after the last event of a process.
    pub fn next(&mut self) -> Outcome<(usize, Option<Event>)> {
        match self.passed_over.pop_front() {
            Some(event) => Ok(event),
            None => self.hear(),
        }
    }

    /// The next event of one process, other than that a prompt is handed over. Other events are not lost.
    pub fn next_of(&mut self, number: usize) -> Outcome<Event> {
        loop {
            match self.hear()? {
                (from, Some(Event::Handed { at })) => {
                    self.passed_over.push_back((from, Some(Event::Handed { at })));
                }
                (from, Some(event)) if from == number => return Ok(event),
                (from, None) if from == number => return Err(format!("process {number} has ended").into()),
                other => self.passed_over.push_back(other),
            }
        }
    }

    /// How things are in a process, now. What the process says before that is not lost.
    pub fn state(&mut self, number: usize) -> Outcome<State> {
        self.send(number, &Command::Report)?;
        loop {
            match self.next_of(number)? {
                Event::Report(state) => return Ok(state),
                other => self.passed_over.push_back((number, Some(other))),
            }
        }
    }

    fn hear(&self) -> Outcome<(usize, Option<Event>)> {
        self.events.recv_timeout(PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("nothing has happened for {PATIENCE:?}").into(),
            RecvTimeoutError::Disconnected => "no process is left".into(),
        })
    }

    /// How things are in a process once all of its blocks are free, or it is clear that they stay taken.
    pub fn settled(&mut self, number: usize) -> Outcome<State> {
        let begun = Instant::now();
        loop {
            let state = self.state(number)?;
            if state.free_blocks == state.blocks && state.open == 0 || begun.elapsed() > BLOCKS_BACK {
                return Ok(state);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
