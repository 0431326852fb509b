//! What a receiving session knows of its prefill ranks, and which of them may still write.
//!
//! | a rank | from | when | may write |
//! |---|---|---|---|
//! | chosen | – | the lookup was answered | no |
//! | told | chosen | the pages were sent to the rank, which is no dummy | yes |
//! | done | told | `KV_STATUS` said success | no, unless the session fails |
//! | asked to stop | told, done | the session has failed, and `ABORT` was sent | yes |
//! | stopped | asked to stop | `ABORT_ACK` came with the number of the abort | no |
//! | dead | told, done, asked to stop | the way ended in the rank's proven death | for a while |
//! | out of sight | told, done, asked to stop | the way was lost | yes |

use kv_core::{AuxIndex, QuarantineReason, Replica, Time, WayEnd};

use super::engine::Serving;
use crate::sessions::Held;

/// A receiving session.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) room: u64,
    pub(super) addr: String,
    pub(super) replica: Replica,
    /// How many pages of the request this worker has already.
    pub(super) prefix: usize,
    pub(super) given: Option<Given>,
    pub(super) sources: Vec<Source>,
    /// How many decode ranks tell each prefill rank their pages.
    pub(super) required: u32,
    /// The number of the abort, once prefill ranks were asked to stop.
    pub(super) generation: Option<u64>,
}

/// The pages and the aux row into which the request is written.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) pages: Vec<u32>,
    pub(super) aux: AuxIndex,
}

/// One prefill rank of a session.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) serving: Serving,
    pub(super) told: bool,
    pub(super) done: bool,
    pub(super) writes: Writes,
}

/// Whether a prefill rank may still write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writes {
    No,
    /// Until the rank says that it has ended, or its process is proven dead.
    Yes(QuarantineReason),
    /// Until this moment, because the rank's process is dead.
    Until(Time),
}

impl Source {
    pub(super) fn new(serving: Serving) -> Source {
        Source { serving, told: false, done: false, writes: Writes::No }
    }

    /// The way to the rank has ended so.
    pub(super) fn ended(&mut self, now: Time, end: WayEnd) {
        let may_write = std::mem::take(&mut self.done) || self.writes != Writes::No;
        self.writes = match (end, self.writes) {
            _ if !may_write => Writes::No,
            (_, Writes::Until(until)) => Writes::Until(until),
            (WayEnd::Dead { quiet_after }, _) if quiet_after.is_zero() => Writes::No,
            (WayEnd::Dead { quiet_after }, _) => Writes::Until(now + quiet_after),
            (WayEnd::Lost, _) => Writes::Yes(QuarantineReason::WayLost),
        };
    }
}

impl Receive {
    /// What the pages wait for at the time `now`, if a rank may still write.
    pub(super) fn held(&self, now: Time) -> Option<Held> {
        let peer = |source: &Source| Some(source.serving.worker.clone());
        let mut held: Option<Held> = None;
        for source in &self.sources {
            match source.writes {
                Writes::Yes(reason) => return Some(Held { reason, peer: peer(source), until: None }),
                Writes::Until(until) if until > now => {
                    if held.as_ref().is_none_or(|held| held.until < Some(until)) {
                        let reason = QuarantineReason::PermissionEnds;
                        held = Some(Held { reason, peer: peer(source), until: Some(until) });
                    }
                }
                Writes::Until(_) | Writes::No => {}
            }
        }
        held
    }

    /// The rank with this number that was told the pages, and is no dummy.
    pub(super) fn writer(&mut self, unique: u32) -> Option<&mut Source> {
        let writes =
            |source: &&mut Source| source.told && !source.serving.dummy && source.serving.unique == unique;
        self.sources.iter_mut().find(writes)
    }

    /// True once every rank that writes has said that its pages are in place.
    pub(super) fn is_complete(&self) -> bool {
        !self.sources.is_empty() && self.sources.iter().all(|source| source.done || source.serving.dummy)
    }
}
