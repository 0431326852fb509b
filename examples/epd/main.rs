//! Encode, prefill and decode processes answer prompts with images: embeddings go from the encoders to the
//! prefill process by the content of the images, and the KV cache goes from there to the decode process.
//! Every generated token is compared with a run of the same models in one process.
//!
//! ```text
//! cargo run --release --example epd
//! cargo run --release --example epd -- --images ~/Pictures --encoders 3
//! cargo run --release --example epd -- --kill encoder
//! cargo run --release --example epd -- --kill encoder --no-encode-here
//! ```
//!
//! This process is the router (`router.rs`). Each other process is this program once more: an encoder
//! (`encode.rs`), the prefill process (`gate.rs` in front of the prefill rank of the example `pd`), and the
//! decode rank of `pd`. All use of the encoder cache is in `store.rs`, which a server would copy.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

mod encode;
mod error;
mod gate;
mod images;
mod messages;
mod progress;
mod report;
mod requests;
mod router;
mod scratch;
mod spec;
mod store;
#[cfg(test)]
mod tests;
mod vision;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use clap::Parser;
use kv_examples::cli::{CacheOptions, HandOver, Mode, Pace, Parallelism, PrefillOptions};
use kv_examples::decode::DecodeRank;
use kv_examples::dialect::DialectOptions;
use kv_examples::link::Link;
use kv_examples::loading::ModelOptions;
use kv_examples::model::{Model, Sample};
use kv_examples::rank::RankSpec;
use kv_examples::router::Side;
use kv_examples::{process, transport};
use kv_transfer::bootstrap::KvBootstrapServer;

use error::EpdError;
use images::ImageRef;
use progress::Progress;
use report::{Report, Rules};
use requests::Request;
use router::{Plan, Role, Router, Run, Work};
use scratch::Scratch;
use spec::{EncoderSpec, PrefillSpec, Spec, StoreSpec};
use vision::VisionTower;

/// The number of images that are made if `--images` names none.
const IMAGES: usize = 6;

/// Answers prompts with images by encode, prefill and decode processes, and checks every generated token.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// How many encode processes to start.
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    encoders: u32,

    /// Use the PNG and JPEG files of this directory [default: six small images, made from --seed].
    #[arg(long, value_name = "DIR")]
    images: Option<PathBuf>,

    /// How many tokens an image has at most. Larger images are scaled down: a token is a patch of 16 × 16
    /// pixels.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=4096))]
    image_tokens: u32,

    /// How many requests each round has. Requests have one to three images, and share images with others.
    #[arg(long, default_value_t = 8, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1000))]
    requests: u32,

    /// How often the requests are sent. From the second round on, the prefill process has all embeddings.
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,

    /// Roughly how many tokens of text each prompt has.
    #[arg(long, default_value_t = 48, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prompt_tokens: u32,

    /// How many tokens to generate for each request.
    #[arg(long, default_value_t = 16, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_new_tokens: u32,

    /// Blocks in the encoder cache of each process. A block is one row of an embedding.
    #[arg(long, default_value_t = 4096, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    blocks: u32,

    /// End a request whose embedding cannot be fetched with an error, instead of computing the embedding in
    /// the prefill process.
    #[arg(long)]
    no_encode_here: bool,

    /// Kill one process of this role (SIGKILL) in the middle of a transfer, and show what each request gets.
    #[arg(long, value_enum, value_name = "ROLE")]
    kill: Option<Role>,

    /// How long a request may take.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    deadline: u64,

    /// Print the report as one JSON object, and no progress.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    cache: CacheOptions,

    #[command(flatten)]
    prefill: PrefillOptions,

    /// Which side moves the embeddings.
    #[arg(long, value_enum, default_value = "auto")]
    mode: Mode,

    /// How long the prefill process may take to fetch an embedding, all tries together.
    #[arg(long, default_value_t = 3, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    budget: u64,

    /// How long timeouts are.
    #[arg(long, value_enum, default_value = "normal")]
    timing: Pace,

    #[command(flatten)]
    model: ModelOptions,

    /// For the router's own use: makes this process one of the others.
    #[arg(long, hide = true, value_parser = parse_spec)]
    rank: Option<Spec>,
}

fn parse_spec(text: &str) -> Result<Spec, serde_json::Error> {
    serde_json::from_str(text)
}

fn main() -> ExitCode {
    let options = Options::parse();
    let result = match &options.rank {
        Some(spec) => serve(spec).map(|()| ExitCode::SUCCESS),
        None => run(&options),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Runs one process, which gets its commands on standard input.
fn serve(spec: &Spec) -> Result<(), EpdError> {
    let link = Link::stdio()?;
    transport::prepare(spec.transport())?;
    process::end_with_parent()?;
    start(spec, link)
}

/// Serves the router at the other end of `link`, as the process that `spec` describes.
fn start(spec: &Spec, link: Link) -> Result<(), EpdError> {
    match spec {
        Spec::Encoder(spec) => encode::run(spec, link),
        Spec::Prefill(spec) => gate::run(spec, link),
        Spec::Decode(spec) => Ok(DecodeRank::start(spec)?.run(link)?),
    }
}

/// Runs the router: starts the processes, sends them the requests, and prints the report.
fn run(options: &Options) -> Result<ExitCode, EpdError> {
    // So that a missing library is reported here, and once.
    transport::prepare(options.cache.transport)?;
    let scratch = Scratch::new()?;
    let images = options.images(&scratch)?;
    let model = options.model.load()?;
    let requests = options.requests(&model, &images)?;
    let server = KvBootstrapServer::start("127.0.0.1:0").map_err(kv_examples::error::ExampleError::Server)?;
    let bootstrap = server.local_addr().to_string();
    let mut router = Router::new();
    for (role, spec) in options.specs(&bootstrap) {
        let (child, output, input) = process::spawn(&spec)?;
        router.add(role, input, output, Some(child));
    }
    let progress = Progress::new(&requests, options.rounds as usize, !options.json);
    let plan = options.plan(bootstrap);
    let work = Work { requests: &requests, plan: &plan, progress: &progress };
    let (run, expected) = compare(router, &model, &options.tower(&model), &work)?;
    progress.end();
    server.stop();
    let report = Report::new(&run, &requests, &expected, options.rules());
    print!("{}", report.text(options.json)?);
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs all requests through the processes, and at the same time each once in this process. The second result
/// has the tokens of this process.
fn compare(
    router: Router,
    model: &Model,
    tower: &VisionTower,
    work: &Work<'_>,
) -> Result<(Run, Vec<Vec<Sample>>), EpdError> {
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let monolithic = scope.spawn(|| {
            let answer = |request: &Request| {
                let answer = requests::answer(model, tower, request, work.plan.max_new_tokens);
                work.progress.monolithic.inc(1);
                answer
            };
            // Nothing to compare with: no need to compute the rest.
            work.requests.iter().take_while(|_| !failed.load(Relaxed)).map(answer).collect()
        });
        let run = router.run(work);
        failed.store(run.is_err(), Relaxed);
        let expected: Result<Vec<Vec<Sample>>, EpdError> = match monolithic.join() {
            Ok(expected) => expected,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        Ok((run?, expected?))
    })
}

impl Options {
    /// The images of `--images`, or else those that are made now in `scratch`.
    fn images(&self, scratch: &Scratch) -> Result<Vec<ImageRef>, EpdError> {
        if let Some(dir) = &self.images {
            return images::find(dir, self.image_tokens);
        }
        images::generate(scratch.path(), self.model.seed, IMAGES)?;
        images::find(scratch.path(), self.image_tokens)
    }

    /// The requests of a round.
    fn requests(&self, model: &Model, images: &[ImageRef]) -> Result<Vec<Request>, EpdError> {
        let (count, text) = (self.requests as usize, self.prompt_tokens as usize);
        let requests = requests::make(self.model.seed, count, text, model.config().vocab_size, images);
        requests::check(&requests, self.max_new_tokens as usize, self.cache.page_size, self.cache.pages)?;
        Ok(requests)
    }

    fn plan(&self, bootstrap: String) -> Plan {
        Plan {
            rounds: self.rounds as usize,
            bootstrap,
            max_new_tokens: self.max_new_tokens as usize,
            deadline: Duration::from_secs(self.deadline),
            kill: self.kill,
        }
    }

    fn rules(&self) -> Rules {
        Rules { kill: self.kill, encode_here: !self.no_encode_here }
    }

    fn tower(&self, model: &Model) -> VisionTower {
        VisionTower::new(self.model.seed, model.config().hidden_size)
    }

    /// All processes to start.
    fn specs(&self, bootstrap: &str) -> Vec<(Role, Spec)> {
        let model = &self.model;
        let store = |name: String, serves: bool| StoreSpec {
            name,
            serves,
            transport: self.cache.transport,
            blocks: self.blocks,
            image_tokens: self.image_tokens,
            mode: self.mode,
            budget_seconds: self.budget,
            timing: self.timing,
        };
        let rank = |side: Side| RankSpec {
            side,
            number: 0,
            of: 1,
            bootstrap: bootstrap.to_owned(),
            model: model.clone(),
            cache: self.cache.clone(),
            parallelism: Parallelism { tp: 1, pp: 1, cp: 1, dcp: 1 },
            peer_page_size: self.cache.page_size,
            hand_over: HandOver {
                mode: Mode::Push,
                lease_seconds: None,
                kept_seconds: None,
                timing: self.timing,
            },
            record: false,
            watch_pages: false,
            chunk_tokens: self.prefill.chunk_tokens,
            layer_wise: self.prefill.layer_wise,
            dialect: DialectOptions::default(),
        };
        let encoder = |number: u32| {
            let store = store(format!("encoder-{number}"), true);
            (Role::Encoder, Spec::Encoder(EncoderSpec { model: model.clone(), store }))
        };
        let prefill = PrefillSpec {
            rank: rank(Side::Prefill),
            store: store("prefill-0".to_owned(), false),
            encode_here: self.rules().encode_here,
        };
        let mut specs: Vec<(Role, Spec)> = (0..self.encoders).map(encoder).collect();
        specs.push((Role::Prefill, Spec::Prefill(Box::new(prefill))));
        specs.push((Role::Decode, Spec::Decode(Box::new(rank(Side::Decode)))));
        specs
    }
}
