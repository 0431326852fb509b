//! A host that runs the worker's own loop (`kv-poll`'s driver) instead of having its machine fed by the
//! world. The driver's transport and bootstrap client hand everything on to the world, and its clock may
//! advance between any two readings.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::trace::Event;
use kv_core::{
    BootstrapClient, BootstrapError, BootstrapEvent, LookupId, PeerId, Post, PostId, RankQuery, RankRecord,
    Region, Time, Transport, TransportError, TransportEvent, TransportOffer, TransportWait, WorkerId,
    WriteFence,
};
use kv_poll::worker::{Clock as WorkerClock, Driver, Setup, Turn};
use kv_ways::{Member, Ways};

use crate::clock::Clock;
use crate::net::cost::{Cost, Held};
use crate::net::lives::{LifeId, Passage, ROADS, Road, metadata_by, passage, road_and_life, roads_of};
use crate::net::params::{Physics, WayParams};
use crate::net::way::fence_between;
use crate::planted::Planted;
use crate::rng::Rng;

/// The lookup id whose answer stands for a command of the scheduler.
const COMMAND: LookupId = LookupId(u64::MAX);
/// Most turns in a row without any sleep.
const MAX_TURNS: usize = 64;

/// A driver, and the desk over which it exchanges events and outputs with the world.
pub(crate) struct Rig<M: Machine, G: Send> {
    driver: Driver<Tap<M, G>>,
    desk: Desk<M, G>,
}

/// The functions that ask a machine what it holds.
pub(crate) type Ask<M, G> = (fn(&M) -> G, fn(&G) -> Held);

/// What the turns of a driver have brought about.
pub(crate) struct Turned<M: Machine, G> {
    /// The trace events of the machine, in order.
    pub(crate) events: Vec<Event<M::Trace>>,
    /// Everything that the node wanted, in order.
    pub(crate) outputs: Vec<Output<M::Status, M::Resource, M::Failure>>,
    /// The last reading of the clock.
    pub(crate) now: Time,
    /// When the driver wants its next turn, at the latest.
    pub(crate) next: Option<Time>,
    /// What the machine holds.
    pub(crate) gauges: G,
    /// The cost of each of the machine's inputs.
    pub(crate) costs: Vec<Cost>,
    /// True if the driver never came to rest.
    pub(crate) restless: bool,
}

/// An event for a driver that does not come from its transport.
enum Told<C> {
    Command(C),
    Answer(BootstrapEvent),
}

struct State<M: Machine, G> {
    clock: Clock,
    rng: Rng,
    /// The global time, in nanoseconds.
    now: u64,
    /// When the host was stopped, if it is still stopped at that point.
    stopped: Option<u64>,
    /// The events that have come for the driver, with the transport and the moment of each.
    events: VecDeque<(u64, Road, TransportEvent)>,
    told: VecDeque<(u64, Told<M::Command>)>,
    commands: VecDeque<M::Command>,
    traced: Vec<Event<M::Trace>>,
    outputs: Vec<Output<M::Status, M::Resource, M::Failure>>,
    gauges: G,
    costs: Vec<Cost>,
    life: LifeId,
    ways: (u64, WayParams),
    peers: BTreeMap<PeerId, (Road, LifeId)>,
    /// The transport that each post uses.
    posts: BTreeMap<PostId, Road>,
    last: Time,
    /// With a planted bug: the reading before the transport was polled.
    before: Option<Time>,
    planted: Option<Planted>,
}

impl<M: Machine, G> State<M, G> {
    /// The global time at which the driver looks at something.
    fn look(&mut self) -> u64 {
        if let Some(stopped) = self.stopped {
            if !self.rng.chance(250) {
                return stopped;
            }
            self.stopped = None;
        }
        self.now
    }

    fn read(&mut self) -> Time {
        let at = self.look();
        self.last = self.last.max(self.clock.local(at));
        self.before.unwrap_or(self.last)
    }
}

struct Desk<M: Machine, G>(Arc<Mutex<State<M, G>>>);

impl<M: Machine, G> Clone for Desk<M, G> {
    fn clone(&self) -> Desk<M, G> {
        Desk(Arc::clone(&self.0))
    }
}

impl<M: Machine, G> Desk<M, G> {
    fn open(&self) -> MutexGuard<'_, State<M, G>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Machine + 'static, G: Copy + Default + Send + 'static> Rig<M, G> {
    /// A driver of a machine.
    pub(crate) fn new(
        (mut node, worker): (M, WorkerId),
        ask: Ask<M, G>,
        params: &Physics,
        (life, clock, salt): (LifeId, Clock, u64),
        planted: Option<Planted>,
    ) -> Option<Rig<M, G>> {
        let state = State {
            clock,
            rng: Rng::new(salt),
            now: 0,
            stopped: None,
            events: VecDeque::new(),
            told: VecDeque::new(),
            commands: VecDeque::new(),
            traced: Vec::new(),
            outputs: Vec::new(),
            gauges: G::default(),
            costs: Vec::new(),
            life,
            ways: (params.seed, params.ways.clone()),
            peers: BTreeMap::new(),
            posts: BTreeMap::new(),
            last: Time::ZERO,
            before: None,
            planted,
        };
        let desk = Desk(Arc::new(Mutex::new(state)));
        node.listen(true);
        let setup = Setup::new(worker).with(|setup| {
            setup.max_sessions = 1;
            setup.command_queue = 1;
        });
        let machine = Tap { node, ask, desk: desk.clone() };
        let (client, own) = (Box::new(desk.clone()), Box::new(desk.clone()));
        let member = |&road: &Road| Member::named(ROADS[road], Box::new(End { desk: desk.clone(), road }));
        let roads = roads_of(params.seed, &params.ways, life);
        let transport: Box<dyn Transport + Send> = match roads {
            [road] => member(road).into_transport(),
            _ => Box::new(Ways::new(roads.iter().map(member).collect()).ok()?),
        };
        let driver = Driver::new(machine, setup, transport, client, own);
        Some(Rig { driver: driver.ok()?, desk })
    }

    /// Puts an event where the driver will find it.
    pub(crate) fn tell(&mut self, now: u64, input: Input<M::Command>) {
        let state = &mut *self.desk.open();
        let road_of = |peer: &PeerId| state.peers.get(peer).map_or(0, |(road, _)| *road);
        let (road, event) = match input {
            Input::Frame { from, frame } => ((from.0 >> 32) as Road, TransportEvent::Frame { from, frame }),
            Input::Posted { post, result } => {
                (state.posts.remove(&post).unwrap_or(0), TransportEvent::Posted { post, result })
            }
            Input::PeerGone { peer, end } => (road_of(&peer), TransportEvent::PeerGone { peer, end }),
            Input::Revoked { peer } => (road_of(&peer), TransportEvent::Revoked { peer }),
            Input::Command(command) => return state.told.push_back((now, Told::Command(command))),
            Input::Found { lookup, ranks } => {
                let answer = BootstrapEvent::Found { lookup, ranks };
                return state.told.push_back((now, Told::Answer(answer)));
            }
            Input::LookupFailed { lookup, error } => {
                let answer = BootstrapEvent::Failed { lookup, error };
                return state.told.push_back((now, Told::Answer(answer)));
            }
            Input::Connected { .. } | Input::ConnectFailed { .. } | Input::Timeout => return,
        };
        state.events.push_back((now, road, event));
    }

    /// Turns until the driver wants to sleep. `stopped` tells since when the host was stopped until now,
    /// somewhere in these turns.
    pub(crate) fn turn(&mut self, now: u64, clock: Clock, stopped: Option<u64>) -> Turned<M, G> {
        {
            let state = &mut *self.desk.open();
            (state.now, state.clock, state.stopped) = (now, clock, stopped);
        }
        let mut next = None;
        let mut turns = 0;
        loop {
            turns += 1;
            let turn = self.driver.turn();
            let state = &mut *self.desk.open();
            state.before = None;
            let stood = state.stopped.take().is_some();
            // What came after the driver had looked wakes it at once.
            let more = stood || !state.events.is_empty() || !state.told.is_empty();
            match turn {
                Turn::Rest(_) if more && turns < MAX_TURNS => {}
                Turn::Again if turns < MAX_TURNS => {}
                Turn::Again | Turn::Ended(_) => break,
                Turn::Rest(rest) => {
                    next = rest.at_most.map(|span| state.last + span);
                    break;
                }
            }
        }
        let state = &mut *self.desk.open();
        Turned {
            events: std::mem::take(&mut state.traced),
            outputs: std::mem::take(&mut state.outputs),
            now: state.last,
            next,
            gauges: state.gauges,
            costs: std::mem::take(&mut state.costs),
            restless: turns >= MAX_TURNS,
        }
    }

    /// What the machine holds.
    pub(crate) fn gauges(&self) -> G {
        self.desk.open().gauges
    }
}

impl<M: Machine, G: Send> fmt::Debug for Rig<M, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rig").field("driver", &self.driver).finish_non_exhaustive()
    }
}

/// A machine whose scheduler is the world's.
struct Tap<M: Machine, G> {
    node: M,
    ask: Ask<M, G>,
    desk: Desk<M, G>,
}

impl<M: Machine, G: Send> Machine for Tap<M, G> {
    type Command = M::Command;
    type Status = M::Status;
    type Resource = M::Resource;
    type Failure = M::Failure;
    type Quarantine = M::Quarantine;
    type Trace = M::Trace;

    fn handle(&mut self, now: Time, input: Input<M::Command>) {
        let input = match input {
            Input::LookupFailed { lookup: COMMAND, .. } => {
                let command = self.desk.open().commands.pop_front();
                command.map_or(Input::Timeout, Input::Command)
            }
            input => input,
        };
        {
            let state = &mut *self.desk.open();
            let cost = Cost::of(&input, (self.ask.1)(&state.gauges));
            state.costs.push(cost);
        }
        self.node.handle(now, input);
    }

    fn poll_output(&mut self) -> Option<Output<M::Status, M::Resource, M::Failure>> {
        let state = &mut *self.desk.open();
        loop {
            let output = self.node.poll_output();
            if let (Some(output), Some(cost)) = (&output, state.costs.last_mut()) {
                cost.add(output);
            }
            match output {
                Some(output @ (Output::Status { .. } | Output::Release { .. })) => state.outputs.push(output),
                None => {
                    state.traced.extend(std::iter::from_fn(|| self.node.poll_trace()));
                    state.gauges = (self.ask.0)(&self.node);
                    if let Some(cost) = state.costs.last_mut() {
                        cost.held = cost.held.or((self.ask.1)(&state.gauges));
                    }
                    return None;
                }
                output => return output,
            }
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        self.node.next_timeout()
    }

    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        self.node.transport_in(frame)
    }
}

impl<M: Machine, G: Send> WorkerClock for Desk<M, G> {
    fn now(&self) -> Time {
        self.open().read()
    }
}

/// One transport of a host, as the driver sees it.
struct End<M: Machine, G> {
    desk: Desk<M, G>,
    road: Road,
}

impl<M: Machine, G> End<M, G> {
    fn open(&self) -> MutexGuard<'_, State<M, G>> {
        self.desk.open()
    }
}

impl<M: Machine, G: Send> Transport for End<M, G> {
    fn name(&self) -> &'static str {
        ROADS[self.road]
    }

    fn register(&mut self, _: &Region) -> Result<(), TransportError> {
        Ok(())
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        Ok(metadata_by(self.road, self.open().life))
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        let state = &mut *self.open();
        let (seed, ways) = &state.ways;
        let there = road_and_life(metadata);
        let passage = |(road, there)| passage(*seed, ways, road, (state.life, there));
        if there.map(passage) == Some(Passage::Nowhere) {
            return Err(TransportError::Metadata("it is of another host"));
        }
        let transport = TransportOffer::new(ROADS[self.road], Bytes::copy_from_slice(metadata));
        state.outputs.push(Output::Connect { peer, transport });
        state.peers.insert(peer, there.ok_or(TransportError::Metadata("it leads nowhere"))?);
        Ok(())
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.open().outputs.push(Output::Disconnect { peer });
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        self.open().outputs.push(Output::Send { peer, frame });
        Ok(())
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        let state = &mut *self.open();
        state.posts.insert(post.id, self.road);
        state.outputs.push(Output::Post { peer, post });
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        self.open().outputs.push(Output::Cancel { post });
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        self.open().outputs.push(Output::Permit { peer, until });
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        let state = self.open();
        let (seed, ways) = &state.ways;
        let Some(&(road, writer)) = state.peers.get(&peer) else { return WriteFence::AtDeath };
        fence_between(*seed, ways, (writer, state.life, road), state.planted)
    }

    fn revoke(&mut self, peer: PeerId) {
        self.open().outputs.push(Output::Revoke { peer });
    }

    fn poll(&mut self, _: Time, events: &mut Vec<TransportEvent>) {
        let state = &mut *self.open();
        if state.planted == Some(Planted::EventsAsOfBefore) {
            state.before = Some(state.last);
        }
        let until = state.look();
        state.events.retain(|(at, road, event)| {
            let due = *at <= until && *road == self.road;
            if due {
                events.push(event.clone());
            }
            !due
        });
    }

    fn wait(&self) -> TransportWait {
        TransportWait::Readable(Vec::new())
    }
}

impl<M: Machine, G: Send> BootstrapClient for Desk<M, G> {
    fn publish(&mut self, _: Time, _: &str, _: RankRecord) {}

    fn withdraw(&mut self, _: Time) {}

    fn lookup(&mut self, _: Time, lookup: LookupId, addr: &str, query: &RankQuery) {
        let (addr, query) = (addr.to_owned(), query.clone());
        self.open().outputs.push(Output::Lookup { lookup, addr, query });
    }

    fn poll(&mut self, _: Time) -> Option<BootstrapEvent> {
        let state = &mut *self.open();
        state.before = None;
        let until = state.look();
        state.told.front().filter(|(at, _)| *at <= until)?;
        match state.told.pop_front()?.1 {
            Told::Answer(answer) => Some(answer),
            Told::Command(command) => {
                state.commands.push_back(command);
                Some(BootstrapEvent::Failed { lookup: COMMAND, error: BootstrapError::TimedOut })
            }
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn as_raw_fd(&self) -> Option<RawFd> {
        None
    }
}
