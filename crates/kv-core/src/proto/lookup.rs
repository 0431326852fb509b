//! From an address to peers, on the decode side: questions to the bootstrap server and what its
//! answers mean.

use std::collections::BTreeSet;

use super::io::Output;
use super::node::Node;
use super::peer::Introduction;
use super::timer::Timer;
use crate::bootstrap::LookupId;
use crate::error::{BootstrapError, Cause, PeerCause};
use crate::id::{PeerId, SessionId};
use crate::layout::{Geometry, shares, sources};
use crate::meter::each;
use crate::offer::{OfferError, Wanted};
use crate::record::RankRecord;

impl Node {
    pub(super) fn find_sources(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get(&session) else { return };
        let question = receiver.question.clone();
        if let Some(peers) = self.directory.known(&question) {
            let peers = peers.to_vec();
            return self.take_sources(session, &peers);
        }
        let (addr, query) = question.clone();
        if let Some(lookup) = self.directory.ask(question, session) {
            self.output(Output::Lookup { lookup, addr, query });
        }
    }

    pub(super) fn on_lookup_failed(&mut self, lookup: LookupId, error: BootstrapError) {
        let Some(asking) = self.directory.asking_mut(lookup) else { return };
        asking.failures += 1;
        asking.last_error = Some(error.clone());
        let failures = asking.failures;
        if asking.waiting.is_empty() || !error.is_retryable() {
            let waiting = self.directory.finish(lookup).map(|asking| asking.waiting).unwrap_or_default();
            for session in each(waiting) {
                self.fail_receiver(session, Cause::Bootstrap(error.clone()));
            }
            return;
        }
        let pause = self.backoff(self.config.timing.lookup_retry, failures);
        self.timers.arm(Timer::Lookup(lookup), self.now + pause);
    }

    pub(super) fn ask_again(&mut self, lookup: LookupId) {
        let Some(asking) = self.directory.asking_mut(lookup) else { return };
        if asking.waiting.is_empty() {
            self.directory.finish(lookup);
            return;
        }
        let (addr, query) = asking.question.clone();
        self.output(Output::Lookup { lookup, addr, query });
    }

    pub(super) fn last_lookup_error(&self, session: SessionId) -> Option<BootstrapError> {
        let receiver = self.receivers.get(&session)?;
        self.directory.last_error(self.directory.lookup_of(&receiver.question)?)
    }

    pub(super) fn on_found(&mut self, lookup: LookupId, ranks: Vec<RankRecord>) {
        self.timers.cancel(Timer::Lookup(lookup));
        let Some(asking) = self.directory.finish(lookup) else { return };
        if asking.waiting.is_empty() {
            return;
        }
        match self.choose_sources(&ranks) {
            Ok((dp_rank, dp_size, introductions)) => {
                let mut peers = Vec::new();
                for introduction in each(introductions) {
                    match self.meet(introduction) {
                        Some(peer) => peers.push(peer),
                        None => {
                            return self.fail_all(asking.waiting, Cause::ByPeer(PeerCause::Overloaded));
                        }
                    }
                }
                // While a rank's way is lost or it is silent, a successor may register at any moment: each
                // session asks anew.
                if peers.iter().all(|&peer| self.is_in_touch(peer)) {
                    let max = self.config.limits.max_addresses;
                    self.directory.learn(&asking.question, (dp_rank, dp_size), peers.clone(), max);
                }
                for session in each(asking.waiting) {
                    self.take_sources(session, &peers);
                }
            }
            Err(cause) => self.fail_all(asking.waiting, cause),
        }
    }

    fn is_in_touch(&self, peer: PeerId) -> bool {
        self.peers.get(peer).is_some_and(|peer| !(peer.lost || peer.given_up))
    }

    fn fail_all(&mut self, sessions: BTreeSet<SessionId>, cause: Cause) {
        for session in each(sessions) {
            self.fail_receiver(session, cause.clone());
        }
    }

    /// The ranks of an engine that this rank has to do with, the one whose aux row counts first.
    fn choose_sources(&self, ranks: &[RankRecord]) -> Result<(u32, u32, Vec<Introduction>), Cause> {
        let (mut dp_rank, mut dp_size) = (0, 1);
        let wanted = Wanted::kv(&self.config.plane);
        let mut found = Vec::with_capacity(ranks.len());
        for rank in each(ranks) {
            let chosen = wanted.choose(rank).map_err(refused)?;
            let malformed = |_| Cause::Bootstrap(BootstrapError::Malformed("geometry"));
            found
                .push((chosen.offer.geometry(rank.parallel).map_err(malformed)?, &chosen.transport.metadata));
            (dp_rank, dp_size) = (rank.parallel.dp_rank, rank.parallel.dp_size);
        }
        let geometries: Vec<&Geometry> = found.iter().map(|(geometry, _)| geometry).collect();
        let here = self.config.args.geometry();
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
        let introductions = each(chosen).filter_map(|index| {
            let (rank, (geometry, metadata)) = ranks.get(index).zip(found.get(index))?;
            Some(Introduction {
                worker: rank.worker.clone(),
                incarnation: rank.incarnation,
                geometry: geometry.clone(),
                metadata: (*metadata).clone(),
            })
        });
        Ok((dp_rank, dp_size, introductions.collect()))
    }

    pub(super) fn stop_asking(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get(&session) else { return };
        if let Some(lookup) = self.directory.lookup_of(&receiver.question)
            && self.directory.leave(lookup, session)
        {
            self.directory.finish(lookup);
            self.timers.cancel(Timer::Lookup(lookup));
        }
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
