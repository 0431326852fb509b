//! The parts of a push that have arrived, as the sources tell them.

use crate::error::Cause;
use crate::groups::MAX_REQUEST_CACHE_GROUPS;
use crate::id::PeerId;
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::ending::Ending;
use crate::proto::receiving::Receiving;
use crate::wire::Progress;

/// Most parts of one attempt. A peer that claims more breaks the protocol.
const MAX_PARTS: u32 = 1 << 22;
/// Most gaps among the parts that have arrived.
const MAX_PART_RUNS: usize = 1 << 16;

impl Receiving {
    pub(in crate::proto) fn on_progress(&mut self, cx: &mut Context, id: PeerId, progress: Progress) {
        let Progress { attempt, done, total, skipped } = progress;
        let now = cx.fx.now();
        let Some((session, index, source, live)) = self.source_of(cx, id, attempt) else { return };
        if !live || !source.is_open() || source.reading.is_some() {
            return;
        }
        source.hear(now);
        if skipped.len() > MAX_REQUEST_CACHE_GROUPS {
            return self.fail_by(
                cx,
                session,
                Some(id),
                Cause::Protocol("more groups left out than a request has"),
            );
        }
        for &(start, count) in each(&done) {
            source.parts.insert(u64::from(start), u64::from(count));
        }
        let contradiction = matches!((source.total, total), (Some(before), Some(now)) if before != now);
        source.total = source.total.or(total);
        if total.is_some() {
            source.skipped = skipped;
        }
        let bound = u64::from(source.total.unwrap_or(MAX_PARTS).min(MAX_PARTS));
        if contradiction || source.parts.end() > bound || source.parts.runs_len() > MAX_PART_RUNS {
            return self.fail_by(
                cx,
                session,
                Some(id),
                Cause::Protocol("the numbers of parts contradict each other"),
            );
        }
        if source.total.is_some_and(|total| source.parts.len() == u64::from(total)) {
            if let Some(cause) = self.check_skipped(cx, session, index) {
                return self.fail_by(cx, session, Some(id), cause);
            }
            self.source_over(cx, session, index);
            self.settle(cx, session);
        }
    }
}
