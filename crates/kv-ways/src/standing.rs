//! How the members of [`Ways`](crate::Ways) stand, told to whoever asks: which have been left out, and over which
//! of them peers are connected.

use std::sync::{Arc, Mutex, PoisonError};

use kv_core::TransportError;

/// Tells how the members stand, also while a worker's thread owns the transport. Clones see the same members.
#[derive(Debug, Clone, Default)]
pub struct Standing {
    members: Arc<Mutex<Vec<MemberStanding>>>,
}

/// How one member stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberStanding {
    /// The name by which peers know the member.
    pub name: &'static str,
    /// Why the member was left out: it refused a region, or could not tell its metadata. Peers are not told of
    /// such a member. `None` for a member that is in use.
    pub left_out: Option<TransportError>,
    /// Peers that are connected over the member.
    pub peers: usize,
    /// Peers that were connected over the member since the start.
    pub connected: u64,
    /// Peers that the member could not connect since the start, so that another member was tried.
    pub refused: u64,
    /// Connected peers to which the member has lost the way since the start; deaths of peers do not count.
    pub lost: u64,
    /// Why the member could not connect the last peer of those that it could not connect.
    pub last_refusal: Option<TransportError>,
}

impl Standing {
    pub(crate) fn of(names: impl Iterator<Item = &'static str>) -> Standing {
        let member = |name| MemberStanding {
            name,
            left_out: None,
            peers: 0,
            connected: 0,
            refused: 0,
            lost: 0,
            last_refusal: None,
        };
        Standing { members: Arc::new(Mutex::new(names.map(member).collect())) }
    }

    /// All members as they stand now, the preferred one first.
    pub fn members(&self) -> Vec<MemberStanding> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The number of peers that are connected over each member, by name.
    pub fn peers(&self) -> Vec<(&'static str, usize)> {
        self.members().into_iter().map(|member| (member.name, member.peers)).collect()
    }

    /// The members that were left out, by name, each with its first error: why it refused a region, or could
    /// not tell its metadata. Peers are not told of these members.
    pub fn refusals(&self) -> Vec<(&'static str, TransportError)> {
        let members = self.members().into_iter();
        members.filter_map(|member| Some((member.name, member.left_out?))).collect()
    }

    pub(crate) fn leave_out(&self, name: &'static str, error: TransportError) {
        self.note(name, |member| _ = member.left_out.get_or_insert(error));
    }

    pub(crate) fn connected(&self, name: &'static str) {
        self.note(name, |member| {
            member.peers += 1;
            member.connected += 1;
        });
    }

    pub(crate) fn refused(&self, name: &'static str, error: &TransportError) {
        self.note(name, |member| {
            member.refused += 1;
            member.last_refusal = Some(error.clone());
        });
    }

    /// A connected peer is connected no more: `lost` if the way to the peer was lost.
    pub(crate) fn gone(&self, name: &'static str, lost: bool) {
        self.note(name, |member| {
            member.peers = member.peers.saturating_sub(1);
            member.lost += u64::from(lost);
        });
    }

    fn note(&self, name: &'static str, change: impl FnOnce(&mut MemberStanding)) {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(member) = members.iter_mut().find(|member| member.name == name) {
            change(member);
        }
    }
}
