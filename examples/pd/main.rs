//! Prefill and decode ranks as separate processes hand over a real KV cache. Every generated token is compared
//! with a run of the same model in one process.
//!
//! ```text
//! cargo run --release --example pd
//! cargo run --release --example pd -- --requests 200 --prefill-ranks 2 --decode-ranks 2
//! cargo run --release --example pd -- --kill prefill
//! cargo run --release --example pd -- --timing fast --stop decode --at 300 --resume 3000
//! cargo run --release --example pd -- --prefill-tp 4 --prefill-pp 2 --decode-tp 2
//! cargo run --release --example pd -- --page-size 32 --decode-page-size 8 --decode-layout page-major
//! cargo run --release --example pd -- --mode pull --turns 2
//! cargo run --release --example pd -- --kill prefill --timeline target/pd.html
//! cargo run --release --example pd -- --drain prefill --requests 60
//! ```
//!
//! This process is the router. It starts a bootstrap server and the ranks (each is this program once more), gives
//! each prompt to a prefill rank and a decode rank, and never sees a byte of KV. The code that a server would copy
//! is the scheduler loop of each side, in `examples/shared`.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, error::ErrorKind};
use kv_transfer::bootstrap::KvBootstrapServer;

use kv_examples::cli::{
    CacheOptions, HandOver, Mode, PageLayout, Parallelism, PrefillOptions, WorkloadOptions,
};
use kv_examples::decode::DecodeRank;
use kv_examples::dialect::DialectOptions;
use kv_examples::error::ExampleError;
use kv_examples::link::Link;
use kv_examples::loading::ModelOptions;
use kv_examples::prefill::PrefillRank;
use kv_examples::process;
use kv_examples::progress::Progress;
use kv_examples::rank::RankSpec;
use kv_examples::rank_kv;
use kv_examples::recording::{self, Form};
use kv_examples::report::Report;
use kv_examples::router::{Harm, Plan, PlannedHarm, Router, Run, Side};
use kv_examples::transport;
use kv_examples::verdict;

/// Hands KV caches over from prefill processes to decode processes, and checks every generated token.
#[derive(Debug, Parser)]
#[command(name = "pd", version)]
struct Options {
    #[command(flatten)]
    workload: WorkloadOptions,

    #[command(flatten)]
    cache: CacheOptions,

    #[command(flatten)]
    prefill: PrefillOptions,

    #[command(flatten)]
    model: ModelOptions,

    #[command(flatten)]
    hand_over: HandOver,

    /// How many prefill processes to start, as data-parallel replicas [default: 1, or 2 with --kill, --stop or
    /// --drain].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_ranks: Option<u32>,

    /// How many decode processes to start, as data-parallel replicas [default: 1, or 2 with --kill, --stop or
    /// --drain].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    decode_ranks: Option<u32>,

    /// Tensor-parallel ranks of each prefill process.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_tp: u32,

    /// Pipeline stages of each prefill process.
    #[arg(long, default_value_t = 1, value_name = "STAGES", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_pp: u32,

    /// Tensor-parallel ranks of each decode process.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    decode_tp: u32,

    /// Pipeline stages of each decode process.
    #[arg(long, default_value_t = 1, value_name = "STAGES", value_parser = clap::value_parser!(u32).range(1..=64))]
    decode_pp: u32,

    /// Prefill-context-parallel (PCP) ranks of each prefill process: all of them hold the pages of a prompt, and
    /// each sends a range of the pages.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_cp: u32,

    /// Decode-context-parallel (DCP) ranks of each prefill process: that many of the tensor-parallel ranks hold
    /// the pages in turn, one page each. Needs --mla.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_dcp: u32,

    /// Decode-context-parallel (DCP) ranks of each decode process. Needs --mla.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    decode_dcp: u32,

    /// How pages lie in the memory of decode ranks [default: as --layout].
    #[arg(long, value_enum)]
    decode_layout: Option<PageLayout>,

    /// Tokens in a page of decode ranks [default: as --page-size].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    decode_page_size: Option<u32>,

    /// Kill one process of this side (SIGKILL) in the middle of a transfer, and show what each request gets. With
    /// --mode push, some but not all pages of one of its requests have been sent at that moment.
    #[arg(long, value_enum, value_name = "SIDE")]
    kill: Option<Side>,

    /// Stop one process of this side (SIGSTOP) instead of killing it. Its peers hear nothing any more, and cannot
    /// know whether it will go on.
    #[arg(long, value_enum, value_name = "SIDE", conflicts_with = "kill")]
    stop: Option<Side>,

    /// Restart the processes of this side one after the other while requests keep coming: each takes no new
    /// requests, serves those that it has, exits when it is empty, and is started anew. No request fails.
    #[arg(long, value_enum, value_name = "SIDE", conflicts_with_all = ["kill", "stop"])]
    drain: Option<Side>,

    /// With --kill or --stop: the moment, in milliseconds after the first request, instead of the middle of a
    /// transfer.
    #[arg(long, value_name = "MILLIS", value_parser = clap::value_parser!(u64).range(..=600_000))]
    at: Option<u64>,

    /// With --stop: resume the process (SIGCONT) after this many milliseconds.
    #[arg(long, value_name = "MILLIS", requires = "stop", value_parser = clap::value_parser!(u64).range(..=600_000))]
    resume: Option<u64>,

    /// Write a timeline of what every request did: a page for a browser (FILE.html), or a trace for ui.perfetto.dev
    /// (FILE.json).
    #[arg(long, value_name = "FILE", value_parser = parse_timeline)]
    timeline: Option<PathBuf>,

    /// For the router's own use: makes this process one of the ranks.
    #[arg(long, hide = true, value_parser = parse_spec)]
    rank: Option<RankSpec>,
}

fn parse_spec(text: &str) -> Result<RankSpec, serde_json::Error> {
    serde_json::from_str(text)
}

fn parse_timeline(path: &str) -> Result<PathBuf, &'static str> {
    let path = PathBuf::from(path);
    Form::of(&path).map(|_| path).ok_or("the name must end with .html or .json")
}

fn main() -> ExitCode {
    let options = Options::parse();
    let result = match &options.rank {
        Some(spec) => serve(spec).map(|()| ExitCode::SUCCESS),
        None => {
            options.check();
            run(&options)
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Runs one rank, which gets its commands on standard input.
fn serve(spec: &RankSpec) -> Result<(), ExampleError> {
    let link = Link::stdio()?;
    transport::prepare(spec.cache.transport)?;
    // A rank ends with its standard input. While the rank does not read it, a signal ends the rank.
    process::end_with_parent()?;
    match spec.side {
        Side::Prefill => PrefillRank::start(spec)?.run(link),
        Side::Decode => DecodeRank::start(spec)?.run(link),
    }
}

/// Runs the router: starts the ranks, sends them the requests, and prints the report.
fn run(options: &Options) -> Result<ExitCode, ExampleError> {
    // So that a missing library is reported here, and once.
    transport::prepare(options.cache.transport)?;
    options.workload.check(&options.cache)?;
    options.workload.check(&options.decode_cache())?;
    // Loaded here before the ranks load it, so that an error is reported once.
    let model = options.model.load()?;
    for side in [Side::Prefill, Side::Decode] {
        let Parallelism { tp, pp, dcp, .. } = options.parallelism_of(side);
        rank_kv::check(model.config(), tp, pp, dcp)?;
    }
    let server = KvBootstrapServer::start("127.0.0.1:0")?;
    let bootstrap = server.local_addr().to_string();
    let mut router = Router::new();
    let harm = options.harm();
    let several = if harm.is_some() || options.drain.is_some() { 2 } else { 1 };
    let mut specs = Vec::new();
    for (side, ranks) in [(Side::Prefill, options.prefill_ranks), (Side::Decode, options.decode_ranks)] {
        let of = ranks.unwrap_or(several);
        for number in 0..of {
            let spec = RankSpec {
                side,
                number,
                of,
                bootstrap: bootstrap.clone(),
                model: options.model.clone(),
                cache: options.cache_of(side),
                parallelism: options.parallelism_of(side),
                peer_page_size: options.page_tokens_of(side.other()),
                hand_over: options.hand_over.clone(),
                watch_pages: harm.is_some(),
                record: options.timeline.is_some(),
                chunk_tokens: options.prefill.chunk_tokens,
                layer_wise: options.prefill.layer_wise,
                dialect: DialectOptions::default(),
            };
            let (child, output, input) = process::spawn(&spec)?;
            router.add(side, input, output, Some(child));
            specs.push(spec);
        }
    }
    if let Some(side) = options.drain {
        let again =
            move |side, number| match specs.iter().find(|spec| (spec.side, spec.number) == (side, number)) {
                Some(spec) => process::spawn(spec),
                None => {
                    let how = "was never started".to_owned();
                    Err(ExampleError::Rank { rank: format!("{side}/{number}"), how })
                }
            };
        router.roll(side, Box::new(again));
    }

    let chats = options.model.prompts(&model, options.workload.prompts())?;
    let json = options.workload.json;
    let progress = Progress::new(options.workload.answers(), !json);
    let plan = Plan { harm, ..options.workload.plan(&options.hand_over, bootstrap) };
    let (run, monolithic) = verdict::compare(router, &model, &chats, &plan, &progress)?;
    server.stop();
    if let Some(path) = &options.timeline {
        write_timeline(path, &run)?;
    }
    let report = Report::new(&run, &monolithic, harm.is_some());
    print!("{}", report.text(json)?);
    if !json && let Some(answer) = options.model.first_answer(&run)? {
        println!("the answer to request 0: {answer:?}");
    }
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes the timeline of a run, in the form that the name of the file asks for.
fn write_timeline(path: &Path, run: &Run) -> Result<(), ExampleError> {
    let Some(form) = Form::of(path) else { return Ok(()) };
    let written = form.write(&recording::timeline(run)?)?;
    std::fs::write(path, written).map_err(ExampleError::at("--timeline: cannot write", path.display()))?;
    eprintln!("the timeline of all requests is in {}", path.display());
    Ok(())
}

impl Options {
    /// The cache options of decode ranks.
    fn decode_cache(&self) -> CacheOptions {
        let mut cache = self.cache.clone();
        cache.layout = self.decode_layout.unwrap_or(cache.layout);
        cache.page_size = self.decode_page_size.unwrap_or(cache.page_size);
        cache
    }

    fn parallelism_of(&self, side: Side) -> Parallelism {
        match side {
            Side::Prefill => Parallelism {
                tp: self.prefill_tp,
                pp: self.prefill_pp,
                cp: self.prefill_cp,
                dcp: self.prefill_dcp,
            },
            Side::Decode => {
                Parallelism { tp: self.decode_tp, pp: self.decode_pp, cp: 1, dcp: self.decode_dcp }
            }
        }
    }

    /// The number of tokens that the pages with one number hold, on all DCP ranks of this side together.
    fn page_tokens_of(&self, side: Side) -> u32 {
        self.cache_of(side).page_size * self.parallelism_of(side).dcp
    }

    fn cache_of(&self, side: Side) -> CacheOptions {
        if side == Side::Decode { self.decode_cache() } else { self.cache.clone() }
    }

    /// The kill or stop that the options ask for.
    fn harm(&self) -> Option<PlannedHarm> {
        let (kill, stop) =
            (self.kill.map(|side| (Harm::Kill, side)), self.stop.map(|side| (Harm::Stop, side)));
        let (harm, side) = kill.or(stop)?;
        let [at, resume] = [self.at, self.resume].map(|millis| millis.map(Duration::from_millis));
        Some(PlannedHarm { harm, side, at, resume })
    }

    /// Ends the program with a usage error if options contradict each other in ways that clap cannot check.
    fn check(&self) {
        let (chunk, prompt) = (self.prefill.chunk_tokens, self.workload.prompt_tokens);
        if self.workload.turns > 1 && self.hand_over.mode == Mode::Push {
            let text = "--turns needs --mode pull or auto: with push, a decode rank cannot hand its KV back";
            Options::command().error(ErrorKind::ArgumentConflict, text).exit();
        }
        if self.workload.turns > 1 && self.page_tokens_of(Side::Decode) != self.page_tokens_of(Side::Prefill)
        {
            let text =
                "--turns needs pages of the same size on both sides: the kept KV is read back page by page";
            Options::command().error(ErrorKind::ArgumentConflict, text).exit();
        }
        let ranks = |side| if side == Side::Prefill { self.prefill_ranks } else { self.decode_ranks };
        if self.drain.and_then(ranks) == Some(1) {
            let text =
                "--drain needs at least two processes of its side: the others serve while one is restarted";
            Options::command().error(ErrorKind::ValueValidation, text).exit();
        }
        let Some(harm) = self.harm() else {
            if self.at.is_some() {
                let text = "--at needs --kill or --stop";
                Options::command().error(ErrorKind::MissingRequiredArgument, text).exit();
            }
            return;
        };
        if harm.at.is_none() && self.hand_over.mode == Mode::Push && chunk > prompt / 2 {
            let text = format!(
                "--kill and --stop need prompts of several chunks: --prompt-tokens is {prompt}, and --chunk-tokens is {chunk}"
            );
            Options::command().error(ErrorKind::ValueValidation, text).exit();
        }
    }
}
