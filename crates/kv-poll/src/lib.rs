//! What a scheduler holds of a transfer: workers with their sessions, and the queues, allocators and rank agreement
//! of a server that has none of its own.
//!
//! A [`Worker`] is the thread that runs the protocol machine of `kv-core` over a transport. No other thread
//! touches the transport. A scheduler uses the worker through a [`Manager`], which opens [`Sender`]s and
//! [`Receiver`]s. None of their calls blocks: commands go into a bounded ring, and a command for which the
//! ring has no room comes back; states are atomics; and the [`PollSet`] names the sessions that have changed,
//! behind a descriptor that fits any event loop.
//!
//! This crate is not an executor and not a transport: it runs no futures, and moves no bytes. Servers with an
//! executor of their own [await sessions](AwaitSession), or their changes as a [stream](Changes). An
//! [`EngineGroup`] makes one manager of the workers of several ranks. The [`queue`]s, [`allocator`]s and
//! [`consensus`] start no thread; a server may use them, or its own. All of this serves the KV cache; the
//! module [`worker`] has what other services share.
//!
//! ```
//! use std::error::Error;
//!
//! use kv_core::{BootstrapClient, KvArgs, KvManager, KvSender, KvSession, Pages, Transport};
//! use kv_core::{Room, SessionOptions, WorkerRole};
//! use kv_poll::{Worker, WorkerConfig};
//!
//! /// Sends the finished pages of request 7, and returns them for reuse.
//! fn send_one<P: Transport + Send + 'static>(
//!     args: KvArgs,
//!     transport: P,
//!     client: Box<dyn BootstrapClient>,
//!     finished: Pages,
//! ) -> Result<Pages, Box<dyn Error>> {
//!     let mut config = WorkerConfig::new(args, WorkerRole::Prefill);
//!     config.bootstrap = Some("10.0.0.1:8998".to_owned());
//!     let worker = Worker::start(config, transport, client)?;
//!     let manager = worker.manager();
//!
//!     let mut sender = manager.sender("10.0.0.1:8998", Room::from(7), &[], SessionOptions::default())?;
//!     sender.init(finished.len(), None)?;
//!     sender.send(finished)?;
//!     loop {
//!         // A server does other work meanwhile, or sleeps on the poll set's descriptor.
//!         manager.poll_set().drain(|change| println!("{} is {}", change.session, change.poll));
//!         // After a failure, too, the pages come back once nothing touches them any more.
//!         if let Some(reclaimed) = sender.reclaim() {
//!             println!("{} at the end, failure: {:?}", sender.poll(), sender.failure());
//!             return Ok(reclaimed.pages);
//!         }
//!     }
//! }
//! ```
//!
//! # Overlap with the forward pass
//!
//! Pages may be given before they are computed, and are moved as layers of them become final, at once
//! or when a [`ReadyEvent`](kv_core::ReadyEvent) says so. What [`send`](kv_core::KvSender::send) does is to
//! begin a chunk and announce all of it.
//!
//! ```
//! use std::error::Error;
//!
//! use kv_core::{ReadyEventError, FinalLayers, KvSender, Pages};
//! use kv_poll::Sender;
//!
//! /// Gives the pages of a prompt away, and their layers as the device gets to the end of each.
//! fn overlapped(
//!     sender: &mut Sender,
//!     prompt: Pages,
//!     layers: u32,
//!     record_event: impl Fn(u32) -> fn() -> i32,
//! ) -> Result<(), Box<dyn Error>> {
//!     sender.init(prompt.len(), None)?;
//!     let chunk = sender.begin_chunk(prompt)?;
//!     for layer in 0..layers {
//!         // Launch the kernels of the layer, and record an event behind them; the worker asks it.
//!         let query = record_event(layer);
//!         let event = move || match query() {
//!             0 => Ok(true),
//!             600 => Ok(false), // not ready
//!             code => Err(ReadyEventError::Device { code }),
//!         };
//!         sender.layers_final(FinalLayers::new(chunk, layer..layer + 1).after(event))?;
//!     }
//!     Ok(())
//! }
//! ```
#![deny(unsafe_code)]

pub mod allocator;
mod awaiting;
pub mod consensus;
mod group;
mod kv;
pub mod queue;
#[cfg(feature = "tokio")]
pub mod tokio;
pub mod worker;

pub use awaiting::{AwaitSession, TakeBack, Until};
pub use group::{
    EngineChanges, EngineDraining, EngineGroup, EngineGroupError, EngineReceiver, EngineSender, EngineSession,
};
pub use kv::{
    Change, Changes, CommandRoom, Draining, Gauges, HeldBytes, KvMachine, Listener, Manager, PollSet,
    Receiver, Receiving, Sender, Sending, Session, StopReport, Stopping, Worker, WorkerConfig,
};
pub use worker::{Publication, StartError};
