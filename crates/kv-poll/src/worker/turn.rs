//! The worker's loop: one turn takes what has come, and sleeps when there is nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::proto::{Command, Input, Node, Output};
use kv_core::{BootstrapClient, BootstrapEvent, Plane, PlaneError, PlaneEvent, PlaneWait, PostId, Time};

use super::explain::Explain;
use super::fences::Fences;
use super::sessions::Sessions;
use crate::cell::Cell;
use crate::link::{Link, Message};
use crate::manager::Registration;
use crate::token::Token;

/// Commands and answers of one turn: enough to be efficient, few enough that frames and deadlines
/// are served beside a scheduler that opens sessions as fast as it can.
const PER_TURN: usize = 256;
/// How long a stopping worker waits for its registration to be withdrawn, once all pages are back.
/// The lease ends what the withdrawal did not.
const WITHDRAWING: Duration = Duration::from_millis(250);

/// The protocol machine, as the loop drives it.
pub(super) trait Machine: Send {
    /// Takes one input; then the outputs are to be drained.
    fn handle(&mut self, now: Time, input: Input);
    /// The next output.
    fn poll_output(&mut self) -> Option<Output>;
    /// When `Timeout` is due.
    fn next_timeout(&self) -> Option<Time>;
    /// Complete pages that are pinned for readers.
    fn pages_leased(&self) -> usize {
        0
    }
}

/// Everything that belongs to the worker's thread.
pub(super) struct Driver {
    /// Dropped first: sessions end before the plane under them does.
    sessions: Sessions,
    fences: Fences,
    node: Box<dyn Machine>,
    plane: Box<dyn Plane + Send>,
    client: Box<dyn BootstrapClient>,
    link: Arc<Link>,
    epoch: Instant,
    /// What outputs have brought about, for the node.
    inputs: VecDeque<Input>,
    events: Vec<PlaneEvent>,
    /// The client has been given something and wants to be polled before any sleep.
    client_stirred: bool,
    stopping: Option<Stopping>,
    explain: Explain,
}

struct Stopping {
    deadline: Time,
    /// Until when to wait for the client alone.
    withdrawing: Time,
    sessions: usize,
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Ended {
    /// Sessions that were running when it was told to stop.
    pub(super) sessions: usize,
}

impl Driver {
    pub(super) fn new(
        node: Box<dyn Machine>,
        plane: Box<dyn Plane + Send>,
        client: Box<dyn BootstrapClient>,
        link: Arc<Link>,
    ) -> Driver {
        let explain = Explain::new(link.args.worker(), link.args.verbose());
        Driver {
            sessions: Sessions::new(Arc::clone(&link)),
            fences: Fences::new(Arc::clone(&link)),
            node,
            plane,
            client,
            link,
            epoch: Instant::now(),
            inputs: VecDeque::new(),
            events: Vec::new(),
            client_stirred: false,
            stopping: None,
            explain,
        }
    }

    /// Runs until told to stop. `publish` registers the worker, if it is to be.
    pub(super) fn run(mut self, publish: impl FnOnce(&mut dyn BootstrapClient, Time)) -> Ended {
        let now = self.now();
        publish(&mut *self.client, now);
        self.client_stirred = true;
        loop {
            let now = self.now();
            self.link.counters.turns.add_one();
            self.take_commands(now);
            self.take_events(now);
            self.take_answers(now);
            self.take_timeout(now);
            self.take_fences(now);
            self.link.counters.pages_leased.set(self.node.pages_leased());
            if let Some(ended) = self.wind_up(now) {
                return ended;
            }
            self.sleep(now);
        }
    }

    fn take_commands(&mut self, now: Time) {
        for _ in 0..self.link.aborts_waiting() {
            let Some(cell) = self.link.next_abort() else { break };
            // If its session is not open yet, the cell will tell when it is.
            if self.sessions.is_running(&cell) {
                self.feed(now, Input::Command(Command::Abort { session: cell.id() }));
            }
        }
        for _ in 0..PER_TURN {
            let Some(message) = self.link.next_command() else { break };
            self.link.counters.commands.add_one();
            if let Some(Message { cell, command, .. }) = self.fences.admit(now, message) {
                self.take_command(now, cell, command);
            }
        }
    }

    fn take_command(&mut self, now: Time, cell: Arc<Cell>, command: Command) {
        let Some(command) = self.sessions.admit(&cell, command) else { return };
        let opens = matches!(command, Command::OpenSender { .. } | Command::OpenReceiver { .. });
        self.feed(now, Input::Command(command));
        if opens && cell.is_abort_wanted() && self.sessions.is_running(&cell) {
            self.feed(now, Input::Command(Command::Abort { session: cell.id() }));
        }
    }

    /// Passes on what has waited for a device.
    fn take_fences(&mut self, now: Time) {
        for (cell, command) in self.fences.ask(now) {
            self.take_command(now, cell, command);
        }
    }

    fn take_events(&mut self, now: Time) {
        let mut events = std::mem::take(&mut self.events);
        self.plane.poll(now, &mut events);
        // A lease is compared with the time at which a read ended or a heartbeat came. Both have
        // happened in `poll`: the time from before it would make them earlier than they were, by
        // as much as this process was stopped in between.
        let now = self.now();
        for event in events.drain(..) {
            let input = match event {
                PlaneEvent::Frame { from, frame } => {
                    self.link.counters.frames_received.add_one();
                    Input::Frame { from, frame }
                }
                PlaneEvent::Posted { post, result } => {
                    self.link.counters.posts_in_flight.sub(1);
                    self.posted(post, result)
                }
                PlaneEvent::PeerGone { peer, end } => Input::PeerGone { peer, end },
                PlaneEvent::Revoked { peer } => Input::Revoked { peer },
            };
            self.feed(now, input);
        }
        self.events = events;
    }

    fn take_answers(&mut self, now: Time) {
        self.client_stirred = false;
        for _ in 0..PER_TURN {
            match self.client.poll(now) {
                Some(BootstrapEvent::Found { lookup, ranks }) => {
                    self.feed(now, Input::Found { lookup, ranks })
                }
                Some(BootstrapEvent::Failed { lookup, error }) => {
                    self.feed(now, Input::LookupFailed { lookup, error });
                }
                Some(BootstrapEvent::Published { .. }) => self.link.set_registration(Registration::Published),
                Some(BootstrapEvent::PublishFailed { error, .. }) => {
                    self.link.set_registration(Registration::Pending { last: Some(error) });
                }
                None => return,
            }
        }
        self.client_stirred = true;
    }

    fn take_timeout(&mut self, now: Time) {
        if self.node.next_timeout().is_some_and(|at| at <= now) {
            self.feed(now, Input::Timeout);
        }
    }

    /// Gives the node one input, and those that its outputs bring about.
    fn feed(&mut self, now: Time, input: Input) {
        self.inputs.push_back(input);
        while let Some(input) = self.inputs.pop_front() {
            self.explain.input(&input);
            self.node.handle(now, input);
            while let Some(output) = self.node.poll_output() {
                self.explain.output(&output);
                self.carry_out(now, output);
            }
        }
    }

    fn carry_out(&mut self, now: Time, output: Output) {
        let counters = &self.link.counters;
        match output {
            Output::Connect { peer, metadata } => {
                self.inputs.push_back(match self.plane.connect(peer, &metadata) {
                    Ok(()) => Input::Connected {
                        peer,
                        directions: self.plane.directions(Some(peer)),
                        fence: self.plane.write_fence(peer),
                    },
                    Err(error) => Input::ConnectFailed { peer, error },
                });
            }
            Output::Disconnect { peer } => self.plane.disconnect(peer),
            Output::Send { peer, frame } => match self.plane.send(peer, frame) {
                Ok(()) => counters.frames_sent.add_one(),
                Err(_) => counters.frames_dropped.add_one(),
            },
            Output::Post { peer, post } => {
                let id = post.id;
                match self.plane.post(peer, post) {
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
            Output::Permit { peer, until } => self.plane.permit(peer, until),
            Output::Revoke { peer } => self.plane.revoke(peer),
            Output::Cancel { post } => self.plane.cancel(post),
            Output::Lookup { lookup, addr, query } => {
                self.client.lookup(now, lookup, &addr, &query);
                self.client_stirred = true;
            }
            Output::Status { session, poll, failure } => self.sessions.status(session, poll, failure),
            Output::Release { session, pages } => self.sessions.release(session, pages.into()),
            Output::ReleaseGroups { session, groups, skipped } => {
                self.sessions.release(session, Token::Groups(groups, skipped));
            }
        }
    }

    fn posted(&self, post: PostId, result: Result<(), PlaneError>) -> Input {
        if result.is_err() {
            self.link.counters.posts_failed.add_one();
        }
        Input::Posted { post, result }
    }

    /// Stops, if asked to: at the deadline, or when every page is back and the registration, if
    /// there was one, has had its time to be withdrawn. A client that waits for no point in time
    /// has nothing under way.
    fn wind_up(&mut self, now: Time) -> Option<Ended> {
        if self.stopping.is_none()
            && let Some(grace) = self.link.stop_requested()
        {
            self.client.withdraw(now);
            self.client_stirred = true;
            self.stopping = Some(Stopping {
                deadline: now + grace,
                withdrawing: now + grace.min(WITHDRAWING),
                sessions: self.sessions.running(),
            });
            self.feed(now, Input::Command(Command::Shutdown));
        }
        let stopping = self.stopping.as_ref()?;
        let withdrawn = self.link.registration() == Registration::None
            || (!self.client_stirred && self.client.next_timeout().is_none());
        let quiet = self.sessions.is_empty() && self.fences.is_empty() && !self.link.has_commands();
        let done = quiet && (withdrawn || now >= stopping.withdrawing);
        (done || now >= stopping.deadline).then_some(Ended { sessions: stopping.sessions })
    }

    /// Sleeps until something may have come. Deadlines count from the start of the turn, so they
    /// are late by its length at most; a turn is short.
    fn sleep(&mut self, now: Time) {
        let (mut fds, at_most) = match self.plane.wait() {
            _ if self.client_stirred => return,
            PlaneWait::Now => return,
            PlaneWait::Readable(fds) => (fds, None),
            PlaneWait::ReadableOrAfter(fds, at_most) => (fds, Some(at_most)),
        };
        fds.extend(self.client.as_raw_fd());
        let stop =
            self.stopping.iter().flat_map(|stop| [stop.withdrawing, stop.deadline]).find(|at| *at > now);
        let due = [self.node.next_timeout(), self.fences.next_timeout(), self.client.next_timeout(), stop];
        let due = due.into_iter().flatten().min();
        let timeout = [at_most, due.map(|at| at.since(now))].into_iter().flatten().min();
        if timeout == Some(Duration::ZERO) {
            return;
        }
        let (link, stopping) = (&self.link, self.stopping.is_some());
        let has_work = || link.has_commands() || (!stopping && link.stop_requested().is_some());
        link.waker.park(&fds, timeout, has_work);
        link.counters.wake_ups.add_one();
    }

    fn now(&self) -> Time {
        Time::ZERO + self.epoch.elapsed()
    }
}

impl Machine for Node {
    fn handle(&mut self, now: Time, input: Input) {
        Node::handle(self, now, input);
    }

    fn poll_output(&mut self) -> Option<Output> {
        Node::poll_output(self)
    }

    fn next_timeout(&self) -> Option<Time> {
        Node::next_timeout(self)
    }

    fn pages_leased(&self) -> usize {
        Node::pages_leased(self)
    }
}
