//! An OpenAI-compatible server over prefill and decode processes: see the documentation of `kv_serve`.
//!
//! ```text
//! cargo run --release --example serve
//! cargo run --release --example serve -- load --requests 10000 --concurrency 200 --hang-ups 20
//! ```

use std::process::ExitCode;

fn main() -> ExitCode {
    kv_serve::main()
}
