//! A process that a router has started, or that it reaches over a pair of streams.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::ExampleError;

/// A process as its router sees it. Dropping it ends the process.
pub struct Process {
    commands: Option<Box<dyn Write + Send>>,
    /// True if everything that the process has sent was handled, and no more comes: its connection has ended,
    /// or it is stopped.
    silent: bool,
    child: Option<Child>,
}

/// Starts this program once more, with `--rank` and `spec` as its arguments. Returns the process, its
/// standard input and its standard output.
pub fn spawn(spec: &impl Serialize) -> Result<(Child, ChildStdin, ChildStdout), ExampleError> {
    let failed = "start a rank";
    let program = std::env::current_exe().map_err(ExampleError::io("find this program"))?;
    let text = serde_json::to_string(spec).map_err(ExampleError::Command)?;
    let mut command = Command::new(program);
    command.args(["--rank", &text]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(ExampleError::io(failed))?;
    match (child.stdin.take(), child.stdout.take()) {
        (Some(input), Some(output)) => Ok((child, input, output)),
        _ => Err(ExampleError::io(failed)(std::io::ErrorKind::BrokenPipe.into())),
    }
}

/// Makes this process end with the router that has started it, even while it does not read its commands.
pub fn end_with_parent() -> Result<(), ExampleError> {
    let set = set_parent_process_death_signal(Some(Signal::KILL));
    set.map_err(|error| ExampleError::io("prctl")(error.into()))
}

/// Reads the events of process `index` on a thread of its own, and passes them to `sender`; `None` after the
/// last.
pub fn listen<E: DeserializeOwned + Send + 'static>(
    index: usize,
    input: impl Read + Send + 'static,
    sender: Sender<(usize, Option<E>)>,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(input).lines().map_while(Result::ok) {
            let Ok(event) = serde_json::from_str(&line) else { break };
            if sender.send((index, Some(event))).is_err() {
                return;
            }
        }
        let _ = sender.send((index, None));
    });
}

impl Process {
    /// A process that gets its commands through `commands`; `child` is the process, if the router has started
    /// it.
    pub fn new(commands: impl Write + Send + 'static, child: Option<Child>) -> Process {
        Process { commands: Some(Box::new(commands)), silent: false, child }
    }

    /// True if no more events come from the process. A process that has died is silent only after its last
    /// events were handled.
    pub fn is_silent(&self) -> bool {
        self.silent
    }

    /// Notes whether no more events come from the process.
    pub fn set_silent(&mut self, silent: bool) {
        self.silent = silent;
    }

    /// True if the process can be given requests.
    pub fn serves(&self) -> bool {
        self.commands.is_some() && !self.silent
    }

    /// Sends the process a command. The reader of its events notices when the process is gone; a stopped
    /// process gets no command.
    pub fn send(&mut self, command: &impl Serialize) -> Result<(), ExampleError> {
        let Some(commands) = self.commands.as_mut().filter(|_| !self.silent) else { return Ok(()) };
        let mut line = serde_json::to_vec(command).map_err(ExampleError::Command)?;
        line.push(b'\n');
        if commands.write_all(&line).and_then(|()| commands.flush()).is_err() {
            self.commands = None;
        }
        Ok(())
    }

    /// Sends the process a signal, if the router has started it.
    pub fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            let _ = kill_process(Pid::from_child(child), signal);
        }
    }

    /// Kills the process, and waits until it is dead.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Not before: the end of its input is an order to stop in an orderly way.
        self.commands = None;
    }
}

impl Drop for Process {
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
