//! When pages came back to a rank, watched by a thread, because the scheduler only looks between two forward
//! passes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kv_transfer::EngineGroup;

/// How often a worker's gauges are read.
const EVERY: Duration = Duration::from_millis(2);

/// Watches how many pages the sessions of all ranks hold. Dropping it ends the watch.
pub struct HeldPages(Arc<Mutex<Option<Instant>>>);

impl HeldPages {
    /// Starts to watch the sessions of these ranks.
    pub fn watch(ranks: EngineGroup) -> HeldPages {
        let dropped = Arc::new(Mutex::new(None));
        let watched = Arc::downgrade(&dropped);
        std::thread::spawn(move || {
            let mut before: usize = 0;
            while let Some(dropped) = watched.upgrade() {
                let gauges = ranks.managers().iter().map(kv_transfer::Manager::gauges);
                let held = gauges.map(|gauges| gauges.pages_in_transfer() + gauges.pages_quarantined()).sum();
                if held < before {
                    *dropped.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                }
                before = held;
                std::thread::sleep(EVERY);
            }
        });
        HeldPages(dropped)
    }

    /// The last time at which pages came back.
    pub fn last_drop(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
