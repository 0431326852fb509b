//! A rank as the router sees it: a pair of pipes, and in most cases a process.

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::control::{Accounting, Command, Reach};
use crate::error::ExampleError;
use crate::process::Process;

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

/// A rank as the router sees it: a process with a place in the service.
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
    /// True if the rank was told to drain.
    pub drained: bool,
    /// True while the process comes up in the place of another.
    starting: bool,
    /// Where decode ranks find the rank, if no bootstrap server says it.
    pub reach: Option<Reach>,
    process: Process,
}

impl Rank {
    /// The rank that `process` runs.
    pub fn new(side: Side, number: u32, process: Process) -> Rank {
        let (harmed, resumed, drained, starting) = (None, false, false, false);
        Rank { side, number, accounting: None, harmed, resumed, drained, starting, reach: None, process }
    }

    /// The name of the rank, such as `prefill/0`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.side, self.number)
    }

    /// True if no more events come from the rank.
    pub fn is_silent(&self) -> bool {
        self.process.is_silent()
    }

    /// Notes that no more events come from the rank.
    pub fn set_silent(&mut self) {
        self.process.set_silent(true);
    }

    /// True if the rank can be given requests.
    pub fn serves(&self) -> bool {
        self.process.serves() && !self.drained && !self.starting
    }

    /// Sends the rank a command. A stopped rank gets no command.
    pub fn send(&mut self, command: &Command) -> Result<(), ExampleError> {
        self.process.send(command)
    }

    /// Tells the rank to take no new requests, and to exit when it is empty.
    pub fn drain(&mut self) -> Result<(), ExampleError> {
        self.drained = true;
        self.send(&Command::Drain)
    }

    /// The process comes up, and gets no requests yet.
    pub fn starts(&mut self) {
        self.starting = true;
    }

    /// The process is up.
    pub fn is_up(&mut self) {
        self.starting = false;
    }

    /// Kills or stops the rank.
    pub fn harm(&mut self, harm: Harm) {
        self.harmed = Some(harm);
        match harm {
            Harm::Kill => self.kill(),
            Harm::Stop => self.process.signal(Signal::STOP),
        }
    }

    /// Lets a stopped rank go on.
    pub fn resume(&mut self) {
        self.process.signal(Signal::CONT);
        self.process.set_silent(false);
        self.resumed = true;
    }

    /// Kills the process of the rank, and waits until it is dead.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}
