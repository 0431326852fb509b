//! Command-line options that several examples share. The doc comments of fields are the texts of `--help`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use kv_transfer::Timing;
use kv_transfer::bootstrap::ClientConfig;
use kv_transfer::{Lease, TransferMode};
use serde::{Deserialize, Serialize};

use super::decode::RESERVED_TOKENS;
use super::error::ExampleError;
use super::rank::finish_within;
use super::router::Plan;
use super::workload::{self, Workload};

/// How long the transfer of a request may take, unless `--deadline` says otherwise.
const DEADLINE: Duration = Duration::from_secs(180);

/// The address of the bootstrap server of the examples `prefill` and `decode`, with the port that SGLang uses.
pub const DEFAULT_BOOTSTRAP: &str = "127.0.0.1:8998";
/// The address at which the example `prefill` takes requests.
pub const DEFAULT_REQUESTS: &str = "127.0.0.1:8997";

/// The transport that moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// kv-local: shared memory and copies between processes of one host. Needs nothing installed.
    Local,
    /// kv-tcp: TCP between hosts, or within one. Needs nothing installed. The variable KV_TCP_ADDRESS has the address
    /// to listen on, with port 0 (default: 127.0.0.1:0), and KV_TCP_ADVERTISE those by which other hosts reach this one
    /// where they are others.
    Tcp,
    /// NVIDIA NIXL: RDMA, shared memory, TCP. Needs a build with --features nixl.
    Nixl,
    /// All that this build and this host have: local; nixl, or ucx where NIXL is missing; fabric, only where
    /// KV_FABRIC_PROVIDER is set; and tcp. The decode side takes for each peer the first that both sides have and that
    /// both writes and reads, and the next one where that fails. Peers on other hosts need KV_TCP_ADDRESS.
    Auto,
    /// kv-ucx: UCX without NIXL: RDMA, TCP. Needs a build with --features ucx. The variable UCX_NET_DEVICES has the
    /// devices (default: all).
    Ucx,
    /// kv-fabric: libfabric's providers: TCP; EFA, RDMA and Slingshot, which were not run. Needs a build with --features
    /// fabric. The variable KV_FABRIC_PROVIDER has the provider (default: tcp;ofi_rxm), KV_FABRIC_DEVICE its devices,
    /// separated by commas, and KV_FABRIC_ADDRESS the addresses by which other hosts reach this one over them, without
    /// ports (default: 127.0.0.1, or the provider's choice if one of the other variables is there). KV_FABRIC_GPU has the
    /// PCI address of a GPU, whose nearest devices are taken if none are named.
    Fabric,
}

/// Which side moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Prefill ranks write into pages that decode ranks have registered.
    Push,
    /// Decode ranks read pages that prefill ranks keep for them under a lease.
    Pull,
    /// Push or pull, whichever is better over the transport between the two ranks.
    Auto,
}

/// How long timeouts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pace {
    /// Timeouts of a service: seconds to minutes.
    Normal,
    /// Timeouts of a second at most, so that a rank that dies or stops is noticed soon.
    Fast,
}

impl Pace {
    /// The duration `normal`, or a second if that is less and the pace is fast.
    pub fn at_most_a_second(self, normal: Duration) -> Duration {
        if self == Pace::Fast { normal.min(Duration::from_secs(1)) } else { normal }
    }

    /// The timeouts of workers at this pace.
    pub fn timing(self) -> Timing {
        let millis = Duration::from_millis;
        match self {
            Pace::Normal => Timing::default(),
            Pace::Fast => Timing::default().with(|timing| {
                timing.session_deadline = millis(1000);
                timing.retry_first = millis(20);
                timing.retry_max = millis(200);
                timing.keepalive = millis(200);
                timing.peer_timeout = millis(800);
                timing.write_permission = millis(1000);
                timing.lookup_retry = millis(20);
                timing.failed_room_ttl = millis(1000);
                timing.kv_lease_duration = millis(1000);
            }),
        }
    }

    /// The timeouts of a worker's registration with the bootstrap server at this pace.
    pub fn client(self) -> ClientConfig {
        ClientConfig::default().with(|config| {
            config.lease = self.at_most_a_second(config.lease);
            config.request_timeout = self.at_most_a_second(config.request_timeout);
            config.retry_max = self.at_most_a_second(config.retry_max);
        })
    }
}

impl HandOver {
    /// How long prefill ranks keep the pages of a prompt for its decode rank.
    pub fn lease(&self) -> Lease {
        Lease::Renewable(Duration::from_secs(self.lease_seconds.unwrap_or(match self.timing {
            Pace::Normal => 30,
            Pace::Fast => 1,
        })))
    }

    /// How long decode ranks keep the KV of a chat for its next turn.
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

/// How KV is handed over from one side to the other.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct HandOver {
    /// Which side moves the bytes.
    #[arg(long, value_enum, default_value = "push", default_value_if("dialect", "vllm", "pull"))]
    pub mode: Mode,

    /// With --mode pull: the duration of the lease under which a prefill rank keeps pages for a decode rank
    /// that has not read them; heartbeats of the decode rank renew it [default: 30, or 1 with --timing fast].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub lease_seconds: Option<u64>,

    /// With --turns: how long a decode rank keeps the KV of a chat for the next turn [default: 480,
    /// or 1 with --timing fast].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub kept_seconds: Option<u64>,

    /// How long timeouts are.
    #[arg(long, value_enum, default_value = "normal")]
    pub timing: Pace,
}

/// How pages lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(clippy::enum_variant_names)] // The names that the field uses.
pub enum PageLayout {
    /// Two regions for each layer, one for keys and one for values, so that a page is in many small pieces.
    LayerMajor,
    /// One region, in which a page holds all layers in one piece.
    PageMajor,
    /// As layer-major, with the tokens of each head side by side, so that a rank that receives only some of the
    /// heads gets each head of a page in one piece.
    HeadMajor,
    /// As vLLM keeps pages: one region for each layer, in which a page holds its heads, each head its tokens, and
    /// each token its key and its value side by side.
    Packed,
}

/// Over how many ranks an engine spreads the model. The ranks run in one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args, Serialize, Deserialize)]
pub struct Parallelism {
    /// Tensor-parallel ranks, each with a share of the heads.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tp: u32,

    /// Pipeline stages, each with a share of the layers.
    #[arg(long, default_value_t = 1, value_name = "STAGES", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub pp: u32,

    /// Prefill-context-parallel (PCP) ranks: all of them hold the pages of a prompt, and each sends a range of
    /// the pages.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cp: u32,

    /// Decode-context-parallel (DCP) ranks: that many of the tensor-parallel ranks hold the pages in turn, one
    /// page each. Needs --mla.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub dcp: u32,
}

impl Parallelism {
    /// An engine of one rank.
    #[cfg(test)]
    pub const ONE: Parallelism = Parallelism { tp: 1, pp: 1, cp: 1, dcp: 1 };
}

/// The cache of a rank, and its transport. The defaults that depend on `--dialect` hold where there is that option:
/// in `prefill` and `decode`.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct CacheOptions {
    /// The transport that moves the bytes.
    #[arg(long, value_enum, default_value = "local", default_value_ifs = [
        ("dialect", "vllm", "nixl"),
        ("dialect", "sglang", "nixl"),
    ])]
    pub transport: TransportKind,

    /// How pages lie in memory.
    #[arg(long, value_enum, default_value = "layer-major", default_value_if("dialect", "vllm", "packed"))]
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
    /// How many tokens of a prompt a prefill rank computes at a time, before it sends their pages.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk_tokens: u32,

    /// Send each layer of a chunk while the next layer is computed, instead of sending whole chunks.
    #[arg(long)]
    pub layer_wise: bool,
}

/// The requests of a run.
#[derive(Debug, Clone, Args)]
pub struct WorkloadOptions {
    /// How many chats to run; each is one request, or several with --turns.
    #[arg(long, default_value_t = 12, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub requests: u32,

    /// Roughly how many tokens each prompt has.
    #[arg(long, default_value_t = 200, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub prompt_tokens: u32,

    /// How many tokens to generate for each request.
    #[arg(long, default_value_t = 16, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_new_tokens: u32,

    /// How many turns each chat has. The prompt of a turn is the prompt of the turn before, its answer,
    /// and some new tokens.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub turns: u32,

    /// How many new tokens the prompt of each turn after the first has.
    #[arg(long, default_value_t = 24, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub follow_up_tokens: u32,

    /// How long the transfer of a request may take after the request has reached its ranks. A request that is
    /// routed again gets at least 30 s [default: 180, or 1 with --timing fast].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: Option<u64>,

    /// Print the report as one JSON object, and no progress.
    #[arg(long)]
    pub json: bool,
}

impl WorkloadOptions {
    /// The workload that the options ask for.
    pub fn prompts(&self) -> Workload {
        Workload {
            count: self.requests as usize,
            tokens: self.prompt_tokens as usize,
            turns: self.turns as usize,
            follow_up: self.follow_up_tokens as usize,
        }
    }

    /// The number of answers that the run will have: one for each turn of each chat.
    pub fn answers(&self) -> usize {
        (self.requests * self.turns) as usize
    }

    /// The plan of the router for these requests.
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
        let prompt = workload::longest(self.prompt_tokens as usize);
        let earlier = (self.turns - 1) as usize * (self.max_new_tokens + self.follow_up_tokens) as usize;
        let tokens = prompt + earlier + self.max_new_tokens.max(RESERVED_TOKENS) as usize;
        // One page more, because prompt and continuation are rounded up to pages separately.
        let needed = tokens.div_ceil(cache.page_size as usize) + 1;
        if needed > cache.pages as usize {
            Err(ExampleError::CacheTooSmall { needed, pages: cache.pages })
        } else {
            Ok(())
        }
    }
}
