//! The worker's loop. One turn takes the inputs that have come, and says how long to sleep when there are
//! none.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kv_core::machine::{Input, Machine, Output, SessionCommand};
use kv_core::{
    BootstrapClient, BootstrapEvent, OsError, PostId, RankRecord, Time, Transport, TransportError,
    TransportEvent, TransportWait,
};

mod ending;

use self::ending::Stopping;
use super::clock::Clock;
use super::ebb::Ebb;
use super::listeners::Listeners;
use super::port::Port;
use super::quarantine::Face;
use super::ready_events::ReadyEvents;
use super::sessions::Sessions;
use super::setup::{Setup, StartError};
use super::shared::{Message, Publication, Shared};

/// Most commands of a turn in which no frame has come, and most answers of the bootstrap client: enough to be efficient,
/// few enough that deadlines are served, and the transport is asked, beside a scheduler that opens sessions without a pause.
const PER_TURN: usize = 256;
/// Longest sleep with a deadline in sight. The kernel's sleep does not count the time that the host is
/// suspended, and deadlines do: a deadline that passes while the host is suspended is late by this much at
/// most.
const LONGEST_SLEEP: Duration = Duration::from_secs(5);

/// A worker without its thread: for tests, and for servers that run the worker in a loop of their own.
///
/// # Contract
///
/// * The owner calls [`turn`](Driver::turn) again at once after [`Turn::Again`], and after [`Turn::Rest`] as
///   soon as a descriptor is readable, the time has passed, or a handle of the [`port`](Driver::port) was
///   used. After [`Turn::Ended`] the driver is to be dropped.
/// * **Every input is handed to the machine with a reading of the clock that was made after the input was
///   taken** from the transport, the client or a handle. A lease or a permission is thus never judged, nor
///   given, as of a time before the event that the decision depends on, however long the process was stopped
///   in between.
/// * **A frame is handed to the machine after every command that a handle had taken before the frame was taken from the
///   transport**, except commands that wait for a ready event. A frame may be a peer's answer to such a command: a reader
///   asks for the lease of a sender as soon as the caller of [`KvManager::sender`](kv_core::KvManager::sender) has passed
///   the lease's number on.
/// * Dropping the driver is the death of the worker: sessions that have not ended fail.
pub struct Driver<M: Machine> {
    /// The first field, and so the first to be dropped: sessions end before the transport is closed.
    sessions: Sessions<M>,
    ready_events: ReadyEvents<M>,
    machine: M,
    transport: Box<dyn Transport + Send>,
    client: Box<dyn BootstrapClient>,
    clock: Box<dyn Clock>,
    shared: Arc<Shared<M>>,
    /// The address of the bootstrap server and the record for it; taken by the first turn.
    publish: Option<(String, RankRecord)>,
    /// Inputs for the machine that came of its own outputs.
    inputs: VecDeque<Input<M::Command>>,
    events: Vec<TransportEvent>,
    face: Face,
    /// The bootstrap client was given a task and must be polled before the next sleep.
    client_stirred: bool,
    ebb: Option<Ebb>,
    stopping: Option<Stopping>,
    listeners: Listeners<M::Trace>,
    /// The last turn has told the scheduler of changed sessions.
    has_signalled: bool,
}

/// What the owner of a [`Driver`] does after a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// Take the next turn at once: there is more to do.
    Again,
    /// Sleep, then take the next turn.
    Rest(Rest),
    /// Drop the driver: the worker has stopped.
    Ended(Ended),
}

/// How to sleep until an input may have come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rest {
    /// The sleep ends when one of these descriptors is readable.
    pub fds: Vec<RawFd>,
    /// The sleep ends after this time at the latest; `None` if no deadline is in sight.
    pub at_most: Option<Duration>,
}

/// How a driver ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ended {
    /// Sessions that had not ended when the driver was told to stop.
    pub sessions: usize,
}

impl<M: Machine> Driver<M> {
    /// A driver for this machine, over a transport with which the machine's regions are
    /// [registered](super::attach).
    pub fn new(
        mut machine: M,
        setup: Setup<M::Trace>,
        transport: Box<dyn Transport + Send>,
        client: Box<dyn BootstrapClient>,
        clock: Box<dyn Clock>,
    ) -> Result<Driver<M>, StartError> {
        setup.check()?;
        let shared = Shared::new(setup.max_sessions, setup.command_queue);
        let shared = shared.map(Arc::new).map_err(|error| OsError::new("eventfd", error))?;
        let listeners = Listeners::new(setup.worker, setup.listeners);
        if listeners.is_heard() {
            machine.listen(true);
        }
        if setup.publish.is_some() {
            shared.set_publication(Publication::Pending { last: None });
        }
        Ok(Driver {
            sessions: Sessions::new(Arc::clone(&shared)),
            ready_events: ReadyEvents::new(Arc::clone(&shared)),
            machine,
            transport,
            client,
            clock,
            publish: setup.publish,
            inputs: VecDeque::new(),
            events: Vec::new(),
            face: Face::default(),
            client_stirred: false,
            ebb: None,
            stopping: None,
            listeners,
            has_signalled: false,
            shared,
        })
    }

    /// The port that opens sessions on this worker.
    pub fn port(&self) -> Port<M> {
        Port::new(Arc::clone(&self.shared))
    }

    /// Asks the worker to stop: a turn says [`Turn::Ended`] when everything lent is back, or when `grace` is
    /// over.
    pub fn stop(&self, grace: Duration) {
        self.shared.request_stop(grace);
    }

    /// Takes turns, and sleeps between them, until the worker has stopped.
    pub(super) fn run(mut self) -> Ended {
        loop {
            match self.turn() {
                // What is left to do is not what the scheduler waits for. Only a worker with nothing else under way yields:
                // one with much to do keeps its share of a busy CPU.
                Turn::Again if self.has_signalled && self.is_quiet() => thread::yield_now(),
                Turn::Again => {}
                Turn::Rest(rest) => self.sleep(&rest),
                Turn::Ended(ended) => return ended,
            }
        }
    }

    /// Takes the inputs that have come, carries out what follows from them, and says how long there is
    /// nothing to do. Never blocks.
    pub fn turn(&mut self) -> Turn {
        if let Some((addr, record)) = self.publish.take() {
            self.client.publish(self.clock.now(), &addr, record);
        }
        self.shared.counters.turns.add_one();
        self.take_commands(PER_TURN);
        self.take_events();
        // The messages of the commands that came before the transport was asked are on their way.
        let had_signalled = std::mem::replace(&mut self.has_signalled, self.shared.poll_set.signal_noted());
        if self.has_signalled && !had_signalled && self.is_quiet() {
            // The scheduler may wait for this very CPU, and nothing else is under way that could not wait for one turn.
            // The transport is told that its events are handled.
            let _ = self.transport.wait();
            return Turn::Again;
        }
        self.take_answers();
        self.take_timeout();
        self.take_ready_events();
        self.shared.counters.leased.set(self.machine.leased());
        // One reading for both: a deadline of stopping that has not come for `wind_up` must be ahead for
        // `rest`.
        let now = self.clock.now();
        self.drain(now);
        let ended = self.wind_up(now);
        self.has_signalled |= self.shared.poll_set.signal_noted();
        match ended {
            Some(ended) => Turn::Ended(ended),
            None => {
                self.face.show(now, &self.shared, &self.machine);
                self.rest(now)
            }
        }
    }

    /// Takes the aborts that wait, and at most `most` other commands.
    fn take_commands(&mut self, most: usize) {
        for _ in 0..self.shared.aborts_waiting() {
            let Some(cell) = self.shared.next_abort() else { break };
            // If the session is not open yet, `take_command` looks into the cell when the session is opened.
            if self.sessions.is_running(&cell) {
                self.feed(Input::Command(M::Command::abort(cell.id())));
            }
        }
        let mut taken = 0;
        while taken < most
            && let Some(message) = self.shared.next_command()
        {
            taken += 1;
            self.shared.counters.commands.add_one();
            if let Some(message) = self.ready_events.admit(self.clock.now(), message) {
                self.take_command(message);
            }
        }
        if taken > 0 {
            self.shared.made_room();
        }
    }

    /// Takes every command that was given before this call. The capacity of the ring bounds their number.
    fn take_commands_so_far(&mut self) {
        self.take_commands(self.shared.commands_waiting());
    }

    fn take_command(&mut self, message: Message<M>) {
        let (cell, opens) = (Arc::clone(&message.cell), message.opens);
        let Some(command) = self.sessions.admit(message) else { return };
        // Only for the last command that waits: a worker with more to do is soon heard by its peers anyway.
        if !self.shared.has_commands()
            && let Some((peer, bytes)) = self.machine.addressee(self.clock.now(), &command)
        {
            self.transport.rouse(peer, bytes);
        }
        self.feed(Input::Command(command));
        if opens && cell.is_abort_wanted() && self.sessions.is_running(&cell) {
            self.feed(Input::Command(M::Command::abort(cell.id())));
        }
    }

    /// Passes on the commands whose ready events have passed.
    fn take_ready_events(&mut self) {
        for message in self.ready_events.ask(self.clock.now()) {
            self.take_command(message);
        }
    }

    fn take_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.transport.poll(self.clock.now(), &mut events);
        let has_frame = events.iter().any(|event| matches!(event, TransportEvent::Frame { .. }));
        if has_frame && self.shared.has_commands() {
            self.take_commands_so_far();
            self.transport.begin_handling();
        }
        for event in events.drain(..) {
            let input = match event {
                TransportEvent::Frame { from, frame } => {
                    self.shared.counters.frames_received.add_one();
                    let speaker = self.machine.transport_in(&frame);
                    if speaker.is_some_and(|speaker| !self.transport.may_speak_by(from, &speaker)) {
                        // The frame comes in the name of a worker to which the connection does not belong.
                        self.shared.counters.frames_dropped.add_one();
                        continue;
                    }
                    Input::Frame { from, frame }
                }
                TransportEvent::Posted { post, result } => {
                    self.shared.counters.posts_in_flight.sub(1);
                    self.posted(post, result)
                }
                TransportEvent::PeerGone { peer, end } => Input::PeerGone { peer, end },
                TransportEvent::Revoked { peer } => Input::Revoked { peer },
            };
            self.feed(input);
        }
        self.events = events;
    }

    fn take_answers(&mut self) {
        self.client_stirred = false;
        for _ in 0..PER_TURN {
            match self.client.poll(self.clock.now()) {
                Some(BootstrapEvent::Found { lookup, ranks }) => self.feed(Input::Found { lookup, ranks }),
                Some(BootstrapEvent::Failed { lookup, error }) => {
                    self.feed(Input::LookupFailed { lookup, error });
                }
                Some(BootstrapEvent::Published { .. } | BootstrapEvent::PublishFailed { .. })
                    if self.ebb.as_ref().is_some_and(|ebb| ebb.left) => {}
                Some(BootstrapEvent::Published { .. }) => self.shared.set_publication(Publication::Published),
                Some(BootstrapEvent::PublishFailed { error, .. }) => {
                    self.shared.set_publication(Publication::Pending { last: Some(error) });
                }
                None => return,
            }
        }
        self.client_stirred = true;
    }

    fn take_timeout(&mut self) {
        if self.machine.next_timeout().is_some_and(|at| at <= self.clock.now()) {
            self.feed(Input::Timeout);
        }
    }

    /// Gives the machine one input, and the inputs that come of the machine's outputs. The clock is read
    /// here, and nowhere earlier: a lease is compared with the time at which a read ended or a heartbeat
    /// came, and an older reading would make both earlier than they were, by as much as this process was
    /// stopped in between.
    fn feed(&mut self, input: Input<M::Command>) {
        self.inputs.push_back(input);
        while let Some(input) = self.inputs.pop_front() {
            let now = self.clock.now();
            self.face.stir();
            self.machine.handle(now, input);
            self.listeners.pass_on(&mut self.machine);
            while let Some(output) = self.machine.poll_output() {
                self.carry_out(now, output);
            }
        }
    }

    fn carry_out(&mut self, now: Time, output: Output<M::Status, M::Resource, M::Failure>) {
        let counters = &self.shared.counters;
        match output {
            Output::Connect { peer, transport } => {
                self.inputs.push_back(match self.transport.connect_by(peer, &transport) {
                    Ok(()) => Input::Connected {
                        peer,
                        directions: self.transport.directions(Some(peer)),
                        fence: self.transport.write_fence(peer),
                    },
                    Err(error) => Input::ConnectFailed { peer, error },
                });
            }
            Output::Disconnect { peer } => self.transport.disconnect(peer),
            Output::Send { peer, frame } => match self.transport.send(peer, frame) {
                Ok(()) => counters.frames_sent.add_one(),
                Err(_) => counters.frames_dropped.add_one(),
            },
            Output::Post { peer, post } => {
                let id = post.id;
                match self.transport.post(peer, post) {
                    Ok(()) => {
                        counters.posts.add_one();
                        counters.posts_in_flight.add(1);
                    }
                    Err(error) => {
                        let refused = self.posted(id, Err(error));
                        self.inputs.push_back(refused);
                    }
                }
            }
            Output::Permit { peer, until } => self.transport.permit(peer, until),
            Output::Revoke { peer } => self.transport.revoke(peer),
            Output::Cancel { post } => self.transport.cancel(post),
            Output::Lookup { lookup, addr, query } => {
                self.client.lookup(now, lookup, &addr, &query);
                self.client_stirred = true;
            }
            Output::Status { session, poll, failure } => self.sessions.status(session, poll, failure),
            Output::Release { session, resource } => self.sessions.release(session, resource),
        }
    }

    fn posted(&self, post: PostId, result: Result<(), TransportError>) -> Input<M::Command> {
        if result.is_err() {
            self.shared.counters.posts_failed.add_one();
        }
        Input::Posted { post, result }
    }

    /// How to sleep until an input may have come.
    fn rest(&self, now: Time) -> Turn {
        let (mut fds, at_most) = match self.transport.wait() {
            _ if self.client_stirred => return Turn::Again,
            TransportWait::Now => return Turn::Again,
            TransportWait::Readable(fds) => (fds, None),
            TransportWait::ReadableOrAfter(fds, at_most) => (fds, Some(at_most)),
        };
        fds.extend(self.client.as_raw_fd());
        let stop =
            self.stopping.iter().flat_map(|stop| [stop.withdrawing, stop.deadline]).find(|at| *at > now);
        let face = self.face.next_timeout();
        let due = [
            self.machine.next_timeout(),
            self.ready_events.next_timeout(),
            self.client.next_timeout(),
            face,
            stop,
            self.ebb.as_ref().and_then(|ebb| ebb.next_timeout()).filter(|_| self.stopping.is_none()),
        ];
        let due = due.into_iter().flatten().min();
        match [at_most, due.map(|at| at.since(now))].into_iter().flatten().min() {
            Some(Duration::ZERO) => Turn::Again,
            at_most => Turn::Rest(Rest { fds, at_most }),
        }
    }

    pub(super) fn sleep(&self, rest: &Rest) {
        let (shared, ebb, stopping) = (&self.shared, &self.ebb, self.stopping.is_some());
        let drains_anew = || match ebb {
            None => shared.is_draining(),
            Some(ebb) => !ebb.has_order() && shared.stop_after().is_some(),
        };
        let told = || !stopping && (shared.stop_requested().is_some() || drains_anew());
        let has_work = || shared.has_commands() || told();
        shared.waker.park(&rest.fds, rest.at_most.map(|time| time.min(LONGEST_SLEEP)), has_work);
        shared.counters.wake_ups.add_one();
    }
}

impl<M: Machine> fmt::Debug for Driver<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("gauges", &self.shared.gauges()).finish_non_exhaustive()
    }
}
