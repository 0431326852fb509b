//! An OpenAI-compatible server whose prefill processes and decode processes hand over real KV caches.
//!
//! ```text
//! cargo run --release --example serve
//! curl -N http://127.0.0.1:8000/v1/completions -d '{"prompt": "once upon a time", "max_tokens": 24, "stream": true}'
//! ```
//!
//! **What it is.** A router, prefill processes (P) and decode processes (D), over any transport
//! (`--transport local|tcp|nixl|ucx|fabric|auto`; `local` by default) and in any mode (`--mode push|pull|auto`; `pull` by
//! default, and `auto` over UCX), with the demonstration model, or with a checkpoint of the Llama architecture
//! (`--features checkpoint`, `--model DIR`). **What it is not.** A fast server: the model is the plain one of the other
//! examples, and decodes greedily, so that every token can be compared with a run in one process.
//!
//! ```text
//! client ──▶ router ──1──▶ P  do_remote_decode: true, max_tokens: 1
//!              │  ◀────────── kv_transfer_params: where the KV is, and under which lease
//!              └─────2──▶ D  the client's request, and those parameters ──▶ the answer, streamed back
//! ```
//!
//! - **The two steps are vLLM's**, over HTTP, on every P and D process. So the router of vLLM or llm-d may take the place
//!   of this one: `serve prefill` and `serve decode` run one process each, registered with the example `bootstrap`. In
//!   push mode this router sends both steps at once, and P writes the KV of each chunk while it computes the next.
//! - **A request is a task** that awaits its session ([`kv_transfer::AwaitSession`]): see `engine/prefill.rs` and
//!   `engine/decode.rs`, which are what a server would copy. The forward pass of prompts and the running batch are a
//!   thread each. The batch takes in and lets go requests between any two of its steps.
//! - **Prefixes are kept on both sides** (`engine/prefix.rs`): P computes only the tokens of a prompt that are new
//!   to it, and only the pages that D does not have are moved. On the next turn of a chat, P reads the KV of the answer
//!   back from D (`engine/pull_back.rs`): the router asks D what it keeps, and P gets the parameters of that with the
//!   first step, in vLLM's form for the next turn. Pages that nobody reads are evicted when others need room. A request
//!   reserves the pages of its whole answer before its KV is moved, so that no running request ever has to give pages
//!   back.
//! - **A client that hangs up** ends the connections of its request, from the router to the engines. P computes no
//!   further chunk, D no further token, and the pages are free on both sides when no data operation can touch them any
//!   more.
//! - **A process that dies** is started again. Requests of which no token was told are tried again, up to three
//!   times; others end with an error event.
//! - **Everything is bounded**: bodies, prompts, connections, requests under way (status 429 beyond `--max-requests`),
//!   and the time until the first token (`--deadline`). Wrong fields get status 400 with the name of the field, the
//!   value, and what it may be; status 503 comes with `Retry-After`. On SIGINT and SIGTERM the server ends what it has.
//!
//! | route | of | what |
//! |---|---|---|
//! | `/v1/completions`, `/v1/chat/completions` | all | OpenAI's, with `stream`, `stream_options.include_usage`, `stop`, and vLLM's `return_token_ids` |
//! | `/v1/models`, `/health`, `/metrics` | all | the model; what each process has under way, and its pages; numbers for Prometheus (`metrics.rs`, `docs/METRICS.md`) |
//! | `/timeline`, `/timeline.json` | router | what every request did, for a browser and for Perfetto (`timeline.rs`) |
//! | `/reset_prefix_cache` | all | gives up the kept prefixes |
//! | `/kept_kv` | D | for a prompt: the `kv_transfer_params` with which P reads what D keeps of it |
//!
//! The load runs the server, hangs up on some of its streams, compares every token, and looks for lost pages and
//! growing memory:
//!
//! ```text
//! cargo run --release --example serve -- load --requests 10000 --concurrency 200 --hang-ups 20
//! cargo run --release --example serve -- load --requests 1000 -- --mode push --decode-ranks 2
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

mod engine;
mod fleet;
mod http;
mod ids;
mod load;
mod metrics;
mod observe;
mod openai;
mod options;
mod patience;
mod rank;
mod reply;
mod router;
mod service;
mod timeline;

use std::process::ExitCode;

use clap::Parser;

use engine::Side;
use options::{Command, Options};

/// Runs the program.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let transport = match &options.command {
        None => options.service.engine.transport,
        Some(Command::Prefill(alone) | Command::Decode(alone)) => alone.engine.transport,
        Some(Command::Rank { spec }) => spec.cache.transport,
        // It starts a process that does.
        Some(Command::Load(_)) => kv_examples::cli::TransportKind::Local,
    };
    // Before there are other threads.
    if let Err(error) = kv_examples::transport::prepare(transport) {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(async {
        match options.command {
            None => service::run(options.service).await.map(|()| ExitCode::SUCCESS),
            Some(Command::Prefill(alone)) => service::alone(alone.spec(Side::Prefill)).await,
            Some(Command::Decode(alone)) => service::alone(alone.spec(Side::Decode)).await,
            Some(Command::Rank { spec }) => service::rank(spec).await,
            Some(Command::Load(options)) => load::run(options).await,
        }
    });
    // The threads of the model may be in a forward pass.
    runtime.shutdown_background();
    ended.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}
