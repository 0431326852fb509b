//! The settings of the machine.

use std::time::Duration;

use kv_core::{KV_LEASE_DURATION, TransferMode};

/// How a machine answers peers and asks them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MachineConfig {
    /// The text that both sides must have alike: [`Compatibility`](crate::Compatibility) as a hash.
    pub compatibility: String,
    /// Which side moves the bytes of entries that this worker wants, unless the [`Want`](crate::Want) says
    /// otherwise.
    pub mode: TransferMode,
    /// How long an entry may take, unless the [`Want`](crate::Want) says otherwise (default 60 s, as in vLLM).
    pub budget: Duration,
    /// How long one try at one producer may take, within the budget (default 10 s). The next try is at the next
    /// producer, if sessions name several for the same entry.
    pub try_limit: Duration,
    /// The pause before the first repetition of a try that failed for a passing reason; doubles up to
    /// `retry_max` (default 5 ms).
    pub retry_first: Duration,
    /// The longest pause between two tries (default 200 ms).
    pub retry_max: Duration,
    /// How long an entry stays pinned for a peer that reads it, unless the peer extends the lease (default 30 s).
    pub lease: Duration,
    /// How long one answer may take (default 300 s).
    pub answer_deadline: Duration,
    /// Most answers under way at once; further peers are told to ask again (default 1024).
    pub max_answers: usize,
}

impl MachineConfig {
    /// The defaults, with this compatibility text.
    pub fn new(compatibility: impl Into<String>) -> MachineConfig {
        MachineConfig {
            compatibility: compatibility.into(),
            mode: TransferMode::Auto,
            budget: Duration::from_secs(60),
            try_limit: Duration::from_secs(10),
            retry_first: Duration::from_millis(5),
            retry_max: Duration::from_millis(200),
            lease: KV_LEASE_DURATION,
            answer_deadline: Duration::from_secs(300),
            max_answers: 1024,
        }
    }

    /// The same with some fields changed: `MachineConfig::new("…").with(|config| config.max_answers = 8)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
