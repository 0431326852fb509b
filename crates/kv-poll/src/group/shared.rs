//! What the sessions of a group share.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_core::KvArgs;

use super::roster::Roster;
use crate::kv::{Manager, Session};

/// The role of a rank's session in its group: its handle says whether it sends or receives.
#[derive(Debug)]
pub(super) enum Rank {}

#[derive(Debug)]
pub(super) struct Shared {
    /// The first rank's.
    pub(super) args: KvArgs,
    /// In the order of ranks.
    pub(super) managers: Vec<Manager>,
    /// The layers that each rank holds, if its regions say so: the first, and the one after the last.
    pub(super) layers: Vec<Option<(u32, u32)>>,
    /// Readable while a rank's poll set is.
    pub(super) wake: OwnedFd,
    /// The open sessions.
    pub(super) roster: Mutex<Roster<Session<Rank>>>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Roster<Session<Rank>>> {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
