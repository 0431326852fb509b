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
    pub(crate) fn landed(&mut self, flight: Flight, done: bool) {
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

#[cfg(test)]
mod tests {
    use kv_core::{PostId, Transport, TransportError, TransportEvent, TransportWait, WayEnd};

    use super::*;
    use crate::ending::tests::{PEER, Pair, begin_write};

    #[test]
    fn a_post_whose_last_slice_has_failed_ends_with_an_error_after_the_settle() {
        let settle = Duration::from_millis(200);
        let Some(mut pair) = Pair::with(|config| config.settle = settle) else { return };
        pair.connect(0);
        pair.send(0, 1);
        let side = &mut pair.sides[0];
        let flight = begin_write(side, 1, None);
        // The settle counts from the last poll.
        let begun = side.now;
        side.landed(flight, false);
        pair.until("the end of the way", |pair| !pair.events[0].is_empty());
        let took = clock::now().since(begun);
        assert!(took >= settle, "after {took:?}");
        let ended = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) };
        assert_eq!(pair.events[0], [ended, TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
    }

    #[test]
    fn an_owner_that_sleeps_is_woken_for_the_end_of_a_peer() {
        let Some(mut pair) = Pair::new() else { return };
        pair.connect(0);
        pair.send(0, 1);
        let side = &mut pair.sides[0];
        let remote = side.remotes.all().next().unwrap().0;
        side.break_off_after_failure(remote);
        let (mut slept, begun) = (0, Instant::now());
        while slept < 5 {
            assert!(begun.elapsed() < side.config.settle, "the owner cannot sleep");
            // A greeting that is over wakes the owner, too, but later.
            let most = side.scans.next().since(clock::now());
            match side.wait() {
                TransportWait::Now => {}
                TransportWait::ReadableOrAfter(_, after) if after <= most => slept += 1,
                other => panic!("{other:?}, not {most:?}"),
            }
            side.poll(clock::now(), &mut pair.events[0]);
        }
    }
}
