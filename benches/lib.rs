//! Benches of this library: `cargo bench --bench write_read`, `cargo bench --bench control` and
//! `cargo bench --bench encoder_cache` measure what it costs, and `cargo bench --bench garbage` measures what a peer
//! that sends garbage costs the others. `cargo bench --bench sessions` measures requests through whole sessions.
//! `cargo bench --bench observe` measures what it costs that somebody watches.
//! `cargo test --bench '*'` only tries whether they run.
//!
//! The benches are a package of their own, so that the examples build without criterion.

/// True if a bench is only tried, once and with little: cargo says `--bench` to a bench that measures.
pub fn is_trial() -> bool {
    let said = |word: &str| std::env::args().skip(1).any(|arg| arg == word);
    said("--test") || !said("--bench")
}
