//! A deterministic simulator of the transfer protocol.
//!
//! One `u64` seed makes one world: a few prefill and decode hosts, each with the real protocol
//! machine ([`kv_core::proto::Node`]), on a virtual network, with virtual clocks, a virtual
//! bootstrap server, and memories of real bytes; simulated schedulers that send, abort and reuse
//! pages at once; and faults. In a fifth of the worlds the hosts are the ranks of two engines that hold
//! one model differently: other tensor-, pipeline- and context-parallel sizes, pages, layouts and state
//! groups, and every byte knows which one of the model's it is. Nothing in a world depends on anything
//! but its seed, so that every run of a seed is the same.
//!
//! First comes a phase of faults: frames are lost, doubled, delayed and reordered; networks are
//! parted; processes crash, are paused, and come back as new incarnations; posts fail, are slow,
//! ignore their cancellation, and land after the death of their poster. Then the world is healed
//! and must serve. In both, [`Violation`]s of the framework's five promises are looked for after
//! every step (see the table in `kv/invariants/mod.rs`), and [`Planted`] bugs prove that each
//! invariant can fail.
//!
//! What a transport knows it knows from one side only: connections end for one of their two ends at any
//! moment, with nothing proven about the other; writes move in slices, each begun under a permission by the
//! writer's own clock, and finished late by a writer that was stopped, or by hardware that was not; and
//! each way ends its writes in one of the manners that [`kv_core::WriteFence`] names. In a fifth of the
//! worlds hosts run the worker's own loop (`kv-poll`), stopped between any two of its looks at the clock.
//! Some peers lie, in valid frames of every size.
//!
//! The transport of these worlds keeps the same contract as the real ones: [`VirtualTransport`] is it without
//! the rest, for the conformance suite.
//!
//! It is not a model of performance, and it does not run threads or the real transports: those have tests
//! of their own. Nor does it show a host whose clock loses time, as a paused virtual machine's does: no
//! permission is good for that.
//!
//! ```
//! use kv_sim::{Options, Planted, run_seed};
//!
//! assert_eq!(run_seed(1, Options::default()).violation, None);
//!
//! let lossy = Options { planted: Some(Planted::LostPiece), ..Options::default() };
//! assert!((0..50).any(|seed| run_seed(seed, lossy).violation.is_some()));
//! ```
#![forbid(unsafe_code)]

mod clock;
mod counters;
pub mod exhaust;
mod kv;
pub mod net;
mod planted;
mod rng;
mod run;
mod trace;
mod violation;
mod virtual_transport;

pub use clock::Clock;
pub use counters::{Kinds, Tally};
pub use kv::params::Params;
pub use kv::stats::KvCounters;
pub use net::NetCounters;
pub use planted::{Planted, SEEDS};
pub use rng::Rng;
pub use run::{Campaign, Counters, Options, Report, run_campaign, run_seed};
pub use trace::Trace;
pub use violation::Violation;
pub use virtual_transport::{VirtualNet, VirtualTransport};
