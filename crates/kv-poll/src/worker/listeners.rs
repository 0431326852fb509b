//! Who is told what a worker's machine does: a [`Listener`], and whoever reads standard error if
//! [`Setup::verbose`](super::Setup::verbose) is set.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kv_core::WorkerId;
use kv_core::machine::Machine;
use kv_core::trace::{Event, What};

/// Is told each event of a worker's machine, as it happens.
///
/// It is called on the worker's thread, between an input of the machine and what follows from it: bytes,
/// frames and leases wait meanwhile. Whoever has more to do with an event than to count it passes it on to
/// another thread. One that panics is told nothing more.
///
/// ```
/// use std::sync::mpsc;
/// use kv_core::trace::KvWhat;
/// use kv_poll::worker::Listener;
///
/// let (sender, events) = mpsc::channel();
/// let listener = Listener::<KvWhat>::new(move |worker, event| {
///     // If nobody wants to know any more, nothing is to be done about it.
///     let _ = sender.send((worker.clone(), event.clone()));
/// });
/// # drop(listener);
/// # assert!(events.recv().is_err());
/// ```
pub struct Listener<W>(Arc<Hear<W>>);

type Hear<W> = dyn Fn(&WorkerId, &Event<W>) + Send + Sync;

impl<W> Listener<W> {
    /// A listener that calls this for each event, with the worker in which it happened.
    pub fn new(hear: impl Fn(&WorkerId, &Event<W>) + Send + Sync + 'static) -> Listener<W> {
        Listener(Arc::new(hear))
    }
}

impl<W> Clone for Listener<W> {
    fn clone(&self) -> Listener<W> {
        Listener(Arc::clone(&self.0))
    }
}

impl<W> fmt::Debug for Listener<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

/// Everybody who listens to one worker.
#[derive(Debug)]
pub(super) struct Listeners<W> {
    worker: WorkerId,
    listeners: Vec<Listener<W>>,
}

impl<W: What> Listeners<W> {
    pub(super) fn new(worker: WorkerId, verbose: bool, listener: Option<Listener<W>>) -> Listeners<W> {
        let verbose = verbose.then(|| Listener::new(print));
        Listeners { worker, listeners: verbose.into_iter().chain(listener).collect() }
    }

    /// True if anybody listens.
    pub(super) fn is_heard(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// Passes on what the machine has told since the last time.
    pub(super) fn pass_on<M: Machine<Trace = W>>(&mut self, machine: &mut M) {
        if !self.is_heard() {
            return;
        }
        while let Some(event) = machine.poll_trace() {
            // A listener that panics, as one that prints does where nobody reads, is told nothing more.
            let hears =
                |Listener(hear): &Listener<W>| catch_unwind(AssertUnwindSafe(|| hear(&self.worker, &event)));
            self.listeners.retain(|listener| hears(listener).is_ok());
        }
        if !self.is_heard() {
            machine.listen(false);
        }
    }
}

/// One line on standard error.
#[allow(clippy::print_stderr)]
fn print<W: What>(worker: &WorkerId, event: &Event<W>) {
    eprintln!("{worker}: {event}");
}
