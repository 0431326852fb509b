//! The load: many streams at once, of which some hang up. Compares every token with a run of the same model in one
//! process, and looks for lost pages and for memory that grows.

mod client;
mod memory;
mod report;
mod work;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Parser};
use kv_examples::error::ExampleError;

use crate::options::Options;
use client::{Ended, LoadClient};
use memory::Memory;
use report::Report;
use work::Work;

/// The size of a load, and the service that it runs on.
#[derive(Debug, Clone, Args)]
pub struct LoadOptions {
    /// How many requests to send.
    #[arg(long, default_value_t = 1000, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub requests: u32,

    /// How many streams are open at once.
    #[arg(long, default_value_t = 200, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: u32,

    /// How many of a hundred clients hang up.
    #[arg(long, default_value_t = 20, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(0..=100))]
    pub hang_ups: u64,

    /// The number of different prompts.
    #[arg(long, default_value_t = 200, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub prompts: u32,

    /// Most tokens of a prompt.
    #[arg(long, default_value_t = 48, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(2..=4000))]
    pub prompt_tokens: u32,

    /// Most tokens of an answer.
    #[arg(long, default_value_t = 12, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=4000))]
    pub max_tokens: u32,

    /// The seed of the load [default: the seed of the model].
    #[arg(long, value_name = "NUMBER")]
    pub load_seed: Option<u64>,

    /// The options of the service, which the load starts and ends.
    #[arg(last = true, value_name = "OPTIONS OF THE SERVICE")]
    pub service: Vec<String>,
}

/// How long engines may take to give back the pages of the last requests: the lease of a prefill engine, and more.
const QUIET_WITHIN: Duration = Duration::from_secs(60);

/// Runs the load.
pub async fn run(options: LoadOptions) -> Result<ExitCode, ExampleError> {
    let arguments = ["serve".to_owned(), "--listen".to_owned(), "127.0.0.1:0".to_owned()];
    let arguments: Vec<String> = arguments.into_iter().chain(options.service.iter().cloned()).collect();
    let service = Options::parse_from(&arguments).service;
    let seed = options.load_seed.unwrap_or(service.engine.model.seed);
    println!("seed {seed}");
    let model = service.engine.model.load()?;
    let work = Arc::new(Work::new(&options, seed, &model)?);
    let client = Arc::new(LoadClient::start(&arguments).await?);

    let (next, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let started = Instant::now();
    let mut memory = Memory::new(client.pids().await);
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..options.concurrency {
        let (client, work, next, done) =
            (Arc::clone(&client), Arc::clone(&work), Arc::clone(&next), Arc::clone(&done));
        workers.spawn(async move {
            let mut ended: Vec<Ended> = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(request) = work.request(number) else { return ended };
                ended.push(client.stream(&request).await);
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let total = options.requests as usize;
    let mut ticks = tokio::time::interval(Duration::from_millis(200));
    let mut steps = 0;
    let mut report = Report::default();
    loop {
        tokio::select! {
            joined = workers.join_next() => match joined {
                Some(Ok(ended)) => report.count(ended),
                Some(Err(error)) => report.problems.push(format!("a client has failed: {error}")),
                None => break,
            },
            _ = ticks.tick() => {
                let done = done.load(Ordering::Relaxed);
                while steps * total / memory::SAMPLES < done {
                    steps += 1;
                    memory.sample(done);
                }
            }
        }
    }
    memory.sample(total);
    let took = started.elapsed();
    report.pages(client.quiet(QUIET_WITHIN).await);
    report.memory(&memory);
    report.print(took);
    client.stop().await;
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
