//! The protocol machine: sans-IO, one [`Node`] per worker.
//!
//! ```text
//! io.rs          what goes in and what comes out                   service.rs     the node as a worker's machine
//! node.rs        who gets which input
//! ├ handshake.rs meeting peers, keeping in touch, losing them         peer.rs        what is known of each
//! ├ lookup.rs    decode side: from an address to peers                directory.rs   answers of bootstrap servers
//! ├ receive.rs   decode side: register, count parts                   run_set.rs     numbers as runs
//! ├ close.rs     decode side: tell of a failure, wait for quiet
//! ├ permission.rs both sides: until when P may write, and what ends its last writes
//! ├ quarantine.rs whom pages of ended sessions wait for
//! ├ attempts.rs  prefill side: registrations, aborts, answers         rendezvous.rs  who waits for whom
//! │                                                                   incoming.rs    attempts of one peer
//! ├ send.rs      prefill side: sessions and their targets             posting.rs     whose turn it is to post
//! ├ chunks.rs    prefill side: pages given, layers announced
//! ├ write.rs     prefill side of push: plan and post                  groups.rs      state groups, both sides
//! ├ grant.rs     prefill side of pull: claims, leases, releases
//! ├ read.rs      decode side of pull: grants, reads, heartbeats, proofs
//! └ model.rs     twins of a machine, for a model checker (feature `model`)
//! ```
//!
//! The receiver drives: it repeats its registration until it is acknowledged, asks about attempts
//! that have been quiet, and repeats an abort until it is acknowledged. The sender only answers, so
//! no frame of its own needs an acknowledgement.

mod context;
mod conversation;
mod effects;
mod groups;
mod io;
mod lookups;
mod meeting;
#[cfg(feature = "model")]
mod model;
mod node;
mod posting;
mod posts;
mod random;
mod receiving;
mod rendezvous;
mod run_set;
mod sending;
mod service;
mod timer;

pub use crate::command::{Command, Resource};
pub use io::{Input, Limits, NodeConfig, Output, Timing};
pub use node::{Node, NodeGauges};
