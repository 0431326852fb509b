//! The receiving half of a session, on the decode side. What differs in pull mode is in `read.rs`.
//!
//! ```text
//! open ─▶ lookup ─▶ hello ─▶ WaitingForInput ─ init(pages) ─▶ Register to each source ─▶ Transferring
//!          (Bootstrapping)                                         │ all parts of all sources done
//!                                                                  ▼
//!                                                               Success, pages back
//! any failure ─▶ Failed ─▶ Abort to each source that may still write ─▶ AbortAck | proof of death ─▶ pages back
//! ```
//!
//! A *source* is a rank of the prefill engine that writes into this rank. Each is served by an
//! attempt of its own, which is over (`Over`) once it is certain that this source writes no more:
//!
//! | source | from | when |
//! |---|---|---|
//! | `Meeting` | – | the peer is not up yet |
//! | `Met` | `Meeting` | the hello was answered |
//! | `Open` | `Met` | pages are there: the registration was sent |
//! | `Closing` | `Met`, `Open` | the session failed: the abort was sent |
//! | `Over` | `Open` | all its parts are in place, or it failed and is quiet |
//! | `Over` | `Closing` | the abort was acknowledged, or the peer is proven dead and its wire quiet |

mod ending;
mod groups;
mod lookup;
mod opening;
mod parts;
mod peers;
mod planning;
mod quarantine;
mod reader;
mod reading;
mod registering;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{PeerCause, Phase};
use crate::groups::Groups;
use crate::id::{Attempt, AuxIndex, PeerId, Room, SessionId};
use crate::lease::{GrantRef, TransferMode};
use crate::meter::each;
use crate::pages::Pages;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::lookups::Question;
use crate::proto::receiving::reading::Reading;
use crate::proto::run_set::RunSet;
use crate::time::Time;

/// All receiving sessions of a worker.
#[derive(Debug, Default)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct Receiving {
    sessions: BTreeMap<SessionId, ReceiveSession>,
}

impl Receiving {
    /// How many sessions have not ended, or have pages that have not come back.
    pub(in crate::proto) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(in crate::proto) fn ids(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    pub(in crate::proto) fn deadline(&self, session: SessionId) -> Option<Duration> {
        self.sessions.get(&session).map(|receiver| receiver.deadline)
    }
}

/// A receiving session.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
struct ReceiveSession {
    room: Room,
    deadline: Duration,
    opened: Time,
    poll: KvPoll,
    mode: TransferMode,
    /// It reads, instead of being written to. Decided when all sources are met.
    pulls: bool,
    /// The sender's session that is meant.
    grants: Vec<GrantRef>,
    question: Question,
    given: Option<(Pages, Option<AuxIndex>)>,
    /// Items of state groups, given before the pages.
    groups: Option<Groups>,
    /// The groups among them that no source has. Known from the moment at which the pages are given.
    unheld: Vec<u16>,
    /// Pages of the request that are here already; the given ones come after them.
    prefix: usize,
    /// Pages that the request has on this rank in all, if they are dealt to ranks and that was told.
    whole: Option<usize>,
    sources: Vec<Source>,
    repeats: u32,
    /// Why it failed, as its sources are told.
    failure: Option<PeerCause>,
}

#[derive(Debug, Clone)]
struct Source {
    peer: PeerId,
    state: SourceState,
    attempt: Option<Attempt>,
    /// The peer has the registration, or the claim.
    registered: bool,
    parts: RunSet,
    total: Option<u32>,
    /// Groups that the source has left out.
    skipped: Vec<u16>,
    /// In pull mode: the grant, once it has come.
    reading: Option<Reading>,
    last_news: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SourceState {
    Meeting,
    Met,
    Open,
    Closing,
    Over,
}

impl ReceiveSession {
    /// True if nothing was heard about the source's registered attempt for a while.
    fn is_quiet(&self, source: usize, now: Time, quiet: Duration) -> bool {
        self.sources.get(source).is_some_and(|source| {
            // With a grant there are heartbeats.
            let waits = source.state == SourceState::Open && source.registered && source.reading.is_none();
            waits && now - source.last_news >= quiet
        })
    }

    pub(in crate::proto) fn phase(&self) -> Phase {
        if self.sources.is_empty() {
            Phase::Bootstrap
        } else if each(self.sources.iter()).any(|source| source.state == SourceState::Meeting) {
            Phase::Handshake
        } else if each(self.sources.iter()).all(|source| source.parts.len() == 0 && source.reading.is_none())
        {
            Phase::Rendezvous
        } else {
            Phase::Transfer
        }
    }

    fn all(&self, state: SourceState) -> bool {
        each(self.sources.iter()).all(|source| source.state == state)
    }
}

impl Receiving {
    /// The source with this open attempt at the peer.
    fn source_of(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
    ) -> Option<(SessionId, usize, &mut Source, bool)> {
        let (session, index) = cx.peers.get(id)?.outgoing().of(attempt)?;
        let receiver = self.sessions.get_mut(&session)?;
        let live = !receiver.poll.is_terminal();
        let source = receiver.sources.get_mut(index)?;
        Some((session, index, source, live))
    }
}
