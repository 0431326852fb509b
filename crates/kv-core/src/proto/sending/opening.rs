//! How a sending session begins: its room meets registrations, its pages are announced, and its
//! receivers are queued for their turn.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::Cause;
use crate::few::Few;
use crate::id::{AuxIndex, Room, SessionId};
use crate::lease::{Lease, TransferMode};
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::ending::{Ending, Standing};
use crate::proto::groups::check_aux;
use crate::proto::io::{LONGEST, NodeConfig};
use crate::proto::rendezvous::Named;
use crate::proto::sending::given::Given;
use crate::proto::sending::target::Written;
use crate::proto::sending::{SendSession, Sending};
use crate::session_options::SessionOptions;
use crate::transport::Op;

impl Sending {
    pub(in crate::proto) fn open_sender(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        room: Room,
        receivers: u32,
        options: SessionOptions,
    ) {
        let deadline = options.deadline.unwrap_or(cx.config.timing.session_deadline).min(LONGEST);
        let named = Named::new(room, cx.config.args.suffixes_requests());
        let sender = SendSession::new((named.clone(), deadline), receivers, &options, &cx.config);
        if !self.open(cx, session, sender) {
            return;
        }
        cx.rendezvous.await_receivers(&named, session);
        loop {
            let (peer, attempt) = match cx.rendezvous.registration_for(&named) {
                Ok(Some(found)) => found,
                Ok(None) => break,
                Err(rooms) => return self.fail_ambiguous(cx, session, &rooms),
            };
            let Some(registration) = self.take_registration(cx, peer, attempt) else { break };
            self.attach(cx, session, peer, attempt, registration);
            if !self.wants_receivers(session) {
                return;
            }
        }
        self.update_sender(cx, session);
        if let Some(cause) = cx.rendezvous.failed_receiver_for(&named) {
            self.fail_one(cx, session, Cause::ByPeer(cause));
        }
    }

    pub(super) fn wants_receivers(&self, session: SessionId) -> bool {
        let sender = self.sessions.get(&session);
        sender.is_some_and(|sender| sender.standing.is_going() && sender.lacks_receivers())
    }

    pub(in crate::proto) fn init_sender(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        num_pages: usize,
        aux: Option<AuxIndex>,
    ) {
        let bad = check_aux(aux, cx.config.args.geometry().aux_rows().unwrap_or(0));
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if !sender.standing.is_going() {
            return;
        }
        if !sender.given.announce(num_pages, aux) {
            return self.fail(cx, session, Cause::InitOrder);
        }
        match bad {
            Some(cause) => self.fail(cx, session, cause),
            None => self.check_agreement(cx, session),
        }
    }

    /// Checks that both sides mean the same pages.
    pub(super) fn check_agreement(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get(&session) else { return };
        let Some((sent, aux)) = sender.given.announced() else { return };
        let mut targets = each(sender.targets.iter());
        let disagreement = targets.find_map(|target| {
            let written = target.written()?;
            let registered = written.total_pages();
            // A peer that is gone cannot disagree.
            let map = cx.peers.get(target.peer)?.maps().out();
            if map.is_none_or(|map| map.check_counts(sent, registered).is_err()) {
                Some(Cause::PageCount { sent, registered })
            } else if written.has_aux() != aux.is_some() {
                Some(Cause::AuxOneSided { sender: aux.is_some(), receiver: written.has_aux() })
            } else {
                None
            }
        });
        if let Some(cause) = disagreement {
            self.fail(cx, session, cause);
        }
    }

    /// Brings state and turns up to date after an announcement, or after a receiver has come.
    pub(super) fn update_sender(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let waits = sender.mode == TransferMode::Push && sender.lacks_receivers();
        if !sender.standing.is_going() || waits {
            return;
        }
        let poll = if sender.given.finals() == 0 { KvPoll::WaitingForInput } else { KvPoll::Transferring };
        sender.standing.reach(&mut cx.fx, session, poll);
        if poll == KvPoll::Transferring {
            self.queue_targets(cx, session);
        }
    }

    pub(super) fn queue_targets(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        for (index, target) in each(sender.targets.iter_mut().enumerate()) {
            if target.written_mut().is_some_and(Written::queue) {
                cx.posts.queue(target.peer, Op::Write, session, index);
            }
        }
    }
}

impl SendSession {
    fn new(
        (named, deadline): (Named, Duration),
        receivers: u32,
        options: &SessionOptions,
        config: &NodeConfig,
    ) -> SendSession {
        let lease = match options.lease {
            Some(Lease::Renewable(duration)) => Lease::Renewable(duration.min(LONGEST)),
            Some(Lease::Fixed(duration)) => Lease::Fixed(duration.min(LONGEST)),
            None => Lease::Renewable(config.timing.kv_lease_duration),
        };
        SendSession {
            standing: Standing::new(deadline),
            named,
            // The first receiver tells how many there are, if the scheduler does not.
            receivers: receivers.max(1) as usize,
            gone: 0,
            learns: receivers == 0,
            mode: options.mode.unwrap_or(config.args.transfer_mode()),
            lease,
            pinned_until: None,
            given: Given::default(),
            groups: None,
            targets: Few::default(),
            first_receiver: None,
            target_of: BTreeMap::new(),
        }
    }
}
