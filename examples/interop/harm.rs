//! What is done to a process in the middle of a run.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::error::PairError;
use crate::fields;

/// A signal for a process, once so many sessions have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Harm {
    /// The process.
    pid: Pid,
    signal: Signal,
    /// How many sessions must have ended before.
    pub after: usize,
}

impl Harm {
    /// What the key `harm` of a command says: `{"pid", "signal": "KILL" | "STOP" | "CONT", "after"}`. The
    /// process is this one if `pid` is missing.
    pub fn of(command: &Value) -> Result<Option<Harm>, PairError> {
        let Some(harm) = command.get("harm") else { return Ok(None) };
        let refuse = |field| PairError::json("harm", field, harm);
        let pid = match harm.get("pid") {
            Some(pid) => {
                pid.as_i64().and_then(|pid| Pid::from_raw(pid as i32)).ok_or_else(|| refuse("pid"))?
            }
            None => rustix::process::getpid(),
        };
        let signal = match fields::text("harm", harm, "signal")? {
            "KILL" => Signal::KILL,
            "STOP" => Signal::STOP,
            "CONT" => Signal::CONT,
            _ => return Err(refuse("signal")),
        };
        let after = harm.get("after").and_then(Value::as_u64).unwrap_or(0) as usize;
        Ok(Some(Harm { pid, signal, after }))
    }

    /// Sends the signal.
    pub fn inflict(self) {
        // The process may be gone already.
        let _ = kill_process(self.pid, self.signal);
    }
}
