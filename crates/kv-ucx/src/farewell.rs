//! The last words of a transport that is dropped: the frames that it has taken, and then a farewell, by which each peer
//! knows that nothing of this transport can touch its memory any more.

use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Op, TransportError};
use kv_host::{Life, OfWay, clock};

use crate::message::{self, Kind};
use crate::remote::{Remote, RemoteId};
use crate::transport::UcxTransport;
use crate::way::Stage;

/// How long a transport that is dropped awaits its slices and sends its frames; and how long it then awaits that peers have
/// taken these, and the farewells.
const WORDS: Duration = Duration::from_millis(300);
const FLUSH: Duration = Duration::from_millis(400);

impl Drop for UcxTransport {
    fn drop(&mut self) {
        self.take_leave();
    }
}

impl UcxTransport {
    /// Starts no more slices, awaits those under way, and sends the frames that were taken. Says farewell to the remotes
    /// with which nothing is under way then.
    fn take_leave(&mut self) {
        let is_over = after(WORDS);
        let ways: Vec<_> = self.ways.keys().copied().collect();
        for transfer in ways.iter().flat_map(|way| self.posts.of_way(*way)).collect::<Vec<_>>() {
            if self.posts.get(transfer).is_some_and(|transfer| transfer.has_more()) {
                self.give_up(transfer, TransportError::Cancelled);
            }
        }
        self.stirred.extend(ways);
        while self.has_words() && !is_over() {
            self.now = clock::now();
            let crowded = std::mem::take(&mut self.crowded);
            self.stirred.extend(crowded);
            self.fill_stirred(&is_over);
            self.engine.progress();
            self.take_news();
        }
        // A peer that is stuck takes no farewell from the others.
        let quiet = self.flushed(self.quiet_remotes());
        let told = quiet.into_iter().filter(|id| self.say_farewell(*id)).collect();
        self.flushed(told);
    }

    /// True if slices are under way, or frames can be sent.
    fn has_words(&self) -> bool {
        let mut open = self.ways.values().filter(|way| matches!(way.stage, Stage::Open(_)));
        !self.flights.is_empty() || open.any(|way| !way.frames.is_empty() || !way.parked.is_empty())
    }

    /// The remotes to which nothing can be under way: by their endpoint, or by an earlier one that has failed.
    fn quiet_remotes(&self) -> BTreeSet<RemoteId> {
        let ending = self.ending.iter().filter_map(|id| self.remotes.get(*id));
        let ending: HashSet<_> = ending.map(|remote| remote.name.token).collect();
        let is_quiet = |remote: &Remote| {
            remote.is_standing() && remote.flights == 0 && !ending.contains(&remote.name.token)
        };
        self.remotes.all().filter(|(_, remote)| is_quiet(remote)).map(|(id, _)| id).collect()
    }

    /// Flushes the endpoints of these remotes. Returns the remotes that have taken all that was sent before.
    fn flushed(&mut self, mut remotes: BTreeSet<RemoteId>) -> BTreeSet<RemoteId> {
        let is_over = after(FLUSH);
        // The flush has the remote's number, which no slice has: both are drawn from `last_id`.
        for id in &remotes {
            if let Some(remote) = self.remotes.get(*id) {
                self.engine.begin(remote.endpoint, Op::Write, &[], *id);
            }
        }
        let mut flushed = BTreeSet::new();
        while !remotes.is_empty() && !is_over() {
            self.engine.progress();
            while let Some((id, result)) = self.engine.take_ended() {
                if remotes.remove(&id) && result.is_ok() {
                    flushed.insert(id);
                }
            }
        }
        flushed
    }

    /// False if the remote cannot be told: it has not said by which secret it knows this side.
    fn say_farewell(&mut self, id: RemoteId) -> bool {
        let Some(remote) = self.remotes.get(id) else { return false };
        let Some(parting) = remote.their_parting else { return false };
        let farewell = message::header(Kind::Farewell, parting);
        self.engine.send(remote.endpoint, farewell, Bytes::new()).is_ok()
    }

    /// A remote has said farewell: as good as the end of its process.
    pub(crate) fn on_farewell(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get_mut(id) else { return };
        if let Life::Watched(process) = std::mem::replace(&mut remote.life, Life::Dead) {
            self.watch.remove(&process);
        }
        self.break_off(id);
    }
}

fn after(limit: Duration) -> impl Fn() -> bool {
    let begun = Instant::now();
    move || begun.elapsed() >= limit
}

#[cfg(test)]
mod tests {
    use kv_core::{PeerId, Transport, TransportEvent, WayEnd};

    use super::*;
    use crate::ending::tests::{PEER, Pair, side, write_much};
    use crate::library::Ucx;

    /// Polls until the end of the peer has been told.
    fn until_gone(side: &mut UcxTransport) -> Vec<TransportEvent> {
        let (mut events, begun) = (Vec::new(), Instant::now());
        while !matches!(events.last(), Some(TransportEvent::PeerGone { .. })) {
            assert!(begun.elapsed() < Duration::from_secs(60), "no end of the peer: {}", events.len());
            side.poll(clock::now(), &mut events);
        }
        events
    }

    /// What went wrong when a transport was dropped, and how long the drop took; `None` without UCX.
    type Attempt = Option<(Duration, Result<(), String>)>;

    /// Tries again where it went wrong and the drop took `limit`, or longer: others have used the processor up.
    fn in_time(limit: Duration, attempt: impl Fn() -> Attempt) {
        for more in (0..20).rev() {
            let Some((took, Err(wrong))) = attempt() else { return };
            assert!(took >= limit && more > 0, "after {took:?}: {wrong}");
        }
    }

    /// How long the drop of a transport takes.
    fn timed_drop(side: UcxTransport) -> Duration {
        let begun = Instant::now();
        drop(side);
        begun.elapsed()
    }

    fn drop_with_frames(len: usize) -> Attempt {
        let mut pair = Pair::new()?;
        pair.connect(0);
        pair.connect(1);
        pair.send(0, 1);
        pair.send(1, 1);
        let frames: Vec<Bytes> = (1..=3).map(|byte| vec![byte; len].into()).collect();
        let Pair { sides: [mut drops, mut stays], arena: _arena, .. } = pair;
        frames.iter().for_each(|frame| drops.send(PEER, frame.clone()).unwrap());
        let (events, took) = std::thread::scope(|scope| {
            let drops = scope.spawn(move || timed_drop(drops));
            (until_gone(&mut stays), drops.join().unwrap())
        });
        let heard = events.iter().filter_map(|event| match event {
            TransportEvent::Frame { frame, .. } => Some(frame.clone()),
            _ => None,
        });
        let dead = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
        let (all, last) = (heard.collect::<Vec<_>>() == frames, events.last());
        let is_right = all && last == Some(&dead) && events.len() == 4;
        let wrong =
            || format!("{} events, the last {last:?}; all frames of {len} bytes: {all}", events.len());
        Some((took, is_right.then_some(()).ok_or_else(wrong)))
    }

    #[test]
    fn all_frames_that_a_dropped_transport_has_taken_arrive_and_then_its_death() {
        for len in [100, 60_000, 1 << 20] {
            in_time(WORDS, || drop_with_frames(len));
        }
    }

    #[test]
    fn a_dropped_transport_whose_writes_are_under_way_proves_nothing() {
        let Some(mut pair) = Pair::new() else { return };
        pair.connect(0);
        pair.connect(1);
        pair.send(0, 1);
        pair.send(1, 1);
        let Pair { sides: [mut drops, mut stays], arena: _arena, .. } = pair;
        write_much(&mut drops);
        drop(drops);
        let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
        assert_eq!(until_gone(&mut stays), [lost]);
    }

    fn drop_with_a_stuck_peer() -> Attempt {
        const OTHER: PeerId = PeerId(2);
        let mut pair = Pair::new()?;
        pair.connect(0);
        pair.send(0, 1);
        let mut other = side(Ucx::load(None).unwrap(), &pair.sides[1].config.clone(), &pair.arena);
        let Pair { sides: [mut drops, _stuck], arena: _arena, .. } = pair;
        drops.connect(OTHER, &other.metadata().unwrap()).unwrap();
        other.connect(PEER, &drops.metadata().unwrap()).unwrap();
        let frame = Bytes::from_static(b"a frame");
        drops.send(OTHER, frame.clone()).unwrap();
        other.send(PEER, frame).unwrap();
        let (mut events, begun) = ([Vec::new(), Vec::new()], Instant::now());
        while events.iter().any(Vec::is_empty) {
            assert!(begun.elapsed() < Duration::from_secs(30), "not connected");
            drops.poll(clock::now(), &mut events[0]);
            other.poll(clock::now(), &mut events[1]);
        }
        write_much(&mut drops);
        // The way itself ends later: a death is not told while this process leaves bytes unread, as the stuck one does.
        let (hears, took) = std::thread::scope(|scope| {
            let drops = scope.spawn(move || timed_drop(drops));
            let begun = Instant::now();
            loop {
                other.poll(clock::now(), &mut Vec::new());
                // Without a farewell, the remote may be gone by now.
                let remote = other.remotes.all().next().map(|(_, remote)| remote);
                if remote.is_none_or(|remote| !remote.is_standing()) {
                    let hears = remote.is_some_and(|remote| matches!(remote.life, Life::Dead));
                    break (hears, drops.join().unwrap());
                }
                assert!(begun.elapsed() < Duration::from_secs(30), "no end of the peer");
            }
        });
        Some((took, hears.then_some(()).ok_or_else(|| "no farewell".to_owned())))
    }

    #[test]
    fn a_peer_that_takes_nothing_takes_no_farewell_from_the_others() {
        in_time(WORDS + FLUSH, drop_with_a_stuck_peer);
    }
}
