//! How a sending session lets go of its receivers: of each receiver when it has everything, or when
//! the session has failed and nothing is left on which the receiver relies. The rest of the
//! session's end is in [`ending`](crate::proto::ending).

use crate::command::Resource;
use crate::error::{Cause, PeerCause, Phase};
use crate::id::{PeerId, Room, SessionId};
use crate::lease::TransferMode;
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::conversation::Incoming;
use crate::proto::ending::{Ending, Role, Session, Sessions, Standing};
use crate::proto::rendezvous::Latecomers;
use crate::proto::sending::target::Target;
use crate::proto::sending::{SendSession, Sending};
use crate::proto::timer::Timer;
use crate::quarantine::Quarantine;
use crate::trace::Half;
use crate::wire::{Body, Failed};

impl Session for SendSession {
    fn standing(&self) -> &Standing {
        &self.standing
    }

    fn standing_mut(&mut self) -> &mut Standing {
        &mut self.standing
    }

    fn room(&self) -> &Room {
        &self.named.room
    }

    fn phase(&self) -> Phase {
        if self.lacks_receivers() { Phase::Rendezvous } else { Phase::Transfer }
    }

    fn peer(&self) -> Option<PeerId> {
        self.targets.first().map(|target| target.peer)
    }

    fn is_served(&self) -> bool {
        !self.lacks_receivers()
    }

    fn is_quiet(&self) -> bool {
        each(self.targets.iter()).all(Target::is_over)
    }

    fn into_resources(self) -> impl Iterator<Item = Resource> {
        let pages = self.given.into_chunks().map(Resource::from);
        pages.chain(self.groups.map(Resource::from))
    }
}

impl Role for Sending {
    type Session = SendSession;
    const HALF: Half = Half::Sender;
    const TIMERS: [fn(SessionId) -> Timer; 2] = [Timer::Deadline, Timer::Lease];

    fn sessions(&self) -> &Sessions<SendSession> {
        &self.sessions
    }

    fn sessions_mut(&mut self) -> &mut Sessions<SendSession> {
        &mut self.sessions
    }

    fn waits(&self, cx: &Context, session: SessionId) -> Option<Quarantine> {
        Some(self.sessions.get(&session)?.waits(cx))
    }

    fn withdraw(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause) {
        let Some(sender) = self.sessions.get(&session) else { return };
        // The pages are not leased any more, but in quarantine.
        self.pages_leased -= sender.pages_pinned();
        let (named, latecomers) = (sender.named.clone(), sender.latecomers());
        cx.rendezvous.await_no_more(&named, session);
        cx.rendezvous.sender_failed((&mut cx.fx, &cx.config), named, told.clone(), latecomers);
    }

    fn stop(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause) {
        let Some(sender) = self.sessions.get(&session) else { return };
        let granted = sender.pinned_until.is_some();
        let loud = each(sender.targets.iter()).filter(|target| {
            let relies = target.outstanding() > 0 || target.reads().is_some() && granted;
            relies && !target.is_abort_asked() && !target.is_over()
        });
        let loud: Vec<_> = loud.map(|target| (target.peer, target.attempt)).collect();
        let targets = sender.targets.len();
        for (peer, attempt) in each(loud) {
            cx.send(peer, Body::Failed(Failed { attempt, cause: told.clone(), quiet: false }));
        }
        cx.cancel_posts(session);
        self.fence_readers(cx, session);
        for index in each(0..targets) {
            self.target_advanced(cx, session, index);
        }
    }

    fn forget(&mut self, cx: &mut Context, session: SessionId, ended: &SendSession) {
        if ended.standing.is_going() {
            self.pages_leased -= ended.pages_pinned();
        }
        // A reader that asks by content names no lease.
        if ended.mode != TransferMode::Push && !cx.config.service.by_content {
            let consumed = || PeerCause::LeaseConsumed { lease_id: session.0 };
            let cause = ended.standing.failure().cloned().unwrap_or_else(consumed);
            self.ended_leases.insert(session, cause, cx.config.limits.max_ended_leases);
        }
    }
}

impl Sending {
    /// A post of the target has ended: checks whether the target is over, and with it the session.
    pub(super) fn target_advanced(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let failure = sender.standing.failure().cloned();
        let Some(target) = sender.targets.get_mut(index) else { return };
        if target.is_over() || target.is_held(cx.fx.now()) {
            return;
        }
        let (id, attempt) = (target.peer, target.attempt);
        match failure {
            Some(cause) => {
                let abort_asked = target.is_abort_asked();
                target.end();
                self.attempt_failed(cx, id, attempt, cause, abort_asked);
            }
            None => {
                let Some(written) = target.written() else { return };
                let Some(total) = written.all_in_place() else { return };
                let skipped = written.skipped().to_vec();
                target.end();
                if let Some(peer) = cx.peers.get_mut(id)
                    && !peer.incoming().is_closed(attempt)
                {
                    peer.incoming_mut().insert(attempt, Incoming::Served { total, skipped });
                }
            }
        }
        self.settle(cx, session);
    }

    /// A receiver for which the session still waits has ended: fails the session.
    pub(super) fn fail_one(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        if let Some(sender) = self.sessions.get_mut(&session) {
            sender.gone += 1;
        }
        self.fail(cx, session, cause);
    }
}

impl SendSession {
    /// How many receivers may still register, and must be told that the session has failed.
    fn latecomers(&self) -> Latecomers {
        // If the scheduler did not tell the number of receivers, the first receiver tells it.
        match self.learns && self.targets.is_empty() {
            true => Latecomers::AllBut(self.gone),
            false => Latecomers::Left(self.receivers.saturating_sub(self.met() + self.gone)),
        }
    }
}
