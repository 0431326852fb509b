//! A worker in the test's process whose partner is elsewhere.

use std::time::{Duration, Instant};

use kv_core::{Op, PeerId, Transport, TransportEvent, WayEnd};

use crate::other::whole;
use crate::pair::ended;
use crate::sys::MOMENT;
use crate::{Harness, Job, Other, Side, pattern, rest, snapshot};

/// A worker here, and the events that it was told.
pub(crate) struct Here<'a, H: Harness> {
    harness: &'a H,
    pub(crate) side: Side<H::Transport>,
    pub(crate) events: Vec<TransportEvent>,
}

impl<H: Harness> Here<'_, H> {
    /// A worker with one region, as long as the regions of workers elsewhere.
    pub(crate) fn new(harness: &H) -> Here<'_, H> {
        Here { harness, side: harness.worker(&[H::FAR_LEN]), events: Vec::new() }
    }

    /// Starts a partner elsewhere for this worker.
    pub(crate) fn other(&self, job: Job) -> H::Other {
        self.harness.other(job, &self.side.transport.metadata().unwrap())
    }

    /// Polls this worker once, and lets the others work for a moment.
    pub(crate) fn turn(&mut self, others: &mut [&mut H::Other]) {
        self.side.transport.poll(self.harness.now(), &mut self.events);
        for other in others {
            other.turn();
        }
    }

    /// Works until `done` returns true. Panics with `what` if that takes longer than the harness's patience.
    pub(crate) fn until(
        &mut self,
        others: &mut [&mut H::Other],
        what: &str,
        done: impl Fn(&[TransportEvent], &Side<H::Transport>) -> bool,
    ) {
        let deadline = Instant::now() + self.harness.patience();
        while !done(&self.events, &self.side) {
            assert!(Instant::now() < deadline, "{what}: {} events", self.events.len());
            self.turn(others);
            if !done(&self.events, &self.side) {
                rest(&self.side.transport, MOMENT);
            }
        }
    }

    /// Works for the time `span`, in the transports' time.
    pub(crate) fn pass(&mut self, others: &mut [&mut H::Other], span: Duration) {
        let begun = self.harness.now();
        while self.harness.now().since(begun) < span {
            self.turn(others);
            rest(&self.side.transport, MOMENT);
        }
    }

    /// Works until a peer's death is reported. Returns how long the peer's writes may still arrive.
    pub(crate) fn until_gone(&mut self, others: &mut [&mut H::Other], peer: PeerId) -> Duration {
        self.until(others, "the end of a killed peer", |events, _| gone(events, peer).is_some());
        gone(&self.events, peer).unwrap()
    }

    /// Works until a partner that writes into this worker's region is in the middle of that: its pattern shows there.
    pub(crate) fn until_written_to(&mut self, other: &mut H::Other) {
        let mark = pattern(H::FAR_LEN)[H::FAR_LEN / 2..][..8].to_vec();
        self.until(&mut [other], "its writes", |_, side| {
            let mut word = [0; 8];
            side.memory.read(0, H::FAR_LEN / 2, &mut word);
            word[..] == mark[..]
        });
    }

    /// Panics if anything is written into the region here once `quiet_after` has passed.
    pub(crate) fn stays_quiet(&mut self, quiet_after: Duration) {
        self.pass(&mut [], quiet_after);
        self.side.memory.write(0, 0, &vec![0xee; H::FAR_LEN]);
        self.pass(&mut [], Duration::from_millis(100));
        let memory = snapshot(&self.side);
        assert!(memory[0].iter().all(|byte| *byte == 0xee), "written after {quiet_after:?} have passed");
    }

    /// Posts the whole region, and works until the post has ended without an error.
    pub(crate) fn run(&mut self, others: &mut [&mut H::Other], peer: PeerId, id: u64, op: Op) {
        let post = whole(id, op, H::FAR_LEN);
        let post_id = post.id;
        self.side.transport.post(peer, post).unwrap();
        self.until(others, "a post", |events, _| ended(events, post_id).is_some());
        assert_eq!(ended(&self.events, post_id), Some(Ok(())), "{op:?}");
    }
}

/// How long a peer's writes may still arrive, if the events tell its death.
pub(crate) fn gone(events: &[TransportEvent], wanted: PeerId) -> Option<Duration> {
    events.iter().find_map(|event| match event {
        TransportEvent::PeerGone { peer, end: WayEnd::Dead { quiet_after } } if *peer == wanted => {
            Some(*quiet_after)
        }
        _ => None,
    })
}

/// The directions to check: write, and read if the transport can.
pub(crate) fn ops<H: Harness>(harness: &H) -> Vec<Op> {
    if harness.reads() { vec![Op::Write, Op::Read] } else { vec![Op::Write] }
}
