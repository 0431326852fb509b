//! What an engine group, its clones and its sessions share.

use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_core::KvArgs;

use super::roster::Roster;
use crate::kv::{Manager, Session};
use crate::worker::waiters::WakesLater;

/// The role of a rank's session inside a group. Whether the session sends or receives is in the type of the
/// group's handle.
#[derive(Debug)]
pub(super) enum Rank {}

#[derive(Debug)]
pub(super) struct Shared {
    /// The arguments of the first rank's worker.
    pub(super) args: KvArgs,
    /// The managers of the ranks, in the order of ranks.
    pub(super) managers: Vec<Manager>,
    /// The layers that each rank holds, as the first layer and the layer after the last; `None` for a rank
    /// whose regions do not say which layers they hold.
    pub(super) layers: Vec<Option<(u32, u32)>>,
    /// An epoll descriptor that is readable while the poll set of any rank is, or `untold`.
    pub(super) wake: OwnedFd,
    /// An eventfd that is readable after a drain has ended before the scheduler was told everything.
    pub(super) untold: OwnedFd,
    /// The open sessions. Locked for moments, and never while code of the caller runs.
    pub(super) roster: Mutex<Roster<Session<Rank>>>,
}

impl Shared {
    pub(super) fn lock(&self) -> Locked<'_> {
        let wakes = WakesLater::begin();
        Locked { roster: self.roster.lock().unwrap_or_else(PoisonError::into_inner), _wakes: wakes }
    }
}

/// The open sessions, while they are locked. What is done to them may end sessions, of which tasks are told: these
/// are woken after the lock is released, because a waker is the executor's code, which may use the group.
pub(super) struct Locked<'a> {
    /// Released first.
    roster: MutexGuard<'a, Roster<Session<Rank>>>,
    _wakes: WakesLater,
}

impl Deref for Locked<'_> {
    type Target = Roster<Session<Rank>>;

    fn deref(&self) -> &Self::Target {
        &self.roster
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.roster
    }
}
