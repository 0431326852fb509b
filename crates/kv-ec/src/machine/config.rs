//! The settings of the machine.

use std::time::Duration;

use kv_core::{KV_LEASE_DURATION, TransferMode};

/// How a machine answers peers, and how it fetches from them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MachineConfig {
    /// The text that must be equal at producer and consumer, such as
    /// [`Compatibility::hash`](crate::Compatibility::hash); at most 512 bytes.
    pub compatibility: String,
    /// Which side moves the bytes of entries that this worker fetches, unless the [`Want`](crate::Want) says
    /// otherwise (default [`Auto`](TransferMode::Auto)).
    pub mode: TransferMode,
    /// How long a fetch may take, unless the [`Want`](crate::Want) says otherwise (default 60 s, as in vLLM).
    pub budget: Duration,
    /// How long one try at one producer may take, within the budget (default 10 s): longer than the transfer of
    /// the largest entry takes, because the next try begins from the start. If several sessions name different
    /// producers for the same entry, the next try is at the next producer.
    pub try_limit: Duration,
    /// The pause after the first try that failed for a reason that may pass, such as an entry that is not ready.
    /// The pause doubles after each further try, up to `retry_max` (default 5 ms; shorter than 100 µs counts as
    /// 100 µs).
    pub retry_first: Duration,
    /// The longest pause between two tries (default 200 ms).
    pub retry_max: Duration,
    /// How long an entry stays pinned for a peer that reads it; the peer's heartbeats renew the lease (default
    /// 30 s).
    pub lease: Duration,
    /// How long the answer to one request of a peer may take, until the bytes have moved (default 300 s).
    pub answer_deadline: Duration,
    /// Most requests of peers that are answered at once. Further requests are refused as
    /// [`Overloaded`](kv_core::PeerCause::Overloaded), and their peers ask again (default 1024). Once
    /// half of so many are answered, a peer of which an eighth are answered is refused, too.
    pub max_answers: usize,
}

impl MachineConfig {
    /// The default settings with this [`compatibility`](MachineConfig::compatibility) text.
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
