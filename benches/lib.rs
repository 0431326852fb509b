//! Benches of this library: `cargo bench --bench write_read`, `cargo bench --bench control` and
//! `cargo bench --bench encoder_cache` measure what it costs, and `cargo bench --bench garbage` measures what a peer that sends garbage costs the others. `cargo bench --bench observe` measures what it costs that
//! somebody watches.
//!
//! The benches are a package of their own, so that the examples build without criterion. The library is
//! empty.
