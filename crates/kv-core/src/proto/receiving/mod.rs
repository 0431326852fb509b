//! Sessions of the receiving side. The picture shows push; `reader.rs` describes what differs in
//! pull.
//!
//! ```text
//! open ─▶ lookup ─▶ hello ─▶ WaitingForInput ─ init(pages) ─▶ Register to each source ─▶ Transferring
//!          (Bootstrapping)                                         │ all parts of all sources done
//!                                                                  ▼
//!                                                               Success, pages back
//! any failure ─▶ Failed ─▶ Abort to each source that may still write ─▶ AbortAck | proof of death | fence ─▶ pages back
//! ```
//!
//! A *source* is a rank of the sending engine that writes into this rank, or lets this rank read:
//! see [`source`]. Each source serves an attempt of its own. The attempt is over once it is certain
//! that the source writes no more.

mod aborting;
mod finding;
mod groups;
mod opening;
mod parts;
mod peers;
mod planning;
mod quarantine;
mod reader;
mod reading;
mod registering;
mod source;

use std::time::Duration;

use crate::asked::ContentRequest;
use crate::few::Few;
use crate::groups::RequestCacheGroups;
use crate::id::{Attempt, AuxIndex, PeerId, Room, SessionId};
use crate::lease::{LeaseRef, TransferMode};
use crate::pages::Pages;
use crate::proto::context::Context;
use crate::proto::directory::Question;
use crate::proto::ending::{Sessions, Standing};
use crate::proto::receiving::reading::Reading;
use crate::proto::receiving::source::Source;
use crate::time::Time;

/// All receiving sessions of a worker.
#[derive(Debug, Default)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct Receiving {
    sessions: Sessions<ReceiveSession>,
}

/// One receiving session, from its opening until its pages have come back.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct ReceiveSession {
    room: Room,
    standing: Standing,
    opened: Time,
    mode: TransferMode,
    /// True if the session reads, false if it is written to. Decided when all sources have been
    /// met.
    pulls: bool,
    /// The references to the senders' leases that the router carried; empty for any sender.
    lease_refs: Vec<LeaseRef>,
    /// The entry that the receiver asks for; `None` if it asks for its room.
    content: Option<ContentRequest>,
    question: Question,
    given: Option<(Pages, Option<AuxIndex>)>,
    /// Items of cache groups, given before the pages.
    groups: Option<RequestCacheGroups>,
    /// The groups among them that no source has. Known once the pages are given.
    unheld: Vec<u16>,
    /// How many pages of the request are here already; the given pages come after them.
    prefix: usize,
    /// How many pages the request has on this rank in all. Known if pages are dealt to ranks and
    /// the server told the number of tokens.
    total_pages: Option<usize>,
    sources: Few<Source>,
    repeats: u32,
}

impl ReceiveSession {
    /// True if nothing was heard for `quiet` about the source's registered attempt.
    fn is_quiet(&self, source: usize, now: Time, quiet: Duration) -> bool {
        let since = self.sources.get(source).and_then(Source::quiet_since);
        since.is_some_and(|since| now - since >= quiet)
    }
}

impl Receiving {
    /// How many sources all sessions have.
    pub(in crate::proto) fn sources(&self) -> usize {
        self.sessions.iter().map(|(_, receiver)| receiver.sources.len()).sum()
    }

    /// Runs of pages and items in leases whose reads are not planned yet.
    pub(in crate::proto) fn granted_runs(&self) -> usize {
        let sources = self.sessions.iter().flat_map(|(_, receiver)| receiver.sources.iter());
        sources.filter_map(|source| source.reading.as_ref()).map(Reading::waiting_runs).sum()
    }

    /// The only source of a session, if it is told something as soon as the session has pages.
    pub(in crate::proto) fn addressee(&self, session: SessionId) -> Option<PeerId> {
        let sources = &self.sessions.get(&session)?.sources;
        sources.first().filter(|source| sources.len() == 1 && source.is_met()).map(|source| source.peer)
    }

    /// The source that has this open attempt at the peer.
    fn source_of(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
    ) -> Option<(SessionId, usize, &mut Source, bool)> {
        let (session, index) = cx.peers.get(id)?.outgoing().of(attempt)?;
        let receiver = self.sessions.get_mut(&session)?;
        let live = receiver.standing.is_going();
        let source = receiver.sources.get_mut(index)?;
        Some((session, index, source, live))
    }
}
