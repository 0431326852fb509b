//! Planted bugs: each breaks one promise on purpose, so that the invariant that serves it is seen
//! to fail.
//!
//! They stand between nodes and world, and need no change in the nodes: what a buggy node or transport
//! would do is done to the inputs and outputs of a correct one. Those of engines that differ are in
//! `ranks.rs`, those of context-parallel ranks in `context.rs`, and those of leases in `leases.rs`.

mod context;
mod events;
mod frames;
mod leases;
mod outputs;
mod provoke;
mod ranks;
