//! A rank as the router sees it: a pair of pipes, and perhaps a process.

use std::io::Write;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::shared::control::{Accounting, Command};
use crate::shared::error::ExampleError;

/// One side of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Computes prompts.
    Prefill,
    /// Continues them.
    Decode,
}

impl Side {
    /// The other one.
    pub fn other(self) -> Side {
        if self == Side::Prefill { Side::Decode } else { Side::Prefill }
    }
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Side::Prefill { "prefill" } else { "decode" })
    }
}

/// What the router does to a rank to see what becomes of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Harm {
    /// SIGKILL: the process gets no chance to say goodbye, and the kernel tells its peers.
    Kill,
    /// SIGSTOP: it says nothing any more, and nobody knows whether it will again.
    Stop,
}

/// A rank as the router sees it. Dropping it ends the rank's process.
pub struct Rank {
    /// Its side.
    pub side: Side,
    /// Its number on that side.
    pub number: u32,
    /// What it had at the end.
    pub accounting: Option<Accounting>,
    /// What the router did to it.
    pub harmed: Option<Harm>,
    /// It was stopped and goes on.
    pub resumed: bool,
    commands: Option<Box<dyn Write + Send>>,
    /// All that it has said was heard, and no more comes: its line has ended, or it is stopped.
    silent: bool,
    child: Option<Child>,
}

impl Rank {
    /// A rank that is told its commands through `commands`; `child` is its process, if it is ours.
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

    /// `prefill/0`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.side, self.number)
    }

    /// True if no word comes from it any more. A rank that has died is not silent before its last words
    /// were heard.
    pub fn is_silent(&self) -> bool {
        self.silent
    }

    /// Notes that no word comes from it any more.
    pub fn set_silent(&mut self) {
        self.silent = true;
    }

    /// True if it can be given requests.
    pub fn serves(&self) -> bool {
        self.commands.is_some() && !self.silent
    }

    /// Tells it something. A rank that is gone is noticed by its reader; one that is stopped hears nothing.
    pub fn send(&mut self, command: &Command) -> Result<(), ExampleError> {
        let Some(commands) = self.commands.as_mut().filter(|_| !self.silent) else { return Ok(()) };
        let mut line = serde_json::to_vec(command).map_err(ExampleError::Command)?;
        line.push(b'\n');
        if commands.write_all(&line).and_then(|()| commands.flush()).is_err() {
            self.commands = None;
        }
        Ok(())
    }

    /// Does it harm.
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

    /// Kills its process, and waits until that is dead.
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
