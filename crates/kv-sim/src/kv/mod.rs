//! The KV cache service in simulated worlds: its hosts, workload, ledger and invariants, and the bugs planted
//! in it.

pub(crate) mod act;
mod attempts;
pub(crate) mod boot;
mod cover;
mod draining;
pub(crate) mod fact;
mod forward;
pub(crate) mod frames;
pub(crate) mod host;
mod invariant;
pub(crate) mod invariants;
mod items;
pub(crate) mod ledger;
mod liar;
pub(crate) mod memory;
pub(crate) mod params;
mod planted;
pub(crate) mod request;
mod sabotage;
mod scheduler;
mod seen;
pub(crate) mod service;
mod sessions;
mod state;
pub(crate) mod stats;
mod unequal;
mod workload;
