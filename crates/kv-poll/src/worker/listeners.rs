//! Who is told what a worker's machine does: [`Listener`]s. A worker prints nothing by itself; a listener
//! that prints is one that the server asks for.

use std::fmt;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kv_core::WorkerId;
use kv_core::machine::Machine;
use kv_core::trace::{Event, What};

/// Is told each event of a worker's machine, as it happens.
///
/// A listener is called on the worker's thread, between an input of the machine and what follows from that
/// input: bytes, frames and leases wait meanwhile. A listener that has more to do with an event than to count
/// it passes it on to another thread. No lock is held during the call. A listener that panics is told nothing
/// more.
///
/// ```
/// use std::sync::mpsc;
/// use kv_core::trace::KvWhat;
/// use kv_poll::worker::Listener;
///
/// let (sender, events) = mpsc::channel();
/// let listener = Listener::<KvWhat>::new(move |worker, event| {
///     // If the other end is gone, the event is of interest to nobody.
///     let _ = sender.send((worker.clone(), event.clone()));
/// });
/// # drop(listener);
/// # assert!(events.recv().is_err());
/// ```
pub struct Listener<W>(Arc<Hear<W>>);

type Hear<W> = dyn Fn(&WorkerId, &Event<W>) + Send + Sync;

impl<W> Listener<W> {
    /// A listener that calls `hear` for each event, with the worker in which the event happened.
    pub fn new(hear: impl Fn(&WorkerId, &Event<W>) + Send + Sync + 'static) -> Listener<W> {
        Listener(Arc::new(hear))
    }
}

impl<W: 'static> Listener<W> {
    /// A listener that tells each event to this listener and then to `other`: for settings that take one
    /// listener. A panic of either ends both.
    pub fn and(self, other: Listener<W>) -> Listener<W> {
        Listener::new(move |worker, event| {
            self.tell(worker, event);
            other.tell(worker, event);
        })
    }

    /// Tells the listener an event, as the worker does: for listeners that pass events on, and for recorded events.
    pub fn tell(&self, worker: &WorkerId, event: &Event<W>) {
        (self.0)(worker, event);
    }
}

impl<W: What> Listener<W> {
    /// A listener that writes each event as one line, `engine/rank: event`, to standard error. Lines that
    /// cannot be written are lost.
    ///
    /// The write is made on the worker's thread and waits for the reader of standard error: for looking at
    /// one worker, not for production.
    pub fn stderr() -> Listener<W> {
        Listener::new(|worker, event| {
            let line = format!("{worker}: {event}\n");
            let _ = io::stderr().write_all(line.as_bytes());
        })
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

/// All listeners of one worker.
#[derive(Debug)]
pub(super) struct Listeners<W> {
    worker: WorkerId,
    listeners: Vec<Listener<W>>,
}

impl<W: What> Listeners<W> {
    pub(super) fn new(worker: WorkerId, listeners: Vec<Listener<W>>) -> Listeners<W> {
        Listeners { worker, listeners }
    }

    /// True if there is a listener left.
    pub(super) fn is_heard(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// Passes on what the machine has told since the last time.
    pub(super) fn pass_on<M: Machine<Trace = W>>(&mut self, machine: &mut M) {
        if !self.is_heard() {
            return;
        }
        while let Some(event) = machine.poll_trace() {
            let hears =
                |Listener(hear): &Listener<W>| catch_unwind(AssertUnwindSafe(|| hear(&self.worker, &event)));
            self.listeners.retain(|listener| hears(listener).is_ok());
        }
        if !self.is_heard() {
            machine.listen(false);
        }
    }
}
