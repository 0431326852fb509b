//! Planted bugs: each breaks one promise on purpose, so that the invariant of that promise is seen to fail.
//!
//! The bugs stand between machines and world, and need no change in a machine: the effects of a faulty
//! machine or transport are applied to the inputs and outputs of a correct one. Bugs of engines that differ
//! are in `ranks.rs`, those of context-parallel ranks in `context.rs`, and those of leases in `leases.rs`.

mod context;
mod events;
mod frames;
mod leases;
mod outputs;
mod provoke;
mod ranks;
