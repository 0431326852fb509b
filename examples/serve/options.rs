//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use kv_examples::cli::{CacheOptions, DEFAULT_BOOTSTRAP, HandOver, Mode, Pace, PageLayout, TransportKind};
use kv_examples::error::ExampleError;
use kv_examples::loading::ModelOptions;

use crate::engine::{RankSpec, Side};
use crate::load::LoadOptions;
use crate::observe::parse_filter;
use crate::openai::{Limits, Vocabulary};

/// An OpenAI-compatible server whose prefill and decode processes hand KV caches over. Without a command: the router
/// and all processes.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Options {
    /// Run a part of the service, or a load on it.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The options of the whole service.
    #[command(flatten)]
    pub service: ServiceOptions,
}

/// What to run instead of the whole service.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run one prefill process, behind a router of vLLM or llm-d. Needs a bootstrap server: example `bootstrap`.
    Prefill(AloneOptions),
    /// Run one decode process, behind a router of vLLM or llm-d.
    Decode(AloneOptions),
    /// Run many requests, and compare every token with a run of the same model in one process.
    Load(LoadOptions),
    /// For the router's own use: one process of the service, described as JSON.
    #[command(hide = true)]
    Rank {
        /// What the process is.
        #[arg(value_parser = parse_spec)]
        spec: RankSpec,
    },
}

fn parse_spec(text: &str) -> Result<RankSpec, serde_json::Error> {
    serde_json::from_str(text)
}

/// The whole service.
#[derive(Debug, Clone, Args)]
pub struct ServiceOptions {
    /// Where the router takes requests.
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "HOST:PORT")]
    pub listen: String,

    /// How many prefill processes to start.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub prefill_ranks: u32,

    /// How many decode processes to start.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub decode_ranks: u32,

    /// Tensor-parallel ranks of each prefill process.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub prefill_tp: u32,

    /// Tensor-parallel ranks of each decode process.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub decode_tp: u32,

    /// Most requests under way. Further ones get status 429.
    #[arg(long, default_value_t = 1024, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_requests: u32,

    /// The options of every process.
    #[command(flatten)]
    pub engine: EngineOptions,
}

/// What all processes have in common.
#[derive(Debug, Clone, Args)]
pub struct EngineOptions {
    /// The model.
    #[command(flatten)]
    pub model: ModelOptions,

    /// The transport that moves the bytes.
    #[arg(long, value_enum, default_value = "local")]
    pub transport: TransportKind,

    /// Which side moves the bytes [default: pull; auto over UCX, which reads only where there is RDMA].
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,

    /// How pages lie in memory.
    #[arg(long, value_enum, default_value = "layer-major")]
    pub layout: PageLayout,

    /// Tokens in a page.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub page_size: u32,

    /// Pages in the cache of each process.
    #[arg(long, default_value_t = 4096, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub pages: u32,

    /// How many tokens of a prompt a prefill process computes at a time, before it sends their pages.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk_tokens: u32,

    /// Most tokens of a request, prompt and answer together.
    #[arg(long, default_value_t = 4096, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    pub max_model_len: u32,

    /// How long a request may take until its first token.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub deadline: u64,

    /// With --mode pull: the duration of the lease under which a prefill process keeps pages for a decode process
    /// that has not read them; heartbeats of the decode process renew it [default: 30, or 1 with --timing fast].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub lease_seconds: Option<u64>,

    /// How long timeouts are.
    #[arg(long, value_enum, default_value = "normal")]
    pub timing: Pace,

    /// Write a line for each half of a request to standard error, or what passes this filter of tracing-subscriber
    /// (debug: states, chunks and data operations, too).
    #[arg(long, value_name = "FILTER", num_args = 0..=1, default_missing_value = "info", value_parser = parse_filter)]
    pub log: Option<String>,
}

/// One process that is behind a router of others.
#[derive(Debug, Clone, Args)]
pub struct AloneOptions {
    /// Where the process takes requests.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    pub listen: String,

    /// The bootstrap server with which all processes of the service register.
    #[arg(long, default_value = DEFAULT_BOOTSTRAP, value_name = "HOST:PORT")]
    pub bootstrap: String,

    /// The number of the process among those of its side.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub number: u32,

    /// How many processes of its side there are.
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub of: u32,

    /// Tensor-parallel ranks of the process.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tp: u32,

    /// The options of every process.
    #[command(flatten)]
    pub engine: EngineOptions,
}

impl AloneOptions {
    /// The process that the options describe.
    pub fn spec(&self, side: Side) -> RankSpec {
        let AloneOptions { listen, bootstrap, number, of, tp, engine } = self;
        engine.spec(side, (*number, *of), *tp, listen, bootstrap)
    }
}

impl ServiceOptions {
    /// All processes of the service.
    pub fn specs(&self, bootstrap: &str) -> Vec<RankSpec> {
        let sides = [
            (Side::Prefill, self.prefill_ranks, self.prefill_tp),
            (Side::Decode, self.decode_ranks, self.decode_tp),
        ];
        let of_side = |(side, of, tp)| {
            (0..of).map(move |number| self.engine.spec(side, (number, of), tp, "127.0.0.1:0", bootstrap))
        };
        sides.into_iter().flat_map(of_side).collect()
    }
}

impl EngineOptions {
    fn spec(&self, side: Side, (number, of): (u32, u32), tp: u32, listen: &str, bootstrap: &str) -> RankSpec {
        let EngineOptions { transport, layout, page_size, pages, .. } = *self;
        let usual = if transport == TransportKind::Ucx { Mode::Auto } else { Mode::Pull };
        RankSpec {
            side,
            number,
            of,
            listen: listen.to_owned(),
            bootstrap: bootstrap.to_owned(),
            model: self.model.clone(),
            cache: CacheOptions { transport, layout, page_size, pages },
            tp,
            hand_over: HandOver {
                mode: self.mode.unwrap_or(usual),
                lease_seconds: self.lease_seconds,
                kept_seconds: None,
                timing: self.timing,
            },
            chunk_tokens: self.chunk_tokens,
            deadline: Duration::from_secs(self.deadline),
            max_model_len: self.max_model_len as usize,
            max_requests: MAX_RANK_REQUESTS,
            log: self.log.clone(),
        }
    }
}

/// Most requests in one process. The router has a bound of its own.
const MAX_RANK_REQUESTS: usize = 4096;

/// What requests to a process may ask for. `vocab_size` is that of the model.
pub fn limits(spec: &RankSpec, vocab_size: usize) -> Result<Limits, ExampleError> {
    let cache = spec.cache.pages as usize * spec.cache.page_size as usize;
    Ok(Limits {
        model: model_name(&spec.model),
        vocabulary: Vocabulary::load(&spec.model)?,
        vocab_size,
        max_model_len: spec.max_model_len.min(cache),
    })
}

/// The name by which clients ask for the model: the last part of the path of a checkpoint.
fn model_name(options: &ModelOptions) -> String {
    let dir: Option<&PathBuf> = {
        #[cfg(feature = "checkpoint")]
        let dir = options.model.as_ref();
        #[cfg(not(feature = "checkpoint"))]
        let dir = None;
        dir
    };
    match dir.and_then(|dir| dir.file_name()) {
        Some(name) => name.to_string_lossy().into_owned(),
        None if options.mla => "demo-mla".to_owned(),
        None => "demo".to_owned(),
    }
}
