//! From an address to peers, on the decode side: questions to the bootstrap server and what its
//! answers mean.

use std::collections::BTreeSet;

use crate::bootstrap::{LookupId, RankRecord};
use crate::error::{BootstrapError, Cause, Mismatch, PeerCause};
use crate::id::{PeerId, SessionId};
use crate::layout::{Geometry, shares, sources};
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::conversation::Introduction;
use crate::proto::io::Output;
use crate::proto::receiving::Receiving;
use crate::proto::timer::Timer;

impl Receiving {
    pub(super) fn find_sources(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        let question = receiver.question.clone();
        if let Some(peers) = cx.lookups.known(&question) {
            let peers = peers.to_vec();
            return self.take_sources(cx, session, &peers);
        }
        let (addr, query) = question.clone();
        if let Some(lookup) = cx.lookups.ask(question, session) {
            cx.fx.output(Output::Lookup { lookup, addr, query });
        }
    }

    pub(in crate::proto) fn on_lookup_failed(
        &mut self,
        cx: &mut Context,
        lookup: LookupId,
        error: BootstrapError,
    ) {
        let Some(asking) = cx.lookups.asking_mut(lookup) else { return };
        asking.failures += 1;
        asking.last_error = Some(error.clone());
        let failures = asking.failures;
        if asking.waiting.is_empty() || !error.is_retryable() {
            let waiting = cx.lookups.finish(lookup).map(|asking| asking.waiting).unwrap_or_default();
            for session in each(waiting) {
                self.fail_receiver(cx, session, Cause::Bootstrap(error.clone()));
            }
            return;
        }
        let pause = cx.fx.backoff(cx.config.timing.lookup_retry, failures);
        cx.fx.arm(Timer::Lookup(lookup), cx.fx.now() + pause);
    }

    pub(in crate::proto) fn ask_again(&mut self, cx: &mut Context, lookup: LookupId) {
        let Some(asking) = cx.lookups.asking_mut(lookup) else { return };
        if asking.waiting.is_empty() {
            cx.lookups.finish(lookup);
            return;
        }
        let (addr, query) = asking.question.clone();
        cx.fx.output(Output::Lookup { lookup, addr, query });
    }

    pub(in crate::proto) fn last_lookup_error(
        &self,
        cx: &Context,
        session: SessionId,
    ) -> Option<BootstrapError> {
        let receiver = self.sessions.get(&session)?;
        cx.lookups.last_error(cx.lookups.lookup_of(&receiver.question)?)
    }

    pub(in crate::proto) fn on_found(&mut self, cx: &mut Context, lookup: LookupId, ranks: Vec<RankRecord>) {
        cx.fx.cancel(Timer::Lookup(lookup));
        let Some(asking) = cx.lookups.finish(lookup) else { return };
        if asking.waiting.is_empty() {
            return;
        }
        match self.choose_sources(cx, ranks) {
            Ok((dp_rank, dp_size, introductions)) => {
                let mut peers = Vec::new();
                for introduction in each(introductions) {
                    match cx.meet(introduction) {
                        Some(peer) => peers.push(peer),
                        None => {
                            return self.fail_all(cx, asking.waiting, Cause::ByPeer(PeerCause::Overloaded));
                        }
                    }
                }
                // While a rank's way is lost or it is silent, a successor may register at any moment: each
                // session asks anew.
                if peers.iter().all(|&peer| self.is_in_touch(cx, peer)) {
                    let max = cx.config.limits.max_addresses;
                    cx.lookups.learn(&asking.question, (dp_rank, dp_size), peers.clone(), max);
                }
                for session in each(asking.waiting) {
                    self.take_sources(cx, session, &peers);
                }
            }
            Err(cause) => self.fail_all(cx, asking.waiting, cause),
        }
    }

    fn is_in_touch(&self, cx: &Context, peer: PeerId) -> bool {
        cx.peers.get(peer).is_some_and(|peer| !(peer.is_out_of_touch()))
    }

    fn fail_all(&mut self, cx: &mut Context, sessions: BTreeSet<SessionId>, cause: Cause) {
        for session in each(sessions) {
            self.fail_receiver(cx, session, cause.clone());
        }
    }

    /// The ranks of an engine that this rank has to do with, the one whose aux row counts first.
    fn choose_sources(
        &self,
        cx: &Context,
        ranks: Vec<RankRecord>,
    ) -> Result<(u32, u32, Vec<Introduction>), Cause> {
        let malformed = Cause::Bootstrap(BootstrapError::Malformed("geometry"));
        let (mut dp_rank, mut dp_size) = (0, 1);
        for rank in each(&ranks) {
            if rank.plane != cx.config.plane {
                return Err(Cause::Incompatible(Mismatch {
                    field: "plane".to_owned(),
                    ours: cx.config.plane.clone(),
                    theirs: rank.plane.clone(),
                }));
            }
            rank.geometry.validate().map_err(|_| malformed.clone())?;
            (dp_rank, dp_size) = (rank.parallel().dp_rank, rank.parallel().dp_size);
        }
        let geometries: Vec<&Geometry> = ranks.iter().map(|rank| &rank.geometry).collect();
        let here = cx.config.args.geometry();
        let chosen: Vec<usize> = match sources(here, &geometries) {
            Ok(mut found) => {
                found.sort_by_key(|source| !source.aux);
                found.iter().map(|source| source.index).collect()
            }
            // Those in the right place are met all the same: they refuse, and their senders are told.
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
        let mut ranks: Vec<Option<RankRecord>> = ranks.into_iter().map(Some).collect();
        let chosen = chosen.into_iter().filter_map(|index| ranks.get_mut(index)?.take());
        let introductions = chosen.map(|rank| Introduction {
            worker: rank.worker,
            incarnation: rank.incarnation,
            geometry: rank.geometry,
            metadata: rank.metadata,
        });
        Ok((dp_rank, dp_size, introductions.collect()))
    }

    pub(super) fn stop_asking(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        if let Some(lookup) = cx.lookups.lookup_of(&receiver.question)
            && cx.lookups.leave(lookup, session)
        {
            cx.lookups.finish(lookup);
            cx.fx.cancel(Timer::Lookup(lookup));
        }
    }
}
