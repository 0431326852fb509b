//! One turn of `poll`: UCX works, what it has left is looked at, and slices begin, for about half a millisecond.

use std::time::{Duration, Instant};

use kv_core::Time;
use kv_host::clock;

use crate::remote::Stage;
use crate::transport::{Flight, UcxTransport};

/// How long one call of `poll` begins slices and lets UCX work.
const TURN: Duration = Duration::from_micros(500);
/// The number of messages, and of events for the owner, after which a call of `poll` takes no more messages.
const EVENTS: usize = 1024;

impl UcxTransport {
    /// Works until nothing is to be done, or the time is over.
    pub(crate) fn serve(&mut self) {
        let begun = Instant::now();
        let is_over = || begun.elapsed() >= TURN;
        let crowded = std::mem::take(&mut self.crowded);
        self.stirred.extend(crowded);
        loop {
            self.now = clock::now();
            self.fill_stirred(is_over);
            let busy = self.engine.progress();
            let told = self.take_news();
            if !busy && !told && self.stirred.is_empty() || is_over() || self.posts.events() >= EVENTS {
                return;
            }
        }
    }

    /// Looks at what UCX has left. True if there was something.
    pub(crate) fn take_news(&mut self) -> bool {
        let mut told = false;
        while let Some((flight, result)) = self.engine.take_ended() {
            told = true;
            if let Some(flight) = self.flights.remove(&flight) {
                self.landed(flight, result.is_ok());
            }
        }
        // Not every message is an event for the owner.
        let mut messages = 0;
        while self.posts.events().max(messages) < EVENTS {
            let Some(arrived) = self.engine.take_arrived() else { break };
            (told, messages) = (true, messages + 1);
            self.on_message(arrived);
        }
        // After what has come by the endpoints: the last words of their peers.
        while let Some((endpoint, _)) = self.engine.take_broken() {
            told = true;
            if let Some(remote) = self.remotes.by_endpoint(endpoint) {
                self.break_off(remote);
            }
        }
        told
    }

    /// The operations of a slice have ended.
    fn landed(&mut self, flight: Flight, done: bool) {
        let Flight { transfer, way, remote: id, weight, begun } = flight;
        if let Some(remote) = self.remotes.get_mut(id) {
            remote.flights -= 1;
            remote.weight -= weight;
            if done {
                remote.latency.note(self.now.since(begun), self.now);
            } else if let Stage::Ending { unquiet, .. } = &mut remote.stage {
                *unquiet = true;
            }
        }
        if let Some(transfer) = self.posts.get_mut(transfer) {
            transfer.under_way -= 1;
        }
        if !done {
            self.break_off_after_failure(id);
        }
        self.settle(transfer);
        self.stirred.insert(way);
    }

    /// When the transport has to be polled although nothing wakes its owner.
    pub(crate) fn next_timer(&self) -> Option<Duration> {
        let opening = self.opening.first().map(|(at, _)| *at);
        let ending = (!self.ending.is_empty()).then(|| self.scans.next());
        opening.into_iter().chain(ending).min().map(|at| at.since(clock::now()))
    }

    /// Ways whose time to be looked at has come.
    pub(crate) fn look_at_opening(&mut self, now: Time) {
        while let Some((at, way)) = self.opening.first().copied().filter(|(at, _)| *at <= now) {
            self.opening.remove(&(at, way));
            self.ask_again(way);
        }
    }
}
