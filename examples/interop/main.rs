//! One side of a pair with an unmodified vLLM 0.33 or SGLang 0.5.23 worker, without a model: each side fills
//! its cache by a rule, and the receiving side compares every byte.
//!
//! ```text
//! cargo run --release --features nixl -p kv-interop-pairs --example interop -- \
//!     --role decode --dialect vllm --peer-ctl http://127.0.0.1:17600 --runs 1x1,10x4,100x1
//! ```
//!
//! `scripts/interop.sh` runs all pairs; `docs/INTEROP.md` says what they show.
#![allow(clippy::print_stdout, clippy::print_stderr)] // A program for a terminal.

mod cache;
mod control;
mod decode;
mod engine;
mod error;
mod fields;
mod harm;
mod options;
mod order;
mod prefill;
mod receive;
mod sending;
mod start;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use kv_transfer::nixl::{Nixl, Search};
use serde_json::{Value, json};

use control::Control;
use engine::Engine;
use error::PairError;
use options::{Options, Role};

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<bool, PairError> {
    options.check()?;
    // NIXL sets UCX's environment, which is possible only before there are other threads.
    Nixl::load(&Search::default())?;
    let mut engine = Engine::start(options)?;
    if options.role == Role::Prefill {
        engine.fill()?;
    }
    let mut control = options.ctl.map(Control::listen).transpose()?;
    say(&json!({
        "up": "kv-transfer", "side_channel": engine.side_channel(), "bootstrap": engine.bootstrap(),
        "ctl": control.as_ref().map(Control::url), "pid": std::process::id(),
    }));
    let right = match (options.role, &options.peer_ctl, &mut control) {
        (Role::Decode, Some(peer), _) => decode::drive(options, &mut engine, peer),
        (Role::Decode, None, Some(control)) => decode::serve(options, &mut engine, control).map(|()| true),
        (Role::Prefill, _, Some(control)) => prefill::serve(options, &engine, control).map(|()| true),
        (_, _, None) => {
            let why = "a prefill side, and a decode side without --peer-ctl, need it".to_owned();
            Err(PairError::Option { option: "ctl", got: "none".to_owned(), why })
        }
    };
    engine.stop();
    right
}

/// Prints one line of JSON, for a driver that reads the lines.
fn say(line: &Value) {
    let mut stdout = std::io::stdout().lock();
    // A driver that has gone reads nothing more.
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}
