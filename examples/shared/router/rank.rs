//! A rank as the router sees it: a pair of pipes, and in most cases a process.

use std::io::Write;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::shared::control::{Accounting, Command};
use crate::shared::error::ExampleError;

/// A side of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The side that computes prompts.
    Prefill,
    /// The side that generates tokens.
    Decode,
}

impl Side {
    /// The opposite side.
    pub fn other(self) -> Side {
        if self == Side::Prefill { Side::Decode } else { Side::Prefill }
    }
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Side::Prefill { "prefill" } else { "decode" })
    }
}

/// What the router does to a rank, to see how the others go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Harm {
    /// SIGKILL: the process ends at once, and the kernel tells its peers.
    Kill,
    /// SIGSTOP: the process is silent, and its peers cannot know whether it will go on.
    Stop,
}

/// A rank as the router sees it. Dropping it ends the rank's process.
pub struct Rank {
    /// The side of the rank.
    pub side: Side,
    /// The number of the rank on its side.
    pub number: u32,
    /// The pages of the rank at the end, as it has reported them.
    pub accounting: Option<Accounting>,
    /// What the router did to the rank, if anything.
    pub harmed: Option<Harm>,
    /// True if the rank was stopped and resumed.
    pub resumed: bool,
    commands: Option<Box<dyn Write + Send>>,
    /// True if everything that the rank has sent was handled, and no more comes: its connection has ended, or
    /// it is stopped.
    silent: bool,
    child: Option<Child>,
}

impl Rank {
    /// A rank that gets its commands through `commands`; `child` is its process, if the router has started
    /// it.
    pub fn new(side: Side, number: u32, commands: Box<dyn Write + Send>, child: Option<Child>) -> Rank {
        Rank {
            side,
            number,
            accounting: None,
            harmed: None,
            resumed: false,
            commands: Some(commands),
            silent: false,
            child,
        }
    }

    /// The name of the rank, such as `prefill/0`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.side, self.number)
    }

    /// True if no more events come from the rank. A rank that has died is silent only after its last events
    /// were handled.
    pub fn is_silent(&self) -> bool {
        self.silent
    }

    /// Notes that no more events come from the rank.
    pub fn set_silent(&mut self) {
        self.silent = true;
    }

    /// True if the rank can be given requests.
    pub fn serves(&self) -> bool {
        self.commands.is_some() && !self.silent
    }

    /// Sends the rank a command. The reader of a rank notices when the rank is gone; a stopped rank gets no
    /// command.
    pub fn send(&mut self, command: &Command) -> Result<(), ExampleError> {
        let Some(commands) = self.commands.as_mut().filter(|_| !self.silent) else { return Ok(()) };
        let mut line = serde_json::to_vec(command).map_err(ExampleError::Command)?;
        line.push(b'\n');
        if commands.write_all(&line).and_then(|()| commands.flush()).is_err() {
            self.commands = None;
        }
        Ok(())
    }

    /// Kills or stops the rank.
    pub fn harm(&mut self, harm: Harm) {
        self.harmed = Some(harm);
        match harm {
            Harm::Kill => self.kill(),
            Harm::Stop => self.signal(Signal::STOP),
        }
    }

    /// Lets a stopped rank go on.
    pub fn resume(&mut self) {
        self.signal(Signal::CONT);
        (self.silent, self.resumed) = (false, true);
    }

    /// Kills the process of the rank, and waits until it is dead.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Not before: the end of its input is an order to stop in an orderly way.
        self.commands = None;
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            let _ = kill_process(Pid::from_child(child), signal);
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // An end of its input is the order to exit; the signal is for ranks that do not listen.
        self.commands = None;
        if let Some(child) = &mut self.child {
            let listens = !self.silent;
            let patience = Instant::now() + Duration::from_secs(if listens { 2 } else { 0 });
            while Instant::now() < patience && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
