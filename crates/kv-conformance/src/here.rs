//! A worker here whose partner is elsewhere.

use std::time::{Duration, Instant};

use kv_core::{Op, PeerId, Transport, TransportEvent, WayEnd};

use crate::other::whole;
use crate::pair::ended;
use crate::{Harness, Job, Other, Side, rest};

/// A worker here, and what was reported to it.
pub(crate) struct Here<'a, H: Harness> {
    harness: &'a H,
    pub(crate) side: Side<H::Transport>,
    pub(crate) events: Vec<TransportEvent>,
}

impl<H: Harness> Here<'_, H> {
    /// A worker of the length of those elsewhere.
    pub(crate) fn new(harness: &H) -> Here<'_, H> {
        Here { harness, side: harness.worker(&[H::FAR_LEN]), events: Vec::new() }
    }

    /// A partner for it.
    pub(crate) fn other(&self, job: Job) -> H::Other {
        self.harness.other(job, &self.side.transport.metadata().unwrap())
    }

    /// Polls it once, and lets the others work.
    pub(crate) fn turn(&mut self, others: &mut [&mut H::Other]) {
        self.side.transport.poll(self.harness.now(), &mut self.events);
        for other in others {
            other.turn();
        }
    }

    /// Works until `done`.
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
                // What changes without a word is looked for as well.
                rest(&self.side.transport, Duration::from_millis(2));
            }
        }
    }

    /// Works for this long, in the transports' time.
    pub(crate) fn pass(&mut self, others: &mut [&mut H::Other], span: Duration) {
        let begun = self.harness.now();
        while self.harness.now().since(begun) < span {
            self.turn(others);
        }
    }

    /// Works until a peer's death is reported; how long its writes may still arrive.
    pub(crate) fn until_gone(&mut self, others: &mut [&mut H::Other], peer: PeerId) -> Duration {
        self.until(others, "the end of a killed peer", |events, _| gone(events, peer).is_some());
        gone(&self.events, peer).unwrap()
    }

    /// One post to its end, which must be good.
    pub(crate) fn run(&mut self, others: &mut [&mut H::Other], peer: PeerId, id: u64, op: Op) {
        let post = whole(id, op, H::FAR_LEN);
        let post_id = post.id;
        self.side.transport.post(peer, post).unwrap();
        self.until(others, "a post", |events, _| ended(events, post_id).is_some());
        assert_eq!(ended(&self.events, post_id), Some(Ok(())), "{op:?}");
    }
}

/// How long after its death a peer's writes may arrive, once its death was reported.
pub(crate) fn gone(events: &[TransportEvent], wanted: PeerId) -> Option<Duration> {
    events.iter().find_map(|event| match event {
        TransportEvent::PeerGone { peer, end: WayEnd::Dead { quiet_after } } if *peer == wanted => {
            Some(*quiet_after)
        }
        _ => None,
    })
}

/// The directions to check.
pub(crate) fn ops<H: Harness>(harness: &H) -> Vec<Op> {
    if harness.reads() { vec![Op::Write, Op::Read] } else { vec![Op::Write] }
}
