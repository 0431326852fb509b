//! From an address to peers: the receiver's questions to the bootstrap server, and the meaning of
//! the answers.

use std::collections::{BTreeSet, VecDeque};

use crate::asked::Service;
use crate::bootstrap::LookupId;
use crate::error::{BootstrapError, Cause, Mismatch};
use crate::id::{PeerId, SessionId};
use crate::layout::{Geometry, shares, sources};
use crate::meter::each;
use crate::offer::{Chosen, OfferError, Wanted};
use crate::proto::context::Context;
use crate::proto::conversation::Introduction;
use crate::proto::directory::AfterFailure;
use crate::proto::ending::Ending;
use crate::proto::io::Output;
use crate::proto::receiving::Receiving;
use crate::proto::timer::Timer;
use crate::record::{RankRecord, ServiceOffer, TransportOffer};
use crate::trace::{KvWhat, Who};
use crate::wire::Versions;

impl Receiving {
    pub(super) fn find_sources(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        if let Some(peers) = cx.lookups.known(&receiver.question) {
            let peers = peers.to_vec();
            if !each(&peers).any(|&peer| cx.may_be_met_better(peer)) {
                // The answer is remembered, so that nobody has met these peers for this session.
                for &peer in each(&peers) {
                    cx.want_again(peer);
                }
                return self.take_sources(cx, session, &peers);
            }
        }
        let question = receiver.question.clone();
        let (addr, query) = question.clone();
        if let Some(lookup) = cx.lookups.ask(question, session) {
            cx.fx.tell(session, || KvWhat::Asked { again: false });
            cx.fx.output(Output::Lookup { lookup, addr, query });
        }
    }

    pub(in crate::proto) fn on_lookup_failed(
        &mut self,
        cx: &mut Context,
        lookup: LookupId,
        error: BootstrapError,
    ) {
        cx.fx.tell(Who::default(), || KvWhat::NotAnswered(error.clone()));
        match cx.lookups.failed(lookup, &error) {
            AfterFailure::Again { failures } => {
                let pause = cx.fx.backoff(cx.config.timing.lookup_retry, failures);
                cx.fx.arm(Timer::Lookup(lookup), cx.fx.now() + pause);
            }
            AfterFailure::GiveUp(waiting) => self.fail_all(cx, waiting, Cause::Bootstrap(error)),
        }
    }

    pub(in crate::proto) fn ask_again(&mut self, cx: &mut Context, lookup: LookupId) {
        if let Some((addr, query)) = cx.lookups.again(lookup).cloned() {
            cx.fx.tell(Who::default(), || KvWhat::Asked { again: true });
            cx.fx.output(Output::Lookup { lookup, addr, query });
        }
    }

    pub(in crate::proto) fn last_lookup_error(
        &self,
        cx: &Context,
        session: SessionId,
    ) -> Option<BootstrapError> {
        let receiver = self.sessions.get(&session)?;
        cx.lookups.last_error(&receiver.question)
    }

    pub(in crate::proto) fn on_found(&mut self, cx: &mut Context, lookup: LookupId, ranks: Vec<RankRecord>) {
        cx.fx.cancel(Timer::Lookup(lookup));
        let Some((question, waiting)) = cx.lookups.finish(lookup) else { return };
        if waiting.is_empty() {
            return;
        }
        let (named, sessions) = (ranks.len(), waiting.len());
        cx.fx.tell(Who::default(), || KvWhat::Answered { ranks: named, sessions });
        match choose_sources(cx, &ranks) {
            Ok((dp_rank, dp_size, introductions)) => {
                let peers = match meet_all(cx, introductions, &waiting) {
                    Ok(peers) => peers,
                    Err(cause) => return self.fail_all(cx, waiting, cause),
                };
                // While a rank's way is lost or the rank is silent, a successor may register at any
                // moment; a rank that takes no new requests leaves the server. Each session asks anew.
                if peers.iter().all(|&peer| self.is_here_to_stay(cx, peer)) {
                    let max = cx.config.limits.max_addresses;
                    cx.lookups.learn(&question, (dp_rank, dp_size), peers.clone(), max);
                }
                for session in each(waiting) {
                    self.take_sources(cx, session, &peers);
                }
            }
            Err(cause) => self.fail_all(cx, waiting, cause),
        }
    }

    fn is_here_to_stay(&self, cx: &Context, peer: PeerId) -> bool {
        cx.peers.get(peer).is_some_and(|peer| !peer.is_out_of_touch() && !peer.is_leaving())
    }

    fn fail_all(&mut self, cx: &mut Context, sessions: BTreeSet<SessionId>, cause: Cause) {
        for session in each(sessions) {
            self.fail(cx, session, cause.clone());
        }
    }

    pub(super) fn stop_asking(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        if let Some(lookup) = cx.lookups.leave(&receiver.question, session) {
            cx.fx.cancel(Timer::Lookup(lookup));
        }
    }
}

/// Meets all ranks of an answer, for the sessions that waited for the answer. No rank may take the
/// place of another rank of the same answer.
fn meet_all(
    cx: &mut Context,
    introductions: Vec<Introduction>,
    waiting: &BTreeSet<SessionId>,
) -> Result<Vec<PeerId>, Cause> {
    let Some(&session) = waiting.first() else { return Ok(Vec::new()) };
    let (mut peers, mut met) = (Vec::new(), BTreeSet::new());
    for introduction in each(introductions) {
        let cause = match cx.meet(introduction) {
            None => Cause::TooManyPeers { max: cx.config.limits.max_peers },
            Some(peer) if !met.insert(peer) => {
                Cause::Bootstrap(BootstrapError::Malformed("two ranks are the same worker"))
            }
            Some(peer) => {
                // A session needs the peer from now on.
                if let Some(peer) = cx.peers.get_mut(peer) {
                    peer.outgoing_mut().wait(session);
                }
                peers.push(peer);
                continue;
            }
        };
        for peer in each(peers) {
            if let Some(peer) = cx.peers.get_mut(peer) {
                peer.outgoing_mut().wait_no_more(session);
            }
        }
        return Err(cause);
    }
    Ok(peers)
}

/// The ranks of an engine from which this rank gets bytes or a release, beginning with the rank
/// whose aux row counts.
fn choose_sources(cx: &Context, ranks: &[RankRecord]) -> Result<(u32, u32, Vec<Introduction>), Cause> {
    let (mut dp_rank, mut dp_size) = (0, 1);
    let mut found = Vec::with_capacity(ranks.len());
    for rank in each(ranks) {
        let (transports, offer) = choose(cx, rank)?;
        let geometry = offer.geometry(rank.parallel).map_err(|_| unreadable(cx, offer))?;
        found.push((geometry, transports));
        (dp_rank, dp_size) = (rank.parallel.dp_rank, rank.parallel.dp_size);
    }
    let geometries: Vec<&Geometry> = found.iter().map(|(geometry, _)| geometry).collect();
    let here = cx.config.args.geometry();
    let chosen: Vec<usize> = match sources(here, &geometries) {
        Ok(mut found) => {
            found.sort_by_key(|source| !source.aux);
            found.iter().map(|source| source.index).collect()
        }
        // Ranks in the right place are met nevertheless: they refuse, and their senders are told.
        Err(mismatch) => {
            let linked = (0..).zip(&geometries).filter(|(_, there)| shares(there, here).is_some());
            let linked: Vec<_> = linked.filter(|(_, there)| here.check(there).is_err()).collect();
            if ranks.is_empty() {
                return Err(Cause::Bootstrap(BootstrapError::UnknownRank));
            }
            if linked.is_empty() {
                return Err(Cause::Incompatible(mismatch));
            }
            linked.into_iter().map(|(index, _)| index).collect()
        }
    };
    let introductions = each(chosen).filter_map(|index| {
        let (rank, (geometry, transports)) = ranks.get(index).zip(found.get(index))?;
        Some(Introduction {
            worker: rank.worker.clone(),
            incarnation: rank.incarnation,
            geometry: Some(geometry.clone()),
            transports: transports.clone(),
        })
    });
    Ok((dp_rank, dp_size, introductions.collect()))
}

/// The transports that both sides have, in this worker's order, and the offer of the service.
fn choose<'a>(
    cx: &Context,
    rank: &'a RankRecord,
) -> Result<(VecDeque<TransportOffer>, &'a ServiceOffer), Cause> {
    let (mut ways, mut offer, mut refusal) = (VecDeque::new(), None, None);
    for own in each(&cx.config.transports) {
        match choose_over(cx, own, rank) {
            Ok(chosen) => {
                ways.push_back(chosen.transport.clone());
                offer = Some(chosen.offer);
            }
            Err(cause) => refusal = Some(refusal.unwrap_or(cause)),
        }
    }
    offer.map(|offer| (ways, offer)).ok_or_else(|| match refusal {
        Some(Cause::Incompatible(Mismatch { field, theirs, .. })) if field == "transport" => {
            let ours: Vec<String> = each(&cx.config.transports).map(TransportOffer::to_string).collect();
            Cause::Incompatible(Mismatch { field, ours: ours.join(", "), theirs })
        }
        Some(cause) => cause,
        None => Cause::Bootstrap(BootstrapError::UnknownRank),
    })
}

/// The offer of the service that fits; if no version is common, the rank's only offer. Even then
/// the two workers meet, if the geometry can be read, so that both sides are told.
fn choose_over<'a>(cx: &Context, own: &TransportOffer, rank: &'a RankRecord) -> Result<Chosen<'a>, Cause> {
    let Versions { min, max } = cx.config.versions.get();
    let Service { name: service, compatibility, .. } = &cx.config.service;
    let versions = u16::from(min)..=u16::from(max);
    let spoken = Wanted { service, compatibility, versions, ..Wanted::kv(&own.name) };
    spoken.choose(rank).or_else(|error| match error {
        OfferError::Differs(differs) if differs.field == "version" => {
            let any = Wanted { versions: 0..=u16::MAX, ..spoken };
            any.choose(rank).map_err(refused)
        }
        error => Err(refused(error)),
    })
}

/// Why a rank's geometry cannot be read: a newer version wrote it, or it is damaged.
fn unreadable(cx: &Context, offer: &ServiceOffer) -> Cause {
    let narrow = |version: u16| u8::try_from(version).unwrap_or(u8::MAX);
    let (ours, theirs) =
        (cx.config.versions.get(), Versions { min: narrow(offer.min), max: narrow(offer.max) });
    match ours.common(theirs) {
        Some(_) => Cause::Bootstrap(BootstrapError::Malformed("the geometry of a rank cannot be read")),
        None => Cause::Versions { ours, theirs },
    }
}

fn refused(error: OfferError) -> Cause {
    match error {
        OfferError::Differs(mismatch) => Cause::Incompatible(mismatch),
        OfferError::Ambiguous { worker, first, second } => {
            Cause::Bootstrap(BootstrapError::Ambiguous { worker, first, second })
        }
    }
}
