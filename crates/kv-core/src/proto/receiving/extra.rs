use std::time::Duration;

use crate::error::Cause;
use crate::groups::Groups;
use crate::id::{Attempt, SessionId};
use crate::meter::each;
use crate::plan::Side;
use crate::proto::context::Context;
use crate::proto::conversation::calls::{MAX_ASKED, MAX_PINGS};
use crate::proto::conversation::peer::Peer;
use crate::proto::groups::Between;
use crate::proto::receiving::{ReceiveSession, Receiving};
use crate::proto::run_set;
use crate::time::Time;

impl Receiving {
    /// Only optional groups may be left out, whatever the source says. Keeps of those that it says it
    /// has left out the ones that the session has named.
    pub(in crate::proto) fn check_skipped(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        index: usize,
    ) -> Option<Cause> {
        let receiver = self.sessions.get_mut(&session)?;
        let source = receiver.sources.get_mut(index)?;
        if source.skipped.is_empty() {
            return None;
        }
        let peer = cx.peers.get(source.peer)?;
        let (map, ours, theirs) = (peer.inward.as_ref()?, cx.config.args.geometry(), &peer.geometry);
        let between = Between { map, ours, theirs, source: Side::Remote };
        let skipped = std::mem::take(&mut source.skipped);
        let named = receiver.groups.iter().flat_map(Groups::iter);
        for items in named.filter(|items| each(&skipped).any(|&group| group == items.group)) {
            if !between.is_optional(items.group) {
                return Some(between.disagreement(items.group, Some(items), None));
            }
            source.skipped.push(items.group);
        }
        None
    }

    /// The groups that a session names, of which nothing comes from any of its sources. To be asked
    /// while all of them are there: one that is done with the session may leave before the others.
    pub(in crate::proto) fn unheld_groups(&self, cx: &Context, receiver: &ReceiveSession) -> Vec<u16> {
        let maps =
            each(receiver.sources.iter()).filter_map(|source| cx.peers.get(source.peer)?.inward.as_ref());
        let named = receiver.groups.iter().flat_map(Groups::iter).map(|items| items.group);
        let held = |group: u16| maps.clone().any(|map| map.has_group(group));
        named.filter(|&group| !held(group)).collect()
    }

    /// Attempts at the peer about which nothing was heard for `quiet`, as runs, of one ping each.
    pub(in crate::proto) fn quiet_attempts(
        &self,
        peer: &Peer,
        now: Time,
        quiet: Duration,
    ) -> Vec<Vec<(u64, u32)>> {
        let asks = |&(_, &(session, source)): &(&Attempt, &(SessionId, usize))| {
            self.sessions.get(&session).is_some_and(|receiver| receiver.is_quiet(source, now, quiet))
        };
        let asked: Vec<u64> = each(&peer.outgoing)
            .filter(asks)
            .map(|(attempt, _)| attempt.0)
            .take(MAX_PINGS * MAX_ASKED)
            .collect();
        let runs = |attempts: &[u64]| {
            let mut runs = Vec::new();
            attempts.iter().for_each(|&attempt| run_set::append(&mut runs, attempt));
            runs
        };
        asked.chunks(MAX_ASKED).map(runs).collect()
    }
}
