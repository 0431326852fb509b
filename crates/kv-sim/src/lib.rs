//! A deterministic simulator of the transfer protocol.
//!
//! One `u64` seed makes one world: a few prefill and decode hosts, each with the real protocol machine
//! ([`kv_core::proto::Node`]), a virtual network, virtual clocks, a virtual bootstrap server, memories of real
//! bytes, and simulated schedulers that send, abort, and reuse pages at once. In a fifth of the worlds the hosts
//! are the ranks of two engines that hold one model differently: with other tensor-, pipeline- and
//! context-parallel sizes, pages, layouts and cache groups. Nothing in a world depends on anything but its seed,
//! so that every run of a seed is the same.
//!
//! First comes a phase of faults: frames are lost, duplicated, delayed and reordered; networks are parted;
//! processes crash, are paused, and come back as new incarnations; posts fail, are slow, ignore their
//! cancellation, and write after the death of their poster. Then the world is healed, and must serve requests.
//! In both phases every step is checked for [`Violation`]s of the five promises of this library (see the table
//! in `kv/invariants/mod.rs`), and [`Planted`] bugs prove that each check can fail.
//!
//! Transports know only their own side of a connection. A connection may end for one of its two ends at any
//! moment, with nothing proven about the other end. Writes move in slices: each begins under a permission by the
//! writer's own clock, and may end late, because the writer was stopped or because its hardware goes on. Each
//! way ends its writes in one of the manners that [`kv_core::WriteFence`] names. In a fifth of the worlds hosts
//! run the worker's own loop (`kv-poll`), and are stopped between any two readings of the clock. Some peers lie,
//! in valid frames of every size.
//!
//! [`Worlds::Ec`] are worlds of the second service, the encoder cache ([`kv_ec::EcMachine`]): the same network,
//! with producers that save entries and consumers that fetch them by the hash of their content.
//!
//! [`Worlds::Dialect`] are worlds of foreign protocols ([`Dialect`]): this library's own prefill and decode
//! machines of vLLM's or SGLang's protocol, over a network of their own, in which side channels behave as ZeroMQ's
//! sockets and agents as NIXL's. Their promises, and what those protocols cannot promise, stand in
//! `interop/mod.rs`.
//!
//! [`VirtualTransport`] is the transport of these worlds without the rest, for the conformance suite, which
//! real transports pass, too.
//!
//! The simulator is not a model of performance, and it runs neither threads nor the real transports: those have
//! tests of their own. It does not show a host whose clock loses time, as the clock of a paused virtual machine
//! does: against that, no permission helps.
//!
//! # Words
//!
//! | word | what it is |
//! |---|---|
//! | host, slot | a process with one worker, and its number in the world |
//! | life | one incarnation of a host: a crash ends a life, and a restart begins the next one |
//! | half, leg | one side's end of one request |
//! | token, hold | pages that a scheduler has given to a session, which the session hands back as one |
//! | road | one of the two transports that a worker may have |
//! | way | the connection by which one life writes into the memory of another |
//! | flight | a post that has not ended; it moves piece by piece |
//! | fact | something that has happened, as the invariants are told |
//!
//! All other words are in `docs/GLOSSARY.md`.
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
mod ec;
pub mod exhaust;
mod interop;
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
pub use ec::params::EcParams;
pub use ec::stats::EcCounters;
pub use interop::Dialect;
pub use interop::params::DialectParams;
pub use interop::stats::DialectCounters;
pub use kv::params::Params;
pub use kv::stats::KvCounters;
pub use net::NetCounters;
pub use planted::{ENTRIES, Planted, SEEDS};
pub use rng::Rng;
pub use run::{Campaign, Counters, Options, Report, Worlds, run_campaign, run_seed};
pub use trace::Trace;
pub use violation::Violation;
pub use virtual_transport::{VirtualNet, VirtualTransport};
