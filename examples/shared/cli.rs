//! Options that more than one example has.

use std::time::Duration;

use clap::{Args, ValueEnum};
use kv_transfer::bootstrap::ClientConfig;
use kv_transfer::proto::Timing;
use kv_transfer::{Lease, TransferMode};
use serde::{Deserialize, Serialize};

use super::decode::RESERVED_TOKENS;
use super::error::ExampleError;
use super::prompts::{self, Workload};
use super::rank::finish_within;
use super::router::Plan;

/// How long the transfer of a request may take, unless it is said.
const DEADLINE: Duration = Duration::from_secs(180);

/// Where the bootstrap server of the two-terminal examples is; SGLang's port.
pub const DEFAULT_BOOTSTRAP: &str = "127.0.0.1:8998";
/// Where the prefill rank of the two-terminal examples takes requests.
pub const DEFAULT_REQUESTS: &str = "127.0.0.1:8997";

/// Which transport moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// The embedded transport, for processes on one host.
    Local,
    /// A NIXL agent.
    Nixl,
}

/// Who starts the data operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Prefill ranks write into the pages that decode ranks registered.
    Push,
    /// Decode ranks read the pages that prefill ranks keep for them under a lease.
    Pull,
    /// Whichever of the two the transports say is better.
    Auto,
}

/// How long everything waits before it gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pace {
    /// As a service would: seconds to minutes.
    Normal,
    /// A second at most, so that whatever dies or stops is known soon.
    Fast,
}

impl Pace {
    /// This long, but in haste a second at most.
    pub fn at_most_a_second(self, normal: Duration) -> Duration {
        if self == Pace::Fast { normal.min(Duration::from_secs(1)) } else { normal }
    }

    /// The timing of workers.
    pub fn timing(self) -> Timing {
        let millis = Duration::from_millis;
        match self {
            Pace::Normal => Timing::default(),
            Pace::Fast => Timing {
                session_deadline: millis(1000),
                retry_first: millis(20),
                retry_max: millis(200),
                keepalive: millis(200),
                peer_timeout: millis(800),
                write_permission: millis(1000),
                lookup_retry: millis(20),
                failed_room_ttl: millis(1000),
                kv_lease_duration: millis(1000),
            },
        }
    }

    /// The timing of their registration with the bootstrap server.
    pub fn client(self) -> ClientConfig {
        let config = ClientConfig::default();
        ClientConfig {
            lease: self.at_most_a_second(config.lease),
            request_timeout: self.at_most_a_second(config.request_timeout),
            retry_max: self.at_most_a_second(config.retry_max),
            ..config
        }
    }
}

impl HandOver {
    /// For how long prefill ranks keep pages.
    pub fn lease(&self) -> Lease {
        Lease::Renewable(Duration::from_secs(self.lease_seconds.unwrap_or(match self.timing {
            Pace::Normal => 30,
            Pace::Fast => 1,
        })))
    }

    /// For how long decode ranks keep the KV of a conversation.
    pub fn kept(&self) -> Lease {
        Lease::Fixed(Duration::from_secs(self.kept_seconds.unwrap_or(match self.timing {
            Pace::Normal => 480,
            Pace::Fast => 1,
        })))
    }
}

impl From<Mode> for TransferMode {
    fn from(mode: Mode) -> TransferMode {
        match mode {
            Mode::Push => TransferMode::Push,
            Mode::Pull => TransferMode::Pull,
            Mode::Auto => TransferMode::Auto,
        }
    }
}

/// How KV is handed over.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct HandOver {
    /// Who starts the data operations.
    #[arg(long, value_enum, default_value = "push")]
    pub mode: Mode,

    /// Pull mode: seconds that a prefill rank keeps pages after the last heartbeat of their reader
    /// [default: 30, with --timing fast 1].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub lease_seconds: Option<u64>,

    /// Seconds that a decode rank keeps the KV of a conversation for the next turn [default: 480, with
    /// --timing fast 1].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub kept_seconds: Option<u64>,

    /// How long everything waits before it gives up.
    #[arg(long, value_enum, default_value = "normal")]
    pub timing: Pace,
}

/// How pages lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(clippy::enum_variant_names)] // The names that the field uses.
pub enum PageLayout {
    /// One region for the keys and one for the values of each layer: a page is many small pieces.
    LayerMajor,
    /// One region, in which a page holds all layers: a page is one piece.
    PageMajor,
    /// As layer-major, with the tokens of a head side by side: a rank that wants some of the heads gets
    /// one piece of each.
    HeadMajor,
}

/// Over how many ranks an engine spreads the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args, Serialize, Deserialize)]
pub struct Parallelism {
    /// Tensor-parallel ranks, each with a share of the heads.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tp: u32,

    /// Pipeline stages, each with a share of the layers.
    #[arg(long, default_value_t = 1, value_name = "STAGES", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub pp: u32,

    /// Prefill-context-parallel ranks: all have the whole cache at the end, and each sends a range of its
    /// pages.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cp: u32,

    /// Decode-context-parallel ranks, out of the tensor-parallel ones: pages are dealt to them in turn
    /// (latent attention).
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub dcp: u32,
}

impl Parallelism {
    /// One rank.
    #[cfg(test)]
    pub const ONE: Parallelism = Parallelism { tp: 1, pp: 1, cp: 1, dcp: 1 };
}

/// How a rank holds its cache.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct CacheOptions {
    /// The transport that moves the bytes.
    #[arg(long, value_enum, default_value = "local")]
    pub transport: TransportKind,

    /// How pages lie in memory.
    #[arg(long, value_enum, default_value = "layer-major")]
    pub layout: PageLayout,

    /// Tokens in a page.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub page_size: u32,

    /// Pages in the cache of each rank.
    #[arg(long, default_value_t = 512, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub pages: u32,
}

/// How a prefill rank computes.
#[derive(Debug, Clone, Args)]
pub struct PrefillOptions {
    /// Tokens of a prompt that a prefill rank computes before it sends their pages.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk_tokens: u32,

    /// Send each layer of a chunk while the next one is computed, instead of whole chunks.
    #[arg(long)]
    pub layer_wise: bool,
}

/// The requests.
#[derive(Debug, Clone, Args)]
pub struct WorkloadOptions {
    /// How many conversations: requests, if they have one turn.
    #[arg(long, default_value_t = 12, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub requests: u32,

    /// Tokens in a prompt, about.
    #[arg(long, default_value_t = 200, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub prompt_tokens: u32,

    /// Tokens to generate for each request.
    #[arg(long, default_value_t = 16, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_new_tokens: u32,

    /// Turns of each conversation; the second prompt is the first, its answer and some new tokens.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub turns: u32,

    /// New tokens in each turn after the first.
    #[arg(long, default_value_t = 24, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub follow_up_tokens: u32,

    /// Seconds that the transfer of a request may take, from its arrival at the ranks; 30 at least if
    /// it is routed again [default: 180, with --timing fast 1].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: Option<u64>,

    /// Print one JSON object instead of progress and table.
    #[arg(long)]
    pub json: bool,
}

impl WorkloadOptions {
    /// What is said.
    pub fn prompts(&self) -> Workload {
        Workload {
            count: self.requests as usize,
            tokens: self.prompt_tokens as usize,
            turns: self.turns as usize,
            follow_up: self.follow_up_tokens as usize,
        }
    }

    /// How many answers there will be.
    pub fn answers(&self) -> usize {
        (self.requests * self.turns) as usize
    }

    /// What a router is to do with them.
    pub fn plan(&self, hand_over: &HandOver, bootstrap: String) -> Plan {
        let pace = hand_over.timing;
        let deadline = self.deadline.map_or(pace.at_most_a_second(DEADLINE), Duration::from_secs);
        Plan {
            mode: hand_over.mode,
            bootstrap,
            max_new_tokens: self.max_new_tokens as usize,
            deadline,
            lease: hand_over.lease().duration(),
            finish_within: finish_within(pace),
            bury_after: match pace {
                Pace::Normal => Duration::from_secs(60),
                Pace::Fast => Duration::from_secs(4),
            },
            harm: None,
        }
    }

    /// Fails early if the requests do not fit into the cache of a rank.
    pub fn check(&self, cache: &CacheOptions) -> Result<(), ExampleError> {
        let prompt = prompts::longest(self.prompt_tokens as usize);
        let earlier = (self.turns - 1) as usize * (self.max_new_tokens + self.follow_up_tokens) as usize;
        let tokens = prompt + earlier + self.max_new_tokens.max(RESERVED_TOKENS) as usize;
        // A page more, because prompt and continuation are rounded up apart.
        let needed = tokens.div_ceil(cache.page_size as usize) + 1;
        if needed > cache.pages as usize {
            Err(ExampleError::CacheTooSmall { needed, pages: cache.pages })
        } else {
            Ok(())
        }
    }
}
