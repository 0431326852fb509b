//! The hand-written KV transfer of a Rust server, ported: two schedulers with the states of vllm.rs, in processes of
//! their own, hand over KV by an [`adapter`] with the operations of its transfer.
//!
//! The model is a stand-in whose KV and tokens are functions of the prompt ([`cache`]), so every byte that D receives
//! is compared, and every answer. What a port of a real server would copy is [`adapter`] with [`lines`]; [`prefill`]
//! and [`decode`] show where a scheduler calls it. The rest runs them: [`engine`] is one process, [`fleet`] and [`run`]
//! start the processes and give them requests, and [`bench`] compares them with the old way, [`plain`].
//!
//! | operation of the transfer | here |
//! |---|---|
//! | D sends a sequence to P, polls for it, copies the KV into its blocks, releases it at P | `Client::transfer_prefill`, `check_prefill_finished`, `receive_kv_cache` (after which P's blocks are released), `release` (gives a request up) |
//! | P takes a sequence and says how much room it has, sends the KV, asks which sequences are released | `Server::try_receive_prefill`, `transfer_kv_cache`, `released`; `refuse` for a prompt that P will not compute |
//!
//! What to run to see each thing that the port gains (add `--transport tcp`, or `--transport nixl`
//! to a build with `--features nixl`):
//!
//! | | what | `cargo run --release --example port --` … |
//! |---|---|---|
//! | 1 | the adapter has at most 250 lines of code, and its request channel 60; a test counts them | `cargo test --release -p kv-examples --example port` |
//! | 2 | a prompt of 16 384 tokens of Qwen3-8B (2.4 GB) arrives | `--bench --tokens 16384` |
//! | 3 | how much faster it is than serializing over TCP, and the longest call of a scheduler | `--bench --tokens 4096` |
//! | 4 | P is killed: D computes locally inside its deadline; D is killed: P's blocks return, and P goes on | `--kill prefill`, `--kill decode` |
//! | 5 | D starts again with the same ids and other prompts, and gets no KV of its former life | `--kill decode` |
//! | 6 | resident memory is flat over 1 000 requests | `--requests 1000 --tokens 512` |
//! | 7 | ranks pair by rank; unequal tensor parallelism; two P or two D; a wrong geometry is refused by name | `--prefill-tp 2 --decode-tp 2`, `--prefill-tp 2 --decode-tp 1`, `--prefill 2`, `--decode 2`, `--other-head-dim` |
//! | 8 | state of hybrid models: slots travel with the pages | `cargo test --test hybrid` |
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

mod adapter;
mod bench;
mod cache;
mod decode;
mod engine;
mod fleet;
mod lines;
mod plain;
mod prefill;
mod run;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use kv_examples::cli::TransportKind;
use kv_examples::transport;

/// The result of everything in this program.
type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Ports the hand-written KV transfer of a Rust server, and shows what the port gains.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Prefill processes.
    #[arg(long, default_value_t = 1)]
    prefill: usize,
    /// Decode processes.
    #[arg(long, default_value_t = 1)]
    decode: usize,
    /// Tensor-parallel ranks of each prefill process.
    #[arg(long, default_value_t = 1)]
    prefill_tp: usize,
    /// Tensor-parallel ranks of each decode process.
    #[arg(long, default_value_t = 1)]
    decode_tp: usize,
    /// How many requests each decode process gets, in all.
    #[arg(long, default_value_t = 40)]
    requests: u64,
    /// Requests at a decode process at once.
    #[arg(long, default_value_t = 8)]
    at_once: u64,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 8)]
    answer: usize,
    /// Blocks of 64 tokens of each process [default: twice as many as all requests at once need].
    #[arg(long)]
    blocks: Option<u32>,
    /// Commands of the scheduler that wait for each worker, before the scheduler has to try again [default: 4096].
    #[arg(long, value_name = "COUNT")]
    command_queue: Option<usize>,
    /// How long a request may be at P before D computes the prompt itself.
    #[arg(long, default_value_t = 20_000, value_name = "MILLISECONDS")]
    deadline: u64,
    /// Kill one process with SIGKILL as soon as a quarter of the answers are there. A decode process is started again,
    /// with the same ids and other prompts.
    #[arg(long, value_enum)]
    kill: Option<Side>,
    /// Give the decode processes a cache with heads of another size.
    #[arg(long)]
    other_head_dim: bool,
    /// Measure one prompt of Qwen3-8B, beside the same by serializing over TCP.
    #[arg(long, conflicts_with_all = ["kill", "other_head_dim"])]
    bench: bool,
    /// With --bench: how often.
    #[arg(long, default_value_t = 3)]
    rounds: u64,
    /// The transport that moves the bytes.
    #[arg(long, value_enum, default_value = "local")]
    transport: TransportKind,
    /// The seed of the prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// For the program's own use: makes this process an engine.
    #[arg(long, hide = true)]
    rank: Option<String>,
}

/// A side of the hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Side {
    Prefill,
    Decode,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Outcome<bool> {
    if let Some(spec) = &options.rank {
        let spec: engine::Spec = serde_json::from_str(spec)?;
        transport::prepare(spec.transport)?;
        engine::run(spec)?;
        return Ok(true);
    }
    if options.bench { bench::run(options) } else { run::run(options) }
}
