//! How a receiving session begins: its sources are found and met, and its pages are given.

use crate::error::Cause;
use crate::few::Few;
use crate::id::{AuxIndex, PeerId, Room, SessionId};
use crate::lease::TransferMode;
use crate::meter::each;
use crate::pages::Pages;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::{Peer, of_incarnation};
use crate::proto::ending::{Ending, Standing};
use crate::proto::groups::check_aux;
use crate::proto::io::LONGEST;
use crate::proto::receiving::source::Source;
use crate::proto::receiving::{ReceiveSession, Receiving};
use crate::proto::rendezvous::Named;
use crate::record::WorkerRole;
use crate::session_options::SessionOptions;
use crate::trace::KvWhat;
use crate::transport::Directions;

impl Receiving {
    pub(in crate::proto) fn open_receiver(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        room: Room,
        addr: String,
        options: SessionOptions,
    ) {
        let deadline = options.deadline.unwrap_or(cx.config.timing.session_deadline).min(LONGEST);
        let role = options.source.unwrap_or(WorkerRole::Prefill);
        let question =
            cx.lookups.question((addr, &cx.config.service.name), role, &room, options.prefill_dp_rank);
        let mode = options.mode.unwrap_or(cx.config.args.transfer_mode());
        let geometry = cx.config.args.geometry();
        let dealt = options.tokens.filter(|_| geometry.layout.dcp_size > 1);
        let receiver = ReceiveSession {
            room,
            standing: Standing::new(deadline),
            opened: cx.fx.now(),
            mode,
            pulls: mode == TransferMode::Pull,
            lease_refs: options.lease_refs,
            content: options.content,
            question,
            given: None,
            groups: None,
            unheld: Vec::new(),
            prefix: options.prefix_pages,
            total_pages: dealt.map(|tokens| geometry.own_pages_of(tokens)),
            sources: Few::default(),
            repeats: 0,
        };
        if !self.open(cx, session, receiver) {
            return;
        }
        if let Some(cause) = self.note_receiver(cx, session) {
            return self.fail(cx, session, cause);
        }
        self.find_sources(cx, session);
    }

    /// Notes the room of a receiver whose engine appends suffixes. If another open receiver's id
    /// differs only in the suffix, the other side could mistake one for the other: the cause says
    /// so.
    pub(super) fn note_receiver(&mut self, cx: &mut Context, session: SessionId) -> Option<Cause> {
        if !cx.config.args.suffixes_requests() {
            return None;
        }
        let named = Named::new(self.sessions.get(&session)?.room.clone(), true);
        let other = match cx.rendezvous.note_receiver(&named, session) {
            Ok(found) => found.and_then(|other| self.sessions.get(&other)).map(|other| other.room.clone()),
            Err(one) => Some(one),
        };
        let room = named.room;
        other.filter(|other| *other != room).map(|other| Cause::AmbiguousRoom { room, other })
    }

    pub(super) fn take_sources(&mut self, cx: &mut Context, session: SessionId, peers: &[PeerId]) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if !receiver.standing.is_going() {
            return;
        }
        cx.fx.tell(session, || KvWhat::SourcesKnown { sources: peers.len() });
        for &peer in each(peers) {
            receiver.sources.push(Source::new(peer, cx.fx.now()));
        }
        for &id in each(peers) {
            if let Some(peer) = cx.peers.get_mut(id) {
                peer.outgoing_mut().wait(session);
                cx.watch_peer(id);
            }
        }
        self.source_came_up(cx, session);
    }

    /// A peer for which the session waits may be up now.
    pub(in crate::proto) fn source_came_up(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Met { all, refusal, ways } = receiver.meet_sources(cx);
        if let Some((peer, cause)) = refusal {
            return self.fail_by(cx, session, Some(peer), cause);
        }
        if receiver.standing.poll() != KvPoll::Bootstrapping || !all {
            return;
        }
        if receiver.mode == TransferMode::Auto {
            // A reference belongs to a sender that waits for nobody: reading needs no registration
            // first.
            receiver.pulls = ways.read && (!receiver.lease_refs.is_empty() || !ways.write);
        }
        let pulls = receiver.pulls;
        receiver.standing.reach(&mut cx.fx, session, KvPoll::WaitingForInput);
        if pulls {
            if let Some(cause) = self.check_leases(cx, session) {
                return self.fail(cx, session, cause);
            }
            // The leases are acquired at once, and kept alive from now on, however long the request
            // waits for pages of its own.
            self.open_attempts(cx, session);
            self.say_registrations(cx, session);
        }
        self.register(cx, session);
    }

    pub(in crate::proto) fn init_receiver(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        pages: Pages,
        aux: Option<AuxIndex>,
    ) {
        let geometry = cx.config.args.geometry();
        let bad = pages.list().check_below(geometry.num_pages).err().map(Cause::BadPages);
        let bad = bad.or_else(|| check_aux(aux, geometry.aux_rows().unwrap_or(0)));
        let Some(receiver) = self.sessions.get_mut(&session) else {
            return cx.fx.release(session, pages);
        };
        if !receiver.standing.is_going() {
            return cx.fx.release(session, pages);
        }
        if receiver.given.is_some() {
            self.fail(cx, session, Cause::InitOrder);
            return cx.fx.release(session, pages);
        }
        cx.fx.tell(session, || KvWhat::PagesGiven { pages: pages.len() });
        receiver.given = Some((pages, aux));
        match bad {
            Some(cause) => self.fail(cx, session, cause),
            None => self.register(cx, session),
        }
    }

    /// Registers at all sources, once pages and peers are there.
    pub(super) fn register(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        if receiver.standing.poll() != KvPoll::WaitingForInput || receiver.given.is_none() {
            return;
        }
        let unheld = self.unheld_groups(cx, receiver);
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        receiver.unheld = unheld;
        receiver.standing.reach(&mut cx.fx, session, KvPoll::Transferring);
        let (pulls, sources) = (receiver.pulls, receiver.sources.len());
        if pulls {
            for index in each(0..sources) {
                self.start_reading(cx, session, index);
            }
        } else {
            self.open_attempts(cx, session);
            self.say_registrations(cx, session);
        }
    }

    pub(super) fn open_attempts(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        for (index, source) in each(receiver.sources.iter_mut().enumerate()) {
            let Some(peer) = cx.peers.get_mut(source.peer) else { continue };
            source.open(peer.outgoing_mut().open(session, index), cx.fx.now());
        }
    }

    /// Why the leases in the references cannot be leases of these sources.
    pub(super) fn check_leases(&self, cx: &Context, session: SessionId) -> Option<Cause> {
        let receiver = self.sessions.get(&session)?;
        let first = receiver.lease_refs.first()?;
        let sources = || each(receiver.sources.iter()).filter_map(|source| cx.peers.get(source.peer));
        let unnamed = |peer: &&Peer| of_incarnation(&receiver.lease_refs, peer.incarnation()).is_none();
        // A single reference may be for any source; the others are then acquired by the room.
        // Several references name all sources.
        let stale = match receiver.lease_refs.len() {
            1 if sources().all(|peer| unnamed(&peer)) => sources().next(),
            1 => None,
            _ => sources().find(unnamed),
        };
        if let Some(peer) = stale {
            return Some(Cause::StaleLease { referenced: first.incarnation, found: peer.incarnation() });
        }
        sources().find_map(|peer| {
            let pages = of_incarnation(&receiver.lease_refs, peer.incarnation())?.pages.as_ref()?;
            pages.check_below(peer.maps().geometry().num_pages).err().map(Cause::LeaseOutOfRange)
        })
    }
}

/// What a session knows after meeting its sources.
struct Met {
    /// True if every source has been met.
    all: bool,
    /// The first source that refuses, and its cause.
    refusal: Option<(PeerId, Cause)>,
    /// The directions that the transport recommends for all of the sources.
    ways: Directions,
}

impl ReceiveSession {
    /// Meets the sources that are up.
    fn meet_sources(&mut self, cx: &Context) -> Met {
        let mut met = Met { all: true, refusal: None, ways: Directions::BOTH };
        for source in each(self.sources.iter_mut()) {
            if let Some(peer) = cx.peers.get(source.peer) {
                if peer.is_up() {
                    source.meet();
                }
                if source.is_met() && met.refusal.is_none() {
                    met.refusal = peer.refuses().map(|cause| (source.peer, cause.clone()));
                }
                met.ways = met.ways.and(peer.directions());
            }
            met.all &= source.is_met();
        }
        met
    }
}
