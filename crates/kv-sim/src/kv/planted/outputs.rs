//! Planted bugs in what machines report to their schedulers: states, and pages that come back.

use kv_core::proto::{Output, Resource};
use kv_core::{CacheGroupItems, Cause, KvPoll, PageList, Pages, RequestCacheGroups, SessionId};

use crate::kv::service::KvWorld;
use crate::net::lives::LifeId;
use crate::planted::Planted;

impl KvWorld {
    pub(crate) fn sabotage_outputs(&mut self, life: LifeId, outputs: Vec<Output>) -> Vec<Output> {
        let Some(planted) = self.planted else { return outputs };
        let mut kept = Vec::with_capacity(outputs.len());
        for output in outputs {
            self.spoil_status(planted, life, output, &mut kept);
        }
        kept
    }

    fn spoil_status(&mut self, planted: Planted, life: LifeId, output: Output, kept: &mut Vec<Output>) {
        match (planted, output) {
            (Planted::EndSwallowed, Output::Status { session, poll, .. }) if poll.is_terminal() => {
                self.service.sabotage.hushed.insert((life, session));
            }
            (Planted::EndSwallowed, Output::Release { session, resource: Resource::Pages(_) })
                if self.service.sabotage.hushed.contains(&(life, session)) => {}
            (Planted::WrongReason, Output::Status { session, poll, failure: Some(mut failure) }) => {
                failure.cause = Cause::Aborted;
                kept.push(Output::Status { session, poll, failure: Some(failure) });
            }
            (Planted::EndTwice, Output::Status { session, poll, failure }) if poll.is_terminal() => {
                kept.push(Output::Status { session, poll, failure: failure.clone() });
                kept.push(Output::Status { session, poll, failure });
            }
            (Planted::NamelessFailure, Output::Status { session, poll, .. }) => {
                kept.push(Output::Status { session, poll, failure: None });
            }
            (Planted::SkippedState, Output::Status { poll: KvPoll::Transferring, .. }) => {}
            (Planted::ReleaseAtFailure, Output::Status { session, poll: KvPoll::Failed, failure }) => {
                kept.push(Output::Status { session, poll: KvPoll::Failed, failure });
                self.release_all(life, session, kept);
            }
            (Planted::ReleaseFirst, Output::Status { session, poll, failure }) if poll.is_terminal() => {
                self.release_all(life, session, kept);
                kept.push(Output::Status { session, poll, failure });
            }
            (Planted::SecretFailure, Output::Status { poll: KvPoll::Failed, .. }) => {}
            (Planted::StateAtFailure, Output::Status { session, poll: KvPoll::Failed, failure }) => {
                kept.push(Output::Status { session, poll: KvPoll::Failed, failure });
                self.release_state(life, session, kept);
            }
            (Planted::FreedAtFailure, Output::Status { session, poll: KvPoll::Failed, failure }) => {
                self.overwrite(life);
                kept.push(Output::Status { session, poll: KvPoll::Failed, failure });
            }
            (_, output) => self.spoil_release(planted, life, output, kept),
        }
    }

    fn spoil_release(&mut self, planted: Planted, life: LifeId, output: Output, kept: &mut Vec<Output>) {
        match (planted, output) {
            (
                Planted::ReleaseAtFailure | Planted::ReleaseFirst,
                Output::Release { session, resource: Resource::Pages(pages) },
            ) => match self.service.sabotage.released.get_mut(&(life, session)) {
                Some(left) if *left > 0 => *left -= 1,
                _ => kept.push(Output::Release { session, resource: pages.into() }),
            },
            (Planted::ReleaseSwallowed, Output::Release { resource: Resource::Pages(_), .. })
                if self.every(3) => {}
            (
                Planted::StateSwallowed,
                Output::Release { resource: Resource::RequestCacheGroups { .. }, .. },
            ) => {}
            (
                Planted::SkippedInWord,
                Output::Release { session, resource: Resource::RequestCacheGroups { groups, .. } },
            ) => {
                let skipped = groups.iter().map(|items| items.group).collect();
                kept.push(Output::Release {
                    session,
                    resource: Resource::RequestCacheGroups { groups, skipped },
                });
            }
            (
                Planted::StateAtFailure,
                Output::Release { session, resource: Resource::RequestCacheGroups { groups, skipped } },
            ) => {
                if !self.service.sabotage.released.contains_key(&(life, session)) {
                    kept.push(Output::Release {
                        session,
                        resource: Resource::RequestCacheGroups { groups, skipped },
                    });
                }
            }
            (Planted::NeverReleased, Output::Release { .. }) => {}
            (Planted::ReleaseTwice, Output::Release { session, resource: Resource::Pages(pages) }) => {
                kept.extend(
                    claim(pages.list().clone())
                        .map(|pages| Output::Release { session, resource: pages.into() }),
                );
                kept.push(Output::Release { session, resource: pages.into() });
            }
            (Planted::ReleaseCut, Output::Release { session, resource: Resource::Pages(mut pages) })
                if pages.len() > 1 =>
            {
                drop(pages.split_off(1));
                kept.push(Output::Release { session, resource: pages.into() });
            }
            (_, output) => kept.push(output),
        }
    }

    fn every(&mut self, nth: u64) -> bool {
        self.service.sabotage.count += 1;
        self.service.sabotage.count.is_multiple_of(nth)
    }

    fn release_all(&mut self, life: LifeId, session: SessionId, kept: &mut Vec<Output>) {
        let Some(&leg) = self.service.stock[life].sessions.get(&session) else { return };
        let known = &self.service.ledger.legs[leg];
        let holds: Vec<_> = known.holds.iter().copied().filter(|&hold| hold != known.state.hold).collect();
        self.service.sabotage.released.insert((life, session), holds.len());
        for hold in holds {
            let list = PageList::from_pages(self.service.ledger.holds[hold as usize].pages.iter().copied());
            let pages = list.ok().and_then(claim);
            kept.extend(pages.map(|pages| Output::Release { session, resource: pages.into() }));
        }
    }

    fn release_state(&mut self, life: LifeId, session: SessionId, kept: &mut Vec<Output>) {
        let Some(&leg) = self.service.stock[life].sessions.get(&session) else { return };
        let state = &self.service.ledger.legs[leg].state;
        if state.hold == 0 || !self.service.ledger.legs[leg].holds.contains(&state.hold) {
            return;
        }
        let mut groups = RequestCacheGroups::none();
        for (group, items) in (0_u16..).zip(&state.items).filter(|(_, items)| !items.is_empty()) {
            let pages = PageList::from_pages(items.iter().copied()).ok().and_then(claim);
            let named = pages
                .map(|pages| CacheGroupItems::from_number(group, state.first[usize::from(group)], pages));
            let pushed = named.is_some_and(|named| groups.push(named).is_ok());
            debug_assert!(pushed, "items are held once");
        }
        self.service.sabotage.released.insert((life, session), 1);
        kept.push(Output::Release {
            session,
            resource: Resource::RequestCacheGroups { groups, skipped: Vec::new() },
        });
    }
}

fn claim(list: PageList) -> Option<Pages> {
    Pages::unpooled(list).ok()
}
