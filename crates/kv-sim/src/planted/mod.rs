//! Planted bugs: each breaks one promise on purpose, so that the invariant that serves it is seen
//! to fail.
//!
//! They stand between nodes and world, and need no change in the nodes: what a buggy node or plane
//! would do is done to the inputs and outputs of a correct one. Those of engines that differ are in
//! `ranks.rs`, and those of context-parallel ranks in `context.rs`.

mod context;
mod ranks;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Limits, NodeGauges, Output, Resource};
use kv_core::wire::{AbortAck, Body, Failed, Frame, Heartbeat, HeartbeatAck, Link};
use kv_core::{Cause, GroupItems, Groups, KvPoll, PageList, Pages, Room, SessionId, Time};

use crate::calendar::Event;
use crate::cost::Cost;
use crate::ledger::{Ledger, LifeId};
use crate::params::Params;
use crate::world::World;

macro_rules! planted {
    ($($(#[$doc:meta])* $name:ident: $invariant:ident,)*) => {
        /// One planted bug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Planted {
            $($(#[$doc])* $name,)*
        }

        impl Planted {
            /// All of them.
            pub const ALL: &[Planted] = &[$(Planted::$name),*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $(Planted::$name => stringify!($name)),* }
            }

            /// The invariant that must catch it.
            pub const fn caught_by(self) -> &'static str {
                match self { $(Planted::$name => stringify!($invariant)),* }
            }
        }
    };
}

planted! {
    /// The completion notice of a post travels ahead of its bytes.
    NotifyEarly: success_means_right_bytes,
    /// Some pieces of a post are never written.
    LostPiece: success_means_right_bytes,
    /// Items of state groups are never written.
    LostState: success_means_right_bytes,
    /// A group is said to have been left out that was not.
    SkippedInWord: success_means_right_bytes,
    /// A chunk is taken to be final when it begins, and written.
    WrittenEarly: only_final_bytes_move,
    /// A chunk is taken to be final when it begins, and granted.
    GrantedEarly: only_final_bytes_move,
    /// The aux row comes from the first pipeline stage, not from the last one.
    AuxOfFirstStage: success_means_right_bytes,
    /// The later stages of the decode engine count their layers from one too low.
    StageOffByOne: success_means_right_bytes,
    /// Of items of state groups a rank is sent its neighbour's share of heads.
    NeighboursShare: success_means_right_bytes,
    /// What one source has done the others are taken to have done, too.
    OneSourceEnough: success_means_right_bytes,
    /// A source is asked for a page too few: the second of those that hold the same pages.
    RangeOneShort: success_means_right_bytes,
    /// A source takes the first page that it is asked for to be the first of all that are asked for.
    FirstNotShifted: success_means_right_bytes,
    /// The aux row comes from the last of the ranks that hold the same pages.
    AuxOfLastSibling: success_means_right_bytes,
    /// Ranks that hold the same pages are each asked for all of them.
    SiblingsSendAll: each_sends_its_share,
    /// What one of the ranks that hold the same pages has done the others are taken to have done, too.
    OneSiblingEnough: success_means_right_bytes,
    /// Dealt pages are all counted as those of the first rank that they are dealt to.
    PlaceForgotten: success_means_right_bytes,
    /// A request is taken for another one whose id differs in nothing but its suffix.
    RoomsConfused: success_means_right_bytes,
    /// Leases are told four times as long as they are.
    LeaseInflated: success_means_right_bytes,
    /// Heartbeats are acknowledged by somebody who does not look.
    HeartbeatForged: success_means_right_bytes,
    /// Clocks differ in rate by far more than leases allow for.
    ClocksBeyondMargin: success_means_right_bytes,
    /// A post is reported over while its pieces still move.
    EndBeforeQuiet: pages_quiet_when_released,
    /// Pages come back with the failure, not with the quiet.
    ReleaseAtFailure: pages_quiet_when_released,
    /// An abort is acknowledged while writes are in flight.
    AckBeforeQuiet: pages_quiet_when_released,
    /// A failure is called quiet while writes are in flight.
    QuietLie: pages_quiet_when_released,
    /// Final states are kept secret.
    EndSwallowed: ends_once_in_time,
    /// Final states are told twice.
    EndTwice: ends_once_in_time,
    /// Failures have no reason.
    NamelessFailure: ends_once_in_time,
    /// A state is left out.
    SkippedState: ends_once_in_time,
    /// Timers never ring.
    DeafToTime: ends_once_in_time,
    /// Some tokens never come back.
    ReleaseSwallowed: tokens_come_back,
    /// Items of state groups never come back.
    StateSwallowed: tokens_come_back,
    /// Items of state groups come back with the failure, not with the quiet.
    StateAtFailure: pages_quiet_when_released,
    /// Some tokens come back twice.
    ReleaseTwice: tokens_come_back,
    /// Some tokens come back in part.
    ReleaseCut: tokens_come_back,
    /// Tokens come back before the final state.
    ReleaseFirst: tokens_come_back,
    /// Planes promise that hardware ends its writes in an eighth of the time that it needs.
    BoundTooShort: pages_quiet_when_released,
    /// A revocation is called complete while a slice is under way.
    RevokedInTheSlice: pages_quiet_when_released,
    /// A lost connection is taken for the death of the peer.
    LivingCalledDead: pages_quiet_when_released,
    /// A lost connection is taken for the death of the peer, and its hardware waited for.
    LostCalledDead: pages_quiet_when_released,
    /// Slices begin without a look at the permission.
    PermissionUnchecked: pages_quiet_when_released,
    /// Writers look at their permission, are stopped, and hand the slice to hardware when they go on.
    StoppedAfterTheLook: pages_quiet_when_released,
    /// A permission counts from its answer, not from its question.
    PermissionFromAnswer: pages_quiet_when_released,
    /// A worker tells its node the time from before it asked its plane what happened.
    EventsAsOfBefore: success_means_right_bytes,
    /// What a writer was stopped for is added to its permission.
    PermissionExcused: pages_quiet_when_released,
    /// Posts to a dead life write into its successor.
    WriteIntoSuccessor: incarnation_fence,
    /// Frames for a dead life are made to fit its successor.
    FenceDropped: incarnation_fence,
    /// Tables have no bounds.
    Boundless: bounded,
    /// Posts have no bound.
    Overposted: bounded,
    /// Each byte of a frame is answered with an output of its own.
    Amplifies: bounded,
    /// A node panics.
    Panics: bounded,
    /// A timer is due again at the moment at which it rang.
    SpinningTimer: bounded,
    /// Nobody is told of failures and aborts.
    Hushed: failure_is_told,
    /// A timer rings for ever.
    RestlessTimer: idle_is_quiet,
    /// A session stays in a table for ever.
    LeakedSession: idle_is_quiet,
    /// A failure is given another reason.
    WrongReason: reason_is_true,
    /// The network stays as bad as it was.
    HealedInName: requests_are_served,
    /// No registration and no question is sent twice.
    NothingRepeated: requests_are_served,
}

/// What planted bugs remember.
#[derive(Debug, Default)]
pub(crate) struct Sabotage {
    /// The link that a life answers to from another.
    links: BTreeMap<(LifeId, LifeId), Link>,
    /// Releases made up, to be left out when the true ones come.
    released: BTreeMap<(LifeId, SessionId), usize>,
    /// Sessions about whose end nothing is said.
    hushed: BTreeSet<(LifeId, SessionId)>,
    /// Registrations sent.
    registered: BTreeSet<(LifeId, u64, u64)>,
    /// Registrations sent, of all sources of a request.
    rooms: Vec<ranks::Registered>,
    count: u64,
}

impl Planted {
    /// Changes what nodes believe their parameters are.
    pub(crate) fn loosen(self, params: &mut Params) {
        match self {
            Planted::Boundless => {
                params.limits = Limits { max_post_bytes: params.limits.max_post_bytes, ..Limits::default() };
            }
            Planted::Overposted => params.max_inflight = 1024,
            Planted::StageOffByOne => ranks::count_stages_wrongly(params),
            _ => {}
        }
    }

    /// Changes what a world's seed decided, so that the bug has an occasion.
    pub(crate) fn provoke(self, params: &mut Params) {
        if matches!(self, Planted::WriteIntoSuccessor | Planted::FenceDropped | Planted::HealedInName) {
            (params.lossless, params.drizzle) = (false, false);
        }
        match self {
            Planted::WriteIntoSuccessor => {
                params.dma.slow = 400;
                params.dma.time_max = params.dma.time_max.max(100_000_000);
                params.chaos.crashes = params.chaos.crashes.max(3);
            }
            Planted::FenceDropped => {
                params.chaos.crashes = 6;
                params.requests = 12;
                (params.net.tail, params.net.duplicate) = (600, 600);
                params.net.delay_max = 500_000_000;
                params.timing.session_deadline = std::time::Duration::from_secs(2);
            }
            Planted::LeaseInflated | Planted::HeartbeatForged | Planted::ClocksBeyondMargin => {
                (params.lossless, params.drizzle) = (false, false);
                params.sched.pull = 1000;
                params.requests = 12;
                params.timing.kv_lease_duration = Duration::from_millis(30);
                (params.dma.slow, params.dma.time_max) = (600, 200_000_000);
                params.net.drop = params.net.drop.max(150);
                if self == Planted::ClocksBeyondMargin {
                    (params.drift_ppm, params.net.drop) = (400_000, 500);
                }
            }
            Planted::PermissionFromAnswer => {
                (params.lossless, params.drizzle) = (false, false);
                (params.sched.pull, params.requests) = (0, 12);
                (params.ways.kinds, params.ways.bound) = ([0, 0, 10], 1_000);
                (params.net.tail, params.net.delay_max) = (600, 200_000_000);
                (params.dma.slow, params.dma.time_max) = (600, 200_000_000);
                params.timing.write_permission = Duration::from_millis(50);
                params.chaos.breaks = 6;
            }
            Planted::RoomsConfused => {
                (params.lossless, params.drizzle, params.suffixed) = (false, false, false);
                (params.sched.twins, params.sched.abort) = (1000, 0);
            }
            Planted::EventsAsOfBefore => {
                (params.lossless, params.drizzle, params.driven) = (false, false, true);
                (params.sched.pull, params.requests) = (1000, 12);
                params.timing.kv_lease_duration = Duration::from_millis(30);
                (params.dma.slow, params.dma.time_max) = (600, 200_000_000);
                // That the lease is over may not be heard, either.
                (params.chaos.pauses, params.net.drop) = (8, 500);
            }
            Planted::LostState
            | Planted::StateSwallowed
            | Planted::StateAtFailure
            | Planted::SkippedInWord => {
                params.state_items = 6;
            }
            Planted::AuxOfFirstStage | Planted::AuxOfLastSibling => {
                (params.aux_rows, params.sched.pull) = (8, 0);
            }
            Planted::NeighboursShare => params.state_items = 6,
            Planted::OneSourceEnough
            | Planted::OneSiblingEnough
            | Planted::RangeOneShort
            | Planted::FirstNotShifted
            | Planted::SiblingsSendAll => params.sched.pull = 0,
            Planted::PlaceForgotten => params.sched.layered = 0,
            Planted::StageOffByOne => params.state_items = 0,
            Planted::WrittenEarly => (params.sched.layered, params.sched.pull) = (1000, 0),
            Planted::GrantedEarly => (params.sched.layered, params.sched.pull) = (1000, 1000),
            Planted::HealedInName => {
                params.net.drop = 950;
            }
            _ => {}
        }
    }

    pub(crate) fn panic_at(self, inputs: u64) {
        if self == Planted::Panics && inputs == 20 {
            std::panic::resume_unwind(Box::new("planted"));
        }
    }

    pub(crate) fn next_timeout(self, next: Option<Time>, now: Time) -> Option<Time> {
        match self {
            Planted::SpinningTimer => next.map(|next| next.min(now)),
            Planted::RestlessTimer => {
                let always = now + Duration::from_millis(500);
                Some(next.map_or(always, |next| next.min(always)))
            }
            _ => next,
        }
    }

    pub(crate) fn costs(self, costs: &mut [Cost]) {
        if self == Planted::Amplifies {
            // As if each byte of a question were answered with a frame.
            for cost in costs.iter_mut().filter(|cost| cost.of_peer) {
                cost.outputs += cost.input;
            }
        }
    }

    pub(crate) fn gauges(self, gauges: &mut NodeGauges) {
        if self == Planted::LeakedSession {
            gauges.senders += 1;
        }
    }
}

impl World {
    pub(crate) fn sabotage_outputs(&mut self, life: LifeId, outputs: Vec<Output>) -> Vec<Output> {
        let Some(planted) = self.planted else { return outputs };
        let mut kept = Vec::with_capacity(outputs.len());
        for output in outputs {
            match (planted, output) {
                (Planted::EndSwallowed, Output::Status { session, poll, .. }) if poll.is_terminal() => {
                    self.sabotage.hushed.insert((life, session));
                }
                (Planted::EndSwallowed, Output::Release { session, resource: Resource::Pages(_) })
                    if self.sabotage.hushed.contains(&(life, session)) => {}
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
                    self.release_all(life, session, &mut kept);
                }
                (Planted::ReleaseFirst, Output::Status { session, poll, failure }) if poll.is_terminal() => {
                    self.release_all(life, session, &mut kept);
                    kept.push(Output::Status { session, poll, failure });
                }
                (
                    Planted::ReleaseAtFailure | Planted::ReleaseFirst,
                    Output::Release { session, resource: Resource::Pages(pages) },
                ) => match self.sabotage.released.get_mut(&(life, session)) {
                    Some(left) if *left > 0 => *left -= 1,
                    _ => kept.push(Output::Release { session, resource: pages.into() }),
                },
                (Planted::ReleaseSwallowed, Output::Release { resource: Resource::Pages(_), .. })
                    if self.every(3) => {}
                (Planted::StateSwallowed, Output::Release { resource: Resource::Groups { .. }, .. }) => {}
                (
                    Planted::SkippedInWord,
                    Output::Release { session, resource: Resource::Groups { groups, .. } },
                ) => {
                    let skipped = groups.iter().map(|items| items.group).collect();
                    kept.push(Output::Release { session, resource: Resource::Groups { groups, skipped } });
                }
                (Planted::StateAtFailure, Output::Status { session, poll: KvPoll::Failed, failure }) => {
                    kept.push(Output::Status { session, poll: KvPoll::Failed, failure });
                    self.release_state(life, session, &mut kept);
                }
                (
                    Planted::StateAtFailure,
                    Output::Release { session, resource: Resource::Groups { groups, skipped } },
                ) => {
                    if !self.sabotage.released.contains_key(&(life, session)) {
                        kept.push(Output::Release {
                            session,
                            resource: Resource::Groups { groups, skipped },
                        });
                    }
                }
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
        kept
    }

    fn every(&mut self, nth: u64) -> bool {
        self.sabotage.count += 1;
        self.sabotage.count.is_multiple_of(nth)
    }

    fn release_all(&mut self, life: LifeId, session: SessionId, kept: &mut Vec<Output>) {
        let Some(&leg) = self.hosts[life].sessions.get(&session) else { return };
        let known = &self.ledger.legs[leg];
        let holds: Vec<_> = known.holds.iter().copied().filter(|&hold| hold != known.state.hold).collect();
        self.sabotage.released.insert((life, session), holds.len());
        for hold in holds {
            let list = PageList::from_pages(self.ledger.holds[hold as usize].pages.iter().copied());
            let token = list.ok().and_then(claim);
            kept.extend(token.map(|pages| Output::Release { session, resource: pages.into() }));
        }
    }

    fn release_state(&mut self, life: LifeId, session: SessionId, kept: &mut Vec<Output>) {
        let Some(&leg) = self.hosts[life].sessions.get(&session) else { return };
        let state = &self.ledger.legs[leg].state;
        if state.hold == 0 || !self.ledger.legs[leg].holds.contains(&state.hold) {
            return;
        }
        let mut groups = Groups::none();
        for (group, items) in (0_u16..).zip(&state.items).filter(|(_, items)| !items.is_empty()) {
            let token = PageList::from_pages(items.iter().copied()).ok().and_then(claim);
            let named =
                token.map(|token| GroupItems::from_number(group, state.first[usize::from(group)], token));
            let pushed = named.is_some_and(|named| groups.push(named).is_ok());
            debug_assert!(pushed, "items are held once");
        }
        self.sabotage.released.insert((life, session), 1);
        kept.push(Output::Release { session, resource: Resource::Groups { groups, skipped: Vec::new() } });
    }

    /// Changes a frame on its way out; `None` to lose it.
    pub(crate) fn sabotage_frame(&mut self, from: LifeId, to: LifeId, bytes: Bytes) -> Option<Bytes> {
        let Some(planted) = self.planted else { return Some(bytes) };
        let Ok(frame) = Frame::decode(&bytes) else { return Some(bytes) };
        if frame.link != Link::NONE {
            self.sabotage.links.insert((to, from), frame.link);
        }
        match (planted, frame.body) {
            (Planted::Hushed, Body::Failed(_) | Body::Abort(_) | Body::AbortAck(_)) => None,
            (Planted::Hushed, Body::Ping(mut ping)) => {
                ping.attempts.clear();
                Frame { link: frame.link, body: Body::Ping(ping) }.encode().ok()
            }
            (Planted::NothingRepeated, Body::Register(register)) => {
                let first = self.sabotage.registered.insert((from, frame.link.0, register.attempt.0));
                first.then_some(bytes)
            }
            (Planted::NothingRepeated, Body::Claim(claim)) => {
                let first = self.sabotage.registered.insert((from, frame.link.0, claim.attempt.0));
                first.then_some(bytes)
            }
            (Planted::NothingRepeated, Body::Ping(_)) => None,
            (Planted::AuxOfFirstStage, Body::Register(mut register)) => {
                register.aux_here = self.is_first_source(to, from);
                Frame { link: frame.link, body: Body::Register(register) }.encode().ok()
            }
            (
                Planted::RangeOneShort
                | Planted::FirstNotShifted
                | Planted::AuxOfLastSibling
                | Planted::SiblingsSendAll,
                Body::Register(mut register),
            ) => {
                self.ask_wrongly(planted, (from, to), &mut register);
                Frame { link: frame.link, body: Body::Register(register) }.encode().ok()
            }
            (Planted::OneSourceEnough | Planted::OneSiblingEnough, Body::Register(register)) => {
                let (attempt, room) = (register.attempt, register.room);
                self.sabotage.rooms.push(ranks::Registered { receiver: from, source: to, attempt, room });
                Some(bytes)
            }
            (Planted::RoomsConfused, Body::Register(mut register)) => {
                register.room = self.twin_of(&register.room);
                Frame { link: frame.link, body: Body::Register(register) }.encode().ok()
            }
            (Planted::RoomsConfused, Body::Claim(mut claim)) => {
                claim.room = self.twin_of(&claim.room);
                Frame { link: frame.link, body: Body::Claim(claim) }.encode().ok()
            }
            (Planted::QuietLie, Body::Failed(failed)) => {
                let body = Body::Failed(Failed { quiet: true, ..failed });
                Frame { link: frame.link, body }.encode().ok()
            }
            (Planted::LeaseInflated, Body::Granted(mut granted)) => {
                granted.lease_ms *= 4;
                Frame { link: frame.link, body: Body::Granted(granted) }.encode().ok()
            }
            (Planted::LeaseInflated, Body::HeartbeatAck(mut ack)) => {
                ack.lease_ms *= 4;
                Frame { link: frame.link, body: Body::HeartbeatAck(ack) }.encode().ok()
            }
            (Planted::HeartbeatForged, Body::Heartbeat(heartbeat)) => {
                if let Some(&link) = self.sabotage.links.get(&(from, to)) {
                    let Heartbeat { beat, attempts, .. } = heartbeat;
                    let body = Body::HeartbeatAck(HeartbeatAck { beat, lease_ms: 20, attempts });
                    let bytes = Frame { link, body }.encode().ok()?;
                    self.calendar.enter(self.now + 1, Event::Frame { from: to, to: from, bytes });
                }
                Some(bytes)
            }
            (Planted::AckBeforeQuiet, Body::Abort(abort)) => {
                if let Some(&link) = self.sabotage.links.get(&(from, to)) {
                    let body = Body::AbortAck(AbortAck { attempt: abort.attempt });
                    let bytes = Frame { link, body }.encode().ok()?;
                    self.calendar.enter(self.now + 1, Event::Frame { from: to, to: from, bytes });
                }
                Some(bytes)
            }
            _ => Some(bytes),
        }
    }

    /// Another room that is equal but for its suffix.
    fn twin_of(&self, room: &Room) -> Room {
        let mut others = self.ledger.legs.iter().map(|leg| &leg.room);
        others.find(|other| *other != room && Ledger::rooms_match(other, room)).unwrap_or(room).clone()
    }

    /// Changes a frame that arrives at `at`, though it was meant for `to`.
    pub(crate) fn sabotage_delivery(&mut self, from: LifeId, to: LifeId, at: LifeId, bytes: Bytes) -> Bytes {
        if matches!(self.planted, Some(Planted::OneSourceEnough | Planted::OneSiblingEnough)) {
            self.forge_others(from, at, &bytes);
        }
        if self.planted != Some(Planted::FenceDropped) || to == at {
            return bytes;
        }
        let Ok(mut frame) = Frame::decode(&bytes) else { return bytes };
        if let Body::Hello(hello) = &mut frame.body {
            // As if the one to whom it is said did not look whom it means.
            hello.to = self.hosts[at].incarnation;
        } else if let Some(&link) = self.sabotage.links.get(&(at, from)) {
            frame.link = link;
        }
        frame.encode().unwrap_or(bytes)
    }
}

fn claim(list: PageList) -> Option<Pages> {
    Pages::claim(list).ok()
}
