//! What the workers of a process do, as numbers (`/metrics`, see `docs/METRICS.md`) and, with `--log`, as lines.
//!
//! The numbers are counted on the threads of the workers. Lines are written by a thread of their own, because a
//! terminal may be slow: the workers only put events into a queue. A line has the time at which it is written.

use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_observe::{Metrics, Queued, queued};
use kv_transfer::ways::Standing;
use kv_transfer::{EngineGroup, KvManager, Listener};
use tracing_subscriber::EnvFilter;

/// Events of a worker that wait to be written. Should there be more, the next line says how many were lost.
const QUEUED: usize = 16_384;
/// How often waiting events are written.
const WRITE_EVERY: Duration = Duration::from_millis(10);

/// Reads a filter of `tracing-subscriber`, so that a wrong one is refused with the command line.
pub fn parse_filter(text: &str) -> Result<String, String> {
    EnvFilter::builder().parse(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Writes the lines that pass this filter to standard error.
pub fn write_lines(filter: &str) {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // Refused only if there is a subscriber already.
    let _ = subscriber.try_init();
}

/// The observer of one process's workers.
pub struct Observer {
    metrics: Metrics,
    /// The queues of events that become lines; `None` if nobody wants lines.
    lines: Option<Vec<Queued>>,
}

impl Observer {
    /// An observer that counts in the process's recorder, which is installed, and writes lines if there is a filter.
    pub fn new(filter: Option<&str>) -> Observer {
        let lines = filter.map(|filter| {
            write_lines(filter);
            Vec::new()
        });
        Observer { metrics: Metrics::global(), lines }
    }

    /// The listener of one more worker.
    pub fn listener(&mut self) -> Listener {
        let counting = self.metrics.listener();
        match &mut self.lines {
            None => counting,
            Some(lines) => {
                let (listener, end) = queued(QUEUED);
                lines.push(end);
                counting.and(listener)
            }
        }
    }

    /// Begins to write lines.
    pub fn start(self) -> Observing {
        let lines = self.lines.map(|lines| Arc::new(Mutex::new(lines)));
        if let Some(lines) = &lines {
            let lines = Arc::clone(lines);
            std::thread::spawn(move || {
                loop {
                    if write_waiting(&lines) == 0 {
                        std::thread::sleep(WRITE_EVERY);
                    }
                }
            });
        }
        Observing { metrics: self.metrics, lines }
    }
}

/// The observation of workers that run.
pub struct Observing {
    metrics: Metrics,
    lines: Option<Arc<Mutex<Vec<Queued>>>>,
}

impl Observing {
    /// Takes the numbers that every worker of an engine has now. `standings` are those of the workers' transports, in the
    /// same order.
    pub fn sample(&self, engine: &EngineGroup, standings: &[Standing]) {
        for (worker, standing) in engine.managers().iter().zip(standings) {
            self.metrics.sample(worker.args().worker()).manager(worker).peers(standing.peers());
        }
    }

    /// Writes all lines that wait: before the process ends.
    pub fn flush(&self) {
        self.lines.as_ref().map(|lines| write_waiting(lines));
    }
}

fn write_waiting(lines: &Mutex<Vec<Queued>>) -> usize {
    lines.lock().unwrap_or_else(PoisonError::into_inner).iter_mut().map(Queued::drain).sum()
}
