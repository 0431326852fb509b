//! The states of sessions as machines report them, and the moments at which invariants check deadlines.

use kv_core::{Cause, KvPoll, PeerCause, SessionId, Time, TransferError};

use crate::kv::act::KvAct;
use crate::kv::fact::{Check, Fact, KvFact};
use crate::kv::ledger::LegId;
use crate::kv::service::KvWorld;
use crate::kv::stats::cause_name;
use crate::net::calendar::Event;
use crate::net::lives::LifeId;

impl KvWorld {
    pub(crate) fn status(
        &mut self,
        life: LifeId,
        session: SessionId,
        to: KvPoll,
        failure: Option<&TransferError>,
    ) {
        self.trace.fold(session.0 << 3 | to as u64);
        let Some(&leg) = self.service.stock[life].sessions.get(&session) else {
            return self.tell(&Fact::Own(KvFact::StrangeStatus { life, session, to }));
        };
        self.tell(&Fact::Own(KvFact::Status { leg, to, failure }));
        let known = &mut self.service.ledger.legs[leg];
        known.before = known.poll;
        known.poll = to;
        if !to.is_terminal() {
            return self.state_changed(leg, to);
        }
        known.ended_at = Some(self.now);
        self.last_change = self.now;
        self.lives[life].open_sessions = self.lives[life].open_sessions.saturating_sub(1);
        if to == KvPoll::Success {
            self.service.counters.successes += 1;
        } else {
            self.service.counters.failed += 1;
        }
        if let Some(failure) = failure {
            if failure.cause == Cause::ByPeer(PeerCause::WorkerStopped) {
                self.note_refused(leg);
            }
            self.service.ledger.legs[leg].told = Some(failure.cause.for_peer());
            self.service.counters.failures.count(cause_name(&failure.cause));
        }
        self.state_changed(leg, to);
    }

    pub(crate) fn check(&mut self, check: Check) {
        if let Check::Deadline { leg } | Check::Told { leg, .. } | Check::Refused { leg } = check
            && let Some(life) = self.service.ledger.legs[leg].life
        {
            // A host that was paused over its deadline notices when it continues.
            let resumed = self.lives[life].paused_until + self.slack();
            if self.lives[life].alive && resumed > self.now {
                self.calendar.enter(resumed, Event::Act(KvAct::Check(check)));
                return;
            }
        }
        self.tell(&Fact::Own(KvFact::Check(check)));
    }

    /// The moment after which a session must have ended.
    pub(crate) fn watch_deadline(&mut self, leg: LegId, life: LifeId, deadline: Time) {
        let due = self.lives[life].clock.global(deadline);
        let at = due.saturating_add(self.slack());
        self.calendar.enter(at, Event::Act(KvAct::Check(Check::Deadline { leg })));
    }
}
