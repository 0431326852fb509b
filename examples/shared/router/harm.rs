//! How and when the router kills or stops a rank.

use std::time::Instant;

use super::rank::{Harm, Side};
use super::run::{Harmed, Moment, Plan, PlannedHarm};
use super::{Mode, Router};
use crate::control::{Command, NamedError};

/// Something that the router does at a planned moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Harm, whatever goes on just then.
    Harm,
    /// Harm to the decode rank of this request, if some still wait for room there.
    HarmIfWaiting(usize),
    /// The rank at this position goes on.
    Resume(usize),
    /// Kill the rank at this position, which has been silent for too long. Only its death frees the pages
    /// that it may still write into.
    Bury(usize),
}

impl Router {
    /// When something is to be done next, at the latest at `end`.
    pub(super) fn due_before(&self, end: Instant) -> Instant {
        self.due.iter().map(|(at, _)| *at).fold(end, Instant::min)
    }

    /// True if a rank has yet to be killed, stopped or resumed at a moment that an option gives.
    pub(super) fn waits_for_moment(&self) -> bool {
        self.due.iter().any(|(_, due)| matches!(due, Due::Harm | Due::Resume(_)))
    }

    pub(super) fn do_what_is_due(&mut self, plan: &Plan) {
        let now = Instant::now();
        let due: Vec<Due> = self.due.extract_if(.., |(at, _)| *at <= now).map(|(_, due)| due).collect();
        for due in due {
            match due {
                Due::Harm => {
                    let open = self.routed.iter().filter(|routed| !routed.ended(&self.ranks)).count();
                    let first = self.routed.iter().position(|routed| !routed.ended(&self.ranks));
                    let millis = plan.harm.and_then(|harm| harm.at).unwrap_or_default().as_millis();
                    self.harm(first.unwrap_or(0), Moment::At { millis, open }, plan);
                }
                Due::HarmIfWaiting(request) => {
                    let requests = self.waiting_with(request);
                    if requests > 0 {
                        self.harm(request, Moment::Waiting { requests }, plan);
                    }
                }
                Due::Resume(rank) => self.ranks[rank].resume(),
                Due::Bury(rank) => self.ranks[rank].kill(),
            }
        }
    }

    /// In pull mode: harms a prefill rank while its pages are read. Harms a decode rank while it has more
    /// requests than room, after some heartbeats; if that never happens, at the end.
    pub(super) fn prepare_harm(&mut self, request: usize, plan: &Plan) {
        let planned = plan.harm.filter(|planned| planned.at.is_none() && self.harm.is_none());
        let Some(PlannedHarm { side, .. }) = planned else { return };
        let reading = self.routed[request].reading;
        let all_answered = self.routed.iter().all(|routed| routed.passed_on);
        match side {
            Side::Prefill if reading => self.harm(request, Moment::Reading, plan),
            Side::Prefill => {}
            Side::Decode if self.waiting_with(request) >= 2 => {
                if self.due.is_empty() {
                    self.due.push((Instant::now() + plan.lease / 2, Due::HarmIfWaiting(request)));
                }
            }
            Side::Decode if reading && all_answered => self.harm(request, Moment::Reading, plan),
            Side::Decode => {}
        }
    }

    /// The number of requests that wait for room on the decode rank of this request.
    fn waiting_with(&self, request: usize) -> usize {
        let decode = self.routed[request].decode;
        self.routed.iter().filter(|routed| routed.decode == decode && routed.waits()).count()
    }

    /// Harms the planned side's rank of a request, once.
    pub(super) fn harm(&mut self, request: usize, moment: Moment, plan: &Plan) {
        let Some(PlannedHarm { harm, side, resume, .. }) = plan.harm.filter(|_| self.harm.is_none()) else {
            return;
        };
        let victim = match side {
            Side::Prefill => self.routed[request].prefill,
            Side::Decode => self.routed[request].decode,
        };
        self.ranks[victim].harm(harm);
        self.harm = Some(Harmed { harm, rank: self.ranks[victim].name(), request, moment });
        if harm == Harm::Stop {
            let now = Instant::now();
            self.due.push(match resume {
                Some(resume) => (now + resume, Due::Resume(victim)),
                None => (now + plan.bury_after, Due::Bury(victim)),
            });
            // Its pipe stays open: nobody else is going to notice.
            self.orphan(victim, plan);
        }
    }

    /// Notes that a rank is silent for good. Requests whose half on that rank had not ended are reported by
    /// the router.
    pub(super) fn orphan(&mut self, index: usize, plan: &Plan) {
        self.ranks[index].set_silent();
        let name = self.ranks[index].name();
        let (error, what) = match self.ranks[index].harmed {
            Some(Harm::Kill) => ("RankKilled", "was killed"),
            Some(Harm::Stop) => ("RankStopped", "was stopped"),
            None => ("RankDied", "is gone"),
        };
        let mut cancelled = Vec::new();
        for request in &mut self.routed {
            let unheard = (request.prefill == index && request.prefilled.is_none())
                || (request.decode == index && request.decoded.is_none());
            if unheard {
                request.orphaned = Some(NamedError::new(error, format_args!("{name} {what}")));
            }
            // In push mode it may never have registered, so that nobody but the router can know. In
            // pull mode the lease ends by itself.
            if plan.mode == Mode::Push && request.decode == index && request.prefilled.is_none() {
                cancelled.push((request.prefill, request.room));
            }
        }
        for (prefill, room) in cancelled {
            // A rank that cannot be told is gone too, and the router hears of that.
            let _ = self.ranks[prefill].send(&Command::Cancel { room });
        }
    }
}
