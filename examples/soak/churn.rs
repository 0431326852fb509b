//! A thread that maps, touches and unmaps memory all the time, beside the transfers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kv_transfer::local::Arena;

use super::side::Error;

/// The thread that maps and unmaps memory.
pub struct Churn {
    shared: Arc<Shared>,
    thread: JoinHandle<Result<(), Error>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Locked while anything is mapped.
    mapped: Mutex<()>,
}

impl Churn {
    pub fn start() -> Result<Churn, Error> {
        let shared = Arc::new(Shared::default());
        let ours = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("churn".to_owned()).spawn(move || churn(&ours))?;
        Ok(Churn { shared, thread })
    }

    /// Calls `look` while nothing is mapped.
    pub fn at_rest<T>(&self, look: impl FnOnce() -> T) -> T {
        let _nothing = self.shared.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        look()
    }

    pub fn stop(self) -> Result<(), Error> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| "the mapping thread panicked")?
    }
}

fn churn(shared: &Shared) -> Result<(), Error> {
    let mut size = 1_usize;
    while !shared.stop.load(Ordering::Relaxed) {
        {
            let _mapped = shared.mapped.lock().unwrap_or_else(PoisonError::into_inner);
            // Of the kernel, shared, and by way of the allocator, which maps what is so large.
            size = size * 5 % 127;
            let arena = Arena::new((size + 1) << 14)?;
            arena.write(0, &vec![1; arena.len()])?;
            std::hint::black_box(vec![2_u8; 36 << 20].first());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
