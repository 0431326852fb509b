//! tokio's readiness for servers that drain in batches.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;

/// The descriptor of a [`PollSet`](crate::PollSet) or an [`EngineGroup`](crate::EngineGroup), registered with the
/// tokio runtime in which the value was made. A scheduler that handles all changes of a step together awaits
/// [`drained`](Drained::drained); one that handles them one by one awaits [`changes`](crate::Manager::changes),
/// which needs no runtime. What is drained here is the poll set; a *worker* drains by
/// [`begin_drain`](crate::Manager::begin_drain).
///
/// ```
/// use kv_poll::tokio::Drained;
/// use kv_poll::Manager;
///
/// async fn schedule(manager: Manager) -> std::io::Result<()> {
///     let set = Drained::new(manager.poll_set())?;
///     let mut changes = Vec::new();
///     loop {
///         set.drained(|| manager.poll_set().drain(|change| changes.push(change))).await?;
///         for change in changes.drain(..) {
///             println!("{} is {}", change.session, change.poll);
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Drained(AsyncFd<OwnedFd>);

impl Drained {
    /// Registers the descriptor with the current tokio runtime. Fails outside of a runtime, if the process has no
    /// descriptor left, or if the runtime's driver refuses the descriptor.
    ///
    /// # Panics
    ///
    /// As everything of tokio that waits for a descriptor, panics in a runtime whose I/O driver is not enabled.
    #[allow(unsafe_code)]
    pub fn new(set: &impl AsFd) -> io::Result<Drained> {
        Handle::try_current().map_err(io::Error::other)?;
        // A descriptor of its own: the runtime forgets the descriptor when this value is dropped.
        let fd = set.as_fd().try_clone_to_owned()?;
        // SAFETY: an `OwnedFd` is open as long as it lives, always is the same descriptor, and belongs to the
        // `AsyncFd` from here on.
        Ok(Drained(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?))
    }

    /// Resolves with the number that `drain` returns once that is not 0. `drain` is called when the descriptor is
    /// readable. Dropping the future loses no change, because `drain` hands on what it takes out at once.
    pub async fn drained(&self, mut drain: impl FnMut() -> usize) -> io::Result<usize> {
        loop {
            let mut readable = self.0.readable().await?;
            match drain() {
                0 => readable.clear_ready(),
                changes => return Ok(changes),
            }
        }
    }
}
