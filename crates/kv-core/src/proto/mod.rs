//! The protocol machine of the KV cache: sans-IO, one [`Node`] per worker.
//!
//! Each part of the machine owns its state, and the other parts call its functions. A part may use
//! the parts below it in this picture, and none above it. `conversation/` extends the context with
//! the messages to peers.
//!
//! ```text
//! node/                   routes inputs and timers to the parts
//! │   peers, posts        what peers do, and posts                  service.rs  the node as a `Machine`
//! ├ sending/              sessions of the prefill side
//! │   opening, attaching, chunks, groups, letting_go    a session, from its room until its receivers need nothing more
//! │   attempts, over, peers   what receivers register, abort, release     given.rs   what the scheduler has given
//! │   write.rs            push: parts are planned and posted        target.rs  one receiver
//! │   holder.rs           pull: leases are given, kept and ended    former_leases.rs   what became of leases
//! ├ receiving/            sessions of the decode side
//! │   opening, finding, registering, aborting     a session, from its lookup until no source writes any more
//! │   parts, groups, peers                        what sources tell; their silence   source.rs   one source
//! │   reader.rs, planning.rs                      pull: leases are kept alive, pages read      reading.rs  one lease
//! ├ ending.rs             how sessions end: one final status, peers told, pages back when all is quiet
//! ├ context.rs            what sending and receiving share:
//! │   conversation/       which peers there are, and what each side has under way with the other
//! │   rendezvous/         where senders and registrations of one request find each other
//! │   directory.rs        which ranks serve which address
//! │   posts.rs            whose turn it is to post
//! │   telling.rs          messages as events for the listener
//! │   effects.rs          the time, timers, random numbers, outputs, events; tracer.rs holds the events
//! └ io.rs (inputs, outputs, configuration), groups.rs, run_set.rs, timer.rs, spoken.rs    pure
//! ```
//!
//! Messages are typed and their senders are known everywhere, except in `conversation/edge.rs`:
//! only that file turns frames into messages and messages into frames, with the codec of the
//! conversation that a frame names. (`node/service.rs` looks into a hello for its transport, before
//! the machine is given the frame.)
//!
//! Both `quarantine.rs` files say what the pages of ended sessions wait for. `node/model.rs` is for
//! model checkers (feature `model`).
//!
//! ```text
//! word           means                                        SGLang, vLLM
//! room           one request, as both engines name it         bootstrap_room, request id
//! target         a receiver, as its sender sees it            –
//! source         a sending rank, as its receiver sees it      –
//! attempt        one try of a receiver at one source          –
//! acquire        a registration that asks for a lease         the pull of a NIXL connector
//! lease          the right to read complete pages for a time  lease, abort deadline
//! number         pairs a heartbeat, an acquire message or another question with its answer    –
//! way            the transport connection to a peer           –
//! low watermark  all attempts below this number are over      –
//! ```
//!
//! The receiver drives the protocol. It repeats its registration until the sender acknowledges it,
//! asks about attempts of which it has heard nothing for a while, and repeats an abort until the
//! sender acknowledges it. The sender asks only one question, with a heartbeat: whether it may
//! write. The sender tells what has become of an attempt (parts in place, pages granted, a failure)
//! once unasked, and again for each question; everything else that the sender says is an answer.

mod context;
mod conversation;
mod directory;
mod effects;
mod ending;
mod groups;
mod io;
mod node;
mod posts;
mod receiving;
mod rendezvous;
mod run_set;
mod sending;
mod spoken;
mod telling;
mod timer;
mod tracer;

pub use crate::command::{Command, Resource};
pub use io::{Input, Limits, NodeConfig, Output, Timing};
pub use node::{Node, NodeGauges};
#[doc(hidden)]
pub use sending::given::{Given, Writable};
pub use spoken::{Spoken, SpokenError};
