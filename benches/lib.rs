//! What the framework costs: `cargo bench --bench write_read`, `cargo bench --bench control`; and what a peer
//! that sends garbage costs the others: `cargo bench --bench garbage`.
//!
//! A package of its own, so that whoever runs an example need not build criterion. It holds benches
//! only, nothing to depend on.
