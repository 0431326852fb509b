//! [`HostThread`]: a server that runs on a thread of its own.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use kv_host::OsError;

use super::error::HostError;
use super::server::{HostGauges, HostServer};
use super::watch::{Ready, Stop};

/// A [`HostServer`] that serves on a thread of its own until the value is dropped.
#[derive(Debug)]
#[must_use = "the server stops when this value is dropped"]
pub struct HostThread {
    stop: Arc<Stop>,
    gauges: Arc<Mutex<HostGauges>>,
    thread: Option<JoinHandle<()>>,
}

impl HostServer {
    /// Starts a thread that serves until the returned value is dropped.
    pub fn spawn(mut self) -> Result<HostThread, HostError> {
        let stop = Arc::new(Stop::new()?);
        let gauges = Arc::new(Mutex::new(self.gauges()));
        self.watch.add(&*stop, Ready::Wake)?;
        let (asked, seen) = (Arc::clone(&stop), Arc::clone(&gauges));
        let serve = move || {
            // A turn fails only when the kernel's set of descriptors is broken: there is nothing to serve with.
            while !asked.is_asked() && self.turn(None).is_ok() {
                *seen.lock().unwrap_or_else(PoisonError::into_inner) = self.gauges();
            }
        };
        let builder = std::thread::Builder::new().name("kv-ec-host".to_owned());
        let thread = builder.spawn(serve).map_err(|error| OsError::new("clone", error))?;
        Ok(HostThread { stop, gauges, thread: Some(thread) })
    }
}

impl HostThread {
    /// What the server holds for its ranks, as of the last turn of its thread.
    pub fn gauges(&self) -> HostGauges {
        *self.gauges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HostThread {
    fn drop(&mut self) {
        self.stop.ask();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
