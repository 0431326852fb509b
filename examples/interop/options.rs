//! The command line.

use std::time::Duration;

use clap::{Args, Parser, ValueEnum};
use kv_transfer::TransferMode;

use crate::error::PairError;

/// One side of a pair with an unmodified vLLM or SGLang worker, over NIXL, for tests: the cache is filled by
/// a rule, and no model runs.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Options {
    /// Our side of the pair.
    #[arg(long, value_enum)]
    pub role: Role,

    #[command(flatten)]
    pub cache: CacheOptions,

    /// vLLM's transfer mode. SGLang always pushes.
    #[arg(long, value_enum, default_value = "pull")]
    pub mode: Mode,

    /// Port of vLLM's side channel on our side [default: any free port].
    #[arg(long, default_value_t = 0)]
    pub port: u16,

    /// The bootstrap server of SGLang's prefill side.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8998")]
    pub bootstrap: String,

    /// Run the bootstrap server at that address in this process.
    #[arg(long)]
    pub own_bootstrap: bool,

    /// Take commands over HTTP at this port of 127.0.0.1; 0 is any free port.
    #[arg(long, value_name = "PORT")]
    pub ctl: Option<u16>,

    /// The control of the peer. A decode side with this option drives the peer: it makes the runs, and ends.
    #[arg(long, value_name = "URL")]
    pub peer_ctl: Option<String>,

    /// Runs of the decode side: requests at once `x` blocks of each.
    #[arg(long, value_delimiter = ',', default_value = "1x1,10x4,100x1")]
    pub runs: Vec<Run>,

    /// How often each run is made.
    #[arg(long, default_value_t = 1)]
    pub reps: usize,

    /// Seconds until a request must have ended.
    #[arg(long, default_value_t = 30.0)]
    pub timeout: f64,

    /// Seconds for which pages of ended requests may be in quarantine before a run counts as failed.
    #[arg(long, default_value_t = 60.0)]
    pub settle: f64,

    /// Seconds for which a prefill side keeps pages of which no decode side has said anything.
    #[arg(long, default_value_t = 30.0)]
    pub lease: f64,

    /// Take the blocks of requests in an order of chance, by this seed. Without a seed, blocks follow each
    /// other.
    #[arg(long)]
    pub seed: Option<u64>,

    /// Parts in which a prefill side sends the blocks of a request, as a chunked prefill does.
    #[arg(long, default_value_t = 1)]
    pub chunks: usize,

    /// The name of our engine.
    #[arg(long, default_value = "kv-transfer")]
    pub engine_id: String,

    /// Seconds after which a side without a command ends by itself; 0 is never.
    #[arg(long, default_value_t = 0.0)]
    pub idle_exit: f64,
}

/// The sizes of the cache.
#[derive(Debug, Clone, Args)]
pub struct CacheOptions {
    /// The protocol of the peer.
    #[arg(long, value_enum)]
    pub dialect: Dialect,

    /// Layers of the model.
    #[arg(long, default_value_t = 4)]
    pub layers: usize,

    /// KV heads of the model, over all ranks.
    #[arg(long, default_value_t = 1)]
    pub heads: usize,

    /// Elements of a head; of a latent with --mla.
    #[arg(long, default_value_t = 128)]
    pub head_dim: usize,

    /// Tokens of a block.
    #[arg(long, default_value_t = 16)]
    pub block: usize,

    /// Tokens of a block of the peer [default: as ours].
    #[arg(long, default_value_t = 0)]
    pub peer_block: usize,

    /// Blocks of the cache of each rank.
    #[arg(long, default_value_t = 200)]
    pub blocks: usize,

    /// Our memory holds all layers of a block side by side, in place of all blocks of a layer.
    #[arg(long)]
    pub page_major: bool,

    /// Latents, which every rank holds whole, in place of keys and values.
    #[arg(long)]
    pub mla: bool,

    /// Tensor-parallel ranks on our side, all in this process.
    #[arg(long, default_value_t = 1)]
    pub tp: usize,

    /// Rows of SGLang's metadata buffers.
    #[arg(long, default_value_t = 256)]
    pub aux_rows: usize,

    /// Element type of the cache. vLLM's peers want `bf16` here.
    #[arg(long, default_value = "bf16")]
    pub dtype: String,

    /// The name of the model, as the peer has it.
    #[arg(long, default_value = "fake/model")]
    pub model: String,
}

/// The side of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Has KV for a peer.
    Prefill,
    /// Receives KV from a peer.
    Decode,
}

/// The protocol of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dialect {
    /// vLLM's NIXL connector.
    Vllm,
    /// SGLang's NIXL backend.
    Sglang,
}

/// Which side moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// The decode side reads.
    Pull,
    /// The prefill side writes.
    Push,
}

impl From<Mode> for TransferMode {
    fn from(mode: Mode) -> TransferMode {
        match mode {
            Mode::Pull => TransferMode::Pull,
            Mode::Push => TransferMode::Push,
        }
    }
}

/// Requests that come at once, and the blocks of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of requests.
    pub requests: usize,
    /// Blocks of the peer for each request.
    pub blocks: usize,
}

impl std::str::FromStr for Run {
    type Err = PairError;

    fn from_str(text: &str) -> Result<Run, PairError> {
        let run = text.split_once('x').and_then(|(requests, blocks)| {
            Some(Run { requests: requests.parse().ok()?, blocks: blocks.parse().ok().filter(|n| *n > 0)? })
        });
        let why = || "must be requests x blocks, such as 10x4".to_owned();
        run.ok_or_else(|| PairError::Option { option: "runs", got: text.to_owned(), why: why() })
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.requests, self.blocks)
    }
}

impl Options {
    /// Checks what clap does not.
    pub fn check(&self) -> Result<(), PairError> {
        let CacheOptions { dialect, heads, tp, mla, page_major, .. } = self.cache;
        let refuse = |option, got: usize, why: &str| {
            Err(PairError::Option { option, got: got.to_string(), why: why.to_owned() })
        };
        if tp == 0 || (!mla && !heads.is_multiple_of(tp)) {
            return refuse("tp", tp, &format!("must divide the {heads} heads"));
        }
        if page_major && dialect == Dialect::Sglang && self.role == Role::Decode {
            return refuse(
                "page-major",
                1,
                "SGLang's writers know only blocks of a layer that follow each other",
            );
        }
        let (ours, theirs) = (self.cache.block, self.cache.peer_block());
        if ours == 0 || !(ours.is_multiple_of(theirs) || theirs.is_multiple_of(ours)) {
            return refuse("block", ours, &format!("must divide {theirs}, or be a multiple"));
        }
        Ok(())
    }

    /// How long a request may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout.clamp(0.001, 1e6))
    }
}

impl CacheOptions {
    /// Tokens of a block of the peer.
    pub fn peer_block(&self) -> usize {
        if self.peer_block == 0 { self.block } else { self.peer_block }
    }

    /// Tokens of a block by which the fill counts: the peer knows only its own blocks.
    pub fn rule_block(&self) -> usize {
        self.peer_block()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A small cache.
    pub fn cache_options(dialect: Dialect) -> CacheOptions {
        CacheOptions {
            dialect,
            layers: 2,
            heads: 2,
            head_dim: 8,
            block: 4,
            peer_block: 0,
            blocks: 9,
            page_major: false,
            mla: false,
            tp: 1,
            aux_rows: 4,
            dtype: "bf16".to_owned(),
            model: String::new(),
        }
    }

    #[test]
    fn runs_are_requests_times_blocks_and_nothing_else() {
        assert_eq!("10x4".parse::<Run>().unwrap(), Run { requests: 10, blocks: 4 });
        for wrong in ["10", "x", "1x0", "1x", "-1x2"] {
            assert!(wrong.parse::<Run>().is_err(), "{wrong}");
        }
    }
}
