//! The protocol machine of the KV cache: sans-IO, one [`Node`] per worker.
//!
//! Each part owns its state, and the others ask it in words. A part may use those below it in this picture, and
//! none above; `conversation/` extends the context with what is said to peers.
//!
//! ```text
//! service.rs              the node as a worker's machine
//! node.rs                 routes inputs and timers to the parts     meeting.rs, posting.rs  the routes of peers' ends and posts
//! ├ sending/              sessions of the prefill side
//! │   opening, meeting, chunks, groups, ending    a session, from its room to its pages' return
//! │   attempts, peers     registrations and aborts of receivers     given.rs   what the scheduler has given
//! │   write.rs            push: parts are planned and posted        target.rs  one receiver
//! │   holder.rs           pull: leases are given, kept and ended    ended.rs   what became of leases
//! ├ receiving/            sessions of the decode side
//! │   opening, lookup, registering, ending        a session, from its question to its pages' return
//! │   parts, groups, peers                        what sources say, or do not say any more     source.rs   one source
//! │   reader.rs, planning.rs                      pull: leases are kept alive, pages read      reading.rs  one lease
//! ├ context.rs            what both stand on:
//! │   conversation/       peers: who is there, and what each side has under way with the other
//! │   rendezvous.rs       where senders and registrations of one request find each other
//! │   lookups.rs          which ranks serve which address
//! │   posts.rs            whose turn it is to post
//! │   effects.rs          the time, timers, random numbers, outputs
//! └ io.rs (what goes in, what comes out, settings), groups.rs, run_set.rs, timer.rs, spoken.rs    pure
//! ```
//!
//! `quarantine.rs`, of both sides, says what pages of ended sessions wait for; `model.rs` is for model checkers
//! (feature `model`).
//!
//! ```text
//! word here      means                                        SGLang, vLLM
//! room           one request, as both engines name it         bootstrap_room, request id
//! target         a receiver, as its sender sees it            –
//! source         a sending rank, as its receiver sees it      –
//! attempt        one registration or claim of a receiver      –
//! claim          a receiver's wish to read                    the pull of a NIXL connector
//! grant          the lease on complete pages                  lease, abort deadline
//! beat           the number of a heartbeat, claim or question –
//! way            the transport connection to a peer           –
//! floor          all attempts below it are over               –
//! ```
//!
//! The receiver drives: it repeats its registration until it is acknowledged, asks about attempts
//! that have been quiet, and repeats an abort until it is acknowledged. The sender asks one thing itself,
//! `AskWrite`, repeated until `MayWrite` comes; all else that it says are answers.

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
mod receiving;
mod rendezvous;
mod run_set;
mod sending;
mod service;
mod spoken;
mod timer;

pub use crate::command::{Command, Resource};
pub use io::{Input, Limits, NodeConfig, Output, Timing};
pub use node::{Node, NodeGauges};
pub use spoken::{Spoken, SpokenError};
