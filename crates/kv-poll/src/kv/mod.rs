//! The KV cache as a service: its machine's words, its worker, and the handles that schedulers hold.

mod config;
mod gauges;
mod manager;
mod session;
mod start;
mod stop;
mod words;

pub use config::WorkerConfig;
pub use gauges::{Gauges, HeldBytes};
pub use manager::Manager;
pub use session::{Receiver, Receiving, Sender, Sending, Session};
pub use start::Worker;
pub use stop::{StopReport, Stopping};
pub use words::{Change, Changes, CommandRoom, Draining, KvMachine, Listener, PollSet};
