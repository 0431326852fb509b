//! Prefill and decode ranks as separate processes hand over a real KV cache, and every token is
//! compared with a run that never left its process.
//!
//! ```text
//! cargo run --release --example pd
//! cargo run --release --example pd -- --requests 200 --prefill-ranks 2 --decode-ranks 2
//! cargo run --release --example pd -- --kill prefill
//! cargo run --release --example pd -- --timing fast --stop decode --at 300 --resume 3000
//! cargo run --release --example pd -- --prefill-tp 4 --prefill-pp 2 --decode-tp 2
//! cargo run --release --example pd -- --page-size 32 --decode-page-size 8 --decode-layout page-major
//! cargo run --release --example pd -- --mode pull --turns 2
//! ```
//!
//! This process is the router: it starts a bootstrap server and the ranks (itself, once more, for
//! each of them), gives each prompt to a prefill and a decode rank, and never sees a byte of KV.
//! What a server would copy is the scheduler loop of each side, in `examples/shared`.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

#[path = "../shared/mod.rs"]
mod shared;

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use clap::{CommandFactory, Parser, error::ErrorKind};
use kv_transfer::bootstrap::KvBootstrapServer;

use shared::cli::{CacheOptions, HandOver, Mode, PageLayout, Parallelism, PrefillOptions, WorkloadOptions};
use shared::decode::DecodeRank;
use shared::error::ExampleError;
use shared::link::Link;
use shared::loading::ModelOptions;
use shared::prefill::PrefillRank;
use shared::progress::Progress;
use shared::rank::RankSpec;
use shared::rank_kv;
use shared::report::Report;
use shared::router::{Harm, Plan, PlannedHarm, Router, Side};
use shared::transport;
use shared::verdict;

/// Hands KV caches over between prefill and decode processes, and checks every token.
#[derive(Debug, Parser)]
#[command(version)]
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

    /// Prefill processes, data-parallel replicas [default: 1, with --kill or --stop 2].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_ranks: Option<u32>,

    /// Decode processes, data-parallel replicas [default: 1, with --kill or --stop 2].
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

    /// Prefill-context-parallel ranks: each has the whole cache, and sends a range of its pages.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_cp: u32,

    /// To how many of the tensor-parallel ranks of a prefill process pages are dealt in turn (--mla).
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill_dcp: u32,

    /// The same in decode processes: decode context parallelism.
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=64))]
    decode_dcp: u32,

    /// How pages lie in the memory of decode ranks [default: as in prefill ranks].
    #[arg(long, value_enum)]
    decode_layout: Option<PageLayout>,

    /// Tokens in a page of decode ranks [default: as in prefill ranks].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    decode_page_size: Option<u32>,

    /// Kill one rank of this side (SIGKILL) as soon as one of its requests is in transfer (push: some,
    /// but not all, of its pages have been sent), and show what each request gets.
    #[arg(long, value_enum, value_name = "SIDE")]
    kill: Option<Side>,

    /// Stop it instead (SIGSTOP): its peers hear nothing from it any more, and cannot know that it will
    /// not go on.
    #[arg(long, value_enum, value_name = "SIDE", conflicts_with = "kill")]
    stop: Option<Side>,

    /// With --kill or --stop: so many milliseconds after the first request, whatever goes on then.
    #[arg(long, value_name = "MILLIS", value_parser = clap::value_parser!(u64).range(..=600_000))]
    at: Option<u64>,

    /// With --stop: the rank goes on after so many milliseconds (SIGCONT).
    #[arg(long, value_name = "MILLIS", requires = "stop", value_parser = clap::value_parser!(u64).range(..=600_000))]
    resume: Option<u64>,

    /// This process is one of the ranks.
    #[arg(long, hide = true, value_parser = parse_spec)]
    rank: Option<RankSpec>,
}

fn parse_spec(text: &str) -> Result<RankSpec, serde_json::Error> {
    serde_json::from_str(text)
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

/// One rank, told what to do on stdin.
fn serve(spec: &RankSpec) -> Result<(), ExampleError> {
    transport::prepare(spec.cache.transport)?;
    // The end of stdin ends a rank, and this does where nobody reads it just then.
    let signal = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(signal)
        .map_err(|error| ExampleError::io("prctl")(error.into()))?;
    let link = Link::stdio()?;
    match spec.side {
        Side::Prefill => PrefillRank::start(spec)?.run(link),
        Side::Decode => DecodeRank::start(spec)?.run(link),
    }
}

/// The router.
fn run(options: &Options) -> Result<ExitCode, ExampleError> {
    // Only to say here, and once, what is missing.
    transport::prepare(options.cache.transport)?;
    options.workload.check(&options.cache)?;
    options.workload.check(&options.decode_cache())?;
    // Before the ranks load it: what is wrong with it is then said once.
    let model = options.model.load()?;
    for side in [Side::Prefill, Side::Decode] {
        let Parallelism { tp, pp, dcp, .. } = options.parallelism_of(side);
        rank_kv::check(model.config(), tp, pp, dcp)?;
    }
    let server = KvBootstrapServer::start("127.0.0.1:0")?;
    let bootstrap = server.local_addr().to_string();
    let mut router = Router::new();
    let harm = options.harm();
    let several = if harm.is_some() { 2 } else { 1 };
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
                chunk_tokens: options.prefill.chunk_tokens,
                layer_wise: options.prefill.layer_wise,
            };
            spawn(&mut router, &spec)?;
        }
    }

    let conversations = options.model.prompts(&model, options.workload.prompts())?;
    let json = options.workload.json;
    let progress = Progress::new(options.workload.answers(), !json);
    let plan = Plan { harm, ..options.workload.plan(&options.hand_over, bootstrap) };
    let (run, monolithic) = verdict::compare(router, &model, &conversations, &plan, &progress)?;
    server.stop();
    let report = Report::new(&run, &monolithic, harm.is_some());
    print!("{}", report.text(json)?);
    if !json && let Some(answer) = options.model.first_answer(&run)? {
        println!("request 0 goes on: {answer:?}");
    }
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Starts this program once more, as a rank.
fn spawn(router: &mut Router, spec: &RankSpec) -> Result<(), ExampleError> {
    let program = std::env::current_exe().map_err(ExampleError::io("find this program"))?;
    let text = serde_json::to_string(spec).map_err(ExampleError::Command)?;
    let mut command = Command::new(program);
    command.args(["--rank", &text]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child: Child = command.spawn().map_err(ExampleError::io("start a rank"))?;
    if let (Some(output), Some(input)) = (child.stdin.take(), child.stdout.take()) {
        router.add(spec.side, input, output, Some(child));
    }
    Ok(())
}

impl Options {
    /// How decode ranks hold their cache.
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

    /// Tokens in the pages of one number, on all ranks of this side.
    fn page_tokens_of(&self, side: Side) -> u32 {
        self.cache_of(side).page_size * self.parallelism_of(side).dcp
    }

    fn cache_of(&self, side: Side) -> CacheOptions {
        if side == Side::Decode { self.decode_cache() } else { self.cache.clone() }
    }

    /// What is to be done to a rank.
    fn harm(&self) -> Option<PlannedHarm> {
        let (kill, stop) =
            (self.kill.map(|side| (Harm::Kill, side)), self.stop.map(|side| (Harm::Stop, side)));
        let (harm, side) = kill.or(stop)?;
        let [at, resume] = [self.at, self.resume].map(|millis| millis.map(Duration::from_millis));
        Some(PlannedHarm { harm, side, at, resume })
    }

    /// What clap cannot check.
    fn check(&self) {
        let (chunk, prompt) = (self.prefill.chunk_tokens, self.workload.prompt_tokens);
        if self.workload.turns > 1 && self.hand_over.mode == Mode::Push {
            let text = "--turns needs --mode pull or auto: nobody can push a cache back";
            Options::command().error(ErrorKind::ArgumentConflict, text).exit();
        }
        if self.workload.turns > 1 && self.page_tokens_of(Side::Decode) != self.page_tokens_of(Side::Prefill)
        {
            let text = "--turns needs pages of one size: what is kept is fetched page by page";
            Options::command().error(ErrorKind::ArgumentConflict, text).exit();
        }
        let Some(harm) = self.harm() else {
            if self.at.is_some() {
                let text = "--at needs --kill or --stop: nothing is to be done then";
                Options::command().error(ErrorKind::MissingRequiredArgument, text).exit();
            }
            return;
        };
        if harm.at.is_none() && self.hand_over.mode == Mode::Push && chunk > prompt / 2 {
            let text = format!(
                "--kill and --stop need prompts of several chunks: {prompt} tokens are few for chunks of {chunk}"
            );
            Options::command().error(ErrorKind::ValueValidation, text).exit();
        }
    }
}
