//! Attempts that are over at their receivers: named one by one, or all below a low watermark.

use std::time::Duration;

use crate::error::Cause;
use crate::id::{Attempt, PeerId};
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::conversation::Incoming;
use crate::proto::ending::Ending;
use crate::proto::run_set::is_rising;
use crate::proto::sending::Sending;
use crate::proto::sending::target::Target;
use crate::proto::timer::Timer;
use crate::trace::Dropped;
use crate::wire::{Body, Release, Released};

/// Most attempts that one release message ends.
const MAX_RELEASED: usize = 4096;
/// Most attempts below a low watermark that one input or timer ends.
const MAX_SWEPT: usize = 256;

impl Sending {
    pub(in crate::proto) fn on_release(&mut self, cx: &mut Context, id: PeerId, release: Release) {
        let Release { low_watermark, attempts, answer } = release;
        if !is_rising(&attempts) {
            cx.fx.drop_frame(Some(id), Dropped::Disordered);
            return;
        }
        // One short frame may name many attempts: the rest is released when the peer repeats the
        // frame.
        let mut left = MAX_RELEASED;
        let mut released: Vec<(u64, u32)> = Vec::new();
        for &(start, count) in each(&attempts) {
            let end = Attempt(start.saturating_add(u64::from(count)));
            let mut next = Attempt(start);
            while left > 0
                && let Some(peer) = cx.peers.get(id)
                && let Some(attempt) = peer.incoming().first_live(next..end)
            {
                left -= 1;
                next = Attempt(attempt.0 + 1);
                self.end_attempt(cx, id, attempt, None);
            }
            let Some(peer) = cx.peers.get_mut(id) else { return };
            if peer.incoming().first_live(next..end).is_some() {
                break;
            }
            peer.incoming_mut().close_results(Attempt(start)..end);
            if answer {
                released.push((start, count));
            }
        }
        self.on_low_watermark(cx, id, low_watermark);
        if answer {
            cx.send(id, Body::Released(Released { attempts: released }));
        }
    }

    /// The peer says that the attempt is over. If it does not say how, and this side does not know, the session fails with
    /// `untold`.
    fn end_attempt(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt, untold: Option<Cause>) {
        self.take_registration(cx, id, attempt);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let active = match peer.incoming().get(attempt) {
            Some(&Incoming::Active(session, index)) => Some((session, index)),
            Some(&Incoming::Reading { session, target, .. }) => {
                peer.incoming_mut().close(attempt);
                return self.reader_released(cx, session, target, untold);
            }
            _ => None,
        };
        peer.incoming_mut().close(attempt);
        let Some((session, index)) = active else { return };
        let target = self.sessions.get(&session).and_then(|sender| sender.targets.get(index));
        if target.and_then(Target::written).is_some_and(|written| !written.is_posted()) {
            let broken = Cause::Protocol("the receiver released the pages before everything was sent");
            self.fail(cx, session, untold.unwrap_or(broken));
        }
    }

    /// The peer says that all of its attempts below `low_watermark` are over.
    pub(in crate::proto) fn on_low_watermark(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        low_watermark: Attempt,
    ) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        if low_watermark > peer.incoming().low_watermark() {
            peer.incoming_mut().raise_low_watermark(low_watermark);
            self.sweep(cx, id);
        }
    }

    /// Ends attempts of the peer below its low watermark: some now, and the others when the sweep
    /// timer is due, because one short frame may end many attempts.
    pub(in crate::proto) fn sweep(&mut self, cx: &mut Context, id: PeerId) {
        for _ in each(0..MAX_SWEPT) {
            let Some(peer) = cx.peers.get(id) else { return };
            let Some(attempt) = peer.incoming().first_live(Attempt(0)..peer.incoming().low_watermark())
            else {
                return;
            };
            // A read's end is told until it is acknowledged, unless that was in vain for very long: the peer then tells
            // no more than that nothing is left of it.
            self.end_attempt(cx, id, attempt, Some(Cause::WayLost));
        }
        cx.fx.arm(Timer::Sweep(id), cx.fx.now() + Duration::from_nanos(1));
    }
}
