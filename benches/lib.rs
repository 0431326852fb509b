//! Benches of this library: `cargo bench --bench write_read`, `cargo bench --bench control` and
//! `cargo bench --bench encoder_cache` measure what it costs, and `cargo bench --bench garbage` measures what a peer
//! that sends garbage costs the others. `cargo bench --bench sessions` measures requests through whole sessions.
//! `cargo bench --bench observe` measures what it costs that somebody watches.
//! `cargo test --bench '*'` only tries whether they run.
//!
//! The benches are a package of their own, so that the examples build without criterion.

#[cfg(feature = "fabric")]
pub mod fabric;
#[cfg(feature = "nixl")]
pub mod nixl;

use std::num::ParseIntError;

/// True if a bench is only tried, once and with little: cargo says `--bench` to a bench that measures.
pub fn is_trial() -> bool {
    let said = |word: &str| std::env::args().skip(1).any(|arg| arg == word);
    said("--test") || !said("--bench")
}

/// Bytes as text, in which a process of a bench tells them to another one.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes that [`hex`] has made such text of.
///
/// # Errors
///
/// If something else than such text was given.
pub fn bytes(hex: &str) -> Result<Vec<u8>, ParseIntError> {
    let byte = |at| u8::from_str_radix(hex.get(at..at + 2).unwrap_or_default(), 16);
    (0..hex.len()).step_by(2).map(byte).collect()
}
